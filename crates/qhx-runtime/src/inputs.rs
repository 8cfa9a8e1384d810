//! What a text session gives a program: each input made by the generator that the program names.
//!
//! Knows generators and rows; knows no device and no state. Buffers are kept between calls, so a decode step allocates nothing.

use crate::{
    Encoded, Error,
    rows::{MediumSpan, Rows},
    soft_rows::deepstack_count,
};
use qhx_bundle::media::Media;
use qhx_ir::{Bindings, Checked, Generator, InputData};
use std::{ops::Range, sync::Arc};

/// The buffers from which a call's inputs are lent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inputs {
    ids: Vec<i32>,
    /// The ids with placeholders of media replaced.
    ids_media_as_pad: Vec<i32>,
    /// Numbers of the rows.
    sequence: Vec<i32>,
    /// Time, height and width positions, one stream after the other.
    mrope: Vec<i32>,
    wanted: Vec<i32>,
    soft_rows: Vec<f32>,
    soft_rows_at: Vec<i32>,
    /// One list for each deepstack input of the program, by its number.
    deepstack: Vec<Vec<f32>>,
}

/// Which ids stand for media, and the id that takes their place where a program asks for that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placeholders {
    pub(crate) ids: Vec<u32>,
    pub(crate) pad: u32,
}

impl Placeholders {
    /// Those of a model. Without an id to take their place they stay.
    pub(crate) fn new(media: &Media, pad: Option<u32>) -> Self {
        let tokens = media.image.iter().map(|i| i.placeholder.token).chain(media.audio.iter().map(|a| a.placeholder.token));
        pad.map_or_else(Self::default, |pad| Self { ids: tokens.collect(), pad })
    }
}

/// More inputs than any text program needs; beyond it a call allocates its list.
const ON_STACK: usize = 32;
const STREAMS: usize = 3;

/// Whether a text session can make all inputs of `program`; the error names the first that it cannot.
pub(crate) fn check(program: &Checked) -> Result<(), Error> {
    for input in &program.inputs {
        if !is_of_text(&input.generator) {
            let generator = serde_json::to_value(&input.generator).map(|g| g.to_string()).unwrap_or_default();
            return Err(Error::CannotMake { program: program.name.to_string(), input: input.name.to_string(), generator });
        }
    }
    Ok(())
}

fn is_of_text(generator: &Generator) -> bool {
    match generator {
        Generator::Ids
        | Generator::IdsMediaAsPad
        | Generator::PositionsSequence
        | Generator::PositionsMrope
        | Generator::WantedRows
        | Generator::SoftRows
        | Generator::DeepstackRows(_)
        | Generator::SoftRowsAt => true,
        Generator::Patches
        | Generator::PatchGrid
        | Generator::PatchColumns
        | Generator::PatchRows
        | Generator::InterpolationIndex
        | Generator::InterpolationFactor
        | Generator::Frames
        | Generator::NextIds
        | Generator::HiddenRows
        | Generator::ChainedRows
        | Generator::ChainedRowsAt
        | Generator::PositionsNext
        | Generator::TextKeys(_)
        | Generator::TextValues(_)
        | Generator::Carried => false,
    }
}

impl Inputs {
    /// Lends the inputs that were made last to `run`.
    pub(crate) fn lend<T>(&self, program: &Checked, run: impl FnOnce(Bindings, &[InputData<'_>]) -> T) -> T {
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
            // Programs with other generators are refused at load; an empty input would be refused by the call's own check.
            *data = self.get(&input.generator).unwrap_or(InputData::I32(&[]));
        }
        run(Bindings { rows: self.ids.len(), soft_rows: self.soft_rows_at.len(), wanted: self.wanted.len() }, lent)
    }

    /// What a generator has made; none for those that make nothing of a text.
    fn get(&self, generator: &Generator) -> Option<InputData<'_>> {
        Some(match generator {
            Generator::Ids => InputData::I32(&self.ids),
            Generator::IdsMediaAsPad => InputData::I32(&self.ids_media_as_pad),
            Generator::PositionsSequence => InputData::I32(&self.sequence),
            Generator::PositionsMrope => InputData::I32(&self.mrope),
            Generator::WantedRows => InputData::I32(&self.wanted),
            Generator::SoftRows => InputData::F32(&self.soft_rows),
            Generator::SoftRowsAt => InputData::I32(&self.soft_rows_at),
            Generator::DeepstackRows(number) => InputData::F32(self.deepstack.get(*number)?),
            _ => return None,
        })
    }

