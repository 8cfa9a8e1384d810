//! Answers piece by piece: the one place that knows how an answer runs beside its reader.

use crate::Error;
use qhx_runtime::{Cancel, Conversation, Generation, Piece};
use std::{
    panic,
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread::{self, JoinHandle},
};

/// Pieces that may wait for their reader before the model does.
const MOST_WAITING: usize = 64;

/// An answer as it comes: an iterator of pieces of text, none of them empty.
///
/// The model works ahead of the reader by a few pieces. Dropping the stream stops it within a token, and what was said stays part of the conversation.
pub struct Stream<'a> {
    pieces: Option<Receiver<String>>,
    work: Option<JoinHandle<Done>>,
    /// Where the conversation goes when the answer has ended.
    home: Option<&'a mut Option<Conversation>>,
    cancel: Cancel,
    /// The answer, once it has ended and nobody took it.
    answer: Option<Generation>,
}

type Done = (Option<Conversation>, Result<Generation, Error>);

impl<'a> Stream<'a> {
    /// Starts `work`, which gives back the conversation that it was given.
    pub(crate) fn start(
        home: Option<&'a mut Option<Conversation>>,
        cancel: Cancel,
        work: impl FnOnce(&mut dyn FnMut(Piece<'_>)) -> Done + Send + 'static,
    ) -> Self {
        let (sender, pieces) = sync_channel(MOST_WAITING);
        let stop = cancel.clone();
        let work = thread::spawn(move || work(&mut |piece| hand_over(&sender, piece, &stop)));
        Self { pieces: Some(pieces), work: Some(work), home, cancel, answer: None }
    }

    /// Reads the answer to its end and gives all that is known of it.
    pub fn answer(mut self) -> Result<Generation, Error> {
        for piece in &mut self {
            piece?;
        }
        self.answer.take().ok_or(Error::Cancelled)
    }

    /// Waits for the work to end, and brings the conversation home.
    fn finish(&mut self) -> Option<Result<Generation, Error>> {
        let done = self.work.take()?.join();
        let (conversation, answer) = done.unwrap_or_else(|panicked| panic::resume_unwind(panicked));
        if let Some(home) = self.home.take() {
            *home = conversation;
        }
        Some(answer)
    }
}

fn hand_over(sender: &SyncSender<String>, piece: Piece<'_>, cancel: &Cancel) {
    // Nobody reads any more: what comes is not wanted.
    if !piece.text.is_empty() && sender.send(piece.text.to_owned()).is_err() {
        cancel.cancel();
    }
}

impl Iterator for Stream<'_> {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(piece) = self.pieces.as_ref().and_then(|pieces| pieces.recv().ok()) {
            return Some(Ok(piece));
        }
        match self.finish()? {
            Ok(answer) => {
                self.answer = Some(answer);
                None
            }
            Err(error) => Some(Err(error)),
        }
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        if self.work.is_none() {
            return;
        }
        let was_cancelled = self.cancel.is_cancelled();
        self.cancel.cancel();
        drop(self.pieces.take());
        // A panic of the work is not worth a second one.
        if let (Some(Ok((conversation, _))), Some(home)) = (self.work.take().map(JoinHandle::join), self.home.take()) {
            *home = conversation;
        }
        if !was_cancelled {
            self.cancel.clear();
        }
    }
}
