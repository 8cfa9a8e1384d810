//! Saved sessions: what a model has computed, kept in a file and gone on with later, bit for bit.

use crate::{failure::Failure, input::Input, output};
use clap::Args;
use qhx_runtime::{Generation, Model, Session, restore_session, save_session};
use std::path::PathBuf;

/// Where a session comes from and where it goes.
#[derive(Args)]
#[command(next_help_heading = "Session")]
pub(crate) struct SessionFlags {
    /// Start from a saved session: --user continues its conversation; with --ids, --prompt and --chat, the tokens that the prompt shares with it are not computed again
    #[arg(long, value_name = "FILE")]
    load_session: Option<PathBuf>,
    /// Save the session after the answer, with its conversation if it has one
    #[arg(long, value_name = "FILE")]
    save_session: Option<PathBuf>,
}

impl SessionFlags {
    /// Whether the flags go with the others, as far as that can be told before the work is done.
    pub(crate) fn check(&self, split: bool) -> Result<(), Failure> {
        if split && (self.load_session.is_some() || self.save_session.is_some()) {
            return Err(Failure::usage("--split does not go with saved sessions: each window of the sound has a session of its own")
                .hint("leave out --split, or --load-session and --save-session"));
        }
        self.save_session.as_deref().map_or(Ok(()), output::check_place)
    }

    /// The session to answer on. A conversation that was saved with it goes on with the input.
    pub(crate) fn begin(&self, model: &Model, input: &mut Input) -> Result<Session, Failure> {
        let Some(path) = &self.load_session else { return Ok(model.session()?) };
        let (session, chat) = restore_session(model, path)?;
        chat.map_or(Ok(()), |chat| input.follow(chat))?;
        Ok(session)
    }

    /// Saves the session after its answer.
    pub(crate) fn end(&self, session: &Session, input: &Input, answer: &Generation) -> Result<(), Failure> {
        match &self.save_session {
            Some(path) => Ok(save_session(session, input.conversation_with(&answer.text).as_ref(), path)?),
            None => Ok(()),
        }
    }
}
