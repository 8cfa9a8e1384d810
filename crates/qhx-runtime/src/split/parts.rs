//! A program in parts that run one after the other, each on its own device: what crosses a cut is handed on, every part keeps its own slots. Of a prompt, of drafts and of
//! several answers, one device has the first half of the rows while the other has the second.

use super::{
    halves::{self, Half, HalfSegment},
    parts_state::{Homes, PartsState},
    tokens::{BUS, Share},
};
use crate::recorded::stages_shown;
use qhx_ir::{
    Bindings, Call, Checked, DType, DeviceError, Executable, ExpertCache, Input, InputData, Ledger, Name, Outputs, RowResult, Segment,
    Slot, State, StateBytes, Tap, Ticket, Want,
};
use std::{collections::HashMap, ops::Add, sync::Arc, time::Duration};

/// The loaded parts.
pub(super) struct Parts {
    program: Checked,
    parts: Vec<Part>,
    /// What each part gave in the last call, for each half of its rows.
    made: [Vec<Outputs>; 2],
    /// The part that makes each output of the program, in its order.
    outputs: Vec<usize>,
    /// The part that makes the output of wanted rows.
    answers: Option<usize>,
    homes: Arc<Homes>,
    /// Calls of so many rows are computed in two halves.
    halved_from: usize,
    /// Bandwidth tokens of a part.
    bandwidth: Option<Share>,
}

struct Part {
    executable: Box<dyn Executable>,
    /// Where each of its inputs comes from.
    sources: Vec<Source>,
}

enum Source {
    /// The call, by place.
    Call(usize),
    /// What an earlier part made, as it names it.
    Made(usize, Name),
}

