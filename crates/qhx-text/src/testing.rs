//! Small tokenizers for the tests of this module.

use super::Tokenizer;
use qhx_ir::random::uniform;
use serde_json::{Map, Value, json};

/// The parts of a tokenizer that tests vary, as JSON.
pub(super) struct Settings<'a> {
    pub(super) normalizer: &'a str,
    pub(super) pre_tokenizer: &'a str,
    pub(super) decoder: &'a str,
    /// Content, and whether it is special, swallows white space on the left, on the right, is normalised, is a single word.
    pub(super) added: &'a [(&'a str, [bool; 5])],
}

pub(super) const SPECIAL: [bool; 5] = [true, false, false, false, false];

impl Default for Settings<'_> {
    fn default() -> Self {
        Self { normalizer: "null", pre_tokenizer: "null", decoder: "null", added: &[("<s>", SPECIAL), ("<|end|>", SPECIAL)] }
    }
}

/// A BPE tokenizer with all byte tokens of both kinds, some letters and a few merges.
pub(super) fn tokenizer(settings: Settings<'_>) -> Tokenizer {
    Tokenizer::from_bytes(file(&settings).to_string().as_bytes()).unwrap()
}

/// The file of [`tokenizer`].
pub(super) fn file(settings: &Settings<'_>) -> Value {
    let mut tokens: Vec<String> = vec!["<unk>".into()];
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend((0x21..0x144).filter_map(char::from_u32).map(String::from));
    tokens.extend(["▁", "天", "he", "ll", "hell", "hello", "▁hello", "▁▁", "Ġhello", "▁a", "o▁"].map(String::from));
    let vocab: Map<String, Value> = tokens.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    let first_added = vocab.len();
    let added = settings.added.iter().enumerate().map(|(n, (content, [special, lstrip, rstrip, normalized, single_word]))| {
        json!({"id": first_added + n, "content": content, "special": special, "lstrip": lstrip, "rstrip": rstrip,
            "normalized": normalized, "single_word": single_word})
    });
    let part = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": part(settings.normalizer), "pre_tokenizer": part(settings.pre_tokenizer), "post_processor": null,
        "decoder": part(settings.decoder),
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": vocab,
            "merges": [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"], ["▁", "hello"], ["▁", "▁"], ["▁", "a"], ["o", "▁"]]},
    })
}

/// Ids below `limit`, with runs of byte tokens more often than chance would have them.
pub(super) fn random_ids(seed: u64, length: usize, limit: u32) -> Vec<u32> {
    let id = |n: u64| {
        let of = |range: std::ops::Range<u32>| range.start + (uniform(seed, 2 * n) * f64::from(range.end - range.start)) as u32;
        if uniform(seed / 2, 2 * (n / 4) + 1) < 0.4 { of(1..257) } else { of(0..limit) }
    };
    (0..length as u64).map(id).collect()
}
