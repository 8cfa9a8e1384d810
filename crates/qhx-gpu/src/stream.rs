//! The step of one row as a list of instructions, which `step.comp` follows in one dispatch.

use crate::{
    kernels::{self, command},
    vulkan::{Buffer, Command, Gpu, Kind, Recording, Use},
};
use qhx_ir::{DeviceError, hadamard};
use std::{ops::Range, sync::Arc};

/// Words of an instruction.
const WORDS: usize = 64;

/// What instructions do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// A product; weights are of the kind with this number.
    Product(usize),
    /// Attention; heads are of the kind with this number.
    Attend(usize),
    Merge,
    Row,
    Map,
    Part,
    ShortConv,
    Delta,
    Route,
    /// Nothing.
    Idle,
}

impl Operation {
    /// What an instruction's words say that it does, to tell times apart: of a product also its outputs, width and mode, where `step_product.glsl` has them.
    fn name(words: &[u32]) -> String {
        let names = ["product", "product", "attend", "attend", "merge", "row", "map", "part", "short_conv", "delta", "route", "product"];
        match names.get(words[0] as usize) {
            Some(&"product") => {
                let [width, outputs, mode] = PRODUCT_SHAPE.map(|place| words[place]);
                format!("product {outputs}x{width}{}", ["", " of experts", " of experts, added"][mode.min(2) as usize])
            }
            Some(name) => (*name).to_owned(),
            None => "nothing".to_owned(),
        }
    }

    /// Its number in `step.comp`.
    fn number(self) -> u32 {
        match self {
            Self::Product(kind @ 0..2) => kind as u32,
            Self::Product(_) => 11,
            Self::Attend(kind) => 2 + kind as u32,
            Self::Merge => 4,
            Self::Row => 5,
            Self::Map => 6,
            Self::Part => 7,
            Self::ShortConv => 8,
            Self::Delta => 9,
            Self::Route => 10,
            Self::Idle => 99,
        }
    }
}

/// Where a product's width, outputs and mode are among its words, as `step_product.glsl` has them.
const PRODUCT_SHAPE: [usize; 3] = [36, 37, 51];

/// One instruction: what, in how many groups, then addresses and numbers.
pub(crate) struct Instruction {
    groups: usize,
    words: Vec<u32>,
    /// What it needs of the shader.
    needs: Needs,
}

impl Instruction {
    /// Addresses come before numbers.
    pub(crate) fn new(operation: Operation, groups: usize, addresses: &[u64], numbers: &[u32]) -> Self {
        let mut words = vec![operation.number(), groups as u32, 0, 0];
        words.extend(addresses.iter().flat_map(|&address| [address as u32, (address >> 32) as u32]));
        words.extend(numbers);
        assert!(words.len() <= WORDS, "an instruction of {} words", words.len());
        words.resize(WORDS, 0);
        Self { groups, words, needs: Needs { operations: bit(operation.number()), ..Needs::default() } }
    }

    /// It needs this, too.
    pub(crate) fn needing(self, needs: Needs) -> Self {
        Self { needs: self.needs.and(needs), ..self }
    }
}

/// Of `row.glsl`: what rows need.
const GATES: u32 = 1;
const LAYER_NORMS: u32 = 2;
const NORM_BIASES: u32 = 4;
const UNEVEN_WIDTHS: u32 = 8;
/// Of `step_hadamard.glsl`.
const TRANSFORMS: u32 = 16;
const OTHER_ODDS: u32 = 32;
/// Odd factors whose loops are unrolled, at most: their dense block has room among the scales, and its row in registers.
const MOST_UNROLLED: usize = 21;

/// What instructions need of `step.comp`, a bit for each. The rest of it is not compiled: it would cost time, and registers that then are missing where they count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    operations: u32,
    functions: u32,
    row_work: u32,
    /// The odd factor of transforms whose loops are unrolled; 0 for none.
    odd: u32,
}

