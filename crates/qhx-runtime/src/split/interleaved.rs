//! A program on one device, in one call, that pauses for what other devices compute: its values stay where they are, and nothing is submitted in between.

use super::{
    OpRange,
    halves::Half,
    hot::{Pool, SharedExperts},
    parts::{Found, inputs, lend, segments, take_back, whole_numbers},
    parts_state::{Homes, PartsState},
    tokens::{BUS, Share},
};
use crate::recorded::{Recorded, stages_shown};
use qhx_ir::{
    Bindings, Call, Checked, DType, Device, DeviceError, Executable, ExpertCache, Generator, Host, Input, InputData, Ledger, LoadOptions,
    Name, Op, OpKind, Outputs, Pause, Paused, Phase, Program, Segment, State, StateBytes, Tap, Ticket, Want, WeightTensor, Weights, dim,
};
use std::{
    borrow::Cow,
    cell::RefCell,
    collections::{BTreeSet, HashSet},
    iter, mem, slice,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

/// The loaded program: what its own device computes, and the parts of the others.
pub(super) struct Interleaved {
    program: Checked,
    own: Box<dyn Executable>,
    /// Where each input of its own program comes from.
    sources: Vec<Source>,
    pauses: Vec<AtPause>,
    /// In the program's order. Those up to the first number are computed before the call, those from the second on behind it, the others in its pauses.
    parts: Vec<Part>,
    around: [usize; 2],
    experts: Vec<SharedExperts>,
    /// Where each of them has its rows, chosen experts and factors.
    expert_sources: Vec<[Source; 3]>,
    pool: Pool,
    cache: ExpertCache,
    made: Outputs,
    /// Who makes each output of the program: a part, or its own device.
    makers: Vec<Option<usize>>,
    /// The number of the own device's state is 0, that of a part one more than its place.
    homes: Arc<Homes>,
    bandwidth: Option<Share>,
}

/// What another device computes.
struct Part {
    executable: Box<dyn Executable>,
    sources: Vec<Source>,
    made: Outputs,
}

/// Where a value comes from.
#[derive(Clone, Debug)]
enum Source {
    /// The call, by place.
    Call(usize),
    /// The part with this number.
    Part(usize, Name),
    /// The pause in which it is needed gives it, at this place.
    Given(usize),
    /// The own device's program, when it has ended.
    Own(Name),
    /// It is not known before a pause.
    Late,
    /// It says where the experts of an op are that are shared, by its number.
    Held(usize),
}

/// What is done in a pause.
enum AtPause {
    /// A part is computed, some of whose outputs are taken.
    Part(usize, Vec<(Name, DType)>),
    /// The choices of an op with experts are dealt out, while the device goes on with those that it has.
    Deal(usize),
    /// Those that the processor has are computed.
    Rest(usize),
}

/// What a program is made of: see [`Interleaved::load`].
pub(super) struct Pieces<'a> {
    pub(super) program: &'a Checked,
    /// All devices.
    pub(super) devices: &'a [Arc<dyn Device>],
    /// Whose program it is.
    pub(super) device: usize,
    /// Who runs what.
    pub(super) runs: &'a [OpRange],
    /// The places of the ops whose experts are shared, which are runs by themselves, and those that lie on the device.
    pub(super) shared: &'a [usize],
    pub(super) pool: Pool,
    pub(super) bandwidth: Option<Share>,
}

