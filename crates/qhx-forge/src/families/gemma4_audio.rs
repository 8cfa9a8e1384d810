//! The audio tower of Gemma 4: two strided convolutions over log-mel frames, then conformer layers (half-step perceptron, attention in a short window with
//! relative keys, light convolution, half-step perceptron), then projections to the text's rows. Most linears are clipped.

use crate::{
    Config, ForgeError,
    media::{self, MediaFiles},
    pen::{Pen, RelativeAttention, Value, Written, has_tower},
    precision::{Precision, StoredTensors},
};
use qhx_bundle::media::{AudioFrontEnd, Placeholder};
use qhx_ir::{
    Activation::{Relu, Sigmoid, Silu},
    Dim,
};
use std::f64::consts::{E, LN_2};

const ROOTS: [&str; 1] = ["model."];
const PROBE: &str = "audio_tower.subsample_conv_projection.input_proj_linear.weight";
/// Norms whose epsilon no file sets.
const EPS: f64 = 1e-6;
/// More numbers than the inputs of relative keys have in any model; they are made for each layer.
const MOST_RELATIVE_NUMBERS: usize = 1 << 17;

pub(super) struct Gemma4Audio {
    /// Channels of the two convolutions. The tower is sized as if a frame had as many bins as the first has channels.
    channels: [usize; 2],
    hidden: usize,
    layers: usize,
    heads: usize,
    kernel: usize,
    /// Frames that attention sees, itself included; and relative distances that have keys.
    window: usize,
    distances: usize,
    softcap: f64,
    residual_weight: f64,
    eps: f64,
    clipped: bool,
    projected: usize,
    out: usize,
}

impl Gemma4Audio {
    /// The tower, where configuration and checkpoint have one; `out` is the width of the text's rows.
    pub(super) fn read(config: Config<'_>, tensors: &dyn StoredTensors, out: usize) -> Result<Option<Self>, ForgeError> {
        let Some(c) = config.section("audio_config") else { return Ok(None) };
        if !has_tower(tensors, &ROOTS, PROBE) {
            return Ok(None);
        }
        c.only("hidden_act", &["silu".into()])?;
        c.only("attention_context_right", &[0.into()])?;
        let channels = match c.counts_if_any("subsampling_conv_channels")?.unwrap_or_default()[..] {
            [first, second] if first >= 4 && second > 0 => [first, second],
            _ => return Err(c.error("subsampling_conv_channels", "must be two numbers, the first at least 4")),
        };
        let (hidden, heads) = (c.size("hidden_size")?, c.size("num_attention_heads")?);
        if hidden % heads != 0 || hidden % 2 != 0 {
            return Err(c.error("num_attention_heads", format!("({heads}) must divide hidden_size ({hidden}), an even number")));
        }
        let (chunk, left) = (c.size("attention_chunk_size")?, c.size("attention_context_left")?);
        // Relative keys are counted from the middle of a chunk's context: only then is the row of a distance its own number.
        if left < 2 || chunk + 1 != left {
            return Err(c.error(
                "attention_context_left",
                format!("is {left}, a variant that is not supported; supported: attention_chunk_size + 1"),
            ));
        }
        if left * hidden > MOST_RELATIVE_NUMBERS {
            let reason = format!("is {left}: times hidden_size ({hidden}) it must be at most {MOST_RELATIVE_NUMBERS}");
            return Err(c.error("attention_context_left", reason));
        }
        Ok(Some(Self {
            channels,
            hidden,
            layers: c.repeats("num_hidden_layers")?,
            heads,
            kernel: c.kernel("conv_kernel_size")?,
            window: left - 1,
            distances: left,
            softcap: c.number("attention_logit_cap")?,
            residual_weight: c.number("residual_weight")?,
            eps: c.number("rms_norm_eps")?,
            clipped: c.flag_or("use_clipped_linears", true)?,
            projected: c.size("output_proj_dims")?,
            out,
        }))
    }

    fn bins(&self) -> usize {
        self.channels[0]
    }

    pub(super) fn write(&self, precision: Precision, tensors: &dyn StoredTensors) -> Result<Written, ForgeError> {
        let m = Pen::new("audio", precision, tensors, &ROOTS, PROBE);
        let frames = m.frames(self.bins());
        let mut x = m.stage("audio.subsample", "audio_tower.subsample_conv_projection", || {
            let mut x = m.reshape("picture", &frames, vec![Dim::T, Dim::Fixed(self.bins()), Dim::Fixed(1)]);
            for (n, &channels) in self.channels.iter().enumerate() {
                let y = m.conv2d(&format!("layer{n}.conv"), &x, channels);
                x = m.activate(&m.layer_norm(&format!("layer{n}.norm"), &y, self.eps, false), Relu);
            }
            m.linear("input_proj_linear", &m.flatten(&x), self.hidden)
        });
        for n in 0..self.layers {
            x = m.stage(format!("audio.{n}"), format!("audio_tower.layers.{n}"), || self.layer(&m, &x));
        }
        let x = m.stage("audio.output", "audio_tower", || m.linear_bias("output_proj", &x, self.projected, true));
        let rows =
            m.stage("audio.project", "embed_audio", || m.linear("embedding_projection", &m.rms_norm_plain("norm", &x, self.eps), self.out));
        m.output("soft_rows", &rows);
        m.finish()
    }