impl Needs {
    pub(crate) fn of(items: &[Item]) -> Self {
        let all = items.iter().filter_map(|item| if let Item::Instruction(one) = item { Some(one.needs) } else { None });
        let mut needs = all.fold(Self::default(), Self::and);
        // Whether parts of heads are merged depends on the number of keys: one shader for all of them.
        if needs.operations & (1 << Operation::Attend(0).number() | 1 << Operation::Attend(1).number()) != 0 {
            needs.operations |= 1 << Operation::Merge.number();
        }
        needs
    }

    /// Of an elementwise function.
    pub(crate) fn function(function: u32) -> Self {
        Self { functions: bit(function), ..Self::default() }
    }

    /// Of rows of this width: the function of their gate, their norm as `row.glsl` numbers it, and whether that has a bias.
    pub(crate) fn row(width: usize, gate: Option<u32>, norm: u32, bias: bool) -> Self {
        let all = [(gate.is_some(), GATES), (norm == 2, LAYER_NORMS), (bias, NORM_BIASES), (width % 4 != 0, UNEVEN_WIDTHS)];
        let row_work = all.into_iter().filter(|(needed, _)| *needed).fold(0, |all, (_, work)| all | work);
        Self { row_work, ..gate.map_or(Self::default(), Self::function) }
    }

    /// Of the transform of a row of this width.
    pub(crate) fn transform(width: usize) -> Self {
        let (power, odd) = hadamard::factors(width);
        let unrolled = power >= 4 && odd <= MOST_UNROLLED;
        Self {
            row_work: if unrolled || odd == 1 { TRANSFORMS } else { TRANSFORMS | OTHER_ODDS },
            odd: if unrolled && odd > 1 { odd as u32 } else { 0 },
            ..Self::default()
        }
    }

    pub(crate) fn and(self, other: Self) -> Self {
        // One of two factors is unrolled.
        let others = if self.odd != other.odd && self.odd.min(other.odd) > 0 { OTHER_ODDS } else { 0 };
        Self {
            operations: self.operations | other.operations,
            functions: self.functions | other.functions,
            row_work: self.row_work | other.row_work | others,
            odd: self.odd.max(other.odd),
        }
    }
}

/// None for numbers that mean nothing.
fn bit(number: u32) -> u32 {
    1u32.checked_shl(number).unwrap_or(0)
}

/// What a recorder collects.
pub(crate) enum Item {
    Command(Command),
    /// For the step of one row.
    Instruction(Instruction),
}

/// How `step.comp` is made for a program.
#[derive(Clone, Debug)]
pub(crate) struct StreamPlan {
    /// Invocations of a workgroup.
    pub(crate) group: usize,
    /// Of a subgroup.
    pub(crate) subgroup: usize,
    /// Weights: their constants and the form of rows.
    kinds: Vec<[u32; 5]>,
    /// Heads: type of the slot, numbers of a head, query heads of a key head, lanes for a key.
    heads: Vec<[u32; 4]>,
    /// Numbers of the longest row.
    width: usize,
    /// Bytes of a workgroup's room for rows, and the most that there may be.
    room: usize,
    most_room: usize,
    /// The most that a row may have while it is transformed: all that there is.
    most_transformed: usize,
    /// Whether something has no instruction.
    failed: bool,
}

/// Kinds of weights, and of heads, that a step has at most.
const MOST_KINDS: usize = 3;
const MOST_HEADS: usize = 2;
/// Runs of four numbers that an invocation holds of a row, at most.
const MOST_RUNS: usize = 8;
/// Bytes of a workgroup's room, at most, and the scales that it holds.
const MOST_ROOM: usize = 32 << 10;
const ROOM_SCALES: usize = 512;
/// Bytes of shared memory beside the room: scales, an instruction, and a few words of each invocation.
const BESIDE_ROOM: usize = 4 * ROOM_SCALES + 1024;

impl StreamPlan {
    /// For workgroups with so much shared memory.
    pub(crate) fn new(group: usize, subgroup: usize, shared_memory: usize) -> Self {
        // Sums over columns of a state take a word of each invocation.
        let (room, most_transformed) = (4 * group, shared_memory.saturating_sub(BESIDE_ROOM + 8 * group));
        let (most_room, kinds, heads) = (most_transformed.min(MOST_ROOM), Vec::new(), Vec::new());
        Self { group, subgroup, kinds, heads, width: 4, room, most_room, most_transformed, failed: room > most_room }
    }