impl Interleaved {
    pub(super) fn load(pieces: Pieces<'_>, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Self, DeviceError> {
        let Pieces { program, devices, device, runs, shared, pool, bandwidth } = pieces;
        let mut experts = Vec::new();
        for (layer, &place) in shared.iter().enumerate() {
            let on = runs.iter().find(|run| run.ops.contains(&place)).map_or(device, |run| run.device);
            let places = (layer, place, shared.get(layer + 1).copied());
            experts.push(SharedExperts::load(&*devices[on], program, places, &pool, weights, options)?);
        }
        // Two that slow one another down take turns.
        let turns = bandwidth.as_ref().is_some_and(|share| !share.fits_twice());
        let Woven { own, sources, pauses, at, parts, around, expert_sources } =
            Woven::new(program, runs, (device, shared), &experts, &pool, turns)?;
        let replaceable = pool.slots().map(|(name, _)| name.clone()).collect();
        let own_options = LoadOptions { pauses, replaceable, ..options.clone() };
        let executable = devices[device].load(&own, &pool.filled(weights)?, &own_options)?;
        let executable = Recorded::of(executable, devices[device].name(), options.timeline.as_ref());
        let mut homes = Homes::new();
        let mut keep =
            |number: usize, program: &Checked| program.slots.keys().for_each(|slot| homes.entry(slot.clone()).or_default().push(number));
        keep(0, &own);
        let mut loaded = Vec::new();
        for (number, (device, part, sources)) in parts.into_iter().enumerate() {
            keep(number + 1, &part);
            let device = &devices[device];
            let executable = Recorded::of(device.load(&part, weights, options)?, device.name(), options.timeline.as_ref());
            loaded.push(Part { executable, sources, made: Outputs::new() });
        }
        let is_own = |name: &Name| own.outputs.iter().any(|output| output.name == *name);
        let maker = |name: &Name| loaded.iter().position(|part| part.executable.program().outputs.iter().any(|o| o.name == *name));
        let makers = program.outputs.iter().map(|o| maker(&o.name).filter(|_| !is_own(&o.name))).collect();
        Ok(Self {
            program: program.clone(),
            own: executable,
            sources,
            pauses: at,
            parts: loaded,
            around,
            experts,
            expert_sources,
            pool,
            cache: ExpertCache::default(),
            made: Outputs::new(),
            makers,
            homes: Arc::new(homes),
            bandwidth,
        })
    }

    /// The part that makes the output of the wanted rows, if one does.
    fn answering(&self) -> Option<usize> {
        self.program.wanted_output().and_then(|(place, _)| self.makers[place])
    }

    /// A step begins: some experts take the place of others, which this step does not wait for.
    fn begin(&mut self, rows: usize) -> Result<(), DeviceError> {
        let own = &mut self.own;
        let mut replace = |weight: &str, number: usize, part: &WeightTensor| own.replace_part(weight, number, part);
        self.pool.begin(rows, &mut replace, &mut self.cache)?;
        self.pool.wait_for(self.own.parts_on_the_way());
        Ok(())
    }

