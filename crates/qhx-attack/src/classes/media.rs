//! Images and sounds.

use super::{Bench, Case, Outcome};
use crate::{mutate::mutate_bytes, random::Random, seeds::Seeds};
use qhx_attack::probes;

const FILE: &str = "medium";

pub(super) fn make(seeds: &Seeds, random: &mut Random) -> Case {
    let mut file = random.pick(&seeds.media).clone();
    let other = random.pick(&seeds.media).clone();
    let within = if random.one_in(2) { 128 } else { file.len() };
    mutate_bytes(&mut file, within, &other, random);
    let flag = random.word(&["--image", "--audio"]);
    Case::of(FILE, file)
        .command(&format!("generate {{bundles}}/gemma4 {flag} {{case}}/{FILE} --user Look. --max-new 1 --context 128 --json"))
}

pub(super) fn attempt(case: &Case, _: &Bench) -> Outcome {
    let file = case.file(FILE);
    probes::image(file).or_else(|not_an_image| probes::sound(file).map_err(|not_a_sound| format!("{not_an_image}; {not_a_sound}")))
}
