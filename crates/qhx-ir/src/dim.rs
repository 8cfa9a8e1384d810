//! Dimensions: numbers, or expressions of one symbol that is bound by each call.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A symbol that is bound by each call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Symbol {
    /// Rows of the call: tokens, patches, frames.
    T,
    /// Soft rows that land in this call (0..=T).
    R,
    /// Rows whose logits are wanted.
    L,
}

/// One dimension of a shape. JSON: `64`, `"T"`, `"ceil(T/4)"`, `"T/4"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dim {
    /// A number.
    Fixed(usize),
    /// A symbol.
    Symbol(Symbol),
    /// A symbol divided by a number that must divide it (checked on each call).
    Exact(Symbol, usize),
    /// A symbol divided by a number, rounded up.
    Ceil(Symbol, usize),
}

/// The shape of a value.
pub type Shape = Vec<Dim>;

/// The values of the symbols in one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bindings {
    /// `T`.
    pub rows: usize,
    /// `R`.
    pub soft_rows: usize,
    /// `L`.
    pub wanted: usize,
}

impl Bindings {
    /// The value of `symbol`.
    pub fn get(&self, symbol: Symbol) -> usize {
        match symbol {
            Symbol::T => self.rows,
            Symbol::R => self.soft_rows,
            Symbol::L => self.wanted,
        }
    }
}

impl Dim {
    /// `T`, the rows of the call.
    pub const T: Self = Self::Symbol(Symbol::T);
    /// `R`, the soft rows of the call.
    pub const R: Self = Self::Symbol(Symbol::R);
    /// `L`, the wanted rows of the call.
    pub const L: Self = Self::Symbol(Symbol::L);

    /// The value of this dimension in a call.
    pub fn bind(self, bindings: &Bindings) -> Result<usize, String> {
        match self {
            Self::Fixed(n) => Ok(n),
            Self::Symbol(s) => Ok(bindings.get(s)),
            Self::Ceil(s, n) => Ok(bindings.get(s).div_ceil(n)),
            Self::Exact(s, n) => match bindings.get(s) {
                value if value % n == 0 => Ok(value / n),
                value => Err(format!("{s:?} = {value} rows must be a multiple of {n}")),
            },
        }
    }

    /// This dimension divided by `n`: rounded up for `ceil`, otherwise exact. `None` where the result cannot be expressed as a dimension.
    pub fn divide(self, n: usize, ceil: bool) -> Option<Self> {
        match self {
            _ if n == 0 => None,
            _ if n == 1 => Some(self),
            Self::Fixed(d) if ceil => Some(Self::Fixed(d.div_ceil(n))),
            Self::Fixed(d) => (d % n == 0).then(|| Self::Fixed(d / n)),
            Self::Symbol(s) => Some(if ceil { Self::Ceil(s, n) } else { Self::Exact(s, n) }),
            Self::Ceil(s, m) if ceil => Some(Self::Ceil(s, m.checked_mul(n)?)),
            Self::Exact(s, m) if !ceil => Some(Self::Exact(s, m.checked_mul(n)?)),
            _ => None,
        }
    }

    /// The number of rows of the call per row of this dimension: 1 for `T`, n for `T/n` and `ceil(T/n)`; `None` for others.
    pub fn rows_per_row(self) -> Option<usize> {
        match self {
            Self::Symbol(Symbol::T) => Some(1),
            Self::Exact(Symbol::T, n) | Self::Ceil(Symbol::T, n) => Some(n),
            _ => None,
        }
    }
}

/// A shape as numbers for one call.
pub fn bind_shape(shape: &[Dim], bindings: &Bindings) -> Result<Vec<usize>, String> {
    shape.iter().map(|d| d.bind(bindings)).collect()
}

/// A shape as text: `[T, 4, 64]`.
pub fn show_shape(shape: &[Dim]) -> String {
    format!("[{}]", shape.iter().map(Dim::to_string).collect::<Vec<_>>().join(", "))
}

