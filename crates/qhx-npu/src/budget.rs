//! What goes into which context, before anything is compiled: parts of programs are laid into contexts that a processor can hold, or refused with the numbers.
//!
//! Bytes are those of the weights in the form that graphs have them; what the library adds (code, scratch) is a few hundredths of it.

use crate::{
    Arch,
    lower::{Part, Work, experts::expert_sizes, parts},
    run::part_rows,
};
use qhx_ir::{Checked, Encoding, Name, Quants, Weight};
use serde::Serialize;
use std::collections::BTreeSet;

/// What a processor and its runtime can hold in one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Bytes of one context: it lies in the DSP's address space of 32 bits, beside other things.
    pub context_bytes: u64,
    /// Contexts at once.
    pub contexts: usize,
    /// Graphs at once beyond which the DSP's heap may be exhausted, which restarts the phone; absent: not known of.
    pub risky_graphs: Option<usize>,
    /// Fast memory, shared by all graphs.
    pub vtcm_mb: u32,
}

impl Limits {
    /// What is known of a processor.
    pub fn of(arch: Arch) -> Self {
        // On v81 seven contexts with 64 graphs are known to exhaust the heap.
        let risky_graphs = (arch == Arch::V81).then_some(64);
        Self { context_bytes: 3_500_000_000, contexts: 8, risky_graphs, vtcm_mb: 8 }
    }
}

/// What is to be laid out.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// The text program first, then towers, which are loaded when they are needed and released again.
    pub programs: &'a [&'a Checked],
    /// Rows that graphs take at once: 1 for writing, more for reading prompts.
    pub rows: &'a [usize],
    /// Most bytes of weights in one graph.
    pub part_bytes: u64,
    /// Whether a plan that may exhaust the heap is wanted all the same.
    pub allow_risky: bool,
}

/// Contexts and what is in them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// `v79`, `v81`.
    pub arch: String,
    /// What the processor can hold.
    pub limits: Limits,
    /// Rows that graphs take at once.
    pub rows: Vec<usize>,
    /// In the order in which they run.
    pub contexts: Vec<PlannedContext>,
    /// Graphs of all contexts.
    pub graphs: usize,
    /// Bytes of all contexts.
    pub bytes: u64,
    /// Bytes that stay in the host's memory: tables and experts.
    pub host_bytes: u64,
    /// Why it is not what was wished for, and what is dangerous about it.
    pub notes: Vec<String>,
}

/// One context.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedContext {
    /// The program.
    pub program: String,
    /// Its number among those of the program.
    pub number: usize,
    /// Bytes of its weights.
    pub bytes: u64,
    /// Graphs: every part at all of its rows.
    pub graphs: usize,
    /// The first and the last stage that it has a part of.
    pub stages: [String; 2],
    /// How many layers it has a part of.
    pub layers: usize,
    /// The parts of the program that are in it.
    pub parts: Vec<usize>,
}

/// Lays programs out, or says in numbers why they do not fit.
pub fn budget(wish: &Wish<'_>, arch: Arch, limits: Limits) -> Result<Budget, String> {
    let mut rows = wish.rows.to_vec();
    rows.sort_unstable();
    rows.dedup();
    if rows.first().is_none_or(|&first| first == 0) {
        return Err(format!("graphs of {rows:?} rows are impossible"));
    }
    let mut plan = lay_out(wish, &rows, arch, limits)?;
    let Some(most) = limits.risky_graphs.filter(|&most| plan.loaded_graphs(wish) >= most) else { return plan.checked(wish) };
    let danger = format!(
        "{} graphs at once: from {most} on the heap of {arch} may be exhausted, which restarts the phone",
        plan.loaded_graphs(wish)
    );
    if wish.allow_risky {
        plan.notes.push(danger);
        return plan.checked(wish);
    }
    let single = lay_out(wish, &rows[..1], arch, limits)?;
    if rows.len() == 1 || single.loaded_graphs(wish) >= most {
        return Err(format!("{danger}: use larger graphs, or --allow-risky"));
    }
    let note = format!(
        "graphs of {} rows only, prompts go through them row by row; with those of {:?} rows there would be {danger}",
        rows[0],
        &rows[1..]
    );
    Budget { notes: vec![format!("{note} (--allow-risky)")], ..single }.checked(wish)
}

impl Budget {
    /// Graphs that are loaded together: those of the text program.
    fn loaded_graphs(&self, wish: &Wish<'_>) -> usize {
        self.text(wish).map(|context| context.graphs).sum()
    }

