//! The drafts of an answer: how many are computed, and which of them are right.
//!
//! A step of several rows reads the weights once. Whether that pays depends on the device (what more rows cost) and on the text (how many guesses are right); both are
//! measured all the time, and where it does not pay nothing is drafted.

mod worth;

use crate::{
    Error, GenerateOptions, Model, NextToken, Piece, Prompt, Session, draft::Draft, row_costs::RowCosts, timing::Timing, writer::Writer,
};
use std::time::{Duration, Instant};
use worth::{Acceptance, Account};

/// The drafts of one answer.
pub(crate) struct Drafter {
    source: Option<Box<dyn Draft>>,
    /// Whether all guesses are computed, whether that pays or not.
    always: bool,
    acceptance: Acceptance,
    account: Account,
    /// Rows of other answers in the step whose drafts are not judged yet, and the time that guessing took.
    others: usize,
    guessing: Duration,
    /// Why there are no more guesses.
    failure: Option<Error>,
    /// What became of the drafts.
    record: DraftRecord,
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
        let source = if model.can_draft() { options.draft.start(rows)? } else { None };
        Ok(Self::with(source, false))
    }

    /// For an answer with guesses of the caller's own, which are all computed.
    pub(crate) fn of(source: Box<dyn Draft>) -> Self {
        Self::with(Some(source), true)
    }

    fn with(source: Option<Box<dyn Draft>>, always: bool) -> Self {
        Self {
            source,
            always,
            acceptance: Acceptance::default(),
            account: Account::default(),
            others: 0,
            guessing: Duration::ZERO,
            failure: None,
            record: DraftRecord::default(),
        }
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
        let drafts = self.propose(session.ids(), most, &costs).unwrap_or_else(|error| {
            (self.source, self.failure) = (None, Some(error));
            Vec::new()
        });
        // A guess that is no id of this model is a wrong one.
        let vocabulary = session.model().vocabulary().ids;
        let valid = drafts.iter().position(|&id| id as usize >= vocabulary).unwrap_or(drafts.len());
        session.sequence.draft(&drafts[..valid]);
        valid
    }

    /// At most `most` ids that may follow.
    fn propose(&mut self, ids: &[u32], most: usize, costs: &RowCosts) -> Result<Vec<u32>, Error> {
        let Some(source) = &mut self.source else { return Ok(Vec::new()) };
        let rows = self.others + 1;
        let count = if self.always { most } else { worth::best_count(self.acceptance.share(), rows, most, costs) };
        if count == 0 || !self.always && !self.account.allows(rows, count, costs) {
            self.acceptance.forget_a_little();
            return Ok(Vec::new());
        }
        let started = Instant::now();
        let mut drafts = source.propose(ids, count)?;
        drafts.truncate(count);
        self.guessing = started.elapsed();
        Ok(drafts)
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
            self.acceptance.learn(drafted, accepted);
            self.record.drafted += drafted;
            self.record.accepted += accepted;
        }
    }
}
