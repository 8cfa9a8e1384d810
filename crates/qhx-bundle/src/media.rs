//! The front ends of a model with vision or audio: how an image or audio clip becomes the inputs of its tower. All of it is data of the checkpoint.

use crate::ManifestError;
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the model can take beside text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Media {
    /// Images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageFrontEnd>,
    /// Sound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audio: Option<AudioFrontEnd>,
}

/// How media stand among the tokens: each soft row has one placeholder id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Placeholder {
    /// The id that stands for a soft row. A rendered conversation has one for each image or sound; it is repeated to the number of rows.
    pub token: u32,
    /// The id put before the repeated ones, where the template does not write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begin: Option<u32>,
    /// The id put after them, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<u32>,
}

/// From an image to patches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ImageFrontEnd {
    /// The program that makes soft rows of patches.
    pub program: String,
    /// How an image stands among the tokens.
    pub placeholder: Placeholder,
    /// The size to which an image is scaled (antialiased bicubic).
    pub resize: Resize,
    /// Factor on the levels 0 to 255.
    pub rescale: f64,
    /// Subtracted per channel after the factor.
    pub mean: [f64; 3],
    /// Divides per channel after that.
    pub std: [f64; 3],
    /// How the image is cut.
    pub patches: Patches,
    /// Rows (and columns) of a square position table that is interpolated to the image's grid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position_side: Option<usize>,
    /// Height and width of the images that the model was trained on, where the checkpoint says one size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_size: Option<[usize; 2]>,
}

/// The rule for an image's size. Sides are multiples of patch size times block.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Resize {
    /// To the nearest multiples (half to even), scaled further where the area is beyond these bounds.
    Area {
        /// Fewest pixels.
        min_pixels: u64,
        /// Most pixels.
        max_pixels: u64,
        /// The longest side may be this many times the shortest.
        max_aspect: f64,
    },
    /// As large as a number of soft rows allows, small images too.
    Budget {
        /// Most soft rows.
        max_soft_rows: usize,
    },
    /// Always to this size, whatever the image's shape.
    Fixed {
        /// Rows of pixels.
        height: usize,
        /// Columns of pixels.
        width: usize,
    },
}

/// How an image is cut into patches. They come in block order: block rows, block columns, rows in the block, columns in the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Patches {
    /// Pixels along a side.
    pub size: usize,
    /// Patches along a side of a block; a block becomes one soft row.
    pub block: usize,
    /// Copies of the image along time inside each patch.
    pub temporal: usize,
    /// The order of numbers in a patch.
    pub order: PatchOrder,
}

/// The order of numbers in a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PatchOrder {
    /// Channel, time, row, column.
    ChannelFirst,
    /// Time, row, column, channel.
    ChannelLast,
}

/// From a sound to log-mel frames.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AudioFrontEnd {
    /// The program that makes soft rows of frames.
    pub program: String,
    /// How a sound stands among the tokens.
    pub placeholder: Placeholder,
    /// Samples per second.
    pub sampling_rate: u32,
    /// The longest sound in one piece, in samples.
    pub max_samples: usize,
    /// Samples of a frame (periodic Hann window); half of it is put before the sound as zeros.
    pub frame_length: usize,
    /// Samples from a frame to the next.
    pub hop_length: usize,
    /// Length of the Fourier transform.
    pub fft_length: usize,
    /// Mel bins of a frame (HTK triangles, no area norm).
    pub bins: usize,
    /// Lowest frequency in hertz.
    pub min_frequency: f64,
    /// Highest frequency in hertz.
    pub max_frequency: f64,
    /// Added to the mel magnitudes before the logarithm.
    pub mel_floor: f64,
    /// Factor on the samples.
    pub input_scale: f64,
    /// Subtracted per bin; empty: nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bin_mean: Vec<f64>,
    /// Divides per bin; empty: nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bin_std: Vec<f64>,
}

/// Speech as models usually take it: 16 kHz, 30 seconds, frames of 20 ms every 10 ms, 128 mel bins up to 8 kHz.
impl Default for AudioFrontEnd {
    fn default() -> Self {
        Self {
            program: "audio".into(),
            placeholder: Placeholder::default(),
            sampling_rate: 16_000,
            max_samples: 480_000,
            frame_length: 320,
            hop_length: 160,
            fft_length: 512,
            bins: 128,
            min_frequency: 0.0,
            max_frequency: 8_000.0,
            mel_floor: 1e-3,
            input_scale: 1.0,
            bin_mean: Vec::new(),
            bin_std: Vec::new(),
        }
    }
}

