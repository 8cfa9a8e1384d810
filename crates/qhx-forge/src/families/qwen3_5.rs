//! Qwen3.5: a hybrid decoder. Most layers mix rows by a gated delta rule over short-convolved queries, keys and values; every fourth by
//! softmax attention whose output is gated per number. Norms are zero-centred (they multiply by 1 + w), but for the one inside the delta mixer.
//!
//! Its multi-token prediction is a program of its own: from the normed row of a token and the embedding of the next, one more layer of attention predicts the token after that. The table, the
//! output head and the text's final norm are shared.

use super::{
    Family, Programs,
    qwen_vision::{self, QwenVision},
};
use crate::{
    Config, ForgeError,
    pen::{Kv, Pen, Value, Written},
    precision::{Precision, StoredTensors},
    rotary::{RopeConfig, interleaved_streams},
    rotate::Rotations,
};
use qhx_bundle::manifest::DraftEntry;
use qhx_ir::{
    Activation::{Sigmoid, Silu},
    Mask, Rotary,
};

pub(super) const FAMILY: Family =
    Family { name: "Qwen3.5", model_types: &["qwen3_5", "qwen3_5_text"], drafters: &[], write, media: qwen_vision::media };

const ROOTS: [&str; 2] = ["model.language_model.", "model."];
/// The program of multi-token prediction, and what the names of its tensors begin with.
const PREDICTION: (&str, &str) = ("mtp", "mtp.");

struct Qwen35 {
    vocabulary: usize,
    hidden: usize,
    /// Per layer: whether it mixes by softmax attention.
    attention: Vec<bool>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    delta: Delta,
    ffn: usize,
    eps: f64,
    tied: bool,
    context: usize,
    rotary: Rotary,
    /// Whether the checkpoint has a layer for multi-token prediction.
    predicts: bool,
}

/// Sizes of the delta mixer.
struct Delta {
    key_heads: usize,
    key_dim: usize,
    value_heads: usize,
    value_dim: usize,
    kernel: usize,
}

impl Qwen35 {
    /// `c` is the text section; `tie_word_embeddings` may stand there or at the top.
    fn read(c: Config<'_>, top: Config<'_>) -> Result<Self, ForgeError> {
        c.only("hidden_act", &["silu".into()])?;
        c.only("attention_bias", &[false.into()])?;
        c.only("attn_output_gate", &[true.into()])?;
        let (heads, kv_heads, head_dim) = (c.size("num_attention_heads")?, c.size("num_key_value_heads")?, c.size("head_dim")?);
        if heads % kv_heads != 0 {
            return Err(c.error("num_key_value_heads", format!("({kv_heads}) must divide num_attention_heads ({heads})")));
        }
        let delta = Delta {
            key_heads: c.size("linear_num_key_heads")?,
            key_dim: c.size("linear_key_head_dim")?,
            value_heads: c.size("linear_num_value_heads")?,
            value_dim: c.size("linear_value_head_dim")?,
            kernel: c.kernel("linear_conv_kernel_dim")?,
        };
        if delta.value_heads % delta.key_heads != 0 || delta.kernel < 2 {
            return Err(c.error("linear_num_value_heads", "must be a multiple of linear_num_key_heads (and the kernel at least 2)"));
        }
        Ok(Self {
            vocabulary: c.vocabulary("vocab_size")?,
            hidden: c.size("hidden_size")?,
            attention: attention_layers(c)?,
            heads,
            kv_heads,
            head_dim,
            delta,
            ffn: c.size("intermediate_size")?,
            eps: c.number("rms_norm_eps")?,
            tied: top.flag_or("tie_word_embeddings", c.flag_or("tie_word_embeddings", false)?)?,
            context: c.length("max_position_embeddings")?,
            rotary: rotary(c, head_dim)?,
            // Other forms of it were never published; their tensors are left out.
            predicts: c.count_or("mtp_num_hidden_layers", 0)? == 1 && !c.flag_or("mtp_use_dedicated_embeddings", false)?,
        })
    }
}

fn attention_layers(c: Config<'_>) -> Result<Vec<bool>, ForgeError> {
    let layers = c.repeats("num_hidden_layers")?;
    let Some(types) = c.texts_if_any("layer_types")? else {
        let interval = c.size_if_any("full_attention_interval")?.unwrap_or(4);
        return Ok((0..layers).map(|n| (n + 1) % interval == 0).collect());
    };
    if types.len() != layers {
        return Err(c.error("layer_types", format!("has {} entries for {layers} layers", types.len())));
    }
    let is_attention = |kind: &&str| match *kind {
        "full_attention" => Ok(true),
        "linear_attention" => Ok(false),
        other => Err(c.error("layer_types", format!("has `{other}`; known are full_attention and linear_attention"))),
    };
    types.iter().map(is_attention).collect()
}

