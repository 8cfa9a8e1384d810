//! The vision tower of Gemma 4: a transformer over patches with norms before and after each part, positions from a table for columns and one for rows,
//! rotary embedding by column in one half of each head and by row in the other, clipped linears. Blocks of 3×3 patches are averaged to one soft row.

use crate::{
    Config, ForgeError,
    media::{self, MediaFiles, VisionSide},
    pen::{Kv, Pen, Value, Written, has_tower},
    precision::{Precision, StoredTensors},
    rotary::{RopeConfig, frequencies},
};
use qhx_bundle::media::{ImageFrontEnd, Placeholder};
use qhx_ir::{Activation::GeluTanh, Mask, Rotary, RotaryVariant};

/// The base of the rotary angles where the file does not say: the class default of transformers.
const THETA: f64 = 100.0;
const ROOTS: [&str; 1] = ["model."];
const PROBE: &str = "vision_tower.patch_embedder.input_proj.weight";

pub(super) struct Gemma4Vision {
    patch: usize,
    /// Patches along the side of a block.
    block: usize,
    /// Rows of each position table.
    positions: usize,
    hidden: usize,
    ffn: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f64,
    theta: f64,
    clipped: bool,
    standardized: bool,
    out: usize,
}

impl Gemma4Vision {
    /// The tower, where configuration and checkpoint have one; `out` is the width of the text's rows.
    pub(super) fn read(config: Config<'_>, tensors: &dyn StoredTensors, out: usize) -> Result<Option<Self>, ForgeError> {
        let Some(c) = config.section("vision_config") else { return Ok(None) };
        if !has_tower(tensors, &ROOTS, PROBE) {
            return Ok(None);
        }
        c.only("hidden_activation", &["gelu_pytorch_tanh".into()])?;
        c.only("attention_bias", &[false.into()])?;
        let (heads, kv_heads, head_dim) = (c.size("num_attention_heads")?, c.size("num_key_value_heads")?, c.size("head_dim")?);
        if heads % kv_heads != 0 {
            return Err(c.error("num_key_value_heads", format!("({kv_heads}) must divide num_attention_heads ({heads})")));
        }
        if head_dim % 4 != 0 {
            return Err(c.error("head_dim", format!("is {head_dim}; it must be a multiple of 4")));
        }
        Ok(Some(Self {
            patch: c.kernel("patch_size")?,
            block: c.kernel("pooling_kernel_size")?,
            positions: c.size("position_embedding_size")?,
            hidden: c.size("hidden_size")?,
            ffn: c.size("intermediate_size")?,
            layers: c.repeats("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            eps: c.number("rms_norm_eps")?,
            theta: if c.section("rope_parameters").is_some() { RopeConfig::of(c).theta()? } else { THETA },
            clipped: c.flag_or("use_clipped_linears", false)?,
            standardized: c.flag_or("standardize", false)?,
            out,
        }))
    }

    pub(super) fn write(&self, precision: Precision, tensors: &dyn StoredTensors) -> Result<Written, ForgeError> {
        let m = Pen::new("vision", precision, tensors, &ROOTS, PROBE);
        m.rotary("rope", self.rotary());
        let (patches, grid) = (m.patches(3 * self.patch * self.patch), m.patch_grid());
        let mut x = m.stage("vision.embed", "vision_tower.patch_embedder", || {
            // The checkpoint's table has the one for columns first.
            let (columns, rows) = m.patch_columns_and_rows();
            let table =
                |label: &str, ids: &Value, n| m.embed_part(label, "position_embedding_table", ids, [n, 2, self.positions, self.hidden]);
            let places = m.add(&table("column_places", &columns, 0), &table("row_places", &rows, 1));
            m.add(&m.linear("input_proj", &patches, self.hidden), &places)
        });
        for n in 0..self.layers {
            x = m.stage(format!("vision.{n}"), format!("vision_tower.encoder.layers.{n}"), || self.layer(&m, &x, &grid));
        }
        let pooled = m.stage("vision.pool", "vision_tower", || {
            let mean = m.pool(&x, self.block * self.block);
            let scaled = m.scale("scaled", &mean, (self.hidden as f32).sqrt());
            if self.standardized { m.standardize("std_bias", "std_scale", &scaled) } else { scaled }
        });
        let rows = m.stage("vision.project", "embed_vision", || {
            m.linear("embedding_projection", &m.rms_norm_plain("norm", &pooled, self.eps), self.out)
        });
        m.output("soft_rows", &rows);
        m.finish()
    }

    /// One block for columns (stream 1 of the grid) over the first half of a head, one for rows over the second.
    fn rotary(&self) -> Rotary {
        let half = self.head_dim / 2;
        let inv_freq = frequencies(self.theta, half).repeat(2);
        let streams = [vec![1; half / 2], vec![0; half / 2]].concat();
        Rotary { blocks: vec![(0, half), (half, half)], streams, variants: vec![RotaryVariant { inv_freq, amplitude: 1.0 }] }
    }

    fn layer(&self, m: &Pen<'_>, x: &Value, grid: &Value) -> Value {
        let linear = |name: &str, x: &Value, out: usize| m.clipped_linear(name, x, out, self.clipped);
        let h = m.rms_norm("input_layernorm", x, self.eps);
        let project = |name: &str, heads: usize| m.heads(&linear(name, &h, heads * self.head_dim), heads);
        let q = m.rms_norm("self_attn.q_norm", &project("self_attn.q_proj", self.heads), self.eps);
        let k = m.rms_norm("self_attn.k_norm", &project("self_attn.k_proj", self.kv_heads), self.eps);
        let v = m.rms_norm_plain("v_norm", &project("self_attn.v_proj", self.kv_heads), self.eps);
        let (q, k) = (m.rope(&q, grid, "rope"), m.rope(&k, grid, "rope"));
        // Queries and keys are normed: their product is not scaled.
        let a = linear("self_attn.o_proj", &m.flatten(&m.attend(&q, Kv::Segment(&k, &v), Mask::Full, 1.0)), self.hidden);
        let x = m.add(x, &m.rms_norm("post_attention_layernorm", &a, self.eps));
        let h = m.rms_norm("pre_feedforward_layernorm", &x, self.eps);
        let (gate, up) = (linear("mlp.gate_proj", &h, self.ffn), linear("mlp.up_proj", &h, self.ffn));
        let down = linear("mlp.down_proj", &m.gate(&gate, &up, GeluTanh), self.hidden);
        m.add(&x, &m.rms_norm("post_feedforward_layernorm", &down, self.eps))
    }
}

/// The image front end. The processor puts tokens before and after an image; the template does not.
pub(super) fn front_end(config: Config<'_>, files: &MediaFiles) -> Result<ImageFrontEnd, ForgeError> {
    let section = config.section("vision_config").ok_or_else(|| config.error("vision_config", "is missing"))?;
    let id = |field: &str| media::token(config, &[field]);
    let placeholder = Placeholder { token: id("image_token_id")?, begin: Some(id("boi_token_id")?), end: Some(id("eoi_token_id")?) };
    media::budget_image(files, &VisionSide { section, placeholder, block_fields: ("pooling_kernel_size", "pooling_kernel_size") })
}
