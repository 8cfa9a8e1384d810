//! Turns rows of logits into an answer: chooses tokens, makes text of them, and knows when to stop. Knows nothing of how rows are computed.

use crate::{
    Error, FinishReason, GenerateOptions, LogitProcessor, Model, NextToken, Piece, Prompt, TokenLogProbs, Wanted,
    sample::{SampleError, Sampler},
    text::{Detokenizer, StopStrings},
};
use qhx_ir::IdMask;
use std::time::{Duration, Instant};

/// From so many of the largest logits a token is chosen without asking for all: where sampling takes more of them, finding them takes a device as long as giving all.
const MOST_CANDIDATES: usize = 64;

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
    top_log_probs: Option<usize>,
    stop_strings: Vec<String>,
    /// Logits of a row.
    vocabulary: usize,
    pub(crate) log_probs: Vec<TokenLogProbs>,
    /// The stop string that ended the answer.
    pub(crate) stop_string: Option<String>,
    pub(crate) ids: Vec<u32>,
    /// How many of them were forced.
    pub(crate) forced_tokens: usize,
    /// Spent on finding out what may be chosen.
    pub(crate) mask_time: Duration,
    /// When the first of them was known.
    pub(crate) first_token: Option<Instant>,
    pub(crate) text: String,
    pub(crate) step_logits: Vec<f32>,
    pub(crate) finish_reason: Option<FinishReason>,
    pub(crate) note: Option<String>,
}

impl Writer {
    /// For an answer to a prompt.
    pub(crate) fn new(
        model: &Model,
        prompt: &Prompt,
        options: &GenerateOptions,
        mut processors: Vec<Box<dyn LogitProcessor>>,
    ) -> Result<Self, Error> {
        // Behind all others: what it forbids stays forbidden.
        processors.extend(model.shape(prompt.ids(), prompt.is_chat(), &options.structure)?);
        if !options.stop.is_empty() && model.tokenizer().is_none() {
            return Err(Error::NoTokenizer { what: "stop strings" });
        }
        Ok(Self {
            max_new: options.max_new,
            eos: if options.ignore_eos { Vec::new() } else { model.eos().to_vec() },
            sampler: Sampler::new(options.sampler.clone())?,
            processors,
            processed: Vec::new(),
            detokenizer: model.tokenizer().map(|tokenizer| tokenizer.detokenizer(true).showing(&options.shown_special)),
            stops: StopStrings::new(options.stop.iter().cloned())?,
            stopped: false,
            keep_logits: options.keep_logits,
            top_log_probs: options.log_probs,
            stop_strings: options.stop.clone(),
            vocabulary: model.vocabulary().logits,
            log_probs: Vec::new(),
            stop_string: None,
            ids: Vec::with_capacity(options.max_new.min(model.context())),
            forced_tokens: 0,
            mask_time: Duration::ZERO,
            first_token: None,
            text: String::new(),
            step_logits: Vec::new(),
            finish_reason: (options.max_new == 0).then_some(FinishReason::Length),
            note: None,
        })
    }

    /// What must be known of the logits to choose a token.
    pub(crate) fn wanted(&self) -> Wanted {
        match self.sampler.config().candidates() {
            Some(1) if self.largest_decides() && self.processors.is_empty() => Wanted::Largest,
            Some(count @ 2..=MOST_CANDIDATES) if self.processors.is_empty() && !self.shows_logits() && count < self.vocabulary => {
                Wanted::Top(count)
            }
            _ => Wanted::Logits,
        }
    }

    /// Whether no logits but the largest allowed one matter.
    fn largest_decides(&self) -> bool {
        self.sampler.config().is_greedy() && !self.shows_logits()
    }

    /// Whether logits are asked for, or probabilities that follow from all of them.
    fn shows_logits(&self) -> bool {
        self.keep_logits || self.top_log_probs.is_some()
    }

    /// The ids that may follow `ids`, where that is all that has to be known beside the logits.
    pub(crate) fn mask(&mut self, ids: &[u32]) -> Option<IdMask> {
        let largest_decides = self.largest_decides();
        match &mut self.processors[..] {
            [only] if largest_decides => {
                let began = Instant::now();
                let mask = only.mask(ids);
                self.mask_time += began.elapsed();
                // Nothing is the largest of none: with the logits, `pick` finds out why.
                mask.filter(|mask| mask.0.iter().any(|word| *word != 0))
            }
            _ => None,
        }
    }

    /// Tokens that may still be chosen.
    pub(crate) fn left(&self) -> usize {
        self.max_new - self.ids.len()
    }

