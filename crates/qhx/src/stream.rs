//! Answers piece by piece: the one place that knows how an answer runs beside its reader.

use crate::Error;
use qhx_runtime::{
    Cancel, Conversation, Generation, Piece,
    engine::{Answer, Engine},
};
use std::{
    panic,
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread::{self, JoinHandle},
};

/// Pieces that may wait for their reader before the model does.
const MOST_WAITING: usize = 64;

/// An answer as it comes: an iterator of pieces of text, none of them empty.
///
/// The model works ahead of the reader. Dropping the stream stops it within a token, and what was said stays part of the conversation.
pub struct Stream<'a> {
    work: Option<Work<'a>>,
    /// The answer, once it has ended.
    answer: Option<Generation>,
}

/// Who makes the answer.
enum Work<'a> {
    /// The engine, with others in the same steps. It lives as long as somebody waits for it.
    Engine(Answer, #[expect(dead_code, reason = "kept alive")] Engine),
    /// A thread on a session of its own.
    Thread(Thread<'a>),
}

struct Thread<'a> {
    pieces: Receiver<String>,
    work: JoinHandle<Done>,
    /// Where the conversation goes when the answer has ended.
    home: &'a mut Option<Conversation>,
    cancel: Cancel,
}

type Done = (Conversation, Result<Generation, Error>);

impl Stream<'static> {
    /// An answer of an engine.
    pub(crate) fn of_engine(answer: Answer, engine: Engine) -> Self {
        Self { work: Some(Work::Engine(answer, engine)), answer: None }
    }
}

impl<'a> Stream<'a> {
    /// Starts `work`, which gives back the conversation that it was given.
    pub(crate) fn start(
        home: &'a mut Option<Conversation>,
        cancel: Cancel,
        work: impl FnOnce(&mut dyn FnMut(Piece<'_>)) -> Done + Send + 'static,
    ) -> Self {
        let (sender, pieces) = sync_channel(MOST_WAITING);
        let stop = cancel.clone();
        let work = thread::spawn(move || work(&mut |piece| hand_over(&sender, piece, &stop)));
        Self { work: Some(Work::Thread(Thread { pieces, work, home, cancel })), answer: None }
    }

    /// Reads the answer to its end and gives all that is known of it.
    pub fn answer(mut self) -> Result<Generation, Error> {
        for piece in &mut self {
            piece?;
        }
        self.answer.take().ok_or(Error::Cancelled)
    }

    /// The next piece, empty or not.
    fn piece(&mut self) -> Option<Result<String, Error>> {
        match self.work.as_mut()? {
            Work::Engine(answer, _) => answer.next().map(|piece| Ok(piece?.text)),
            Work::Thread(thread) => thread.pieces.recv().ok().map(Ok),
        }
    }

    /// Waits for the work to end.
    fn finish(&mut self) -> Option<Result<Generation, Error>> {
        match self.work.take()? {
            Work::Engine(answer, _) => Some(answer.finish().map_err(Error::from)),
            Work::Thread(Thread { work, home, .. }) => {
                let (conversation, answer) = work.join().unwrap_or_else(|panicked| panic::resume_unwind(panicked));
                *home = Some(conversation);
                Some(answer)
            }
        }
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
        loop {
            match self.piece() {
                Some(Ok(piece)) if piece.is_empty() => {}
                Some(Ok(piece)) => return Some(Ok(piece)),
                Some(Err(error)) => {
                    self.work = None;
                    return Some(Err(error));
                }
                None => match self.finish()? {
                    Ok(answer) => {
                        self.answer = Some(answer);
                        return None;
                    }
                    Err(error) => return Some(Err(error)),
                },
            }
        }
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // An engine's answer that is dropped is cancelled by itself.
        let Some(Work::Thread(Thread { pieces, work, home, cancel })) = self.work.take() else { return };
        let was_cancelled = cancel.is_cancelled();
        cancel.cancel();
        drop(pieces);
        // A panic of the work is not worth a second one.
        if let Ok((conversation, _)) = work.join() {
            *home = Some(conversation);
        }
        if !was_cancelled {
            cancel.clear();
        }
    }
}
