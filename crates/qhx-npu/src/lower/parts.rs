//! Splits a program into parts that run one after the other: work of the host (table look-ups, gathering and scattering rows, choosing experts and
//! passing them on) and graphs. A graph has one kind of rows, so what is computed for the wanted rows alone is a separate part.

use super::Sizes;
use qhx_ir::{Checked, Dim, Name, Op, OpKind, Symbol};
use std::collections::{HashMap, HashSet};

/// Ops that run together.
#[derive(Clone, Debug)]
pub struct Part {
    /// Who runs them.
    pub work: Work,
    /// Their indexes in the program, in order.
    pub ops: Vec<usize>,
    /// Values that are produced elsewhere and read here.
    pub reads: Vec<Name>,
    /// Values that are produced here and read elsewhere or returned to the caller.
    pub makes: Vec<Name>,
    /// Values that are produced here, are taps of stages and are not in `makes`.
    pub taps: Vec<Name>,
    /// The number of rows of an execution is a multiple of this.
    pub multiple: usize,
    /// Whether an execution needs all rows of a segment because rows depend on each other and no slot carries that.
    pub whole: bool,
    /// Whether it reads KV rows, so that its graphs depend on the length of the context.
    pub reads_kv: bool,
}

impl Part {
    /// The sizes of its graphs for sessions whose slots have the sizes `kept`.
    pub fn sizes(&self, kept: Sizes) -> Sizes {
        if self.reads_kv { kept } else { Sizes { context: 0, ring: None, ..kept } }
    }
}

/// Who runs a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// The host.
    Host,
    /// The processor, over rows of this kind.
    Graph(Symbol),
}

/// Who runs an op.
pub fn work_of(program: &Checked, op: &Op) -> Work {
    match op.op {
        OpKind::Embed { .. }
        | OpKind::Interpolate { .. }
        | OpKind::Gather { .. }
        | OpKind::ScatterRows { .. }
        | OpKind::Route { .. }
        | OpKind::Experts { .. } => Work::Host,
        _ => Work::Graph(program.value_type(&op.path).shape.iter().find_map(|&d| symbol_of(d)).unwrap_or(Symbol::T)),
    }
}

fn symbol_of(dim: Dim) -> Option<Symbol> {
    match dim {
        Dim::Fixed(_) => None,
        Dim::Symbol(s) | Dim::Exact(s, _) | Dim::Ceil(s, _) => Some(s),
    }
}

/// The parts of a program in execution order. No graph has more than `budget` bytes of weights unless a single op has.
pub fn parts(program: &Checked, budget: u64) -> Vec<Part> {
    let works: Vec<Work> = program.ops.iter().map(|op| work_of(program, op)).collect();
    let mut order: Vec<usize> = (0..works.len()).collect();
    let levels = levels(program, &works);
    order.sort_by_key(|&op| (levels[op], works[op], op));
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut bytes = 0;
    for op in order {
        let own = weight_bytes(program, &program.ops[op]);
        match groups.last_mut() {
            Some(group) if (levels[group[0]], works[group[0]]) == (levels[op], works[op]) && (bytes + own <= budget || own == 0) => {
                group.push(op);
                bytes += own;
            }
            _ => {
                groups.push(vec![op]);
                bytes = own;
            }
        }
    }
    groups.into_iter().map(|ops| part(program, works[ops[0]], ops)).collect()
}

/// The number of switches between host and processor before each op.
fn levels(program: &Checked, works: &[Work]) -> Vec<usize> {
    let mut made: HashMap<Name, usize> = HashMap::new();
    let mut written: HashMap<&Name, usize> = HashMap::new();
    let mut levels = Vec::new();
    for (number, op) in program.ops.iter().enumerate() {
        let slot = op.op.slot();
        // An op that only reads a slot comes after the op that writes it.
        let before = op.op.inputs().into_iter().filter_map(|name| made.get(name)).chain(slot.and_then(|slot| written.get(slot)));
        levels.push(before.map(|&d| levels[d] + usize::from(works[d] != works[number])).max().unwrap_or(0));
        slot.map(|slot| written.entry(slot).or_insert(number));
        made.extend(op.outputs().into_iter().map(|name| (name, number)));
    }
    levels
}

fn part(program: &Checked, work: Work, ops: Vec<usize>) -> Part {
    let inside: HashSet<usize> = ops.iter().copied().collect();
    let mut read: HashSet<&Name> = HashSet::new();
    let made_here = |name: &Name| program.maker(name).is_some_and(|op| inside.contains(&op));
    let all_reads = ops.iter().flat_map(|&op| program.ops[op].op.inputs());
    let reads: Vec<Name> = all_reads.filter(|name| !made_here(name) && read.insert(name)).cloned().collect();
    let wanted = |name: &Name| program.is_output(name) || program.readers(name).iter().any(|op| !inside.contains(op));
    let in_order = || ops.iter().flat_map(|&op| program.ops[op].outputs());
    let kinds = ops.iter().map(|&op| &program.ops[op].op);
    let alone = |op: &OpKind| op.mixes_rows() && op.slot().is_none();
    let dims = ops.iter().flat_map(|&op| program.ops[op].outputs()).chain(reads.clone());
    let dims = dims.flat_map(|name| program.value_type(&name).shape.clone());
    let quotients = dims.map(|d| match d {
        Dim::Exact(_, n) => n,
        // A quotient that rounds up needs no multiple, but its rows cannot be cut just anywhere.
        Dim::Ceil(_, n) => n,
        _ => 1,
    });
    let multiple = quotients.fold(1, |a, b| if a % b == 0 { a } else { a * b });
    Part {
        work,
        reads,
        makes: in_order().filter(|name| wanted(name)).collect(),
        taps: in_order().filter(|name| !program.stages_shown_by(name).is_empty() && !wanted(name)).collect(),
        multiple,
        reads_kv: ops.iter().any(|&op| matches!(program.ops[op].op, OpKind::Attend { slot: Some(_), .. })),
        whole: multiple > 1 || kinds.into_iter().any(alone),
        ops,
    }
}

/// Bytes of the weights that an op reads, as the bundle stores them.
pub fn weight_bytes(program: &Checked, op: &Op) -> u64 {
    let bytes = |name: &Name| {
        let weight = &program.weights[name];
        let (columns, rows) = weight.shape.split_last().map_or((0, 1), |(columns, rows)| (*columns, rows.iter().product::<usize>()));
        weight.encoding.row_bytes(columns).map_or(0, |r| (rows as u64).saturating_mul((r.data + r.scale + r.min) as u64))
    };
    op.op.weights().into_iter().map(bytes).sum()
}