    /// Chooses the token after `ids`, gives out the text that is certain now, and tells what is to be computed next: that token and those that must follow it. Nothing at the end of the
    /// answer.
    pub(crate) fn choose(
        &mut self,
        next: NextToken<'_>,
        ids: &[u32],
        context: usize,
        on_piece: &mut dyn FnMut(Piece<'_>),
    ) -> Result<Vec<u32>, Error> {
        let id = self.pick(next, ids)?;
        let mut chosen = Vec::new();
        let goes_on = self.add(id, ids.len(), context, on_piece)?;
        chosen.extend(goes_on.then_some(id));
        for id in if goes_on { self.forced(ids, id) } else { Vec::new() } {
            self.forced_tokens += 1;
            if !self.add(id, ids.len() + chosen.len(), context, on_piece)? {
                return Ok(Vec::new());
            }
            chosen.push(id);
        }
        Ok(chosen)
    }

    /// The tokens that must follow `chosen`. Where the probabilities of tokens are asked for, each is computed.
    fn forced(&mut self, ids: &[u32], chosen: u32) -> Vec<u32> {
        let Some(last) = self.processors.last_mut().filter(|_| !self.keep_logits && self.top_log_probs.is_none()) else {
            return Vec::new();
        };
        let began = Instant::now();
        let forced = last.forced(ids, chosen, self.max_new - self.ids.len());
        self.mask_time += began.elapsed();
        forced
    }

    /// The token after `ids`. Where nothing is allowed, a processor may know why.
    fn pick(&mut self, next: NextToken<'_>, ids: &[u32]) -> Result<u32, Error> {
        self.pick_allowed(next, ids).map_err(|error| match error {
            Error::Sample(SampleError::AllForbidden { .. }) => {
                self.processors.iter().rev().find_map(|processor| processor.problem()).unwrap_or(error)
            }
            error => error,
        })
    }

    fn pick_allowed(&mut self, next: NextToken<'_>, ids: &[u32]) -> Result<u32, Error> {
        match next {
            NextToken::Largest { value, .. } if value == f32::NEG_INFINITY => Err(SampleError::AllForbidden { rows: 1 }.into()),
            NextToken::Largest { id, value } if !value.is_finite() => Err(SampleError::NotANumber { id: id as usize, value }.into()),
            NextToken::Largest { id, .. } => Ok(id),
            NextToken::Top(top) => Ok(self.sampler.sample_top(top, ids.len())?),
            NextToken::Logits(logits) => {
                if self.keep_logits {
                    self.step_logits.extend_from_slice(logits);
                }
                let processed = match self.processors.is_empty() {
                    true => logits,
                    false => {
                        self.processed.clear();
                        self.processed.extend_from_slice(logits);
                        let began = Instant::now();
                        self.processors.iter_mut().for_each(|processor| processor.process(ids, &mut self.processed));
                        self.mask_time += began.elapsed();
                        &self.processed
                    }
                };
                let id = self.sampler.sample(processed, ids, ids.len())?;
                self.log_probs.extend(self.top_log_probs.map(|top| TokenLogProbs::of(logits, id, top)));
                Ok(id)
            }
        }
    }

    /// Takes a token that stands behind `before` others. Whether the answer goes on.
    fn add(&mut self, id: u32, before: usize, context: usize, on_piece: &mut dyn FnMut(Piece<'_>)) -> Result<bool, Error> {
        self.ids.push(id);
        self.first_token.get_or_insert_with(Instant::now);
        if self.eos.contains(&id) {
            on_piece(Piece { id: Some(id), text: "", log_probs: self.log_probs.last() });
            self.finish_reason = Some(FinishReason::Stop);
            return Ok(false);
        }
        self.show(id, on_piece)?;
        if self.stopped {
            self.finish_reason = Some(FinishReason::Stop);
        } else if self.ids.len() >= self.max_new {
            self.finish_reason = Some(FinishReason::Length);
        } else if before >= context {
            self.finish_reason = Some(FinishReason::Length);
            self.note = Some(format!("the context of {context} tokens is full: the answer may be cut short"));
        }
        Ok(self.finish_reason.is_none())
    }

    fn show(&mut self, id: u32, on_piece: &mut dyn FnMut(Piece<'_>)) -> Result<(), Error> {
        let Some(detokenizer) = &mut self.detokenizer else {
            on_piece(Piece { id: Some(id), text: "", log_probs: self.log_probs.last() });
            return Ok(());
        };
        let certain = self.stops.push(detokenizer.push(id)?);
        self.stopped = certain.by.is_some();
        self.stop_string = certain.by.and_then(|by| self.stop_strings.get(by).cloned());
        self.text.push_str(&certain.text);
        on_piece(Piece { id: Some(id), text: &certain.text, log_probs: self.log_probs.last() });
        Ok(())
    }

    /// Gives out what was held back in case more would come.
    pub(crate) fn flush(&mut self, on_piece: &mut dyn FnMut(Piece<'_>)) -> Result<(), Error> {
        let Some(detokenizer) = self.detokenizer.as_mut().filter(|_| !self.stopped) else { return Ok(()) };
        let last = self.stops.push(detokenizer.flush()?);
        let mut rest = last.text;
        match last.by {
            Some(by) => {
                self.finish_reason = Some(FinishReason::Stop);
                self.stop_string = self.stop_strings.get(by).cloned();
            }
            None => rest += &self.stops.flush(),
        }
        if !rest.is_empty() {
            on_piece(Piece { id: None, text: &rest, log_probs: None });
        }
        self.text.push_str(&rest);
        Ok(())
    }
}
