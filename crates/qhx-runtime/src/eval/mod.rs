//! How well a model predicts a text (perplexity), and how far its predictions are from another model's (Kullback-Leibler divergence, flips).
//!
//! A text is cut into [`windows`]. Each is read from an empty session, and every token but its first is scored: the model sees the tokens before it in the window and gives it a
//! probability. No more logits are in memory than one call gives, however long the text is: two models are read in lockstep, some rows at a time.

mod divergence;

pub use crate::eval_error::EvalError;
pub use divergence::{Divergence, RowDivergence, TokenDivergence};

use crate::{Cancel, Error, Language, LoadOptions, Model, Session, text::SpecialTokens};
use serde::Serialize;
use std::ops::Range;

/// Tokens of a window where nobody asks for another number and the model has room for them.
pub const DEFAULT_WINDOW: usize = 512;
/// Bytes of logits that are in memory at a time …
const LOGIT_BYTES: usize = 64 << 20;
/// … for so many rows at most.
const MOST_ROWS: usize = 256;
/// Rows that a [`Reference`] is told of at a time.
const BATCH_ROWS: usize = 4096;

/// What a model makes of a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scores {
    /// Tokens that were scored.
    pub tokens: usize,
    /// `exp` of the mean negative log-likelihood of these tokens.
    pub perplexity: f64,
    /// Its standard error, with tokens taken as independent.
    pub perplexity_error: f64,
    /// How far the predictions are from the reference's, where there is one.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub against: Option<Divergence>,
}

/// A model to compare with: it gives its logits some rows at a time, and of a row some ids at a time where it likes.
pub trait Reference {
    /// Why it could not.
    type Error: From<Error>;

    /// Its language side: tokens and sizes must be those of the model that is evaluated.
    fn language(&self) -> &Language;

    /// The windows that are read next.
    fn begin(&mut self, windows: &[Vec<u32>]) -> Result<(), Self::Error>;

