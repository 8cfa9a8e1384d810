//! One call of an executable: whose rows, what is wanted of them, and where the results go.

use crate::{Bindings, Checked, DType, DeviceError, RowResult, Stage, State, Want, WeightTensor, check::IndexLimit, hadamard::Hadamard};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering};

/// One call of an executable. It is begun by [`crate::Executable::submit`] and ended by [`crate::Executable::wait`].
pub struct Call<'a> {
    /// `T`, `R` and `L`.
    pub bindings: Bindings,
    /// What the call is for. A call that has rows of both kinds is prefill.
    pub phase: Phase,
    /// The inputs, in the program's order.
    pub inputs: &'a [InputData<'a>],
    /// The owners of the rows, in ascending order of `first_row`, without overlap. Rows outside are padding.
    pub segments: &'a mut [Segment<'a>],
    /// What is wanted of each of the `L` rows, in order; empty: all values of every output. A [`Want::LargestAllowed`] may be given its mask as late as
    /// [`crate::Executable::wait`].
    pub wants: &'a [Want<'a>],
    /// Receives the results.
    pub outputs: &'a mut Outputs,
    /// Checked between the device's steps; when set, the call ends with [`DeviceError::Cancelled`].
    pub cancel: Option<&'a AtomicBool>,
    /// Receives every stage's tap.
    pub taps: Option<&'a mut dyn FnMut(Tap<'_>)>,
    /// The only stage whose tap matters; absent: all do. A device may leave out the others, and what has to be computed for them alone.
    pub tapped: Option<&'a str>,
    /// Makes the inputs that were not known when the call began, at each of the program's pauses: see [`crate::LoadOptions::pauses`].
    pub host: Option<&'a mut Host<'a>>,
}

/// Is called at a pause. An error ends the call.
pub type Host<'a> = dyn FnMut(&mut Paused<'_>) -> Result<(), DeviceError> + 'a;

/// A call that waits for the host.
pub struct Paused<'a> {
    /// The number of the pause.
    pub number: usize,
    /// What it gives, in order; integers as floats, as in [`Outputs::value`].
    pub given: &'a [&'a [f32]],
    /// Takes the data of an input by its place among those that the pause takes, which all have to be given, and those that it may change behind them.
    pub take: &'a mut dyn FnMut(usize, InputData<'_>),
    /// [`crate::Executable::replace_part`] for what follows this pause; none where that cannot be any more.
    pub replace: Option<&'a mut Replace<'a>>,
}

/// Replaces a part, by its number, of a weight.
pub type Replace<'a> = dyn FnMut(&str, usize, &WeightTensor) -> Result<(), DeviceError> + 'a;

/// What a call is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Computing the rows of a prompt.
    Prefill,
    /// Generating: each session has the row of its last token, and perhaps drafts behind it.
    Decode,
}

impl Phase {
    /// Both, in the order in which they come.
    pub const ALL: [Self; 2] = [Self::Prefill, Self::Decode];
}

/// The rows `first_row .. first_row + valid_rows` of a call belong to `state`; rows after them, up to the next segment, are padding: they neither
/// change the state nor reach valid rows. In values with fewer rows (`T/n`, `ceil(T/n)`) the segment starts at `first_row / n`, which must
/// be whole, and has `ceil(valid_rows / n)` rows.
pub struct Segment<'a> {
    /// `None` for programs without slots.
    pub state: Option<&'a mut dyn State>,
    /// First row in the call.
    pub first_row: usize,
    /// Number of valid rows.
    pub valid_rows: usize,
    /// The program's epoch for these rows: see [`crate::Program::epoch`].
    pub epoch: usize,
    /// Whether fewer rows than these may be committed even though the program has recurrent slots: the device then keeps what it needs to compute them
    /// again up to any row. Only where [`crate::Executable::commits_partly`].
    pub partial: bool,
}

impl<'a> Segment<'a> {
    /// A segment in the first epoch, of which all rows or none will be committed.
    pub fn new(state: Option<&'a mut dyn State>, first_row: usize, valid_rows: usize) -> Self {
        Self { state, first_row, valid_rows, epoch: 0, partial: false }
    }
}

/// An input's data, row-major.
#[derive(Clone, Copy, Debug)]
pub enum InputData<'a> {
    /// Activations.
    F32(&'a [f32]),
    /// Ids, positions, row indexes.
    I32(&'a [i32]),
}

/// The result of a stage.
#[derive(Clone, Copy, Debug)]
pub struct Tap<'a> {
    /// The stage's name.
    pub stage: &'a str,
    /// Its shape in this call.
    pub shape: &'a [usize],
    /// The data, row-major; rows outside segments have no meaning.
    pub values: &'a [f32],
}

