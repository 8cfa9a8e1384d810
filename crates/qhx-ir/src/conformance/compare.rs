//! Comparison of results, and its bounds.

use super::session::Made;
use crate::{Program, Slot, SlotData};

/// Largest accepted differences, relative to the larger of a row's largest value and the case's usual magnitude (1 unless the case says
/// otherwise). An f32 device meets these with room; [`super::Options::tolerance_factor`] widens all of them for a coarser device.
pub(crate) mod tolerance {
    /// Moving data: bit for bit on an f32 device.
    pub(crate) const MOVE: f64 = 1e-7;
    /// One or two roundings: add, mul, scale, clamp, table rows.
    pub(crate) const ARITHMETIC: f64 = 1e-6;
    /// Elementwise functions, and what is multiplied by them.
    pub(crate) const FUNCTION: f64 = 1e-5;
    /// Sums over a row: norms, products of every encoding and activation form, convolutions, routing weights.
    pub(crate) const SUM: f64 = 2e-5;
    /// Softmax attention and whole expert blocks.
    pub(crate) const CHAIN: f64 = 3e-5;
    /// Attention with scores in the hundreds: their last digit is worth 3e-5, and a softmax shows it.
    pub(crate) const SHARP: f64 = 4e-4;
    /// Running states over a session's rows.
    pub(crate) const RECURRENT: f64 = 1e-4;
    /// Whole models in f32 throughout.
    pub(crate) const MODEL: f64 = 1e-4;
    /// Whole models that store or multiply anything in f16: a value that rounds the other way differs by 1e-3 of itself.
    pub(crate) const HALF_MODEL: f64 = 3e-3;
    /// Whole models with integer forms, in which values that round the other way propagate through layers and states.
    pub(crate) const INTEGER_MODEL: f64 = 1e-1;
    /// What a bound of this table becomes for a device that keeps and computes everything in f16: no less than a few roundings of f16
    /// make, and no more than they grow to in a whole model. The last digit of a score in the hundreds is worth 0.12.
    pub(crate) fn half(stated: f64) -> f64 {
        if stated == SHARP { 0.12 } else { (stated * 600.0).clamp(2e-3, 3e-2) }
    }

    /// Rows in which a device that computes in f16 chose another expert, where two scores are equal but for rounding.
    pub(crate) const OTHER_EXPERT: f64 = 0.5;
    /// Rows in which an integer form rounded the other way, because of differences allowed above.
    pub(crate) const FLIP: f64 = 5e-2;
}

/// How much may differ.
#[derive(Clone, Copy)]
pub(crate) struct Bound {
    pub(crate) tolerance: f64,
    pub(crate) floor: f64,
    pub(crate) flips: Option<f64>,
}

/// The largest difference relative to its row's scale, or what is wrong.
pub(crate) fn compare(expected: &[Made], found: &[Made], bound: Bound) -> Result<f64, String> {
    let names = |made: &[Made]| made.iter().map(|m| m.name.clone()).collect::<Vec<_>>();
    if names(expected) != names(found) {
        return Err(format!("expected {:?}, found {:?}", names(expected), names(found)));
    }
    expected.iter().zip(found).try_fold(0.0, |worst: f64, (expected, found)| Ok(worst.max(compare_rows(expected, found, bound)?)))
}

fn compare_rows(expected: &Made, found: &Made, bound: Bound) -> Result<f64, String> {
    let name = &expected.name;
    if expected.numbers.len() != found.numbers.len() {
        return Err(format!("{name}: expected {} values, found {}", expected.numbers.len(), found.numbers.len()));
    }
    let (mut worst, mut flipped, mut complaint) = (0.0f64, 0, String::new());
    let rows = expected.numbers.chunks(expected.width).zip(found.numbers.chunks(expected.width));
    for (row, (e, f)) in rows.enumerate() {
        let scale = e.iter().fold(bound.floor, |m, x| m.max(x.abs() as f64));
        let difference = |i: usize| (e[i] as f64 - f[i] as f64).abs() / scale;
        // A NaN, found where none is expected, is the largest difference of all.
        let at = (0..e.len()).max_by(|&a, &b| difference(a).total_cmp(&difference(b))).unwrap_or(0);
        let difference = difference(at);
        let described = || {
            let (column, allowed) = (at, bound.tolerance);
            format!(
                "{name}: row {row}, column {column}: expected {}, found {}: {difference:.2e} of the row's scale {scale:.3}, {allowed:.0e} allowed",
                e[at], f[at]
            )
        };
        if difference.is_nan() || difference > bound.flips.unwrap_or(0.0).max(bound.tolerance) {
            return Err(described());
        }
        if difference > bound.tolerance {
            flipped += 1;
            complaint = described();
        }
        worst = worst.max(difference);
    }
    match flipped > 1 + expected.numbers.len() / expected.width / 10 {
        true => Err(format!("{flipped} rows differ by more than rounding the other way explains; the last is {complaint}")),
        false => Ok(worst),
    }
}

/// A slot's content as rows that can be compared. For a windowed slot, only the rows that the next call can see count.
pub(crate) fn slot_rows(program: &Program, name: &str, data: &SlotData, len: usize) -> Result<Vec<Made>, String> {
    let slot = &program.slots[name];
    match (slot, data) {
        (Slot::Kv { kv_heads, head_dim, window, dtype }, SlotData::Kv { dtype: found, rows, keys, values }) => {
            let width = kv_heads * head_dim;
            if found != dtype || *rows != len || keys.len() != rows * width * dtype.bytes() || values.len() != keys.len() {
                let bytes = (keys.len(), values.len());
                return Err(format!("slot `{name}`: exported {rows} rows of {found:?} in {bytes:?} bytes, expected {len} of {dtype:?}"));
            }
            let dead = window.map_or(0, |w| len.saturating_sub(w - 1)) * width * dtype.bytes();
            let made =
                |what: &str, bytes: &[u8]| Made { name: format!("{what} of slot `{name}`"), width, numbers: dtype.numbers(&bytes[dead..]) };
            Ok(vec![made("keys", keys), made("values", values)])
        }
        (Slot::Fifo { channels: width, .. } | Slot::Delta { value_dim: width, .. }, SlotData::Recurrent(numbers)) => {
            Ok(vec![Made { name: format!("slot `{name}`"), width: *width, numbers: numbers.clone() }])
        }
        _ => Err(format!("slot `{name}`: the export is of the wrong kind for {slot:?}")),
    }
}
