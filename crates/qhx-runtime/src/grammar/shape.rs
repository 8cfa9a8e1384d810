//! Keeps an answer to its structure: reasoning first, within its budget, then content or calls that follow a grammar.

use super::{Grammars, follower::Follower};
use crate::{
    Constraint, Error, LogitProcessor, Structure, ToolChoice,
    text::{
        SpecialTokens, Tokenizer,
        reply::{Marks, Reasoning, ReplyFormat},
    },
};
use qhx_ir::IdMask;
use serde_json::json;
use std::collections::VecDeque;

/// Keeps one answer to its structure.
pub(crate) struct Shape {
    tokenizer: Tokenizer,
    eos: Vec<u32>,
    /// Numbers in a row of logits.
    width: usize,
    /// Ids that were taken in, those of the prompt included; none before the first.
    taken: Option<usize>,
    stage: Stage,
    /// The token that begins reasoning where it may still begin.
    open: Option<u32>,
    close: Option<Marks>,
    budget: Option<usize>,
    content: Content,
}

enum Stage {
    Reasoning {
        /// Tokens so far.
        tokens: usize,
        /// The latest bytes.
        tail: Vec<u8>,
        /// What ends it, once its budget is spent.
        forced: Option<VecDeque<u32>>,
    },
    Content,
}

/// What the content is.
enum Content {
    Free,
    Follows(Box<Follower>),
    /// Free until a call begins.
    Calls(Box<Calls>),
}

struct Calls {
    open: Vec<u8>,
    /// Of each call, from behind its first mark on.
    call: Follower,
    running: Option<Follower>,
    /// The latest bytes outside of calls.
    tail: Vec<u8>,
    one: bool,
    called: bool,
}

/// What may come next.
enum Next {
    Anything,
    /// But the end.
    MoreOfIt,
    Ids(IdMask),
}

impl Shape {
    /// For an answer whose reasoning is as far as the prompt left it. None where the answer is free.
    pub(crate) fn new(
        grammars: &Grammars,
        format: &ReplyFormat,
        structure: &Structure,
        reasoning: Reasoning,
    ) -> Result<Option<Self>, Error> {
        if structure.is_free() {
            return Ok(None);
        }
        let tokenizer = grammars.tokenizer.clone();
        let content = content(format, grammars, structure)?;
        // What has to be reasoned about is written before what has a form.
        let marks = format.reasoning.as_ref().filter(|_| reasoning == Reasoning::NotBegun);
        let open = marks.and_then(|marks| tokenizer.token_to_id(&marks.open));
        let stage = match reasoning {
            Reasoning::Begun => Stage::reasoning(),
            Reasoning::NotBegun | Reasoning::Over => Stage::Content,
        };
        Ok(Some(Self {
            eos: grammars.eos.clone(),
            width: grammars.width,
            taken: None,
            stage,
            open,
            close: format.reasoning.clone(),
            budget: structure.reasoning_budget,
            content,
            tokenizer,
        }))
    }

    /// Takes in what was chosen since it was last asked.
    fn take(&mut self, ids: &[u32]) {
        let from = *self.taken.get_or_insert(ids.len());
        for &id in ids.get(from..).unwrap_or_default() {
            self.take_one(id);
        }
        self.taken = Some(ids.len());
    }

    fn take_one(&mut self, id: u32) {
        if self.eos.contains(&id) {
            return;
        }
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        match &mut self.stage {
            Stage::Reasoning { tokens, tail, forced } => {
                *tokens += 1;
                let has_ended = match forced {
                    Some(forced) => {
                        forced.pop_front();
                        forced.is_empty()
                    }
                    None => self.close.as_ref().is_some_and(|marks| has_come(tail, &bytes, marks.close.as_bytes())),
                };
                if has_ended {
                    self.stage = Stage::Content;
                }
            }
            Stage::Content => {
                if self.open.take() == Some(id) {
                    self.stage = Stage::reasoning();
                    return;
                }
                match &mut self.content {
                    Content::Free => {}
                    Content::Follows(follower) => follower.take(id),
                    Content::Calls(calls) => calls.take(id, &bytes),
                }
            }
        }
    }

    /// Where the reasoning has spent its budget, what ends it comes next.
    fn end_spent_reasoning(&mut self) {
        let Stage::Reasoning { tokens, forced, .. } = &mut self.stage else { return };
        if forced.is_none() && self.budget.is_some_and(|budget| *tokens >= budget) {
            let close = self.close.as_ref().map_or(String::new(), |marks| format!("\n{}\n\n", marks.close));
            *forced = self.tokenizer.encode(&close, false, SpecialTokens::Parse).ok().map(VecDeque::from);
        }
    }