impl Tap<'_> {
    /// Shows what a stage made: `values` of this shape, turned back where the stage keeps them rotated.
    pub fn show(stage: &Stage, shape: &[usize], values: &[f32], taps: &mut dyn FnMut(Tap<'_>)) {
        if !stage.rotated {
            return taps(Tap { stage: &stage.name, shape, values });
        }
        let (mut values, width) = (values.to_vec(), shape.last().map_or(1, |&n| n.max(1)));
        let transform = Hadamard::new(width);
        values.chunks_exact_mut(width).for_each(|row| transform.row(row));
        taps(Tap { stage: &stage.name, shape, values: &values });
    }
}

/// The results of a call, in memory of the caller that is used again by the next call with them.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    /// In the program's order.
    values: Vec<(crate::Name, Vec<f32>)>,
    rows: Vec<RowResult>,
}

impl Outputs {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// An output's values, row-major; `None` for an unknown name. Integers (chosen experts that cross a cut) are converted to floats. With [`Call::wants`], the
    /// output of the wanted rows has only those of which the logits are wanted.
    pub fn value(&self, name: &str) -> Option<&[f32]> {
        self.values.iter().find(|(own, _)| &**own == name).map(|(_, values)| values.as_slice())
    }

    /// The answers to [`Call::wants`].
    pub fn rows(&self) -> &[RowResult] {
        &self.rows
    }

    /// For a device that has computed all values of all outputs: gives the caller what it wants of them.
    pub fn give(&mut self, program: &Checked, wants: &[Want<'_>], value: impl Fn(&crate::Output) -> Vec<f32>) -> Result<(), DeviceError> {
        self.start(program);
        let wanted = program.wanted_output().filter(|_| !wants.is_empty());
        for (place, output) in program.outputs.iter().enumerate() {
            let values = value(output);
            match wanted {
                Some((own, width)) if own == place => {
                    let answers: Vec<_> = wants.iter().zip(values.chunks(width.max(1))).map(|(want, row)| want.of(row)).collect();
                    self.answer_all(place, wants, answers, &values)?;
                }
                _ => self.values[place].1 = values,
            }
        }
        Ok(())
    }

    /// For a device: forgets the results of an earlier call.
    pub fn start(&mut self, program: &Checked) {
        self.rows.clear();
        let fits = self.values.len() == program.outputs.len() && self.values.iter().zip(&program.outputs).all(|(own, o)| own.0 == o.name);
        match fits {
            true => self.values.iter_mut().for_each(|(_, values)| values.clear()),
            false => self.values = program.outputs.iter().map(|output| (output.name.clone(), Vec::new())).collect(),
        }
    }

    /// For a device: the memory of the output at a place of the program.
    pub fn put(&mut self, place: usize) -> &mut Vec<f32> {
        &mut self.values[place].1
    }

    /// For a device: what [`Want::of`] answered for some wanted rows, whose logits are `logits` and belong to the output at `place`.
    pub fn answer_all(
        &mut self,
        place: usize,
        wants: &[Want<'_>],
        answers: impl IntoIterator<Item = Option<Result<RowResult, String>>>,
        logits: &[f32],
    ) -> Result<(), DeviceError> {
        let width = (logits.len() / wants.len().max(1)).max(1);
        for (logits, answer) in logits.chunks(width).zip(answers) {
            let values = &mut self.values[place].1;
            let answer = answer.unwrap_or_else(|| {
                let row = values.len() / width;
                values.extend_from_slice(logits);
                Ok(RowResult::Logits(row))
            });
            let row = self.rows.len();
            self.rows.push(answer.map_err(|reason| DeviceError::Call(format!("wanted row {row}: {reason}")))?);
        }
        Ok(())
    }

    /// For a device that passes on what another has answered.
    pub fn replace_answers(&mut self, rows: Vec<RowResult>) {
        self.rows = rows;
    }
}

impl<'a> Call<'a> {
    /// A prefill call that gives all values of every output.
    pub fn new(bindings: Bindings, inputs: &'a [InputData<'a>], segments: &'a mut [Segment<'a>], outputs: &'a mut Outputs) -> Self {
        Self { bindings, phase: Phase::Prefill, inputs, segments, wants: &[], outputs, cancel: None, taps: None, tapped: None, host: None }
    }

