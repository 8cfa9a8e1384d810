//! The f32 pass: media through the f32 towers, then prompts and answers through the f32 text program, stage by stage over all of them, so that memory is one stage's weights plus activations.
//!
//! Every row of a case is there at once, so no key or value comes from an earlier call: the program is rewritten without KV slots, and a stage is cut out
//! with the keys and values it shares as ordinary inputs. Weights are decoded from the checkpoint as a stage needs them and dropped after it: of look-up
//! tables only the rows that the cases use, of the output head a block of rows at a time.

use super::whole::StageErrors;
use crate::{
    ForgeError,
    numbers::{Numbers, weight_rows},
    pen::{Recipe, Written},
};
use qhx_ir::{
    Bindings, Call, Checked, DType, Device, Dim, Generator, InputData, KeyValue, LoadOptions, Name, Op, OpKind, Outputs, Program, Segment,
    Weight, WeightTensor, Weights,
};
use qhx_runtime::{Cancel, Medium, MediumNumbers, WholeInputs, placement::tower_stage};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// f32 numbers of the output head that are in memory at a time.
const HEAD_BLOCK: usize = 4 << 20;

/// One reading of a case, all its rows in one epoch, or of one of its media.
#[derive(Clone, Debug)]
pub(crate) struct Pass {
    /// Which case.
    pub(super) case: usize,
    /// Which of its media; none for the text.
    pub(super) medium: Option<usize>,
    /// Rows of the call.
    pub(crate) rows: usize,
    /// What the inputs are made of.
    feed: Feed,
    /// The program's epoch.
    pub(super) epoch: usize,
    /// Rows whose logits are wanted …
    pub(super) wanted: Range<usize>,
    /// … and the place of the first of them among the case's compared rows.
    pub(super) first_step: usize,
    /// Whether this is the case's last reading, which has all rows.
    pub(super) is_last: bool,
}

#[derive(Clone, Debug)]
enum Feed {
    Text(WholeInputs),
    Medium(Medium),
}

/// The readings of a case. A step is decided in the epoch of its length, so a case that crosses into another is read once for each; `shown` rows of the prompt, those before its last, come
/// before the steps. `inputs` makes the inputs of some ids: prompt and answer, but for the answer's last.
pub(super) fn passes(
    program: &Program,
    case: usize,
    prompt: &[u32],
    shown: usize,
    answer: &[u32],
    inputs: impl Fn(&[u32]) -> WholeInputs,
) -> Vec<Pass> {
    let ids: Vec<u32> = prompt.iter().chain(answer).copied().collect();
    let mut spans: Vec<(usize, Range<usize>)> = Vec::new();
    for step in 0..answer.len() {
        let epoch = program.epoch(prompt.len() + step);
        match spans.last_mut() {
            Some((last, steps)) if *last == epoch => steps.end = step + 1,
            _ => spans.push((epoch, step..step + 1)),
        }
    }
    let count = spans.len();
    let pass = |(i, (epoch, steps)): (usize, (usize, Range<usize>))| {
        let rows = prompt.len() + steps.end - 1;
        // The prompt is read as a whole, in the epoch of the first step.
        let (before, first_step) = if i == 0 { (shown, 0) } else { (0, shown + steps.start) };
        let (feed, wanted) = (Feed::Text(inputs(&ids[..rows])), rows - steps.len() - before..rows);
        Pass { case, medium: None, rows, feed, epoch, wanted, first_step, is_last: i + 1 == count }
    };
    spans.into_iter().enumerate().map(pass).collect()
}

/// The reading of a text all of whose rows are wanted.
pub(crate) fn text_pass(program: &Program, case: usize, rows: usize, inputs: WholeInputs) -> Pass {
    let epoch = program.epoch(rows);
    Pass { case, medium: None, rows, feed: Feed::Text(inputs), epoch, wanted: 0..rows, first_step: 0, is_last: true }
}

/// The reading of a medium by its tower.
pub(crate) fn medium_pass(case: usize, number: usize, medium: &Medium) -> Pass {
    let feed = Feed::Medium(medium.clone());
    Pass { case, medium: Some(number), rows: medium.rows(), feed, epoch: 0, wanted: 0..0, first_step: 0, is_last: true }
}

