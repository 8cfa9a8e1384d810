//! The Hadamard transform as products with small constant matrices.
//!
//! The transform of `n = a · b` numbers, `a` a power of two, is the Kronecker product of those of `a` and of `b`. Each row as a matrix `[a, b]` is multiplied by the
//! transform of `b`, turned, multiplied by that of `a`, and turned back: `n · (a + b)` products instead of `n²`. Both are orthogonal, so no number grows beyond its
//! row's length.

use super::Lowering;
use crate::graph::TensorId;
use qhx_ir::{DeviceError, Name, hadamard::factors, hadamard_row};

/// Widths up to this are one product: turning would cost more.
const ONE_PRODUCT: usize = 128;

impl Lowering<'_> {
    pub(super) fn hadamard(&mut self, x: &Name) -> Result<TensorId, DeviceError> {
        let x = self.value(x)?;
        let (dims, width) = (self.builder.dims(x), self.builder.width(x));
        let rows = dims.iter().product::<usize>() / width;
        let (a, b) = split(width);
        let flat = self.builder.reshape("rows", x, &[rows * a, b]);
        let mut y = self.transformed(flat);
        if a > 1 {
            let parts = self.builder.reshape("parts", y, &[rows, a, b]);
            let turned = self.builder.transpose("turned", parts, &[0, 2, 1]);
            let flat = self.builder.reshape("turned_rows", turned, &[rows * b, a]);
            let both = self.transformed(flat);
            let parts = self.builder.reshape("both", both, &[rows, b, a]);
            y = self.builder.transpose("turned_back", parts, &[0, 2, 1]);
        }
        Ok(self.builder.reshape("shaped", y, &dims))
    }

    /// Rows `[.., n]` times the matrix of order `n`.
    fn transformed(&mut self, rows: TensorId) -> TensorId {
        let order = self.builder.width(rows);
        let matrix = self.builder.shared(&format!("hadamard.{order}"), &[order, order], || {
            let mut numbers = vec![0.0; order * order];
            for (i, row) in numbers.chunks_exact_mut(order).enumerate() {
                row[i] = 1.0;
                hadamard_row(row);
            }
            numbers
        });
        self.builder.fully_connected("transformed", rows, matrix, None)
    }
}

/// A width as `a · b` with `a` a power of two, both as small as possible.
fn split(width: usize) -> (usize, usize) {
    let (power, _) = factors(width);
    let mut a = 1;
    if width > ONE_PRODUCT {
        while a < power && 2 * a <= width / (2 * a) {
            a *= 2;
        }
    }
    (a, width / a)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_split_evenly() {
        let widths = [
            (1, (1, 1)),
            (64, (1, 64)),
            (96, (1, 96)),
            (448, (16, 28)),
            (576, (16, 36)),
            (1536, (32, 48)),
            (6144, (64, 96)),
            (1022, (2, 511)),
        ];
        for (width, parts) in widths {
            assert_eq!(split(width), parts, "{width}");
        }
    }
}