    /// Shows the logits of some rows of a window, by the row's number among them and the first id of the piece; pieces of a row come in the order of ids. Windows
    /// are asked for in order, and so are the rows of each.
    fn rows(&mut self, window: usize, rows: Range<usize>, show: &mut ShowPiece<'_>) -> Result<(), Self::Error>;
}

/// Takes a row's number, the first id of a piece, and the piece.
pub type ShowPiece<'a> = dyn FnMut(usize, usize, &[f32]) + 'a;

/// Options for a model that is going to be evaluated in windows of so many tokens: room for one window, and logits of as many rows per call as are compared at a time.
pub fn load_options(options: LoadOptions, vocabulary: usize, window: usize) -> LoadOptions {
    let rows = rows_at_once(vocabulary);
    LoadOptions { context: Some(window), chunk: options.chunk.min(rows), wanted: rows, ..options }
}

/// How many rows of logits are in memory at a time.
pub fn rows_at_once(vocabulary: usize) -> usize {
    (LOGIT_BYTES / 4 / vocabulary.max(1)).clamp(1, MOST_ROWS)
}

/// The number of tokens of a window: what was asked for, or [`DEFAULT_WINDOW`], or as many as the model has room for.
pub fn window_length(model: &Language, asked: Option<usize>) -> Result<usize, EvalError> {
    let most = model.context_limit();
    let window = asked.unwrap_or(DEFAULT_WINDOW.min(most));
    if (2..=most).contains(&window) { Ok(window) } else { Err(EvalError::Window { window, most }) }
}

/// Cuts a text into windows of `length` tokens; the last may be shorter. Where the tokenizer puts a token in front of a text, each window begins with it.
pub fn windows(model: &Language, text: &str, length: usize) -> Result<Vec<Vec<u32>>, Error> {
    let tokenizer = model.tokenizer().ok_or(Error::NoTokenizer { what: "a text" })?;
    let ids = tokenizer.encode(text, false, SpecialTokens::AsText)?;
    let framed = tokenizer.encode(text, true, SpecialTokens::AsText)?;
    let before = framed.len().checked_sub(ids.len()).and_then(|most| (0..=most).find(|&at| framed[at..at + ids.len()] == ids[..]));
    let front = &framed[..before.unwrap_or(0)];
    let step = length.saturating_sub(front.len()).max(1);
    let window = |piece: &[u32]| [front, piece].concat();
    // A last token alone would have nothing before it to be predicted from.
    let windows: Vec<Vec<u32>> = ids.chunks(step).map(window).filter(|window| window.len() > 1).collect();
    if windows.is_empty() {
        return Err(EvalError::TooShort { tokens: framed.len() }.into());
    }
    Ok(windows)
}

/// The perplexity of windows. `progress` gets (done, all) tokens.
pub fn perplexity(model: &Model, windows: &[Vec<u32>], cancel: &Cancel, progress: &mut dyn FnMut(usize, usize)) -> Result<Scores, Error> {
    let all = scored(windows);
    let mut session = model.session()?;
    let mut losses = Losses::default();
    for window in windows {
        session.reset();
        let rows = window.len() - 1;
        session.append_showing(&window[..rows], rows, cancel, &mut |row, logits| {
            losses.add(-log_probability(logits, window[row + 1]));
            progress(losses.count, all);
        })?;
    }
    Ok(losses.scores(None))
}

/// The same beside a reference: how far the predictions of `model` are from the reference's on the same tokens.
pub fn compare<R: Reference>(
    model: &Model,
    reference: &mut R,
    windows: &[Vec<u32>],
    cancel: &Cancel,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Scores, R::Error> {
    let (all, width) = (scored(windows), model.vocabulary().logits);
    check_vocabulary(model, reference.language()).map_err(Error::from)?;
    let mut session = model.session()?;
    let (mut losses, mut tokens) = (Losses::default(), Vec::with_capacity(all));
    for batch in batches(windows) {
        reference.begin(batch)?;
        for (number, window) in batch.iter().enumerate() {
            session.reset();
            for range in spans(model, window.len() - 1) {
                let mut rows: Vec<f32> = Vec::with_capacity(range.len() * width);
                session.append_showing(&window[range.clone()], range.len(), cancel, &mut |_, row| rows.extend_from_slice(row))?;
                let mut compared: Vec<RowDivergence> = range.clone().map(|row| RowDivergence::new(window[row + 1])).collect();
                reference.rows(number, range, &mut |row, first_id, expected| {
                    compared[row].add(first_id, expected, &rows[row * width + first_id..][..expected.len()]);
                })?;
                for row in &compared {
                    let token = row.token();
                    losses.add(-token.found_log_probability);
                    tokens.push(token);
                }
                progress(losses.count, all);
            }
        }
    }
    Ok(losses.scores(Some(Divergence::of(tokens))))
}

/// Whether two models read a text as the same windows, and where they part if not.
pub fn check_tokens(model: &Language, windows: &[Vec<u32>], reference: &Language, others: &[Vec<u32>]) -> Result<(), EvalError> {
    let (mut ours, mut theirs) = (windows.iter().flatten(), others.iter().flatten());
    let mut at = 0;
    loop {
        match (ours.next(), theirs.next()) {
            (None, None) => return Ok(()),
            (a, b) if a == b => at += 1,
            _ => return Err(EvalError::OtherTokens { model: model.name().into(), reference: reference.name().into(), at }),
        }
    }
}

fn check_vocabulary(model: &Language, reference: &Language) -> Result<(), EvalError> {
    let (found, expected) = (model.vocabulary().logits, reference.vocabulary().logits);
    match found == expected {
        true => Ok(()),
        false => Err(EvalError::OtherVocabulary { model: model.name().into(), reference: reference.name().into(), found, expected }),
    }
}

/// Tokens that are scored.
fn scored(windows: &[Vec<u32>]) -> usize {
    windows.iter().map(|window| window.len() - 1).sum()
}

/// Windows in groups of about [`BATCH_ROWS`] rows.
fn batches(mut windows: &[Vec<u32>]) -> impl Iterator<Item = &[Vec<u32>]> {
    std::iter::from_fn(move || {
        let mut rows = 0;
        let fitting = windows.iter().take_while(|window| {
            rows += window.len();
            rows <= BATCH_ROWS
        });
        let count = fitting.count().max(1).min(windows.len());
        let (batch, rest) = windows.split_at(count);
        windows = rest;
        (!batch.is_empty()).then_some(batch)
    })
}

/// The spans of rows that are computed and compared at a time. Where constants of the program change with the length, a window is read in one piece, so that all its rows have those of
/// its whole length.
fn spans(model: &Model, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let changes = model.program().epoch(1) != model.program().epoch(rows);
    let step = if changes { rows } else { rows_at_once(model.vocabulary().logits) };
    (0..rows).step_by(step).map(move |first| first..rows.min(first + step))
}

/// The natural logarithm of the probability that a row of logits gives an id.
fn log_probability(logits: &[f32], id: u32) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    logits.get(id as usize).map_or(f64::NEG_INFINITY, |&x| f64::from(x) - max - sum.ln())
}

/// Negative log-likelihoods: their number, sum, and sum of squares.
#[derive(Default)]
struct Losses {
    count: usize,
    sum: f64,
    squares: f64,
}

impl Losses {
    fn add(&mut self, loss: f64) {
        self.count += 1;
        self.sum += loss;
        self.squares += loss * loss;
    }

