//! Qwen3, and the text tower of Qwen3-VL: pre-norm decoder, grouped-query attention with per-head q/k norms, SwiGLU.
//!
//! Qwen3-VL turns by three position streams (time, height, width), interleaved over the frequencies; for text they are equal.

use super::{Family, Programs};
use crate::{
    Config, ForgeError,
    model::{Kv, Model},
    precision::{Precision, StoredTensors},
    rotary::{RopeConfig, interleaved_streams},
};
use qhx_ir::{Activation::Silu, Mask, Rotary};

pub(super) const FAMILY: Family = Family { name: "Qwen3", model_types: &["qwen3"], write: write_qwen3 };
pub(super) const VL_FAMILY: Family = Family { name: "Qwen3-VL", model_types: &["qwen3_vl", "qwen3_vl_text"], write: write_qwen3_vl };

struct Qwen3 {
    vocabulary: usize,
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    eps: f64,
    tied: bool,
    context: usize,
    rotary: Rotary,
}

impl Qwen3 {
    /// `c` is the text section; `tied` may stand there or at the top.
    fn read(c: Config<'_>, top: Config<'_>) -> Result<Self, ForgeError> {
        c.only("hidden_act", &["silu".into()])?;
        c.only("attention_bias", &[false.into()])?;
        c.only("use_sliding_window", &[false.into()])?;
        let (hidden, heads, kv_heads) = (c.size("hidden_size")?, c.size("num_attention_heads")?, c.size("num_key_value_heads")?);
        if heads % kv_heads != 0 {
            return Err(c.error("num_key_value_heads", format!("({kv_heads}) must divide num_attention_heads ({heads})")));
        }
        let head_dim = c.size_if_any("head_dim")?.unwrap_or(128);
        Ok(Self {
            vocabulary: c.size("vocab_size")?,
            hidden,
            layers: c.size("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            ffn: c.size("intermediate_size")?,
            eps: c.number("rms_norm_eps")?,
            tied: top.flag_or("tie_word_embeddings", c.flag_or("tie_word_embeddings", false)?)?,
            context: c.size_if_any("max_position_embeddings")?.unwrap_or(32768),
            rotary: RopeConfig::of(c).plain(head_dim)?,
        })
    }
}

fn write_qwen3(config: Config<'_>, precision: Precision, tensors: &dyn StoredTensors) -> Result<Programs, ForgeError> {
    let c = Qwen3::read(config, config)?;
    let m = Model::new("text", precision, tensors, &["model."], "embed_tokens.weight");
    text(&c, &m, false);
    finish(&c, m)
}

fn write_qwen3_vl(config: Config<'_>, precision: Precision, tensors: &dyn StoredTensors) -> Result<Programs, ForgeError> {
    let section = config.section_or_self("text_config");
    let mut c = Qwen3::read(section, config)?;
    let parameters = RopeConfig::of(section).parameters()?;
    let sections = parameters.numbers_if_any("mrope_section")?.unwrap_or_default();
    let [time, height, width] = sections[..] else {
        return Err(parameters.error("mrope_section", "must be three numbers"));
    };
    if (time + height + width) as usize != c.head_dim / 2 {
        return Err(parameters.error("mrope_section", format!("must add up to half the head size ({})", c.head_dim / 2)));
    }
    c.rotary.streams = interleaved_streams([time as usize, height as usize, width as usize], c.head_dim / 2);
    let m = Model::new("text", precision, tensors, &["model.language_model.", "model."], "embed_tokens.weight");
    text(&c, &m, true);
    finish(&c, m)
}

/// The decoder, the same for both.
fn text(c: &Qwen3, m: &Model<'_>, mrope: bool) {
    m.rotary("rope", c.rotary.clone());
    let ids = m.ids();
    let positions = if mrope { m.mrope_positions() } else { m.positions() };
    let mut x = m.stage("embed", "", || m.embed("embed_tokens", &ids, c.vocabulary, c.hidden, 1.0));
    for n in 0..c.layers {
        let (layer, slot) = (format!("layers.{n}"), format!("layers.{n}.kv"));
        x = m.stage(format!("{layer}.attn"), &layer, || {
            let h = m.rms_norm("input_layernorm", &x, c.eps);
            let project = |name: &str, heads: usize| m.heads(&m.linear(name, &h, heads * c.head_dim), heads);
            let q = m.rms_norm("self_attn.q_norm", &project("self_attn.q_proj", c.heads), c.eps);
            let k = m.rms_norm("self_attn.k_norm", &project("self_attn.k_proj", c.kv_heads), c.eps);
            let v = project("self_attn.v_proj", c.kv_heads);
            let (q, k) = (m.rope(&q, &positions, "rope"), m.rope(&k, &positions, "rope"));
            let a = m.attend(&q, Kv::Own(&slot, &k, &v), Mask::Causal, (c.head_dim as f32).powf(-0.5));
            m.add(&x, &m.linear("self_attn.o_proj", &m.flatten(&a), c.hidden))
        });
        x = m.stage(format!("{layer}.ffn"), &layer, || {
            let h = m.rms_norm("post_attention_layernorm", &x, c.eps);
            let (gate, up) = (m.linear("mlp.gate_proj", &h, c.ffn), m.linear("mlp.up_proj", &h, c.ffn));
            m.add(&x, &m.linear("mlp.down_proj", &m.gate(&gate, &up, Silu), c.hidden))
        });
    }
    let logits = m.stage("lm_head", "", || {
        let h = m.rms_norm("norm", &m.wanted_rows(&x), c.eps);
        if c.tied { m.tied_head("embed_tokens", &h, c.vocabulary) } else { m.head("lm_head", &h, c.vocabulary, false) }
    });
    m.output("logits", &logits);
}

fn finish(c: &Qwen3, m: Model<'_>) -> Result<Programs, ForgeError> {
    let ignored = |tensor: &str| tensor.starts_with("lm_head.") || tensor.starts_with("model.visual.");
    Ok(Programs { programs: vec![m.finish()?], vocabulary: c.vocabulary, hidden: c.hidden, context: c.context, ignored })
}