    /// So many bytes of room are needed.
    pub(crate) fn take_room(&mut self, bytes: usize) {
        self.room = self.room.max(bytes);
        self.failed |= bytes > self.most_room;
    }

    /// Subgroups of a workgroup.
    pub(crate) fn teams(&self) -> usize {
        (self.group / self.subgroup).max(1)
    }

    /// The plan, where all that was asked for could be had.
    pub(crate) fn complete(self) -> Option<Self> {
        (!self.failed).then_some(self)
    }

    /// A row of this width.
    pub(crate) fn row(&mut self, width: usize) {
        self.width = self.width.max(width.next_multiple_of(32));
        self.failed |= self.runs() > MOST_RUNS;
    }

    /// Whether rows of this width can be transformed by instructions.
    pub(crate) fn transforms(&self, width: usize) -> bool {
        self.subgroup > 1 && width.div_ceil(4 * self.group) <= MOST_RUNS && transformed_bytes(width) <= self.most_transformed
    }

    /// A row of this width that is transformed.
    pub(crate) fn transformed(&mut self, width: usize) {
        self.row(width);
        self.room = self.room.max(transformed_bytes(width));
    }

    fn runs(&self) -> usize {
        self.width.div_ceil(4 * self.group)
    }

    /// The number of a kind of weights, with rows of which so many are needed at once.
    pub(crate) fn product(&mut self, constants: [u32; 4], form: u32, rows: usize, width: usize) -> usize {
        self.row(width);
        let numbers = rows * width.next_multiple_of(32);
        self.take_room(numbers * if form == 0 { 4 } else { 1 });
        self.failed |= (form == 2 && numbers / 32 > ROOM_SCALES) || rows > ROOM_SCALES;
        let [a, b, c, d] = constants;
        number(&mut self.kinds, [a, b, c, d, form], MOST_KINDS, &mut self.failed)
    }

    /// The number of a kind of heads.
    pub(crate) fn attention(&mut self, slot: u32, dim: usize, share: usize) -> usize {
        let octets = dim / 8;
        let lanes = (1 << octets.trailing_zeros()).min(self.subgroup);
        // All heads at once at the end, where there is room for them.
        let at_once = (self.most_room / (self.teams() * dim * 4)).clamp(1, share.max(1));
        self.take_room((self.teams() * at_once).max(share) * dim * 4);
        self.failed |= 2 * share * self.teams() > ROOM_SCALES || share > 16 || octets / lanes > 8 || share * octets / lanes > 32;
        number(&mut self.heads, [slot, dim as u32, share as u32, lanes as u32], MOST_HEADS, &mut self.failed)
    }

    /// As `step.comp` numbers its constants.
    fn constants(&self, needs: Needs) -> Vec<u32> {
        let mut constants = vec![self.group as u32, self.runs() as u32];
        let kind = |place: usize| self.kinds.get(place).copied().unwrap_or([0; 5]);
        constants.extend([kind(0), kind(1)].concat());
        for place in 0..MOST_HEADS {
            constants.extend(self.heads.get(place).unwrap_or(&[2, 8, 1, 1]));
        }
        let most = |of: fn(&[u32; 4]) -> u32| self.heads.iter().map(of).max().unwrap_or(1);
        constants.extend([most(|heads| heads[2]), most(|heads| heads[1] / 8 / heads[3]), self.room.div_ceil(16) as u32]);
        constants.extend(kind(2));
        constants.extend([needs.operations, needs.functions, needs.row_work, needs.odd.max(1)]);
        constants
    }
}

/// The room of a row that is transformed.
fn transformed_bytes(width: usize) -> usize {
    4 * width.next_multiple_of(32)
}

fn number<T: PartialEq>(all: &mut Vec<T>, own: T, most: usize, failed: &mut bool) -> usize {
    all.iter().position(|known| *known == own).unwrap_or_else(|| {
        *failed |= all.len() == most;
        all.push(own);
        (all.len() - 1).min(most - 1)
    })
}

