//! Llama: pre-norm decoder, grouped-query attention with rotary positions, SwiGLU.

use super::{Family, Programs, no_media};
use crate::{
    Config, ForgeError,
    pen::{Kv, Pen},
    precision::{Precision, StoredTensors},
    rotary::RopeConfig,
    rotate::Rotations,
};
use qhx_ir::{Activation::Silu, Mask, Rotary};

pub(super) const FAMILY: Family = Family { name: "Llama", model_types: &["llama"], drafters: &[], write, media: no_media };

struct Llama {
    vocabulary: usize,
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    eps: f64,
    attention_bias: bool,
    mlp_bias: bool,
    tied: bool,
    rotary: Rotary,
}

impl Llama {
    fn read(c: Config<'_>) -> Result<Self, ForgeError> {
        c.only("hidden_act", &["silu".into()])?;
        let (hidden, heads) = (c.size("hidden_size")?, c.size("num_attention_heads")?);
        let kv_heads = c.size_if_any("num_key_value_heads")?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(c.error("num_key_value_heads", format!("({kv_heads}) must divide num_attention_heads ({heads})")));
        }
        let head_dim = c.size_if_any("head_dim")?.unwrap_or(hidden / heads);
        Ok(Self {
            vocabulary: c.vocabulary("vocab_size")?,
            hidden,
            layers: c.repeats("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            ffn: c.size("intermediate_size")?,
            eps: c.number("rms_norm_eps")?,
            attention_bias: c.flag_or("attention_bias", false)?,
            mlp_bias: c.flag_or("mlp_bias", false)?,
            tied: c.flag_or("tie_word_embeddings", false)?,
            rotary: RopeConfig::of(c).plain(head_dim)?,
        })
    }
}

fn write(config: Config<'_>, precision: Precision, tensors: &dyn StoredTensors) -> Result<Programs, ForgeError> {
    let c = Llama::read(config)?;
    let m = Pen::new("text", precision, tensors, &["model."], "embed_tokens.weight");
    m.rotary("rope", c.rotary.clone());
    let (ids, positions) = (m.ids(), m.positions());
    let mut x = m.stage("embed", "", || m.embed("embed_tokens", &ids, c.vocabulary, c.hidden, 1.0));
    for n in 0..c.layers {
        let (layer, slot) = (format!("layers.{n}"), format!("layers.{n}.kv"));
        x = m.stage(format!("{layer}.attn"), &layer, || {
            let h = m.rms_norm("input_layernorm", &x, c.eps);
            let project = |name: &str, heads: usize| m.heads(&m.linear_bias(name, &h, heads * c.head_dim, c.attention_bias), heads);
            let q = m.rope(&project("self_attn.q_proj", c.heads), &positions, "rope");
            let k = m.rope(&project("self_attn.k_proj", c.kv_heads), &positions, "rope");
            let v = project("self_attn.v_proj", c.kv_heads);
            let a = m.attend(&q, Kv::Own(&slot, &k, &v), Mask::Causal, (c.head_dim as f32).powf(-0.5));
            m.add(&x, &m.linear_bias("self_attn.o_proj", &m.flatten(&a), c.hidden, c.attention_bias))
        });
        x = m.stage(format!("{layer}.ffn"), &layer, || {
            let h = m.rms_norm("post_attention_layernorm", &x, c.eps);
            let gate = m.linear_bias("mlp.gate_proj", &h, c.ffn, c.mlp_bias);
            let up = m.linear_bias("mlp.up_proj", &h, c.ffn, c.mlp_bias);
            m.add(&x, &m.linear_bias("mlp.down_proj", &m.gate(&gate, &up, Silu), c.hidden, c.mlp_bias))
        });
    }
    let logits = m.stage("lm_head", "", || {
        let h = m.rms_norm("norm", &m.wanted_rows(&x), c.eps);
        if c.tied { m.tied_head("embed_tokens", &h, c.vocabulary) } else { m.head("lm_head", &h, c.vocabulary, false) }
    });
    m.output("logits", &logits);
    Ok(Programs {
        programs: vec![m.finish()?],
        vocabulary: c.vocabulary,
        hidden: c.hidden,
        context: config.length_if_any("max_position_embeddings")?.unwrap_or(2048),
        draft: None,
        rotations: Rotations::default(),
        ignored: Box::new(|tensor| tensor.starts_with("lm_head.") || tensor.ends_with(".rotary_emb.inv_freq")),
    })
}
