//! What was computed and is kept for requests that begin alike.
//!
//! A kept prefix is a list of rows and a state that was forked from the session which computed them. States share the memory of what they have in common, so a prefix costs what no
//! other holds. A program without recurrent slots can start from any row of a kept prefix; one with them only from its end.

use crate::{
    Error,
    rows::{MediumSpan, Rows},
};
use qhx_ir::{Program, State};

/// Kept prefixes.
pub(super) struct Prefixes {
    all: Vec<Prefix>,
    /// Whether a state can be used only at the row at which it was kept.
    recurrent: bool,
    /// Rises with every use.
    clock: u64,
}

struct Prefix {
    rows: Rows,
    state: Box<dyn State>,
    epoch: usize,
    scope: u64,
    used: u64,
}

/// A state to start from.
pub(super) struct Start {
    pub(super) state: Box<dyn State>,
    pub(super) rows: usize,
}

impl Prefixes {
    pub(super) fn new(program: &Program) -> Self {
        Self { all: Vec::new(), recurrent: program.slots.values().any(|slot| slot.is_recurrent()), clock: 0 }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// How many rows of a prompt a state with these rows could save; its last row is always computed, for its logits.
    pub(super) fn shared(&self, rows: &Rows, ids: &[u32], media: &[MediumSpan]) -> usize {
        let common = rows.common_prefix(ids, media);
        match self.recurrent {
            true if common < rows.len() || rows.len() >= ids.len() => 0,
            true => rows.len(),
            false => common.min(ids.len() - 1),
        }
    }

    /// How many rows of a prompt are there.
    pub(super) fn longest(&self, ids: &[u32], media: &[MediumSpan], epoch: usize, scope: u64) -> usize {
        self.best(ids, media, epoch, scope).map_or(0, |best| best.1)
    }

    /// The prefix that saves the most rows of a prompt, and how many.
    fn best(&self, ids: &[u32], media: &[MediumSpan], epoch: usize, scope: u64) -> Option<(usize, usize)> {
        let own = self.all.iter().enumerate().filter(|(_, prefix)| (prefix.epoch, prefix.scope) == (epoch, scope));
        let shared = own.map(|(place, prefix)| (place, self.shared(&prefix.rows, ids, media)));
        shared.filter(|&(_, rows)| rows > 0).max_by_key(|&(_, rows)| rows)
    }

    /// A state that holds as many rows of a prompt as any.
    pub(super) fn start(&mut self, ids: &[u32], media: &[MediumSpan], epoch: usize, scope: u64) -> Option<Start> {
        let (place, rows) = self.best(ids, media, epoch, scope)?;
        self.clock += 1;
        self.all[place].used = self.clock;
        let start = fork(&*self.all[place].state, rows);
        // A device may not be able to go back so far, or to copy a state now.
        start.ok().map(|state| Start { state, rows })
    }

    /// The states that hold nothing but the first rows of a prompt, fewer than `below`, by rising length.
    pub(super) fn within(&self, ids: &[u32], media: &[MediumSpan], epoch: usize, below: usize) -> Vec<&dyn State> {
        let own = self.all.iter().filter(|prefix| (prefix.epoch, prefix.scope) == (epoch, 0) && prefix.rows.len() < below);
        let within = own.filter(|prefix| prefix.rows.common_prefix(ids, media) == prefix.rows.len());
        let mut states: Vec<&dyn State> = within.map(|prefix| &*prefix.state).collect();
        states.sort_by_key(|state| state.len());
        states
    }

    /// Keeps what a session has computed so far: the first rows of `rows`, as many as `state` has.
    pub(super) fn keep(&mut self, rows: &Rows, state: &dyn State, epoch: usize, scope: u64) -> Result<(), Error> {
        let mut rows = rows.clone();
        rows.truncate(state.len());
        if rows.len() == 0 {
            return Ok(());
        }
        self.clock += 1;
        let (clock, recurrent) = (self.clock, self.recurrent);
        let same_place = |prefix: &Prefix| (prefix.epoch, prefix.scope) == (epoch, scope);
        let common = |prefix: &Prefix| prefix.rows.common_prefix(rows.ids(), rows.media());
        // It is there, or something is that can do what it can.
        let covers =
            |prefix: &&mut Prefix| same_place(prefix) && common(prefix) == rows.len() && (!recurrent || prefix.rows.len() == rows.len());
        if let Some(prefix) = self.all.iter_mut().find(covers) {
            prefix.used = clock;
            return Ok(());
        }
        // What it can do better is not needed any more.
        self.all.retain(|prefix| recurrent || !same_place(prefix) || common(prefix) < prefix.rows.len());
        self.all.push(Prefix { rows, state: state.fork()?, epoch, scope, used: clock });
        Ok(())
    }

    /// Gives up the least recently used one. Whether there was any.
    pub(super) fn evict(&mut self) -> bool {
        let oldest = self.all.iter().enumerate().min_by_key(|(_, prefix)| prefix.used).map(|(place, _)| place);
        oldest.map(|place| self.all.remove(place)).is_some()
    }

    /// Bytes that all of them refer to, for a device that does not count what states share.
    pub(super) fn bytes(&self) -> u64 {
        self.all.iter().map(|prefix| prefix.state.bytes()).sum()
    }

    /// Whether recurrent slots limit where a state can be used.
    pub(super) fn are_recurrent(&self) -> bool {
        self.recurrent
    }

    /// Forgets all: their device is gone.
    pub(super) fn clear(&mut self) {
        self.all.clear();
    }
}

/// A copy of a state that holds its first `rows` rows.
pub(super) fn fork(state: &dyn State, rows: usize) -> Result<Box<dyn State>, Error> {
    let mut fork = state.fork()?;
    if rows < fork.len() {
        fork.truncate(rows)?;
    }
    Ok(fork)
}