/// Who listens to the f32 pass.
pub(super) trait Audience {
    /// What a stage made of a pass, row after row.
    fn stage(&mut self, stage: &str, pass: &Pass, values: &[f32]);
    /// Logits of a pass's wanted rows, `[wanted, width]`, for the ids from `first_id` on.
    fn logits(&mut self, pass: &Pass, first_id: usize, width: usize, logits: &[f32]);
    /// An output of a tower.
    fn output(&mut self, pass: &Pass, name: &str, values: &[f32]);
    /// Told before each stage: how many are done.
    fn progress(&mut self, done: usize, all: usize);
}

/// Hears nothing but how far the pass is.
pub(super) struct Silent<'a>(pub(super) &'a mut dyn FnMut(usize, usize));

impl Audience for Silent<'_> {
    fn stage(&mut self, _: &str, _: &Pass, _: &[f32]) {}
    fn logits(&mut self, _: &Pass, _: usize, _: usize, _: &[f32]) {}
    fn output(&mut self, _: &Pass, _: &str, _: &[f32]) {}
    fn progress(&mut self, done: usize, all: usize) {
        (self.0)(done, all);
    }
}

/// Other forms of the same model whose stages are run on the f32 program's inputs.
pub(super) struct Variant<'a> {
    /// Its program.
    pub(super) written: &'a Written,
    /// How far its stages are from the f32 program's.
    pub(super) errors: StageErrors,
}

/// What runs the pass.
pub(super) struct Teacher<'a> {
    pub(super) device: &'a Arc<dyn Device>,
    /// What runs variants.
    pub(super) others_on: &'a Arc<dyn Device>,
    /// Whether of stages that differ only in their number variants run the first alone.
    pub(super) distinct: bool,
    pub(super) numbers: Numbers<'a>,
    pub(super) cancel: &'a Cancel,
}

/// What runs some ops of a program over all passes: the device, and where the weights come from.
pub(crate) struct Runner<'a> {
    pub(crate) device: &'a Arc<dyn Device>,
    pub(crate) numbers: Numbers<'a>,
    pub(crate) cancel: &'a AtomicBool,
    /// The ids that look-up tables are asked for, rising.
    pub(crate) used: &'a [u32],
}

/// Some ops of a program.
#[derive(Clone, Copy)]
pub(crate) struct Piece<'a> {
    pub(crate) program: &'a Checked,
    pub(crate) recipes: &'a BTreeMap<Name, Recipe>,
    /// Their places.
    pub(crate) ops: &'a [usize],
    /// The rows of the head that are wanted, where it is one.
    pub(crate) rows: Option<&'a Range<usize>>,
    /// Weights that are in memory already.
    pub(crate) made: Option<&'a HashMap<Name, WeightTensor>>,
}

