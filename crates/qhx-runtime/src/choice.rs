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
    /// The graphics processor.
    Gpu,
    /// The neural processor.
    Npu,
    /// Several devices together.
    Split,
    /// The plain interpreter, for verification.
    Reference,
    /// The plain interpreter with sums of products in f16, to see what that does to a stage.
    ReferenceF16,
}

impl DeviceChoice {
    /// Every choice, in the order of help texts.
    pub const ALL: [Self; 7] = [Self::Auto, Self::Cpu, Self::Gpu, Self::Npu, Self::Split, Self::Reference, Self::ReferenceF16];

    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
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
        Self::ALL
            .into_iter()
            .find(|choice| choice.name() == text)
            .ok_or_else(|| Error::UnknownDevice { found: text.to_owned(), known: Self::ALL.map(Self::name).join(", ") })
    }
}
