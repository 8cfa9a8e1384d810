//! What goes into which context, before anything is compiled: parts of programs are laid into contexts that a processor can hold, or refused with the numbers.
//! `Device::prepare` writes the contexts that are planned here, and no others.
//!
//! Bytes are those of the weights in the form that graphs have them; what the library adds (code, scratch) is a few hundredths of it.

mod group;
mod token;

#[cfg(test)]
mod tests;

pub(crate) use group::{Planned, experts_of, part_rows};
pub use token::PerToken;
pub(crate) use token::constant_bytes;

use crate::{Arch, NpuOptions, check::QUANTISED_STEP, lower::Sizes, run::Kv};
use group::Layout;
use qhx_ir::{DeviceError, Encoding, Name, Piece, Quants, Weight, all_rows};
use serde::Serialize;

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

/// A program that is to be laid out.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Its name, after which contexts are called.
    pub name: &'a str,
    /// The whole program, or the pieces of it that run on this processor, in their order. Rows are those that graphs take at once: of a text 1 for writing and more for
    /// reading prompts, of a tower all rows of a picture or sound.
    pub pieces: &'a [Piece<'a>],
}

/// Contexts and what is in them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// `v79`, `v81`.
    pub arch: String,
    /// What the processor can hold.
    pub limits: Limits,
    /// Rows that graphs of the text take at once.
    pub rows: Vec<usize>,
    /// Rows of KV slots; where they are rings, the most that attention sees.
    pub context: usize,
    /// Where slots are rings: the most rows of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ring: Option<usize>,
    /// In the order in which they run.
    pub contexts: Vec<PlannedContext>,
    /// Graphs of all contexts.
    pub graphs: usize,
    /// Bytes of all contexts.
    pub bytes: u64,
    /// Bytes that stay in the host's memory: tables and experts.
    pub host_bytes: u64,
    /// What writing one token takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_token: Option<PerToken>,
    /// Why it is not what was wished for, and what is dangerous about it.
    pub notes: Vec<String>,
    /// Most bytes of weights in one graph.
    #[serde(skip)]
    pub(crate) part_bytes: u64,
}

/// One context.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedContext {
    /// The program.
    pub program: String,
    /// Its file is called so, with `.bin` behind: `text_0`, `text_decode_0`, `text_prefill128_0`, `vision_0`.
    pub name: String,
    /// Bytes of its weights.
    pub bytes: u64,
    /// Bytes of keys and values that its graphs are handed.
    pub slot_bytes: u64,
    /// How many graphs it has.
    pub graphs: usize,
    /// The first and the last stage that it has a part of.
    pub stages: [String; 2],
    /// How many layers it has a part of.
    pub layers: usize,
    /// The parts of the program that are in it.
    pub parts: Vec<usize>,
    /// Whether its graphs share weights, which are stored once.
    pub shared_weights: bool,
    /// Its graphs, in the order in which they are compiled.
    #[serde(skip)]
    pub(crate) planned: Vec<Planned>,
}

