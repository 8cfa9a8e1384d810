//! Groups the parts of a program into contexts.
//!
//! A context has about [`NpuOptions::context_bytes`] of weights, less than a processor can hold: compiling takes several times a context's size in memory, and
//! smaller contexts can be released one by one. They are larger only where there would otherwise be too many. Where graphs share their weights, one sequence of
//! contexts holds all parts at all row counts. Where every graph has its own weights, each row count has its own contexts, so that those for prefill can be
//! released afterwards.

use super::{Limits, PlannedContext, Wanted, constant_bytes, part_bytes, stored_bytes};
use crate::{
    NpuOptions,
    lower::{
        Part, Sizes, Work,
        experts::{ExpertSizes, expert_sizes},
        parts,
        parts::work_of,
    },
};
use half::f16;
use qhx_ir::{Checked, Name, Piece, Slot, Symbol, all_rows};
use std::collections::{BTreeMap, BTreeSet};

/// A planned graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planned {
    /// A part of the program.
    Part {
        /// The piece.
        piece: usize,
        /// The index of the part in it.
        number: usize,
        /// Rows per execution.
        rows: usize,
    },
    /// Experts of all layers.
    Experts(ExpertSizes),
}

/// A program that is being planned.
pub(super) struct Layout<'a> {
    wanted: &'a Wanted<'a>,
    rows: Vec<usize>,
    /// The parts of all pieces, in order.
    parts: Vec<Placed<'a>>,
    /// Sizes of keys and values.
    kept: Sizes,
    options: &'a NpuOptions,
    limits: Limits,
}

/// A part of a piece.
struct Placed<'a> {
    piece: usize,
    number: usize,
    program: &'a Checked,
    part: Part,
    /// Bytes of its weights as graph constants.
    bytes: u64,
}

impl<'a> Layout<'a> {
    pub(super) fn new(wanted: &'a Wanted<'a>, kept: Sizes, options: &'a NpuOptions, limits: Limits) -> Result<Self, String> {
        let placed = |(piece, &Piece { program, .. }): (usize, &Piece<'a>)| {
            let parts = parts(program, part_bytes(options, limits)).into_iter().enumerate();
            parts.map(move |(number, part)| Placed { piece, number, program, bytes: constant_bytes(program, &part), part })
        };
        let parts: Vec<Placed<'a>> = wanted.pieces.iter().enumerate().flat_map(placed).collect();
        for placed in &parts {
            if placed.part.work != Work::Host && placed.bytes > limits.context_bytes {
                let place = placed.stages().map_or(String::new(), |[first, _]| first);
                return Err(format!(
                    "stage `{place}` has {} bytes of weights, but a context holds {}: use a smaller precision",
                    placed.bytes, limits.context_bytes
                ));
            }
        }
        Ok(Self { wanted, rows: all_rows(wanted.pieces), parts, kept, options, limits })
    }

    /// The contexts, those with fewer rows first.
    pub(super) fn contexts(&self) -> Result<Vec<PlannedContext>, String> {
        let shared = self.options.share_weights;
        let kinds: Vec<&[usize]> = if shared { vec![&self.rows] } else { self.rows.chunks(1).collect() };
        let mut all = Vec::new();
        for (kind, rows) in kinds.iter().enumerate() {
            let is_here = |planned: &Planned| shared || self.kind(planned) == kind;
            let here: Vec<usize> = (0..self.parts.len()).filter(|&part| self.graphs_of(part).iter().any(is_here)).collect();
            let mut groups = self.group(&here)?;
            // Their weights are inputs: the graphs themselves are small, and serve all layers.
            let mut experts: Vec<Planned> = self.experts().into_iter().filter(is_here).collect();
            if groups.is_empty() && !experts.is_empty() {
                groups.push(Vec::new());
            }
            for (number, group) in groups.iter().enumerate() {
                let mut planned: Vec<Planned> = group.iter().flat_map(|&part| self.graphs_of(part)).filter(is_here).collect();
                if number + 1 == groups.len() {
                    planned.append(&mut experts);
                }
                all.push(self.context(format!("{}{}_{number}", self.wanted.name, self.label(rows)), group, planned));
            }
        }
        Ok(all)
    }

    /// Splits consecutive parts into groups of about equal size: of the desired number of bytes, but no more groups than can be loaded.
    fn group(&self, parts: &[usize]) -> Result<Vec<Vec<usize>>, String> {
        let total: u64 = parts.iter().map(|&part| self.parts[part].bytes).sum();
        let Limits { contexts: most, context_bytes, .. } = self.limits;
        let wished = self.options.context_bytes.clamp(1, context_bytes).max(total.div_ceil(most.max(1) as u64));
        let parts_count = parts.len().max(1) as u64;
        for count in total.div_ceil(wished).clamp(1, parts_count)..=parts_count {
            let mut groups = vec![Vec::new(); count as usize];
            let mut before = 0;
            for &part in parts {
                // The position of its middle.
                let middle = u128::from(before) + u128::from(self.parts[part].bytes / 2);
                let group = (middle * u128::from(count) / u128::from(total.max(1))).min(u128::from(count) - 1);
                groups[group as usize].push(part);
                before += self.parts[part].bytes;
            }
            groups.retain(|group| !group.is_empty());
            let fits = |group: &Vec<usize>| group.iter().map(|&part| self.parts[part].bytes).sum::<u64>() <= context_bytes;
            if !groups.iter().all(fits) {
                continue;
            }
            if groups.len() > most {
                break;
            }
            return Ok(groups);
        }
        Err(format!(
            "{total} bytes of weights do not fit into {most} contexts of {context_bytes} bytes each, the limit of {}: use a smaller precision",
            self.options.arch
        ))
    }

