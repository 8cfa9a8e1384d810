//! `tokenizer.json` files.

use super::{Bench, Case, Outcome, bundle};
use crate::{mutate::mutate_json, random::Random, seeds::Seeds};
use qhx_attack::probes;

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
    probes::tokenizer(case.file(FILE))
}