    /// Runs everything, with the states of the own device's program and of all parts.
    fn run_all(&mut self, call: &mut Call<'_>, half: &Half, states: &mut [States]) -> Result<(), DeviceError> {
        self.begin(call.bindings.rows)?;
        let _tokens = self.bandwidth.as_ref().map(|share| share.take(&BUS, &stages_shown(&self.program)));
        let (answering, [before, after]) = (self.answering(), self.around);
        let Self { own, sources, pauses, parts, experts, expert_sources, pool, cache, made, .. } = self;
        let taps = call.taps.take().map(RefCell::new);
        let Call { bindings, phase, inputs, wants, cancel, tapped, .. } = *call;
        let frame = Frame { bindings, phase, inputs, wants, cancel, tapped, half, segments: call.segments, taps: taps.as_ref(), answering };
        let (own_states, states) = states.split_at_mut(1);
        let (leading, parts) = parts.split_at_mut(before);
        let (leading_states, states) = states.split_at_mut(before);
        for (number, states) in leading_states.iter_mut().enumerate() {
            let (earlier, part) = leading.split_at_mut(number);
            frame.run(&mut part[0], number, Known { parts: [earlier, &[]], ..Known::default() }, states)?;
        }
        let (leading, program) = (&*leading, own.program().clone());
        let count = |input: &Input| dim::bind_shape(&input.shape, &bindings).map(|shape| shape.iter().product());
        let counts = program.inputs.iter().map(count).collect::<Result<Vec<usize>, _>>().map_err(DeviceError::Call)?;
        let (unknown, no_expert) =
            (vec![0.0; counts.iter().copied().max().unwrap_or(0)], vec![0; counts.iter().copied().max().unwrap_or(0)]);
        let held: Vec<Vec<i32>> = experts.iter().map(|experts| experts.held(pool)).collect();
        let mut integers = Vec::new();
        let late = |place: usize, dtype: DType| match (&sources[place], dtype) {
            (Source::Held(layer), _) => InputData::I32(&held[*layer]),
            (_, DType::F32) => InputData::F32(&unknown[..counts[place]]),
            (_, DType::I32) => InputData::I32(&no_expert[..counts[place]]),
        };
        let own_inputs = gather(&program, sources, inputs, Known { parts: [leading, &[]], ..Known::default() }, late, &mut integers)?;
        let mut host = |paused: &mut Paused<'_>| {
            let given = paused.given;
            match &pauses[paused.number] {
                AtPause::Part(number, takes) => {
                    let place = number - before;
                    let (earlier, part) = parts.split_at_mut(place);
                    let known = Known { parts: [leading, earlier], given, ended: None };
                    frame.run(&mut part[0], *number, known, &mut states[place])?;
                    for (place, (name, dtype)) in takes.iter().enumerate() {
                        let values = part[0].made.value(name).unwrap_or_default();
                        match dtype {
                            DType::F32 => (paused.take)(place, InputData::F32(values)),
                            DType::I32 => (paused.take)(place, InputData::I32(&whole_numbers(values))),
                        }
                    }
                }
                AtPause::Deal(layer) => {
                    let read = |source: &Source| match source {
                        Source::Call(place) => match inputs[*place] {
                            InputData::F32(numbers) => Cow::from(numbers),
                            InputData::I32(numbers) => numbers.iter().map(|&n| n as f32).collect(),
                        },
                        Source::Given(place) => Cow::from(given[*place]),
                        _ => Cow::default(),
                    };
                    let read = expert_sources[*layer].each_ref().map(read);
                    let read = read.each_ref().map(|numbers| &**numbers);
                    if let Some(held) = experts[*layer].deal(read, pool, paused.replace.as_deref_mut(), cache)? {
                        (paused.take)(0, InputData::I32(&held));
                    }
                }
                AtPause::Rest(layer) => {
                    let sums = experts[*layer].rest(pool, paused.replace.as_deref_mut(), cancel, cache)?;
                    (paused.take)(0, InputData::F32(sums));
                }
            }
            Ok(())
        };
        let mut tap = |tap: Tap<'_>| frame.show(tap);
        let taps: Option<&mut dyn FnMut(Tap<'_>)> = if taps.is_some() { Some(&mut tap) } else { None };
        let wants = if answering.is_none() { wants } else { &[] };
        let segments = &mut segments(half, &mut own_states[0], frame.segments);
        let host: Option<&mut Host<'_>> = Some(&mut host);
        own.run(&mut Call { bindings, phase, inputs: &own_inputs, segments, wants, outputs: made, cancel, taps, tapped, host })?;
        for number in after..before + parts.len() {
            let (earlier, part) = parts.split_at_mut(number - before);
            let known = Known { parts: [leading, earlier], given: &[], ended: Some(made) };
            frame.run(&mut part[0], number, known, &mut states[number - before])?;
        }
        Ok(())
    }
}

/// The states of a part, for each segment of a call.
type States = Vec<Option<Box<dyn State>>>;

/// Whoever is shown the results of stages.
type Taps<'t> = RefCell<&'t mut (dyn FnMut(Tap<'_>) + 't)>;

/// What all parts see of a call.
struct Frame<'a, 't> {
    bindings: Bindings,
    phase: Phase,
    inputs: &'a [InputData<'a>],
    wants: &'a [Want<'a>],
    cancel: Option<&'a AtomicBool>,
    tapped: Option<&'a str>,
    half: &'a Half,
    segments: &'a [Segment<'t>],
    taps: Option<&'a Taps<'t>>,
    /// The part that is wanted something of.
    answering: Option<usize>,
}

