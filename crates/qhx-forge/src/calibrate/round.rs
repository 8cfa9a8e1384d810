//! Rounding with error feedback: each column of a matrix is rounded after the columns before it, and makes up for their errors as far as the moments say that it can.
//!
//! With `H = M · D · Mᵀ`, the squared error of a row over all inputs is `Σ D[k] · (w[k] + Σ_{j<k} e[j] · M[j, k] − v[k])²`, where w are the numbers wanted, v those stored and
//! `e = w − v`: so column `k` is rounded from what stands in the parentheses.

use super::{factor::Factor, multiply::Multiplier};
use crate::{
    ForgeError,
    encode::{EncodedRows, Scales, put, quant_range},
    rows::{rows_of_a_part, side_by_side},
};
use half::f16;
use qhx_ir::{BlockEncoding, Encoding, RowBytes, ScaleType};
use std::ops::Range;

/// Denominators that are tried for a scale, as shares of the range of the integers: below 1 the block keeps room, above it its largest number is cut.
const TRIED: Range<usize> = 0..16;
const FIRST_TRIED: f32 = 0.76;
const TRIED_STEP: f32 = 0.03;

/// The integers of an encoding and what shares a scale.
#[derive(Clone, Copy)]
struct Grid {
    /// Numbers with one scale.
    block: usize,
    least: f32,
    most: f32,
    /// The type in which scales are stored.
    scale: ScaleType,
    /// Whether a scale may be negative, so that the side with one more integer is where it is needed.
    signed: bool,
}

impl Grid {
    fn of(encoding: Encoding, scales: Scales, columns: usize) -> Option<Self> {
        match encoding {
            Encoding::I8Row => Some(Self { block: columns, least: -127.0, most: 127.0, scale: ScaleType::F32, signed: false }),
            Encoding::Block(block @ BlockEncoding { min: false, .. }) => {
                let ((least, most), of_row) = (quant_range(block), scales == Scales::Row);
                Some(Self { block: if of_row { columns } else { block.block }, least, most, scale: block.scale, signed: !of_row })
            }
            _ => None,
        }
    }

    /// The scale with which some numbers lose least, as it is stored. With few integers several are tried.
    fn scale(&self, numbers: &[f32], weights: &[f32]) -> f32 {
        let largest = numbers.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        if -self.least == self.most {
            return self.stored(largest / self.most);
        }
        let signs: &[f32] = if self.signed { &[-1.0, 1.0] } else { &[1.0] };
        let mut best = (f32::INFINITY, 0.0);
        for step in TRIED {
            for sign in signs {
                let share = FIRST_TRIED + TRIED_STEP * step as f32;
                let scale = self.stored(sign * largest / (share * -self.least));
                let error = self.error(scale, numbers, weights);
                if error < best.0 {
                    best = (error, scale);
                }
            }
        }
        best.1
    }

    fn error(&self, scale: f32, numbers: &[f32], weights: &[f32]) -> f32 {
        let inverse = inverse(scale);
        numbers.iter().zip(weights).map(|(x, w)| w * (x - self.quant(x * inverse) * scale).powi(2)).sum()
    }

    fn quant(&self, x: f32) -> f32 {
        nearest(x.clamp(self.least, self.most))
    }

    fn stored(&self, scale: f32) -> f32 {
        match self.scale {
            ScaleType::F32 => scale,
            ScaleType::F16 => f16::from_f32(scale).to_f32(),
        }
    }
}

fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// The nearest integer, the even one of two, of a number below 2²²: the same as `round_ties_even`, but every processor does it on vectors.
fn nearest(x: f32) -> f32 {
    const MAGIC: f32 = 1.5 * (1 << 23) as f32;
    (x + MAGIC) - MAGIC
}

/// Whether rows of this encoding can be rounded by moments.
pub(crate) fn can_round(encoding: Encoding) -> bool {
    Grid::of(encoding, Scales::Block, 32).is_some()
}

/// Rounds `wanted`, whole rows, by the factors of the moments of what they are multiplied with.
pub(crate) fn round(
    multiplier: &Multiplier<'_>,
    factor: &Factor,
    encoding: Encoding,
    scales: Scales,
    row_bytes: RowBytes,
    wanted: &[f32],
) -> Result<EncodedRows, ForgeError> {
    let n = factor.columns();
    let grid = Grid::of(encoding, scales, n).ok_or_else(|| ForgeError::Calibration(format!("{encoding} cannot be rounded by moments")))?;
    let per_row = n.div_ceil(grid.block);
    let mut rows = Rounded { columns: n, per_row, current: wanted.to_vec(), quants: vec![0; wanted.len()], scales: Vec::new() };
    rows.scales = vec![0.0; wanted.len() / n * per_row];
    for block in factor.blocks() {
        let errors = rows.round_block(grid, multiplier.threads, &block, factor, wanted);
        factor.spread(multiplier, &block, &errors, &mut rows.current)?;
    }
    Ok(rows.encode(encoding, row_bytes, multiplier.threads))
}

