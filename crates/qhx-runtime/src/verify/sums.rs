//! Sums over the numbers of every weight, which show damage to any one of them.
//!
//! Prompts visit few rows of a table and few experts, and a single weight hardly moves a stage's result. So every stored weight is decoded, number by number, and
//! summed with signs that are random but fixed: `Σ ±w`, and `Σ w²`. Each number is in the sum with factor 1 or −1, so a change of any one changes the
//! sum by as much. The sums are taken in f64, within a row in eight lanes and then unit by unit, an order that depends on the shape alone: they are
//! equal on every machine, for any number of threads, and are compared nearly to the last digit.

use super::VerifyError;
use crate::{Cancel, Error, sample::random::mix};
use qhx_bundle::{Bundle, parity::WeightSum};
use qhx_ir::{Name, WeightTensor};
use std::{
    collections::{BTreeMap, HashSet},
    panic::resume_unwind,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// Numbers that one thread sums at a time, at least a row.
const NUMBERS_PER_UNIT: usize = 1 << 18;
const LANES: usize = 8;

/// The sums of every weight of a bundle, in the order of their names.
pub fn weight_sums(bundle: &Bundle, cancel: &Cancel) -> Result<Vec<WeightSum>, VerifyError> {
    let mut users: BTreeMap<&Name, Vec<String>> = BTreeMap::new();
    let mut seen: HashSet<(&Name, &Name)> = HashSet::new();
    for program in bundle.programs().values() {
        for (place, op) in program.ops.iter().enumerate() {
            let stage = &program.stages[program.stage_of_op(place)].name;
            for weight in op.op.weights().into_iter().filter(|weight| seen.insert((weight, stage))) {
                users.entry(weight).or_default().push(stage.to_string());
            }
        }
    }
    let weights = bundle.weights();
    let mut sums = Vec::new();
    for (weight, stages) in users {
        let Some(tensor) = weights.tensor(weight) else { continue };
        let (sum, squares) = tensor_sums(weight, &tensor, cancel)?;
        sums.push(WeightSum { weight: weight.to_string(), stages, sum, squares });
    }
    Ok(sums)
}

/// Whether two sums are of the same numbers. JSON may cost the last digits. What is no number is never the same: a flipped exponent makes infinities.
pub(super) fn same(a: f64, b: f64) -> bool {
    a.is_finite() && b.is_finite() && (a - b).abs() <= 4.0 * f64::EPSILON * a.abs().max(b.abs())
}

fn tensor_sums(name: &str, tensor: &WeightTensor, cancel: &Cancel) -> Result<(f64, f64), Error> {
    let (rows, columns) = (tensor.rows(), tensor.columns());
    let unit = (NUMBERS_PER_UNIT / columns.max(1)).max(1);
    let units = rows.div_ceil(unit);
    let (key, next) = (key(name), AtomicUsize::new(0));
    let worker = || {
        let mut done = Vec::new();
        let mut row = vec![0.0; columns];
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= units || cancel.is_cancelled() {
                return done;
            }
            let (mut sum, mut squares) = (0.0, 0.0);
            for r in i * unit..rows.min((i + 1) * unit) {
                tensor.decode_row(r, &mut row);
                let (row_sum, row_squares) = row_sums(mix(key ^ mix(r as u64)), &row);
                sum += row_sum;
                squares += row_squares;
            }
            done.push((i, sum, squares));
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(units);
    let mut done = thread::scope(|scope| {
        // This thread works too, so that a system that grants no thread is only slower.
        let others: Vec<_> = (1..threads).filter_map(|_| thread::Builder::new().spawn_scoped(scope, worker).ok()).collect();
        let mut done = worker();
        others.into_iter().for_each(|other| done.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic))));
        done
    });
    if cancel.is_cancelled() {
        return Err(Error::Cancelled);
    }
    done.sort_by_key(|(i, ..)| *i);
    Ok(done.iter().fold((0.0, 0.0), |(sum, squares), unit| (sum + unit.1, squares + unit.2)))
}

fn row_sums(key: u64, row: &[f32]) -> (f64, f64) {
    let (mut sums, mut squares) = ([0f64; LANES], [0f64; LANES]);
    for (block, numbers) in row.chunks(64).enumerate() {
        let signs = signs(key, block as u64);
        for (group, numbers) in numbers.chunks(LANES).enumerate() {
            for (lane, x) in numbers.iter().enumerate() {
                let sign = ((signs >> (group * LANES + lane)) as u32) << 31;
                sums[lane] += f64::from(f32::from_bits(x.to_bits() ^ sign));
                squares[lane] += f64::from(*x) * f64::from(*x);
            }
        }
    }
    (sums.iter().sum(), squares.iter().sum())
}

/// 64 random bits for block `block` under `key`.
pub(super) fn signs(key: u64, block: u64) -> u64 {
    mix(key.wrapping_add(block.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
}

/// A number for a name.
pub(super) fn key(name: &str) -> u64 {
    mix(name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(change: impl FnOnce(&mut [f32])) -> WeightTensor {
        let mut values: Vec<f32> = (0..70 * 130).map(|i| ((i * 7919 % 1000) as f32 - 499.5) / 300.0).collect();
        change(&mut values);
        WeightTensor::from_f32(&[70, 130], &values).unwrap()
    }

    fn sums(tensor: &WeightTensor) -> (f64, f64) {
        tensor_sums("w", tensor, &Cancel::new()).unwrap()
    }

    #[test]
    fn any_single_number_counts() {
        let whole = sums(&tensor(|_| {}));
        assert_eq!(sums(&tensor(|_| {})), whole);
        for i in (0..70 * 130).step_by(97) {
            let negated = sums(&tensor(|values| values[i] = -values[i]));
            assert!(!same(negated.0, whole.0) && same(negated.1, whole.1), "{i}");
            let exponent = sums(&tensor(|values| values[i] = f32::from_bits(values[i].to_bits() ^ 1 << 30)));
            assert!(!same(exponent.0, whole.0), "{i}");
            let last_bit = sums(&tensor(|values| values[i] = f32::from_bits(values[i].to_bits() ^ 1)));
            assert!(!same(last_bit.0, whole.0), "{i}");
        }
    }

    #[test]
    fn numbers_that_change_places_are_seen() {
        let whole = sums(&tensor(|_| {}));
        assert!(
            !same(sums(&tensor(|values| values.swap(0, 1))).0, whole.0) || !same(sums(&tensor(|values| values.swap(0, 130))).0, whole.0)
        );
        assert!(!same(f64::NAN, f64::NAN) && !same(f64::INFINITY, 1.0) && same(0.0, -0.0) && same(1.0, 1.0 + f64::EPSILON));
    }
}