/// The instructions of a step on the device.
pub(crate) struct Stream {
    /// The memory behind the recording.
    _instructions: Arc<Buffer>,
    /// Instructions with the times that it took to follow them, where the device is profiled.
    timed: Option<Arc<Buffer>>,
    /// Of each run of instructions, after the step: how many workgroups have come to meet, and whether one gave up.
    found: Arc<Buffer>,
    runs: usize,
}

/// How often a workgroup looks for the others before it gives up: some tens of milliseconds.
const PATIENCE: u32 = 1 << 17;
/// The same where it is found out how many can meet.
const PROBE_PATIENCE: u32 = 1 << 12;
/// The same on software: threads of a busy machine may stand still for long, and nobody else's screen waits.
const SOFTWARE_PATIENCE: u32 = 1 << 25;
/// From one place to meet to the next.
const MEETING_BYTES: u64 = 256;

impl Stream {
    /// The commands for a step, whose instructions `groups` workgroups follow together.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        plan: &StreamPlan,
        call: u64,
        items: Vec<Item>,
        groups: usize,
    ) -> Result<(Self, Recording), DeviceError> {
        let constants = plan.constants(Needs::of(&items));
        let (parts, words) = assemble(items, groups);
        let instructions = Arc::new(uploaded(gpu, &words)?);
        let kernel = if gpu.is_profiled() && gpu.adapter.clock { kernels::STEP_TIMED } else { kernels::STEP };
        let runs = parts.iter().filter(|part| matches!(part, Part::Run(_))).count();
        let bytes = MEETING_BYTES * runs.max(1) as u64;
        let meetings = Arc::new(Buffer::new(gpu, bytes, Use::Device)?);
        let (nobody, found) = (Arc::new(Buffer::new(gpu, bytes, Use::Upload)?), Arc::new(Buffer::new(gpu, bytes, Use::Download)?));
        nobody.write(0, &vec![0; bytes as usize]);
        let copy = |from: &Arc<Buffer>, to: &Arc<Buffer>| {
            let (from, to) = (from.clone(), to.clone());
            Command::Copy { from, from_offset: 0, to, to_offset: 0, bytes }
        };
        let mut commands = vec![copy(&nobody, &meetings), Command::Barrier];
        let mut place = meetings.address();
        let patience = if gpu.adapter.kind == Kind::Software { SOFTWARE_PATIENCE } else { PATIENCE };
        for part in parts {
            commands.push(match part {
                Part::Command(command) => command,
                Part::Run(run) => {
                    let (addresses, numbers) = ([call, instructions.address(), place], [run.start as u32, run.end as u32, patience]);
                    place += MEETING_BYTES;
                    command(gpu, kernel, &constants, [groups as u32, 1, 1], &addresses, &numbers)?
                }
            });
        }
        commands.extend([Command::Barrier, copy(&meetings, &found)]);
        let mut timed = None;
        if gpu.is_profiled() && gpu.adapter.clock {
            let bytes = instructions.bytes();
            let to = timed.insert(Arc::new(Buffer::new(gpu, bytes, Use::Download)?)).clone();
            commands.push(Command::Copy { from: instructions.clone(), from_offset: 0, to, to_offset: 0, bytes });
        }
        let recording = Recording::new(gpu, commands)?;
        Ok((Self { _instructions: instructions, timed, found, runs }, recording))
    }

    /// Of a step that has ended, where the device is profiled: nanoseconds that the first workgroup took for its part of each kind of instruction, and waited for
    /// the others. The times of the step's dispatches say how long a tick of its clock is.
    pub(crate) fn times(&self, dispatches: &[(String, f64)]) -> Vec<(String, f64)> {
        let Some(timed) = &self.timed else { return Vec::new() };
        let mut bytes = vec![0; timed.bytes() as usize];
        timed.read(0, &mut bytes);
        let words: Vec<u32> = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let mut found: Vec<(String, f64)> = Vec::new();
        for instruction in words.chunks_exact(WORDS) {
            let [begun, done, met] = [60, 61, 62].map(|word| instruction[word]);
            let name = Operation::name(instruction);
            found.push((format!("step: {name}"), done.wrapping_sub(begun) as f64));
            if instruction[3] != 0 {
                found.push((format!("step: waiting after {name}"), met.wrapping_sub(done) as f64));
            }
        }
        let ticks: f64 = found.iter().map(|(_, ticks)| ticks).sum();
        let nanoseconds: f64 = dispatches.iter().filter(|(name, _)| name.starts_with("step")).map(|(_, time)| time).sum();
        found.iter_mut().for_each(|(_, time)| *time *= nanoseconds / ticks.max(1.0));
        found
    }

    /// Whether a workgroup gave up: what the step has computed is worth nothing.
    pub(crate) fn gave_up(&self) -> bool {
        (0..self.runs as u64).any(|run| {
            let mut word = [0; 4];
            self.found.read(MEETING_BYTES * run + 4, &mut word);
            word != [0; 4]
        })
    }
}

