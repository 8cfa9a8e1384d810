//! The drafts of an answer: how many are computed, and which of them are right.
//!
//! A step of several rows reads the weights once. Whether that pays depends on the device (what more rows cost) and on the text (how many guesses are right); both are
//! measured all the time, and where it does not pay nothing is drafted.

mod worth;

use crate::{
    Error, GenerateOptions, Model, NextToken, Piece, Prompt, Session,
    acceptance::Acceptance,
    draft::{Draft, DraftSource, Guesses},
    row_costs::RowCosts,
    sequence::Sequence,
    timing::Timing,
    writer::Writer,
};
use std::time::{Duration, Instant};
use worth::{Account, GuessCost};

/// The drafts of one answer.
pub(crate) struct Drafter {
    sources: Vec<Source>,
    /// Whether all guesses are computed, whether that pays or not.
    always: bool,
    account: Account,
    /// The source of the drafts that are not judged yet.
    drafting: usize,
    /// Rows of other answers in the step whose drafts are not judged yet, and the time that guessing took.
    others: usize,
    guessing: Duration,
    /// Why there are no more guesses.
    failure: Option<Error>,
    /// What became of the drafts.
    record: DraftRecord,
}

/// One source of guesses, and what is known of it.
struct Source {
    guesses: Guesses,
    acceptance: Acceptance,
    cost: GuessCost,
}

impl Source {
    /// `is_model`: whether a model of its own guesses.
    fn new(guesses: Guesses, is_model: bool) -> Self {
        let (acceptance, is_computed) = match &guesses {
            Guesses::Ids(_) => (Acceptance::default(), is_model),
            Guesses::Mtp(mtp) => (mtp.acceptance(), true),
        };
        Self { guesses, acceptance, cost: GuessCost::new(!is_computed) }
    }
}

/// What became of an answer's drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct DraftRecord {
    drafted: usize,
    accepted: usize,
    /// About the time that they have saved, in seconds.
    saved: f64,
}

impl Drafter {
    /// For an answer to a prompt.
    pub(crate) fn new(model: &Model, prompt: &Prompt, options: &GenerateOptions) -> Result<Self, Error> {
        let rows = prompt.ids().len().saturating_add(options.max_new).min(model.context());
        options.draft.check(model)?;
        let guesses = if model.can_draft() { options.draft.start(model, rows)? } else { Vec::new() };
        let is_model = matches!(options.draft, DraftSource::Model(_));
        Ok(Self::with(guesses.into_iter().map(|guesses| Source::new(guesses, is_model)), false))
    }

    /// For an answer with guesses of the caller's own, which are all computed.
    pub(crate) fn of(source: Box<dyn Draft>) -> Self {
        Self::with([Source::new(Guesses::Ids(source), false)], true)
    }

    fn with(sources: impl IntoIterator<Item = Source>, always: bool) -> Self {
        Self {
            sources: sources.into_iter().collect(),
            always,
            account: Account::default(),
            drafting: 0,
            others: 0,
            guessing: Duration::ZERO,
            failure: None,
            record: DraftRecord::default(),
        }
    }

    /// Whether it needs what a stage of the model makes of the rows.
    pub(crate) fn wants_hidden_rows(&self) -> bool {
        self.sources.iter().any(|source| matches!(source.guesses, Guesses::Mtp(_)))
    }

    /// What became of the drafts.
    pub(crate) fn tell(&self, timing: &mut Timing) {
        let DraftRecord { drafted, accepted, saved } = self.record;
        (timing.drafted, timing.accepted, timing.saved_ms) = (drafted, accepted, 1e3 * saved);
    }

    /// Something that a person should know.
    pub(crate) fn note(&self) -> Option<String> {
        self.failure.as_ref().map(|error| format!("nothing more was drafted: {error}"))
    }

    /// Puts guesses at what follows into a session whose last row is to be computed, in a step that has so many rows of other answers and room for `most` more. Gives their
    /// number.
    pub(crate) fn draft(&mut self, session: &mut Session, writer: &Writer, others: usize, most: usize) -> usize {
        (self.others, self.guessing) = (others, Duration::ZERO);
        if session.len() != session.sequence.state.len() + 1 {
            return 0;
        }
        let most = session.room_for_drafts(most.min(writer.left().saturating_sub(1)));
        if most == 0 {
            return 0;
        }
        let costs = session.model().runner().costs;
        let drafts = self.propose(&session.sequence, most, writer.left(), &costs);
        // A guess that is no id of this model is a wrong one.
        let vocabulary = session.model().vocabulary().ids;
        let valid = drafts.iter().position(|&id| id as usize >= vocabulary).unwrap_or(drafts.len());
        session.sequence.draft(&drafts[..valid]);
        valid
    }