/// The number of elements as (symbolic part, numerator, denominator); `None` with two symbolic dimensions or an overflow.
/// Two shapes of equal volume can be reshaped into each other in every call in which both exist.
pub fn volume(shape: &[Dim]) -> Option<(Option<Dim>, usize, usize)> {
    let (mut base, mut numerator, mut denominator) = (None, 1usize, 1usize);
    for &dim in shape {
        match dim {
            Dim::Fixed(n) => numerator = numerator.checked_mul(n)?,
            _ if base.is_some() => return None,
            Dim::Exact(s, n) => (base, denominator) = (Some(Dim::Symbol(s)), n),
            Dim::Symbol(_) | Dim::Ceil(..) => base = Some(dim),
        }
    }
    let divisor = gcd(numerator, denominator).max(1);
    Some((base, numerator / divisor, denominator / divisor))
}

/// The least common multiple; `None` on overflow.
pub(crate) fn least_common_multiple(a: usize, b: usize) -> Option<usize> {
    (a / gcd(a, b).max(1)).checked_mul(b)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl From<usize> for Dim {
    fn from(n: usize) -> Self {
        Self::Fixed(n)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(n) => write!(f, "{n}"),
            Self::Symbol(s) => write!(f, "{s:?}"),
            Self::Exact(s, n) => write!(f, "{s:?}/{n}"),
            Self::Ceil(s, n) => write!(f, "ceil({s:?}/{n})"),
        }
    }
}

impl FromStr for Dim {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a dimension: use a number, T, R, L, `T/4` or `ceil(T/4)`");
        let symbol = |s: &str| match s {
            "T" => Ok(Symbol::T),
            "R" => Ok(Symbol::R),
            "L" => Ok(Symbol::L),
            _ => Err(wrong()),
        };
        let (quotient, ceil) = match text.strip_prefix("ceil(").and_then(|rest| rest.strip_suffix(')')) {
            Some(inner) => (inner, true),
            None => (text, false),
        };
        match quotient.split_once('/') {
            Some((s, n)) => match n.parse() {
                Ok(n) if n > 0 => Ok(if ceil { Self::Ceil(symbol(s)?, n) } else { Self::Exact(symbol(s)?, n) }),
                _ => Err(wrong()),
            },
            None if !ceil => Ok(Self::Symbol(symbol(text)?)),
            None => Err(wrong()),
        }
    }
}

impl Serialize for Dim {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Fixed(n) => s.serialize_u64(*n as u64),
            _ => s.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for Dim {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Text {
            Number(usize),
            Expression(String),
        }
        match Text::deserialize(d)? {
            Text::Number(n) => Ok(Self::Fixed(n)),
            Text::Expression(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        for dim in [Dim::Fixed(7), Dim::T, Dim::R, Dim::L, Dim::Exact(Symbol::T, 4), Dim::Ceil(Symbol::T, 2)] {
            let json = serde_json::to_string(&dim).unwrap();
            assert_eq!(serde_json::from_str::<Dim>(&json).unwrap(), dim);
        }
        for wrong in ["\"X\"", "\"T/0\"", "\"ceil(T)\"", "-1", "\"T/\""] {
            assert!(serde_json::from_str::<Dim>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn binding_checks_divisibility() {
        let bindings = Bindings { rows: 10, ..Default::default() };
        assert_eq!(Dim::Ceil(Symbol::T, 4).bind(&bindings), Ok(3));
        assert_eq!(Dim::Exact(Symbol::T, 5).bind(&bindings), Ok(2));
        assert!(Dim::Exact(Symbol::T, 4).bind(&bindings).unwrap_err().contains("multiple of 4"));
    }

    #[test]
    fn volumes_compare_across_quotients() {
        let a = volume(&[Dim::T, Dim::Fixed(8)]);
        let b = volume(&[Dim::Exact(Symbol::T, 4), Dim::Fixed(32)]);
        assert_eq!(a, b);
        assert_ne!(a, volume(&[Dim::Ceil(Symbol::T, 4), Dim::Fixed(32)]));
        assert_eq!(volume(&[Dim::T, Dim::T]), None);
    }
}