    fn text<'a>(&'a self, wish: &Wish<'_>) -> impl Iterator<Item = &'a PlannedContext> {
        let name = wish.programs.first().map_or(String::new(), |program| program.name.to_string());
        self.contexts.iter().filter(move |context| context.program == name)
    }

    fn checked(self, wish: &Wish<'_>) -> Result<Self, String> {
        let Limits { contexts, context_bytes, .. } = self.limits;
        let count = self.text(wish).count();
        if count > contexts {
            let bytes: u64 = self.text(wish).map(|context| context.bytes).sum();
            return Err(format!(
                "{bytes} bytes of weights take {count} contexts of at most {context_bytes} bytes, {} holds {contexts}: use a smaller precision",
                self.arch
            ));
        }
        Ok(self)
    }
}

fn lay_out(wish: &Wish<'_>, rows: &[usize], arch: Arch, limits: Limits) -> Result<Budget, String> {
    let mut contexts = Vec::new();
    let mut host: BTreeSet<(&Name, u64)> = BTreeSet::new();
    for program in wish.programs {
        let all = parts(program, wish.part_bytes.min(limits.context_bytes));
        let mut own: Vec<PlannedContext> = Vec::new();
        for (number, part) in all.iter().enumerate() {
            let names: BTreeSet<&Name> = part.ops.iter().flat_map(|&op| program.ops[op].op.weights()).collect();
            let bytes = names.iter().map(|&name| graph_bytes(&program.weights[name])).sum::<u64>();
            if part.work == Work::Host {
                host.extend(names.iter().map(|&name| (name, stored_bytes(&program.weights[name]))));
                continue;
            }
            if bytes > limits.context_bytes {
                let place = stages(program, part).map_or(String::new(), |[first, _]| first);
                return Err(format!("stage `{place}` has {bytes} bytes of weights, a context holds {}", limits.context_bytes));
            }
            let graphs = part_rows(part, rows).len();
            match own.last_mut() {
                Some(last) if last.bytes + bytes <= limits.context_bytes => {
                    last.bytes += bytes;
                    last.graphs += graphs;
                    last.parts.push(number);
                }
                _ => own.push(PlannedContext {
                    program: program.name.to_string(),
                    number: own.len(),
                    bytes,
                    graphs,
                    stages: Default::default(),
                    layers: 0,
                    parts: vec![number],
                }),
            }
        }
        for context in &mut own {
            let ends: Vec<[String; 2]> = context.parts.iter().filter_map(|&part| stages(program, &all[part])).collect();
            if let (Some([first, _]), Some([_, last])) = (ends.first(), ends.last()) {
                context.stages = [first.clone(), last.clone()];
            }
            context.layers = layers(program, context.parts.iter().map(|&part| &all[part]));
        }
        let batch = rows.last().copied().unwrap_or(1);
        let mut sizes: Vec<_> = program.ops.iter().flat_map(|op| expert_sizes(program, op, batch)).collect();
        sizes.dedup();
        if let (Some(last), false) = (own.last_mut(), sizes.is_empty()) {
            // Their weights are inputs: the graphs themselves are small, and serve all layers.
            let distinct: std::collections::HashSet<_> = sizes.into_iter().collect();
            last.graphs += distinct.len();
        }
        contexts.extend(own);
    }
    Ok(Budget {
        arch: arch.to_string(),
        limits,
        rows: rows.to_vec(),
        graphs: contexts.iter().map(|context| context.graphs).sum(),
        bytes: contexts.iter().map(|context| context.bytes).sum(),
        host_bytes: host.iter().map(|(_, bytes)| bytes).sum(),
        contexts,
        notes: Vec::new(),
    })
}

/// The first and the last stage of a part.
fn stages(program: &Checked, part: &Part) -> Option<[String; 2]> {
    let stage = |op: &usize| program.stage_of(&program.ops[*op].path).map(|stage| stage.name.to_string());
    Some([stage(part.ops.iter().min()?)?, stage(part.ops.iter().max()?)?])
}

/// Distinct numbers in the stages' names: `layers.3`, `vision.3`.
fn layers<'a>(program: &Checked, parts: impl Iterator<Item = &'a Part>) -> usize {
    let number = |op: &usize| program.ops[*op].path.split('.').find_map(|word| word.parse::<usize>().ok());
    parts.flat_map(|part| part.ops.iter().filter_map(number)).collect::<BTreeSet<_>>().len()
}