    /// At most `most` ids that may follow, in an answer of at most `left` more tokens: of the source that is expected to give the most, where it has any.
    fn propose(&mut self, sequence: &Sequence, most: usize, left: usize, costs: &RowCosts) -> Vec<u32> {
        let rows = self.others + 1;
        let mut plans = Vec::with_capacity(self.sources.len());
        for (place, Source { acceptance, cost, .. }) in self.sources.iter_mut().enumerate() {
            let (count, rate) = match self.always {
                true => (most, 0.0),
                false => worth::best_count(acceptance.share(), rows, most, costs, cost),
            };
            if count == 0 || !self.always && !self.account.allows(rows, count, costs, cost) {
                acceptance.forget_a_little();
            } else {
                plans.push((place, count, rate));
            }
        }
        plans.sort_by(|(.., a), (.., b)| b.total_cmp(a));
        for (place, count, _) in plans {
            let started = Instant::now();
            let source = &mut self.sources[place];
            let guess = match &mut source.guesses {
                Guesses::Ids(guesses) => guesses.propose(sequence.rows.ids(), count).map(|ids| (ids, Duration::ZERO)),
                Guesses::Mtp(mtp) => mtp.propose(sequence, count, left).map(|guess| (guess.ids, guess.getting_ready)),
            };
            let (mut ids, getting_ready) = match guess {
                Ok(guess) => guess,
                Err(error) => {
                    self.failure = Some(error);
                    self.sources.remove(place);
                    return Vec::new();
                }
            };
            ids.truncate(count);
            let took = started.elapsed().saturating_sub(getting_ready);
            self.guessing += took;
            // Done once for all that follows, and no more in one answer than it is worth: no reason to guess less from now on.
            self.record.saved -= getting_ready.as_secs_f64();
            if !ids.is_empty() {
                if getting_ready.is_zero() {
                    source.cost.learn(ids.len(), took);
                }
                self.drafting = place;
                return ids;
            }
        }
        Vec::new()
    }

    /// Chooses what follows the row that was computed, and what follows the drafts behind it as long as they are right. The tokens that are to be put in next; none where the
    /// answer has ended.
    pub(crate) fn choose(
        &mut self,
        session: &mut Session,
        writer: &mut Writer,
        on_piece: &mut dyn FnMut(Piece<'_>),
    ) -> Result<Vec<u32>, Error> {
        let (drafts, context) = (session.sequence.drafts, session.context());
        let first = session.len() - drafts;
        let mut accepted = 0;
        let chosen = loop {
            let next = session.sequence.token_after(accepted).unwrap_or(NextToken::Logits(&[]));
            let ids = session.ids();
            match writer.choose(next, &ids[..first + accepted], context, on_piece) {
                Ok(mut chosen) => {
                    let right = chosen.iter().zip(&ids[first + accepted..]).take_while(|(id, draft)| id == draft).count();
                    accepted += right;
                    chosen.drain(..right);
                    if right == 0 || !chosen.is_empty() {
                        break chosen;
                    }
                }
                Err(error) => {
                    session.sequence.forget_drafts();
                    return Err(error);
                }
            }
        };
        if drafts > 0 {
            session.sequence.accept(accepted)?;
        }
        let costs = session.model().runner().costs;
        self.judge(drafts, accepted, &costs);
        Ok(chosen)
    }

    /// A step is over: of so many drafts the first `accepted` were right.
    fn judge(&mut self, drafted: usize, accepted: usize, costs: &RowCosts) {
        let saved = self.account.book(self.others + 1, drafted, accepted, self.guessing, costs);
        self.record.saved += saved;
        if drafted > 0 {
            if let Some(source) = self.sources.get_mut(self.drafting) {
                source.acceptance.learn(drafted, accepted);
                if let Guesses::Mtp(mtp) = &source.guesses {
                    mtp.learn(drafted, accepted);
                }
            }
            self.record.drafted += drafted;
            self.record.accepted += accepted;
        }
    }
}
