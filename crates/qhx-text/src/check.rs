//! What a tokenizer file must not contain, checked before the tokenizers library builds anything from it.
//!
//! The library reports malformed files itself. It does not bound what a well-formed but hostile file makes it do: a short chain of replacements blows one
//! character up to any size, a token of a megabyte becomes a tree a million nodes deep, and tokens that begin each other make each character of a text
//! cost as much as all of them together. Such files are refused here, and what is left is measured, so that a text can be refused before it is encoded.

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// How many times longer a normaliser or decoder may make a piece of text. Published pipelines stay in the hundreds; how long a whole text may become is
/// bounded apart from this, when it is known.
const MAX_GROWTH: f64 = 16_384.0;
/// Longest token. Published ones have up to a few hundred bytes.
const MAX_TOKEN_BYTES: usize = 16 << 10;
/// Longest token of a Unigram model, whose tokens become a tree as deep as the longest.
const MAX_UNIGRAM_TOKEN_BYTES: usize = 1 << 10;
/// Longest word that WordPiece looks into; its time grows with the cube of it.
const MAX_WORDPIECE_CHARACTERS: u64 = 1_000;
/// What one token may be decoded to.
const MAX_DECODED_BYTES: f64 = 1_048_576.0;

/// What is known of a file that passed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measured {
    /// How many times longer the normaliser makes a text at most.
    pub(super) growth: f64,
    /// How many times longer the decoder makes a text at most.
    pub(super) decoder_growth: f64,
    /// Bytes of the longest token, as the file spells it.
    pub(super) longest_token: usize,
    /// What encoding one byte costs at most, in steps of some 20 ns.
    pub(super) cost: usize,
}

/// The parts of a tokenizer file that are looked at.
#[derive(Deserialize)]
struct Outline {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Vec<Added>,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    #[serde(default)]
    content: String,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default)]
    vocab: Vocabulary,
    #[serde(default)]
    max_input_chars_per_word: Value,
}

/// The tokens of a model: with ids, or, for Unigram, in order and with scores.
#[derive(Default)]
struct Vocabulary {
    longest: usize,
    /// Those of a Unigram model.
    scored: Vec<String>,
}

/// Says what is wrong with the file, if anything here is.
pub(super) fn check(bytes: &[u8]) -> Result<Measured, String> {
    if bytes.trim_ascii().is_empty() {
        return Err("it is empty".to_owned());
    }
    let outline: Outline = serde_json::from_slice(bytes).map_err(|error| format!("{error}"))?;
    let mut growths = [1.0; 2];
    for (place, (name, part)) in [("normalizer", &outline.normalizer), ("decoder", &outline.decoder)].into_iter().enumerate() {
        growths[place] = growth(part)?;
        if growths[place].is_nan() || growths[place] > MAX_GROWTH {
            return Err(format!("its {name} can make a text {:.0} times longer, at most {MAX_GROWTH} is allowed", growths[place]));
        }
    }
    let [growth, decoder_growth] = growths;
    let Model { vocab, max_input_chars_per_word } = outline.model;
    let longest_added = outline.added_tokens.iter().map(|added| added.content.len()).max().unwrap_or(0);
    let longest_scored = vocab.scored.iter().map(String::len).max().unwrap_or(0);
    let longest_token = vocab.longest.max(longest_added).max(longest_scored);
    for (longest, most) in [(longest_token, MAX_TOKEN_BYTES), (longest_scored, MAX_UNIGRAM_TOKEN_BYTES)] {
        if longest > most {
            return Err(format!("its longest token has {longest} bytes, at most {most} are allowed"));
        }
    }
    if max_input_chars_per_word.as_u64().is_some_and(|most| most > MAX_WORDPIECE_CHARACTERS) {
        return Err(format!("`max_input_chars_per_word` is {max_input_chars_per_word}, at most {MAX_WORDPIECE_CHARACTERS} is allowed"));
    }
    let decoded = longest_token as f64 * decoder_growth;
    if decoded > MAX_DECODED_BYTES {
        return Err(format!("one of its tokens can be decoded to {decoded:.0} bytes, at most {MAX_DECODED_BYTES} are allowed"));
    }
    Ok(Measured { growth, decoder_growth, longest_token, cost: unigram_cost(vocab.scored) })
}