/// Words in the device's own memory.
fn uploaded(gpu: &Arc<Gpu>, words: &[u32]) -> Result<Buffer, DeviceError> {
    let bytes = 4 * words.len().max(1) as u64;
    let from = Buffer::new(gpu, bytes, Use::Upload)?;
    from.write(0, bytemuck::cast_slice(words));
    if gpu.adapter.unified {
        return Ok(from);
    }
    let (from, to) = (Arc::new(from), Arc::new(Buffer::new(gpu, bytes, Use::Device)?));
    let copy = Command::Copy { from, from_offset: 0, to: to.clone(), to_offset: 0, bytes };
    gpu.run(&Recording::new(gpu, vec![copy])?)?;
    Arc::into_inner(to).ok_or_else(|| DeviceError::Resources("instructions are still being copied".into()))
}

/// What is done in order.
enum Part {
    Command(Command),
    /// Instructions that follow one another without other commands between them.
    Run(Range<usize>),
}

/// The parts of a step that so many workgroups do, and the words of its instructions.
fn assemble(items: Vec<Item>, together: usize) -> (Vec<Part>, Vec<u32>) {
    let (mut parts, mut words): (Vec<Part>, Vec<u32>) = (Vec::new(), Vec::new());
    // Groups of the level at hand, and whether a barrier follows the last instruction.
    let (mut level, mut waits) = (0, false);
    for item in items {
        let count = words.len() / WORDS;
        match item {
            Item::Instruction(mut instruction) => {
                match parts.last_mut() {
                    Some(Part::Run(run)) => {
                        run.end = count + 1;
                        if std::mem::take(&mut waits) {
                            words[WORDS * (count - 1) + 3] = 1;
                            level = 0;
                        }
                    }
                    _ => {
                        parts.push(Part::Run(count..count + 1));
                        level = 0;
                    }
                }
                instruction.words[2] = (level % together) as u32;
                level += instruction.groups;
                words.extend(instruction.words);
            }
            Item::Command(Command::Barrier) if matches!(parts.last(), Some(Part::Run(_))) => waits = true,
            Item::Command(command) => {
                if std::mem::take(&mut waits) {
                    parts.push(Part::Command(Command::Barrier));
                }
                parts.push(Part::Command(command));
            }
        }
    }
    (parts, words)
}

