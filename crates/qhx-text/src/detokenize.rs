//! Ids to text, one id at a time.
//!
//! A decoder is a chain of steps, each a function of the whole list of tokens. Each step here is the same function in streaming form: it
//! passes on what no later token can change and holds back the rest. So the pieces put together are the decoding of the whole list by
//! construction, no half character is ever given out, and the cost of a token does not depend on how many came before.
//!
//! What is held back: an unfinished character (byte-level decoders); a whole run of byte tokens until another token ends it, because a run that
//! turns out not to be UTF-8 becomes one U+FFFD per byte, finished characters included (byte fallback).

use super::guard::guarded;
use super::tokenizer::{Tokenizer, TokenizerError};
use tokenizers::decoders::strip::Strip;
use tokenizers::{Decoder, DecoderWrapper};

/// Turns a stream of ids into a stream of text. Made by [`Tokenizer::detokenizer`].
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Special tokens that are text all the same.
    shown: Vec<u32>,
    fresh: Vec<Step>,
    steps: Vec<Step>,
    started: bool,
    piece: String,
}

/// One step of a decoder. Steps after the first that joins all tokens to one (`Bytes`, or a fuse, which needs no step of its own) see the
/// chunks of that one token.
#[derive(Clone, Debug)]
enum Step {
    /// Each token for itself.
    Each(DecoderWrapper),
    /// Each token for itself, but the first differs.
    FirstDiffers { decoder: DecoderWrapper, first: bool },
    /// Each token for itself, but the last differs.
    LastDiffers { decoder: DecoderWrapper, held: Option<String> },
    /// Tokens with spaces between them: what the absence of a decoder means.
    Spaced { first: bool },
    /// Runs of tokens like `<0xE2>` are the bytes of characters.
    ByteRuns { run: Vec<u8> },
    /// Every character of a token stands for a byte; all bytes together are the text.
    Bytes { unfinished: Vec<u8> },
    /// Cuts a character off the two ends of the one joined token.
    StripJoined { strip: Strip, leading: usize, held: usize },
    /// Anything else: waits for the end.
    Whole { decoder: DecoderWrapper, joined: bool, held: Vec<String> },
}

impl Detokenizer {
    pub(super) fn new(tokenizer: Tokenizer, decoder: Option<&DecoderWrapper>, skip_special: bool) -> Self {
        let mut fresh = Vec::new();
        match decoder {
            Some(decoder) => add_steps(decoder, &mut false, &mut fresh),
            None => fresh.push(Step::Spaced { first: true }),
        }
        Self { tokenizer, skip_special, shown: Vec::new(), steps: fresh.clone(), fresh, started: false, piece: String::new() }
    }

    /// The same with some special tokens that are not skipped.
    pub fn showing(mut self, ids: &[u32]) -> Self {
        self.shown = ids.to_vec();
        self
    }

    /// Takes the next id and gives back the text that is now certain, often nothing.
    pub fn push(&mut self, id: u32) -> Result<&str, TokenizerError> {
        self.piece.clear();
        if let Some(token) = self.tokenizer.token_for_decoding(id, self.skip_special && !self.shown.contains(&id)) {
            self.started = true;
            let (steps, piece) = (&mut self.steps, &mut self.piece);
            guarded(|| feed(steps, token, piece)).map_err(|problem| TokenizerError::Decode { problem })?;
        }
        Ok(&self.piece)
    }

    /// Ends the stream: gives back what was held and makes the detokeniser new again.
    pub fn flush(&mut self) -> Result<&str, TokenizerError> {
        self.piece.clear();
        let mut steps = std::mem::replace(&mut self.steps, self.fresh.clone());
        if std::mem::take(&mut self.started) {
            let piece = &mut self.piece;
            guarded(|| finish(&mut steps, piece)).map_err(|problem| TokenizerError::Decode { problem })?;
        }
        Ok(&self.piece)
    }
}

