//! The way of an answer from the engine's thread to whoever asked.

use super::Shared;
use crate::{Cancel, Error, Generation, Piece, TokenLogProbs};
use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

/// A part of an answer as it comes.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerPiece {
    /// The token that was chosen; absent for text that was held back until the end.
    pub id: Option<u32>,
    /// The text that is now certain: never half a character, never part of a stop string, often empty.
    pub text: String,
    /// How probable the token was, where that was asked for.
    pub log_probs: Option<TokenLogProbs>,
}

impl From<Piece<'_>> for AnswerPiece {
    fn from(piece: Piece<'_>) -> Self {
        Self { id: piece.id, text: piece.text.to_owned(), log_probs: piece.log_probs.cloned() }
    }
}

/// An answer that is being made: an iterator, and a stream, of its pieces. Dropped before its end, the request is cancelled.
pub struct Answer {
    pipe: Arc<Pipe>,
    cancel: Cancel,
    shared: Arc<Shared>,
}

/// The engine's end.
pub(super) struct Sender(Option<Arc<Pipe>>);

#[derive(Default)]
struct Pipe {
    content: Mutex<Content>,
    changed: Condvar,
}

#[derive(Default)]
struct Content {
    pieces: VecDeque<AnswerPiece>,
    end: Option<Result<Generation, Error>>,
    /// Whether `end` has come, even if it was taken.
    ended: bool,
    /// Rows of the prompt that are computed.
    prompt_rows: usize,
    waker: Option<Waker>,
}

impl Pipe {
    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Content)) {
        let mut content = self.content();
        change(&mut content);
        let waker = content.waker.take();
        drop(content);
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

pub(super) fn channel(cancel: Cancel, shared: Arc<Shared>) -> (Sender, Answer) {
    let pipe = Arc::<Pipe>::default();
    (Sender(Some(pipe.clone())), Answer { pipe, cancel, shared })
}

impl Sender {
    pub(super) fn send(&self, piece: AnswerPiece) {
        if let Some(pipe) = &self.0 {
            pipe.change(|content| content.pieces.push_back(piece));
        }
    }

    /// So many rows of the prompt are computed.
    pub(super) fn progress(&self, rows: usize) {
        if let Some(pipe) = &self.0 {
            pipe.content().prompt_rows = rows;
        }
    }

    pub(super) fn end(mut self, end: Result<Generation, Error>) {
        self.end_with(end);
    }

    /// Whether the answer has ended without this.
    pub(super) fn has_ended(&self) -> bool {
        self.0.as_ref().is_some_and(|pipe| pipe.content().ended)
    }

    fn end_with(&mut self, end: Result<Generation, Error>) {
        if let Some(pipe) = self.0.take() {
            pipe.change(|content| (content.end, content.ended) = (Some(end), true));
        }
    }
}

impl Drop for Sender {
    /// Whoever waits is not left waiting, whatever happened to the engine.
    fn drop(&mut self) {
        self.end_with(Err(Error::EngineStopped));
    }
}

impl Answer {
    /// Waits for the next piece; none at the end. An error ends the answer.
    pub fn next_piece(&mut self) -> Option<Result<AnswerPiece, Error>> {
        let mut content = self.pipe.content();
        loop {
            if let Some(piece) = content.pieces.pop_front() {
                return Some(Ok(piece));
            }
            if content.ended {
                return take_error(&mut content).map(Err);
            }
            content = self.pipe.changed.wait(content).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for the end. Pieces that were not taken are part of the result, too.
    pub fn finish(self) -> Result<Generation, Error> {
        let mut content = self.pipe.content();
        while !content.ended {
            content = self.pipe.changed.wait(content).unwrap_or_else(PoisonError::into_inner);
        }
        content.end.take().unwrap_or(Err(Error::EngineStopped))
    }

    /// Ends it: it cannot be made. The engine drops it with its next step.
    pub(super) fn abandon(self) {
        self.pipe.change(|content| content.ended = true);
        self.shared.tell();
    }

    /// Rows of the prompt that are computed so far.
    pub fn prompt_rows(&self) -> usize {
        self.pipe.content().prompt_rows
    }

    /// Asks the engine to stop; the answer ends after the step that is running, with what it has.
    pub fn cancel(&self) {
        self.cancel.cancel();
        self.shared.tell();
    }

    /// For an executor: the next piece, or `None` at the end; wakes the task when there is one.
    pub fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<AnswerPiece, Error>>> {
        let mut content = self.pipe.content();
        match content.pieces.pop_front() {
            Some(piece) => Poll::Ready(Some(Ok(piece))),
            None if content.ended => Poll::Ready(take_error(&mut content).map(Err)),
            None => {
                content.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// An error is given once, as the last piece; a result is kept for [`Answer::finish`].
fn take_error(content: &mut Content) -> Option<Error> {
    match content.end.take() {
        Some(Err(error)) => Some(error),
        other => {
            content.end = other;
            None
        }
    }
}

impl Iterator for Answer {
    type Item = Result<AnswerPiece, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_piece()
    }
}

impl futures_core::Stream for Answer {
    type Item = Result<AnswerPiece, Error>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll_piece(context)
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.pipe.content().ended {
            self.cancel();
        }
    }
}
