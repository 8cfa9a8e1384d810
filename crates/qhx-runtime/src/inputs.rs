//! What a text session gives a program: each input made by the generator that the program names.
//!
//! Knows generators and rows; knows no device and no state. Buffers are kept between calls, so a decode step allocates nothing.

use crate::Error;
use qhx_ir::{Bindings, Checked, Generator, InputData};
use std::ops::Range;

/// The rows of a session: what was put in, in order. Media rows will stand here beside the ids.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows {
    pub(crate) ids: Vec<u32>,
}

impl Rows {
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// How many leading rows equal `ids`.
    pub(crate) fn common_prefix(&self, ids: &[u32]) -> usize {
        self.ids.iter().zip(ids).take_while(|(a, b)| a == b).count()
    }
}

/// The buffers from which a call's inputs are lent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inputs {
    ids: Vec<i32>,
    /// Three equal streams of positions, one after the other; a program with one stream is lent the first.
    positions: Vec<i32>,
    wanted: Vec<i32>,
}

/// More inputs than any text program needs; beyond it a call allocates its list.
const ON_STACK: usize = 32;
const STREAMS: usize = 3;

/// Whether a text session can make all inputs of `program`; the error names the first that it cannot.
pub(crate) fn check(program: &Checked) -> Result<(), Error> {
    for input in &program.inputs {
        if source(&input.generator).is_none() {
            let generator = serde_json::to_value(&input.generator).map(|g| g.to_string()).unwrap_or_default();
            return Err(Error::CannotMake { program: program.name.to_string(), input: input.name.to_string(), generator });
        }
    }
    Ok(())
}

/// Where the numbers of a generator come from in a text session.
enum Source {
    Ids,
    Positions { streams: usize },
    Wanted,
    NoFloats,
    NoNumbers,
}

fn source(generator: &Generator) -> Option<Source> {
    Some(match generator {
        // Without media no id is a placeholder, so both are the ids as they are.
        Generator::Ids | Generator::IdsMediaAsPad => Source::Ids,
        Generator::PositionsSequence => Source::Positions { streams: 1 },
        Generator::PositionsMrope => Source::Positions { streams: STREAMS },
        Generator::WantedRows => Source::Wanted,
        Generator::SoftRows | Generator::DeepstackRows(_) => Source::NoFloats,
        Generator::SoftRowsAt => Source::NoNumbers,
        Generator::Patches
        | Generator::PatchGrid
        | Generator::PatchColumns
        | Generator::PatchRows
        | Generator::InterpolationIndex
        | Generator::InterpolationFactor
        | Generator::Frames
        | Generator::Carried => return None,
    })
}

impl Inputs {
    /// Makes the inputs of a call over `span` of `rows` that asks for the outputs of its last `wanted` rows, and lends them to `run`.
    pub(crate) fn lend<T>(
        &mut self,
        program: &Checked,
        rows: &Rows,
        span: Range<usize>,
        wanted: usize,
        run: impl FnOnce(Bindings, &[InputData<'_>]) -> T,
    ) -> T {
        let count = span.len();
        self.ids.clear();
        self.ids.extend(rows.ids[span.clone()].iter().map(|&id| id as i32));
        self.positions.clear();
        for _ in 0..STREAMS {
            self.positions.extend(span.clone().map(|position| position as i32));
        }
        self.wanted.clear();
        self.wanted.extend((count - wanted..count).map(|row| row as i32));

        let mut stack = [InputData::I32(&[]); ON_STACK];
        let mut heap = Vec::new();
        let lent = match program.inputs.len() {
            n if n <= ON_STACK => &mut stack[..n],
            n => {
                heap.resize(n, InputData::I32(&[]));
                &mut heap[..]
            }
        };
        for (input, data) in program.inputs.iter().zip(lent.iter_mut()) {
            *data = match source(&input.generator) {
                Some(Source::Ids) => InputData::I32(&self.ids),
                Some(Source::Positions { streams }) => InputData::I32(&self.positions[..streams * count]),
                Some(Source::Wanted) => InputData::I32(&self.wanted),
                Some(Source::NoFloats) => InputData::F32(&[]),
                // Programs with other generators are refused at load; an empty input would be refused by the call's own check.
                Some(Source::NoNumbers) | None => InputData::I32(&[]),
            };
        }
        run(Bindings { rows: count, soft_rows: 0, wanted }, lent)
    }
}