/// The bytes that a token stands for in the middle of a text; none where a decoder makes its text of several tokens together.
pub(super) fn bytes_of_token(decoder: Option<&DecoderWrapper>, token: String) -> Option<Vec<u8>> {
    let mut steps = Vec::new();
    match decoder {
        Some(decoder) => add_steps(decoder, &mut false, &mut steps),
        None => steps.push(Step::Spaced { first: false }),
    }
    let mut tokens = vec![token];
    for step in steps {
        tokens = match step {
            Step::Each(decoder) => guarded(|| decoder.decode_chain(tokens)).ok()?,
            Step::FirstDiffers { decoder, .. } => {
                let behind = [vec![String::new()], tokens].concat();
                guarded(|| decoder.decode_chain(behind)).ok()?.split_off(1)
            }
            Step::LastDiffers { decoder, .. } => {
                let before = [tokens, vec![String::new()]].concat();
                guarded(|| decoder.decode_chain(before)).ok()?.into_iter().take(1).collect()
            }
            Step::Spaced { .. } => tokens.iter().map(|token| format!(" {token}")).collect(),
            Step::ByteRuns { .. } => match byte_of(&tokens.concat()) {
                Some(byte) => return Some(vec![byte]),
                None => tokens,
            },
            Step::Bytes { .. } => {
                let joined = tokens.concat();
                return Some(joined.chars().map(byte_of_character).collect::<Option<Vec<u8>>>().unwrap_or_else(|| joined.into_bytes()));
            }
            // Cuts the ends of the whole text off, which this is not.
            Step::StripJoined { .. } => tokens,
            Step::Whole { .. } => return None,
        };
    }
    Some(tokens.concat().into_bytes())
}

/// Appends the streaming form of a decoder; `joined` says whether a step so far made one token of all.
fn add_steps(decoder: &DecoderWrapper, joined: &mut bool, steps: &mut Vec<Step>) {
    let step = match decoder {
        DecoderWrapper::Sequence(sequence) => return sequence.get_decoders().iter().for_each(|each| add_steps(each, joined, steps)),
        DecoderWrapper::Fuse(_) => {
            *joined = true;
            return;
        }
        DecoderWrapper::Strip(strip) if *joined => Step::StripJoined { strip: strip.clone(), leading: strip.start, held: 0 },
        other if *joined => Step::Whole { decoder: other.clone(), joined: true, held: Vec::new() },
        DecoderWrapper::ByteLevel(_) => {
            *joined = true;
            Step::Bytes { unfinished: Vec::new() }
        }
        DecoderWrapper::ByteFallback(_) => Step::ByteRuns { run: Vec::new() },
        DecoderWrapper::Replace(_) | DecoderWrapper::Strip(_) => Step::Each(decoder.clone()),
        DecoderWrapper::Metaspace(_) | DecoderWrapper::WordPiece(_) => Step::FirstDiffers { decoder: decoder.clone(), first: true },
        DecoderWrapper::BPE(_) => Step::LastDiffers { decoder: decoder.clone(), held: None },
        DecoderWrapper::CTC(_) => Step::Whole { decoder: decoder.clone(), joined: false, held: Vec::new() },
    };
    steps.push(step);
}

fn feed(steps: &mut [Step], token: String, text: &mut String) -> tokenizers::Result<()> {
    let Some((step, rest)) = steps.split_first_mut() else {
        text.push_str(&token);
        return Ok(());
    };
    step.push(token, &mut |out| feed(rest, out, text))
}

fn finish(steps: &mut [Step], text: &mut String) -> tokenizers::Result<()> {
    let Some((step, rest)) = steps.split_first_mut() else { return Ok(()) };
    step.finish(&mut |out| feed(rest, out, text))?;
    finish(rest, text)
}

type Emit<'a> = &'a mut dyn FnMut(String) -> tokenizers::Result<()>;

impl Step {
    fn push(&mut self, token: String, emit: Emit<'_>) -> tokenizers::Result<()> {
        match self {
            Step::Each(decoder) => decoder.decode_chain(vec![token])?.into_iter().try_for_each(emit),
            Step::FirstDiffers { decoder, first } => {
                let decoded = if std::mem::take(first) {
                    decoder.decode_chain(vec![token])?
                } else {
                    decoder.decode_chain(vec![String::new(), token])?.split_off(1)
                };
                decoded.into_iter().try_for_each(emit)
            }
            Step::LastDiffers { decoder, held } => match held.replace(token) {
                Some(earlier) => decoder.decode_chain(vec![earlier, String::new()])?.into_iter().take(1).try_for_each(emit),
                None => Ok(()),
            },
            Step::Spaced { first } => emit(if std::mem::take(first) { token } else { format!(" {token}") }),
            Step::ByteRuns { run } => match byte_of(&token) {
                Some(byte) => {
                    run.push(byte);
                    Ok(())
                }
                None => {
                    end_run(run, emit)?;
                    emit(token)
                }
            },
            Step::Bytes { unfinished } => {
                match token.chars().map(byte_of_character).collect::<Option<Vec<u8>>>() {
                    Some(bytes) => unfinished.extend(bytes),
                    None => unfinished.extend(token.as_bytes()),
                }
                let whole = unfinished.len() - unfinished_tail(unfinished);
                let text = String::from_utf8_lossy(&unfinished[..whole]).into_owned();
                unfinished.drain(..whole);
                emit(text)
            }
            Step::StripJoined { strip, leading, held } => {
                let mut rest = token.as_str();
                while *leading > 0 && !rest.is_empty() {
                    match rest.strip_prefix(strip.content) {
                        Some(stripped) => (rest, *leading) = (stripped, *leading - 1),
                        None => *leading = 0,
                    }
                }
                let text = std::iter::repeat_n(strip.content, *held).chain(rest.chars()).collect::<String>();
                *held = text.chars().rev().take(strip.stop).take_while(|c| *c == strip.content).count();
                let certain = text.len() - *held * strip.content.len_utf8();
                emit(text[..certain].to_owned())
            }
            Step::Whole { held, .. } => {
                held.push(token);
                Ok(())
            }
        }
    }