impl Media {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Every check that needs no file: programs that exist, ids in the vocabulary, sizes that make sense.
    pub(crate) fn check<P>(&self, programs: &BTreeMap<String, P>, vocabulary: usize) -> Result<(), ManifestError> {
        let front_ends = self.image.iter().map(|i| ("image", &i.program, &i.placeholder));
        let front_ends = front_ends.chain(self.audio.iter().map(|a| ("audio", &a.program, &a.placeholder)));
        for (kind, program, placeholder) in front_ends {
            if !programs.contains_key(program) {
                return wrong(kind, "program", format!("names the program `{program}`, which `programs` does not list"));
            }
            for id in [Some(placeholder.token), placeholder.begin, placeholder.end].into_iter().flatten() {
                if id as usize >= vocabulary {
                    return wrong(kind, "placeholder", format!("token {id} is not in the vocabulary of {vocabulary}"));
                }
            }
        }
        self.image.as_ref().map_or(Ok(()), ImageFrontEnd::check)?;
        self.audio.as_ref().map_or(Ok(()), AudioFrontEnd::check)
    }
}

/// Larger than any side, patch or frame that makes sense; keeps later arithmetic from overflowing.
const MAX_SIZE: usize = 1 << 24;

impl ImageFrontEnd {
    fn check(&self) -> Result<(), ManifestError> {
        let wrong = |field: &str, reason: &str| wrong("image", field, reason.into());
        let Patches { size, block, temporal, .. } = self.patches;
        if !(1..=256).contains(&size) || !(1..=16).contains(&block) || !(1..=8).contains(&temporal) {
            return wrong("patches", "must have a size of 1 to 256, a block of 1 to 16 and 1 to 8 copies along time");
        }
        let sane = match self.resize {
            Resize::Area { min_pixels, max_pixels, max_aspect } => {
                0 < min_pixels && min_pixels <= max_pixels && max_pixels <= MAX_SIZE as u64 * 16 && max_aspect >= 1.0
            }
            Resize::Budget { max_soft_rows } => (1..=1 << 16).contains(&max_soft_rows),
            Resize::Fixed { height, width } => {
                let side = |n: usize| (1..=1 << 14).contains(&n) && n.is_multiple_of(size * block);
                side(height) && side(width)
            }
        };
        if !sane {
            return wrong("resize", "must have positive sizes within reason; fixed sides are multiples of patch size times block");
        }
        if !self.rescale.is_finite() || !self.mean.iter().all(|m| m.is_finite()) || !self.std.iter().all(|s| s.is_finite() && *s > 0.0) {
            return wrong("mean", "and `rescale` and `std` must be numbers, the last above 0");
        }
        if self.position_side.is_some_and(|side| !(1..=1 << 14).contains(&side)) {
            return wrong("position_side", "must be 1 to 16384");
        }
        if self.trained_size.is_some_and(|size| size.iter().any(|side| !(1..=1 << 20).contains(side))) {
            return wrong("trained_size", "must be height and width, each 1 to 1048576");
        }
        Ok(())
    }
}

impl AudioFrontEnd {
    fn check(&self) -> Result<(), ManifestError> {
        let wrong = |field: &str, reason: &str| wrong("audio", field, reason.into());
        let sizes = [
            ("sampling_rate", self.sampling_rate as usize, 1 << 20),
            ("max_samples", self.max_samples, 1 << 30),
            ("frame_length", self.frame_length, 1 << 16),
            ("hop_length", self.hop_length, 1 << 16),
            ("fft_length", self.fft_length, 1 << 16),
            ("bins", self.bins, 1 << 12),
        ];
        for (field, found, most) in sizes {
            if !(1..=most).contains(&found) {
                return wrong(field, &format!("must be 1 to {most}, found {found}"));
            }
        }
        if self.fft_length < self.frame_length || !self.fft_length.is_power_of_two() {
            return wrong("fft_length", "must be a power of two, and at least frame_length");
        }
        if (self.max_samples / self.hop_length).saturating_mul(self.bins) > 1 << 28 {
            return wrong("max_samples", "makes too many frames; give a longer hop_length or fewer bins");
        }
        let rising = 0.0 <= self.min_frequency && self.min_frequency < self.max_frequency;
        if !rising || self.max_frequency > f64::from(self.sampling_rate) / 2.0 {
            return wrong("max_frequency", "must be above min_frequency and at most half the sampling rate");
        }
        if !(self.mel_floor > 0.0 && self.mel_floor.is_finite() && self.input_scale.is_finite()) {
            return wrong("mel_floor", "must be above 0, and `input_scale` a number");
        }
        for (field, list) in [("bin_mean", &self.bin_mean), ("bin_std", &self.bin_std)] {
            let fits = list.is_empty() || list.len() == self.bins;
            if !fits || list.iter().any(|x| !x.is_finite() || (field == "bin_std" && *x <= 0.0)) {
                return wrong(field, "must be empty or have a number for each bin (a divisor is above 0)");
            }
        }
        Ok(())
    }
}

fn wrong(kind: &str, field: &str, reason: String) -> Result<(), ManifestError> {
    Err(ManifestError::Field { field: format!("media.{kind}.{field}"), reason })
}
