//! The mathematics against plain dense computations in f64.

use super::{
    factor::Factor,
    moments::{Moments, Shift},
    multiply::Multiplier,
    round::{can_round, round},
};
use crate::encode::{Scales, encode};
use qhx_ir::{AlignedBytes, Device, Encoding, WeightTensor};
use qhx_runtime::registry;
use std::sync::{Arc, atomic::AtomicBool};

static RUNNING: AtomicBool = AtomicBool::new(false);

fn device() -> Arc<dyn Device> {
    registry::plain(Some(2)).unwrap()
}

/// Numbers around 0, by a linear congruential generator.
fn random(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next() + next() + next()).collect()
}

/// Rows of which neighbouring columns have much in common, and some columns are far larger than others.
fn correlated(seed: u64, rows: usize, columns: usize) -> Vec<f32> {
    let numbers = random(seed, rows * (columns + 3));
    let row = |row: usize| {
        let numbers = &numbers[row * (columns + 3)..][..columns + 3];
        (0..columns).map(move |c| numbers[c..c + 4].iter().sum::<f32>() * if c % 17 == 3 { 9.0 } else { 1.0 })
    };
    (0..rows).flat_map(row).collect()
}

fn moments(multiplier: &Multiplier<'_>, x: &[f32], columns: usize) -> Moments {
    Moments::of(multiplier, columns, &x.chunks_exact(columns).collect::<Vec<_>>()).unwrap()
}

/// `H + λ` in f64.
fn damped(second: &[f32], n: usize, damping: f64) -> Vec<f64> {
    let mut full: Vec<f64> = (0..n * n).map(|at| f64::from(second[(at / n).max(at % n) * n + (at / n).min(at % n)])).collect();
    let mean = (0..n).map(|i| full[i * n + i]).sum::<f64>() / n as f64;
    (0..n).for_each(|i| full[i * n + i] += damping * mean);
    full
}

/// The inverse of a matrix, by elimination.
fn inverse(matrix: &[f64], n: usize) -> Vec<f64> {
    let (mut a, mut b) = (matrix.to_vec(), vec![0.0; n * n]);
    (0..n).for_each(|i| b[i * n + i] = 1.0);
    for k in 0..n {
        let pivot = a[k * n + k];
        (0..n).for_each(|j| (a[k * n + j], b[k * n + j]) = (a[k * n + j] / pivot, b[k * n + j] / pivot));
        for i in (0..n).filter(|&i| i != k) {
            let factor = a[i * n + k];
            (0..n).for_each(|j| {
                a[i * n + j] -= factor * a[k * n + j];
                b[i * n + j] -= factor * b[k * n + j];
            });
        }
    }
    b
}

#[test]
fn moments_are_sums_of_products() {
    let device = device();
    let multiplier = Multiplier { device: &device, cancel: &RUNNING, threads: 2 };
    for (rows, n) in [(1, 1), (40, 7), (1500, 300)] {
        let (x, exact) = (correlated(1, rows, n), correlated(2, rows, n));
        let (x_rows, exact_rows): (Vec<&[f32]>, Vec<&[f32]>) = x.chunks_exact(n).zip(exact.chunks_exact(n)).unzip();
        let found = Moments::of(&multiplier, n, &x_rows).unwrap().second;
        let sum = |of: &dyn Fn(usize) -> f64| (0..rows).map(of).sum::<f64>();
        let near = |a: f32, b: f64| (f64::from(a) - b).abs() < 2e-3 * (rows as f64).sqrt() + 1e-5 * b.abs();
        for (i, j) in (0..n).step_by(13).flat_map(|i| (0..=i).map(move |j| (i, j))) {
            let second = sum(&|t| f64::from(x[t * n + i]) * f64::from(x[t * n + j]));
            assert!(near(found[i * n + j], second), "{n}: {i} {j}");
        }
        // One row of weights, as one of few and as one of many.
        let weights = random(3, n);
        let away = |t: usize| (0..n).map(|j| f64::from(weights[j]) * (f64::from(exact[t * n + j]) - f64::from(x[t * n + j]))).sum::<f64>();
        let away: Vec<f64> = (0..rows).map(away).collect();
        let forms = [0, 1 << 20].map(|weight_rows| Shift::of(&multiplier, n, (x_rows.clone(), exact_rows.clone()), weight_rows).unwrap());
        assert!(matches!(forms, [Shift::Rows { .. }, Shift::Summed(_)]) || n == 1, "{n}");
        for shift in forms {
            let shifted = shift.of_weights(&multiplier, n, &weights).unwrap();
            for (i, &shifted) in shifted.iter().enumerate() {
                let wanted = sum(&|t| away[t] * f64::from(x[t * n + i]));
                assert!(
                    (f64::from(shifted) - wanted).abs() < 2e-2 * (rows * n) as f64 / (rows as f64).sqrt() + 1e-4 * wanted.abs(),
                    "{n}: {i}: {shifted} {wanted}"
                );
            }
        }
    }
}

