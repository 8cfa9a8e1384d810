//! Panics of the tokenizers library that become errors are not reported; others still are. Alone in its process: there is one panic hook.

use qhx_text::{SpecialTokens, Tokenizer, TokenizerError};
use std::sync::atomic::{AtomicUsize, Ordering};

static REPORTS: AtomicUsize = AtomicUsize::new(0);

#[test]
fn a_caught_panic_prints_nothing() {
    std::panic::set_hook(Box::new(|_| {
        REPORTS.fetch_add(1, Ordering::Relaxed);
    }));
    // Words of no characters: the library divides by their length.
    let file = br#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "FixedLength", "length": 0},
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}"#;
    let tokenizer = Tokenizer::from_bytes(file).expect("loads");
    let encoded = tokenizer.encode("a", false, SpecialTokens::Parse);
    assert!(matches!(encoded, Err(TokenizerError::Encode { .. })), "{encoded:?}");
    assert_eq!(REPORTS.load(Ordering::Relaxed), 0);
    let caught = std::panic::catch_unwind(|| {
        let numbers: Vec<u32> = Vec::new();
        numbers[std::hint::black_box(1)]
    });
    assert!(caught.is_err());
    assert_eq!(REPORTS.load(Ordering::Relaxed), 1);
}