    fn finish(&mut self, emit: Emit<'_>) -> tokenizers::Result<()> {
        match self {
            Step::Each(_) | Step::FirstDiffers { .. } | Step::Spaced { .. } | Step::StripJoined { .. } => Ok(()),
            Step::LastDiffers { decoder, held } => match held.take() {
                Some(last) => decoder.decode_chain(vec![last])?.into_iter().try_for_each(emit),
                None => Ok(()),
            },
            Step::ByteRuns { run } => end_run(run, emit),
            Step::Bytes { unfinished } => emit(String::from_utf8_lossy(unfinished).into_owned()),
            Step::Whole { decoder, joined, held } => {
                let held = std::mem::take(held);
                let tokens = if *joined { vec![held.concat()] } else { held };
                decoder.decode_chain(tokens)?.into_iter().try_for_each(emit)
            }
        }
    }
}

/// The byte that a byte-fallback token stands for. Reads numbers as the library does.
fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

fn end_run(run: &mut Vec<u8>, emit: Emit<'_>) -> tokenizers::Result<()> {
    match String::from_utf8(std::mem::take(run)) {
        Ok(text) if text.is_empty() => Ok(()),
        Ok(text) => emit(text),
        Err(broken) => broken.as_bytes().iter().try_for_each(|_| emit('\u{FFFD}'.to_string())),
    }
}

