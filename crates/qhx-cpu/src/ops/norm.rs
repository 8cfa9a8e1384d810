//! Norms over the last dimension.

use super::{Frame, for_rows};
use crate::{kernels::norm::Norm, matrix::Plain, memory::View};

/// `out = norm(x)`, row by row of `width` numbers.
#[derive(Debug)]
pub(crate) struct NormRows {
    pub(crate) centred: bool,
    pub(crate) weight: Option<Plain>,
    pub(crate) bias: Option<Plain>,
    pub(crate) eps: f32,
    pub(crate) width: usize,
    pub(crate) x: View,
    pub(crate) out: View,
}

impl NormRows {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, _)) = (frame.run, frame.memory.split([&self.out]));
        let (weight, bias) = (self.weight.as_ref().map(Plain::numbers), self.bias.as_ref().map(Plain::numbers));
        let norm = Norm { centred: self.centred, weight, bias, eps: self.eps };
        let x = (self.x != self.out).then(|| inputs.rows(&self.x, self.width));
        for_rows(&run, out, self.width, |first, part| {
            for (i, part) in part.chunks_mut(self.width).enumerate() {
                match x {
                    Some(x) => norm.apply(run.instructions, x.row(first + i), part),
                    None => norm.apply_in_place(run.instructions, part),
                }
            }
        });
    }
}
