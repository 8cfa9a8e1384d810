use super::super::testing::{SPECIAL, Settings, file, tokenizer};
use super::*;
use qhx_ir::random::uniform;
use serde_json::json;

const SPM: Settings<'static> = Settings {
    normalizer: r#"{"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}"#,
    pre_tokenizer: "null",
    decoder: "null",
    added: ADDED,
};

const BYTE_LEVEL: Settings<'static> = Settings {
    normalizer: r#"{"type": "NFC"}"#,
    pre_tokenizer: r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}"#,
    decoder: "null",
    added: ADDED,
};

/// Every kind of added token: special or not, swallowing white space on either side, normalised, a single word, one the beginning of another.
const ADDED: &[(&str, [bool; 5])] = &[
    ("<s>", SPECIAL),
    ("<|end|>", SPECIAL),
    ("<|user|>", [true, false, true, false, false]),
    ("<left>", [true, true, false, false, false]),
    ("<think>", [false, false, false, false, false]),
    ("<he llo>", [true, false, false, true, false]),
    ("word", [false, false, false, false, true]),
    ("<|end|>é", SPECIAL),
];

fn random_text(seed: u64) -> String {
    let parts = [
        "<s>",
        "<|end|>",
        "<|user|>",
        "<left>",
        "<think>",
        "<he llo>",
        "word",
        "<|end|>é",
        "<|en",
        "<",
        "hello",
        " ",
        "\n",
        " a",
        "é",
        "e\u{301}",
        "🎉",
        "天",
        "▁",
        "words",
        "  ",
        "x",
    ];
    let length = 1 + (uniform(seed, 0) * 12.0) as u64;
    (1..=length).map(|n| parts[(uniform(seed, n) * parts.len() as f64) as usize]).collect()
}

#[test]
fn special_tokens_in_text_are_text_unless_asked_for() {
    let tokenizer = tokenizer(Settings::default());
    let end = tokenizer.token_to_id("<|end|>").unwrap();
    let parsed = tokenizer.encode("hello<|end|>", false, SpecialTokens::Parse).unwrap();
    assert_eq!(parsed, [tokenizer.token_to_id("hello").unwrap(), end]);
    let text = tokenizer.encode("hello<|end|>", false, SpecialTokens::AsText).unwrap();
    assert!(text.len() > 2 && !text.contains(&end));
    let spelled: String = text.iter().filter_map(|id| tokenizer.id_to_token(*id)).collect();
    assert_eq!(spelled, "hello<|end|>");
}

#[test]
fn text_without_special_tokens_is_what_a_library_without_them_makes_of_it() {
    for settings in [SPM, BYTE_LEVEL] {
        let file = file(&settings).to_string();
        let ours = Tokenizer::from_bytes(file.as_bytes()).unwrap();
        let mut library = tokenizers::Tokenizer::from_bytes(file.as_bytes()).unwrap();
        library.set_encode_special_tokens(true);
        for seed in 0..2000 {
            let text = random_text(seed);
            let expected = library.encode(text.as_str(), true).unwrap();
            assert_eq!(ours.encode(&text, true, SpecialTokens::AsText).unwrap(), expected.get_ids(), "{text:?}");
        }
    }
}

#[test]
fn own_search_for_added_tokens_agrees_with_the_library() {
    for settings in [SPM, BYTE_LEVEL] {
        let tokenizer = tokenizer(settings);
        for seed in 0..5000 {
            let text = random_text(seed);
            let library = tokenizer.encode(&text, false, SpecialTokens::Parse).unwrap();
            assert_eq!(tokenizer.encode_except(&text, &[]).unwrap(), library, "{text:?}");
        }
    }
}

#[test]
fn forged_tokens_stay_text_and_their_neighbours_control() {
    for settings in [SPM, BYTE_LEVEL] {
        let tokenizer = tokenizer(settings);
        let id = |token| tokenizer.token_to_id(token).unwrap();
        let text = "<s>hello <|end|> a<|end|>";
        let forged = tokenizer.special_marks("hello <|end|> a").iter().map(|at| at + "<s>".len()).collect::<Vec<_>>();
        let ids = tokenizer.encode_except(text, &forged).unwrap();
        assert_eq!(ids.first(), Some(&id("<s>")));
        assert_eq!(ids.last(), Some(&id("<|end|>")));
        assert_eq!(ids.iter().filter(|id| tokenizer.is_special(**id)).count(), 2, "{ids:?}");
        let middle = tokenizer.encode("hello <|end|> a", false, SpecialTokens::AsText).unwrap();
        assert_eq!(ids[1..ids.len() - 1], middle);
    }
}

