//! Real tokenizer files against Python `tokenizers`: thousands of generated texts and id sequences.
//!
//! Run by `cargo xtask test`, which fetches the files and makes the cases; `QHX_REAL_TOKENIZERS` names the folder: for each `NAME.json` a `NAME.cases.json`.

use qhx_text::{SpecialTokens, Tokenizer};
use serde_json::Value;
use std::{fs, path::PathBuf};

#[test]
#[ignore = "needs real tokenizers: cargo xtask test tokenizers"]
fn real_tokenizers_agree_with_python() {
    let folder = PathBuf::from(std::env::var_os("QHX_REAL_TOKENIZERS").expect("QHX_REAL_TOKENIZERS names the folder"));
    let mut files = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let cases = entry.unwrap().path();
        let Some(name) = cases.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_suffix(".cases.json")) else { continue };
        let tokenizer = Tokenizer::from_bytes(&fs::read(cases.with_file_name(format!("{name}.json"))).unwrap()).unwrap();
        let recorded: Value = serde_json::from_slice(&fs::read(&cases).unwrap()).unwrap();
        let (encoded, decoded) = (recorded["encoded"].as_array().unwrap(), recorded["decoded"].as_array().unwrap());
        assert!(encoded.len() >= 5000, "{name}: {} texts", encoded.len());
        encoded.iter().for_each(|case| check_encoding(name, &tokenizer, case));
        decoded.iter().for_each(|case| check_decoding(name, &tokenizer, case));
        files += 1;
    }
    assert!(files >= 2, "{files} tokenizers");
}

fn check_encoding(name: &str, tokenizer: &Tokenizer, case: &Value) {
    let text = case["text"].as_str().unwrap();
    for (field, add_special, special) in [
        ("ids", false, SpecialTokens::Parse),
        ("ids_with_special", true, SpecialTokens::Parse),
        ("ids_literal", false, SpecialTokens::AsText),
    ] {
        assert_eq!(tokenizer.encode(text, add_special, special).unwrap(), ids(&case[field]), "{name}: {field} of {text:?}");
    }
}

fn check_decoding(name: &str, tokenizer: &Tokenizer, case: &Value) {
    let ids = ids(&case["ids"]);
    for (field, skip_special) in [("text", true), ("whole", false)] {
        let expected = case[field].as_str().unwrap();
        assert_eq!(tokenizer.decode(&ids, skip_special).unwrap(), expected, "{name}: {field} of {ids:?}");
        let mut streamed = String::new();
        let mut detokenizer = tokenizer.detokenizer(skip_special);
        ids.iter().for_each(|&id| streamed.push_str(detokenizer.push(id).unwrap()));
        streamed.push_str(detokenizer.flush().unwrap());
        assert_eq!(streamed, expected, "{name}: {field} of {ids:?}, streamed");
    }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}
