//! The Hadamard transform over the last dimension.

use super::{Frame, unit_rows};
use crate::{
    kernels::hadamard::Hadamard,
    memory::View,
    work::{Chunks, for_each},
};

/// `out = x · H`, row by row.
#[derive(Debug)]
pub(crate) struct HadamardRows {
    pub(crate) transform: Hadamard,
    pub(crate) x: View,
    pub(crate) out: View,
}

impl HadamardRows {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, scratch)) = (frame.run, frame.memory.split([&self.out]));
        let width = self.transform.width();
        let x = (self.x != self.out).then(|| inputs.rows(&self.x, width));
        // A number takes several times the work of an elementwise op.
        let rows = unit_rows(4 * width);
        for_each(run.pool, Chunks::new(out, rows * width), scratch, |unit, part, scratch| {
            for (i, row) in part.chunks_mut(width).enumerate() {
                if let Some(x) = x {
                    row.copy_from_slice(x.row(unit * rows + i));
                }
                self.transform.apply(run.instructions, row, scratch);
            }
        });
    }

    pub(crate) fn scratch(&self) -> usize {
        self.transform.scratch()
    }
}
