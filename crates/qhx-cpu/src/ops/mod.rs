//! The steps of a compiled program: each holds what it needs, resolved at load, and runs on one call's memory without allocating.
//!
//! A step cuts its output into units by shape alone and hands them to the pool; small ones are done by the caller itself. Row-wise steps also compute
//! padding rows, whose numbers nobody reads; steps that mix rows go segment by segment and leave padding rows zero.

pub(crate) mod attend;
pub(crate) mod conv;
pub(crate) mod elementwise;
pub(crate) mod experts;
pub(crate) mod gated_delta;
pub(crate) mod hadamard;
pub(crate) mod linear;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod route;
pub(crate) mod rows;
pub(crate) mod short_conv;
pub(crate) mod shortlist;

use crate::{
    kernels::{Instructions, map::Binary},
    memory::Memory,
    pool::Pool,
    state::CpuState,
    work::{Chunks, for_each},
};
use qhx_ir::{Bindings, DeviceError, Segment};
use std::{
    collections::BTreeSet,
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
};

/// One step.
#[derive(Debug)]
pub(crate) enum Step {
    Embed(rows::Embed),
    Interpolate(rows::Interpolate),
    Prepare(linear::Prepare),
    Linear(linear::Linear),
    Norm(norm::NormRows),
    Hadamard(hadamard::HadamardRows),
    RopeTable(rope::Table),
    Rope(rope::Rope),
    StoreKv(attend::Store),
    Attend(Box<attend::Attend>),
    ShortConv(Box<short_conv::ShortConv>),
    GatedDelta(Box<gated_delta::GatedDelta>),
    Route(route::Route),
    Experts(Box<experts::Experts>),
    Unary(elementwise::UnaryStep),
    Binary(elementwise::BinaryStep),
    ScaleBy(elementwise::ScaleBy),
    Copy(rows::Copy),
    Gather(rows::Gather),
    Scatter(rows::Scatter),
    Conv2d(Box<conv::Conv2d>),
    Pool(conv::Pool),
}

/// What every step of a call has at hand.
#[derive(Clone, Copy)]
pub(crate) struct Run<'f> {
    pub(crate) pool: &'f Pool,
    pub(crate) instructions: Instructions,
    pub(crate) bindings: Bindings,
    /// Whether only the largest numbers of the outputs are wanted.
    pub(crate) largest_only: bool,
    /// Bytes of weights read in this call.
    pub(crate) weight_bytes: &'f AtomicU64,
}

/// One call as the steps see it.
pub(crate) struct Frame<'f, 's> {
    pub(crate) run: Run<'f>,
    pub(crate) memory: Memory<'f>,
    pub(crate) segments: &'f mut [Segment<'s>],
    /// For each step with experts: how many rows each expert got.
    pub(crate) expert_rows: &'f mut [Vec<usize>],
}