    fn context(&self, name: String, parts: &[usize], planned: Vec<Planned>) -> PlannedContext {
        let placed: Vec<&Placed<'_>> = parts.iter().map(|&part| &self.parts[part]).collect();
        let ends: Vec<[String; 2]> = placed.iter().filter_map(|placed| placed.stages()).collect();
        let stages = match (ends.first(), ends.last()) {
            (Some([first, _]), Some([_, last])) => [first.clone(), last.clone()],
            _ => Default::default(),
        };
        let twice = |placed: &&Placed<'_>| planned.iter().filter(|planned| placed.is(planned)).count() > 1;
        PlannedContext {
            program: self.wanted.name.to_owned(),
            name,
            bytes: placed.iter().map(|placed| placed.bytes).sum(),
            slot_bytes: slots(&placed).values().map(|slot| kv_bytes(slot, self.kept)).sum(),
            graphs: planned.len(),
            stages,
            layers: placed.iter().flat_map(|placed| placed.layers()).collect::<BTreeSet<_>>().len(),
            parts: parts.to_vec(),
            // Graphs of different parts have nothing in common; without the flag every library loads the context.
            shared_weights: self.options.share_weights && placed.iter().any(twice),
            planned,
        }
    }

    fn graphs_of(&self, part: usize) -> Vec<Planned> {
        let Placed { piece, number, ref part, .. } = self.parts[part];
        match part.work {
            Work::Host => vec![],
            Work::Graph(_) => {
                let rows = part_rows(part, self.wanted.pieces[piece].rows).into_iter();
                rows.map(|rows| Planned::Part { piece, number, rows }).collect()
            }
        }
    }

    fn experts(&self) -> Vec<Planned> {
        let mut distinct: Vec<Planned> = Vec::new();
        for sizes in self.wanted.pieces.iter().flat_map(experts_of).map(Planned::Experts) {
            if !distinct.contains(&sizes) {
                distinct.push(sizes);
            }
        }
        distinct
    }

    /// The index of a graph's row count among all row counts.
    fn kind(&self, planned: &Planned) -> usize {
        let (multiple, made) = match *planned {
            Planned::Part { rows, .. } => {
                (self.parts.iter().find(|placed| placed.is(planned)).map_or(1, |placed| placed.part.multiple), rows)
            }
            Planned::Experts(sizes) => (1, sizes.rows),
        };
        self.rows.iter().position(|rows| rows.next_multiple_of(multiple) == made).unwrap_or(0)
    }

    /// The suffix of the program's name in a context for a single row count.
    fn label(&self, rows: &[usize]) -> String {
        match (rows, self.wanted.pieces.iter().all(|piece| piece.program.slots.is_empty())) {
            ([1], false) => "_decode".into(),
            (&[rows], false) => format!("_prefill{rows}"),
            (&[rows], true) if self.rows.len() > 1 => format!("_t{rows}"),
            _ => String::new(),
        }
    }
}

/// The slots that parts use.
fn slots<'a>(parts: &[&Placed<'a>]) -> BTreeMap<&'a Name, &'a Slot> {
    let of = |placed: &&Placed<'a>| {
        let Placed { program, part, .. } = *placed;
        part.ops.iter().filter_map(|&op| program.ops[op].op.slot()).filter_map(|name| program.slots.get_key_value(name)).collect::<Vec<_>>()
    };
    parts.iter().flat_map(of).collect()
}

/// Bytes of keys and values that are passed to a graph; recurrent slots are small enough to ignore.
fn kv_bytes(slot: &Slot, kept: Sizes) -> u64 {
    match *slot {
        Slot::Kv { kv_heads, head_dim, .. } => {
            let numbers = [2, kv_heads, head_dim, kept.slot_rows(slot)].iter().fold(1u64, |n, &size| n.saturating_mul(size as u64));
            numbers.saturating_mul(size_of::<f16>() as u64)
        }
        _ => 0,
    }
}

impl Placed<'_> {
    fn is(&self, planned: &Planned) -> bool {
        matches!(planned, Planned::Part { piece, number, .. } if (*piece, *number) == (self.piece, self.number))
    }

    /// The first and the last stage.
    fn stages(&self) -> Option<[String; 2]> {
        let stage = |&op: &usize| self.program.stages[self.program.stage_of_op(op)].name.to_string();
        Some([stage(self.part.ops.iter().min()?), stage(self.part.ops.iter().max()?)])
    }

    /// The layer numbers in the stages' names: `layers.3`, `vision.3`.
    fn layers(&self) -> impl Iterator<Item = usize> {
        self.part.ops.iter().filter_map(|&op| self.program.ops[op].path.split('.').find_map(|word| word.parse().ok()))
    }
}

/// The graphs of experts that a piece runs.
pub(crate) fn experts_of(piece: &Piece<'_>) -> Vec<ExpertSizes> {
    let (program, batch) = (piece.program, piece.rows.last().copied().unwrap_or(1));
    program.ops.iter().flat_map(|op| expert_sizes(program, op, batch)).collect()
}

/// The rows at which a part is compiled.
pub(crate) fn part_rows(part: &Part, rows: &[usize]) -> Vec<usize> {
    let mut all: Vec<usize> = match part.work {
        // Usually one row is wanted.
        Work::Graph(Symbol::L) if !part.whole => vec![1],
        _ => rows.iter().map(|rows| rows.next_multiple_of(part.multiple)).collect(),
    };
    all.dedup();
    all
}

/// The weights that the host reads itself, with their bytes.
pub(super) fn host_weights(program: &Checked) -> impl Iterator<Item = (&Name, u64)> {
    let ops = program.ops.iter().filter(|op| work_of(program, op) == Work::Host);
    ops.flat_map(|op| op.op.weights()).map(|name| (name, stored_bytes(&program.weights[name])))
}
