//! The drafter of Gemma 4, a small checkpoint of its own: from the row of a token and the embedding of the next one it predicts the token after that. It has queries only; its layers attend to the keys and
//! values of the last layer of their kind in the text that has its own. All guesses behind one row are made at one position, each from what the drafter made of the one before.
//!
//! With `h` the text's row after its final norm and `e` the text's embedding of the next token,
//!
//! ```text
//! u = pre_projection · concat(e, h);  u = layers(u);  n = norm(u);  logits = embed_tokens · n;  h' = post_projection · n
//! ```
//!
//! where `h'` takes the place of `h` for the next guess. Published files may hold a table of centroids as well, which names a few thousand tokens to which the search for the largest logit can be confined. All logits are
//! taken here: devices find the largest of many without computing all of them, and lose none.

use super::gemma4::{FULL, Gemma4, ROOTS, SLIDING, full_head_dim, is_sliding, layer_types, rotary};
use crate::{
    Config, ForgeError,
    pen::{Kv, Pen, Value, Written},
    precision::{Precision, StoredTensors},
    read::checkpoint::DRAFTER,
};
use qhx_ir::{Activation::GeluTanh, Rotary};

/// The program's name, and what the names of its stages and tensors begin with.
pub(super) const NAME: &str = DRAFTER;
const PREFIX: &str = "drafter.";
/// Tensors of the drafter that nobody needs: the centroids, and a head that is the table.
pub(super) const UNUSED: [&str; 2] = ["drafter.masked_embedding.", "drafter.lm_head."];

pub(super) struct Drafter {
    hidden: usize,
    heads: usize,
    ffn: usize,
    eps: f64,
    layers: Vec<DrafterLayer>,
    sliding: Rotary,
    full: Rotary,
}

struct DrafterLayer {
    sliding: bool,
    /// The layer of the text whose keys and values it reads.
    donor: usize,
}

