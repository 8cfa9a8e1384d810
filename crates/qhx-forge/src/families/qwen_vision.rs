//! The vision tower of Qwen3-VL and Qwen3.5: a pre-norm transformer over patches with an interpolated position table and rotary embedding by row and column.
//!
//! Patches come in blocks of 2×2, and a merger makes one soft row of each block. Qwen3-VL also merges the stream after some early blocks (deepstack);
//! the text layers add those rows later.

use crate::{
    Config, ForgeError,
    media::{self, MediaFiles, VisionSide},
    pen::{Kv, Pen, Value, Written, has_tower},
    precision::{Precision, StoredTensors},
    rotary::{RopeConfig, frequencies, one_block},
};
use qhx_bundle::media::{Media, Placeholder};
use qhx_ir::{
    Activation::{GeluErf, GeluTanh},
    Mask,
};

/// The base of the rotary angles: the class default of transformers; published files do not set it.
const THETA: f64 = 1e4;
const EPS: f64 = 1e-6;
const ROOTS: [&str; 2] = ["model.", ""];

pub(super) struct QwenVision {
    /// Numbers of a patch: channels, times, rows, columns.
    kernel: [usize; 4],
    /// Patches along the side of a block.
    block: usize,
    hidden: usize,
    ffn: usize,
    heads: usize,
    depth: usize,
    positions: usize,
    out: usize,
    theta: f64,
    /// The blocks after which the stream is merged too.
    pub(super) deepstack: Vec<usize>,
}

impl QwenVision {
    /// The tower, where configuration and checkpoint have one. Its rows must fit the text of width `hidden`.
    pub(super) fn read(config: Config<'_>, tensors: &dyn StoredTensors, hidden: usize) -> Result<Option<Self>, ForgeError> {
        let Some(c) = config.section("vision_config") else { return Ok(None) };
        if !has_tower(tensors, &ROOTS, "visual.patch_embed.proj.weight") {
            return Ok(None);
        }
        c.only("hidden_act", &["gelu_pytorch_tanh".into()])?;
        let (width, heads, depth) = (c.size("hidden_size")?, c.size("num_heads")?, c.repeats("depth")?);
        if width % heads != 0 || (width / heads) % 4 != 0 {
            return Err(c.error("num_heads", format!("({heads}) must cut hidden_size ({width}) into heads of a multiple of 4")));
        }
        let out = c.size("out_hidden_size")?;
        if out != hidden {
            return Err(c.error("out_hidden_size", format!("is {out}, but the text's rows have {hidden} numbers")));
        }
        let positions = c.size("num_position_embeddings")?;
        if positions.isqrt().pow(2) != positions {
            return Err(c.error("num_position_embeddings", format!("is {positions}, which is no square")));
        }
        let deepstack = c.counts_if_any("deepstack_visual_indexes")?.unwrap_or_default();
        let rising = deepstack.windows(2).all(|pair| pair[0] < pair[1]);
        if !rising || deepstack.iter().any(|&block| block >= depth) {
            return Err(c.error("deepstack_visual_indexes", format!("must be rising numbers of the {depth} blocks")));
        }
        let patch = c.kernel("patch_size")?;
        Ok(Some(Self {
            kernel: [c.kernel_if_any("in_channels")?.unwrap_or(3), c.kernel("temporal_patch_size")?, patch, patch],
            block: c.kernel("spatial_merge_size")?,
            hidden: width,
            ffn: c.size("intermediate_size")?,
            heads,
            depth,
            positions,
            out,
            theta: if c.section("rope_parameters").is_some() { RopeConfig::of(c).theta()? } else { THETA },
            deepstack,
        }))
    }

    pub(super) fn write(&self, precision: Precision, tensors: &dyn StoredTensors) -> Result<Written, ForgeError> {
        let m = Pen::new("vision", precision, tensors, &ROOTS, "visual.patch_embed.proj.weight");
        let head_dim = self.hidden / self.heads;
        // Of the pairs of a head, the first half turns by the patch's row, the second by its column.
        let mut rotary = one_block(head_dim, frequencies(self.theta, head_dim / 2).repeat(2), 1.0);
        rotary.streams = (0..head_dim / 2).map(|pair| pair / (head_dim / 4)).collect();
        m.rotary("rope", rotary);
        let (patches, grid) = (m.patches(self.kernel.iter().product()), m.patch_grid());
        let mut x = m.stage("vision.embed", "visual", || {
            let x = m.patch_linear("patch_embed.proj", &patches, self.hidden, &self.kernel);
            m.add(&x, &m.interpolated_positions("pos_embed", self.positions, self.hidden))
        });
        for n in 0..self.depth {
            x = m.stage(format!("vision.{n}"), format!("visual.blocks.{n}"), || self.transform(&m, &x, &grid));
            if let Some(number) = self.deepstack.iter().position(|&block| block == n) {
                let weights = format!("visual.deepstack_merger_list.{number}");
                let rows = m.stage(format!("vision.deepstack.{number}"), weights, || {
                    self.merge(&m, &m.layer_norm("norm", &m.merge_rows(&x, self.block * self.block), EPS, true))
                });
                m.output(&format!("deepstack.{number}"), &rows);
            }
        }
        let rows = m.stage("vision.merger", "visual.merger", || {
            self.merge(&m, &m.merge_rows(&m.layer_norm("norm", &x, EPS, true), self.block * self.block))
        });
        m.output("soft_rows", &rows);
        m.finish()
    }

    /// One block: attention among all patches of the image, then a perceptron.
    fn transform(&self, m: &Pen<'_>, x: &Value, grid: &Value) -> Value {
        let qkv = m.linear_bias("attn.qkv", &m.layer_norm("norm1", x, EPS, true), 3 * self.hidden, true);
        let part = |label: &str, n: usize| m.heads(&m.slice(label, &qkv, 1, n * self.hidden, self.hidden), self.heads);
        let (q, k, v) = (part("query", 0), part("key", 1), part("value", 2));
        let (q, k) = (m.rope(&q, grid, "rope"), m.rope(&k, grid, "rope"));
        let scale = ((self.hidden / self.heads) as f32).powf(-0.5);
        let a = m.attend(&q, Kv::Segment(&k, &v), Mask::Full, scale);
        let x = m.add(x, &m.linear_bias("attn.proj", &m.flatten(&a), self.hidden, true));
        let h = m.linear_bias("mlp.linear_fc1", &m.layer_norm("norm2", &x, EPS, true), self.ffn, true);
        m.add(&x, &m.linear_bias("mlp.linear_fc2", &m.activate(&h, GeluTanh), self.hidden, true))
    }

    /// From a normed block of patches to one row of the text's width.
    fn merge(&self, m: &Pen<'_>, blocks: &Value) -> Value {
        let h = m.linear_bias("linear_fc1", blocks, self.block * self.block * self.hidden, true);
        m.linear_bias("linear_fc2", &m.activate(&h, GeluErf), self.out, true)
    }
}

/// The image front end, where there is a tower. The template writes the tokens before and after an image.
pub(super) fn media(config: Config<'_>, files: &MediaFiles, programs: &super::Programs) -> Result<Media, ForgeError> {
    let (Some(section), true) = (config.section("vision_config"), programs.has("vision")) else { return Ok(Media::default()) };
    let placeholder = Placeholder { token: media::token(config, &["image_token_id"])?, begin: None, end: None };
    let side = VisionSide { section, placeholder, block_fields: ("spatial_merge_size", "merge_size") };
    Ok(Media { image: Some(media::area_image(files, &side)?), audio: None })
}