    /// Checks everything about this call that does not depend on the device: input count, types and lengths, ranges of table and row indexes,
    /// segments, epochs, wants, and room in the states. Devices call it first.
    pub fn check(&self, program: &Checked) -> Result<(), DeviceError> {
        let wrong = |reason: String| Err(DeviceError::Call(format!("program `{}`: {reason}", program.name)));
        let rows = self.bindings.rows;
        if rows == 0 {
            return wrong("a call needs at least one row".into());
        }
        if self.bindings.soft_rows > rows || self.inputs.len() != program.inputs.len() {
            return wrong(format!(
                "found {} inputs and {} soft rows, expected {} inputs and at most {rows} soft rows",
                self.inputs.len(),
                self.bindings.soft_rows,
                program.inputs.len()
            ));
        }
        for dim in &program.limits().exact {
            dim.bind(&self.bindings).map(drop).or_else(wrong)?;
        }
        for (input, data) in program.inputs.iter().zip(self.inputs) {
            let mut numbers = 1usize;
            for dim in &input.shape {
                numbers = numbers.saturating_mul(dim.bind(&self.bindings).map_err(DeviceError::Call)?);
            }
            let (dtype, length) = match data {
                InputData::F32(x) => (DType::F32, x.len()),
                InputData::I32(x) => (DType::I32, x.len()),
            };
            if dtype != input.dtype || length != numbers {
                return wrong(format!("input `{}` needs {numbers} values of {:?}, found {length} of {dtype:?}", input.name, input.dtype));
            }
        }
        for &IndexLimit { place, rows, or_none } in &program.limits().indexes {
            let (least, limit) = (if or_none { -1 } else { 0 }, rows.bind(&self.bindings).map_err(DeviceError::Call)?);
            if let InputData::I32(numbers) = self.inputs[place]
                && let Some(bad) = numbers.iter().find(|&&i| i < least || i >= 0 && i as usize >= limit)
            {
                return wrong(format!("input `{}` has {bad}, expected {least} or more and less than {limit}", program.inputs[place].name));
            }
        }
        self.check_segments(program)?;
        self.check_wants(program)
    }

    fn check_segments(&self, program: &Checked) -> Result<(), DeviceError> {
        let wrong = |reason: String| Err(DeviceError::Call(format!("program `{}`: {reason}", program.name)));
        let (mut next, rows, step) = (0, self.bindings.rows, program.limits().segment_step);
        for segment in self.segments.iter() {
            let end = segment.first_row.saturating_add(segment.valid_rows);
            if segment.first_row < next || end > rows || segment.valid_rows == 0 || segment.first_row % step != 0 {
                return wrong(format!(
                    "segment {}..{end} is not valid in a call of {rows} rows: segments must be in order, apart, not empty and start at a multiple of {step}",
                    segment.first_row
                ));
            }
            if segment.epoch > program.epochs.len() {
                return wrong(format!("epoch is {}, but there are only {}", segment.epoch, program.epochs.len() + 1));
            }
            next = end;
            match &segment.state {
                None if !program.slots.is_empty() => return wrong("a segment has no state".into()),
                Some(state) if state.len() + segment.valid_rows > state.capacity() => {
                    return wrong(format!(
                        "{} rows and {} more exceed the context of {} rows",
                        state.len(),
                        segment.valid_rows,
                        state.capacity()
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn check_wants(&self, program: &Checked) -> Result<(), DeviceError> {
        if self.wants.is_empty() {
            return Ok(());
        }
        let wrong = |reason: String| Err(DeviceError::Call(format!("program `{}`: {reason}", program.name)));
        let Some((_, width)) = program.wanted_output() else {
            return wrong(
                "it has no single output with a row for each wanted one, so nothing else than whole outputs can be wanted".into(),
            );
        };
        if self.wants.len() != self.bindings.wanted {
            return wrong(format!("something is wanted of {} rows, but {} rows are wanted", self.wants.len(), self.bindings.wanted));
        }
        self.wants.iter().try_for_each(|want| want.check(width).or_else(wrong))
    }

    /// Has the same call made with another host in the pauses.
    pub fn with_host<R>(&mut self, host: &mut Host<'_>, make: impl FnOnce(&mut Call<'_>) -> R) -> R {
        let Call { bindings, phase, inputs, wants, cancel, tapped, .. } = *self;
        let same = |segment: &mut Segment<'_>| {
            let Segment { first_row, valid_rows, epoch, partial, .. } = *segment;
            (first_row, valid_rows, epoch, partial)
        };
        let shapes: Vec<_> = self.segments.iter_mut().map(same).collect();
        let states = self.segments.iter_mut().map(|segment| segment.state.as_deref_mut().map(|state| state as &mut dyn State));
        let segments = shapes.into_iter().zip(states);
        let segments =
            segments.map(|((first_row, valid_rows, epoch, partial), state)| Segment { state, first_row, valid_rows, epoch, partial });
        let mut segments: Vec<_> = segments.collect();
        let mut tap;
        let taps: Option<&mut dyn FnMut(Tap<'_>)> = match &mut self.taps {
            Some(show) => {
                tap = |it: Tap<'_>| show(it);
                Some(&mut tap)
            }
            None => None,
        };
        let outputs = &mut *self.outputs;
        make(&mut Call { bindings, phase, inputs, segments: &mut segments, wants, outputs, cancel, taps, tapped, host: Some(host) })
    }

    /// The rows whose logits are wanted whole.
    pub fn logit_rows(&self) -> usize {
        match self.wants.is_empty() {
            true => self.bindings.wanted,
            false => self.wants.iter().filter(|want| matches!(want, Want::Logits)).count(),
        }
    }

    /// Whether cancellation was requested.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }
}