/// How many workgroups of the plan's shader run at the same time: the most that meet within a short while.
pub(crate) fn most_together(gpu: &Arc<Gpu>, plan: &StreamPlan, needs: Needs) -> Result<usize, DeviceError> {
    let idle = Instruction::new(Operation::Idle, 0, &[], &[]).words;
    let mut words = [idle.clone(), idle].concat();
    words[3] = 1;
    let instructions = uploaded(gpu, &words)?;
    let meetings = Buffer::new(gpu, MEETING_BYTES, Use::Upload)?;
    // Software looks far more often in the same time.
    let patience = if gpu.adapter.kind == Kind::Software { PATIENCE } else { PROBE_PATIENCE };
    let meet = |groups: usize| -> Result<bool, DeviceError> {
        meetings.write(0, &[0; 8]);
        let addresses = [instructions.address(), instructions.address(), meetings.address()];
        let probe = command(gpu, kernels::STEP, &plan.constants(needs), [groups as u32, 1, 1], &addresses, &[0, 2, patience])?;
        gpu.run(&Recording::new(gpu, vec![probe])?)?;
        let mut found = [0; 8];
        meetings.read(0, &mut found);
        Ok(found[4..] == [0; 4])
    };
    const MOST: usize = 4096;
    let (mut known, mut failed) = (1, MOST + 1);
    while failed - known > 1 {
        let next = if failed > MOST { 2 * known } else { (known + failed) / 2 };
        if next <= MOST && meet(next)? {
            known = next;
        } else {
            failed = next.min(MOST + 1);
            if next > MOST {
                break;
            }
        }
    }
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction(groups: usize) -> Item {
        Item::Instruction(Instruction::new(Operation::Idle, groups, &[7 << 32 | 9], &[5]))
    }

    #[test]
    fn levels_end_at_barriers() {
        let barrier = || Item::Command(Command::Barrier);
        let items = vec![barrier(), instruction(3), instruction(4), barrier(), instruction(5), barrier(), instruction(6), barrier()];
        let (parts, words) = assemble(items, 5);
        assert_eq!(words.len(), 4 * WORDS);
        // Groups, the workgroup that takes the first of them, whether the level ends here.
        let heads: Vec<&[u32]> = words.chunks(WORDS).map(|words| &words[1..4]).collect();
        assert_eq!(heads, [[3, 0, 0], [4, 3, 1], [5, 0, 1], [6, 0, 0]]);
        assert_eq!(words[4..7], [9, 7, 5]);
        let [Part::Command(Command::Barrier), Part::Run(run)] = &parts[..] else { panic!("a barrier, then a run") };
        assert_eq!(run, &(0..4));
    }

    #[test]
    fn words_are_where_the_shader_has_them() {
        let source = include_str!("../shaders/step_product.glsl");
        for (name, place) in ["WIDTH", "OUT", "MODE"].into_iter().zip(PRODUCT_SHAPE) {
            assert!(source.contains(&format!(" {name} = {place}u")), "{name}");
        }
    }

    #[test]
    fn only_what_is_needed_is_compiled() {
        let item = |operation, needs: Needs| Item::Instruction(Instruction::new(operation, 1, &[], &[]).needing(needs));
        // A product of a row as it is; one of a gated row of 6 numbers; gate and up with the second function.
        let plain = item(Operation::Product(0), Needs::row(8, None, 0, false));
        assert_eq!(Needs::of(&[plain]), Needs { operations: 1, functions: 0, row_work: 0, odd: 0 });
        let gated = item(Operation::Product(2), Needs::row(6, Some(3), 0, false));
        let needs = Needs { operations: 1 << 11, functions: 1 << 3, row_work: GATES | UNEVEN_WIDTHS, odd: 0 };
        assert_eq!(Needs::of(&[gated]), needs);
        let pair = item(Operation::Product(1), Needs::row(8, None, 1, false).and(Needs::function(1)));
        // A layer norm with a bias, and attention, whose parts may have to be merged. A short convolution without a function.
        let norm = item(Operation::Row, Needs::row(8, None, 2, true));
        let (attend, conv) = (item(Operation::Attend(0), Needs::default()), item(Operation::ShortConv, Needs::function(99)));
        let operations = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 8;
        let needs = Needs { operations, functions: 1 << 1, row_work: LAYER_NORMS | NORM_BIASES, odd: 0 };
        assert_eq!(Needs::of(&[pair, norm, conv, attend]), needs);
    }

    #[test]
    fn one_odd_factor_is_unrolled() {
        let needs = |widths: &[usize]| widths.iter().map(|&width| Needs::transform(width)).fold(Needs::default(), Needs::and);
        let found = |widths: &[usize]| (needs(widths).row_work, needs(widths).odd);
        assert_eq!(found(&[2048, 128]), (TRANSFORMS, 0));
        assert_eq!(found(&[2048, 6144, 1536]), (TRANSFORMS, 3));
        // Two factors; one that is too large; too few steps beside it.
        assert_eq!(found(&[6144, 2560]), (TRANSFORMS | OTHER_ODDS, 5));
        assert_eq!(found(&[6144, 92]), (TRANSFORMS | OTHER_ODDS, 3));
        assert_eq!(found(&[6]), (TRANSFORMS | OTHER_ODDS, 0));
    }
}