/// Lays programs out for sessions of `context` rows, the text first, then towers, which are loaded when they are needed and do not count beside it; or says in
/// numbers why they do not fit.
pub fn budget(programs: &[Wanted<'_>], context: usize, options: &NpuOptions) -> Result<Budget, String> {
    let Some((text, towers)) = programs.split_first() else { return Err("there is no program to lay out".into()) };
    let rows = all_rows(text.pieces);
    if text.pieces.iter().any(|piece| piece.rows.is_empty()) || rows.is_empty() {
        return Err("there are no rows that its graphs could take: what reads prompts there needs --prefill".into());
    }
    if rows[0] == 0 || context == 0 {
        return Err(format!("graphs of {rows:?} rows for a context of {context} are impossible"));
    }
    let limits = options.limits.unwrap_or(Limits::of(options.arch));
    let lay_out = |rows: &[usize]| {
        let kept: Vec<Vec<usize>> = text.pieces.iter().map(|piece| common_rows(piece, rows)).collect();
        let pieces: Vec<Piece<'_>> = text.pieces.iter().zip(&kept).map(|(piece, rows)| Piece { rows, ..*piece }).collect();
        let text = Wanted { pieces: &pieces, ..*text };
        let kept = kv_sizes(context, rows, options.kv);
        let contexts = |wanted: &Wanted<'_>| Layout::new(wanted, kept, options, limits)?.contexts();
        let contexts = [text].iter().chain(towers).map(contexts).collect::<Result<Vec<_>, _>>()?;
        whole(text, programs, contexts, context, options, limits)
    };
    let mut plan = lay_out(&rows)?;
    let loaded = plan.graphs_of(text.name);
    let Some(most) = limits.risky_graphs.filter(|&most| loaded >= most) else { return Ok(plan) };
    let danger = format!("{loaded} graphs at once: from {most} on the heap of {} may be exhausted, which restarts the phone", options.arch);
    if options.allow_risky {
        plan.notes.push(danger);
        return Ok(plan);
    }
    let mut single = lay_out(&rows[..1])?;
    let reads_only = |piece: &Piece<'_>| !piece.rows.contains(&rows[0]);
    if rows.len() == 1 || text.pieces.iter().any(reads_only) || single.graphs_of(text.name) >= most {
        return Err(format!("{danger}: use larger graphs, or --allow-risky"));
    }
    single.notes.push(format!(
        "graphs of {} rows only, prompts go through them row by row; with those of {:?} rows there would be {danger} (--allow-risky)",
        rows[0],
        &rows[1..]
    ));
    Ok(single)
}

/// The whole plan of programs whose contexts are known.
fn whole(
    text: Wanted<'_>,
    programs: &[Wanted<'_>],
    contexts: Vec<Vec<PlannedContext>>,
    context: usize,
    options: &NpuOptions,
    limits: Limits,
) -> Result<Budget, String> {
    let (contexts, rows) = (contexts.concat(), all_rows(text.pieces));
    // A graph's inputs lie in the address space of its context.
    if let Some(large) = contexts.iter().find(|c| c.bytes.saturating_add(c.slot_bytes) > limits.context_bytes) {
        return Err(format!(
            "context `{}` has {} bytes of weights, and keys and values of {context} rows take {} more; together a context holds {}: use a smaller --context, or --kv ring",
            large.name, large.bytes, large.slot_bytes, limits.context_bytes
        ));
    }
    let sizes = kv_sizes(context, &rows, options.kv);
    let pieces = programs.iter().flat_map(|wanted| wanted.pieces);
    let mut host: Vec<(&Name, u64)> = pieces.flat_map(|piece| group::host_weights(piece.program)).collect();
    host.sort_unstable();
    host.dedup();
    let part_bytes = part_bytes(options, limits);
    let per_token = per_token(text.pieces, part_bytes, sizes).map_err(|error| error.to_string())?;
    let per_token = per_token.into_iter().flatten().reduce(|all, piece| all + piece);
    Ok(Budget {
        arch: options.arch.to_string(),
        limits,
        rows,
        context: sizes.context,
        ring: sizes.ring,
        graphs: contexts.iter().map(|context| context.graphs).sum(),
        bytes: contexts.iter().map(|context| context.bytes).sum(),
        host_bytes: host.iter().map(|(_, bytes)| bytes).sum(),
        per_token,
        contexts,
        notes: Vec::new(),
        part_bytes,
    })
}

impl Budget {
    fn graphs_of(&self, program: &str) -> usize {
        self.contexts.iter().filter(|context| context.program == program).map(|context| context.graphs).sum()
    }
}

/// The rows of a piece that are among `rows`, rising.
pub(crate) fn common_rows(piece: &Piece<'_>, rows: &[usize]) -> Vec<usize> {
    all_rows(&[*piece]).into_iter().filter(|own| rows.contains(own)).collect()
}

/// What a token takes of each piece: nothing of a tower, which has no slots, and of what reads only.
pub(crate) fn per_token(pieces: &[Piece<'_>], part_bytes: u64, sizes: Sizes) -> Result<Vec<Option<PerToken>>, DeviceError> {
    let is_text = pieces.iter().any(|piece| !piece.program.slots.is_empty());
    let writes = |piece: &Piece<'_>| is_text && piece.rows.contains(&1);
    pieces.iter().map(|piece| writes(piece).then(|| PerToken::of(piece.program, part_bytes, sizes)).transpose()).collect()
}

/// Most bytes of weights in one graph: it lies in a context with whatever else.
fn part_bytes(options: &NpuOptions, limits: Limits) -> u64 {
    options.part_bytes.min(limits.context_bytes)
}

/// How long the KV slots of graphs are that sessions of `context` rows and calls of up to the last of `rows` need.
pub(crate) fn kv_sizes(context: usize, rows: &[usize], kv: Kv) -> Sizes {
    let ring = rows.last().copied().filter(|_| kv == Kv::Ring);
    let context = if ring.is_some() { context } else { context.next_multiple_of(crate::lower::CONTEXT_STEP) };
    Sizes { rows: 0, context, ring, taps: false }
}

fn numbers(weight: &Weight) -> u64 {
    weight.shape.iter().fold(1, |n, &d| n.saturating_mul(d as u64))
}

/// Bytes of a weight as a constant of a graph.
fn graph_bytes(weight: &Weight) -> u64 {
    let (count, columns) = (numbers(weight), weight.shape.last().copied().unwrap_or(1).max(1));
    match weight.encoding {
        Encoding::I8Row if columns % QUANTISED_STEP as usize == 0 => count + 4 * (count / columns as u64),
        Encoding::Block(b) if b.quants == Quants::I4 && !b.min && columns % b.block == 0 => count / 2 + 4 * (count / b.block as u64),
        _ => 2 * count,
    }
}

/// Bytes of a weight as the host keeps it.
fn stored_bytes(weight: &Weight) -> u64 {
    let columns = weight.shape.last().copied().unwrap_or(1).max(1);
    row_bytes(weight) * (numbers(weight) / columns as u64)
}

/// Bytes of a row of it.
pub(crate) fn row_bytes(weight: &Weight) -> u64 {
    let columns = weight.shape.last().copied().unwrap_or(1).max(1);
    weight.encoding.row_bytes(columns).map_or(0, |r| (r.data + r.scale + r.min) as u64)
}
