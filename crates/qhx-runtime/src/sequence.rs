//! Rows, and what a device has computed of them: what a call works on.

use crate::{Error, rows::Rows};
use qhx_ir::{Phase, State};
use qhx_media::MediaKind;
use std::time::Duration;

/// The rows of a session and the state of the first of them.
pub(crate) struct Sequence {
    pub(crate) rows: Rows,
    pub(crate) state: Box<dyn State>,
    /// The program's epoch for which `state` was computed.
    pub(crate) epoch: usize,
    /// Of the last row; empty when they are not known.
    pub(crate) logits: Vec<f32>,
    /// The id and the value of the largest logit of the last row, where nothing else was wanted.
    pub(crate) largest: Option<(u32, f32)>,
    /// Whether only the largest of them is wanted.
    pub(crate) largest_only: bool,
    pub(crate) work: Work,
}

/// What is known of the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NextToken<'a> {
    /// All logits.
    Logits(&'a [f32]),
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
}

impl Work {
    /// Counts a call in which so many of the session's rows were computed.
    pub(crate) fn add(&mut self, phase: Phase, rows: usize, last_stage: Duration) {
        self.calls += 1;
        self.decode_calls += usize::from(phase == Phase::Decode);
        self.rows += rows;
        self.last_stage += last_stage;
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
            logits: Vec::with_capacity(logits),
            largest: None,
            largest_only: false,
            work: Work::default(),
        }
    }

    /// An independent one that holds the same.
    pub(crate) fn fork(&self, context: usize) -> Result<Self, Error> {
        Ok(Self { rows: self.rows.copy_with_capacity(context), state: self.state.fork()?, logits: self.logits.clone(), ..*self })
    }

    /// The logits of the last row, if they are known.
    pub(crate) fn logits(&self) -> Option<&[f32]> {
        (!self.logits.is_empty()).then_some(&self.logits[..])
    }

    /// What is known of the token after the last row.
    pub(crate) fn next_token(&self) -> Option<NextToken<'_>> {
        match self.largest {
            Some((id, value)) => Some(NextToken::Largest { id, value }),
            None => self.logits().map(NextToken::Logits),
        }
    }

    pub(crate) fn set_logits(&mut self, logits: &[f32]) {
        self.largest = None;
        self.logits.clear();
        self.logits.extend_from_slice(logits);
    }

    pub(crate) fn set_largest(&mut self, id: u32, value: f32) {
        self.logits.clear();
        self.largest = Some((id, value));
    }

    pub(crate) fn forget_logits(&mut self) {
        self.logits.clear();
        self.largest = None;
    }
}