    /// Makes the inputs of a call over spans of rows, one after the other.
    pub(crate) fn fill<'r>(&mut self, program: &Checked, placeholders: &Placeholders, spans: impl Iterator<Item = RowSpan<'r>> + Clone) {
        let as_pad = |&id: &u32| if placeholders.ids.contains(&id) { placeholders.pad as i32 } else { id as i32 };
        for list in
            [&mut self.ids, &mut self.ids_media_as_pad, &mut self.sequence, &mut self.mrope, &mut self.wanted, &mut self.soft_rows_at]
        {
            list.clear();
        }
        self.soft_rows.clear();
        self.deepstack.resize_with(deepstack_count(program), Vec::new);
        self.deepstack.iter_mut().for_each(Vec::clear);
        for RowSpan { rows, span, wanted } in spans.clone() {
            let (before, ids) = (self.ids.len(), &rows.ids()[span.clone()]);
            self.ids.extend(ids.iter().map(|&id| id as i32));
            self.ids_media_as_pad.extend(ids.iter().map(as_pad));
            self.sequence.extend(span.clone().map(|row| row as i32));
            self.wanted.extend((span.len() - wanted..span.len()).map(|row| (before + row) as i32));
            for (medium, part) in rows.media_in(span.clone()) {
                // A call without soft rows that it has places for does not pass its check.
                if let Some(encoded) = medium.encoded() {
                    self.soft_rows.extend_from_slice(encoded.soft_rows(part.clone()));
                    self.deepstack.iter_mut().enumerate().for_each(|(number, rows)| {
                        rows.extend_from_slice(encoded.deepstack_rows(number, part.clone()));
                    });
                }
                self.soft_rows_at.extend(part.map(|row| (before + medium.first + row - span.start) as i32));
            }
        }
        for stream in 0..STREAMS {
            for RowSpan { rows, span, .. } in spans.clone() {
                self.mrope.extend(rows.positions(span).map(|position| position[stream] as i32));
            }
        }
    }
}

/// Rows of a session that a call computes, and of how many of the last of them something is wanted.
#[derive(Clone)]
pub(crate) struct RowSpan<'r> {
    pub(crate) rows: &'r Rows,
    pub(crate) span: Range<usize>,
    pub(crate) wanted: usize,
}

/// What a text program is given in one call over all rows, for those who run it without a session.
#[derive(Clone, Debug)]
pub struct WholeInputs(Inputs);

impl WholeInputs {
    /// Of `ids`, and of encoded media with the row at which each begins, rising. `media` and `pad` are the model's.
    pub fn new(text: &Checked, media: &Media, pad: Option<u32>, ids: &[u32], encoded: &[(usize, Arc<Encoded>)]) -> Self {
        let mut rows = Rows::default();
        let spans: Vec<MediumSpan> = encoded.iter().map(|(first, encoded)| MediumSpan::new(*first, encoded.clone())).collect();
        rows.extend(ids, &spans);
        let mut inputs = Inputs::default();
        let all = RowSpan { rows: &rows, span: 0..ids.len(), wanted: 0 };
        inputs.fill(text, &Placeholders::new(media, pad), std::iter::once(all));
        Self(inputs)
    }

    /// What a generator has made: empty for the wanted rows, which the caller chooses; none for those that make nothing of a text.
    pub fn get(&self, generator: &Generator) -> Option<InputData<'_>> {
        self.0.get(generator)
    }

    /// How many soft rows land in the call.
    pub fn soft_rows(&self) -> usize {
        self.0.soft_rows_at.len()
    }
}
