//! Qwen3, and the text tower of Qwen3-VL: pre-norm decoder, grouped-query attention with per-head q/k norms, SwiGLU.
//!
//! Qwen3-VL turns by three position streams (time, height, width), interleaved over the frequencies; for text they are equal.

use super::{
    Family, Programs, no_media,
    qwen_vision::{self, QwenVision},
};
use crate::{
    Config, ForgeError,
    pen::{Kv, Pen, Written},
    precision::{Precision, StoredTensors},
    rotary::{RopeConfig, interleaved_streams},
    rotate::Rotations,
};
use qhx_ir::{Activation::Silu, Mask, Rotary};

pub(super) const FAMILY: Family = Family { name: "Qwen3", model_types: &["qwen3"], drafters: &[], write: write_qwen3, media: no_media };
pub(super) const VL_FAMILY: Family = Family {
    name: "Qwen3-VL",
    model_types: &["qwen3_vl", "qwen3_vl_text"],
    drafters: &[],
    write: write_qwen3_vl,
    media: qwen_vision::media,
};

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
            vocabulary: c.vocabulary("vocab_size")?,
            hidden,
            layers: c.repeats("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            ffn: c.size("intermediate_size")?,
            eps: c.number("rms_norm_eps")?,
            tied: top.flag_or("tie_word_embeddings", c.flag_or("tie_word_embeddings", false)?)?,
            context: c.length_if_any("max_position_embeddings")?.unwrap_or(32768),
            rotary: RopeConfig::of(c).plain(head_dim)?,
        })
    }
}

fn write_qwen3(config: Config<'_>, precision: Precision, tensors: &dyn StoredTensors) -> Result<Programs, ForgeError> {
    let c = Qwen3::read(config, config)?;
    let m = Pen::new("text", precision, tensors, &["model."], "embed_tokens.weight");
    text(&c, &m, false, None);
    finish(&c, vec![m.finish()?])
}

fn write_qwen3_vl(config: Config<'_>, precision: Precision, tensors: &dyn StoredTensors) -> Result<Programs, ForgeError> {
    let section = config.section_or_self("text_config");
    let mut c = Qwen3::read(section, config)?;
    let parameters = RopeConfig::of(section).parameters()?;
    let sections = parameters.counts_if_any("mrope_section")?.unwrap_or_default();
    let [time, height, width] = sections[..] else {
        return Err(parameters.error("mrope_section", "must be three numbers"));
    };
    if time + height + width != c.head_dim / 2 {
        return Err(parameters.error("mrope_section", format!("must add up to half the head size ({})", c.head_dim / 2)));
    }
    c.rotary.streams = interleaved_streams([time, height, width], c.head_dim / 2);
    let m = Pen::new("text", precision, tensors, &["model.language_model.", "model."], "embed_tokens.weight");
    let tower = QwenVision::read(config, tensors, c.hidden)?;
    if let Some(tower) = tower.as_ref().filter(|tower| tower.deepstack.len() > c.layers) {
        let reason = format!("has {} entries for {} text layers", tower.deepstack.len(), c.layers);
        return Err(config.section_or_self("vision_config").error("deepstack_visual_indexes", reason));
    }
    text(&c, &m, true, tower.as_ref());
    let mut programs = vec![m.finish()?];
    if let Some(tower) = tower {
        programs.push(tower.write(precision, tensors)?);
    }
    finish(&c, programs)
}

/// The decoder, the same for both. With a tower its rows take the place of embeddings, and its deepstack rows are added after the first layers.
fn text(c: &Qwen3, m: &Pen<'_>, mrope: bool, tower: Option<&QwenVision>) {
    m.rotary("rope", c.rotary.clone());
    let ids = m.ids();
    let positions = if mrope { m.mrope_positions() } else { m.positions() };
    let mut soft_rows_at = None;
    let mut x = m.stage("embed", "", || {
        let x = m.embed("embed_tokens", &ids, c.vocabulary, c.hidden, 1.0);
        if tower.is_none() {
            return x;
        }
        let (x, at) = m.soft_rows(&x);
        soft_rows_at = Some(at);
        x
    });
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
            let x = m.add(&x, &m.linear("mlp.down_proj", &m.gate(&gate, &up, Silu), c.hidden));
            match (&soft_rows_at, tower) {
                (Some(at), Some(tower)) if n < tower.deepstack.len() => m.deepstack_rows(&x, at, n),
                _ => x,
            }
        });
    }
    let logits = m.stage("lm_head", "", || {
        let h = m.rms_norm("norm", &m.wanted_rows(&x), c.eps);
        if c.tied { m.tied_head("embed_tokens", &h, c.vocabulary) } else { m.head("lm_head", &h, c.vocabulary, false) }
    });
    m.output("logits", &logits);
}

fn finish(c: &Qwen3, programs: Vec<Written>) -> Result<Programs, ForgeError> {
    let text_only = programs.len() == 1;
    let ignored = move |tensor: &str| tensor.starts_with("lm_head.") || (text_only && tensor.starts_with("model.visual."));
    let ignored = Box::new(ignored);
    Ok(Programs {
        programs,
        draft: None,
        vocabulary: c.vocabulary,
        hidden: c.hidden,
        context: c.context,
        rotations: Rotations::default(),
        ignored,
    })
}