impl Parts {
    pub(super) fn new(
        program: &Checked,
        parts: Vec<Box<dyn Executable>>,
        halved_from: usize,
        bandwidth: Option<Share>,
    ) -> Result<Self, DeviceError> {
        let broken = |what: &str, name: &str| DeviceError::Call(format!("program `{}` cannot be cut: {what} `{name}`", program.name));
        let places: HashMap<&Name, usize> = program.inputs.iter().enumerate().map(|(place, input)| (&input.name, place)).collect();
        // The last of the parts so far that gives each value.
        let mut makers: HashMap<Name, usize> = HashMap::new();
        let mut homes = Homes::new();
        let mut all_sources = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            let source = |input: &Input| match (places.get(&input.name), makers.get(&input.name)) {
                (Some(&place), _) => Ok(Source::Call(place)),
                (None, Some(&by)) => Ok(Source::Made(by, input.name.clone())),
                (None, None) => Err(broken("nothing makes", &input.name)),
            };
            all_sources.push(part.program().inputs.iter().map(source).collect::<Result<Vec<_>, _>>()?);
            makers.extend(part.program().outputs.iter().map(|output| (output.name.clone(), number)));
            for (name, slot) in &part.program().slots {
                let homes = homes.entry(name.clone()).or_default();
                if slot.is_recurrent() && !homes.is_empty() {
                    return Err(broken("two parts keep the recurrent slot", name));
                }
                homes.push(number);
            }
        }
        let outputs = program.outputs.iter().map(|o| makers.get(&o.name).copied().ok_or_else(|| broken("no part gives", &o.name)));
        let outputs: Vec<usize> = outputs.collect::<Result<_, _>>()?;
        let answers = program.wanted_output().map(|(place, _)| outputs[place]);
        let made = [(); 2].map(|()| parts.iter().map(|_| Outputs::new()).collect());
        let parts = parts.into_iter().zip(all_sources).map(|(executable, sources)| Part { executable, sources }).collect();
        Ok(Self { program: program.clone(), parts, made, outputs, answers, homes: Arc::new(homes), halved_from, bandwidth })
    }

    /// The halves in which a call is computed: one of many rows is cut in two, so that devices work side by side. While one has the output head of drafts, the other has the
    /// first layers of the drafts behind them. Few rows are not cut, because each half reads all weights again.
    fn halves(&self, call: &Call<'_>) -> Vec<Half> {
        let Bindings { rows, .. } = call.bindings;
        let is_long = rows >= self.halved_from && call.taps.is_none() && !self.program.slots.values().any(Slot::is_recurrent);
        let halves = is_long.then(|| halves::cut(&self.program, call, rows / 2)).flatten();
        halves.map_or_else(|| vec![Half::whole(call)], Vec::from)
    }

    /// Runs all parts over one half, or over two: the second is one part behind the first.
    fn run_all(&mut self, halves: &[Half], call: &mut Call<'_>) -> Result<(), DeviceError> {
        for step in 0..self.parts.len() + halves.len() - 1 {
            if call.is_cancelled() {
                return Err(DeviceError::Cancelled);
            }
            let first = (step < self.parts.len()).then_some(step);
            let second = step.checked_sub(1).filter(|_| halves.len() > 1);
            match (first, second) {
                (Some(part), Some(behind)) => self.run_both([part, behind], halves, call)?,
                (Some(part), None) => self.run_part(part, &halves[0], 0, call)?,
                (None, Some(part)) => self.run_part(part, &halves[1], 1, call)?,
                (None, None) => {}
            }
            if let (Some(part), [_, second]) = (first, halves) {
                self.commit_early(part, second, call)?;
            }
        }
        Ok(())
    }

    /// Runs one part over a half.
    fn run_part(&mut self, number: usize, half: &Half, side: usize, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let (before, own) = self.made[side].split_at_mut(number);
        let Part { executable, sources } = &mut self.parts[number];
        let (given, mut integers) = (half.inputs(call.inputs), Vec::new());
        let inputs = gather(executable.program(), sources, &given, before, &mut integers)?;
        let mut states = lend(&self.homes, number, half, call)?;
        let mut tap;
        let taps: Option<&mut dyn FnMut(Tap<'_>)> = match &mut call.taps {
            Some(show) => {
                tap = |it: Tap<'_>| show(it);
                Some(&mut tap)
            }
            None => None,
        };
        let (wants, bindings, outputs) = (wants(self.answers, number, half, call.wants), half.bindings, &mut own[0]);
        let Call { phase, cancel, tapped, .. } = *call;
        let segments = &mut segments(half, &mut states, call.segments);
        let tokens = self.bandwidth.as_ref().map(|share| share.take(&BUS, &stages_shown(executable.program())));
        let done =
            executable.run(&mut Call { bindings, phase, inputs: &inputs, segments, wants, outputs, cancel, taps, tapped, host: None });
        drop(tokens);
        take_back(&self.homes, number, half, states, call)?;
        done
    }

    /// Runs one part over the first half and the part before it over the second, at the same time where their devices can.
    fn run_both(&mut self, [part, behind]: [usize; 2], halves: &[Half], call: &mut Call<'_>) -> Result<(), DeviceError> {
        let (first, second) = (&halves[0], &halves[1]);
        let (earlier, later) = self.parts.split_at_mut(part);
        let (ahead, follower) = (&mut later[0], &mut earlier[behind]);
        let [made, made_behind] = &mut self.made;
        let ((before, own), (before_behind, own_behind)) = (made.split_at_mut(part), made_behind.split_at_mut(behind));
        let (given, given_behind) = (first.inputs(call.inputs), second.inputs(call.inputs));
        let (mut integers, mut integers_behind) = (Vec::new(), Vec::new());
        let inputs = gather(ahead.executable.program(), &ahead.sources, &given, before, &mut integers)?;
        let inputs_behind = gather(follower.executable.program(), &follower.sources, &given_behind, before_behind, &mut integers_behind)?;
        let mut states = lend(&self.homes, part, first, call)?;
        let mut states_behind = lend(&self.homes, behind, second, call)?;
        let Call { phase, cancel, .. } = *call;
        let done = run_together(
            self.bandwidth.as_ref(),
            &mut *ahead.executable,
            &mut Call {
                bindings: first.bindings,
                phase,
                inputs: &inputs,
                segments: &mut segments(first, &mut states, call.segments),
                wants: wants(self.answers, part, first, call.wants),
                outputs: &mut own[0],
                cancel,
                taps: None,
                tapped: None,
                host: None,
            },
            &mut *follower.executable,
            &mut Call {
                bindings: second.bindings,
                phase,
                inputs: &inputs_behind,
                segments: &mut segments(second, &mut states_behind, call.segments),
                wants: wants(self.answers, behind, second, call.wants),
                outputs: &mut own_behind[0],
                cancel,
                taps: None,
                tapped: None,
                host: None,
            },
        );
        take_back(&self.homes, part, first, states, call)?;
        take_back(&self.homes, behind, second, states_behind, call)?;
        done
    }

    /// The second half of a session sees the rows of the first, which therefore count for this part before the others have them.
    fn commit_early(&self, number: usize, second: &Half, call: &mut Call<'_>) -> Result<(), DeviceError> {
        // Only the first segment of the second half can have begun before it.
        let Some(HalfSegment { place, valid_rows, .. }) = second.segments.first().copied() else { return Ok(()) };
        let rows = call.segments[place].valid_rows - valid_rows;
        if let Some(own) = PartsState::of(&mut call.segments[place], &self.homes)?.filter(|_| rows > 0) {
            own.commit_early(number, rows)?;
        }
        Ok(())
    }
}

