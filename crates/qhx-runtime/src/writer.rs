//! Turns rows of logits into an answer: chooses tokens, makes text of them, and knows when to stop. Knows nothing of how rows are computed.

use crate::{
    Error, FinishReason, GenerateOptions, LogitProcessor, Model, NextToken, Piece,
    sample::{SampleError, Sampler},
    text::{Detokenizer, StopStrings},
};
use qhx_ir::IdMask;
use std::time::Instant;

/// An answer in the making.
pub(crate) struct Writer {
    max_new: usize,
    eos: Vec<u32>,
    sampler: Sampler,
    processors: Vec<Box<dyn LogitProcessor>>,
    /// The row that processors change.
    processed: Vec<f32>,
    detokenizer: Option<Detokenizer>,
    stops: StopStrings,
    /// Whether a stop string has come: what is still held is not part of the answer.
    stopped: bool,
    keep_logits: bool,
    pub(crate) ids: Vec<u32>,
    /// When the first of them was known.
    pub(crate) first_token: Option<Instant>,
    pub(crate) text: String,
    pub(crate) step_logits: Vec<f32>,
    pub(crate) finish_reason: Option<FinishReason>,
    pub(crate) note: Option<String>,
}

impl Writer {
    pub(crate) fn new(model: &Model, options: &GenerateOptions, processors: Vec<Box<dyn LogitProcessor>>) -> Result<Self, Error> {
        if !options.stop.is_empty() && model.tokenizer().is_none() {
            return Err(Error::NoTokenizer { what: "stop strings" });
        }
        Ok(Self {
            max_new: options.max_new,
            eos: if options.ignore_eos { Vec::new() } else { model.eos().to_vec() },
            sampler: Sampler::new(options.sampler.clone())?,
            processors,
            processed: Vec::new(),
            detokenizer: model.tokenizer().map(|tokenizer| tokenizer.detokenizer(true)),
            stops: StopStrings::new(options.stop.iter().cloned())?,
            stopped: false,
            keep_logits: options.keep_logits,
            ids: Vec::with_capacity(options.max_new.min(model.context())),
            first_token: None,
            text: String::new(),
            step_logits: Vec::new(),
            finish_reason: (options.max_new == 0).then_some(FinishReason::Length),
            note: None,
        })
    }

    /// Whether the largest logit decides, perhaps among the ids that a single mask allows.
    pub(crate) fn wants_largest(&self) -> bool {
        self.sampler.config().is_greedy() && !self.keep_logits && self.processors.is_empty()
    }

    /// The ids that may follow `ids`, where that is all that has to be known beside the logits.
    pub(crate) fn mask(&mut self, ids: &[u32]) -> Option<IdMask> {
        match &mut self.processors[..] {
            [only] if self.sampler.config().is_greedy() && !self.keep_logits => only.mask(ids),
            _ => None,
        }
    }

    /// Chooses the token after `ids`, gives out the text that is certain now, and says whether the answer goes on.
    pub(crate) fn choose(
        &mut self,
        next: NextToken<'_>,
        ids: &[u32],
        context: usize,
        on_piece: &mut dyn FnMut(Piece<'_>),
    ) -> Result<Option<u32>, Error> {
        let id = match next {
            NextToken::Largest { value, .. } if value == f32::NEG_INFINITY => return Err(SampleError::AllForbidden { rows: 1 }.into()),
            NextToken::Largest { id, value } if !value.is_finite() => {
                return Err(SampleError::NotANumber { id: id as usize, value }.into());
            }
            NextToken::Largest { id, .. } => id,
            NextToken::Logits(logits) => {
                if self.keep_logits {
                    self.step_logits.extend_from_slice(logits);
                }
                let logits = match self.processors.is_empty() {
                    true => logits,
                    false => {
                        self.processed.clear();
                        self.processed.extend_from_slice(logits);
                        self.processors.iter_mut().for_each(|processor| processor.process(ids, &mut self.processed));
                        &self.processed
                    }
                };
                self.sampler.sample(logits, ids, ids.len())?
            }
        };
        self.ids.push(id);
        self.first_token.get_or_insert_with(Instant::now);
        if self.eos.contains(&id) {
            on_piece(Piece { id: Some(id), text: "" });
            self.finish_reason = Some(FinishReason::Stop);
            return Ok(None);
        }
        self.show(id, on_piece)?;
        if self.stopped {
            self.finish_reason = Some(FinishReason::Stop);
        } else if self.ids.len() >= self.max_new {
            self.finish_reason = Some(FinishReason::Length);
        } else if ids.len() >= context {
            self.finish_reason = Some(FinishReason::Length);
            self.note = Some(format!("the context of {context} tokens is full: the answer may be cut short"));
        }
        Ok(self.finish_reason.is_none().then_some(id))
    }

    fn show(&mut self, id: u32, on_piece: &mut dyn FnMut(Piece<'_>)) -> Result<(), Error> {
        let Some(detokenizer) = &mut self.detokenizer else {
            on_piece(Piece { id: Some(id), text: "" });
            return Ok(());
        };
        let certain = self.stops.push(detokenizer.push(id)?);
        self.stopped = certain.by.is_some();
        self.text.push_str(&certain.text);
        on_piece(Piece { id: Some(id), text: &certain.text });
        Ok(())
    }

    /// Gives out what was held back in case more would come.
    pub(crate) fn flush(&mut self, on_piece: &mut dyn FnMut(Piece<'_>)) -> Result<(), Error> {
        let Some(detokenizer) = self.detokenizer.as_mut().filter(|_| !self.stopped) else { return Ok(()) };
        let last = self.stops.push(detokenizer.flush()?);
        let mut rest = last.text;
        match last.by {
            Some(_) => self.finish_reason = Some(FinishReason::Stop),
            None => rest += &self.stops.flush(),
        }
        if !rest.is_empty() {
            on_piece(Piece { id: None, text: &rest });
        }
        self.text.push_str(&rest);
        Ok(())
    }
}
