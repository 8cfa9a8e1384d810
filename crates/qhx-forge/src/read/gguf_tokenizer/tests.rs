use super::*;
use tokenizers::Tokenizer;

fn texts(texts: &[&str]) -> Meta {
    Meta::Array(Array::Text(texts.iter().map(|t| t.to_string()).collect()))
}

fn text(text: &str) -> Meta {
    Meta::Text(text.to_string())
}

fn types(types: &[i32]) -> Meta {
    Meta::Array(Array::I32(types.to_vec()))
}

/// Metadata of the tokenizer, without the prefix that all keys have.
fn metadata(keys: &[(&str, Meta)]) -> Metadata {
    let mut metadata = Metadata::default();
    for (key, value) in keys {
        metadata.insert(format!("tokenizer.ggml.{key}"), value.clone());
    }
    metadata
}

fn byte_level_keys(pre: &str) -> Vec<(&'static str, Meta)> {
    vec![
        ("model", text("gpt2")),
        ("pre", text(pre)),
        ("tokens", texts(&["<s>", "</s>", "a", "b", "ab", "Ġ", "Ġa", "1", "11", "<tool>", "Ì", "ģ", "aÌ"])),
        ("token_type", types(&[3, 3, 1, 1, 1, 1, 1, 1, 1, 4, 1, 1, 1])),
        ("merges", texts(&["a b", "Ġ a", "1 1", "a Ì"])),
        ("eos_token_id", Meta::U32(1)),
    ]
}

fn sentence_piece_keys() -> Vec<(&'static str, Meta)> {
    let tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "ab", "▁a", "▁ab", "aab", "aa"];
    let scores = [0.0, 0.0, 0.0, 0.0, -10.0, -11.0, -12.0, -3.0, -4.0, -5.0, -7.0, -6.0];
    vec![
        ("model", text("llama")),
        ("tokens", texts(&tokens)),
        ("scores", Meta::Array(Array::F32(scores.to_vec()))),
        ("token_type", types(&[2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 1, 1])),
    ]
}