impl Drafter {
    /// What the configuration says of a drafter, which must fit the text.
    pub(super) fn read(config: Config<'_>, text: &Gemma4) -> Result<Option<Self>, ForgeError> {
        let Some(d) = config.section(DRAFTER) else { return Ok(None) };
        d.only("tie_word_embeddings", &[true.into()])?;
        let c = d.section_or_self("text_config");
        c.only("hidden_activation", &["gelu_pytorch_tanh".into()])?;
        for unsupported in ["attention_bias", "enable_moe_block", "use_double_wide_mlp"] {
            c.only(unsupported, &[false.into()])?;
        }
        let fits = |c: Config<'_>, field: &str, found: usize, expected: usize| match found == expected {
            true => Ok(()),
            false => Err(c.error(field, format!("is {found}, but the model that it drafts for has {expected}"))),
        };
        fits(d, "backbone_hidden_size", d.size("backbone_hidden_size")?, text.hidden)?;
        fits(c, "vocab_size", c.vocabulary("vocab_size")?, text.vocabulary)?;
        fits(c, "hidden_size_per_layer_input", c.count_or("hidden_size_per_layer_input", 0)?, 0)?;
        let count = c.repeats("num_hidden_layers")?;
        fits(c, "num_kv_shared_layers", c.count_or("num_kv_shared_layers", count)?, count)?;
        let mut layers = Vec::new();
        for (n, kind) in layer_types(c, count)?.iter().enumerate() {
            let sliding = is_sliding(c, kind, n + 1 == count)?;
            let donor = text.layers.iter().enumerate().rposition(|(n, layer)| layer.donor == n && layer.sliding == sliding);
            let donor = donor.ok_or_else(|| c.error("layer_types", format!("has {kind}, of which the text has none")))?;
            let (field, head_dim) = if sliding { ("head_dim", c.size("head_dim")?) } else { ("global_head_dim", full_head_dim(c, n)?) };
            fits(c, field, head_dim, text.layers[donor].head_dim)?;
            layers.push(DrafterLayer { sliding, donor });
        }
        let heads = c.size("num_attention_heads")?;
        if heads % text.kv_heads != 0 {
            return Err(
                c.error("num_attention_heads", format!("({heads}) must be a multiple of the text's key/value heads ({})", text.kv_heads))
            );
        }
        let full_dim = layers.iter().find(|layer| !layer.sliding).map(|layer| text.layers[layer.donor].head_dim);
        Ok(Some(Self {
            hidden: c.size("hidden_size")?,
            heads,
            ffn: c.size("intermediate_size")?,
            eps: c.number("rms_norm_eps")?,
            layers,
            sliding: rotary(c, "sliding_attention", c.size("head_dim")?, SLIDING)?,
            full: rotary(c, "full_attention", full_dim.unwrap_or(c.size("head_dim")?), FULL)?,
        }))
    }

    pub(super) fn write(&self, text: &Gemma4, precision: Precision, tensors: &dyn StoredTensors) -> Result<Written, ForgeError> {
        let m = Pen::new(NAME, precision, tensors, &ROOTS, "embed_tokens.weight").beside(PREFIX);
        m.rotary("sliding", self.sliding.clone());
        m.rotary("full", self.full.clone());
        let (next, positions) = (m.next_ids(), m.next_positions());
        let embedded =
            m.stage("drafter.embed", "", || m.embed("embed_tokens", &next, text.vocabulary, text.hidden, (text.hidden as f32).sqrt()));
        let hidden = m.stage("drafter.hidden", "", || m.chained_rows(&m.rms_norm("norm", &m.hidden_rows(text.hidden), text.eps)));
        let mut x = m.stage("drafter.pre_projection", "drafter", || m.linear("pre_projection", &m.concat(&embedded, &hidden), self.hidden));
        for (n, own) in self.layers.iter().enumerate() {
            let (stage, layer) = (format!("drafter.layers.{n}"), format!("drafter.model.layers.{n}"));
            x = m.stage(format!("{stage}.attn"), &layer, || {
                let h = m.rms_norm("input_layernorm", &x, self.eps);
                let is_first = !self.layers[..n].iter().any(|earlier| earlier.donor == own.donor);
                let a = self.attention(text, &m, own, is_first, &h, &positions);
                m.add(&x, &m.rms_norm("post_attention_layernorm", &a, self.eps))
            });
            x = m.stage(format!("{stage}.ffn"), &layer, || {
                let h = m.rms_norm("pre_feedforward_layernorm", &x, self.eps);
                let (gate, up) = (m.linear("mlp.gate_proj", &h, self.ffn), m.linear("mlp.up_proj", &h, self.ffn));
                let down = m.linear("mlp.down_proj", &m.gate(&gate, &up, GeluTanh), self.hidden);
                m.scale_by("layer_scalar", &m.add(&x, &m.rms_norm("post_feedforward_layernorm", &down, self.eps)))
            });
        }
        let normed = m.stage("drafter.norm", "drafter.model", || m.rms_norm("norm", &x, self.eps));
        let chained = m.stage("drafter.post_projection", "drafter", || m.linear("post_projection", &normed, text.hidden));
        let logits = m.stage("drafter.lm_head", "", || m.tied_head("drafter.model.embed_tokens", &m.wanted_rows(&normed), text.vocabulary));
        m.output("hidden", &chained);
        m.output("logits", &logits);
        m.finish()
    }

    /// Attention with scale 1 to what the text keeps of its rows; the first layer that reads a slot puts it in.
    fn attention(&self, text: &Gemma4, m: &Pen<'_>, own: &DrafterLayer, is_first: bool, h: &Value, positions: &Value) -> Value {
        let donor = &text.layers[own.donor];
        let (rotary, slot) = (if own.sliding { "sliding" } else { "full" }, format!("layers.{}.kv", own.donor));
        let q = m.heads(&m.linear("self_attn.q_proj", h, self.heads * donor.head_dim), self.heads);
        let q = m.rope(&m.rms_norm("self_attn.q_norm", &q, self.eps), positions, rotary);
        let a = if is_first {
            let (k, v) = m.text_keys_and_values(&slot, text.kv_heads, donor.head_dim);
            m.attend(&q, Kv::Own(&slot, &k, &v), donor.mask, 1.0)
        } else {
            m.attend(&q, Kv::Shared(&slot), donor.mask, 1.0)
        };
        m.linear("self_attn.o_proj", &m.flatten(&a), self.hidden)
    }
}
