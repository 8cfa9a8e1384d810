//! Where values live: views into one arena and into the inputs of a call, and the borrowing rules that let a step read some and write others.

use qhx_ir::{Bindings, Dim, InputData};
use std::ops::Range;

/// Where a view's numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In an input of the call.
    Input(usize),
    /// In a buffer of the plan.
    Buffer(usize),
}

/// A value: rows (its first dimension) of equal width, dense or a fixed stride apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct View {
    pub(crate) place: Place,
    /// Numbers before the first row.
    pub(crate) offset: usize,
    /// From one row to the next, where that is not the width.
    pub(crate) stride: Option<usize>,
    /// The first dimension.
    pub(crate) first: Dim,
    /// The product of the other dimensions that are numbers.
    pub(crate) fixed: usize,
    /// Another dimension that is not a number.
    pub(crate) symbolic: Option<Dim>,
}

impl View {
    /// A dense value of a shape.
    pub(crate) fn dense(place: Place, shape: &[Dim]) -> Self {
        let mut view =
            Self { place, offset: 0, stride: None, first: shape.first().copied().unwrap_or(Dim::Fixed(1)), fixed: 1, symbolic: None };
        for dim in shape.iter().skip(1) {
            match dim {
                Dim::Fixed(n) => view.fixed *= n,
                // Checked programs have one symbolic dimension at most.
                other => view.symbolic = Some(*other),
            }
        }
        view
    }

    /// The first dimension in a call.
    pub(crate) fn rows(&self, bindings: &Bindings) -> usize {
        count(self.first, bindings)
    }

    /// Numbers in one row.
    pub(crate) fn width(&self, bindings: &Bindings) -> usize {
        self.fixed * self.symbolic.map_or(1, |dim| count(dim, bindings))
    }

    /// All its numbers.
    pub(crate) fn numbers(&self, bindings: &Bindings) -> usize {
        self.rows(bindings) * self.width(bindings)
    }

    /// From its first number to after its last, in its place.
    fn span(&self, bindings: &Bindings) -> Range<usize> {
        let (rows, width) = (self.rows(bindings), self.width(bindings));
        let length = match self.stride {
            Some(stride) if rows > 0 => (rows - 1) * stride + width,
            _ => rows * width,
        };
        self.offset..self.offset + length
    }
}

/// A dimension as a number; calls in which a quotient is not whole are refused before.
pub(crate) fn count(dim: Dim, bindings: &Bindings) -> usize {
    match dim {
        Dim::Fixed(n) => n,
        Dim::Symbol(symbol) => bindings.get(symbol),
        Dim::Exact(symbol, n) | Dim::Ceil(symbol, n) => bindings.get(symbol).div_ceil(n),
    }
}

/// Rows of equal width, somewhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    data: &'a [f32],
    /// Number of rows.
    pub(crate) count: usize,
    /// Numbers in a row.
    pub(crate) width: usize,
    /// Rows that stand densely together.
    together: usize,
    /// From one such group to the next.
    stride: usize,
}

impl<'a> Rows<'a> {
    /// Dense rows.
    pub(crate) fn dense(data: &'a [f32], width: usize) -> Self {
        let count = data.len() / width.max(1);
        Self { data, count, width, together: count.max(1), stride: 0 }
    }

    /// One row.
    pub(crate) fn row(&self, row: usize) -> &'a [f32] {
        assert!(row < self.count, "row {row} of {}", self.count);
        &self.data[row / self.together * self.stride + row % self.together * self.width..][..self.width]
    }

    /// The numbers from the first row on with the distance of rows, where that is one for all of them.
    pub(crate) fn strided(&self) -> Option<(&'a [f32], usize)> {
        match self.together {
            1 => Some((self.data, self.stride)),
            together if together >= self.count => Some((self.data, self.width)),
            _ => None,
        }
    }
}

/// The memory of one call.
pub(crate) struct Memory<'m> {
    pub(crate) inputs: &'m [InputData<'m>],
    pub(crate) arena: &'m mut [f32],
    /// First number of each buffer of the plan.
    pub(crate) offsets: &'m [usize],
    /// Shared out among threads.
    pub(crate) scratch: &'m mut [f32],
    pub(crate) bindings: Bindings,
}