/// What is there when a part is computed: earlier parts, what a pause gives, and what the own device's program gave.
#[derive(Clone, Copy, Default)]
struct Known<'a> {
    parts: [&'a [Part]; 2],
    given: &'a [&'a [f32]],
    ended: Option<&'a Outputs>,
}

impl Frame<'_, '_> {
    fn show(&self, tap: Tap<'_>) {
        if let Some(taps) = self.taps {
            (taps.borrow_mut())(tap);
        }
    }

    /// Computes a part.
    fn run(&self, part: &mut Part, number: usize, known: Known<'_>, states: &mut States) -> Result<(), DeviceError> {
        let Self { bindings, phase, cancel, tapped, .. } = *self;
        let Part { executable, sources, made } = part;
        let mut integers = Vec::new();
        let inputs = gather(executable.program(), sources, self.inputs, known, |_, _| InputData::F32(&[]), &mut integers)?;
        let mut tap = |tap: Tap<'_>| self.show(tap);
        let taps: Option<&mut dyn FnMut(Tap<'_>)> = if self.taps.is_some() { Some(&mut tap) } else { None };
        let wants = if self.answering == Some(number) { self.wants } else { &[] };
        let segments = &mut segments(self.half, states, self.segments);
        executable.run(&mut Call { bindings, phase, inputs: &inputs, segments, wants, outputs: made, cancel, taps, tapped, host: None })
    }
}

/// The inputs of a program; `late` gives those that are not known yet, by place and type.
fn gather<'a>(
    program: &Checked,
    sources: &[Source],
    call: &[InputData<'a>],
    known: Known<'a>,
    late: impl Fn(usize, DType) -> InputData<'a>,
    integers: &'a mut Vec<Vec<i32>>,
) -> Result<Vec<InputData<'a>>, DeviceError> {
    let find = |(place, source): (usize, &Source)| match source {
        Source::Call(place) => Some(Found::Given(call[*place])),
        Source::Late | Source::Held(_) => Some(Found::Given(late(place, program.inputs[place].dtype))),
        Source::Part(number, name) => known.parts.into_iter().flatten().nth(*number)?.made.value(name).map(Found::Made),
        Source::Given(place) => known.given.get(*place).copied().map(Found::Made),
        Source::Own(name) => known.ended?.value(name).map(Found::Made),
    };
    inputs(program, sources.iter().enumerate().map(find), integers)
}

/// A program as one of its devices runs it, with what it pauses for.
struct Woven {
    own: Checked,
    sources: Vec<Source>,
    pauses: Vec<Pause>,
    at: Vec<AtPause>,
    /// The device of each part, its program, and where that has its inputs from.
    parts: Vec<(usize, Checked, Vec<Source>)>,
    around: [usize; 2],
    expert_sources: Vec<[Source; 3]>,
}