/// What is wanted of a part. What crosses a cut is needed whole.
fn wants<'a>(answers: Option<usize>, number: usize, half: &Half, call: &'a [Want<'a>]) -> &'a [Want<'a>] {
    if answers == Some(number) { &call[half.wanted.clone()] } else { &[] }
}

/// The states of a part for the segments of a half, out of those of the call.
pub(super) fn lend(
    homes: &Arc<Homes>,
    number: usize,
    half: &Half,
    call: &mut Call<'_>,
) -> Result<Vec<Option<Box<dyn State>>>, DeviceError> {
    let one = |segment: &HalfSegment| {
        let own = PartsState::of(&mut call.segments[segment.place], homes)?;
        Ok(own.and_then(|own| own.lend(number)))
    };
    half.segments.iter().map(one).collect()
}

pub(super) fn take_back(
    homes: &Arc<Homes>,
    number: usize,
    half: &Half,
    states: Vec<Option<Box<dyn State>>>,
    call: &mut Call<'_>,
) -> Result<(), DeviceError> {
    for (segment, state) in half.segments.iter().zip(states) {
        if let (Some(own), Some(state)) = (PartsState::of(&mut call.segments[segment.place], homes)?, state) {
            own.take_back(number, state);
        }
    }
    Ok(())
}

/// Two calls on two devices. What works in the background begins first and is waited for last; without enough bandwidth tokens for both it is waited for before the other begins.
fn run_together(
    bandwidth: Option<&Share>,
    first: &mut dyn Executable,
    first_call: &mut Call<'_>,
    second: &mut dyn Executable,
    second_call: &mut Call<'_>,
) -> Result<(), DeviceError> {
    if !first.works_in_background() && second.works_in_background() {
        return run_together(bandwidth, second, second_call, first, first_call);
    }
    let tokens = bandwidth.map(|share| share.take(&BUS, &stages_shown(first.program())));
    let begun = first.submit(first_call)?;
    if let Some(share) = bandwidth {
        let Some(_both) = share.try_take(&BUS) else {
            let stage = stages_shown(second.program());
            let first_is_done = || -> Result<(), DeviceError> {
                first.wait(begun, first_call)?;
                drop(tokens);
                Ok(())
            };
            let _alone = share.take_after(&BUS, &stage, first_is_done)?;
            return second.run(second_call);
        };
    }
    let done = second.run(second_call);
    first.wait(begun, first_call)?;
    done
}

/// What a part takes: from the call, and from the parts before it.
fn gather<'a>(
    program: &Checked,
    sources: &[Source],
    call: &[InputData<'a>],
    before: &'a [Outputs],
    integers: &'a mut Vec<Vec<i32>>,
) -> Result<Vec<InputData<'a>>, DeviceError> {
    let find = |source: &Source| match source {
        Source::Call(place) => Some(Found::Given(call[*place])),
        Source::Made(by, name) => before[*by].value(name).map(Found::Made),
    };
    inputs(program, sources.iter().map(find), integers)
}

/// Where the data of an input are: given as they are, or made by another device.
pub(super) enum Found<'a> {
    Given(InputData<'a>),
    Made(&'a [f32]),
}

/// The inputs of a program, of which each was found, or was not. What another device made crosses as floats.
pub(super) fn inputs<'a>(
    program: &Checked,
    found: impl Iterator<Item = Option<Found<'a>>>,
    integers: &'a mut Vec<Vec<i32>>,
) -> Result<Vec<InputData<'a>>, DeviceError> {
    let missing = |input: &Input| DeviceError::Call(format!("`{}` was not given by the device that makes it", input.name));
    let found = program.inputs.iter().zip(found).map(|(input, found)| Ok((input.dtype, found.ok_or_else(|| missing(input))?)));
    let found = found.collect::<Result<Vec<_>, DeviceError>>()?;
    let whole = found.iter().filter_map(|found| if let (DType::I32, Found::Made(numbers)) = found { Some(*numbers) } else { None });
    integers.extend(whole.map(whole_numbers));
    let mut integers = integers.iter();
    let one = |(dtype, found)| match (found, dtype) {
        (Found::Given(data), _) => data,
        (Found::Made(_), DType::I32) => InputData::I32(integers.next().map_or(&[], Vec::as_slice)),
        (Found::Made(numbers), DType::F32) => InputData::F32(numbers),
    };
    Ok(found.into_iter().map(one).collect())
}

