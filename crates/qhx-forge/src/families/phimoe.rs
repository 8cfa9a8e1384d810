//! PhiMoE: pre-norm decoder with biased layer norms and projections, and in each layer a mixture of experts chosen by sparsemixer.
//!
//! LongRoPE as transformers computes it: the short factors always; beyond the original length another amplitude, for all rows of the text.

use super::{Family, Programs, no_media};
use crate::{
    Config, ForgeError,
    pen::{Kv, Pen},
    precision::{Precision, StoredTensors},
    rotary::{RopeConfig, frequencies, one_block},
    rotate::Rotations,
};
use qhx_ir::{Activation::Silu, Mask, Rotary, RotaryVariant, Routing};

pub(super) const FAMILY: Family = Family { name: "PhiMoE", model_types: &["phimoe"], drafters: &[], write, media: no_media };

struct PhiMoe {
    vocabulary: usize,
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    experts: usize,
    jitter: f64,
    eps: f64,
    attention_bias: bool,
    head_bias: bool,
    context: usize,
    mask: Mask,
    rotary: Rotary,
    /// Total lengths at which the rotary changes.
    epochs: Vec<usize>,
}

impl PhiMoe {
    fn read(c: Config<'_>) -> Result<Self, ForgeError> {
        c.only("hidden_act", &["silu".into()])?;
        c.only("num_experts_per_tok", &[2.into()])?;
        c.only("tie_word_embeddings", &[false.into()])?;
        let (hidden, heads) = (c.size("hidden_size")?, c.size("num_attention_heads")?);
        let kv_heads = c.size_if_any("num_key_value_heads")?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(c.error("num_key_value_heads", format!("({kv_heads}) must divide num_attention_heads ({heads})")));
        }
        let experts = c.repeats("num_local_experts")?;
        if experts < 2 {
            return Err(c.error("num_local_experts", "must be at least 2, for two are chosen"));
        }
        let head_dim = c.size_if_any("head_dim")?.unwrap_or(hidden / heads);
        let context = c.length("max_position_embeddings")?;
        let (rotary, epochs) = rotary(c, head_dim)?;
        Ok(Self {
            vocabulary: c.vocabulary("vocab_size")?,
            hidden,
            layers: c.repeats("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            ffn: c.size("intermediate_size")?,
            experts,
            jitter: c.number("router_jitter_noise")?,
            eps: c.number("rms_norm_eps")?,
            attention_bias: c.flag_or("attention_bias", false)?,
            head_bias: c.flag_or("lm_head_bias", false)?,
            context,
            mask: match c.length_if_any("sliding_window")? {
                Some(window) if window < context => Mask::Window(window),
                _ => Mask::Causal,
            },
            rotary,
            epochs,
        })
    }
}

fn rotary(c: Config<'_>, head_dim: usize) -> Result<(Rotary, Vec<usize>), ForgeError> {
    let rope = RopeConfig::of(c);
    if rope.kind()? != "longrope" {
        return Ok((rope.plain(head_dim)?, Vec::new()));
    }
    let parameters = rope.parameters()?;
    let factors = parameters.numbers_if_any("short_factor")?.unwrap_or_default();
    if factors.len() != head_dim / 2 || factors.iter().any(|&f| f <= 0.0) {
        return Err(parameters.error("short_factor", format!("must be {} numbers above 0, found {}", head_dim / 2, factors.len())));
    }
    let original = match parameters.length_if_any("original_max_position_embeddings")? {
        Some(length) => length,
        None => c.length("original_max_position_embeddings")?,
    };
    let inv_freq: Vec<f32> = frequencies(rope.theta()?, head_dim).iter().zip(factors).map(|(f, factor)| f / factor as f32).collect();
    let mut rotary = one_block(head_dim, inv_freq.clone(), parameters.number("short_mscale")? as f32);
    rotary.variants.push(RotaryVariant { inv_freq, amplitude: parameters.number("long_mscale")? as f32 });
    Ok((rotary, vec![original]))
}

fn write(config: Config<'_>, precision: Precision, tensors: &dyn StoredTensors) -> Result<Programs, ForgeError> {
    let c = PhiMoe::read(config)?;
    let m = Pen::new("text", precision, tensors, &["model."], "embed_tokens.weight");
    m.rotary("rope", c.rotary.clone());
    m.epochs(&c.epochs);
    let (ids, positions) = (m.ids(), m.positions());
    let mut x = m.stage("embed", "", || m.embed("embed_tokens", &ids, c.vocabulary, c.hidden, 1.0));
    for n in 0..c.layers {
        let (layer, slot) = (format!("layers.{n}"), format!("layers.{n}.kv"));
        x = m.stage(format!("{layer}.attn"), &layer, || {
            let h = m.layer_norm("input_layernorm", &x, c.eps, true);
            let project = |name: &str, heads: usize| m.heads(&m.linear_bias(name, &h, heads * c.head_dim, c.attention_bias), heads);
            let q = m.rope(&project("self_attn.q_proj", c.heads), &positions, "rope");
            let k = m.rope(&project("self_attn.k_proj", c.kv_heads), &positions, "rope");
            let v = project("self_attn.v_proj", c.kv_heads);
            let a = m.attend(&q, Kv::Own(&slot, &k, &v), c.mask, (c.head_dim as f32).powf(-0.5));
            m.add(&x, &m.linear_bias("self_attn.o_proj", &m.flatten(&a), c.hidden, c.attention_bias))
        });
        x = m.stage(format!("{layer}.moe"), &layer, || {
            let h = m.layer_norm("post_attention_layernorm", &x, c.eps, true);
            let scores = m.router("block_sparse_moe.gate", &h, c.experts);
            let chosen = m.route("route", &scores, Routing::SparseMixer { jitter: c.jitter as f32 });
            let experts = m.experts(&h, &chosen, c.experts, c.ffn, Silu, "block_sparse_moe.experts", ["w1", "w3", "w2"]);
            m.add(&x, &experts)
        });
    }
    let logits = m.stage("lm_head", "", || {
        let h = m.layer_norm("norm", &m.wanted_rows(&x), c.eps, true);
        m.head("lm_head", &h, c.vocabulary, c.head_bias)
    });
    m.output("logits", &logits);
    let ignored = Box::new(|_: &str| false);
    Ok(Programs {
        programs: vec![m.finish()?],
        vocabulary: c.vocabulary,
        hidden: c.hidden,
        context: c.context,
        draft: None,
        rotations: Rotations::default(),
        ignored,
    })
}