impl Step {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) -> Result<(), DeviceError> {
        match self {
            Self::Embed(step) => step.run(frame)?,
            Self::Interpolate(step) => step.run(frame)?,
            Self::Prepare(step) => step.run(frame),
            Self::Linear(step) => step.run(frame),
            Self::Norm(step) => step.run(frame),
            Self::Hadamard(step) => step.run(frame),
            Self::RopeTable(step) => step.run(frame),
            Self::Rope(step) => step.run(frame),
            Self::StoreKv(step) => step.run(frame),
            Self::Attend(step) => step.run(frame),
            Self::ShortConv(step) => step.run(frame),
            Self::GatedDelta(step) => step.run(frame),
            Self::Route(step) => step.run(frame),
            Self::Experts(step) => step.run(frame)?,
            Self::Unary(step) => step.run(frame),
            Self::Binary(step) => step.run(frame),
            Self::ScaleBy(step) => step.run(frame),
            Self::Copy(step) => step.run(frame),
            Self::Gather(step) => step.run(frame)?,
            Self::Scatter(step) => step.run(frame)?,
            Self::Conv2d(step) => step.run(frame),
            Self::Pool(step) => step.run(frame),
        }
        Ok(())
    }

    /// What it does, for people.
    pub(crate) fn kind(&self) -> String {
        let kind = match self {
            Self::Linear(linear) => {
                let rows: usize = linear.products.iter().map(|product| product.weight.rows).sum();
                let encodings: BTreeSet<String> = linear.products.iter().map(|product| product.weight.encoding.to_string()).collect();
                let encodings: Vec<String> = encodings.into_iter().collect();
                return format!("product {rows} x {}, {} by {:?}", linear.columns, encodings.join(" and "), linear.form);
            }
            Self::Experts(experts) => {
                return format!(
                    "experts {} x {}, {} by {:?}",
                    experts.gate.rows / experts.experts,
                    experts.gate.columns,
                    experts.gate.encoding,
                    experts.form
                );
            }
            Self::Embed(_) => "look up rows",
            Self::Interpolate(_) => "interpolate",
            Self::Prepare(_) => "rows to their form",
            Self::Norm(_) => "norm",
            Self::Hadamard(_) => "hadamard",
            Self::RopeTable(_) => "rotary table",
            Self::Rope(_) => "rotary",
            Self::StoreKv(_) => "store keys and values",
            Self::Attend(_) => "attention",
            Self::ShortConv(_) => "short convolution",
            Self::GatedDelta(_) => "delta rule",
            Self::Route(_) => "route",
            Self::Unary(_) => "function of numbers",
            Self::Binary(step) => match step.op {
                Binary::Gate(_) => "gate",
                _ => "add or multiply",
            },
            Self::ScaleBy(_) => "scale",
            Self::Copy(_) => "copy",
            Self::Gather(_) => "gather",
            Self::Scatter(_) => "scatter",
            Self::Conv2d(_) => "convolution",
            Self::Pool(_) => "pool",
        };
        kind.to_owned()
    }

    /// Scratch numbers that each thread needs for it.
    pub(crate) fn scratch(&self) -> usize {
        match self {
            Self::Prepare(step) => step.scratch(),
            Self::Linear(step) => step.scratch(),
            Self::Hadamard(step) => step.scratch(),
            Self::Attend(step) => step.scratch(),
            Self::GatedDelta(step) => step.scratch(),
            Self::Experts(step) => step.scratch(),
            Self::Interpolate(step) => step.scratch(),
            Self::Conv2d(step) => step.scratch(),
            _ => 0,
        }
    }
}

impl Run<'_> {
    /// Notes that so many bytes of weights are read.
    pub(crate) fn reads(&self, bytes: usize) {
        self.weight_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Numbers that a unit of cheap work should at least have: a few microseconds.
const UNIT: usize = 16384;

/// Rows of a unit where a row has `numbers` numbers to work on.
fn unit_rows(numbers: usize) -> usize {
    (UNIT / numbers.max(1)).max(1)
}

/// Fills `out`, rows of `width`, in units of several rows; `body` has the first row of its unit and the unit's numbers.
fn for_rows(run: &Run<'_>, out: &mut [f32], width: usize, body: impl Fn(usize, &mut [f32]) + Sync) {
    let rows = unit_rows(width);
    for_each(run.pool, Chunks::new(out, rows * width), &mut [], |unit, part, _| body(unit * rows, part));
}

/// A segment's valid rows in a value of which one row stands for `n` rows of the call.
fn span(segment: &Segment<'_>, n: usize) -> Range<usize> {
    let start = segment.first_row / n;
    start..start + segment.valid_rows.div_ceil(n)
}

/// The state of a segment; the executable has checked that it is one of ours.
fn state<'a>(segment: &'a mut Segment<'_>) -> &'a mut CpuState {
    let state = segment.state.as_deref_mut().and_then(|state| state.downcast_mut());
    state.unwrap_or_else(|| unreachable!("checked: every segment has a state of this device"))
}
