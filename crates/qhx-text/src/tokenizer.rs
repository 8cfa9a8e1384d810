//! Text to ids and back, by the pipeline that a `tokenizer.json` file describes.

use super::added::AddedTokens;
use super::check::{self, Measured};
use super::detokenize::{Detokenizer, bytes_of_token};
use super::guard::guarded;
use std::sync::Arc;
use tokenizers::{
    AddedVocabulary, Decoder, Encoding, Model, ModelWrapper, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer,
};

/// Largest tokenizer file that is read. The largest published ones have about 35 MB.
const MAX_FILE_BYTES: usize = 256 << 20;
/// Largest text that is encoded in one go: far beyond any context, small enough to encode in seconds.
const MAX_TEXT_BYTES: usize = 32 << 20;
/// What normalising may make of a text: so many times its bytes and so many more, but no more than the last number. The library takes some 17 bytes
/// of memory for each.
const NORMALISED_TIMES: usize = 16;
const NORMALISED_MORE: usize = 1 << 20;
const MAX_NORMALISED_BYTES: usize = 64 << 20;
/// Steps of some 20 ns that encoding a text may take. For published Unigram models, the only ones whose tokens matter here, it is more than two
/// megabytes of text.
const MAX_STEPS: usize = 1 << 28;
/// What decoding ids may give at once.
const MAX_DECODED_BYTES: usize = 256 << 20;

/// A loaded tokenizer. Clones share the same tables.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    pipeline: tokenizers::Tokenizer,
    /// The added tokens with the special ones switched off.
    without_special: AddedVocabulary,
    added: AddedTokens,
    special_ids: Vec<u32>,
    id_limit: usize,
    measured: Measured,
}

/// What special tokens written out in a text, such as `<|end|>`, become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Ordinary characters: the right choice for anything a user wrote. Added tokens that the tokenizer does not flag as special are
    /// part of its ordinary vocabulary and are still found.
    #[default]
    AsText,
    /// Control tokens.
    Parse,
}

/// What went wrong with a tokenizer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The file cannot be used.
    #[error("the tokenizer file cannot be used: {problem}")]
    File {
        /// What is wrong with it.
        problem: String,
    },
    /// A text is too long to encode.
    #[error("the text has {bytes} bytes, the longest that can be encoded has {limit}; shorten it")]
    TextTooLong {
        /// Length of the text.
        bytes: usize,
        /// Longest allowed.
        limit: usize,
    },
    /// The tokenizer's own rules cannot encode this text.
    #[error("the tokenizer cannot encode the text: {problem}")]
    Encode {
        /// What its pipeline reported.
        problem: String,
    },
    /// The tokenizer's own rules cannot decode these ids.
    #[error("the tokenizer cannot decode the ids: {problem}")]
    Decode {
        /// What its pipeline reported.
        problem: String,
    },
    /// A token that something relies on does not exist.
    #[error("the tokenizer has no token {token:?}")]
    NoSuchToken {
        /// The token as text.
        token: String,
    },
}

impl Tokenizer {
    /// Reads the bytes of a `tokenizer.json`. Truncation and padding settings in the file are ignored, as is merge dropout: they belong to
    /// training.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TokenizerError> {
        let unusable = |problem: String| TokenizerError::File { problem };
        if bytes.len() > MAX_FILE_BYTES {
            return Err(unusable(format!("it has {} bytes, at most {MAX_FILE_BYTES} are read", bytes.len())));
        }
        let measured = check::check(bytes).map_err(unusable)?;
        let mut pipeline = guarded(|| tokenizers::Tokenizer::from_bytes(bytes)).map_err(unusable)?;
        guarded(|| pipeline.with_truncation(None).map(|_| ())).map_err(unusable)?;
        pipeline.with_padding(None);
        without_dropout(&mut pipeline);

