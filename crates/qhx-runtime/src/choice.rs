//! Where a user may ask a model to run.

use crate::Error;
use std::{fmt, str::FromStr};

/// Where a model is to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// The best that takes the whole program.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// A graphics processor, by its number in the order of [`crate::registry::devices`]: `gpu` is the first, `gpu:1` the second.
    Gpu(u8),
    /// The neural processor.
    Npu,
    /// Several devices together.
    Split,
    /// The plain interpreter, for verification.
    Reference,
    /// The plain interpreter with sums of products in f16, to see what that does to a stage.
    ReferenceF16,
}

/// Of graphics processors.
const GPU_NAMES: [&str; 8] = ["gpu", "gpu:1", "gpu:2", "gpu:3", "gpu:4", "gpu:5", "gpu:6", "gpu:7"];

impl DeviceChoice {
    /// The first graphics processor.
    pub const GPU: Self = Self::Gpu(0);

    /// Every choice, in the order of help texts.
    pub const ALL: [Self; 7] = [Self::Auto, Self::Cpu, Self::GPU, Self::Npu, Self::Split, Self::Reference, Self::ReferenceF16];

    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Gpu(number) => GPU_NAMES[usize::from(number).min(GPU_NAMES.len() - 1)],
            Self::Npu => "npu",
            Self::Split => "split",
            Self::Reference => "reference",
            Self::ReferenceF16 => "reference-f16",
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DeviceChoice {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let gpus = (1..GPU_NAMES.len() as u8).map(Self::Gpu);
        Self::ALL
            .into_iter()
            .chain(gpus)
            .find(|choice| choice.name() == text)
            .ok_or_else(|| Error::UnknownDevice { found: text.to_owned(), known: Self::ALL.map(Self::name).join(", ") })
    }
}
