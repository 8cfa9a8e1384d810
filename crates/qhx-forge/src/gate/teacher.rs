//! The f32 pass: prompts and answers through the f32 program, stage by stage over all of them, so that memory is one stage's weights plus activations.
//!
//! Every row of a case is there at once, so no key or value comes from an earlier call: the program is rewritten without KV slots, and a stage is cut out
//! with the keys and values it shares as ordinary inputs. Weights are decoded from the checkpoint as a stage needs them and dropped after it: of look-up
//! tables only the rows that the cases use, of the output head a block of rows at a time.

use crate::{
    ForgeError,
    model::{Recipe, Written},
    numbers::{Numbers, weight_rows},
};
use qhx_ir::{
    Bindings, Call, Checked, DType, Device, Generator, InputData, KeyValue, LoadOptions, Name, Op, OpKind, Program, Segment, Weight,
    WeightTensor, Weights,
};
use qhx_runtime::Cancel;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Range,
    sync::Arc,
};

/// f32 numbers of the output head that are in memory at a time.
const HEAD_BLOCK: usize = 4 << 20;

/// One reading of a case: all its rows in one epoch.
#[derive(Clone, Debug)]
pub(super) struct Pass {
    /// Which case.
    pub(super) case: usize,
    /// Its ids: prompt and answer, but for the answer's last.
    pub(super) ids: Vec<u32>,
    /// The program's epoch.
    pub(super) epoch: usize,
    /// Rows whose logits are wanted …
    pub(super) wanted: Range<usize>,
    /// … and the steps of the answer that they decide.
    pub(super) first_step: usize,
    /// Whether this is the case's last reading, which has all rows.
    pub(super) is_last: bool,
}

/// The readings of a case. A step is decided in the epoch of its length, so a case that crosses into another is read once for each.
pub(super) fn passes(program: &Program, case: usize, prompt: &[u32], answer: &[u32]) -> Vec<Pass> {
    let mut passes: Vec<Pass> = Vec::new();
    for step in 0..answer.len() {
        let rows = prompt.len() + step;
        let epoch = program.epoch(rows);
        let ids = || prompt.iter().chain(&answer[..step]).copied().collect();
        match passes.last_mut() {
            Some(pass) if pass.epoch == epoch => {
                pass.wanted.end = rows;
                pass.ids = ids();
            }
            _ => passes.push(Pass { case, ids: ids(), epoch, wanted: rows - 1..rows, first_step: step, is_last: false }),
        }
    }
    if let Some(last) = passes.last_mut() {
        last.is_last = true;
    }
    passes
}

/// Who listens to the f32 pass.
pub(super) trait Audience {
    /// What a stage made of a pass, row after row.
    fn stage(&mut self, stage: &str, pass: &Pass, values: &[f32]);
    /// Logits of a pass's wanted rows, `[wanted, width]`, for the ids from `first_id` on.
    fn logits(&mut self, pass: &Pass, first_id: usize, width: usize, logits: &[f32]);
    /// Told before each stage: how many are done.
    fn progress(&mut self, done: usize, all: usize);
}

/// Other forms of the same model whose stages are run on the f32 program's inputs.
pub(super) struct Variant<'a> {
    /// Its text program.
    pub(super) written: &'a Written,
    /// By stage: sums of squares of the difference from the f32 stage, and of the f32 stage itself.
    pub(super) errors: BTreeMap<Name, (f64, f64)>,
}

