//! Drafts: guesses at the next tokens, computed as further rows of a step. What agrees with plain decoding is kept, so drafts change speed and never an answer.
//!
//! Here is where guesses come from. When they are worth their time is the business of the engine, which measures it.

mod lookup;
mod model;

pub use lookup::Lookup;
pub use model::DraftModel;

use crate::Error;

/// Guesses at what comes next in one sequence.
pub trait Draft: Send {
    /// At most `most` ids that may follow `ids`; none where there is nothing to guess. `ids` begins with what it was in earlier calls, and goes on with what was chosen: it
    /// shows which guesses were right.
    fn propose(&mut self, ids: &[u32], most: usize) -> Result<Vec<u32>, Error>;
}

/// Where drafts come from.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum DraftSource {
    /// Nothing is drafted.
    None,
    /// What followed the last time that the text was as it is now, in the prompt or in the answer.
    #[default]
    Lookup,
    /// A smaller model.
    Model(DraftModel),
}

impl DraftSource {
    /// For one sequence of at most `context` rows.
    pub(crate) fn start(&self, context: usize) -> Result<Option<Box<dyn Draft>>, Error> {
        Ok(match self {
            Self::None => None,
            Self::Lookup => Some(Box::new(Lookup::with_capacity(context))),
            Self::Model(model) => Some(Box::new(model.start()?)),
        })
    }
}
