//! Gemma 4: sliding and full attention layers with two head sizes, norms before and after each part, keys and values of late layers
//! shared with earlier ones, and a small embedding per token and layer mixed into the residual stream.

use super::{
    Family, Programs,
    gemma4_audio::{self, Gemma4Audio},
    gemma4_drafter::{self, Drafter},
    gemma4_vision::{self, Gemma4Vision},
};
use crate::{
    Config, ForgeError,
    media::MediaFiles,
    pen::{Kv, Pen, Value},
    precision::{Precision, StoredTensors},
    rotary::{RopeConfig, frequencies, one_block},
    rotate::Rotations,
};
use qhx_bundle::{manifest::DraftEntry, media::Media};
use qhx_ir::{Activation::GeluTanh, Dim, Mask, Rotary};

pub(super) const FAMILY: Family =
    Family { name: "Gemma 4", model_types: &["gemma4", "gemma4_text"], drafters: &["gemma4_assistant"], write, media };

/// Rotary embeddings where the configuration says nothing: form, theta and the share of a head that turns.
pub(super) const SLIDING: (&str, f64, f64) = ("default", 1e4, 1.0);
pub(super) const FULL: (&str, f64, f64) = ("proportional", 1e6, 0.25);

/// Where the tensors of the text are.
pub(super) const ROOTS: [&str; 2] = ["model.language_model.", "model."];

pub(super) struct Gemma4 {
    pub(super) vocabulary: usize,
    pub(super) hidden: usize,
    pub(super) layers: Vec<Layer>,
    heads: usize,
    pub(super) kv_heads: usize,
    /// The embeddings that each layer has of its own; larger models have none.
    per_layer: Option<PerLayer>,
    pub(super) eps: f64,
    softcap: Option<f64>,
    context: usize,
    sliding: Rotary,
    full: Rotary,
}

/// Embeddings for each layer.
struct PerLayer {
    width: usize,
    /// Rows of their table.
    rows: usize,
}

/// What differs from layer to layer.
pub(super) struct Layer {
    pub(super) sliding: bool,
    pub(super) head_dim: usize,
    pub(super) mask: Mask,
    ffn: usize,
    /// The layer whose keys and values it reads; itself for most.
    pub(super) donor: usize,
}

impl Gemma4 {
    fn read(c: Config<'_>) -> Result<Self, ForgeError> {
        c.only("hidden_activation", &["gelu_pytorch_tanh".into()])?;
        for unsupported in ["attention_bias", "attention_k_eq_v", "enable_moe_block"] {
            c.only(unsupported, &[false.into()])?;
        }
        c.only("use_bidirectional_attention", &[])?;
        c.only("tie_word_embeddings", &[true.into()])?;
        // Absent means 256. transformers refuses null, which could mean none or the default.
        if c.is_null("hidden_size_per_layer_input") {
            return Err(c.error("hidden_size_per_layer_input", "must be an integer, found null; a model without inputs per layer has 0"));
        }
        let (heads, kv_heads) = (c.size("num_attention_heads")?, c.size("num_key_value_heads")?);
        if heads % kv_heads != 0 {
            return Err(c.error("num_key_value_heads", format!("({kv_heads}) must divide num_attention_heads ({heads})")));
        }
        let layers = layers(c)?;
        let full_dim = layers.iter().find(|l| !l.sliding).map_or(c.size("head_dim")?, |l| l.head_dim);
        Ok(Self {
            vocabulary: c.vocabulary("vocab_size")?,
            hidden: c.size("hidden_size")?,
            heads,
            kv_heads,
            per_layer: match c.count_or("hidden_size_per_layer_input", 256)? {
                0 => None,
                width => Some(PerLayer { width, rows: c.vocabulary("vocab_size_per_layer_input")? }),
            },
            eps: c.number("rms_norm_eps")?,
            softcap: c.number_if_any("final_logit_softcapping")?,
            context: c.length("max_position_embeddings")?,
            sliding: rotary(c, "sliding_attention", c.size("head_dim")?, SLIDING)?,
            full: rotary(c, "full_attention", full_dim, FULL)?,
            layers,
        })
    }
}

fn layers(c: Config<'_>) -> Result<Vec<Layer>, ForgeError> {
    let count = c.repeats("num_hidden_layers")?;
    let types = layer_types(c, count)?;
    let shared = c.count_or("num_kv_shared_layers", 0)?;
    let first_shared = count.checked_sub(shared).filter(|&n| n > 0).ok_or_else(|| c.error("num_kv_shared_layers", "leaves no layer"))?;
    let (head_dim, ffn, window) = (c.size("head_dim")?, c.size("intermediate_size")?, c.length("sliding_window")?);
    let double = c.flag_or("use_double_wide_mlp", false)?;
    let mut layers = Vec::new();
    for (n, kind) in types.iter().enumerate() {
        let sliding = is_sliding(c, kind, n + 1 == count)?;
        let is_shared = n >= first_shared;
        let donor = match is_shared {
            false => n,
            true => (0..first_shared).rev().find(|&d| (types[d] == "sliding_attention") == sliding).ok_or_else(|| {
                c.error("num_kv_shared_layers", format!("leaves layer {n} ({kind}) no earlier layer of its kind to share with"))
            })?,
        };
        layers.push(Layer {
            sliding,
            head_dim: if sliding { head_dim } else { full_head_dim(c, n)? },
            mask: if sliding { Mask::Window(window) } else { Mask::Causal },
            ffn: if double && is_shared { 2 * ffn } else { ffn },
            donor,
        });
    }
    Ok(layers)
}