impl Woven {
    fn new(
        program: &Checked,
        runs: &[OpRange],
        (device, shared): (usize, &[usize]),
        experts: &[SharedExperts],
        pool: &Pool,
        turns: bool,
    ) -> Result<Self, DeviceError> {
        let places = |run: &OpRange| run.ops.clone();
        let layer_of = |run: &OpRange| shared.iter().position(|&place| run.ops == (place..place + 1));
        let is_inside = |run: &OpRange| run.device == device || layer_of(run).is_some();
        let inside: BTreeSet<usize> = runs.iter().filter(|run| is_inside(run)).flat_map(places).collect();
        let (Some(&first), Some(&last)) = (inside.first(), inside.last()) else {
            return Err(DeviceError::Call(format!("program `{}` has nothing on this device", program.name)));
        };
        let others: Vec<&OpRange> = runs.iter().filter(|run| !is_inside(run)).collect();
        let around = [first, last + 1].map(|end| others.partition_point(|run| run.ops.start < end));
        let cut = program.cut(inside.iter().copied())?;
        let input = |name: &Name| program.inputs.iter().position(|input| input.name == *name);
        // Who makes a value: a part, or none of them.
        let part_of = |name: &Name| program.maker(name).and_then(|op| others.iter().position(|run| run.ops.contains(&op)));
        let mut parts = Vec::new();
        let mut part_gives: Vec<Vec<Name>> = Vec::new();
        for (number, run) in others.iter().enumerate() {
            let part = run.part(program)?;
            let mut gives: Vec<Name> = Vec::new();
            let sources = part.inputs.iter().map(|Input { name, .. }| match (input(name), part_of(name)) {
                (Some(place), _) => Source::Call(place),
                (None, Some(by)) => Source::Part(by, name.clone()),
                (None, None) if number >= around[1] => Source::Own(name.clone()),
                (None, None) => {
                    gives.push(name.clone());
                    Source::Given(gives.len() - 1)
                }
            });
            let sources = sources.collect();
            parts.push((run.device, part, sources));
            part_gives.push(gives);
        }
        let mut own: Program = (*cut).clone();
        let mut cut_ops = mem::take(&mut own.ops).into_iter();
        let (mut pauses, mut at, mut expert_sources) = (Vec::new(), Vec::new(), Vec::new());
        let (mut late, mut tables, mut number) = (HashSet::new(), Vec::new(), 0);
        let mut pause = |ops: &[Op], gives: Vec<Name>, takes: &[Name], changes: &[Name], what: AtPause| {
            late.extend(takes.iter().cloned());
            pauses.push(Pause { before: ops.len(), gives, takes: takes.to_vec(), changes: changes.to_vec() });
            at.push(what);
        };
        for run in runs {
            let mut ops = cut_ops.by_ref().take(if is_inside(run) { run.ops.len() } else { 0 });
            match layer_of(run) {
                Some(layer) => {
                    let Some((op, reads)) = ops.next().and_then(|op| Some((op.clone(), SharedExperts::reads(&op)?.map(Name::clone))))
                    else {
                        return Err(DeviceError::Call("an op with experts is missing".into()));
                    };
                    let named = |what: &str| Name::from(format!("{}.{what}", op.path));
                    let [hot, held, cold] = ["hot", "held", "cold"].map(named);
                    let mut gives: Vec<Name> = Vec::new();
                    expert_sources.push(reads.each_ref().map(|name| {
                        input(name).map(Source::Call).unwrap_or_else(|| {
                            gives.push(name.clone());
                            Source::Given(gives.len() - 1)
                        })
                    }));
                    let (of, width) = (&experts[layer], program.value_type(&op.path).shape.clone());
                    let input = |name: &Name, dtype, shape| Input { name: name.clone(), dtype, shape, generator: Generator::Carried };
                    own.inputs.push(input(&held, DType::I32, vec![of.count().into()]));
                    own.inputs.push(input(&cold, DType::F32, width));
                    pause(&own.ops, gives, &[], slice::from_ref(&held), AtPause::Deal(layer));
                    let [x, chosen, factors] = reads;
                    own.ops.push(Op { path: hot.clone(), op: of.op_of_slots([x, chosen, factors, held.clone()], pool)? });
                    tables.push(held);
                    let gives = if turns { vec![hot.clone()] } else { vec![] };
                    pause(&own.ops, gives, slice::from_ref(&cold), &[], AtPause::Rest(layer));
                    own.ops.push(Op { path: op.path, op: OpKind::Add { a: hot, b: cold } });
                }
                None if is_inside(run) => own.ops.extend(ops),
                None => {
                    if (around[0]..around[1]).contains(&number) {
                        let read = |name: &Name| own.inputs.iter().find(|input| input.name == *name);
                        let takes =
                            parts[number].1.outputs.iter().filter_map(|o| read(&o.name)).map(|input| (input.name.clone(), input.dtype));
                        let takes: Vec<(Name, DType)> = takes.collect();
                        let names: Vec<Name> = takes.iter().map(|(name, _)| name.clone()).collect();
                        pause(&own.ops, mem::take(&mut part_gives[number]), &names, &[], AtPause::Part(number, takes));
                    }
                    number += 1;
                }
            }
        }
        let read_behind = |name: &Name| {
            let mut sources = parts[around[1]..].iter().flat_map(|(_, _, sources): &(_, _, Vec<Source>)| sources);
            sources.any(|source| matches!(source, Source::Own(own) if own == name))
        };
        let is_output = |name: &Name| program.outputs.iter().any(|output| output.name == *name);
        own.outputs.retain(|output| is_output(&output.name) || read_behind(&output.name));
        own.weights.extend(pool.slots().cloned());
        let used: HashSet<Name> = own.ops.iter().flat_map(|op| op.op.weights()).cloned().collect();
        own.weights.retain(|name, _| used.contains(name));
        let source = |Input { name, .. }: &Input| match (input(name), part_of(name)) {
            (Some(place), _) => Source::Call(place),
            (None, Some(by)) if !late.contains(name) => Source::Part(by, name.clone()),
            _ => tables.iter().position(|table| table == name).map_or(Source::Late, Source::Held),
        };
        let sources = own.inputs.iter().map(source).collect();
        Ok(Self { own: Checked::new(own)?, sources, pauses, at, parts, around, expert_sources })
    }
}

