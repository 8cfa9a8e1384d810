//! Precisions: how each weight of a bundle is stored and how activations meet it.

use crate::{ForgeError, encode::Scales, pen::Recipe};
use qhx_ir::{ActivationForm, Encoding, KvType};
use std::{fmt, str::FromStr};

/// What the user asks for with `--precision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Weights as the checkpoint stores them, without loss. Keys and values are f32 for an f32 checkpoint, else f16.
    Native,
    /// Everything in f32: what the oracle computes.
    F32,
    /// Matrices in f16.
    F16,
    /// Matrices in int8 with a scale per row; tables and the head in int8 blocks of 32.
    W8,
    /// As `w8`, with the output head in f16.
    W8F16Head,
    /// Experts in int8, the rest in f16.
    MoeI8,
    /// Matrices in int4 blocks of 32, with calibration the most sensitive of them higher; tables and the head in int6.
    W4,
    /// int4 with one scale for all blocks of a row, which is what NPUs store in the least space; tables and the head in int8.
    W4Row,
    /// The mixture of int4, int6, int8 and f16 that loses least at so many bits per weight.
    Bits(MeanBits),
}

/// Bits per weight on average, scales included and the padding of rows not: from 4 to 16, in hundredths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeanBits(u16);

impl MeanBits {
    /// None outside 4 to 16.
    pub fn new(bits: f64) -> Option<Self> {
        (4.0..=16.0).contains(&bits).then_some(Self((bits * 100.0).round() as u16))
    }

    /// As a number.
    pub fn get(self) -> f64 {
        f64::from(self.0) / 100.0
    }
}

impl fmt::Display for MeanBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.get())
    }
}

impl FromStr for MeanBits {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let bits = text.parse().ok().and_then(Self::new);
        bits.ok_or_else(|| format!("`{text}` is no number of bits per weight; use one from 4 to 16, such as 4.8"))
    }
}

/// What a weight is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A table of rows that are looked up.
    Embedding,
    /// The output head (also a tied table).
    Head,
    /// A matrix of a layer.
    Matrix,
    /// The stacked matrices of experts.
    Expert,
    /// Norms, biases, routers, convolutions.
    Small,
}

/// What is known of a checkpoint's tensors when a program is written.
pub trait StoredTensors {
    /// The encoding that holds the tensor without loss; `None` where there is no such tensor (or no checkpoint).
    fn encoding(&self, tensor: &str) -> Option<Encoding>;

    /// Whether the tensor is there; without a checkpoint every tensor is.
    fn has(&self, tensor: &str) -> bool;

    /// The numbers of a tensor of at most `most`, for constants of a program; `None` without a checkpoint.
    fn numbers(&self, tensor: &str, most: usize) -> Result<Option<Vec<f32>>, ForgeError>;
}

/// No checkpoint: for synthetic bundles.
impl StoredTensors for () {
    fn encoding(&self, _tensor: &str) -> Option<Encoding> {
        None
    }

    fn has(&self, _tensor: &str) -> bool {
        true
    }

    fn numbers(&self, _tensor: &str, _most: usize) -> Result<Option<Vec<f32>>, ForgeError> {
        Ok(None)
    }
}

impl Precision {
    /// All that have names, as users type them; [`Precision::Bits`] is typed as its number.
    pub const ALL: [(Self, &'static str); 8] = [
        (Self::Native, "native"),
        (Self::F32, "f32"),
        (Self::F16, "f16"),
        (Self::W8, "w8"),
        (Self::W8F16Head, "w8-f16head"),
        (Self::MoeI8, "moe-i8"),
        (Self::W4, "w4"),
        (Self::W4Row, "w4-row"),
    ];

    /// How a weight is stored.
    pub fn encoding(self, role: Role, recipe: &Recipe, tensors: &dyn StoredTensors) -> Encoding {
        use Encoding::{F16, F32, I8Row};
        match (self, role) {
            (_, Role::Small) | (Self::F32, _) => F32,
            (Self::Native, _) => recipe.tensors().first().and_then(|t| tensors.encoding(t)).unwrap_or(F32),
            (Self::F16, _) | (Self::W8F16Head, Role::Head) => F16,
            (Self::W8 | Self::W8F16Head, Role::Embedding | Role::Head) => Encoding::I8_BLOCK32,
            (Self::W8 | Self::W8F16Head, _) | (Self::MoeI8, Role::Expert) => I8Row,
            (Self::MoeI8, _) => F16,
            (Self::W4Row, Role::Embedding | Role::Head) => I8Row,
            (Self::W4 | Self::Bits(_), Role::Embedding | Role::Head) => Encoding::I6_BLOCK32,
            (Self::W4 | Self::W4Row | Self::Bits(_), _) => Encoding::I4_BLOCK32,
        }
    }

    /// What shares a scale in its blocks.
    pub fn scales(self) -> Scales {
        if self == Self::W4Row { Scales::Row } else { Scales::Block }
    }

    /// How keys and values are kept: in f32 where the weights are, else in f16.
    pub fn kv(self, matrices: Encoding) -> KvType {
        if matrices == Encoding::F32 { KvType::F32 } else { KvType::F16 }
    }
}

/// The form in which rows meet a weight: floats meet floats, and integers meet integers with a scale for every 32 numbers, since one scale for a whole row loses more than the weights do.
pub fn activation_of(weight: Encoding) -> ActivationForm {
    if weight.is_float() { ActivationForm::F32 } else { ActivationForm::I8Block32 }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Bits(bits) = self {
            return bits.fmt(f);
        }
        let name = Self::ALL.iter().find(|(p, _)| p == self).map_or("?", |(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for Precision {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::ALL.iter().find(|(_, name)| *name == text).map(|(p, _)| *p);
        named.or_else(|| text.parse().ok().map(Self::Bits)).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|(_, name)| *name).collect();
            format!("`{text}` is no precision; use one of {}, or a number of bits per weight such as 4.8", names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, families, plan::PrecisionPlan};
    use qhx_ir::Slot;
    use std::path::Path;

    /// A checkpoint all of whose tensors are stored alike.
    struct Alike(Encoding);

    impl StoredTensors for Alike {
        fn encoding(&self, _: &str) -> Option<Encoding> {
            Some(self.0)
        }

        fn has(&self, _: &str) -> bool {
            true
        }

        fn numbers(&self, _: &str, _: usize) -> Result<Option<Vec<f32>>, ForgeError> {
            Ok(None)
        }
    }

    /// `native` keeps every weight as it is, and keys and values in f32 where nothing less was stored.
    #[test]
    fn native_follows_the_checkpoint() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/qwen3/config.json");
        let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let config = Config::new(&config);
        let family = families::of(config).unwrap();
        let expected = [
            (Encoding::F32, KvType::F32),
            (Encoding::Bf16, KvType::F16),
            (Encoding::F16, KvType::F16),
            (Encoding::I4_BLOCK32, KvType::F16),
        ];
        for (stored, kept) in expected {
            let program = PrecisionPlan::from(Precision::Native).write(family, config, &Alike(stored)).unwrap().programs.remove(0).program;
            assert!(program.weights.values().all(|w| w.encoding == stored || w.encoding == Encoding::F32), "{stored}");
            assert!(program.slots.values().all(|slot| matches!(slot, Slot::Kv { dtype, .. } if *dtype == kept)), "{stored}");
        }
    }
}