/// The types of so many layers.
pub(super) fn layer_types<'a>(c: Config<'a>, count: usize) -> Result<Vec<&'a str>, ForgeError> {
    match c.texts_if_any("layer_types")? {
        Some(types) if types.len() != count => Err(c.error("layer_types", format!("has {} entries for {count} layers", types.len()))),
        Some(types) => Ok(types),
        None => Ok((0..count).map(|n| if (n + 1) % 6 == 0 { "full_attention" } else { "sliding_attention" }).collect()),
    }
}

/// Whether a layer of this type is a sliding one. The last layer is a full one, whatever the list says.
pub(super) fn is_sliding(c: Config<'_>, kind: &str, is_last: bool) -> Result<bool, ForgeError> {
    match kind {
        "full_attention" => Ok(false),
        "sliding_attention" => Ok(!is_last),
        other => Err(c.error("layer_types", format!("has `{other}`; known are sliding_attention and full_attention"))),
    }
}

/// `global_head_dim` in published files; transformers 5 writes an override per layer, under keys such as `"05"`.
pub(super) fn full_head_dim(c: Config<'_>, layer: usize) -> Result<usize, ForgeError> {
    if let Some(overrides) = c.section("per_layer_config") {
        let keys = [format!("{layer}"), format!("{layer:02}"), format!("{layer:03}")];
        let own = keys.iter().find_map(|key| overrides.section(key));
        let head_dim = own.map(|own| own.size_if_any("head_dim")).transpose()?.flatten();
        return head_dim.map_or_else(|| c.size("head_dim"), Ok);
    }
    Ok(c.size_if_any("global_head_dim")?.unwrap_or(512))
}

/// `proportional`: frequencies of the whole head, of which only the first part turns (the rest have frequency 0).
pub(super) fn rotary(c: Config<'_>, kind: &'static str, head_dim: usize, default: (&str, f64, f64)) -> Result<Rotary, ForgeError> {
    let (form, theta, factor) = match RopeConfig::of_layer_type(c, kind) {
        Some(rope) => (rope.kind()?, rope.theta()?, rope.partial_factor(c, 1.0)?),
        None if c.get("rope_parameters").is_none() => default,
        None => return Err(c.error("rope_parameters", format!("has no section `{kind}`"))),
    };
    let mut inv_freq = frequencies(theta, head_dim);
    match form {
        "default" => {}
        "proportional" => inv_freq[(factor * head_dim as f64 / 2.0) as usize..].fill(0.0),
        other => return Err(c.error("rope_parameters", format!("has rope_type `{other}` for {kind}; known are default and proportional"))),
    }
    Ok(one_block(head_dim, inv_freq, 1.0))
}

