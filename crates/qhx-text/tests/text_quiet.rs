//! Panics of the tokenizers library become errors, and a program's panic hook can tell them from others. Alone in its process: there is one hook.

use qhx_text::{SpecialTokens, Tokenizer, TokenizerError, guard};
use std::panic;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static QUIET: AtomicUsize = AtomicUsize::new(0);
static LOUD: AtomicUsize = AtomicUsize::new(0);

fn reports() -> (usize, usize) {
    (QUIET.load(Relaxed), LOUD.load(Relaxed))
}

#[test]
fn the_library_leaves_the_panic_hook_alone_and_says_when_to_be_quiet() {
    panic::set_hook(Box::new(|_| {
        if guard::is_quiet() { &QUIET } else { &LOUD }.fetch_add(1, Relaxed);
    }));
    // Words of no characters: the library divides by their length.
    let file = br#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "FixedLength", "length": 0},
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}"#;
    let tokenizer = Tokenizer::from_bytes(file).expect("loads");
    let encoded = tokenizer.encode("a", false, SpecialTokens::Parse);
    assert!(matches!(encoded, Err(TokenizerError::Encode { .. })), "{encoded:?}");
    // The hook is still this one: it has been called, and has been told.
    assert_eq!(reports(), (1, 0));
    let divided = panic::catch_unwind(|| 1 / std::hint::black_box(0));
    assert!(divided.is_err() && !guard::is_quiet());
    assert_eq!(reports(), (1, 1));
    assert_eq!(guard::caught(|| guard::caught(guard::is_quiet)), Some(Some(true)));
}