/// Rows on their way.
struct Rounded {
    columns: usize,
    /// Scales of a row.
    per_row: usize,
    /// What is rounded: the wanted numbers and what makes up for errors so far.
    current: Vec<f32>,
    quants: Vec<i8>,
    scales: Vec<f32>,
}

impl Rounded {
    /// Rounds a block of columns in all rows; gives what is lost in each.
    fn round_block(&mut self, grid: Grid, threads: usize, block: &Range<usize>, factor: &Factor, wanted: &[f32]) -> Vec<f32> {
        let (n, per_row, size) = (self.columns, self.per_row, block.len());
        let within = factor.within(block);
        let mut errors = vec![0.0; wanted.len() / n * size];
        let share = rows_of_a_part(wanted.len(), n, threads);
        let parts = self.current.chunks_mut(share * n).zip(self.quants.chunks_mut(share * n)).zip(self.scales.chunks_mut(share * per_row));
        side_by_side(
            parts.zip(wanted.chunks(share * n)).zip(errors.chunks_mut(share * size)),
            |((((current, quants), scales), wanted), errors)| {
                let rows = current.chunks_exact_mut(n).zip(quants.chunks_exact_mut(n)).zip(scales.chunks_exact_mut(per_row));
                for ((((current, quants), scales), wanted), errors) in rows.zip(wanted.chunks_exact(n)).zip(errors.chunks_exact_mut(size)) {
                    round_row(grid, block, &within, factor.weights(), wanted, current, quants, scales, errors);
                }
            },
        );
        errors
    }

    fn encode(&self, encoding: Encoding, row_bytes: RowBytes, threads: usize) -> EncodedRows {
        let share = rows_of_a_part(self.quants.len(), self.columns, threads);
        let parts = self.quants.chunks(share * self.columns).zip(self.scales.chunks(share * self.per_row));
        EncodedRows::concat(side_by_side(parts, |(quants, scales)| encode(encoding, row_bytes, self.columns, quants, scales, self.per_row)))
    }
}

/// Quants and scales of whole rows in stored form.
fn encode(encoding: Encoding, row_bytes: RowBytes, columns: usize, quants: &[i8], scales: &[f32], per_row: usize) -> EncodedRows {
    let mut out = EncodedRows::zeroed(row_bytes, quants.len() / columns);
    for (row, (quants, scales)) in quants.chunks_exact(columns).zip(scales.chunks_exact(per_row)).enumerate() {
        let data = &mut out.data[row * row_bytes.data..][..row_bytes.data];
        let stored = &mut out.scale[row * row_bytes.scale..][..row_bytes.scale];
        match encoding {
            Encoding::Block(block) => {
                for b in 0..columns.div_ceil(block.block) {
                    // One scale of a whole row is stored for each of its blocks.
                    put(block.scale, stored, b, scales[b % scales.len()]);
                }
                quants.iter().enumerate().for_each(|(k, &q)| block.quants.put(data, k, i32::from(q) + block.quants.zero()));
            }
            _ => {
                stored.copy_from_slice(&scales[0].to_le_bytes());
                data.iter_mut().zip(quants).for_each(|(to, &q)| *to = q as u8);
            }
        }
    }
    out
}

/// Rounds a block of columns of one row. A scale that begins here is chosen from what the numbers have become by now; one for the whole row from what is wanted.
#[allow(clippy::too_many_arguments)] // the parts of one row
fn round_row(
    grid: Grid,
    block: &Range<usize>,
    within: &[f32],
    weights: &[f32],
    wanted: &[f32],
    current: &mut [f32],
    quants: &mut [i8],
    scales: &mut [f32],
    errors: &mut [f32],
) {
    let size = block.len();
    for k in block.clone() {
        if k % grid.block == 0 {
            let numbers = k..current.len().min(k + grid.block);
            scales[k / grid.block] = grid.scale(&current[numbers.clone()], &weights[numbers]);
        }
        let scale = scales[k / grid.block];
        let q = grid.quant(current[k] * inverse(scale));
        quants[k] = q as i8;
        let error = wanted[k] - q * scale;
        let at = k - block.start;
        errors[at] = error;
        let behind = &within[at * size + at + 1..(at + 1) * size];
        current[k + 1..block.end].iter_mut().zip(behind).for_each(|(x, m)| *x += error * m);
    }
}
