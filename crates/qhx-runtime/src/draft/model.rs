//! Drafts of a smaller model that has the same tokens.

use super::Draft;
use crate::{Cancel, Error, Model, NextToken, Session, Wanted};

/// A model that drafts for another.
#[derive(Clone)]
pub struct DraftModel(Model);

impl DraftModel {
    /// `draft` for answers of `model`; an error where their tokens are not the same.
    pub fn new(draft: Model, model: &Model) -> Result<Self, Error> {
        let (ours_count, theirs_count) = (model.vocabulary().logits, draft.vocabulary().logits);
        let problem = match (model.tokenizer(), draft.tokenizer()) {
            (Some(ours), Some(theirs)) => {
                let known = ours_count.min(theirs_count) as u32;
                let differs = (0..known).find(|&id| ours.token_bytes(id) != theirs.token_bytes(id));
                differs.map(|id| format!("token {id} is not the same"))
            }
            (None, None) if ours_count == theirs_count => None,
            (None, None) => Some(format!("it has {theirs_count} tokens, the model {ours_count}")),
            _ => Some("only one of them has a tokenizer".into()),
        };
        match problem {
            Some(problem) => Err(Error::Option { option: "draft", found: problem, expected: "a model with the same tokenizer".into() }),
            None => Ok(Self(draft)),
        }
    }

    /// For one sequence.
    pub(super) fn start(&self) -> Result<Follower, Error> {
        let mut session = self.0.session()?;
        session.want(Wanted::Largest);
        Ok(Follower { session })
    }
}

impl std::fmt::Debug for DraftModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DraftModel").field(&self.0.program().name).finish()
    }
}

impl PartialEq for DraftModel {
    fn eq(&self, other: &Self) -> bool {
        self.0.is_same(&other.0)
    }
}

/// A session that follows another model's answer.
pub(super) struct Follower {
    session: Session,
}

impl Draft for Follower {
    fn propose(&mut self, ids: &[u32], most: usize) -> Result<Vec<u32>, Error> {
        let mut drafts = Vec::new();
        let vocabulary = self.session.model().vocabulary().logits;
        // What it cannot read it does not follow.
        if ids.len() + most > self.session.context() || ids.iter().any(|&id| id as usize >= vocabulary) {
            return Ok(drafts);
        }
        let cancel = Cancel::new();
        self.session.prepare(ids, &cancel)?;
        while let Some(NextToken::Largest { id, .. }) = self.session.next_token() {
            drafts.push(id);
            if drafts.len() >= most {
                break;
            }
            self.session.append(&[id], &cancel)?;
        }
        Ok(drafts)
    }
}