impl Executable for Interleaved {
    fn program(&self) -> &Checked {
        &self.program
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        let executables = iter::once(&*self.own).chain(self.parts.iter().map(|part| &*part.executable));
        let new = |executable: &dyn Executable| match executable.program().slots.is_empty() {
            true => Ok(None),
            false => executable.new_state(context).map(Some),
        };
        let states = executables.map(new).collect::<Result<_, _>>()?;
        Ok(Box::new(PartsState::new(Ledger::new(&self.program.slots, context), states, self.homes.clone())))
    }

    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        call.check(&self.program)?;
        Ok(Ticket(0))
    }

    fn wait(&mut self, _: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        if call.is_cancelled() {
            return Err(DeviceError::Cancelled);
        }
        for segment in call.segments.iter_mut() {
            if let Some(state) = PartsState::of(segment, &self.homes)? {
                state.begin()?;
            }
        }
        let half = Half::whole(call);
        let mut states = (0..=self.parts.len()).map(|number| lend(&self.homes, number, &half, call)).collect::<Result<Vec<_>, _>>()?;
        let done = self.run_all(call, &half, &mut states);
        for (number, states) in states.into_iter().enumerate() {
            take_back(&self.homes, number, &half, states, call)?;
        }
        done?;
        for segment in call.segments.iter_mut() {
            let (rows, partial) = (segment.valid_rows, segment.partial);
            if let Some(state) = PartsState::of(segment, &self.homes)? {
                state.end(rows, partial);
            }
        }
        call.outputs.start(&self.program);
        for (place, (output, maker)) in self.program.outputs.iter().zip(&self.makers).enumerate() {
            let made = maker.map_or(&self.made, |part| &self.parts[part].made);
            call.outputs.put(place).extend_from_slice(made.value(&output.name).unwrap_or_default());
        }
        let answers = self.answering().map_or(&self.made, |part| &self.parts[part].made);
        call.outputs.replace_answers(answers.rows().to_vec());
        Ok(())
    }

    fn max_segments(&self) -> usize {
        self.parts.iter().map(|part| part.executable.max_segments()).min().unwrap_or(usize::MAX).min(self.own.max_segments())
    }

    fn commits_partly(&self) -> bool {
        self.own.commits_partly() && self.parts.iter().all(|part| part.executable.commits_partly())
    }

    fn state_bytes(&self) -> Option<StateBytes> {
        iter::once(&self.own).chain(self.parts.iter().map(|part| &part.executable)).map(|part| part.state_bytes()).sum()
    }

    fn last_stage_time(&self) -> Option<Duration> {
        self.parts[self.around[1]..].last().map_or(&self.own, |part| &part.executable).last_stage_time()
    }

    fn expert_cache(&self) -> Option<ExpertCache> {
        Some(self.cache)
    }

    fn scratch_bytes(&self) -> u64 {
        let parts = self.parts.iter().map(|part| part.executable.scratch_bytes());
        parts.chain(self.experts.iter().map(SharedExperts::scratch_bytes)).sum::<u64>() + self.own.scratch_bytes()
    }
}
