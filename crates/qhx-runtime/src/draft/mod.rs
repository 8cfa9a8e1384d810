//! Drafts: guesses at the next tokens, computed as further rows of a step. What agrees with plain decoding is kept, so drafts change speed and never an answer.
//!
//! Here is where guesses come from. When they are worth their time is the business of the engine, which measures it.

mod lookup;
mod model;
mod mtp;

pub use lookup::Lookup;
pub use model::DraftModel;
pub(crate) use mtp::Mtp;

use crate::{Error, Model};

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
    /// Lookup, and multi-token prediction where the model has it: what pays more at the time.
    #[default]
    Auto,
    /// Nothing is drafted.
    None,
    /// What followed the last time that the text was as it is now, in the prompt or in the answer.
    Lookup,
    /// Multi-token prediction: a program of the model's own bundle.
    Mtp,
    /// A smaller model.
    Model(DraftModel),
}

/// Guesses at what comes next in one sequence, by whoever makes them.
pub(crate) enum Guesses {
    /// From its ids.
    Ids(Box<dyn Draft>),
    /// From what the model made of its rows.
    Mtp(Mtp),
}

impl DraftSource {
    /// Whether answers of a model can be drafted like this.
    pub fn check(&self, model: &Model) -> Result<(), Error> {
        match self {
            Self::Mtp if model.draft_program().is_none() => Err(Error::Option {
                option: "draft",
                found: "mtp".into(),
                expected: format!("another source: `{}` has no program for multi-token prediction", model.name()),
            }),
            _ => Ok(()),
        }
    }

    /// For one sequence of a model, of at most `context` rows.
    pub(crate) fn start(&self, model: &Model, context: usize) -> Result<Vec<Guesses>, Error> {
        self.check(model)?;
        let lookup = || Guesses::Ids(Box::new(Lookup::with_capacity(context)));
        let own = |is_named| Mtp::new(model, is_named).map(Guesses::Mtp);
        Ok(match self {
            Self::None => Vec::new(),
            Self::Lookup => vec![lookup()],
            Self::Mtp => own(true).into_iter().collect(),
            Self::Auto => std::iter::once(lookup()).chain(own(false)).collect(),
            Self::Model(model) => vec![Guesses::Ids(Box::new(model.start()?))],
        })
    }
}