/// Rotates the first part of the head, by three position streams.
fn rotary(c: Config<'_>, head_dim: usize) -> Result<Rotary, ForgeError> {
    let rope = RopeConfig::of(c);
    let factor = rope.partial_factor(c, 0.25)?;
    let length = (head_dim as f64 * factor) as usize;
    if length == 0 || length % 2 != 0 {
        return Err(c.error(
            "partial_rotary_factor",
            format!("({factor}) leaves {length} numbers of {head_dim} to rotate: an even number is needed"),
        ));
    }
    let mut rotary = rope.plain(length)?;
    if let Some(sections) = rope.parameters()?.counts_if_any("mrope_section")? {
        let [time, height, width] = sections[..] else {
            return Err(rope.parameters()?.error("mrope_section", "must be three numbers"));
        };
        rotary.streams = interleaved_streams([time, height, width], length / 2);
    }
    Ok(rotary)
}

fn write(config: Config<'_>, precision: Precision, tensors: &dyn StoredTensors) -> Result<Programs, ForgeError> {
    let c = Qwen35::read(config.section_or_self("text_config"), config)?;
    let m = Pen::new("text", precision, tensors, &ROOTS, "embed_tokens.weight");
    m.rotary("rope", c.rotary.clone());
    let (ids, positions) = (m.ids(), m.mrope_positions());
    let tower = QwenVision::read(config, tensors, c.hidden)?;
    if tower.as_ref().is_some_and(|tower| !tower.deepstack.is_empty()) {
        return Err(config
            .section_or_self("vision_config")
            .error("deepstack_visual_indexes", "must be empty: this family has no deepstack"));
    }
    let mut x = m.stage("embed", "", || {
        let x = m.embed("embed_tokens", &ids, c.vocabulary, c.hidden, 1.0);
        if tower.is_some() { m.soft_rows(&x).0 } else { x }
    });
    for (n, &attention) in c.attention.iter().enumerate() {
        let layer = format!("layers.{n}");
        x = m.stage(format!("{layer}.attn"), &layer, || {
            let h = m.rms_norm_zero_centred("input_layernorm", &x, c.eps);
            let mixed = if attention { gated_attention(&c, &m, &h, &positions, &layer) } else { delta_mixer(&c, &m, &h, &layer) };
            m.add(&x, &mixed)
        });
        x = m.stage(format!("{layer}.ffn"), &layer, || feed_forward(&c, &m, &x));
    }
    let logits = m.stage("lm_head", "", || head(&c, &m, &m.rms_norm_zero_centred("norm", &m.wanted_rows(&x), c.eps)));
    m.output("logits", &logits);
    let mut programs = vec![m.finish()?];
    if let Some(tower) = &tower {
        programs.push(tower.write(precision, tensors)?);
    }
    let (name, prefix) = PREDICTION;
    let predicts = c.predicts && tensors.has(&format!("{prefix}fc.weight"));
    if predicts {
        programs.push(prediction(&c, precision, tensors)?);
    }
    // The rows before the final norm.
    let stage = format!("layers.{}.ffn", c.attention.len() - 1);
    let ignored: &[&str] = if tower.is_some() { &["mtp.", "lm_head."] } else { &["mtp.", "lm_head.", "model.visual."] };
    Ok(Programs {
        programs,
        draft: predicts.then(|| DraftEntry { program: name.into(), stage }),
        vocabulary: c.vocabulary,
        hidden: c.hidden,
        context: c.context,
        rotations: Rotations::default(),
        ignored: Box::new(|tensor| ignored.iter().any(|prefix| tensor.starts_with(prefix))),
    })
}