    fn layer(&self, m: &Pen<'_>, x: &Value) -> Value {
        let x = self.half_step(m, "feed_forward1", x);
        let a = self.attention(m, &m.rms_norm("norm_pre_attn", &x, EPS));
        let x = m.add(&x, &m.rms_norm("norm_post_attn", &a, EPS));
        let x = m.add(&x, &self.light_conv(m, &x));
        m.rms_norm("norm_out", &self.half_step(m, "feed_forward2", &x), EPS)
    }

    fn half_step(&self, m: &Pen<'_>, name: &str, x: &Value) -> Value {
        let part = |part: &str| format!("{name}.{part}");
        let h = m.rms_norm(&part("pre_layer_norm"), x, EPS);
        let h = m.activate(&self.linear(m, &part("ffw_layer_1"), &h, 4 * self.hidden), Silu);
        let h = m.rms_norm(&part("post_layer_norm"), &self.linear(m, &part("ffw_layer_2"), &h, self.hidden), EPS);
        m.add(x, &m.scale("residual_weight", &h, self.residual_weight as f32))
    }

    /// Scores are `q·k + q·relative key`, capped. Queries and keys have constant scales of their own; each number of a query has a learned one too.
    fn attention(&self, m: &Pen<'_>, h: &Value) -> Value {
        let project = |name: &str| m.heads(&self.linear(m, name, h, self.hidden), self.heads);
        let (q, k, v) = (project("self_attn.q_proj"), project("self_attn.k_proj"), project("self_attn.v_proj"));
        let head_dim = (self.hidden / self.heads) as f64;
        let q = m.scale_by_softplus("self_attn.per_dim_scale", &q, head_dim.powf(-0.5) / LN_2);
        let how =
            RelativeAttention { window: self.window, scale: (1.0 + E).ln() / LN_2, softcap: self.softcap, distances: self.sinusoids() };
        let a = m.attend_relative("self_attn.relative_k_proj", &q, &k, &v, how);
        self.linear(m, "self_attn.post", &m.flatten(&a), self.hidden)
    }

    /// A row for each distance 0, 1, …: all sines, then all cosines, of times from 1 to 10000.
    fn sinusoids(&self) -> Vec<f32> {
        let half = self.hidden / 2;
        let step = -(1e4f64.ln()) / (half.max(2) - 1) as f64;
        let angle = move |distance: usize, m: usize| distance as f32 * (m as f64 * step).exp() as f32;
        let row = move |distance: usize| {
            (0..2 * half).map(move |i| if i < half { angle(distance, i).sin() } else { angle(distance, i - half).cos() })
        };
        (0..self.distances).flat_map(row).collect()
    }

    /// A gated linear, a causal convolution of each channel, a norm.
    fn light_conv(&self, m: &Pen<'_>, x: &Value) -> Value {
        let both = self.linear(m, "lconv1d.linear_start", &m.rms_norm("lconv1d.pre_layer_norm", x, self.eps), 2 * self.hidden);
        let (value, gate) = (m.slice("value", &both, 1, 0, self.hidden), m.slice("gate", &both, 1, self.hidden, self.hidden));
        let h = m.stateless_conv("lconv1d.depthwise_conv1d", &m.gate(&gate, &value, Sigmoid), self.kernel);
        let h = m.activate(&m.rms_norm("lconv1d.conv_norm", &h, self.eps), Silu);
        self.linear(m, "lconv1d.linear_end", &h, self.hidden)
    }

    fn linear(&self, m: &Pen<'_>, name: &str, x: &Value, out: usize) -> Value {
        m.clipped_linear(name, x, out, self.clipped)
    }
}

/// The sound front end. The processor puts tokens before and after a sound; the template does not.
pub(super) fn front_end(config: Config<'_>, files: &MediaFiles) -> Result<AudioFrontEnd, ForgeError> {
    let section = config.section("audio_config").ok_or_else(|| config.error("audio_config", "is missing"))?;
    let id = |fields: &[&str]| media::token(config, fields);
    let placeholder = Placeholder {
        token: id(&["audio_token_id"])?,
        begin: Some(id(&["boa_token_id", "boa_token_index"])?),
        end: Some(id(&["eoa_token_id", "eoa_token_index"])?),
    };
    let bins = section.counts_if_any("subsampling_conv_channels")?.and_then(|channels| channels.first().copied());
    media::mel_audio(files, bins.unwrap_or_default(), placeholder)
}