/// What runs the pass.
pub(super) struct Teacher<'a> {
    pub(super) device: &'a Arc<dyn Device>,
    pub(super) numbers: Numbers<'a>,
    pub(super) cancel: &'a Cancel,
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
        let program = Checked::new(without_kv_slots(&written.program))?;
        let others: Vec<Checked> =
            variants.iter().map(|v| Ok(Checked::new(without_kv_slots(&v.written.program))?)).collect::<Result<_, ForgeError>>()?;
        let used: BTreeSet<u32> = passes.iter().flat_map(|pass| pass.ids.iter().copied()).collect();
        let used: Vec<u32> = used.into_iter().collect();
        let parts = parts(&program);
        let mut values: Vec<Values> = vec![Values::new(); passes.len()];
        for (i, part) in parts.iter().enumerate() {
            audience.progress(i, parts.len());
            for rows in part.blocks(&program) {
                let f32_outputs = self.part(&program, &written.recipes, part, rows.clone(), passes, &used, &values)?;
                for (variant, program) in variants.iter_mut().zip(&others) {
                    let found = self.part(program, &variant.written.recipes, part, rows.clone(), passes, &used, &values)?;
                    let sums = variant.errors.entry(part.stage.clone()).or_default();
                    found.iter().zip(&f32_outputs).for_each(|(found, expected)| add_error(sums, part, found, expected));
                }
                for ((pass, made), values) in passes.iter().zip(f32_outputs).zip(&mut values) {
                    if let Some(logits) = made.outputs.get("logits") {
                        let first_id = rows.as_ref().map_or(0, |rows| rows.start);
                        audience.logits(pass, first_id, logits.len() / pass.wanted.len(), logits);
                    } else if let Some(tap) = made.tap {
                        audience.stage(&part.stage, pass, &tap);
                    }
                    values.extend(made.outputs);
                }
            }
            let needed: BTreeSet<&Name> = parts[i + 1..].iter().flat_map(|part| part.reads(&program)).collect();
            values.iter_mut().for_each(|values| values.retain(|name, _| needed.contains(name)));
        }
        audience.progress(parts.len(), parts.len());
        Ok(())
    }

    /// Runs one part over all passes.
    #[allow(clippy::too_many_arguments)] // what it reads, apart
    fn part(
        &self,
        program: &Checked,
        recipes: &BTreeMap<Name, Recipe>,
        part: &Part,
        rows: Option<Range<usize>>,
        passes: &[Pass],
        used: &[u32],
        values: &[Values],
    ) -> Result<Vec<Made>, ForgeError> {
        if self.cancel.is_cancelled() {
            return Err(qhx_runtime::Error::Cancelled.into());
        }
        let cut = program.cut(|op| part.paths.contains(&op.path))?;
        let (cut, weights) = self.load(cut, recipes, rows, used)?;
        let most = |count: &dyn Fn(&Pass) -> usize| passes.iter().map(count).max().unwrap_or(1);
        let options =
            LoadOptions { max_rows: most(&|p| p.ids.len()), max_soft_rows: 0, max_wanted: most(&|p| p.wanted.len()), artifacts: None };
        let device = |e: qhx_ir::DeviceError| ForgeError::from(qhx_runtime::Error::from(e));
        let mut executable = self.device.load(&cut, &weights, &options).map_err(device)?;
        let mut made = Vec::new();
        for (pass, values) in passes.iter().zip(values) {
            let mut state = executable.new_state(pass.ids.len()).map_err(device)?;
            let inputs = cut.inputs.iter().map(|input| Given::of(input, pass, used, values)).collect::<Result<Vec<_>, _>>()?;
            let lent: Vec<InputData<'_>> = inputs.iter().map(Given::lend).collect();
            let mut tap = None;
            let mut take = |it: qhx_ir::Tap<'_>| tap = Some(it.values.to_vec());
            let mut segments = [Segment { state: Some(&mut *state), first_row: 0, valid_rows: pass.ids.len() }];
            let mut call = Call {
                bindings: Bindings { rows: pass.ids.len(), soft_rows: 0, wanted: pass.wanted.len() },
                inputs: &lent,
                segments: &mut segments,
                epoch: pass.epoch,
                cancel: Some(self.cancel.flag()),
                taps: Some(&mut take),
            };
            executable.run(&mut call).map_err(device)?;
            let outputs = cut.outputs.iter().filter_map(|o| Some((o.name.clone(), executable.output(&o.name)?.to_vec()))).collect();
            made.push(Made { outputs, tap });
        }
        Ok(made)
    }

    /// The weights of a part in memory: of look-up tables the used rows, of a block of the head its rows; the program is changed to fit.
    fn load(
        &self,
        cut: Checked,
        recipes: &BTreeMap<Name, Recipe>,
        rows: Option<Range<usize>>,
        used: &[u32],
    ) -> Result<(Checked, Arc<dyn Weights>), ForgeError> {
        let mut program: Program = (*cut).clone();
        let tables: BTreeSet<Name> = cut.ops.iter().filter_map(|op| table(&cut, op)).collect();
        let mut tensors: HashMap<String, WeightTensor> = HashMap::new();
        for (name, weight) in &mut program.weights {
            let recipe = &recipes[name];
            let tensor = if tables.contains(name) {
                let tensor = self.rows_of(weight, recipe, used)?;
                weight.shape[0] = used.len();
                tensor
            } else if let Some(rows) = &rows {
                match weight.shape.len() {
                    // The head's bias: one row of which a part is wanted.
                    1 => part_of_vector(&self.numbers.tensor(weight, recipe, 0..1)?, rows).map_err(|reason| wrong(recipe, reason))?,
                    _ => self.numbers.tensor(weight, recipe, rows.clone())?,
                }
            } else {
                self.numbers.tensor(weight, recipe, 0..weight_rows(weight))?
            };
            if rows.is_some() {
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

type Values = HashMap<Name, Vec<f32>>;

/// What a part made of a pass.
struct Made {
    outputs: Values,
    tap: Option<Vec<f32>>,
}

/// A part of a program that is run at once: a stage, or the output head.
struct Part {
    stage: Name,
    paths: BTreeSet<Name>,
    /// The head's matrix, where its rows can be taken in blocks.
    head: Option<Name>,
}

impl Part {
    /// The values that the part's ops read.
    fn reads<'p>(&self, program: &'p Program) -> impl Iterator<Item = &'p Name> {
        program.ops.iter().filter(|op| self.paths.contains(&op.path)).flat_map(|op| op.op.inputs())
    }

    /// The blocks in which the part is run: one of everything, or rows of the head.
    fn blocks(&self, program: &Program) -> Vec<Option<Range<usize>>> {
        let Some(head) = self.head.as_ref().and_then(|name| program.weights.get(name)) else { return vec![None] };
        let block = (HEAD_BLOCK / head.shape[1]).max(1);
        (0..head.shape[0]).step_by(block).map(|first| Some(first..head.shape[0].min(first + block))).collect()
    }
}

/// The stages in order; the last in two parts where it ends in a matrix whose rows are apart.
fn parts(program: &Checked) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for stage in &program.stages {
        let ops: Vec<&Op> = program.ops.iter().filter(|op| program.stage_of(&op.path).is_some_and(|s| s.name == stage.name)).collect();
        let is_last = program.stages.last().is_some_and(|last| last.name == stage.name);
        let matrix = ops.iter().rposition(|op| matches!(op.op, OpKind::Linear { .. }));
        let by_number = |op: &&Op| matches!(op.op, OpKind::Softcap { .. } | OpKind::Scale { weight: None, .. } | OpKind::Clamp { .. });
        let split = matrix.filter(|&at| is_last && at > 0 && ops[at + 1..].iter().all(by_number));
        let paths = |ops: &[&Op]| ops.iter().map(|op| op.path.clone()).collect();
        match split {
            None => parts.push(Part { stage: stage.name.clone(), paths: paths(&ops), head: None }),
            Some(at) => {
                let head = ops[at].op.weights().first().map(|name| (*name).clone());
                parts.push(Part { stage: stage.name.clone(), paths: paths(&ops[..at]), head: None });
                parts.push(Part { stage: stage.name.clone(), paths: paths(&ops[at..]), head });
            }
        }
    }
    parts.retain(|part| !part.paths.is_empty());
    parts
}

