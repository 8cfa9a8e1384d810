//! Drafts of the model itself: multi-token prediction, by a program of its bundle.

use crate::{
    Error, Model,
    acceptance::Acceptance,
    draft_program::{Hidden, LoadedDraft},
    hidden_rows::KEPT_ROWS,
    options::MOST_DRAFTS,
    sequence::Sequence,
};
use qhx_ir::State;
use std::time::{Duration, Instant};

/// What reading one of many rows is thought to take before it was measured, as a share of a step of the text program.
const GUESSED_ROW_COST: f64 = 0.03;
/// Rows that are read at least before the first guess, as far as there are any: with fewer it knows too little.
const LEAST_ROWS: usize = 16;
/// How much a new measurement of it counts.
const WEIGHT: f64 = 0.2;

/// Follows one sequence. Its state begins with the last rows before the first guess: what is missing before them makes guesses worse, and nothing wrong.
pub(crate) struct Mtp {
    model: Model,
    /// Whether it reads the rows of the prompt, too, and not only those from where an answer can afford it.
    pub(crate) begins_at_once: bool,
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
    /// For one sequence of a model; none where it has no program for it. Where it was asked for by name, or has won time before, it begins at once: the program is loaded now, so that no answer waits for that; what fails is tried
    /// again, and told, at the first guess. Elsewhere it must not cost anything before an answer is long enough to afford it.
    pub(crate) fn new(model: &Model, is_named: bool) -> Option<Self> {
        let draft = model.draft_program()?;
        let begins_at_once = is_named || draft.lock().won > 0.0;
        if begins_at_once {
            _ = model.loaded_draft(draft);
        }
        Some(Self { model: model.clone(), begins_at_once, state: None, first: 0, read: 0 })
    }

    /// About the seconds that reading the fewest rows takes, where a step of one row takes `step`.
    pub(crate) fn time_to_begin(&self, step: f64) -> f64 {
        let row_cost = self.model.draft_program().and_then(|draft| draft.lock().row_cost);
        self.least_rows() as f64 * row_cost.unwrap_or(GUESSED_ROW_COST * step)
    }

    /// The rows that it must see before the first guess, as far as there are any.
    fn least_rows(&self) -> usize {
        let is_given_rows = self.model.draft_program().is_some_and(|draft| draft.lock().is_given_rows());
        if is_given_rows { 1 } else { LEAST_ROWS }
    }

    /// At most `most` ids that may follow the last row of a sequence, the only one that is not computed. Before the first guess it reads earlier rows, the latest ones, for at most about `spare` seconds, where a step of one
    /// row takes `step`.
    pub(crate) fn propose(&mut self, sequence: &Sequence, most: usize, spare: f64, step: f64) -> Result<Guess, Error> {
        let computed = sequence.rows.len().saturating_sub(1);
        let (Some(draft), Some(hidden)) = (self.model.draft_program(), &sequence.hidden) else { return Ok(Guess::default()) };
        if hidden.end() != computed || hidden.first() == computed || most == 0 {
            return Ok(Guess::default());
        }
        let known = computed - hidden.first();
        if known < self.least_rows() && !self.begins_at_once {
            return Ok(Guess::default());
        }
        let started = Instant::now();
        let (mut loaded, loads) = self.model.loaded_draft(draft)?;
        if loaded.is_given_rows() {
            let own = self.state.take().filter(|(own, _)| *own == loads).map(|(_, state)| state);
            let (guess, state) = propose_behind_last(&mut loaded, own, sequence, hidden.from(computed - 1), most, started)?;
            self.state = Some((loads, state));
            return Ok(guess);
        }
        let next = self.first + self.read;
        let is_of_this_load = self.state.as_ref().is_some_and(|(own, _)| *own == loads);
        let few = KEPT_ROWS.min((spare / loaded.row_cost.unwrap_or(GUESSED_ROW_COST * step)) as usize);
        let is_behind = computed > next + few.max(MOST_DRAFTS + 1);
        let begins = !is_of_this_load || self.first >= computed || next > computed || next < hidden.first() || is_behind;
        if begins {
            if few < LEAST_ROWS.min(known) {
                return Ok(Guess::default());
            }
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
        let read = computed - from;
        if read > MOST_DRAFTS + 1 {
            let time = started.elapsed().as_secs_f64() / read as f64;
            loaded.row_cost = Some(loaded.row_cost.map_or(time, |mean| mean + WEIGHT * (time.min(2.0 * mean) - mean)));
        }
        while guess.ids.len() < most {
            let row = computed + guess.ids.len() - 1;
            let last = guess.ids.len() - 1;
            let id = loaded.read(&mut *state, &sequence.rows, row..row + 1, &guess.ids[last..], Hidden::Chained)?;
            guess.ids.push(id);
        }
        // The first time everything is slow; later, more rows than those of a step were left unread for a while.
        if begins || read > MOST_DRAFTS + 1 {
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

    /// The seconds that guesses have won in all answers of the model.
    pub(crate) fn won(&self) -> f64 {
        self.model.draft_program().map_or(0.0, |draft| draft.lock().won)
    }

    /// Guesses have won so many seconds.
    pub(crate) fn book(&self, won: f64) {
        if let Some(draft) = self.model.draft_program() {
            draft.lock().won += won;
        }
    }

    /// Of so many guesses the first `accepted` were right.
    pub(crate) fn learn(&self, drafted: usize, accepted: usize) {
        if let Some(draft) = self.model.draft_program() {
            draft.lock().acceptance.learn(drafted, accepted);
        }
    }
}

/// The guesses of a program that is given what the text program keeps of its rows: all are made behind the last of them, whose hidden row is `hidden`. With its state, a new one where it has none.
fn propose_behind_last(
    loaded: &mut LoadedDraft,
    own: Option<Box<dyn State>>,
    sequence: &Sequence,
    hidden: &[f32],
    most: usize,
    started: Instant,
) -> Result<(Guess, Box<dyn State>), Error> {
    let begins = own.is_none();
    let mut state = own.map_or_else(|| loaded.new_state(sequence.state.capacity()), Ok)?;
    loaded.follow(&mut *state, &*sequence.state)?;
    let getting_ready = if begins { started.elapsed() } else { Duration::ZERO };
    let (mut guess, last) = (Guess { ids: Vec::with_capacity(most), getting_ready }, state.len());
    let (mut next, mut hidden) = (sequence.rows.ids()[last + 1], Hidden::Text(hidden));
    while guess.ids.len() < most {
        state.truncate(last)?;
        next = loaded.read(&mut *state, &sequence.rows, last..last + 1, &[next], hidden)?;
        guess.ids.push(next);
        hidden = Hidden::Chained;
    }
    Ok((guess, state))
}