        let mut without_special = pipeline.get_added_vocabulary().clone();
        without_special.set_encode_special_tokens(true);
        let mut special_ids: Vec<u32> = pipeline
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(id, _)| *id)
            .collect();
        special_ids.sort_unstable();
        let id_limit = pipeline.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        if pipeline.get_vocab_size(false) == 0 {
            return Err(unusable("its vocabulary is empty".to_owned()));
        }
        let added = AddedTokens::of(pipeline.get_added_vocabulary());
        Ok(Self { inner: Arc::new(Inner { pipeline, without_special, added, special_ids, id_limit, measured }) })
    }

    /// The ids of a text. With `add_special` the tokenizer's own frame is put around it (a start token, for most), as for a raw completion;
    /// rendered chats bring their own.
    pub fn encode(&self, text: &str, add_special: bool, special: SpecialTokens) -> Result<Vec<u32>, TokenizerError> {
        let pipeline = &self.inner.pipeline;
        self.guarded_encode(text, || match special {
            SpecialTokens::Parse => pipeline.encode_fast(text, add_special),
            SpecialTokens::AsText => {
                let split = self.inner.without_special.extract_and_normalize(pipeline.get_normalizer(), text);
                pipeline.post_process(self.encode_split(split)?, None, add_special)
            }
        })
    }

    /// The ids of a text in which some special tokens are control tokens and some are not: those marked at one of the `forged` byte positions
    /// (ascending, as [`Tokenizer::special_marks`] gives them) stay text.
    pub(super) fn encode_except(&self, text: &str, forged: &[usize]) -> Result<Vec<u32>, TokenizerError> {
        self.guarded_encode(text, || self.encode_split(self.split_except(text, forged)?))
    }

    /// The ids of a text to be continued that stands behind `control`, control tokens as they are spelled. The tokenizer's own frame is put around
    /// both; special tokens written out in the text stay text.
    pub fn encode_behind(&self, control: &str, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let forged: Vec<usize> = self.special_marks(text).iter().map(|mark| control.len() + mark).collect();
        let whole = [control, text].concat();
        self.guarded_encode(&whole, || {
            let encoding = self.encode_split(self.split_except(&whole, &forged)?)?;
            self.inner.pipeline.post_process(encoding, None, true)
        })
    }

    fn split_except(&self, text: &str, forged: &[usize]) -> tokenizers::Result<PreTokenizedString> {
        let is_forged = |mark| forged.binary_search(&mark).is_ok();
        self.inner.added.split(text, self.inner.pipeline.get_normalizer(), is_forged)
    }

    /// Where special tokens are to be marked in `text` as a user wrote it: for each, and for a possible beginning of one at the end, the
    /// byte position behind its first character.
    pub(super) fn special_marks(&self, text: &str) -> Vec<usize> {
        // Where a text cannot be normalised, encoding will report it.
        let marks = self
            .check_text(text)
            .map(|()| guarded(|| Ok(self.inner.added.special_marks(text, self.inner.pipeline.get_normalizer()))).unwrap_or_default());
        marks.unwrap_or_default()
    }

    /// The text of ids. Ids that the tokenizer does not know give nothing: a model's vocabulary is often padded beyond its tokenizer's.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        let tokens: Vec<String> = ids.iter().filter_map(|&id| self.token_for_decoding(id, skip_special)).collect();
        // Some decoders of the library fail on an empty list.
        if tokens.is_empty() {
            return Ok(String::new());
        }
        let longest = tokens.iter().map(|token| token.len() as f64).sum::<f64>() * self.inner.measured.decoder_growth;
        if longest > MAX_DECODED_BYTES as f64 {
            let problem = format!("{} ids may give {longest:.0} bytes, more than {MAX_DECODED_BYTES}", ids.len());
            return Err(TokenizerError::Decode { problem });
        }
        guarded(|| match self.inner.pipeline.get_decoder() {
            Some(decoder) => decoder.decode(tokens),
            None => Ok(tokens.join(" ")),
        })
        .map_err(|problem| TokenizerError::Decode { problem })
    }

    /// A detokeniser that turns ids into text one by one.
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer {
        Detokenizer::new(self.clone(), self.inner.pipeline.get_decoder(), skip_special)
    }

    /// The id of a token, added tokens included.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.pipeline.token_to_id(token)
    }

    /// The token of an id, spelled as in the tokenizer file (not decoded).
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        let added = self.inner.pipeline.get_added_vocabulary().get_added_tokens_decoder().get(&id);
        added.map(|token| token.content.clone()).or_else(|| self.inner.pipeline.get_model().id_to_token(id))
    }

    /// The bytes that an id stands for in the middle of a text, often not whole characters. None for unknown ids, and for tokenizers whose tokens have no text of their own.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let added = self.inner.pipeline.get_added_vocabulary().get_added_tokens_decoder().get(&id);
        if let Some(token) = added {
            return Some(token.content.clone().into_bytes());
        }
        bytes_of_token(self.inner.pipeline.get_decoder(), self.inner.pipeline.id_to_token(id)?)
    }

    /// How many tokens there are, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.pipeline.get_vocab_size(true)
    }

    /// One more than the largest id. Differs from [`Tokenizer::vocab_size`] where ids have gaps.
    pub fn id_limit(&self) -> usize {
        self.inner.id_limit
    }

    /// The ids of all special tokens, ascending.
    pub fn special_ids(&self) -> &[u32] {
        &self.inner.special_ids
    }

    /// Whether an id is an added token's: found in a text as a whole, before anything else is.
    pub fn is_added(&self, id: u32) -> bool {
        self.inner.pipeline.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id)
    }

    /// Whether an id is a special token's.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.special_ids.binary_search(&id).is_ok()
    }

    /// The ids that end an answer: the ones a model's configuration declares, and those of the named tokens. Ascending, each once. A name that
    /// is not a token is an error.
    pub fn end_ids(&self, declared: &[u32], tokens: &[&str]) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = declared.to_vec();
        for token in tokens {
            ids.push(self.token_to_id(token).ok_or_else(|| TokenizerError::NoSuchToken { token: (*token).to_owned() })?);
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// What the decoder sees of an id: nothing for unknown ids and for skipped special ones.
    pub(super) fn token_for_decoding(&self, id: u32, skip_special: bool) -> Option<String> {
        let token = self.inner.pipeline.id_to_token(id)?;
        (!skip_special || !self.inner.pipeline.get_added_vocabulary().is_special_token(&token)).then_some(token)
    }

    fn guarded_encode(&self, text: &str, work: impl FnOnce() -> tokenizers::Result<Encoding>) -> Result<Vec<u32>, TokenizerError> {
        self.check_text(text)?;
        let encoding = guarded(work).map_err(|problem| TokenizerError::Encode { problem })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Refuses a text that would take too long, or too much memory.
    fn check_text(&self, text: &str) -> Result<(), TokenizerError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(TokenizerError::TextTooLong { bytes: text.len(), limit: MAX_TEXT_BYTES });
        }
        let Measured { growth, cost, .. } = self.inner.measured;
        let by_size = (text.len() * NORMALISED_TIMES + NORMALISED_MORE).min(MAX_NORMALISED_BYTES);
        let limit = by_size.min(MAX_STEPS / cost);
        if text.len() as f64 * growth <= limit as f64 {
            return Ok(());
        }
        // The bound is far above what most texts become, so it is looked at what this one does: in pieces, which become too large none by itself.
        let mut bytes = 0;
        let mut rest = text;
        while !rest.is_empty() {
            let end = (NORMALISED_MORE as f64 / growth) as usize + 4;
            let end = (0..=end.min(rest.len())).rev().find(|&end| rest.is_char_boundary(end)).unwrap_or(rest.len());
            let (piece, behind) = rest.split_at(end);
            rest = behind;
            let mut normalised = NormalizedString::from(piece);
            if let Some(normalizer) = self.inner.pipeline.get_normalizer() {
                guarded(|| normalizer.normalize(&mut normalised)).map_err(|problem| TokenizerError::Encode { problem })?;
            }
            bytes += normalised.len();
            if bytes > by_size {
                let problem = format!("normalising makes more than {by_size} bytes of its {}", text.len());
                return Err(TokenizerError::Encode { problem });
            }
            if bytes > limit {
                return Err(TokenizerError::TextTooLong { bytes: text.len(), limit });
            }
        }
        Ok(())
    }

    /// Bytes of the longest token.
    pub fn longest_token(&self) -> usize {
        self.inner.measured.longest_token
    }

    /// The rest of the pipeline for a text whose added tokens have been found and whose other parts are normalised.
    fn encode_split(&self, mut split: PreTokenizedString) -> tokenizers::Result<Encoding> {
        if let Some(pre_tokenizer) = self.inner.pipeline.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut split)?;
        }
        self.inner.pipeline.get_model().tokenize_in_pretokenized(&mut split, None)?;
        split.into_encoding(None, 0, OffsetType::None)
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).field("special", &self.inner.special_ids.len()).finish()
    }
}

fn without_dropout(pipeline: &mut tokenizers::Tokenizer) {
    if let ModelWrapper::BPE(model) = pipeline.get_model()
        && model.dropout.is_some()
    {
        let mut model = model.clone();
        model.dropout = None;
        pipeline.with_model(model);
    }
}

#[cfg(test)]
mod tests;
