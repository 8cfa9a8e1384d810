//! `tokenizer.json` files.

use super::{Bench, Case, Outcome, bundle, refused};
use crate::{mutate::mutate_json, random::Random, seeds::Seeds};
use qhx_runtime::text::{SpecialTokens, Tokenizer};

const FILE: &str = "tokenizer.json";

pub(super) fn make(seeds: &Seeds, random: &mut Random) -> Case {
    let mut files = random.pick(&seeds.bundles).clone();
    if let Some(tokenizer) = files.get_mut(FILE) {
        *tokenizer = mutate_json(tokenizer, random);
    }
    bundle::rehash(&mut files);
    Case { files, ..Case::default() }.command(random.word(&[
        "generate {case} --prompt Once<|im_end|>upon --max-new 2 --context 64 --json",
        "generate {case} --user Hello --max-new 2 --context 512 --json",
    ]))
}

pub(super) fn attempt(case: &Case, _: &Bench) -> Outcome {
    let tokenizer = Tokenizer::from_bytes(case.file(FILE)).map_err(refused)?;
    let texts = [
        "Hello, world!",
        "",
        " \t\n\r\u{a0}",
        "<|im_start|>user\n<s></s>",
        "naïve 日本語 👩‍👩‍👧 e\u{301}\u{0}",
        &"ab ".repeat(700),
        &"a".repeat(4000),
    ];
    let mut told = String::new();
    for text in texts {
        for special in [SpecialTokens::Parse, SpecialTokens::AsText] {
            let ids = match tokenizer.encode(text, true, special) {
                Ok(ids) => ids,
                Err(error) => {
                    told += &error.to_string();
                    continue;
                }
            };
            let decoded = tokenizer.decode(&ids, true).map_err(refused);
            told += &format!("{} {} ", ids.len(), decoded.map_or_else(|reason| reason, |text| text.len().to_string()));
        }
    }
    let mut streamed = tokenizer.detokenizer(false);
    for id in [0, 1, 2, 77, 300, u32::MAX] {
        let _ = streamed.push(id);
    }
    let _ = streamed.flush();
    Ok(told)
}