/// What finding the Unigram tokens that begin at a place costs at most: a step for each byte of the longest, and for each token that begins it a few
/// steps and a copy.
fn unigram_cost(mut tokens: Vec<String>) -> usize {
    let own = |token: &str| 4 + token.len() / 16;
    tokens.sort_unstable();
    // The tokens that begin the current one, and what they cost.
    let mut beginnings: Vec<&str> = Vec::new();
    let (mut cost, mut most) = (0, 1);
    for token in &tokens {
        while let Some(last) = beginnings.pop_if(|last| !token.starts_with(*last)) {
            cost -= own(last);
        }
        beginnings.push(token);
        cost += own(token);
        most = most.max(cost + token.len());
    }
    most
}

/// An upper bound of how many times longer this step makes a text of at least one byte.
fn growth(step: &Value) -> Result<f64, String> {
    let bytes_of = |value: &Value| value.as_str().map_or(0, str::len) as f64;
    let steps = |name: &str| step[name].as_array().map(|steps| steps.iter().map(growth).product::<Result<f64, String>>());
    Ok(match step["type"].as_str() {
        Some("Sequence") => steps("normalizers").or_else(|| steps("decoders")).unwrap_or(Ok(1.0))?,
        // A pattern that matches nothing but a position can match between any two bytes.
        Some("Replace") => match step["pattern"]["String"].as_str() {
            Some(pattern) if !pattern.is_empty() => (bytes_of(&step["content"]) / pattern.len() as f64).max(1.0),
            _ => bytes_of(&step["content"]) + 1.0,
        },
        Some("Prepend") => bytes_of(&step["prepend"]) + 1.0,
        Some("ByteLevel") => 2.0,
        Some("Precompiled") => precompiled_growth(step["precompiled_charsmap"].as_str().unwrap_or_default())?,
        // One Arabic sign of 3 bytes stands for a sentence of 33.
        Some("NFKD" | "NFKC" | "Nmt") => 11.0,
        Some("NFD" | "NFC" | "BertNormalizer") => 4.0,
        Some("Lowercase") => 1.5,
        Some("Strip" | "StripAccents" | "Fuse" | "ByteFallback" | "Metaspace") | None => 1.0,
        Some(_) => 2.0,
    })
}

/// A map of characters: how many bytes its tree has (4 bytes), the tree, and what characters are replaced with, each ended by a zero.
fn precompiled_growth(base64: &str) -> Result<f64, String> {
    let map = decoded_base64(base64);
    let Some((size, rest)) = map.split_first_chunk::<4>() else { return Ok(1.0) };
    let size = u32::from_le_bytes(*size) as usize;
    let Some(replacements) = rest.get(size..) else {
        return Err(format!("its normalizer's map of characters says it has {size} bytes and has {}", rest.len()));
    };
    let longest = replacements.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0);
    Ok((longest as f64).max(1.0))
}

/// The bytes that base64 stands for; other characters are passed over.
fn decoded_base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for digit in text.bytes().filter_map(digit) {
        bits = bits << 6 | u32::from(digit);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}

impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tokens;

        impl<'de> Visitor<'de> for Tokens {
            type Value = Vocabulary;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("tokens with ids, or a list of tokens with scores")
            }

            fn visit_unit<E>(self) -> Result<Vocabulary, E> {
                Ok(Vocabulary::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocabulary, A::Error> {
                let mut longest = 0;
                while let Some((Length(length), IgnoredAny)) = map.next_entry()? {
                    longest = longest.max(length);
                }
                Ok(Vocabulary { longest, scored: Vec::new() })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Vocabulary, A::Error> {
                let mut scored = Vec::new();
                while let Some((token, IgnoredAny)) = sequence.next_element::<(String, IgnoredAny)>()? {
                    scored.push(token);
                }
                Ok(Vocabulary { longest: 0, scored })
            }
        }

        deserializer.deserialize_any(Tokens)
    }
}

