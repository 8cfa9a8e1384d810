//! Everything that touches numbers in bulk, for each instruction set.
//!
//! A kernel is written once over [`vector::Vector`] (or, for integer products, once for each set), and [`run`] calls it with the widest vectors that the
//! chosen [`Instructions`] have. Functions here are safe: they check lengths, then trust them. Nothing here knows ops, programs or threads.

#[cfg(target_arch = "x86_64")]
mod amx;
pub(crate) mod columns;
pub(crate) mod convert;
pub(crate) mod delta;
pub(crate) mod dot;
pub(crate) mod element;
pub(crate) mod gemm;
pub(crate) mod hadamard;
pub(crate) mod integer;
pub(crate) mod map;
pub(crate) mod math;
pub(crate) mod norm;
pub(crate) mod quants;
pub(crate) mod rope;
pub(crate) mod scores;
pub(crate) mod sketch;
pub(crate) mod softmax;
pub(crate) mod vector;

use std::{fmt, str::FromStr};
use vector::{Kernel, Portable};

/// A set of CPU instructions that the kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InstructionSet {
    /// What every CPU of the target has.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 (F, BW, VL, DQ) and its integer dot products (VNNI).
    Avx512Vnni,
    /// The same with AMX: tiles of bytes, and products of whole tiles.
    Avx512Amx,
    /// aarch64 with NEON, as nearly all have it.
    Neon,
    /// aarch64 with NEON and integer dot products.
    NeonDotprod,
    /// aarch64 with NEON, integer dot products and products of small integer matrices (i8mm).
    NeonI8mm,
}

impl InstructionSet {
    /// All sets, those of a kind of CPU plainest first.
    const ALL: [Self; 7] = [Self::Portable, Self::Avx2, Self::Avx512Vnni, Self::Avx512Amx, Self::Neon, Self::NeonDotprod, Self::NeonI8mm];

    /// The sets this CPU has, plainest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|set| set.is_available()).collect()
    }

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = || is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = || {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            };
            match self {
                Self::Portable => true,
                Self::Avx2 => avx2(),
                Self::Avx512Vnni => avx2() && avx512(),
                Self::Avx512Amx => avx2() && avx512() && amx::is_available(),
                _ => false,
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::is_aarch64_feature_detected;
            let neon = || is_aarch64_feature_detected!("neon");
            let dotprod = || is_aarch64_feature_detected!("dotprod");
            match self {
                Self::Portable => true,
                Self::Neon => neon(),
                Self::NeonDotprod => neon() && dotprod(),
                Self::NeonI8mm => neon() && dotprod() && is_aarch64_feature_detected!("i8mm"),
                _ => false,
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            self == Self::Portable
        }
    }

    /// Whether a CPU with this set has the `other` one's instructions, as far as kernels are shared.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(crate) fn includes(self, other: Self) -> bool {
        self == other || (self, other) == (Self::Avx512Amx, Self::Avx512Vnni)
    }
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512Vnni => "avx512_vnni",
            Self::Avx512Amx => "avx512_vnni+amx",
            Self::Neon => "neon",
            Self::NeonDotprod => "neon+dotprod",
            Self::NeonI8mm => "neon+dotprod+i8mm",
        })
    }
}

impl FromStr for InstructionSet {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|set| set.to_string() == text).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(Self::to_string).collect();
            format!("unknown instruction set `{text}`; known are {}", names.join(", "))
        })
    }
}

/// An instruction set that this CPU was seen to have: what makes calling its kernels sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instructions(InstructionSet);

impl Instructions {
    /// `None` where this CPU does not have `set`.
    pub(crate) fn new(set: InstructionSet) -> Option<Self> {
        set.is_available().then_some(Self(set))
    }

    /// The best that this CPU has.
    pub(crate) fn best() -> Self {
        Self(InstructionSet::available().into_iter().max().unwrap_or(InstructionSet::Portable))
    }

    /// Which it is.
    pub(crate) fn set(self) -> InstructionSet {
        self.0
    }

    /// All that this CPU has, for tests.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        InstructionSet::available().into_iter().map(Self).collect()
    }
}

/// Runs a kernel with the vectors of `instructions`.
#[allow(unsafe_code)]
pub(crate) fn run<K: Kernel>(instructions: Instructions, kernel: K) -> K::Output {
    match instructions.0 {
        // SAFETY: an `Instructions` exists only where the CPU has the set.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => unsafe { vector::x86::with_avx2(kernel) },
        // SAFETY: as above. Tiles are for integers.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Vnni | InstructionSet::Avx512Amx => unsafe { vector::x86::with_avx512(kernel) },
        // SAFETY: as above. Dot products and products of matrices are for integers.
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon | InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => unsafe { vector::neon::with_neon(kernel) },
        // SAFETY: portable vectors need nothing.
        _ => unsafe { kernel.run::<Portable>() },
    }
}