    fn scores(self, against: Option<Divergence>) -> Scores {
        let count = self.count as f64;
        let mean = self.sum / count;
        let variance = (self.squares / count - mean * mean).max(0.0);
        let perplexity = mean.exp();
        Scores { tokens: self.count, perplexity, perplexity_error: perplexity * (variance / count).sqrt(), against }
    }
}

/// A loaded model as the one to compare with.
pub struct ModelReference {
    session: Session,
    windows: Vec<Vec<u32>>,
    cancel: Cancel,
}

impl ModelReference {
    /// A model that was loaded with [`load_options`].
    pub fn new(model: &Model, cancel: &Cancel) -> Result<Self, Error> {
        Ok(Self { session: model.session()?, windows: Vec::new(), cancel: cancel.clone() })
    }
}

impl Reference for ModelReference {
    type Error = Error;

    fn language(&self) -> &Language {
        self.session.model()
    }

    fn begin(&mut self, windows: &[Vec<u32>]) -> Result<(), Error> {
        self.windows = windows.to_vec();
        Ok(())
    }

    fn rows(&mut self, window: usize, rows: Range<usize>, show: &mut ShowPiece<'_>) -> Result<(), Error> {
        if rows.start == 0 {
            self.session.reset();
        }
        let ids = &self.windows[window][rows.clone()];
        self.session.append_showing(ids, ids.len(), &self.cancel, &mut |row, logits| show(row - rows.start, 0, logits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_come_in_batches_of_rows() {
        let sizes = |windows: &[usize]| {
            let windows: Vec<Vec<u32>> = windows.iter().map(|&n| vec![0; n]).collect();
            batches(&windows).map(|batch| batch.iter().map(Vec::len).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        assert_eq!(sizes(&[2000, 2000, 96, 1]), [vec![2000, 2000, 96], vec![1]]);
        assert_eq!(sizes(&[9000, 3]), [vec![9000], vec![3]]);
        assert_eq!(sizes(&[]), [[0; 0]; 0]);
    }

    #[test]
    fn losses_become_a_perplexity() {
        let mut losses = Losses::default();
        [2f64.ln(), 8f64.ln()].into_iter().for_each(|loss| losses.add(loss));
        let scores = losses.scores(None);
        assert!((scores.perplexity - 4.0).abs() < 1e-12 && scores.tokens == 2, "{scores:?}");
        // Half the distance of the two, by the root of their number, as a share of the perplexity.
        assert!((scores.perplexity_error - 4.0 * 2f64.ln() / 2f64.sqrt()).abs() < 1e-12, "{scores:?}");
        assert!((log_probability(&[0.0, 3f32.ln(), f32::NEG_INFINITY], 1) - 0.75f64.ln()).abs() < 1e-7);
        assert_eq!(rows_at_once(262_144), 64);
        assert_eq!((rows_at_once(300), rows_at_once(usize::MAX)), (256, 1));
    }
}