fn replaced(mut keys: Vec<(&'static str, Meta)>, key: &'static str, value: Option<Meta>) -> Metadata {
    keys.retain(|(k, _)| *k != key);
    keys.extend(value.map(|value| (key, value)));
    metadata(&keys)
}

fn refused(metadata: &Metadata) -> String {
    build(metadata).expect_err("this should be refused").to_string()
}

fn tokens(built: &GgufTokenizer, text: &str) -> Vec<String> {
    let tokenizer = Tokenizer::from_bytes(&built.tokenizer_json).unwrap();
    tokenizer.encode(text, true).unwrap().get_tokens().to_vec()
}

#[test]
fn byte_level_pre_tokenizers_differ() {
    let split = |pre: &str, text: &str| {
        let mut metadata = metadata(&byte_level_keys(pre));
        metadata.insert("tokenizer.ggml.bos_token_id".into(), Meta::U32(0));
        tokens(&build(&metadata).unwrap(), text)
    };
    assert_eq!(split("gpt-2", "ab a11"), ["ab", "Ġa", "11"]);
    assert_eq!(split("smollm", "ab a11"), ["ab", "Ġa", "1", "1"], "digits one by one");
    assert_eq!(split("default", "a1111"), ["a", "11", "1", "1"], "three digits at a time");
    assert_eq!(split("llama-bpe", "ab11"), ["<s>", "ab", "11"], "texts begin with bos");
    assert_eq!(split("llama-bpe", "1111"), ["<s>", "11", "1", "1"], "three digits at a time");
    assert_eq!(split("qwen2", "a11"), ["a", "1", "1"]);
    // A combining mark: one word with its letter in the newest, a sign of its own before; `aÌ` can only merge inside a word.
    assert_eq!(split("llama-bpe", "b\u{301}"), ["<s>", "b", "Ì", "ģ"]);
    assert_eq!(split("llama-bpe", "a\u{301}"), ["<s>", "a", "Ì", "ģ"]);
    assert_eq!(split("gpt-2", "a<tool>b<s>"), ["a", "<tool>", "b", "<s>"], "added and special tokens are found in the text");
}

#[test]
fn combining_marks_and_normal_forms() {
    // With ẗ̀ there is no single character, so the normal form keeps the marks apart.
    let keys = |pre: &str| {
        let mut keys = byte_level_keys(pre);
        keys.retain(|(k, _)| *k != "tokens" && *k != "merges" && *k != "token_type");
        keys.push(("tokens", texts(&["q", "Ì", "ģ", "qÌ", "Ã", "©", "e"])));
        keys.push(("merges", texts(&["q Ì"])));
        build(&metadata(&keys)).unwrap()
    };
    assert_eq!(tokens(&keys("qwen2"), "q\u{301}"), ["q", "Ì", "ģ"]);
    assert_eq!(tokens(&keys("qwen35"), "q\u{301}"), ["qÌ", "ģ"], "the mark stays with its letter");
    assert_eq!(tokens(&keys("qwen2"), "e\u{301}"), ["Ã", "©"], "composed before anything else");
}

#[test]
fn sentence_piece_merges_follow_the_scores() {
    let built = build(&metadata(&sentence_piece_keys())).unwrap();
    let json: Value = serde_json::from_slice(&built.tokenizer_json).unwrap();
    let expected = json!([["a", "b"], ["▁", "a"], ["▁a", "b"], ["▁", "ab"], ["a", "a"], ["aa", "b"], ["a", "ab"]]);
    assert_eq!(json["model"]["merges"], expected);
    assert_eq!((built.bos, built.eos.as_slice(), built.add_bos), (Some(1), &[2][..], true));
    assert_eq!(tokens(&built, "ab aab\n?"), ["<s>", "▁ab", "▁a", "ab", "<0x0A>", "<unk>"]);
    let tokenizer = Tokenizer::from_bytes(&built.tokenizer_json).unwrap();
    assert_eq!(tokenizer.decode(&[1, 9, 8, 3], true).unwrap(), "ab a\n");

    let without_prefix = build(&replaced(sentence_piece_keys(), "add_space_prefix", Some(Meta::Bool(false)))).unwrap();
    assert_eq!(tokens(&without_prefix, "ab ab"), ["<s>", "ab", "▁ab"]);
    let with_end = build(&replaced(sentence_piece_keys(), "add_eos_token", Some(Meta::Bool(true)))).unwrap();
    assert_eq!(tokens(&with_end, "a"), ["<s>", "▁a", "</s>"]);
    let without_start = build(&replaced(sentence_piece_keys(), "add_bos_token", Some(Meta::Bool(false)))).unwrap();
    assert_eq!(tokens(&without_start, "a"), ["▁a"]);
}

#[test]
fn ends_of_answers() {
    let mut keys = byte_level_keys("gpt-2");
    keys.retain(|(k, _)| *k != "tokens" && *k != "token_type" && *k != "merges");
    keys.push(("tokens", texts(&["a", "</s>", "<|im_end|>", "<|eot_id|>", "<|end|>", ""])));
    keys.push(("token_type", types(&[1, 3, 3, 3, 1, 1])));
    keys.push(("merges", texts(&[])));
    keys.push(("eot_token_id", Meta::U32(3)));
    keys.push(("padding_token_id", Meta::U32(u32::MAX)));
    let built = build(&metadata(&keys)).unwrap();
    assert_eq!(built.eos, [1, 3, 2], "eos, eot, then by text; an ordinary token is none");
    assert_eq!(built.tokenizer_config["pad_token"], Value::Null, "an impossible padding token is none");
    let json: Value = serde_json::from_slice(&built.tokenizer_json).unwrap();
    assert_eq!(json["model"]["vocab"]["[EMPTY_5]"], 5);
}

#[test]
fn what_is_refused() {
    let byte_level = |key, value| refused(&replaced(byte_level_keys("gpt-2"), key, value));
    assert!(byte_level("model", Some(text("t5"))).contains("the tokenizer is of the kind `t5`; qhx reads `gpt2` and `llama`"));
    assert!(byte_level("model", None).contains("it has no tokenizer"));
    let error = byte_level("pre", Some(text("tekken")));
    assert!(
        error.contains("the pre-tokenizer `tekken` (`tokenizer.ggml.pre`) is not known") && error.contains("Hugging Face folder"),
        "{error}"
    );
    assert!(byte_level("merges", None).contains("no merges"));
    assert!(byte_level("merges", Some(texts(&["ab"]))).contains("merge 0 is `ab` and not two parts"));
    assert!(byte_level("merges", Some(texts(&["a b", "b a"]))).contains("merge 1 is `b a` but `ba` is not a token"));
    assert!(byte_level("tokens", None).contains("it has no vocabulary"));
    assert!(byte_level("tokens", Some(texts(&["a", "b", "a"]))).contains("3 tokens but 13 token types"));
    assert!(byte_level("token_type", Some(text("x"))).contains("should be a list of 32-bit whole numbers"));
    assert!(byte_level("eos_token_id", Some(Meta::U32(13))).contains("the eos token is 13 but there are only 13 tokens"));
    assert!(byte_level("add_bos_token", Some(Meta::Bool(true))).contains("is set but the file names no bos token"));
    let mut twice = byte_level_keys("gpt-2");
    twice.retain(|(k, _)| *k != "token_type");
    assert!(refused(&replaced(twice, "tokens", Some(texts(&["a", "b", "a"])))).contains("tokens 0 and 2 are both `a`"));

    let piece = |key, value| refused(&replaced(sentence_piece_keys(), key, value));
    assert!(piece("scores", None).contains("no scores"));
    assert!(piece("scores", Some(Meta::Array(Array::F32(vec![1.0])))).contains("12 tokens but 1 scores"));
    assert!(piece("scores", Some(Meta::Array(Array::F32(vec![f32::NAN; 12])))).contains("the score of token 0 is not a number"));
    let mut long = sentence_piece_keys();
    long.retain(|(k, _)| !["scores", "token_type"].contains(k));
    long.push(("scores", Meta::Array(Array::F32(vec![0.0]))));
    assert!(refused(&replaced(long, "tokens", Some(texts(&[&"x".repeat(5000)])))).contains("token 0 has 5000 characters"));
}
