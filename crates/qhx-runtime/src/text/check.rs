//! What a tokenizer file must not contain, checked before the tokenizers library builds anything from it.
//!
//! The library reports malformed files itself. It does not bound what a well-formed but hostile pipeline does to a text: a short chain
//! of replacements can blow one character up to any size. Such chains are refused here.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// How much longer a normaliser or decoder may make a text. Published pipelines stay in the hundreds, and texts that reach
/// even that do not occur.
const MAX_GROWTH: f64 = 16_384.0;

/// The small parts of a tokenizer file; its vocabulary is passed over.
#[derive(Deserialize)]
struct Outline {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    decoder: Value,
    #[allow(dead_code)]
    model: IgnoredAny,
}

/// Says what is wrong with the file, if anything here is.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let outline: Outline = serde_json::from_slice(bytes).map_err(|error| format!("{error}"))?;
    for (name, part) in [("normalizer", &outline.normalizer), ("decoder", &outline.decoder)] {
        let growth = growth(part);
        if growth.is_nan() || growth > MAX_GROWTH {
            return Err(format!("its {name} can make a text {growth:.0} times longer, at most {MAX_GROWTH} is allowed"));
        }
    }
    Ok(())
}

/// An upper bound of how many times longer this step makes a text of at least one byte.
fn growth(step: &Value) -> f64 {
    let bytes_of = |value: &Value| value.as_str().map_or(0, str::len) as f64;
    let steps = |name: &str| step[name].as_array().map(|steps| steps.iter().map(growth).product::<f64>());
    match step["type"].as_str() {
        Some("Sequence") => steps("normalizers").or_else(|| steps("decoders")).unwrap_or(1.0),
        // A pattern that matches nothing but a position can match between any two bytes.
        Some("Replace") => match step["pattern"]["String"].as_str() {
            Some(pattern) if !pattern.is_empty() => (bytes_of(&step["content"]) / pattern.len() as f64).max(1.0),
            _ => bytes_of(&step["content"]) + 1.0,
        },
        Some("Prepend") => bytes_of(&step["prepend"]) + 1.0,
        Some("ByteLevel") => 2.0,
        // One Arabic sign of 3 bytes stands for a sentence of 33.
        Some("NFKD" | "NFKC" | "Precompiled" | "Nmt") => 11.0,
        Some("NFD" | "NFC" | "BertNormalizer") => 4.0,
        Some("Lowercase") => 1.5,
        Some("Strip" | "StripAccents" | "Fuse" | "ByteFallback" | "Metaspace") | None => 1.0,
        Some(_) => 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::check;

    fn file(normalizer: &str, decoder: &str) -> String {
        format!(r#"{{"model": {{}}, "normalizer": {normalizer}, "decoder": {decoder}}}"#)
    }

    #[test]
    fn ordinary_pipelines_pass() {
        let normalizer = r#"{"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}"#;
        assert_eq!(check(file(normalizer, "null").as_bytes()), Ok(()));
        assert_eq!(check(file("null", r#"{"type": "ByteLevel"}"#).as_bytes()), Ok(()));
        assert_eq!(check(br#"{"model": {}}"#), Ok(()));
    }

    #[test]
    fn exploding_pipelines_are_refused() {
        let doubling = r#"{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}"#;
        let chain = |key: &str, steps: usize| format!(r#"{{"type": "Sequence", "{key}": [{}]}}"#, vec![doubling; steps].join(","));
        assert_eq!(check(file(&chain("normalizers", 14), "null").as_bytes()), Ok(()));
        assert!(check(file(&chain("normalizers", 64), "null").as_bytes()).unwrap_err().contains("normalizer"));
        assert!(check(file(&chain("normalizers", 4000), "null").as_bytes()).is_err());
        assert!(check(file("null", &chain("decoders", 64)).as_bytes()).unwrap_err().contains("decoder"));
        let between = format!(r#"{{"type": "Replace", "pattern": {{"Regex": ""}}, "content": "{}"}}"#, "x".repeat(20_000));
        assert!(check(file(&between, "null").as_bytes()).is_err());
    }

    #[test]
    fn what_is_not_a_tokenizer_is_an_error() {
        for bytes in [&b""[..], b"{", b"[]", b"{}", b"\xff\xfe", b"{\"model\": 1", b"null"] {
            assert!(check(bytes).is_err());
        }
    }
}