impl Teacher<'_> {
    /// Runs the f32 program over all passes; variants over the same inputs.
    pub(super) fn run(
        &self,
        written: &Written,
        passes: &[Pass],
        variants: &mut [Variant<'_>],
        audience: &mut dyn Audience,
    ) -> Result<(), ForgeError> {
        let Course { program, parts, used, mut values } = Course::new(written, passes)?;
        let others: Vec<Checked> =
            variants.iter().map(|v| Ok(Checked::new(without_kv_slots(&v.written.program))?)).collect::<Result<_, ForgeError>>()?;
        let last_reads = last_reads(&program, &parts);
        let mut kinds = BTreeSet::new();
        for (i, part) in parts.iter().enumerate() {
            audience.progress(i, parts.len());
            let is_new = kinds.insert(part.kind(&program)) || !self.distinct;
            for rows in part.blocks(&program) {
                let f32_outputs = self.part(self.device, &program, &written.recipes, part, rows.clone(), passes, &used, &values)?;
                for (variant, program) in variants.iter_mut().zip(&others).filter(|_| is_new) {
                    let found = self.part(self.others_on, program, &variant.written.recipes, part, rows.clone(), passes, &used, &values)?;
                    let sums = variant.errors.entry(part.stage.clone()).or_default();
                    found.iter().zip(&f32_outputs).for_each(|(found, expected)| add_error(sums, part, found, expected));
                }
                for ((pass, made), values) in passes.iter().zip(f32_outputs).zip(&mut values) {
                    if let Some(logits) = made.outputs.get("logits") {
                        let first_id = rows.as_ref().map_or(0, |rows| rows.start);
                        audience.logits(pass, first_id, logits.len() / pass.wanted.len(), logits);
                    } else if let Some(tap) = made.tap {
                        match pass.medium {
                            None => audience.stage(&part.stage, pass, &tap),
                            Some(_) => audience.stage(&tower_stage(&program, &part.stage), pass, &tap),
                        }
                    }
                    for output in program.outputs.iter().filter(|_| pass.medium.is_some()) {
                        if let Some(values) = made.outputs.get(&output.name) {
                            audience.output(pass, &output.name, values);
                        }
                    }
                    values.extend(made.outputs);
                }
            }
            values.iter_mut().for_each(|values| values.retain(|name, _| last_reads.get(name).is_some_and(|&last| last > i)));
        }
        audience.progress(parts.len(), parts.len());
        Ok(())
    }

    /// Runs all parts of a text program but the last one over all passes: [`Teacher::logits`] then gives the logits of any rows.
    pub(super) fn read(&self, written: &Written, passes: &[Pass], progress: &mut dyn FnMut(usize, usize)) -> Result<Course, ForgeError> {
        let mut course = Course::new(written, passes)?;
        let before_head = course.parts.len().saturating_sub(1);
        let owned = |(name, last): (&Name, usize)| (name.clone(), last);
        let last_reads: HashMap<Name, usize> = last_reads(&course.program, &course.parts).into_iter().map(owned).collect();
        for i in 0..before_head {
            progress(i, before_head);
            let Course { program, parts, used, values } = &course;
            let made = self.part(self.device, program, &written.recipes, &parts[i], None, passes, used, values)?;
            for (values, made) in course.values.iter_mut().zip(made) {
                values.extend(made.outputs);
                values.retain(|name, _| last_reads.get(name).is_some_and(|&last| last > i));
            }
        }
        progress(before_head, before_head);
        Ok(course)
    }

    /// Logits of some of the wanted rows of pass number `number`, a block of ids at a time: `show` gets the first id, how many there are, and a row after the other.
    pub(super) fn logits(
        &self,
        written: &Written,
        course: &Course,
        (number, pass): (usize, &Pass),
        rows: Range<usize>,
        show: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), ForgeError> {
        let Course { program, parts, used, values } = course;
        let Some(head) = parts.last() else { return Ok(()) };
        let by_wanted_row = |name: &Name| program.value_type(name).shape.first() == Some(&Dim::L);
        let all = pass.wanted.len();
        let cut = |(name, values): (&Name, &Vec<f32>)| {
            let width = values.len() / all;
            let kept = if by_wanted_row(name) { values[rows.start * width..rows.end * width].to_vec() } else { values.clone() };
            (name.clone(), kept)
        };
        let values: Values = values[number].iter().map(cut).collect();
        let wanted = pass.wanted.start + rows.start..pass.wanted.start + rows.end;
        let passes = [Pass { wanted, ..pass.clone() }];
        for block in head.blocks(program) {
            let first_id = block.as_ref().map_or(0, |ids| ids.start);
            let made = self.part(self.device, program, &written.recipes, head, block, &passes, used, std::slice::from_ref(&values))?;
            if let Some(logits) = made.first().and_then(|made| made.outputs.get("logits")) {
                show(first_id, logits.len() / rows.len(), logits);
            }
        }
        Ok(())
    }

    /// Runs one part over all passes.
    #[allow(clippy::too_many_arguments)] // what it reads, apart
    fn part(
        &self,
        device: &Arc<dyn Device>,
        program: &Checked,
        recipes: &BTreeMap<Name, Recipe>,
        part: &Part,
        rows: Option<Range<usize>>,
        passes: &[Pass],
        used: &[u32],
        values: &[Values],
    ) -> Result<Vec<Made>, ForgeError> {
        let runner = Runner { device, numbers: self.numbers, cancel: self.cancel.flag(), used };
        runner.run(Piece { program, recipes, ops: &part.ops, rows: rows.as_ref(), made: None }, passes, values)
    }
}

