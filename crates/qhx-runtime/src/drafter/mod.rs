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
use worth::{Account, GuessCost, Watched};

/// The steps that an answer may lose at its start by drafts of a source that was asked for by name, and of a program that was.
const FIRST_LOST: f64 = 1.0;
const FIRST_LOST_BY_NAME: f64 = 4.0;
/// The same of a source that nobody asked for, but never more than its guesses have won: those of a program in earlier answers; those that are looked up in this one, where they are watched before any is computed. An answer
/// of twelve tokens loses 3 % by it.
const FIRST_LOST_UNASKED: f64 = 0.35;
/// The share of what may be lost that may go to reading earlier rows before the first guess: the rest is for guesses.
const READY: f64 = 0.5;
/// So many steps with drafts are followed by one without, which shows what plain steps take now.
const MOST_IN_A_ROW: usize = 48;

/// The drafts of one answer.
pub(crate) struct Drafter {
    sources: Vec<Source>,
    /// Whether all guesses are computed, whether that pays or not.
    always: bool,
    account: Account,
    /// Steps with drafts since the last one without.
    in_a_row: usize,
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
    /// Whether it was asked for by name.
    is_named: bool,
    watched: Watched,
}

impl Source {
    /// As it was asked for.
    fn new(guesses: Guesses, asked: &DraftSource) -> Self {
        let (acceptance, is_computed) = match &guesses {
            Guesses::Ids(_) => (Acceptance::default(), matches!(asked, DraftSource::Model(_))),
            Guesses::Mtp(mtp) => (mtp.acceptance(), true),
        };
        Self { guesses, acceptance, cost: GuessCost::new(!is_computed), is_named: *asked != DraftSource::Auto, watched: Watched::default() }
    }

    /// The steps that may be lost at the start, where one takes `step` seconds.
    fn first_lost(&self, step: f64) -> f64 {
        match &self.guesses {
            Guesses::Ids(_) if self.is_named => FIRST_LOST,
            Guesses::Mtp(_) if self.is_named => FIRST_LOST_BY_NAME,
            Guesses::Ids(_) => (self.watched.won() / step).clamp(0.0, FIRST_LOST_UNASKED),
            Guesses::Mtp(mtp) => (mtp.won() / step).clamp(0.0, FIRST_LOST_UNASKED),
        }
    }

    /// Its drafts have won so many seconds.
    fn book(&mut self, won: f64) {
        match &self.guesses {
            Guesses::Ids(_) => self.watched.book(won),
            Guesses::Mtp(mtp) => mtp.book(won),
        }
    }

    /// Learns from the guess that was watched, in a step of `rows` rows without drafts. Whether there was one.
    fn compare(&mut self, ids: &[u32], rows: usize, costs: &RowCosts) -> bool {
        let is_right = self.watched.compare(ids, rows, costs);
        is_right.inspect(|&is_right| self.acceptance.learn(1, usize::from(is_right))).is_some()
    }

    /// Watches what it would guess now: of a source that nobody asked for, and whose guesses cost nothing.
    fn watch(&mut self, ids: &[u32]) {
        if let (Guesses::Ids(guesses), false) = (&mut self.guesses, self.is_named) {
            // What fails is told when it is asked for drafts.
            self.watched.watch(ids.len(), &guesses.propose(ids, 1).unwrap_or_default());
        }
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
        Ok(Self::with(guesses.into_iter().map(|guesses| Source::new(guesses, &options.draft)), false))
    }

    /// For an answer with guesses of the caller's own, which are all computed.
    pub(crate) fn of(source: Box<dyn Draft>) -> Self {
        Self::with([Source::new(Guesses::Ids(source), &DraftSource::Lookup)], true)
    }

    fn with(sources: impl IntoIterator<Item = Source>, always: bool) -> Self {
        Self {
            sources: sources.into_iter().collect(),
            always,
            account: Account::default(),
            in_a_row: 0,
            drafting: 0,
            others: 0,
            guessing: Duration::ZERO,
            failure: None,
            record: DraftRecord::default(),
        }
    }

