//! How much work calibration is, and how long the rest of it will take.

use super::{
    multiply::Multiplier,
    parts::{Part, Product},
};
use crate::{ForgeError, numbers::weight_rows};
use qhx_ir::{Matrix, OpKind, Program};
use std::{
    cell::Cell,
    time::{Duration, Instant},
};

/// Before this share of the work is done, the time is told by what a product of matrices takes.
const TOO_EARLY: f64 = 0.02;
/// Work takes about so many times as long as matrix products alone would.
const BESIDE_PRODUCTS: f64 = 1.5;

/// How far the work is.
pub(crate) struct Pace {
    started: Instant,
    /// Multiplications in all, and how many a second did in a trial.
    total: f64,
    per_second: f64,
    done: Cell<f64>,
}

impl Pace {
    /// Of so many multiplications on a device, which is tried out.
    pub(crate) fn new(multiplier: &Multiplier<'_>, total: f64) -> Result<Self, ForgeError> {
        const SIZE: usize = 384;
        let numbers = vec![1.0; SIZE * SIZE];
        let mut product = vec![0.0; SIZE * SIZE];
        let matrix = Matrix::dense(&numbers, SIZE);
        multiplier.add_product(matrix, matrix, &mut product, SIZE)?;
        let started = Instant::now();
        multiplier.add_product(matrix, matrix, &mut product, SIZE)?;
        let per_second = SIZE.pow(3) as f64 / started.elapsed().as_secs_f64().max(1e-6);
        Ok(Self { started: Instant::now(), total, per_second, done: Cell::new(0.0) })
    }

    /// Some work is done.
    pub(crate) fn add(&self, work: f64) {
        self.done.set(self.done.get() + work);
    }

    /// About how long the rest will take.
    pub(crate) fn left(&self) -> Duration {
        let (done, rest) = (self.done.get(), (self.total - self.done.get()).max(0.0));
        let seconds = match done > TOO_EARLY * self.total {
            true => self.started.elapsed().as_secs_f64() * rest / done,
            false => BESIDE_PRODUCTS * rest / self.per_second,
        };
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }
}

/// Multiplications to round the weights that a part begins with, by so many rows.
pub(super) fn rounding(program: &Program, part: &Part, rows: usize) -> f64 {
    let mut work = 0.0;
    for product in &part.products {
        let (weights, inputs) = match product {
            Product::Linear { weights, .. } => (weights.iter().collect(), 1),
            // Gate and up share one input, down has its own, for each expert.
            Product::Experts(op) => (op.matrices(), 2),
        };
        for (i, weight) in weights.into_iter().rev().enumerate() {
            let weight = &program.weights[weight];
            let columns = weight.shape[weight.shape.len() - 1] as f64;
            if i < inputs {
                work += 1.5 * rows as f64 * columns * columns + columns.powi(3) / 3.0;
            }
            work += 2.5 * weight_rows(weight) as f64 * columns * columns;
        }
    }
    work
}

/// Multiplications to run a part over so many rows, in f32 and as it is stored.
pub(super) fn running(program: &Program, part: &Part, rows: usize) -> f64 {
    let matrices = part.ops.iter().filter_map(|&op| match &program.ops[op].op {
        OpKind::Linear { weight, .. } => Some(program.weights[weight].shape.iter().product::<usize>()),
        OpKind::Experts { gate, .. } => Some(3 * program.weights[gate].shape[1..].iter().product::<usize>()),
        _ => None,
    });
    1.5 * rows as f64 * matrices.sum::<usize>() as f64
}