fn numbers(weight: &Weight) -> u64 {
    weight.shape.iter().fold(1, |n, &d| n.saturating_mul(d as u64))
}

/// Bytes of a weight as a constant of a graph.
fn graph_bytes(weight: &Weight) -> u64 {
    let (count, columns) = (numbers(weight), weight.shape.last().copied().unwrap_or(1).max(1));
    match weight.encoding {
        Encoding::I8Row => count + 4 * (count / columns as u64),
        Encoding::Block(b) if b.quants == Quants::I4 && !b.min && columns % b.block == 0 => count / 2 + 4 * (count / b.block as u64),
        _ => 2 * count,
    }
}

/// Bytes of a weight as the host keeps it.
fn stored_bytes(weight: &Weight) -> u64 {
    let columns = weight.shape.last().copied().unwrap_or(1).max(1);
    let row = weight.encoding.row_bytes(columns).map_or(0, |r| (r.data + r.scale + r.min) as u64);
    row * (numbers(weight) / columns as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_ir::conformance::models::tiny;

    fn limits(context_bytes: u64) -> Limits {
        Limits { context_bytes, ..Limits::of(Arch::V81) }
    }

    #[test]
    fn everything_is_in_one_context_or_in_as_many_as_it_takes() {
        for model in tiny(0).into_iter().filter(|model| !model.program.slots.is_empty()) {
            let programs = [&model.program];
            let wish = Wish { programs: &programs, rows: &[32, 1], part_bytes: u64::MAX, allow_risky: false };
            let whole = budget(&wish, Arch::V81, limits(1 << 30)).unwrap();
            assert_eq!((whole.contexts.len(), &whole.rows[..], whole.notes.len()), (1, &[1, 32][..], 0), "{}", model.name);
            assert!(whole.bytes > 1000 && whole.host_bytes > 100 && whole.graphs >= 3, "{whole:?}");
            // No op can be cut.
            let ops = parts(&model.program, 1).into_iter().filter(|part| part.work != Work::Host).flat_map(|part| part.ops);
            let bytes =
                |op: usize| model.program.ops[op].op.weights().into_iter().map(|name| graph_bytes(&model.program.weights[name])).sum();
            let most = (whole.bytes / 3).max(ops.map(bytes).max().unwrap());
            let split = budget(&Wish { part_bytes: most, ..wish }, Arch::V81, limits(most)).unwrap();
            assert!(split.contexts.len() >= 2 && split.contexts.iter().all(|c| c.bytes <= most), "{split:?}");
            // A weight that two graphs use is in both.
            assert!(split.bytes >= whole.bytes && split.graphs > whole.graphs);
            assert_eq!(split.contexts[0].stages[0], whole.contexts[0].stages[0]);
            let few = Limits { contexts: 1, ..limits(most) };
            let error = budget(&Wish { part_bytes: most, ..wish }, Arch::V81, few).unwrap_err();
            assert!(error.contains(&most.to_string()) && error.contains("holds 1"), "{error}");
            let error = budget(&wish, Arch::V81, limits(64)).unwrap_err();
            assert!(error.contains("a context holds 64"), "{error}");
        }
    }

    #[test]
    fn what_may_exhaust_the_heap_is_not_the_default() {
        let model = &tiny(0)[0];
        let programs = [&model.program];
        let wish = Wish { programs: &programs, rows: &[1, 32], part_bytes: u64::MAX, allow_risky: false };
        let whole = budget(&wish, Arch::V81, limits(1 << 30)).unwrap();
        let risky = Limits { risky_graphs: Some(whole.graphs), ..limits(1 << 30) };
        let careful = budget(&wish, Arch::V81, risky).unwrap();
        assert_eq!(careful.rows, [1]);
        assert!(careful.graphs < whole.graphs && careful.notes[0].contains("--allow-risky"), "{careful:?}");
        let bold = budget(&Wish { allow_risky: true, ..wish }, Arch::V81, risky).unwrap();
        assert_eq!(bold.rows, [1, 32]);
        assert!(bold.notes[0].contains("restarts the phone"), "{bold:?}");
        let error = budget(&Wish { rows: &[1], ..wish }, Arch::V81, Limits { risky_graphs: Some(1), ..risky }).unwrap_err();
        assert!(error.contains("--allow-risky"), "{error}");
        assert_eq!(Limits::of(Arch::V79).risky_graphs, None);
    }
}
