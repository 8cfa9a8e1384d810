//! Rows, and what a device has computed of them: what a call works on.

use crate::{Error, hidden_rows::HiddenRows, rows::Rows};
use qhx_ir::{ExpertCache, Phase, State};
use qhx_media::MediaKind;
use std::time::Duration;

/// The rows of a session and the state of the first of them.
pub(crate) struct Sequence {
    pub(crate) rows: Rows,
    pub(crate) state: Box<dyn State>,
    /// The program's epoch for which `state` was computed.
    pub(crate) epoch: usize,
    /// Rows at the end that are guesses: computed, not committed, until [`Sequence::accept`].
    pub(crate) drafts: usize,
    /// The first of the rows to be computed, where these are chosen tokens.
    pub(crate) chosen_from: Option<usize>,
    /// Of the last row, and with drafts of the row before them and of each of them; empty when they are not known.
    pub(crate) logits: Vec<f32>,
    /// The ids and the values of the largest logits of the same rows, as many of each row, where nothing else was wanted.
    pub(crate) largest: Vec<(u32, f32)>,
    /// What is wanted of each row.
    pub(crate) wanted: Wanted,
    /// What feeds the model's own drafts, where they are wanted.
    pub(crate) hidden: Option<HiddenRows>,
    pub(crate) work: Work,
}

/// What is wanted of the logits from which the next token is chosen. Less of them takes less time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// All.
    #[default]
    Logits,
    /// The largest.
    Largest,
    /// So many of the largest.
    Top(usize),
}

/// What is known of the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NextToken<'a> {
    /// All logits.
    Logits(&'a [f32]),
    /// Ids and logits of the largest, the largest first.
    Top(&'a [(u32, f32)]),
    /// The largest logit.
    Largest {
        /// Its id.
        id: u32,
        /// The logit.
        value: f32,
    },
}

/// What a session has made the device do so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Calls of the program.
    pub calls: usize,
    /// Those of them that wrote: see [`Phase`].
    pub decode_calls: usize,
    /// Rows computed, those computed again included.
    pub rows: usize,
    /// Time spent in the program's last stage (the output head), as far as the device tells.
    pub last_stage: Duration,
    /// Images that a tower encoded.
    pub images: usize,
    /// Sounds that a tower encoded.
    pub sounds: usize,
    /// Time that took.
    pub encode: Duration,
    /// What became of chosen experts in the session's calls, where only some of them lie on the device with the rest; what others chose in the same calls included.
    pub experts: ExpertCache,
}

impl Work {
    /// Counts a call in which so many of the session's rows were computed.
    pub(crate) fn add(&mut self, phase: Phase, rows: usize, last_stage: Duration, experts: ExpertCache) {
        self.calls += 1;
        self.decode_calls += usize::from(phase == Phase::Decode);
        self.rows += rows;
        self.last_stage += last_stage;
        self.experts = self.experts + experts;
    }

    /// Media of a kind that a tower encoded.
    pub fn encoded(&self, kind: MediaKind) -> usize {
        match kind {
            MediaKind::Image => self.images,
            MediaKind::Audio => self.sounds,
        }
    }
}

impl Sequence {
    /// Without rows, with room for `context` of them and for a row of so many logits.
    pub(crate) fn new(state: Box<dyn State>, context: usize, logits: usize) -> Self {
        Self {
            rows: Rows::with_capacity(context),
            state,
            epoch: 0,
            drafts: 0,
            chosen_from: None,
            logits: Vec::with_capacity(logits),
            largest: Vec::with_capacity(1),
            wanted: Wanted::Logits,
            hidden: None,
            work: Work::default(),
        }
    }

    /// An independent one that holds the same.
    pub(crate) fn fork(&self, context: usize) -> Result<Self, Error> {
        Ok(Self {
            rows: self.rows.copy_with_capacity(context),
            state: self.state.fork()?,
            logits: self.logits.clone(),
            largest: self.largest.clone(),
            hidden: None,
            ..*self
        })
    }

    /// The logits of the last row, if they are known.
    pub(crate) fn logits(&self) -> Option<&[f32]> {
        (!self.logits.is_empty()).then_some(&self.logits[..])
    }

    /// What is known of the token after the last row, or with drafts after the row before them.
    pub(crate) fn next_token(&self) -> Option<NextToken<'_>> {
        self.token_after(0)
    }

    /// What is known of the token after so many drafts.
    pub(crate) fn token_after(&self, drafts: usize) -> Option<NextToken<'_>> {
        let rows = self.drafts + 1;
        let (width, most) = (self.logits.len() / rows, self.largest.len() / rows);
        match self.largest.get(drafts * most..(drafts + 1) * most).unwrap_or_default() {
            [] => self.logits.get(drafts * width..(drafts + 1) * width).filter(|row| !row.is_empty()).map(NextToken::Logits),
            &[(id, value)] => Some(NextToken::Largest { id, value }),
            top => Some(NextToken::Top(top)),
        }
    }

    pub(crate) fn forget_logits(&mut self) {
        self.logits.clear();
        self.largest.clear();
    }

    /// Puts in guesses at what follows the last row.
    pub(crate) fn draft(&mut self, ids: &[u32]) {
        self.rows.extend(ids, &[]);
        self.drafts = ids.len();
    }

    /// The first `accepted` drafts, which were computed with the row before them, are right; the others are forgotten.
    pub(crate) fn accept(&mut self, accepted: usize) -> Result<(), Error> {
        let wrong = std::mem::take(&mut self.drafts) - accepted;
        self.rows.truncate(self.rows.len() - wrong);
        if let Some(hidden) = &mut self.hidden {
            hidden.truncate(self.rows.len());
        }
        self.state.commit(self.rows.len() - self.state.len())?;
        Ok(())
    }

    /// Forgets drafts that were not computed.
    pub(crate) fn forget_drafts(&mut self) {
        let drafts = std::mem::take(&mut self.drafts);
        self.rows.truncate(self.rows.len() - drafts);
    }
}