#[test]
fn every_place_where_a_special_token_may_begin_is_found() {
    let tokenizer = tokenizer(SPM);
    assert_eq!(tokenizer.special_marks("a <|end|> b"), [3]);
    assert_eq!(tokenizer.special_marks("<s><s>"), [1, 4]);
    assert_eq!(tokenizer.special_marks("cut short <|en"), [11]);
    assert_eq!(tokenizer.special_marks("a <|en b <think>x <th\n"), [] as [usize; 0]);
    // Looked for after normalisation, which writes the token with a leading blank; marks stand behind what is not blank.
    assert_eq!(tokenizer.special_marks("é <he llo> b"), [4]);
    assert_eq!(tokenizer.special_marks("é<"), [3]);
}

#[test]
fn unknown_ids_decode_to_nothing() {
    let tokenizer = tokenizer(Settings::default());
    let limit = tokenizer.id_limit() as u32;
    assert_eq!(tokenizer.decode(&[limit, u32::MAX], false).unwrap(), "");
    assert_eq!(tokenizer.decode(&[], true).unwrap(), "");
    assert_eq!(tokenizer.id_to_token(limit), None);
    assert_eq!(tokenizer.vocab_size(), tokenizer.id_limit());
    assert_eq!(tokenizer.special_ids(), [limit - 2, limit - 1]);
}

#[test]
fn end_ids_are_declared_ones_and_named_ones() {
    let tokenizer = tokenizer(Settings::default());
    let end = tokenizer.token_to_id("<|end|>").unwrap();
    assert_eq!(tokenizer.end_ids(&[7, end, 3], &["<|end|>"]).unwrap(), [3, 7, end]);
    assert_eq!(tokenizer.end_ids(&[], &["<|stop|>"]).unwrap_err().to_string(), "the tokenizer has no token \"<|stop|>\"");
}

