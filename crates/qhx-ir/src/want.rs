//! What a caller may want of a row of logits, and its plain definition.

use std::sync::OnceLock;

/// What is wanted of a row.
#[derive(Clone, Copy, Debug)]
pub enum Want<'a> {
    /// All logits.
    Logits,
    /// The largest logit and its id.
    Largest,
    /// The largest logit and its id among those that a mask allows. A grammar may compute the mask while the device computes the logits.
    LargestAllowed(&'a OnceLock<IdMask>),
    /// So many of the largest logits, at least one, and their ids: what sampling from the most probable needs.
    Top(usize),
    /// The log probability of an id, and the most probable ids.
    LogProbs {
        /// The id whose log probability is wanted.
        target: u32,
        /// How many of the most probable ids.
        top: usize,
    },
}

/// Which ids are allowed: bit `id % 32` of word `id / 32`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdMask(pub Vec<u32>);

impl IdMask {
    /// No id of `count`.
    pub fn none(count: usize) -> Self {
        Self(vec![0; count.div_ceil(32)])
    }

    /// Allows an id; one beyond the mask is ignored.
    pub fn allow(&mut self, id: u32) {
        if let Some(word) = self.0.get_mut(id as usize / 32) {
            *word |= 1 << (id % 32);
        }
    }

    /// Whether an id is allowed.
    pub fn allows(&self, id: u32) -> bool {
        self.0.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }
}

/// The answer to a [`Want`].
#[derive(Clone, Debug, PartialEq)]
pub enum RowResult {
    /// The logits are this row of the output's value: rows of which something else is wanted are not there.
    Logits(usize),
    /// The largest logit, the first of equal ones; NaN if any is.
    Largest {
        /// Its place: the token's id.
        id: u32,
        /// The logit.
        value: f32,
    },
    /// Ids and logits of the largest, the largest first, the first of equal ones before others; a NaN is larger than all numbers.
    Top(Vec<(u32, f32)>),
    /// Natural logarithms of probabilities.
    LogProbs {
        /// Of the target.
        target: f32,
        /// Ids and values of the most probable, the most probable first.
        top: Vec<(u32, f32)>,
    },
}

impl Want<'_> {
    /// Whether it can be answered for rows of `width` logits.
    pub(crate) fn check(&self, width: usize) -> Result<(), String> {
        match *self {
            Self::Top(count) if !(1..=width).contains(&count) => {
                Err(format!("the {count} largest logits are wanted, but there are {width} ids"))
            }
            Self::LogProbs { target, top } if target as usize >= width || top > width => {
                Err(format!("the log probabilities of id {target} and the {top} most probable are wanted, but there are {width} ids"))
            }
            _ => Ok(()),
        }
    }

    /// For a device: the answer for a row of logits; none where the logits themselves are wanted.
    pub fn of(&self, logits: &[f32]) -> Option<Result<RowResult, String>> {
        Some(match self {
            Self::Logits => return None,
            Self::Largest => Ok(largest(logits)),
            Self::LargestAllowed(mask) => match mask.get() {
                Some(mask) => largest_allowed(logits, mask),
                None => Err("its mask has not arrived".into()),
            },
            Self::Top(count) => Ok(RowResult::Top(top(logits, *count))),
            Self::LogProbs { target, top } => Ok(log_probs(logits, *target, *top)),
        })
    }
}

/// Eight at a time: a row has hundreds of thousands.
fn largest(logits: &[f32]) -> RowResult {
    const LANES: usize = 8;
    let (mut most, mut nan) = ([f32::NEG_INFINITY; LANES], false);
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (most, &x) in most.iter_mut().zip(chunk) {
            *most = if x > *most { x } else { *most };
            nan |= x.is_nan();
        }
    }
    let most = most.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    nan |= rest.iter().any(|x| x.is_nan());
    let found = logits.iter().position(|&x| if nan { x.is_nan() } else { x == most }).unwrap_or(0);
    RowResult::Largest { id: found as u32, value: if nan { f32::NAN } else { most } }
}

fn largest_allowed(logits: &[f32], mask: &IdMask) -> Result<RowResult, String> {
    let mut best: Option<(u32, f32)> = None;
    for (number, &word) in mask.0.iter().enumerate() {
        let mut left = word;
        while left != 0 {
            let id = number as u32 * 32 + left.trailing_zeros();
            left &= left - 1;
            let Some(&value) = logits.get(id as usize) else { break };
            if best.is_none_or(|(_, best)| value > best || value.is_nan() && !best.is_nan()) {
                best = Some((id, value));
            }
        }
    }
    best.map(|(id, value)| RowResult::Largest { id, value }).ok_or_else(|| "its mask allows no id".into())
}