/// The program for calls that have all rows: attention takes keys and values from the call, whoever made them.
fn without_kv_slots(program: &Program) -> Program {
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

/// An input of a call.
enum Given<'v> {
    Floats(&'v [f32]),
    Numbers(Vec<i32>),
}

impl<'v> Given<'v> {
    fn of(input: &qhx_ir::Input, pass: &Pass, used: &[u32], values: &'v Values) -> Result<Self, ForgeError> {
        let rows = pass.ids.len() as i32;
        Ok(match (&input.generator, input.dtype) {
            (Generator::Ids | Generator::IdsMediaAsPad, _) => {
                Self::Numbers(pass.ids.iter().map(|id| used.partition_point(|u| u < id) as i32).collect())
            }
            (Generator::PositionsSequence, _) => Self::Numbers((0..rows).collect()),
            (Generator::PositionsMrope, _) => Self::Numbers((0..3).flat_map(|_| 0..rows).collect()),
            (Generator::WantedRows, _) => Self::Numbers(pass.wanted.clone().map(|row| row as i32).collect()),
            (Generator::Carried, dtype) => match (values.get(&input.name), dtype) {
                (Some(values), DType::F32) => Self::Floats(values),
                // Chosen experts come as floats.
                (Some(values), DType::I32) => Self::Numbers(values.iter().map(|&x| x as i32).collect()),
                (None, _) => return Err(ForgeError::Gate(format!("the value `{}` is read before the stage that makes it", input.name))),
            },
            // A text has no soft rows.
            (_, DType::F32) => Self::Floats(&[]),
            (_, DType::I32) => Self::Numbers(Vec::new()),
        })
    }

    fn lend(&self) -> InputData<'_> {
        match self {
            Self::Floats(values) => InputData::F32(values),
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
