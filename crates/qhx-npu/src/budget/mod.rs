//! Plans which parts of a program go into which context, before anything is compiled; a program that does not fit is rejected with the numbers.
//! `Device::prepare` writes the contexts planned here, and no others.
//!
//! Sizes are those of the weights as graphs store them; what the library adds (code, scratch) is a few per cent more.

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

/// What a processor and its runtime can load in one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Bytes of one context: it shares the DSP's 32-bit address space with other data.
    pub context_bytes: u64,
    /// Contexts loaded at the same time.
    pub contexts: usize,
    /// Number of loaded graphs from which the DSP's heap may be exhausted, which restarts the phone; absent: no such limit is known.
    pub risky_graphs: Option<usize>,
    /// Fast memory (VTCM), shared by all graphs.
    pub vtcm_mb: u32,
}

impl Limits {
    /// The known limits of a processor.
    pub fn of(arch: Arch) -> Self {
        // On v81 seven contexts with 64 graphs are known to exhaust the heap.
        let risky_graphs = (arch == Arch::V81).then_some(64);
        Self { context_bytes: 3_500_000_000, contexts: 8, risky_graphs, vtcm_mb: 8 }
    }
}

/// A program to plan for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Its name, with which the names of its contexts begin.
    pub name: &'a str,
    /// The whole program, or the pieces of it that run on this processor, in order. Their rows are the row counts of the graphs: for text 1 for decode and more for
    /// prefill, for a tower all rows of an image or sound.
    pub pieces: &'a [Piece<'a>],
}

/// The planned contexts and their contents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// `v79`, `v81`.
    pub arch: String,
    /// The limits of the processor.
    pub limits: Limits,
    /// Row counts of the text program's graphs.
    pub rows: Vec<usize>,
    /// Rows of the KV cache; for ring buffers, the most rows that attention sees.
    pub context: usize,
    /// For ring buffers: the most rows of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ring: Option<usize>,
    /// The contexts, in execution order.
    pub contexts: Vec<PlannedContext>,
    /// Graphs of all contexts.
    pub graphs: usize,
    /// Bytes of all contexts.
    pub bytes: u64,
    /// Bytes that stay in host memory: tables and experts.
    pub host_bytes: u64,
    /// What decoding one token takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_token: Option<PerToken>,
    /// Where the plan differs from what was requested and why, and its risks.
    pub notes: Vec<String>,
    /// The most bytes of weights in one graph.
    #[serde(skip)]
    pub(crate) part_bytes: u64,
}

/// One context.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedContext {
    /// The program.
    pub program: String,
    /// Its file's name without `.bin`: `text_0`, `text_decode_0`, `text_prefill128_0`, `vision_0`.
    pub name: String,
    /// Bytes of its weights.
    pub bytes: u64,
    /// Bytes of keys and values that are passed to its graphs.
    pub slot_bytes: u64,
    /// Number of graphs.
    pub graphs: usize,
    /// The first and last stage that it covers, wholly or in part.
    pub stages: [String; 2],
    /// Number of layers that it covers, wholly or in part.
    pub layers: usize,
    /// The parts of the program that are in it.
    pub parts: Vec<usize>,
    /// Whether its graphs share weights that are stored once.
    pub shared_weights: bool,
    /// Its graphs, in compilation order.
    #[serde(skip)]
    pub(crate) planned: Vec<Planned>,
}

/// Plans contexts for sessions of `context` rows: the text program first, then towers, which are loaded when needed and do not count towards its limits. The
/// error says, with numbers, why they do not fit.
pub fn budget(programs: &[Wanted<'_>], context: usize, options: &NpuOptions) -> Result<Budget, String> {
    let Some((text, towers)) = programs.split_first() else { return Err("there is no program to plan for".into()) };
    let rows = all_rows(text.pieces);
    if text.pieces.iter().any(|piece| piece.rows.is_empty()) || rows.is_empty() {
        return Err("there are no row counts for its graphs: a part that runs only prefill needs those of prefill".into());
    }
    if rows[0] == 0 || context == 0 {
        return Err(format!("graphs of {rows:?} rows for a context of {context} rows are impossible: both must be at least 1"));
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
    let danger =
        format!("{loaded} graphs are loaded at once; {most} or more may exhaust the heap of {}, which restarts the phone", options.arch);
    if options.allow_risky {
        plan.notes.push(danger);
        return Ok(plan);
    }
    let mut single = lay_out(&rows[..1])?;
    let prefill_only = |piece: &Piece<'_>| !piece.rows.contains(&rows[0]);
    if rows.len() == 1 || text.pieces.iter().any(prefill_only) || single.graphs_of(text.name) >= most {
        return Err(format!("{danger}: use fewer, larger graphs, or accept the risk"));
    }
    single.notes.push(format!(
        "only graphs of row count {} are built, so prompts are processed row by row; with row counts {:?} as well, {danger} (accepting the risk builds them all the same)",
        rows[0],
        &rows[1..]
    ));
    Ok(single)
}

/// The plan for programs whose contexts are known.
fn whole(
    text: Wanted<'_>,
    programs: &[Wanted<'_>],
    contexts: Vec<Vec<PlannedContext>>,
    context: usize,
    options: &NpuOptions,
    limits: Limits,
) -> Result<Budget, String> {
    let (contexts, rows) = (contexts.concat(), all_rows(text.pieces));
    // A graph's inputs are in the address space of its context.
    if let Some(large) = contexts.iter().find(|c| c.bytes.saturating_add(c.slot_bytes) > limits.context_bytes) {
        return Err(format!(
            "context `{}` has {} bytes of weights, and the keys and values of {context} rows take {} more, but a context holds {} in total: use a smaller context, or keep only the latest rows (a ring)",
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

/// The row counts of a piece that are among `rows`, in ascending order.
pub(crate) fn common_rows(piece: &Piece<'_>, rows: &[usize]) -> Vec<usize> {
    all_rows(&[*piece]).into_iter().filter(|own| rows.contains(own)).collect()
}

/// What decoding a token takes in each piece: `None` for towers, which have no slots, and for pieces that only run prefill.
pub(crate) fn per_token(pieces: &[Piece<'_>], part_bytes: u64, sizes: Sizes) -> Result<Vec<Option<PerToken>>, DeviceError> {
    let is_text = pieces.iter().any(|piece| !piece.program.slots.is_empty());
    let decodes = |piece: &Piece<'_>| is_text && piece.rows.contains(&1);
    pieces.iter().map(|piece| decodes(piece).then(|| PerToken::of(piece.program, part_bytes, sizes)).transpose()).collect()
}

/// The most bytes of weights in one graph, which must fit into a context.
fn part_bytes(options: &NpuOptions, limits: Limits) -> u64 {
    options.part_bytes.min(limits.context_bytes)
}

/// The KV sizes of graphs for sessions of `context` rows and calls of up to the last of `rows`.
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

/// Bytes of one of its rows.
pub(crate) fn row_bytes(weight: &Weight) -> u64 {
    let columns = weight.shape.last().copied().unwrap_or(1).max(1);
    weight.encoding.row_bytes(columns).map_or(0, |r| (r.data + r.scale + r.min) as u64)
}
