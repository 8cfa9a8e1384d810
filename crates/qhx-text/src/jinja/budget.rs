//! What a template may use: steps, memory, depth.
//!
//! Templates come from strangers. Every node that is evaluated, every item of a loop and every few bytes that an operator, filter or method looks at
//! cost a step; every text, list and dict is paid for by its size before it is made. Both budgets only ever shrink, so a render that goes on for ever, or
//! that grows for ever, ends at a place that does not depend on the machine or its load.

use super::error::{Failure, Result};
use super::value::Value;

/// Largest template that is compiled. Published ones have up to about 40 kB.
pub(super) const MAX_SOURCE_BYTES: usize = 1 << 20;
/// How deep blocks and brackets may be nested in a template. Published ones stay below 20. Chains of operators, filters, attributes and `elif`s are not
/// nested, however long they are.
pub(super) const MAX_NESTING: usize = 100;
/// How deep rendering may be nested: blocks and brackets, and those of the macros that are being called. A level takes about a kilobyte of stack.
pub(super) const MAX_CALL_DEPTH: usize = 400;
/// How deep lists and dicts may be nested in each other. JSON from outside has at most 128 levels.
pub(super) const MAX_VALUE_DEPTH: u16 = 200;
/// Longest prompt that a template may write.
pub(super) const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// How many bytes are looked at, copied or made for one step.
const BYTES_PER_STEP: u64 = 8;
/// What writing all digits of a number with a fraction takes.
pub(super) const FLOAT_STEPS: usize = 400;
/// What an item of a list takes.
pub(super) const ITEM_BYTES: usize = size_of::<Value>();
/// What an entry of a dict takes, its place in the index included.
pub(super) const ENTRY_BYTES: usize = 160;
/// What any object takes beside its contents.
pub(super) const OBJECT_BYTES: usize = 64;

/// How much one render may do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) steps: u64,
    /// The sizes of everything that is made, added up; what is dropped on the way counts too.
    pub(crate) bytes: u64,
}

impl Limits {
    /// For a conversation of so many JSON values and bytes of text. Published templates take below a twentieth of it.
    pub(crate) fn for_conversation(values: u64, bytes: u64) -> Self {
        let steps = 2_000_000u64.saturating_add(values.saturating_mul(4_000)).saturating_add(bytes.saturating_mul(16));
        Self { steps, bytes: (128u64 << 20).saturating_add(bytes.saturating_mul(16)) }
    }
}

/// What is left of the limits.
pub(super) struct Budget {
    limits: Limits,
    steps: u64,
    bytes: u64,
    depth: usize,
}

impl Budget {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, steps: limits.steps, bytes: limits.bytes, depth: 0 }
    }

    /// Takes steps.
    pub(super) fn steps(&mut self, count: usize) -> Result<()> {
        match self.steps.checked_sub(count as u64) {
            Some(left) => self.steps = left,
            None => return Err(Failure::Limit(format!("{} steps", self.limits.steps))),
        }
        Ok(())
    }

    /// Takes the steps for looking at so many bytes.
    pub(super) fn work(&mut self, bytes: usize) -> Result<()> {
        self.steps((bytes as u64 / BYTES_PER_STEP) as usize + 1)
    }

    /// Takes memory, and the steps for filling it.
    pub(super) fn allocate(&mut self, bytes: usize) -> Result<()> {
        match self.bytes.checked_sub(bytes as u64) {
            Some(left) => self.bytes = left,
            None => return Err(Failure::Limit(format!("{} MiB of memory", self.limits.bytes >> 20))),
        }
        self.work(bytes)
    }

    /// Takes the memory for so many things of a size.
    pub(super) fn allocate_many(&mut self, count: usize, bytes: usize) -> Result<()> {
        self.allocate(count.saturating_mul(bytes))
    }

    /// One level down; [`Budget::leave`] comes back up.
    pub(super) fn enter(&mut self) -> Result<()> {
        self.depth += 1;
        if self.depth > MAX_CALL_DEPTH { Err(Failure::Limit(format!("{MAX_CALL_DEPTH} levels of nested calls"))) } else { Ok(()) }
    }

    pub(super) fn leave(&mut self) {
        self.depth -= 1;
    }
}
