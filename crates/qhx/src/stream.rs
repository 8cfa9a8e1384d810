//! Answers piece by piece.

use crate::{Error, turn::Turn};
use qhx_runtime::{
    Generation,
    engine::{Answer, Engine},
};

/// An answer as it comes: an iterator of pieces of text, none of them empty.
///
/// The model works ahead of the reader. Dropping the stream stops it within a token, and what was said stays part of the conversation.
pub struct Stream<'a> {
    answer: Option<Answer>,
    /// Lives as long as somebody waits for its answer.
    _engine: Engine,
    /// Where the answer goes when it has ended.
    turn: Option<Turn<'a>>,
    /// The answer, once it has ended.
    generation: Option<Generation>,
}

impl<'a> Stream<'a> {
    /// An answer of an engine, and the turn of a conversation that it is.
    pub(crate) fn new(answer: Answer, engine: Engine, turn: Option<Turn<'a>>) -> Self {
        Self { answer: Some(answer), _engine: engine, turn, generation: None }
    }

    /// Reads the answer to its end and gives all that is known of it.
    pub fn answer(mut self) -> Result<Generation, Error> {
        for piece in &mut self {
            piece?;
        }
        self.generation.take().ok_or(Error::Cancelled)
    }

    /// Waits for the end.
    fn finish(&mut self) -> Option<Result<(), Error>> {
        let generation = match self.answer.take()?.finish() {
            Ok(generation) => generation,
            Err(error) => return Some(Err(error.into())),
        };
        if let Some(turn) = self.turn.take() {
            turn.end(&generation);
        }
        self.generation = Some(generation);
        Some(Ok(()))
    }
}

impl Iterator for Stream<'_> {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.answer.as_mut()?.next() {
                Some(Ok(piece)) if piece.text.is_empty() => {}
                Some(Ok(piece)) => return Some(Ok(piece.text)),
                Some(Err(error)) => {
                    self.answer = None;
                    return Some(Err(error.into()));
                }
                None => return self.finish()?.err().map(Err),
            }
        }
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        let (Some(turn), Some(answer)) = (&self.turn, &self.answer) else { return };
        // Only this answer is stopped; what has come of it is part of the conversation.
        let cancel = turn.cancel.clone();
        let was_cancelled = cancel.is_cancelled();
        answer.cancel();
        let _ = self.finish();
        if !was_cancelled {
            cancel.clear();
        }
    }
}