impl Runner<'_> {
    /// Runs some ops over all passes, on the values that earlier ones made of each.
    pub(crate) fn run(&self, piece: Piece<'_>, passes: &[Pass], values: &[Values]) -> Result<Vec<Made>, ForgeError> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(qhx_runtime::Error::Cancelled.into());
        }
        let cut = piece.program.cut(piece.ops.iter().copied())?;
        let (cut, weights) = self.load(cut, piece)?;
        let most = |count: &dyn Fn(&Pass) -> usize| passes.iter().map(count).max().unwrap_or(1);
        let options = LoadOptions {
            max_rows: most(&|p| p.rows),
            max_soft_rows: most(&|p| p.feed.soft_rows()),
            max_wanted: most(&|p| p.wanted.len()),
            ..LoadOptions::default()
        };
        let failed = |e: qhx_ir::DeviceError| ForgeError::from(qhx_runtime::Error::from(e));
        let mut executable = self.device.load(&cut, &weights, &options).map_err(failed)?;
        let mut made = Vec::new();
        for (pass, values) in passes.iter().zip(values) {
            let mut state = executable.new_state(pass.rows).map_err(failed)?;
            let inputs = cut.inputs.iter().map(|input| Given::of(input, pass, self.used, values)).collect::<Result<Vec<_>, _>>()?;
            let lent: Vec<InputData<'_>> = inputs.iter().map(Given::lend).collect();
            let mut tap = None;
            let mut take = |it: qhx_ir::Tap<'_>| tap = Some(it.values.to_vec());
            let mut segments = [Segment::new(None, 0, pass.rows)];
            if pass.medium.is_none() {
                segments[0].state = Some(&mut *state);
            }
            segments[0].epoch = pass.epoch;
            let bindings = Bindings { rows: pass.rows, soft_rows: pass.feed.soft_rows(), wanted: pass.wanted.len() };
            let mut outputs = Outputs::new();
            let mut call = Call::new(bindings, &lent, &mut segments, &mut outputs);
            call.cancel = Some(self.cancel);
            call.taps = Some(&mut take);
            executable.run(&mut call).map_err(failed)?;
            let outputs = cut.outputs.iter().filter_map(|o| Some((o.name.clone(), outputs.value(&o.name)?.to_vec()))).collect();
            made.push(Made { outputs, tap });
        }
        Ok(made)
    }

    /// The weights of a part in memory: of look-up tables the used rows, of a block of the head its rows; the program is changed to fit.
    fn load(&self, cut: Checked, piece: Piece<'_>) -> Result<(Checked, Arc<dyn Weights>), ForgeError> {
        let mut program: Program = (*cut).clone();
        let tables: BTreeSet<Name> = cut.ops.iter().filter_map(|op| table(&cut, op)).collect();
        let mut tensors: HashMap<String, WeightTensor> = HashMap::new();
        for (name, weight) in &mut program.weights {
            let recipe = &piece.recipes[name];
            let tensor = if let Some(tensor) = piece.made.and_then(|made| made.get(name)) {
                tensor.clone()
            } else if tables.contains(name) {
                let tensor = self.rows_of(weight, recipe, self.used)?;
                weight.shape[0] = self.used.len();
                tensor
            } else if let Some(rows) = piece.rows {
                match weight.shape.len() {
                    // The head's bias: one row of which a part is wanted.
                    1 => part_of_vector(&self.numbers.tensor(weight, recipe, 0..1)?, rows).map_err(|reason| wrong(recipe, reason))?,
                    _ => self.numbers.tensor(weight, recipe, rows.clone())?,
                }
            } else {
                self.numbers.tensor(weight, recipe, 0..weight_rows(weight))?
            };
            if piece.rows.is_some() {
                weight.shape[0] = tensor.shape()[0];
            }
            tensors.insert(name.to_string(), tensor);
        }
        Ok((Checked::new(program)?, Arc::new(tensors)))
    }

    /// Chosen rows of a table.
    fn rows_of(&self, weight: &Weight, recipe: &Recipe, rows: &[u32]) -> Result<WeightTensor, ForgeError> {
        let row_bytes = weight.encoding.row_bytes(weight.shape[1]).ok_or_else(|| wrong(recipe, "is too large".into()))?;
        let sizes = [row_bytes.data, row_bytes.scale, row_bytes.min];
        let mut parts = sizes.map(|size| qhx_ir::AlignedBytes::zeroed(size * rows.len()));
        for (i, &row) in rows.iter().enumerate() {
            self.numbers.encode(weight, recipe, row as usize..row as usize + 1, &mut |_, encoded| {
                for ((part, size), bytes) in parts.iter_mut().zip(sizes).zip([encoded.data, encoded.scale, encoded.min]) {
                    part.as_mut()[i * size..][..size].copy_from_slice(&bytes);
                }
                Ok(())
            })?;
        }
        let [data, scale, min] = parts;
        let part = |bytes: qhx_ir::AlignedBytes, size: usize| (size > 0).then(|| bytes.into());
        let shape = vec![rows.len(), weight.shape[1]];
        WeightTensor::new(weight.encoding, shape, data.into(), part(scale, sizes[1]), part(min, sizes[2]))
            .map_err(|reason| wrong(recipe, reason))
    }
}

/// The values of a pass by name.
pub(crate) type Values = HashMap<Name, Vec<f32>>;