/// In one pass: up to twice as many as are wanted are held, and the least of the best of them is the bar for all that follow.
fn top(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let rank = |&(a, x): &(u32, f32), &(b, y): &(u32, f32)| {
        let by_value = y.partial_cmp(&x).unwrap_or_else(|| y.is_nan().cmp(&x.is_nan()));
        by_value.then(a.cmp(&b))
    };
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(2 * count);
    let mut bar = None;
    for (id, &logit) in logits.iter().enumerate() {
        // One that equals the bar stands behind it.
        if bar.is_some_and(|bar| logit <= bar) {
            continue;
        }
        best.push((id as u32, logit));
        if best.len() == 2 * count {
            best.select_nth_unstable_by(count - 1, rank);
            best.truncate(count);
            bar = Some(best[count - 1].1);
        }
    }
    best.sort_unstable_by(rank);
    best.truncate(count);
    best
}

/// Sums in f64, in order of the ids.
fn log_probs(logits: &[f32], target: u32, count: usize) -> RowResult {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = logits.iter().map(|&x| (x as f64 - max).exp()).sum();
    let log_prob = |id: u32| (logits[id as usize] as f64 - max - sum.ln()) as f32;
    let top = if count > 0 { top(logits, count) } else { Vec::new() };
    RowResult::LogProbs { target: log_prob(target), top: top.into_iter().map(|(id, _)| (id, log_prob(id))).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wants_are_answered_as_stated() {
        let logits = [1.0, 3.0, -2.0, 3.0, f32::NEG_INFINITY];
        assert_eq!(Want::Largest.of(&logits), Some(Ok(RowResult::Largest { id: 1, value: 3.0 })), "the first of equal ones");
        let cell = OnceLock::new();
        let allowed = Want::LargestAllowed(&cell);
        assert!(allowed.of(&logits).unwrap().unwrap_err().contains("not arrived"));
        let mut mask = IdMask::none(5);
        [0, 2, 40].into_iter().for_each(|id| mask.allow(id));
        cell.set(mask).unwrap();
        assert_eq!(allowed.of(&logits), Some(Ok(RowResult::Largest { id: 0, value: 1.0 })));
        let nothing = OnceLock::from(IdMask::none(5));
        assert!(Want::LargestAllowed(&nothing).of(&logits).unwrap().unwrap_err().contains("allows no id"));
        assert_eq!(Want::Top(3).of(&logits), Some(Ok(RowResult::Top(vec![(1, 3.0), (3, 3.0), (0, 1.0)]))));
        assert!(Want::Top(0).check(5).is_err() && Want::Top(5).check(5).is_ok() && Want::Top(6).check(5).is_err());
        let Some(Ok(RowResult::Top(first))) = Want::Top(2).of(&[1.0, -f32::NAN, f32::INFINITY, 9.0]) else { panic!() };
        assert!(first[0].0 == 1 && first[0].1.is_nan() && first[1] == (2, f32::INFINITY), "a NaN is not hidden: {first:?}");
        // Against sorting everything, with many equal ones.
        let many: Vec<f32> = (0..1000).map(|i| ((i * 7919 % 613) / 9) as f32 - 30.0).collect();
        let mut sorted: Vec<(u32, f32)> = (0..).zip(many.iter().copied()).collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        for count in [1, 2, 40, 999, 1000] {
            assert_eq!(Want::Top(count).of(&many), Some(Ok(RowResult::Top(sorted[..count].to_vec()))), "{count}");
        }
        let Some(Ok(RowResult::LogProbs { target, top })) = (Want::LogProbs { target: 0, top: 3 }).of(&logits) else { panic!() };
        let sum = (1f64.exp() + 2.0 * 3f64.exp() + (-2f64).exp()).ln();
        assert!((target as f64 - (1.0 - sum)).abs() < 1e-6);
        assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3, 0]);
        assert!((Want::LogProbs { target: 5, top: 0 }).check(5).is_err() && (Want::LogProbs { target: 4, top: 5 }).check(5).is_ok());
        let Some(Ok(RowResult::Largest { value, .. })) = Want::Largest.of(&[1.0, f32::NAN, 2.0]) else { panic!() };
        assert!(value.is_nan(), "a NaN is not hidden");
        let long: Vec<f32> = (0..100).map(|i| -((i as f32) - 61.2).abs()).collect();
        assert_eq!(Want::Largest.of(&long), Some(Ok(RowResult::Largest { id: 61, value: long[61] })));
        assert_eq!(Want::Largest.of(&[f32::NEG_INFINITY; 9]), Some(Ok(RowResult::Largest { id: 0, value: f32::NEG_INFINITY })));
    }
}