/// Whole numbers that crossed as floats.
pub(super) fn whole_numbers(values: &[f32]) -> Vec<i32> {
    values.iter().map(|&n| n as i32).collect()
}

/// The segments of a half with a part's states.
pub(super) fn segments<'a>(half: &Half, states: &'a mut [Option<Box<dyn State>>], call: &[Segment<'_>]) -> Vec<Segment<'a>> {
    let one = |(own, state): (&HalfSegment, &'a mut Option<Box<dyn State>>)| {
        let Segment { epoch, partial, .. } = call[own.place];
        let state = state.as_deref_mut().map(|state| state as &mut dyn State);
        Segment { state, first_row: own.first_row, valid_rows: own.valid_rows, epoch, partial }
    };
    half.segments.iter().zip(states).map(one).collect()
}

impl Executable for Parts {
    fn program(&self) -> &Checked {
        &self.program
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        let new = |part: &Part| match part.executable.program().slots.is_empty() {
            true => Ok(None),
            false => part.executable.new_state(context).map(Some),
        };
        let parts = self.parts.iter().map(new).collect::<Result<_, _>>()?;
        Ok(Box::new(PartsState::new(Ledger::new(&self.program.slots, context), parts, self.homes.clone())))
    }

    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        call.check(&self.program)?;
        Ok(Ticket(0))
    }

    fn wait(&mut self, _: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        for segment in call.segments.iter_mut() {
            if let Some(state) = PartsState::of(segment, &self.homes)? {
                state.begin()?;
            }
        }
        let halves = self.halves(call);
        let done = self.run_all(&halves, call);
        for segment in call.segments.iter_mut() {
            let (rows, partial) = (segment.valid_rows, segment.partial);
            if let Some(state) = PartsState::of(segment, &self.homes)? {
                match &done {
                    Ok(()) => state.end(rows, partial),
                    Err(_) => state.forget_early()?,
                }
            }
        }
        done?;
        call.outputs.start(&self.program);
        for (place, (output, &part)) in self.program.outputs.iter().zip(&self.outputs).enumerate() {
            for made in &self.made[..halves.len()] {
                call.outputs.put(place).extend_from_slice(made[part].value(&output.name).unwrap_or_default());
            }
        }
        if let Some(part) = self.answers {
            let mut answers: Vec<RowResult> = Vec::new();
            for made in &self.made[..halves.len()] {
                // Rows of logits are numbered through.
                let earlier = answers.iter().filter(|answer| matches!(answer, RowResult::Logits(_))).count();
                answers.extend(made[part].rows().iter().cloned().map(|answer| match answer {
                    RowResult::Logits(row) => RowResult::Logits(row + earlier),
                    other => other,
                }));
            }
            call.outputs.replace_answers(answers);
        }
        Ok(())
    }

    fn max_segments(&self) -> usize {
        self.parts.iter().map(|part| part.executable.max_segments()).min().unwrap_or(1)
    }

    fn commits_partly(&self) -> bool {
        self.parts.iter().all(|part| part.executable.commits_partly())
    }

    fn invariant_rows(&self) -> usize {
        self.parts.iter().map(|part| part.executable.invariant_rows()).min().unwrap_or(0)
    }

    fn state_bytes(&self) -> Option<StateBytes> {
        self.parts.iter().map(|part| part.executable.state_bytes()).sum()
    }

    fn last_stage_time(&self) -> Option<Duration> {
        self.parts.last()?.executable.last_stage_time()
    }

    fn row_by_row(&self) -> Option<&str> {
        self.parts.iter().find_map(|part| part.executable.row_by_row())
    }

    fn expert_cache(&self) -> Option<ExpertCache> {
        self.parts.iter().filter_map(|part| part.executable.expert_cache()).reduce(Add::add)
    }

    fn scratch_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.executable.scratch_bytes()).sum()
    }
}