/// An f32 program in parts, with the values of each pass that later parts read.
pub(super) struct Course {
    program: Checked,
    parts: Vec<Part>,
    /// The ids that look-up tables are asked for, rising.
    used: Vec<u32>,
    values: Vec<Values>,
}

impl Course {
    /// Before its first part.
    fn new(written: &Written, passes: &[Pass]) -> Result<Self, ForgeError> {
        let program = Checked::new(without_kv_slots(&written.program))?;
        Ok(Self { parts: parts(&program), program, used: used_ids(passes), values: vec![Values::new(); passes.len()] })
    }
}

/// The last part that reads each value.
pub(crate) fn last_reads<'p>(program: &'p Program, parts: &'p [Part]) -> HashMap<&'p Name, usize> {
    parts.iter().enumerate().flat_map(|(i, part)| part.reads(program).map(move |name| (name, i))).collect()
}

/// What a part made of a pass.
pub(crate) struct Made {
    pub(crate) outputs: Values,
    tap: Option<Vec<f32>>,
}

/// A part of a program that is run at once: a stage, or the output head.
pub(crate) struct Part {
    stage: Name,
    /// The places of its ops.
    pub(crate) ops: Vec<usize>,
    /// The head's matrix, where its rows can be taken in blocks.
    head: Option<Name>,
}

impl Part {
    /// The values that the part's ops read.
    fn reads<'p>(&'p self, program: &'p Program) -> impl Iterator<Item = &'p Name> {
        self.ops.iter().flat_map(|&op| program.ops[op].op.inputs())
    }

    /// What it computes, whichever layer it is of: its ops and weights with the numbers in their names left out.
    fn kind(&self, program: &Program) -> String {
        let ops = self.ops.iter().map(|&op| &program.ops[op]);
        let weight = |name: &Name| program.weights.get(name).map(|w| format!("{:?} {:?}", w.encoding, w.shape)).unwrap_or_default();
        let told: String =
            ops.map(|op| format!("{:?} {:?};", op.op, op.op.weights().into_iter().map(weight).collect::<Vec<_>>())).collect();
        told.split('.').map(|part| if part.parse::<u32>().is_ok() { "N" } else { part }).collect::<Vec<_>>().join(".")
    }

    /// The blocks in which the part is run: one of everything, or rows of the head.
    pub(crate) fn blocks(&self, program: &Program) -> Vec<Option<Range<usize>>> {
        let Some(head) = self.head.as_ref().and_then(|name| program.weights.get(name)) else { return vec![None] };
        let block = (HEAD_BLOCK / head.shape[1]).max(1);
        (0..head.shape[0]).step_by(block).map(|first| Some(first..head.shape[0].min(first + block))).collect()
    }
}

/// The stages in order; the last in two parts where it ends in a matrix whose rows are apart.
pub(crate) fn parts(program: &Checked) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let has_logits = program.outputs.iter().any(|o| *o.name == *"logits");
    for (place, stage) in program.stages.iter().enumerate() {
        let ops = program.ops_of_stage(place);
        let kind = |op: usize| &program.ops[op].op;
        let is_last = place + 1 == program.stages.len() && has_logits;
        let matrix = ops.iter().rposition(|&op| matches!(kind(op), OpKind::Linear { .. }));
        let by_number =
            |&op: &usize| matches!(kind(op), OpKind::Softcap { .. } | OpKind::Scale { weight: None, .. } | OpKind::Clamp { .. });
        let split = matrix.filter(|&at| is_last && at > 0 && ops[at + 1..].iter().all(by_number));
        let part = |ops: &[usize], head| Part { stage: stage.name.clone(), ops: ops.to_vec(), head };
        match split {
            None => parts.push(part(ops, None)),
            Some(at) => {
                let head = kind(ops[at]).weights().first().map(|name| (*name).clone());
                parts.push(part(&ops[..at], None));
                parts.push(part(&ops[at..], head));
            }
        }
    }
    parts.retain(|part| !part.ops.is_empty());
    parts
}

/// The program for calls that have all rows: attention takes keys and values from the call, whoever made them.
pub(crate) fn without_kv_slots(program: &Program) -> Program {
    let mut program = program.clone();
    let mut made: HashMap<Name, KeyValue> = HashMap::new();
    for op in &mut program.ops {
        if let OpKind::Attend { kv, slot, .. } = &mut op.op
            && let Some(name) = slot.take()
        {
            match kv {
                Some(kv) => drop(made.insert(name.clone(), kv.clone())),
                None => *kv = made.get(&name).cloned(),
            }
            program.slots.remove(&name);
        }
    }
    program
}