#[test]
fn factors_solve_what_they_were_made_of() {
    let device = device();
    let multiplier = Multiplier { device: &device, cancel: &RUNNING, threads: 2 };
    for n in [1, 5, 128, 130, 300] {
        let x = correlated(3, 2 * n + 10, n);
        let second = moments(&multiplier, &x, n).second;
        let expected = inverse(&damped(&second, n, 0.01), n);
        let factor = Factor::new(&multiplier, second, n, 0.01).unwrap().unwrap();
        let rows = random(4, 3 * n);
        let mut solved = rows.clone();
        factor.solve(&multiplier, &mut solved).unwrap();
        let largest = solved.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        for (at, found) in solved.iter().enumerate() {
            let row = &rows[at / n * n..][..n];
            let wanted: f64 = row.iter().enumerate().map(|(j, &x)| f64::from(x) * expected[j * n + at % n]).sum();
            assert!((f64::from(*found) - wanted).abs() < 2e-3 * f64::from(largest), "{n}: {found} {wanted}");
        }
    }
    assert!(Factor::new(&multiplier, vec![-1.0], 1, 0.0).unwrap().is_none(), "not positive definite");
    assert!(Factor::new(&multiplier, vec![0.0; 4], 2, 0.01).unwrap().is_none(), "nothing but zeros");
}

/// Rows in stored form as numbers.
fn decoded(encoding: Encoding, columns: usize, encoded: &crate::encode::EncodedRows) -> Vec<f32> {
    let part = |bytes: &[u8]| (!bytes.is_empty()).then(|| AlignedBytes::copy_of(bytes).into());
    let rows = encoded.data.len() / encoding.row_bytes(columns).unwrap().data;
    let data = AlignedBytes::copy_of(&encoded.data).into();
    let tensor = WeightTensor::new(encoding, vec![rows, columns], data, part(&encoded.scale), part(&encoded.min)).unwrap();
    let mut numbers = vec![0.0; rows * columns];
    numbers.chunks_exact_mut(columns).enumerate().for_each(|(row, to)| tensor.decode_row(row, to));
    numbers
}

/// The error of products with rows `x`.
fn error(x: &[f32], n: usize, wanted: &[f32], stored: &[f32]) -> f64 {
    let mut sum = 0.0;
    for (wanted, stored) in wanted.chunks_exact(n).zip(stored.chunks_exact(n)) {
        for x in x.chunks_exact(n) {
            sum += (0..n).map(|k| f64::from(wanted[k] - stored[k]) * f64::from(x[k])).sum::<f64>().powi(2);
        }
    }
    sum
}

/// Rounding int8 rows with the scale of each row, by the inverse of the moments: the form in which the method was published.
fn naive(wanted: &[f32], n: usize, h: &[f64]) -> Vec<f32> {
    let mut rows: Vec<f64> = wanted.iter().map(|&x| f64::from(x)).collect();
    let mut stored = vec![0.0; wanted.len()];
    for (row, stored) in rows.chunks_exact_mut(n).zip(stored.chunks_exact_mut(n)) {
        let scale = f64::from(row.iter().fold(0.0f32, |m, &x| m.max((x as f32).abs())) / 127.0);
        for k in 0..n {
            // The inverse of what is left of the moments once the columns before are fixed.
            let size = n - k;
            let rest: Vec<f64> = (0..size * size).map(|at| h[(k + at / size) * n + k + at % size]).collect();
            let inverse = inverse(&rest, size);
            let q = (row[k] / scale).round_ties_even().clamp(-127.0, 127.0) * scale;
            let error = (row[k] - q) / inverse[0];
            (0..size).for_each(|j| row[k + j] -= error * inverse[j]);
            stored[k] = q as f32;
        }
    }
    stored
}

#[test]
fn rounding_is_the_published_one() {
    let device = device();
    let multiplier = Multiplier { device: &device, cancel: &RUNNING, threads: 2 };
    let n = 24;
    let x = correlated(5, 200, n);
    let wanted = random(6, 4 * n);
    let second = moments(&multiplier, &x, n).second;
    let expected = naive(&wanted, n, &damped(&second, n, 0.01));
    let factor = Factor::new(&multiplier, second, n, 0.01).unwrap().unwrap();
    let row_bytes = Encoding::I8Row.row_bytes(n).unwrap();
    let found = round(&multiplier, &factor, Encoding::I8Row, Scales::Block, row_bytes, &wanted).unwrap();
    let found = decoded(Encoding::I8Row, n, &found);
    let same = found.iter().zip(&expected).filter(|(a, b)| (*a - *b).abs() < 1e-4).count();
    // A number half way between two integers may go either way.
    assert!(same + 2 >= found.len(), "{same} of {}", found.len());
}

#[test]
fn products_change_less_than_by_plain_rounding() {
    let device = device();
    let multiplier = Multiplier { device: &device, cancel: &RUNNING, threads: 2 };
    // Not whole blocks, and more than one block of columns.
    let n = 150;
    let (x, others) = (correlated(7, 600, n), correlated(8, 200, n));
    let wanted = random(9, 6 * n);
    for encoding in Encoding::all().into_iter().filter(|&encoding| can_round(encoding)) {
        for scales in [Scales::Block, Scales::Row] {
            let factor = Factor::new(&multiplier, moments(&multiplier, &x, n).second, n, 0.01).unwrap().unwrap();
            let row_bytes = encoding.row_bytes(n).unwrap();
            let rounded = |threads| round(&Multiplier { threads, ..multiplier }, &factor, encoding, scales, row_bytes, &wanted).unwrap();
            assert_eq!(rounded(1), rounded(3), "{encoding}: threads make no difference");
            let plain = encode(encoding, scales, n, row_bytes, &wanted);
            let errors = [rounded(1), plain].map(|encoded| error(&others, n, &wanted, &decoded(encoding, n, &encoded)));
            assert!(errors[0] < 0.7 * errors[1], "{encoding} {scales:?}: {errors:?}");
        }
    }
    assert!(!can_round(Encoding::F16) && !can_round(Encoding::I4_BLOCK32_MIN));
}