/// The length of a string that need not be kept.
struct Length(usize);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Length;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token")
            }

            fn visit_str<E>(self, text: &str) -> Result<Length, E> {
                Ok(Length(text.len()))
            }
        }

        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::{check, decoded_base64, unigram_cost};
    use serde_json::json;

    fn file(normalizer: &str, decoder: &str) -> String {
        format!(r#"{{"model": {{}}, "normalizer": {normalizer}, "decoder": {decoder}}}"#)
    }

    fn passes(file: &str) -> bool {
        check(file.as_bytes()).is_ok()
    }

    #[test]
    fn ordinary_pipelines_pass() {
        let normalizer = r#"{"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}"#;
        assert!(passes(&file(normalizer, "null")));
        assert!(passes(&file("null", r#"{"type": "ByteLevel"}"#)));
        assert!(passes(r#"{"model": {}}"#));
        let measured = check(br#"{"model": {"vocab": {"a": 0, "abc": 1}}, "added_tokens": [{"content": "<end>"}]}"#).unwrap();
        assert_eq!((measured.longest_token, measured.cost, measured.growth), (5, 1, 1.0));
    }

    #[test]
    fn exploding_pipelines_are_refused() {
        let doubling = r#"{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}"#;
        let chain = |key: &str, steps: usize| format!(r#"{{"type": "Sequence", "{key}": [{}]}}"#, vec![doubling; steps].join(","));
        assert!(passes(&file(&chain("normalizers", 14), "null")));
        assert!(check(file(&chain("normalizers", 64), "null").as_bytes()).unwrap_err().contains("normalizer"));
        assert!(!passes(&file(&chain("normalizers", 4000), "null")));
        assert!(check(file("null", &chain("decoders", 64)).as_bytes()).unwrap_err().contains("decoder"));
        let between = format!(r#"{{"type": "Replace", "pattern": {{"Regex": ""}}, "content": "{}"}}"#, "x".repeat(20_000));
        assert!(!passes(&file(&between, "null")));
        // A token of 100 bytes that is decoded to 1.6 million.
        let long = json!({"model": {"vocab": {"a".repeat(100): 0}}, "decoder": serde_json::from_str::<serde_json::Value>(&chain("decoders", 14)).unwrap()});
        assert!(check(long.to_string().as_bytes()).unwrap_err().contains("decoded to 1638400 bytes"));
    }

    #[test]
    fn maps_of_characters_are_measured() {
        assert_eq!(decoded_base64("aGVsbG8gd29ybGQ="), b"hello world");
        // No tree, and replacements of one and of six bytes.
        let map = |base64: &str| file(&json!({"type": "Precompiled", "precompiled_charsmap": base64}).to_string(), "null");
        assert_eq!(check(map("AAAAAGEAYWJjZGVmAA==").as_bytes()).unwrap().growth, 6.0);
        // A tree of four gigabytes, which the library would make room for.
        assert!(check(map("/////wAA").as_bytes()).unwrap_err().contains("4294967295"));
    }

    #[test]
    fn tokens_that_are_too_long_are_refused() {
        let bpe = |length: usize| json!({"model": {"type": "BPE", "vocab": {"a".repeat(length): 0}}}).to_string();
        assert!(passes(&bpe(16 << 10)) && !passes(&bpe((16 << 10) + 1)));
        let unigram = |length: usize| json!({"model": {"type": "Unigram", "vocab": [["a".repeat(length), 0.0]]}}).to_string();
        assert!(passes(&unigram(1024)) && !passes(&unigram(1025)));
        let added = json!({"model": {}, "added_tokens": [{"content": "a".repeat(20_000)}]}).to_string();
        assert!(check(added.as_bytes()).unwrap_err().contains("longest token has 20000 bytes"));
        let words = |most: u64| json!({"model": {"type": "WordPiece", "vocab": {}, "max_input_chars_per_word": most}}).to_string();
        assert!(passes(&words(100)) && !passes(&words(1_000_000)));
    }

    #[test]
    fn the_cost_of_unigram_tokens_is_that_of_the_longest_chain() {
        let cost = |tokens: &[&str]| unigram_cost(tokens.iter().map(ToString::to_string).collect());
        assert_eq!(cost(&[]), 1);
        assert_eq!(cost(&["ab"]), 4 + 2);
        assert_eq!(cost(&["b", "ab", "a", "abc", "ac"]), 3 * 4 + 3);
        let nested: Vec<String> = (1..=1000).map(|length| "a".repeat(length)).collect();
        assert!(unigram_cost(nested) > 30_000);
    }

    #[test]
    fn what_is_not_a_tokenizer_is_an_error() {
        for bytes in [&b"{"[..], b"[]", b"{}", b"\xff\xfe", b"{\"model\": 1", b"null", b"{\"model\": {\"vocab\": 1}}"] {
            assert!(check(bytes).is_err());
        }
        assert_eq!(check(b" \n"), Err("it is empty".to_owned()));
    }
}