/// Multi-token prediction. The hidden row of token `n` is the text's, normed as for its output head, or where the text is not as far this program's own of the token before, which is normed already.
fn prediction(c: &Qwen35, precision: Precision, tensors: &dyn StoredTensors) -> Result<Written, ForgeError> {
    let (name, prefix) = PREDICTION;
    let m = Pen::new(name, precision, tensors, &ROOTS, "embed_tokens.weight").beside(prefix);
    m.rotary("rope", c.rotary.clone());
    let (next, positions) = (m.next_ids(), m.mrope_positions());
    let embedded = m.stage("mtp.embed", "", || {
        let x = m.embed("embed_tokens", &next, c.vocabulary, c.hidden, 1.0);
        m.rms_norm_zero_centred("mtp.pre_fc_norm_embedding", &x, c.eps)
    });
    let hidden = m.stage("mtp.hidden", "", || {
        let h = m.rms_norm_zero_centred("norm", &m.hidden_rows(c.hidden), c.eps);
        m.rms_norm_zero_centred("mtp.pre_fc_norm_hidden", &m.chained_rows(&h), c.eps)
    });
    let mut x = m.stage("mtp.fc", "mtp", || m.linear("fc", &m.concat(&embedded, &hidden), c.hidden));
    let layer = "mtp.layers.0";
    x = m.stage(format!("{layer}.attn"), layer, || {
        let h = m.rms_norm_zero_centred("input_layernorm", &x, c.eps);
        m.add(&x, &gated_attention(c, &m, &h, &positions, layer))
    });
    x = m.stage(format!("{layer}.ffn"), layer, || feed_forward(c, &m, &x));
    let normed = m.stage("mtp.norm", "mtp", || m.rms_norm_zero_centred("norm", &x, c.eps));
    let logits = m.stage("mtp.lm_head", "", || head(c, &m, &m.wanted_rows(&normed)));
    m.output("hidden", &normed);
    m.output("logits", &logits);
    m.finish()
}

fn feed_forward(c: &Qwen35, m: &Pen<'_>, x: &Value) -> Value {
    let h = m.rms_norm_zero_centred("post_attention_layernorm", x, c.eps);
    let (gate, up) = (m.linear("mlp.gate_proj", &h, c.ffn), m.linear("mlp.up_proj", &h, c.ffn));
    m.add(x, &m.linear("mlp.down_proj", &m.gate(&gate, &up, Silu), c.hidden))
}

/// The output head over normed rows.
fn head(c: &Qwen35, m: &Pen<'_>, normed: &Value) -> Value {
    if c.tied { m.tied_head("embed_tokens", normed, c.vocabulary) } else { m.head("lm_head", normed, c.vocabulary, false) }
}

/// Softmax attention; `q_proj` holds, per head, the query and the gate of its output.
fn gated_attention(c: &Qwen35, m: &Pen<'_>, h: &Value, positions: &Value, layer: &str) -> Value {
    let query_and_gate = m.heads(&m.linear("self_attn.q_proj", h, 2 * c.heads * c.head_dim), c.heads);
    let q = m.slice("query", &query_and_gate, 2, 0, c.head_dim);
    let gate = m.slice("gate", &query_and_gate, 2, c.head_dim, c.head_dim);
    let k = m.heads(&m.linear("self_attn.k_proj", h, c.kv_heads * c.head_dim), c.kv_heads);
    let v = m.heads(&m.linear("self_attn.v_proj", h, c.kv_heads * c.head_dim), c.kv_heads);
    let q = m.rope(&m.rms_norm_zero_centred("self_attn.q_norm", &q, c.eps), positions, "rope");
    let k = m.rope(&m.rms_norm_zero_centred("self_attn.k_norm", &k, c.eps), positions, "rope");
    let a = m.attend(&q, Kv::Own(&format!("{layer}.kv"), &k, &v), Mask::Causal, (c.head_dim as f32).powf(-0.5));
    m.linear("self_attn.o_proj", &m.flatten(&m.gate(&gate, &a, Sigmoid)), c.hidden)
}

/// Gated delta rule: one short convolution over q | k | v, then the rule, a norm, and a gate.
fn delta_mixer(c: &Qwen35, m: &Pen<'_>, h: &Value, layer: &str) -> Value {
    let d = &c.delta;
    let (keys, values) = (d.key_heads * d.key_dim, d.value_heads * d.value_dim);
    let qkv = m.linear("linear_attn.in_proj_qkv", h, 2 * keys + values);
    let z = m.heads(&m.linear("linear_attn.in_proj_z", h, values), d.value_heads);
    let b = m.linear("linear_attn.in_proj_b", h, d.value_heads);
    let a = m.linear("linear_attn.in_proj_a", h, d.value_heads);
    let qkv = m.short_conv("linear_attn.conv1d", &qkv, d.kernel, &format!("{layer}.conv"), Silu);
    let q = m.heads(&m.slice("query", &qkv, 1, 0, keys), d.key_heads);
    let k = m.heads(&m.slice("key", &qkv, 1, keys, keys), d.key_heads);
    let v = m.heads(&m.slice("value", &qkv, 1, 2 * keys, values), d.value_heads);
    let o = m.gated_delta(&q, &k, &v, &a, &b, &format!("{layer}.delta"), "linear_attn", 1e-6);
    let y = m.gate(&z, &m.rms_norm("linear_attn.norm", &o, c.eps), Silu);
    m.linear("linear_attn.out_proj", &m.flatten(&y), c.hidden)
}
