//! What a template may use: steps, memory, depth.
//!
//! Templates come from strangers. Every node that is evaluated, every item of a loop and every few bytes that an operator, filter or method looks at
//! cost a step, and steps only ever shrink: a render that goes on for ever ends at a place that does not depend on the machine or its load. Every text,
//! list and dict is paid for by its size before it is made, and gives its price back when it is dropped ([`Paid`]). What an operation needs only while
//! it works is given back at the end of the expression or statement ([`Budget::give_back`]).

use super::error::{Failure, Result};
use super::value::Value;
use std::cell::Cell;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

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
/// How many bytes are looked at one by one for one step.
const BYTES_PER_STEP: u64 = 8;
/// How many bytes are copied for one step.
const COPIED_BYTES_PER_STEP: u64 = 128;
/// The most steps for any conversation: a second or two. A published template takes 254 million for 3,001 messages.
const MAX_STEPS: u64 = 400_000_000;
/// What writing all digits of a number with a fraction takes.
pub(super) const FLOAT_STEPS: usize = 1_000;
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
    /// The sizes of everything that there is at once.
    pub(crate) bytes: u64,
}

impl Limits {
    /// For a conversation of so many messages, JSON values and bytes of text. Some published templates look at all other messages for each message: they
    /// take about 8 steps for each pair.
    pub(crate) fn for_conversation(messages: u64, values: u64, bytes: u64) -> Self {
        let pairs = messages.saturating_mul(messages);
        let steps = [values.saturating_mul(4_000), bytes.saturating_mul(16), pairs.saturating_mul(20)]
            .into_iter()
            .fold(2_000_000, u64::saturating_add);
        Self { steps: steps.min(MAX_STEPS), bytes: (96u64 << 20).saturating_add(bytes.saturating_mul(4)) }
    }
}

/// What is left of the limits.
pub(super) struct Budget<'t> {
    limits: Limits,
    steps: u64,
    /// The sizes of all that there is, what is needed for a while included.
    used: Rc<Cell<u64>>,
    /// The sizes of what is needed for a while.
    scratch: u64,
    depth: usize,
    cancel: &'t AtomicBool,
}

/// A size that is given back when this is dropped.
#[derive(Debug, Default)]
pub(super) struct Paid {
    bytes: u64,
    used: Option<Rc<Cell<u64>>>,
}

impl Drop for Paid {
    fn drop(&mut self) {
        if let Some(used) = &self.used {
            used.set(used.get().saturating_sub(self.bytes));
        }
    }
}

/// Something and what was paid for it.
#[derive(Debug)]
pub(super) struct Kept<T> {
    it: T,
    _paid: Paid,
}

impl<T> Deref for Kept<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.it
    }
}

impl<'t> Budget<'t> {
    pub(super) fn new(limits: Limits, cancel: &'t AtomicBool) -> Self {
        Self { limits, steps: limits.steps, used: Rc::default(), scratch: 0, depth: 0, cancel }
    }

    /// Takes steps.
    pub(super) fn steps(&mut self, count: usize) -> Result<()> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(Failure::Cancelled);
        }
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

    /// Takes the steps for copying so many bytes.
    pub(super) fn copy(&mut self, bytes: usize) -> Result<()> {
        self.steps((bytes as u64 / COPIED_BYTES_PER_STEP) as usize + 1)
    }

    /// Takes memory that is needed for a while, and the steps for filling it.
    pub(super) fn allocate(&mut self, bytes: usize) -> Result<()> {
        self.take(bytes as u64)?;
        self.scratch += bytes as u64;
        self.copy(bytes)
    }

    /// Takes the memory for so many things of a size.
    pub(super) fn allocate_many(&mut self, count: usize, bytes: usize) -> Result<()> {
        self.allocate(count.saturating_mul(bytes))
    }

    /// Takes memory. `paid` gives it back.
    pub(super) fn pay(&mut self, paid: &mut Paid, bytes: usize) -> Result<()> {
        self.take(bytes as u64)?;
        self.steps(1)?;
        paid.bytes += bytes as u64;
        if paid.used.is_none() {
            paid.used = Some(self.used.clone());
        }
        Ok(())
    }

    /// Something that takes so many bytes, for as long as anything refers to it.
    pub(super) fn keep<T>(&mut self, it: T, bytes: usize) -> Result<Rc<Kept<T>>> {
        let mut paid = Paid::default();
        self.pay(&mut paid, bytes)?;
        Ok(Rc::new(Kept { it, _paid: paid }))
    }

    fn take(&mut self, bytes: u64) -> Result<()> {
        match self.used.get().checked_add(bytes) {
            Some(used) if used <= self.limits.bytes => self.used.set(used),
            _ => return Err(Failure::Limit(format!("{} MiB of memory", self.limits.bytes >> 20))),
        }
        Ok(())
    }

    /// How much memory is needed for a while now.
    pub(super) fn scratch(&self) -> u64 {
        self.scratch
    }

    /// Gives back what was taken for a while since [`Budget::scratch`] was this.
    pub(super) fn give_back(&mut self, before: u64) {
        self.used.set(self.used.get().saturating_sub(self.scratch - before));
        self.scratch = before;
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