    fn next(&mut self) -> Next {
        self.end_spent_reasoning();
        let (eos, width) = (&self.eos, self.width);
        let only = |ids: &[u32]| {
            let mut mask = IdMask::none(width);
            ids.iter().for_each(|id| mask.allow(*id));
            Next::Ids(mask)
        };
        match &mut self.stage {
            Stage::Reasoning { forced, .. } => match forced.as_ref().and_then(VecDeque::front) {
                Some(id) => only(&[*id]),
                // An answer that ends in its reasoning would be empty.
                None if !matches!(self.content, Content::Free | Content::Calls(_)) => Next::MoreOfIt,
                None => Next::Anything,
            },
            Stage::Content => match &mut self.content {
                Content::Free => Next::Anything,
                Content::Follows(follower) => {
                    let mut mask = follower.allowed(eos, width);
                    self.open.into_iter().for_each(|id| mask.allow(id));
                    Next::Ids(mask)
                }
                Content::Calls(calls) => match &mut calls.running {
                    Some(follower) => Next::Ids(follower.allowed(eos, width)),
                    None if calls.one && calls.called => only(eos),
                    None => Next::Anything,
                },
            },
        }
    }
}

impl Stage {
    fn reasoning() -> Self {
        Self::Reasoning { tokens: 0, tail: Vec::new(), forced: None }
    }
}

impl Calls {
    fn take(&mut self, id: u32, bytes: &[u8]) {
        match &mut self.running {
            Some(follower) => {
                follower.take(id);
                if follower.has_ended() {
                    (self.running, self.called) = (None, true);
                    self.tail.clear();
                }
            }
            None if has_come(&mut self.tail, bytes, &self.open) => self.running = Some(self.call.fork()),
            None => {}
        }
    }
}

/// Whether a mark is complete with these bytes; `tail` keeps what may be its beginning.
fn has_come(tail: &mut Vec<u8>, bytes: &[u8], mark: &[u8]) -> bool {
    tail.extend_from_slice(bytes);
    let found = tail.windows(mark.len().max(1)).any(|window| window == mark);
    tail.drain(..tail.len().saturating_sub(mark.len()));
    found
}

fn content(format: &ReplyFormat, grammars: &Grammars, structure: &Structure) -> Result<Content, Error> {
    let tools = structure.tools.as_ref().filter(|tools| !tools.is_empty() && structure.tool_choice != ToolChoice::None);
    let calls = format.calls.clone().unwrap_or_else(ReplyFormat::by_prompt);
    let follows = |follower| Ok(Content::Follows(Box::new(follower)));
    let any = json!({ "type": "object" });
    let schema = match &structure.constraint {
        // Where a tool must be called, there is no content.
        _ if structure.tool_choice == ToolChoice::Required => None,
        Some(Constraint::JsonSchema(schema)) => Some(schema),
        Some(Constraint::JsonObject) => Some(&any),
        Some(_) if tools.is_some() => return Err(super::wrong("beside tools the content can follow a JSON schema only")),
        _ => None,
    };
    match (tools, &structure.constraint) {
        (None, None) => Ok(Content::Free),
        (None, Some(constraint)) => follows(grammars.follower(constraint)?),
        (Some(tools), _) if schema.is_some() || structure.tool_choice == ToolChoice::Required => {
            follows(grammars.calls(&calls, tools, structure.one_call, schema)?)
        }
        (Some(tools), _) => Ok(Content::Calls(Box::new(Calls {
            open: calls.0.open.clone().into_bytes(),
            call: grammars.behind_mark(&calls, tools)?,
            running: None,
            tail: Vec::new(),
            one: structure.one_call,
            called: false,
        }))),
    }
}

impl LogitProcessor for Shape {
    fn process(&mut self, ids: &[u32], logits: &mut [f32]) {
        self.take(ids);
        match self.next() {
            Next::Anything => {}
            Next::MoreOfIt => {
                for id in &self.eos {
                    if let Some(logit) = logits.get_mut(*id as usize) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
            Next::Ids(mask) => {
                for (id, logit) in logits.iter_mut().enumerate() {
                    if !mask.allows(id as u32) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }

    fn mask(&mut self, ids: &[u32]) -> Option<IdMask> {
        self.take(ids);
        match self.next() {
            Next::Ids(mask) => Some(mask),
            // There is nothing to forbid, or little: the logits themselves are looked at.
            Next::Anything | Next::MoreOfIt => None,
        }
    }

    fn problem(&self) -> Option<Error> {
        let follower = match &self.content {
            Content::Follows(follower) => Some(&**follower),
            Content::Calls(calls) => calls.running.as_ref(),
            Content::Free => None,
        };
        let problem = follower?.problem()?.to_owned();
        Some(Error::Grammar { problem })
    }

    fn forced(&mut self, ids: &[u32], chosen: u32, most: usize) -> Vec<u32> {
        self.take(ids);
        self.take_one(chosen);
        self.taken = Some(ids.len() + 1);
        self.end_spent_reasoning();
        match (&mut self.stage, &mut self.content) {
            (Stage::Reasoning { forced: end, .. }, _) => end.iter().flatten().copied().collect(),
            // Reasoning may begin instead.
            (Stage::Content, _) if self.open.is_some() => Vec::new(),
            (Stage::Content, Content::Follows(follower)) => follower.forced(most),
            (Stage::Content, Content::Calls(calls)) => calls.running.as_mut().map(|call| call.forced(most)).unwrap_or_default(),
            (Stage::Content, Content::Free) => Vec::new(),
        }
    }
}