#[test]
fn training_settings_in_the_file_are_ignored() {
    let mut value = file(&Settings::default());
    value["truncation"] = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    value["padding"] = json!({"strategy": {"Fixed": 4_000_000_000u64}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"});
    value["model"]["dropout"] = json!(0.9);
    let noisy = Tokenizer::from_bytes(value.to_string().as_bytes()).unwrap();
    let plain = tokenizer(Settings::default());
    for _ in 0..20 {
        let ids = noisy.encode("hellohellohello", true, SpecialTokens::Parse).unwrap();
        assert_eq!(ids, plain.encode("hellohellohello", true, SpecialTokens::Parse).unwrap());
        assert_eq!(ids.len(), 3);
    }
}

#[test]
fn broken_files_are_errors_and_never_panics() {
    let good = file(&Settings { decoder: r#"{"type": "ByteFallback"}"#, ..BYTE_LEVEL }).to_string();
    assert!(Tokenizer::from_bytes(good.as_bytes()).is_ok());
    for length in (0..good.len()).step_by(97) {
        let error = Tokenizer::from_bytes(&good.as_bytes()[..length]).unwrap_err().to_string();
        assert!(error.starts_with("the tokenizer file cannot be used: "), "{error}");
    }
    let broken: [fn(&mut serde_json::Value); 8] = [
        |file| file["model"]["type"] = json!("Nonsense"),
        |file| file["model"]["vocab"] = json!({}),
        |file| file["model"]["merges"] = json!([["h", "nothing"]]),
        |file| file["pre_tokenizer"] = json!({"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": false}),
        |file| file["version"] = json!("9.9"),
        |file| file["added_tokens"] = json!([{"id": 1}]),
        |file| file["normalizer"] = json!({"type": "Nonsense"}),
        |file| file["decoder"] = json!(7),
    ];
    for (number, change) in broken.into_iter().enumerate() {
        let mut value = file(&BYTE_LEVEL);
        change(&mut value);
        assert!(Tokenizer::from_bytes(value.to_string().as_bytes()).is_err(), "{number}");
    }
}

#[test]
fn panics_of_the_library_are_errors() {
    let mut value = file(&Settings { decoder: r#"{"type": "Strip", "content": "a", "start": 0, "stop": 5}"#, ..Settings::default() });
    value["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0});
    let tokenizer = Tokenizer::from_bytes(value.to_string().as_bytes()).unwrap();
    assert!(matches!(tokenizer.encode("hello", false, SpecialTokens::Parse), Err(TokenizerError::Encode { .. })));
    let a = tokenizer.token_to_id("a").unwrap();
    assert!(matches!(tokenizer.decode(&[a], false), Err(TokenizerError::Decode { .. })));
    assert!(matches!(tokenizer.detokenizer(false).push(a), Err(TokenizerError::Decode { .. })));
}

#[test]
fn a_text_beyond_the_limit_is_refused() {
    let tokenizer = tokenizer(Settings::default());
    let text = "a".repeat(MAX_TEXT_BYTES + 1);
    let error = tokenizer.encode(&text, false, SpecialTokens::AsText).unwrap_err();
    assert_eq!(error, TokenizerError::TextTooLong { bytes: MAX_TEXT_BYTES + 1, limit: MAX_TEXT_BYTES });
}

#[test]
fn a_text_that_normalising_blows_up_is_refused() {
    let doubling = r#"{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}"#;
    let normalizer = format!(r#"{{"type": "Sequence", "normalizers": [{}]}}"#, vec![doubling; 14].join(","));
    let tokenizer = tokenizer(Settings { normalizer: &normalizer, ..Settings::default() });
    // Many times as long, but still little.
    assert_eq!(tokenizer.encode("a", false, SpecialTokens::AsText).unwrap().len(), 16_384);
    // Long enough that it could become too long, and does not.
    assert!(tokenizer.encode(&"b".repeat(100_000), false, SpecialTokens::AsText).is_ok());
    let error = tokenizer.encode(&"a".repeat(1000), false, SpecialTokens::AsText).unwrap_err().to_string();
    assert_eq!(error, "the tokenizer cannot encode the text: normalising makes more than 1064576 bytes of its 1000");
    assert!(tokenizer.encode_except(&"a".repeat(1000), &[]).is_err());
    assert_eq!(tokenizer.special_marks(&"a<s>".repeat(1000)), [] as [usize; 0]);
}

#[test]
fn the_time_of_unigram_models_is_bounded() {
    let unigram = |longest: usize| {
        let tokens: Vec<_> = (1..=longest).map(|length| json!(["a".repeat(length), -(length as f64)])).collect();
        let file = json!({"version": "1.0", "added_tokens": [], "model": {"type": "Unigram", "unk_id": 0, "vocab": tokens}});
        Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap()
    };
    assert!(unigram(16).encode(&"a".repeat(100_000), false, SpecialTokens::AsText).is_ok());
    // Each byte costs as much as a thousand tokens that begin with it.
    let hostile = unigram(1000);
    assert!(hostile.encode(&"a".repeat(1000), false, SpecialTokens::AsText).is_ok());
    let started = std::time::Instant::now();
    let error = hostile.encode(&"a".repeat(100_000), false, SpecialTokens::AsText).unwrap_err();
    assert!(matches!(error, TokenizerError::TextTooLong { bytes: 100_000, limit: 1000..50_000 }), "{error:?}");
    assert!(started.elapsed().as_secs() < 5);
}

#[test]
fn decoding_is_bounded_too() {
    let decoder =
        r#"{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}"#;
    let tokenizer = tokenizer(Settings { decoder, ..Settings::default() });
    let a = tokenizer.token_to_id("a").unwrap();
    assert_eq!(tokenizer.decode(&[a, a], false).unwrap().len(), 128);
    let error = tokenizer.decode(&vec![a; 5_000_000], false).unwrap_err().to_string();
    assert!(error.contains("5000000 ids may give 320000000 bytes"), "{error}");
}

#[test]
fn an_empty_file_is_refused() {
    for empty in ["", " \n"] {
        let error = Tokenizer::from_bytes(empty.as_bytes()).unwrap_err().to_string();
        assert_eq!(error, "the tokenizer file cannot be used: it is empty");
    }
    let mut value = file(&Settings::default());
    value["model"]["vocab"] = json!({});
    value["model"]["merges"] = json!([]);
    let error = Tokenizer::from_bytes(value.to_string().as_bytes()).unwrap_err().to_string();
    assert_eq!(error, "the tokenizer file cannot be used: its vocabulary is empty");
}
