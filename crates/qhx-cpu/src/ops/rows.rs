//! Moving rows: table look-up, picking, placing, joining and cutting.

use super::{Frame, for_rows, unit_rows};
use crate::{
    kernels::map::{self, Binary, Unary},
    matrix::Matrix,
    memory::{Rows, View},
    work::{Chunks, for_each},
};
use qhx_ir::DeviceError;

/// `out[t] = table[ids[t]] · scale`.
#[derive(Debug)]
pub(crate) struct Embed {
    pub(crate) ids: View,
    pub(crate) table: Matrix,
    pub(crate) scale: f32,
    pub(crate) out: View,
}

impl Embed {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) -> Result<(), DeviceError> {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let ids = inputs.integers(&self.ids);
        within(ids, self.table.rows, "table row")?;
        run.reads(ids.len() * self.table.bytes_per_row());
        for_rows(&run, out, self.table.columns, |first, part| {
            for (i, part) in part.chunks_mut(self.table.columns).enumerate() {
                self.table.decode(run.instructions, ids[first + i] as usize, 0, part);
                if self.scale != 1.0 {
                    map::unary_in_place(run.instructions, Unary::Scale(self.scale), part);
                }
            }
        });
        Ok(())
    }
}

/// `out[t] = Σ_j factor[t, j] · table[index[t, j]]`.
#[derive(Debug)]
pub(crate) struct Interpolate {
    pub(crate) index: View,
    pub(crate) factor: View,
    pub(crate) taps: usize,
    pub(crate) table: Matrix,
    pub(crate) out: View,
}

impl Interpolate {
    pub(crate) fn scratch(&self) -> usize {
        self.table.columns
    }

    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) -> Result<(), DeviceError> {
        let (run, ([out], inputs, scratch)) = (frame.run, frame.memory.split([&self.out]));
        let (index, factor) = (inputs.integers(&self.index), inputs.rows(&self.factor, self.taps));
        within(index, self.table.rows, "table row")?;
        run.reads(index.len() * self.table.bytes_per_row());
        let width = self.table.columns;
        let unit = unit_rows(width * self.taps);
        for_each(run.pool, Chunks::new(out, unit * width), scratch, |number, part, scratch| {
            for (i, part) in part.chunks_mut(width).enumerate() {
                let row = number * unit + i;
                part.fill(0.0);
                for (&index, &factor) in index[row * self.taps..][..self.taps].iter().zip(factor.row(row)) {
                    self.table.decode(run.instructions, index as usize, 0, &mut scratch[..width]);
                    map::binary_into_left(run.instructions, Binary::AddScaled(factor), part, &scratch[..width]);
                }
            }
        });
        Ok(())
    }
}

/// Copies parts of values, row by row: joins them, cuts them out, or makes a view dense.
#[derive(Debug)]
pub(crate) struct Copy {
    /// What makes up a row of the result, in order.
    pub(crate) parts: Vec<Part>,
    /// Numbers in a row of the result.
    pub(crate) width: usize,
    pub(crate) out: View,
}

/// Of each row of `width` numbers of `x`, `length` from `start` on.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) x: View,
    pub(crate) width: usize,
    pub(crate) start: usize,
    pub(crate) length: usize,
    /// `x` holds integers, which become floats.
    pub(crate) integers: bool,
}

impl Copy {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let unit = unit_rows(self.width);
        let inputs = &inputs;
        for_each(run.pool, Chunks::new(out, unit * self.width), &mut [], |number, part, _| {
            let mut at = 0;
            for from in &self.parts {
                if from.integers {
                    let numbers = inputs.integers(&from.x);
                    for (i, row) in part.chunks_mut(self.width).enumerate() {
                        let start = (number * unit + i) * from.width + from.start;
                        let to = &mut row[at..at + from.length];
                        to.iter_mut().zip(&numbers[start..]).for_each(|(to, &from)| *to = from as f32);
                    }
                } else {
                    let x = inputs.rows(&from.x, from.width);
                    for (i, row) in part.chunks_mut(self.width).enumerate() {
                        row[at..at + from.length].copy_from_slice(&x.row(number * unit + i)[from.start..][..from.length]);
                    }
                }
                at += from.length;
            }
        });
    }
}

/// `out[i] = x[rows[i]]`.
#[derive(Debug)]
pub(crate) struct Gather {
    pub(crate) x: View,
    pub(crate) rows: View,
    pub(crate) out: View,
}

impl Gather {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) -> Result<(), DeviceError> {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let (x, rows) = (inputs.own_rows(&self.x), inputs.integers(&self.rows));
        within(rows, x.count, "row")?;
        for_rows(&run, out, x.width, |first, part| {
            for (i, part) in part.chunks_mut(x.width).enumerate() {
                part.copy_from_slice(x.row(rows[first + i] as usize));
            }
        });
        Ok(())
    }
}

/// `out = x` with `rows[r]` put at, or added to, row `at[r]`.
#[derive(Debug)]
pub(crate) struct Scatter {
    pub(crate) x: View,
    pub(crate) rows: View,
    pub(crate) at: View,
    pub(crate) add: bool,
    pub(crate) out: View,
}

impl Scatter {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) -> Result<(), DeviceError> {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let width = self.out.width(&run.bindings);
        if self.x != self.out {
            let x = inputs.own_rows(&self.x);
            for_rows(&run, out, width, |first, part| copy_rows(&x, first, part));
        }
        let (rows, at) = (inputs.own_rows(&self.rows), inputs.integers(&self.at));
        within(at, self.out.rows(&run.bindings), "row")?;
        // One after the other: nothing but the call's word says that the places differ, and there are few.
        for (r, &at) in at.iter().enumerate() {
            let row = &mut out[at as usize * width..][..width];
            match self.add {
                true => map::binary_into_left(run.instructions, Binary::Add, row, rows.row(r)),
                false => row.copy_from_slice(rows.row(r)),
            }
        }
        Ok(())
    }
}

fn copy_rows(x: &Rows<'_>, first: usize, part: &mut [f32]) {
    part.chunks_mut(x.width).enumerate().for_each(|(i, part)| part.copy_from_slice(x.row(first + i)));
}

/// Whether all numbers are below `limit`. Inputs are checked with the call; numbers that a program hands on are not.
pub(crate) fn within(numbers: &[i32], limit: usize, what: &str) -> Result<(), DeviceError> {
    match numbers.iter().find(|&&n| n < 0 || n as usize >= limit) {
        Some(bad) => Err(DeviceError::Call(format!("{what} {bad} is beyond 0 to {}", limit.saturating_sub(1)))),
        None => Ok(()),
    }
}