/// What a step may read while it writes: all but its outputs.
pub(crate) struct Readable<'r, const GAPS: usize> {
    inputs: &'r [InputData<'r>],
    gaps: [(usize, &'r [f32]); GAPS],
    offsets: &'r [usize],
    bindings: Bindings,
}

/// [`Readable`] for steps with up to eight outputs, which is all of them.
pub(crate) type Inputs<'r> = Readable<'r, { OUTPUTS + 1 }>;

/// The most outputs of a step.
pub(crate) const OUTPUTS: usize = 8;

impl Memory<'_> {
    /// The numbers of up to [`OUTPUTS`] dense buffer views to write, all the rest to read, and the scratch.
    pub(crate) fn split<const N: usize>(&mut self, outputs: [&View; N]) -> ([&mut [f32]; N], Inputs<'_>, &mut [f32]) {
        const { assert!(N <= OUTPUTS) }
        let bindings = self.bindings;
        let ranges: [Range<usize>; N] = std::array::from_fn(|i| {
            let view = outputs[i];
            let Place::Buffer(buffer) = view.place else { unreachable!("a step writes buffers only") };
            assert!(view.stride.is_none() && view.offset == 0, "a step writes dense values only");
            let start = self.offsets[buffer];
            start..start + view.numbers(&bindings)
        });
        let mut order: [usize; N] = std::array::from_fn(|i| i);
        order.sort_unstable_by_key(|&i| (ranges[i].start, ranges[i].end));
        let mut parts: [&mut [f32]; N] = std::array::from_fn(|_| &mut [][..]);
        let mut gaps: [(usize, &[f32]); OUTPUTS + 1] = [(0, &[]); OUTPUTS + 1];
        let (mut rest, mut at) = (&mut *self.arena, 0);
        for (gap, &i) in order.iter().enumerate() {
            let (before, tail) = std::mem::take(&mut rest).split_at_mut(ranges[i].start - at);
            let (part, tail) = tail.split_at_mut(ranges[i].len());
            gaps[gap] = (at, before);
            parts[i] = part;
            (rest, at) = (tail, ranges[i].end);
        }
        gaps[N] = (at, rest);
        (parts, Readable { inputs: self.inputs, gaps, offsets: self.offsets, bindings }, self.scratch)
    }
}

impl<'r, const GAPS: usize> Readable<'r, GAPS> {
    fn f32s(&self, view: &View) -> &'r [f32] {
        let span = view.span(&self.bindings);
        match view.place {
            Place::Input(input) => match self.inputs[input] {
                InputData::F32(numbers) => &numbers[span],
                InputData::I32(_) => unreachable!("the checked program reads this input as i32"),
            },
            Place::Buffer(buffer) => {
                let start = self.offsets[buffer] + span.start;
                let holds = |(at, gap): &&(usize, &[f32])| *at <= start && start + span.len() <= at + gap.len();
                let Some((at, gap)) = self.gaps.iter().find(holds) else { unreachable!("a step reads what it writes") };
                &gap[start - at..][..span.len()]
            }
        }
    }

    /// A value as rows of `width` numbers, which divides its own width (or, where it is dense, all its numbers).
    pub(crate) fn rows(&self, view: &View, width: usize) -> Rows<'r> {
        let data = self.f32s(view);
        let (rows, own) = (view.rows(&self.bindings), view.width(&self.bindings));
        match view.stride {
            None => Rows::dense(data, width),
            Some(stride) => Rows { data, count: rows * (own / width), width, together: own / width, stride },
        }
    }

    /// A value by its own rows.
    pub(crate) fn own_rows(&self, view: &View) -> Rows<'r> {
        self.rows(view, view.width(&self.bindings))
    }

    /// A dense value.
    pub(crate) fn dense(&self, view: &View) -> &'r [f32] {
        assert!(view.stride.is_none(), "a dense value is needed");
        self.f32s(view)
    }

    /// A dense value of integers.
    pub(crate) fn integers(&self, view: &View) -> &'r [i32] {
        match view.place {
            Place::Input(input) => match self.inputs[input] {
                InputData::I32(numbers) => &numbers[view.span(&self.bindings)],
                InputData::F32(_) => unreachable!("the checked program reads this input as f32"),
            },
            Place::Buffer(_) => bytemuck::cast_slice(self.dense(view)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_read_around_outputs() {
        let mut arena: Vec<f32> = (0..40).map(|i| i as f32).collect();
        let input = [5.0, 6.0];
        let bindings = Bindings { rows: 2, soft_rows: 0, wanted: 1 };
        let mut memory = Memory { inputs: &[InputData::F32(&input)], arena: &mut arena, offsets: &[0, 16, 30], scratch: &mut [], bindings };
        let a = View::dense(Place::Buffer(0), &[Dim::T, Dim::Fixed(4), Dim::Fixed(2)]);
        let sliced = View { offset: 2, stride: Some(8), fixed: 4, ..a };
        let out = View::dense(Place::Buffer(1), &[Dim::T, Dim::Fixed(3)]);
        let late = View::dense(Place::Buffer(2), &[Dim::L, Dim::Fixed(2)]);
        let ([written, later], readable, _) = memory.split([&out, &late]);
        written.fill(0.0);
        later.fill(0.0);
        assert_eq!((written.len(), later.len()), (6, 2));
        assert_eq!(readable.dense(&a).len(), 16);
        let rows = readable.rows(&sliced, 2);
        assert_eq!((rows.count, rows.row(1), rows.row(2)), (4, &[4.0, 5.0][..], &[10.0, 11.0][..]));
        assert_eq!(readable.own_rows(&sliced).strided().map(|(data, stride)| (data[0], stride)), Some((2.0, 8)));
        assert_eq!(readable.dense(&View::dense(Place::Input(0), &[Dim::T])), &[5.0, 6.0]);
    }
}