fn write(config: Config<'_>, precision: Precision, tensors: &dyn StoredTensors) -> Result<Programs, ForgeError> {
    let c = Gemma4::read(config.section_or_self("text_config"))?;
    let m = Pen::new("text", precision, tensors, &ROOTS, "embed_tokens.weight");
    m.rotary("sliding", c.sliding.clone());
    m.rotary("full", c.full.clone());
    let (ids, positions) = (m.ids_media_as_pad(), m.positions());
    let (vision, audio) = (Gemma4Vision::read(config, tensors, c.hidden)?, Gemma4Audio::read(config, tensors, c.hidden)?);
    let mut x = m.stage("embed", "", || {
        let x = m.embed("embed_tokens", &ids, c.vocabulary, c.hidden, (c.hidden as f32).sqrt());
        // Soft rows are not scaled.
        if vision.is_some() || audio.is_some() { m.soft_rows(&x).0 } else { x }
    });
    let embeddings = |own| m.stage("per_layer_embed", "", || per_layer_embeddings(&c, own, &m, &ids, &x));
    let per_layer = c.per_layer.as_ref().map(|own| (own, embeddings(own)));
    for (n, own) in c.layers.iter().enumerate() {
        let layer = format!("layers.{n}");
        x = m.stage(format!("{layer}.attn"), &layer, || {
            let h = m.rms_norm("input_layernorm", &x, c.eps);
            let a = attention(&c, &m, own, &h, &positions, n);
            m.add(&x, &m.rms_norm("post_attention_layernorm", &a, c.eps))
        });
        x = m.stage(format!("{layer}.ffn"), &layer, || {
            let h = m.rms_norm("pre_feedforward_layernorm", &x, c.eps);
            let (gate, up) = (m.linear("mlp.gate_proj", &h, own.ffn), m.linear("mlp.up_proj", &h, own.ffn));
            let down = m.linear("mlp.down_proj", &m.gate(&gate, &up, GeluTanh), c.hidden);
            let mut x = m.add(&x, &m.rms_norm("post_feedforward_layernorm", &down, c.eps));
            if let Some((own, embeddings)) = &per_layer {
                let gate = m.linear("per_layer_input_gate", &x, own.width);
                let ple = m.flatten(&m.slice("per_layer_row", embeddings, 1, n, 1));
                let mixed = m.linear("per_layer_projection", &m.gate(&gate, &ple, GeluTanh), c.hidden);
                x = m.add(&x, &m.rms_norm("post_per_layer_input_norm", &mixed, c.eps));
            }
            m.scale_by("layer_scalar", &x)
        });
    }
    let logits = m.stage("lm_head", "", || {
        let logits = m.tied_head("embed_tokens", &m.rms_norm("norm", &m.wanted_rows(&x), c.eps), c.vocabulary);
        c.softcap.map_or(logits.clone(), |cap| m.softcap(&logits, cap))
    });
    m.output("logits", &logits);
    let mut programs = vec![m.finish()?];
    let drafter = Drafter::read(config, &c)?;
    if let Some(drafter) = &drafter {
        programs.push(drafter.write(&c, precision, tensors)?);
    }
    let mut unused = vec!["lm_head."];
    unused.extend(gemma4_drafter::UNUSED);
    match &vision {
        Some(tower) => programs.push(tower.write(precision, tensors)?),
        None => unused.extend(["model.vision_tower.", "model.embed_vision."]),
    }
    match &audio {
        Some(tower) => programs.push(tower.write(precision, tensors)?),
        None => unused.extend(["model.audio_tower.", "model.embed_audio."]),
    }
    Ok(Programs {
        programs,
        vocabulary: c.vocabulary,
        hidden: c.hidden,
        context: c.context,
        // The rows before the final norm.
        draft: drafter.map(|_| DraftEntry { program: gemma4_drafter::NAME.into(), stage: format!("layers.{}.ffn", c.layers.len() - 1) }),
        rotations: Rotations::default(),
        ignored: Box::new(move |tensor| {
            // Published files hold keys and values for the layers that share, too; they must not be used.
            let text = tensor.starts_with("model.language_model.") || tensor.starts_with("model.layers.");
            let is_absent_input = c.per_layer.is_none() && tensor.contains("per_layer");
            let stray = [".self_attn.k_proj.weight", ".self_attn.v_proj.weight", ".self_attn.k_norm.weight"];
            let is_stray = is_absent_input || stray.iter().any(|suffix| tensor.ends_with(suffix));
            unused.iter().any(|prefix| tensor.starts_with(prefix)) || (text && is_stray)
        }),
    })
}

fn media(config: Config<'_>, files: &MediaFiles, programs: &Programs) -> Result<Media, ForgeError> {
    Ok(Media {
        image: programs.has("vision").then(|| gemma4_vision::front_end(config, files)).transpose()?,
        audio: programs.has("audio").then(|| gemma4_audio::front_end(config, files)).transpose()?,
    })
}

/// `[T, layers, width]`: what the token says to each layer, and what its embedding says.
fn per_layer_embeddings(c: &Gemma4, own: &PerLayer, m: &Pen<'_>, ids: &Value, x: &Value) -> Value {
    let (layers, width) = (c.layers.len(), own.width);
    let shape = vec![Dim::T, Dim::Fixed(layers), Dim::Fixed(width)];
    let token = m.embed("embed_tokens_per_layer", ids, own.rows, layers * width, (width as f32).sqrt());
    let context = m.linear("per_layer_model_projection", x, layers * width);
    let context = m.reshape("context", &m.scale("scaled", &context, (c.hidden as f32).powf(-0.5)), shape.clone());
    let context = m.rms_norm("per_layer_projection_norm", &context, c.eps);
    m.scale("per_layer", &m.add(&context, &m.reshape("token", &token, shape)), 0.5f32.sqrt())
}

/// Attention with scale 1; values are normed too. A sharing layer has queries only.
fn attention(c: &Gemma4, m: &Pen<'_>, own: &Layer, h: &Value, positions: &Value, n: usize) -> Value {
    let (rotary, slot) = (if own.sliding { "sliding" } else { "full" }, format!("layers.{}.kv", own.donor));
    let project = |name: &str, heads: usize| m.heads(&m.linear(name, h, heads * own.head_dim), heads);
    let q = m.rope(&m.rms_norm("self_attn.q_norm", &project("self_attn.q_proj", c.heads), c.eps), positions, rotary);
    let a = if own.donor == n {
        let k = m.rope(&m.rms_norm("self_attn.k_norm", &project("self_attn.k_proj", c.kv_heads), c.eps), positions, rotary);
        let v = m.rms_norm_plain("v_norm", &project("self_attn.v_proj", c.kv_heads), c.eps);
        m.attend(&q, Kv::Own(&slot, &k, &v), own.mask, 1.0)
    } else {
        m.attend(&q, Kv::Shared(&slot), own.mask, 1.0)
    };
    m.linear("self_attn.o_proj", &m.flatten(&a), c.hidden)
}