/// The table of an op that looks up the call's ids.
fn table(program: &Program, op: &Op) -> Option<Name> {
    let OpKind::Embed { ids, table, .. } = &op.op else { return None };
    let input = program.inputs.iter().find(|input| input.name == *ids)?;
    matches!(input.generator, Generator::Ids | Generator::IdsMediaAsPad).then(|| table.clone())
}

/// The ids that look-up tables are asked for, rising.
pub(crate) fn used_ids(passes: &[Pass]) -> Vec<u32> {
    passes.iter().flat_map(Pass::used_ids).collect::<BTreeSet<u32>>().into_iter().collect()
}

impl Pass {
    /// The ids that look-up tables are asked for.
    fn used_ids(&self) -> impl Iterator<Item = u32> {
        [Generator::Ids, Generator::IdsMediaAsPad].into_iter().flat_map(|generator| self.feed.ids(&generator)).map(|&id| id as u32)
    }
}

impl Feed {
    fn soft_rows(&self) -> usize {
        match self {
            Self::Text(inputs) => inputs.soft_rows(),
            Self::Medium(_) => 0,
        }
    }

    fn ids(&self, generator: &Generator) -> &[i32] {
        match self {
            Self::Text(inputs) => match inputs.get(generator) {
                Some(InputData::I32(ids)) => ids,
                _ => &[],
            },
            Self::Medium(_) => &[],
        }
    }

    fn get(&self, generator: &Generator) -> Option<Given<'_>> {
        match self {
            Self::Text(inputs) => inputs.get(generator).map(Given::Lent),
            Self::Medium(medium) => medium.numbers(std::iter::once(generator)).pop().map(Given::Made),
        }
    }
}

/// An input of a call.
enum Given<'v> {
    Lent(InputData<'v>),
    Made(MediumNumbers<'v>),
    Numbers(Vec<i32>),
}

impl<'v> Given<'v> {
    fn of(input: &qhx_ir::Input, pass: &'v Pass, used: &[u32], values: &'v Values) -> Result<Self, ForgeError> {
        let unknown = |what: &str| ForgeError::Gate(format!("the value `{}` is read before {what} that makes it", input.name));
        Ok(match (&input.generator, input.dtype) {
            (generator @ (Generator::Ids | Generator::IdsMediaAsPad), _) => {
                Self::Numbers(pass.feed.ids(generator).iter().map(|&id| used.partition_point(|&u| u < id as u32) as i32).collect())
            }
            (Generator::WantedRows, _) => Self::Numbers(pass.wanted.clone().map(|row| row as i32).collect()),
            (Generator::Carried, dtype) => match (values.get(&input.name), dtype) {
                (Some(values), DType::F32) => Self::Lent(InputData::F32(values)),
                // Chosen experts come as floats.
                (Some(values), DType::I32) => Self::Numbers(values.iter().map(|&x| x as i32).collect()),
                (None, _) => return Err(unknown("the stage")),
            },
            (generator, _) => pass.feed.get(generator).ok_or_else(|| unknown("the front end"))?,
        })
    }

    fn lend(&self) -> InputData<'_> {
        match self {
            Self::Lent(values) => *values,
            Self::Made(values) => values.lend(),
            Self::Numbers(values) => InputData::I32(values),
        }
    }
}

fn add_error(sums: &mut (f64, f64), part: &Part, found: &Made, expected: &Made) {
    let shown = |made: &'_ Made| -> Option<Vec<f32>> {
        match part.head {
            Some(_) => made.outputs.get("logits").cloned(),
            None => made.tap.clone(),
        }
    };
    let (Some(found), Some(expected)) = (shown(found), shown(expected)) else { return };
    for (found, expected) in found.iter().zip(&expected) {
        let (found, expected) = (f64::from(*found), f64::from(*expected));
        sums.0 += (found - expected) * (found - expected);
        sums.1 += expected * expected;
    }
}

/// Numbers `range` of a vector.
fn part_of_vector(vector: &WeightTensor, range: &Range<usize>) -> Result<WeightTensor, String> {
    let mut values = vec![0.0; vector.columns()];
    vector.decode_row(0, &mut values);
    WeightTensor::from_f32(&[range.len()], &values[range.clone()])
}

fn wrong(recipe: &Recipe, reason: String) -> ForgeError {
    ForgeError::Tensor { tensor: recipe.tensors()[0].clone(), reason }
}