    /// Whether it needs what a stage of the model makes of the rows, those of the prompt included.
    pub(crate) fn wants_hidden_rows(&self) -> bool {
        self.sources.iter().any(|source| matches!(&source.guesses, Guesses::Mtp(mtp) if mtp.begins_at_once))
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
        if session.sequence.hidden.is_none() && self.can_get_ready(&costs) {
            session.keep_hidden_rows(true);
        }
        let drafts = self.propose(&session.sequence, most, &costs);
        // A guess that is no id of this model is a wrong one.
        let vocabulary = session.model().vocabulary().ids;
        let valid = drafts.iter().position(|&id| id as usize >= vocabulary).unwrap_or(drafts.len());
        session.sequence.draft(&drafts[..valid]);
        valid
    }

    /// Whether a program that nobody asked for can be got ready with what may be lost now: it needs what a stage of the model makes of the rows to come.
    fn can_get_ready(&self, costs: &RowCosts) -> bool {
        let step = costs.of(1).unwrap_or_default();
        self.sources.iter().any(|source| match &source.guesses {
            Guesses::Ids(_) => false,
            Guesses::Mtp(mtp) => {
                let spare = self.account.spare(self.others + 1, 1, costs, &source.cost, source.first_lost(step));
                costs.are_known() && spare.is_some_and(|spare| READY * spare >= mtp.time_to_begin(step))
            }
        })
    }

    /// At most `most` ids that may follow: of the source that is expected to give the most, where it has any.
    fn propose(&mut self, sequence: &Sequence, most: usize, costs: &RowCosts) -> Vec<u32> {
        let (rows, ids) = (self.others + 1, sequence.rows.ids());
        if !self.always && self.in_a_row >= MOST_IN_A_ROW {
            return Vec::new();
        }
        let (started, step) = (Instant::now(), costs.of(1).unwrap_or_default());
        let mut plans = Vec::with_capacity(self.sources.len());
        for (place, source) in self.sources.iter_mut().enumerate() {
            if self.always {
                plans.push((place, most, 0.0, 0.0));
                continue;
            }
            let was_watched = source.compare(ids, rows, costs);
            let first = source.first_lost(step);
            let most = self.account.affordable(rows, most, costs, &source.cost, first);
            let (count, rate) = worth::best_count(source.acceptance.share(), rows, most, costs, &source.cost);
            let spare = self.account.spare(rows, count, costs, &source.cost, first);
            match spare.filter(|_| count > 0) {
                Some(spare) => plans.push((place, count, rate, spare)),
                None => {
                    if !was_watched {
                        source.acceptance.forget_a_little();
                    }
                    source.watch(ids);
                }
            }
        }
        self.guessing = started.elapsed();
        plans.sort_by(|(.., a, _), (.., b, _)| b.total_cmp(a));
        for (place, count, _, spare) in plans {
            let started = Instant::now();
            let source = &mut self.sources[place];
            let guess = match &mut source.guesses {
                Guesses::Ids(guesses) => guesses.propose(ids, count).map(|ids| (ids, Duration::ZERO)),
                Guesses::Mtp(mtp) => mtp.propose(sequence, count, READY * spare, step).map(|guess| (guess.ids, guess.getting_ready)),
            };
            let (mut drafts, getting_ready) = match guess {
                Ok(guess) => guess,
                Err(error) => {
                    self.failure = Some(error);
                    self.sources.remove(place);
                    return Vec::new();
                }
            };
            drafts.truncate(count);
            let took = started.elapsed().saturating_sub(getting_ready);
            self.guessing += took;
            // Done once for all that follows, so it says nothing about later guesses.
            self.account.spend(getting_ready);
            self.record.saved -= getting_ready.as_secs_f64();
            source.book(-getting_ready.as_secs_f64());
            if !drafts.is_empty() {
                if getting_ready.is_zero() {
                    source.cost.learn(drafts.len(), took);
                }
                self.drafting = place;
                return drafts;
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
        self.in_a_row = if drafted > 0 { self.in_a_row + 1 } else { 0 };
        if drafted > 0 {
            if let Some(source) = self.sources.get_mut(self.drafting) {
                source.acceptance.learn(drafted, accepted);
                source.book(saved);
                if let Guesses::Mtp(mtp) = &source.guesses {
                    mtp.learn(drafted, accepted);
                }
            }
            self.record.drafted += drafted;
            self.record.accepted += accepted;
        }
    }
}
