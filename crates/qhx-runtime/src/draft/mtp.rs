//! Drafts of the model itself: multi-token prediction, by a program of its bundle.

use crate::{
    Error, Model, acceptance::Acceptance, draft_program::Hidden, hidden_rows::KEPT_ROWS, options::MOST_DRAFTS, sequence::Sequence,
};
use qhx_ir::State;
use std::time::{Duration, Instant};

/// Rows that are read before the first guess, for each token that the answer may still have: reading them must not take long beside writing these.
const ROWS_PER_TOKEN: usize = 2;

/// Follows one sequence. Its state begins with the last rows before the first guess: what is missing before them makes guesses worse, and nothing wrong.
pub(crate) struct Mtp {
    model: Model,
    /// With the number of the text program's load that it goes with.
    state: Option<(u64, Box<dyn State>)>,
    /// The number of the state's first row.
    first: usize,
    /// Rows of the state that were read from the text; what is behind them was chained.
    read: usize,
}

/// What was guessed, and how much of the time that it took was for getting ready: says nothing about the guesses to come.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Guess {
    pub(crate) ids: Vec<u32>,
    pub(crate) getting_ready: Duration,
}

impl Mtp {
    /// For one sequence of a model; none where it has no program for it.
    pub(crate) fn new(model: &Model) -> Option<Self> {
        model.draft_program()?;
        Some(Self { model: model.clone(), state: None, first: 0, read: 0 })
    }

    /// At most `most` ids that may follow the last row of a sequence, the only one that is not computed, in an answer of at most `left` more tokens.
    pub(crate) fn propose(&mut self, sequence: &Sequence, most: usize, left: usize) -> Result<Guess, Error> {
        let computed = sequence.rows.len().saturating_sub(1);
        let (Some(draft), Some(hidden)) = (self.model.draft_program(), &sequence.hidden) else { return Ok(Guess::default()) };
        if hidden.end() != computed || hidden.first() == computed || most == 0 {
            return Ok(Guess::default());
        }
        let started = Instant::now();
        let (mut loaded, loads) = self.model.loaded_draft(draft)?;
        let next = self.first + self.read;
        let is_of_this_load = self.state.as_ref().is_some_and(|(own, _)| *own == loads);
        let begins = !is_of_this_load || self.first >= computed || next > computed || next < hidden.first();
        if begins {
            let few = KEPT_ROWS.min(ROWS_PER_TOKEN * left).max(1);
            (self.first, self.read) = (hidden.first().max(computed.saturating_sub(few)), 0);
            self.state = Some((loads, loaded.new_state(self.model.context())?));
        }
        let Some((_, mut state)) = self.state.take() else { return Ok(Guess::default()) };
        // The last row is read again where none is new.
        let from = (self.first + self.read).min(computed - 1);
        state.truncate(from - self.first)?;
        let ids = sequence.rows.ids();
        let guessed =
            loaded.read(&mut *state, &sequence.rows, from..computed, &ids[from + 1..=computed], Hidden::Text(hidden.from(from)))?;
        let mut guess = Guess { ids: vec![guessed], getting_ready: Duration::ZERO };
        while guess.ids.len() < most {
            let row = computed + guess.ids.len() - 1;
            let last = guess.ids.len() - 1;
            let id = loaded.read(&mut *state, &sequence.rows, row..row + 1, &guess.ids[last..], Hidden::Chained)?;
            guess.ids.push(id);
        }
        // The first time everything is slow; later, more rows than those of a step were left unread for a while.
        if begins || computed - from > MOST_DRAFTS + 1 {
            guess.getting_ready = started.elapsed();
        }
        // After a failure it begins anew.
        (self.state, self.read) = (Some((loads, state)), computed - self.first);
        Ok(guess)
    }

    /// The share of guesses that is thought to be right, before any of this answer was tried.
    pub(crate) fn acceptance(&self) -> Acceptance {
        self.model.draft_program().map_or_else(Acceptance::default, |draft| {
            let earlier = &mut draft.lock().acceptance;
            // Where nothing is tried any more, something is now and then.
            earlier.forget_a_little();
            Acceptance::expecting(earlier.share())
        })
    }

    /// Of so many guesses the first `accepted` were right.
    pub(crate) fn learn(&self, drafted: usize, accepted: usize) {
        if let Some(draft) = self.model.draft_program() {
            draft.lock().acceptance.learn(drafted, accepted);
        }
    }
}
