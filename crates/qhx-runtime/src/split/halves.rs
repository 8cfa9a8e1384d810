//! The rows of a call in two halves, so that two devices work at the same time: while one has the second half, the other has the first.

use qhx_ir::{Bindings, Call, Checked, Dim, Generator, InputData, dim};
use std::ops::Range;

/// One half of a call, or all of it.
pub(super) struct Half {
    pub(super) bindings: Bindings,
    /// Absent where the call's own inputs are meant.
    inputs: Option<Vec<Numbers>>,
    /// Which of the call's wants are meant.
    pub(super) wanted: Range<usize>,
    pub(super) segments: Vec<HalfSegment>,
}

/// Rows of a segment that a half has.
#[derive(Clone, Copy, Debug)]
pub(super) struct HalfSegment {
    /// Its place in the call.
    pub(super) place: usize,
    pub(super) first_row: usize,
    pub(super) valid_rows: usize,
}

enum Numbers {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

impl Half {
    /// All of a call.
    pub(super) fn whole(call: &Call<'_>) -> Self {
        let segments = call.segments.iter().enumerate();
        let segments = segments.map(|(place, segment)| HalfSegment { place, first_row: segment.first_row, valid_rows: segment.valid_rows });
        Self { bindings: call.bindings, inputs: None, wanted: 0..call.wants.len(), segments: segments.collect() }
    }

    pub(super) fn inputs<'a>(&'a self, call: &'a [InputData<'a>]) -> Vec<InputData<'a>> {
        let view = |numbers: &'a Numbers| match numbers {
            Numbers::F32(numbers) => InputData::F32(numbers),
            Numbers::I32(numbers) => InputData::I32(numbers),
        };
        self.inputs.as_ref().map_or_else(|| call.to_vec(), |own| own.iter().map(view).collect())
    }
}

/// Cuts a call in two before a row; none where the program's inputs and outputs do not allow it.
pub(super) fn cut(program: &Checked, call: &Call<'_>, row: usize) -> Option<[Half; 2]> {
    // Outputs are put together again by appending.
    let is_by_row =
        |shape: &[Dim]| matches!(shape.first(), Some(Dim::Symbol(_))) && shape[1..].iter().all(|dim| matches!(dim, Dim::Fixed(_)));
    if !program.outputs.iter().all(|output| is_by_row(&program.value_type(&output.value).shape)) {
        return None;
    }
    let Bindings { rows, soft_rows, wanted } = call.bindings;
    // Rows that are named by their number, in ascending order.
    let before = |generator: &Generator, count: usize| -> Option<usize> {
        let Some(place) = program.inputs.iter().position(|input| input.generator == *generator) else { return (count == 0).then_some(0) };
        let InputData::I32(named) = call.inputs[place] else { return None };
        named.is_sorted().then(|| named.partition_point(|&named| (named as usize) < row))
    };
    let (soft, want) = (before(&Generator::SoftRowsAt, soft_rows)?, before(&Generator::WantedRows, wanted)?);
    let first = Bindings { rows: row, soft_rows: soft, wanted: want };
    let second = Bindings { rows: rows - row, soft_rows: soft_rows - soft, wanted: wanted - want };
    let mut inputs = [Vec::new(), Vec::new()];
    for (input, data) in program.inputs.iter().zip(call.inputs) {
        let moved = if matches!(input.generator, Generator::SoftRowsAt | Generator::WantedRows) { row as i32 } else { 0 };
        let axis = input.shape.iter().position(|dim| !matches!(dim, Dim::Fixed(_)))?;
        let Dim::Symbol(symbol) = input.shape[axis] else { return None };
        if input.shape[axis + 1..].iter().any(|dim| !matches!(dim, Dim::Fixed(_))) {
            return None;
        }
        let shape = dim::bind_shape(&input.shape, &call.bindings).ok()?;
        let inner: usize = shape[axis + 1..].iter().product();
        let (length, at) = (shape[axis] * inner, first.get(symbol) * inner);
        let [own, other] = match data {
            InputData::F32(numbers) => divide(numbers, length, at).map(Numbers::F32),
            InputData::I32(numbers) => {
                let [own, mut other] = divide(numbers, length, at);
                other.iter_mut().for_each(|number| *number -= moved);
                [own, other].map(Numbers::I32)
            }
        };
        inputs[0].push(own);
        inputs[1].push(other);
    }
    let wants = if call.wants.is_empty() { 0..0 } else { 0..want };
    let rest = wants.end..call.wants.len();
    let [own, other] = inputs;
    let segments = |range: Range<usize>| {
        let overlap = |(place, segment): (usize, &qhx_ir::Segment<'_>)| {
            let start = segment.first_row.max(range.start);
            let end = (segment.first_row + segment.valid_rows).min(range.end);
            (start < end).then(|| HalfSegment { place, first_row: start - range.start, valid_rows: end - start })
        };
        call.segments.iter().enumerate().filter_map(overlap).collect::<Vec<_>>()
    };
    Some([
        Half { bindings: first, inputs: Some(own), wanted: wants, segments: segments(0..row) },
        Half { bindings: second, inputs: Some(other), wanted: rest, segments: segments(row..rows) },
    ])
}

/// Cuts every run of `length` numbers before its number `at`.
fn divide<T: Copy>(numbers: &[T], length: usize, at: usize) -> [Vec<T>; 2] {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for run in numbers.chunks(length.max(1)) {
        let (own, other) = run.split_at(at.min(run.len()));
        first.extend_from_slice(own);
        second.extend_from_slice(other);
    }
    [first, second]
}