/// The byte that a character stands for in byte-level vocabularies: printable Latin-1 stands for itself, the other 68 byte values have the
/// characters from U+0100 on.
fn byte_of_character(c: char) -> Option<u8> {
    let code = u32::from(c);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// How many bytes at the end are the beginning of a character whose rest is still to come.
fn unfinished_tail(bytes: &[u8]) -> usize {
    for length in 1..=bytes.len().min(3) {
        let tail = &bytes[bytes.len() - length..];
        // A character starts at the last byte that is not a continuation byte.
        if tail[0] & 0xC0 != 0x80 {
            return match std::str::from_utf8(tail) {
                Err(error) if error.error_len().is_none() => length - error.valid_up_to(),
                _ => 0,
            };
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Settings, random_ids, tokenizer};
    use super::*;

    fn stream(detokenizer: &mut Detokenizer, ids: &[u32]) -> String {
        let mut text = String::new();
        for &id in ids {
            text += detokenizer.push(id).unwrap();
        }
        text + detokenizer.flush().unwrap()
    }

    const REPLACE: &str = r#"{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}"#;
    const FALLBACK: &str = r#"{"type": "ByteFallback"}"#;
    const FUSE: &str = r#"{"type": "Fuse"}"#;
    const BYTES: &str = r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}"#;

    fn sequence(steps: &[&str]) -> String {
        format!(r#"{{"type": "Sequence", "decoders": [{}]}}"#, steps.join(","))
    }

    fn decoders() -> Vec<String> {
        let strip = |start, stop| format!(r#"{{"type": "Strip", "content": " ", "start": {start}, "stop": {stop}}}"#);
        let metaspace = |scheme| format!(r#"{{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "{scheme}", "split": true}}"#);
        let regex = r#"{"type": "Replace", "pattern": {"Regex": "[a-z]+"}, "content": "x"}"#;
        vec![
            "null".to_owned(),
            BYTES.to_owned(),
            FALLBACK.to_owned(),
            FUSE.to_owned(),
            sequence(&[REPLACE, FALLBACK, FUSE]),
            sequence(&[REPLACE, FALLBACK, FUSE, &strip(1, 0)]),
            sequence(&[REPLACE, FALLBACK, FUSE, &strip(3, 0)]),
            sequence(&[REPLACE, &strip(1, 0), FALLBACK]),
            sequence(&[FALLBACK, &metaspace("always")]),
            metaspace("always"),
            metaspace("never"),
            sequence(&[BYTES, &strip(2, 0), regex]),
            sequence(&[BYTES, FALLBACK, REPLACE]),
            sequence(&[FALLBACK, FUSE, &metaspace("first"), regex]),
            r#"{"type": "WordPiece", "prefix": "▁", "cleanup": true}"#.to_owned(),
            r#"{"type": "BPEDecoder", "suffix": "o"}"#.to_owned(),
            r#"{"type": "CTC", "pad_token": "a", "word_delimiter_token": "▁", "cleanup": true}"#.to_owned(),
            sequence(&[]),
        ]
    }

    #[test]
    fn pieces_add_up_to_the_whole_for_any_ids_and_any_decoder() {
        for decoder in decoders() {
            let tokenizer = tokenizer(Settings { decoder: &decoder, ..Settings::default() });
            for skip_special in [false, true] {
                let mut detokenizer = tokenizer.detokenizer(skip_special);
                for seed in 0..300 {
                    // One id past the vocabulary: unknown ids give nothing.
                    let ids = random_ids(seed, 1 + seed as usize % 40, tokenizer.id_limit() as u32 + 1);
                    let whole = tokenizer.decode(&ids, skip_special).unwrap();
                    assert_eq!(stream(&mut detokenizer, &ids), whole, "{decoder} {ids:?}");
                }
            }
        }
    }

    #[test]
    fn trailing_characters_are_stripped_at_the_end() {
        let strip = r#"{"type": "Strip", "content": " ", "start": 1, "stop": 2}"#;
        let tokenizer = tokenizer(Settings { decoder: &sequence(&[REPLACE, FALLBACK, FUSE, strip]), ..Settings::default() });
        let id = |token: &str| tokenizer.token_to_id(token).unwrap();
        let (space, a) = (id("▁"), id("a"));
        for ids in [vec![a], vec![a, space], vec![space, a, space, a, space, space, space], vec![space, space, a, space, space]] {
            assert_eq!(stream(&mut tokenizer.detokenizer(false), &ids), tokenizer.decode(&ids, false).unwrap(), "{ids:?}");
        }
    }

    #[test]
    fn no_half_character_is_given_out_and_nothing_is_held_longer_than_needed() {
        let tokenizer = tokenizer(Settings { decoder: BYTES, ..Settings::default() });
        let mut detokenizer = tokenizer.detokenizer(true);
        let byte = |byte: u8| {
            let character = (0..0x200).filter_map(char::from_u32).find(|c| byte_of_character(*c) == Some(byte)).unwrap();
            tokenizer.token_to_id(&character.to_string()).unwrap()
        };
        let pieces: Vec<String> = "a🎉é".bytes().map(byte).map(|id| detokenizer.push(id).unwrap().to_owned()).collect();
        assert_eq!(pieces, ["a", "", "", "", "🎉", "", "é"]);
        // A character that is broken off becomes U+FFFD as soon as that is certain.
        assert_eq!(detokenizer.push(byte(0xF0)).unwrap(), "");
        assert_eq!(detokenizer.push(byte(0x9F)).unwrap(), "");
        assert_eq!(detokenizer.push(byte(b'x')).unwrap(), "\u{FFFD}x");
        assert_eq!(detokenizer.push(byte(0xE5)).unwrap(), "");
        assert_eq!(detokenizer.flush().unwrap(), "\u{FFFD}");
        assert_eq!(detokenizer.flush().unwrap(), "");
    }

    #[test]
    fn byte_runs_wait_for_their_end() {
        let tokenizer = tokenizer(Settings { decoder: &sequence(&[REPLACE, FALLBACK, FUSE]), ..Settings::default() });
        let mut detokenizer = tokenizer.detokenizer(true);
        let mut push = |token: &str| detokenizer.push(tokenizer.token_to_id(token).unwrap()).unwrap().to_owned();
        assert_eq!(push("<0xC3>"), "");
        assert_eq!(push("<0xA9>"), "");
        assert_eq!(push("a"), "éa");
        // The finished é turns back into U+FFFD when the run ends broken.
        assert_eq!([push("<0xC3>"), push("<0xA9>"), push("<0xE2>"), push("a")].concat(), "\u{FFFD}\u{FFFD}\u{FFFD}a");
    }

    #[test]
    fn the_cost_of_a_token_does_not_grow_with_the_answer() {
        let tokenizer = tokenizer(Settings { decoder: BYTES, ..Settings::default() });
        let id = tokenizer.token_to_id("a").unwrap();
        let mut detokenizer = tokenizer.detokenizer(true);
        for _ in 0..300_000 {
            assert_eq!(detokenizer.push(id).unwrap(), "a");
        }
        assert!(detokenizer.piece.capacity() < 64);
        assert!(matches!(&detokenizer.steps[..], [Step::Bytes { unfinished }] if unfinished.capacity() < 64));
    }
}
