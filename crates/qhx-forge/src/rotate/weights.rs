//! The numbers of weights that are made of others: rotated ones, biases that were folded into others, and plainly rounded ones. Rows are rotated a few at a time; columns need all rows of a block at once, which is at most one matrix in f32.

use crate::{
    ForgeError,
    encode::{EncodedRows, Scales, encode},
    numbers::{NUMBERS_PER_PIECE, Numbers, check_numbers, threads, too_large},
    pen::{Folded, Recipe, Rotated, Side},
    rows::side_by_side,
};
use qhx_ir::{Encoding, Weight, hadamard::Hadamard};
use std::ops::Range;

/// Columns that are transformed one after the other before the next are touched: their numbers in a row lie side by side.
const STRIP: usize = 16;

impl Numbers<'_> {
    /// Encodes the rows `rows` of a weight that is made of others, on all cores; `take` gets each piece with its first row.
    pub(crate) fn encode_derived(
        &self,
        weight: &Weight,
        recipe: &Recipe,
        rows: Range<usize>,
        take: &mut dyn FnMut(Range<usize>, EncodedRows) -> Result<(), ForgeError>,
    ) -> Result<(), ForgeError> {
        let columns = weight.shape[weight.shape.len() - 1];
        let row_bytes = weight.encoding.row_bytes(columns).ok_or_else(|| too_large(recipe))?;
        let piece = (NUMBERS_PER_PIECE / columns).max(1);
        let together = (piece * threads()).next_multiple_of(recipe.rows_together());
        let mut first = rows.start;
        while first < rows.end {
            let end = rows.end.min((first / together + 1) * together);
            let numbers = self.derived(weight, recipe, first..end)?;
            let encode = |numbers: &[f32]| {
                check_numbers(recipe.tensors()[0], weight.encoding, numbers)?;
                Ok::<_, ForgeError>(encode(weight.encoding, self.scales, columns, row_bytes, numbers))
            };
            let pieces: Vec<&[f32]> = numbers.chunks(piece * columns).collect();
            for pieces in pieces.chunks(threads()) {
                for (numbers, encoded) in pieces.iter().zip(side_by_side(pieces.iter().copied(), encode)) {
                    let next = first + numbers.len() / columns;
                    take(first..next, encoded?)?;
                    first = next;
                }
            }
        }
        Ok(())
    }

    /// Some rows of a weight, whatever its recipe, as f32 numbers.
    pub(crate) fn derived(&self, weight: &Weight, recipe: &Recipe, rows: Range<usize>) -> Result<Vec<f32>, ForgeError> {
        match recipe {
            Recipe::Rotated(rotated) => self.rotated(weight, rotated, rows),
            Recipe::Folded(folded) => self.folded(weight, folded, rows),
            Recipe::Rounded(inner, encoding) => self.rounded(weight, inner, *encoding, rows),
            _ => self.floats(weight, recipe, rows),
        }
    }

    fn rotated(&self, weight: &Weight, rotated: &Rotated, rows: Range<usize>) -> Result<Vec<f32>, ForgeError> {
        let columns = weight.shape[weight.shape.len() - 1];
        match &rotated.side {
            Side::Input { block, gain } => {
                let mut numbers = self.derived(weight, &rotated.inner, rows)?;
                let vector = Weight { shape: vec![columns], encoding: weight.encoding };
                let gain = gain.as_ref().map(|gain| self.derived(&vector, gain, 0..1)).transpose()?;
                let transform = Hadamard::new(*block);
                let rows = numbers.len() / columns;
                side_by_side(numbers.chunks_mut(columns * rows.div_ceil(threads())), |rows| {
                    for row in rows.chunks_exact_mut(columns) {
                        gain.iter().for_each(|gain| row.iter_mut().zip(gain).for_each(|(x, gain)| *x *= gain));
                        row.chunks_exact_mut(*block).for_each(|block| transform.row(block));
                        // The first number of a transformed block is its mean.
                        row.iter_mut().step_by(*block).filter(|_| rotated.centred).for_each(|mean| *mean = 0.0);
                    }
                });
                Ok(numbers)
            }
            Side::Output { block } => {
                let all = rows.start / block * block..rows.end.next_multiple_of(*block);
                let mut numbers = self.derived(weight, &rotated.inner, all.clone())?;
                for block in numbers.chunks_exact_mut(block * columns) {
                    rotate_columns(block, columns);
                    if rotated.centred {
                        block[..columns].fill(0.0);
                    }
                }
                numbers.truncate((rows.end - all.start) * columns);
                numbers.drain(..(rows.start - all.start) * columns);
                Ok(numbers)
            }
        }
    }

    /// Some rows of a bias `[outputs]`, or of one for each expert, `[experts, outputs]`: each number belongs to a row of the matrix.
    fn folded(&self, weight: &Weight, folded: &Folded, rows: Range<usize>) -> Result<Vec<f32>, ForgeError> {
        let (outputs, inputs) = (weight.shape[weight.shape.len() - 1], folded.shape[folded.shape.len() - 1]);
        let f32s = |shape: &[usize]| Weight { shape: shape.to_vec(), encoding: Encoding::F32 };
        let vector = self.derived(&f32s(&[inputs]), &folded.vector, 0..1)?;
        let mut numbers = match &folded.bias {
            Some(bias) => self.derived(weight, bias, rows.clone())?,
            None => vec![0.0; rows.len() * outputs],
        };
        let piece = (NUMBERS_PER_PIECE / inputs).max(1);
        for (number, numbers) in numbers.chunks_mut(piece).enumerate() {
            let first = rows.start * outputs + number * piece;
            let matrix = self.derived(&f32s(&folded.shape), &folded.matrix, first..first + numbers.len())?;
            for (number, row) in numbers.iter_mut().zip(matrix.chunks_exact(inputs)) {
                let sum: f64 = row.iter().zip(&vector).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                *number = (f64::from(*number) + sum) as f32;
            }
        }
        Ok(numbers)
    }

    /// Some rows of a weight, each number the nearest that an encoding has.
    fn rounded(&self, weight: &Weight, inner: &Recipe, encoding: Encoding, rows: Range<usize>) -> Result<Vec<f32>, ForgeError> {
        let columns = weight.shape[weight.shape.len() - 1];
        let stored = Weight { encoding, ..weight.clone() };
        let tensor = Numbers { scales: Scales::Block, ..*self }.tensor(&stored, inner, rows.clone())?;
        let mut numbers = vec![0.0; rows.len() * columns];
        numbers.chunks_exact_mut(columns).enumerate().for_each(|(row, numbers)| tensor.decode_row(row, numbers));
        Ok(numbers)
    }
}

/// Transforms every column of a matrix.
fn rotate_columns(matrix: &mut [f32], columns: usize) {
    let rows = matrix.len() / columns;
    let transform = Hadamard::new(rows);
    // A strip comes back column after column.
    let rotated = |strip: &Range<usize>| {
        let mut numbers = vec![0.0; strip.len() * rows];
        for (number, row) in matrix.chunks_exact(columns).enumerate() {
            row[strip.clone()].iter().enumerate().for_each(|(column, &x)| numbers[column * rows + number] = x);
        }
        numbers.chunks_exact_mut(rows).for_each(|column| transform.row(column));
        numbers
    };
    let strips: Vec<Range<usize>> = (0..columns).step_by(STRIP).map(|first| first..columns.min(first + STRIP)).collect();
    let shares = strips.chunks(strips.len().div_ceil(threads()));
    let made = side_by_side(shares, |strips| strips.iter().map(rotated).collect::<Vec<_>>());
    for (strip, numbers) in strips.iter().zip(made.into_iter().flatten()) {
        for (number, row) in matrix.chunks_exact_mut(columns).enumerate() {
            row[strip.clone()].iter_mut().enumerate().for_each(|(column, x)| *x = numbers[column * rows + number]);
        }
    }
}
