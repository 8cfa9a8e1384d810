//! Products of matrices in memory, beside programs.

use crate::{
    kernels::{Instructions, columns::Panel, dot},
    ops::linear::rows_collide,
    pool::Pool,
    work::{Chunks, Tiles, for_each},
};
use qhx_ir::Matrix;

/// Rows of the right matrix in one packed panel.
const PANEL: usize = 32;
/// Rows of the left matrix that meet a panel.
const TILE_ROWS: usize = 512;
/// Numbers between two copied rows beyond their own: a cache line.
const LINE: usize = 16;

/// Adds `left · rightᵀ` to a matrix whose rows are `stride` apart. Each number is summed in pieces that depend on the length of the rows alone.
pub(crate) fn add(pool: &Pool, instructions: Instructions, left: Matrix<'_>, right: Matrix<'_>, sum: &mut [f32], stride: usize) {
    assert_eq!(left.columns, right.columns, "rows of one length are multiplied");
    let columns = left.columns;
    if left.rows == 0 || right.rows == 0 || columns == 0 {
        return;
    }
    let piece = dot::piece(columns);
    let tile_columns = PANEL * (right.rows / TILE_ROWS).clamp(1, 4);
    let mut room = vec![0.0; pool.threads() * Panel::numbers(PANEL, piece)];
    let mut apart = Vec::new();
    for at in (0..columns).step_by(piece) {
        let k = (columns - at).min(piece);
        let (x, x_stride) = match rows_collide(left.stride) {
            true => (copied_apart(pool, left, at, k, &mut apart), k + LINE),
            false => (&left.numbers[at..], left.stride),
        };
        let tiles = Tiles::strided(sum, stride, left.rows, right.rows, TILE_ROWS, tile_columns);
        for_each(pool, tiles, &mut room, |_, mut tile, room| {
            for column in (0..tile.columns).step_by(PANEL) {
                let count = (tile.columns - column).min(PANEL);
                let rows = &right.numbers[(tile.first_column + column) * right.stride + at..];
                let panel = Panel::pack(instructions, rows, right.stride, count, k, room);
                let x = &x[tile.first_row * x_stride..];
                panel.products_into_tile(instructions, x, x_stride, true, &mut tile.columns_from(column, count));
            }
        });
    }
}

/// The numbers `at .. at + k` of all rows, so far apart that they do not meet in the same few places of a cache.
fn copied_apart<'a>(pool: &Pool, left: Matrix<'_>, at: usize, k: usize, apart: &'a mut Vec<f32>) -> &'a [f32] {
    apart.resize(left.rows * (k + LINE), 0.0);
    for_each(pool, Chunks::new(apart, TILE_ROWS * (k + LINE)), &mut [], |number, rows, _| {
        for (i, to) in rows.chunks_exact_mut(k + LINE).enumerate() {
            to[..k].copy_from_slice(&left.row(number * TILE_ROWS + i)[at..at + k]);
        }
    });
    apart
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_plain_sums_for_any_number_of_threads() {
        let numbers = |count: usize, step: usize| -> Vec<f32> { (0..count).map(|i| ((i * step % 61) as f32 - 30.0) / 16.0).collect() };
        // Rows with gaps; several pieces, panels and tiles; rows that collide.
        for (m, n, k, gap) in [(1, 1, 1, 0), (7, 5, 3, 2), (40, 70, 129, 1), (530, 33, 700, 0), (3, 600, 1024, 0), (2, 3, 0, 1)] {
            let (a, b) = (numbers(m * (k + gap), 13), numbers(n * (k + gap), 7));
            let left = Matrix { numbers: &a, stride: k + gap, rows: m, columns: k };
            let right = Matrix { numbers: &b, stride: k + gap, rows: n, columns: k };
            let stride = n + 3;
            let before = numbers(m * stride, 5);
            let mut wanted = before.clone();
            left.add_product(right, &mut wanted, stride);
            for instructions in Instructions::all() {
                let found = [1, 3].map(|threads| {
                    let mut sum = before.clone();
                    add(&Pool::new(threads).unwrap(), instructions, left, right, &mut sum, stride);
                    sum
                });
                assert_eq!(found[0], found[1], "{instructions:?} {m} {n} {k}");
                for (at, (found, wanted)) in found[0].iter().zip(&wanted).enumerate() {
                    assert!((found - wanted).abs() < 1e-2, "{instructions:?} {m} {n} {k}: {at}: {found} {wanted}");
                    assert!(at % stride < n || found.to_bits() == before[at].to_bits(), "the gap at {at} was written");
                }
            }
        }
    }
}
