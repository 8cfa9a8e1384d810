//! Placement files.

use super::{Bench, Case, Outcome, bundle, refused};
use crate::{mutate::mutate_bytes, random::Random, seeds::Seeds};
use qhx_runtime::{Cancel, GenerateOptions, LoadOptions, Model, Prompt, generate, placement::Rules};

const FILE: &str = "placement.toml";
const EXAMPLE: &str = r#"default = "cpu"
prefill = "cpu"
decode = "reference"

[stages]
"embed" = "cpu"
"layers.*.attn" = "reference"
"layers.0.ffn.down_proj" = "cpu"
"lm_head" = "reference-f16"
"#;

pub(super) fn make(_: &Seeds, random: &mut Random) -> Case {
    let mut text = if random.one_in(2) { EXAMPLE.to_owned().into_bytes() } else { rules(random).into_bytes() };
    if random.one_in(2) {
        mutate_bytes(&mut text, usize::MAX, EXAMPLE.as_bytes(), random);
    }
    Case::of(FILE, text).command(random.word(&[
        "generate {bundles}/llama --placement {case}/placement.toml --ids 1,2,3 --max-new 2 --json",
        "inspect {bundles}/gemma4 --placement {case}/placement.toml --json",
    ]))
}

/// Rules that nobody would write, and the syntax that TOML allows for them.
fn rules(random: &mut Random) -> String {
    let devices = ["cpu", "reference", "reference-f16", "npu", "gpu", "auto", "", "\\u001b[31m", "cpu.cpu"];
    let words = ["layers", "*", "0", "1", "999", "attn", "ffn", "embed", "lm_head", "vision", "audio", "text", "", "**", "down_proj"];
    let mut text = String::new();
    for field in ["default", "prefill", "decode"] {
        if random.one_in(2) {
            text += &format!("{field} = \"{}\"\n", random.word(&devices));
        }
    }
    match random.below(6) {
        0 => text += &format!("deep = {}{}\n", "[".repeat(random.length(100_000)), "]".repeat(random.length(100_000))),
        1 => text += &format!("{} = 1\n", "a.".repeat(random.length(50_000)) + "a"),
        2 => text += &format!("default = \"{}\"\n", "x".repeat(random.length(2_000_000))),
        _ => {}
    }
    text += "[stages]\n";
    for _ in 0..random.length(400) {
        let stage: Vec<&str> = (0..random.length(6)).map(|_| random.word(&words)).collect();
        text += &format!("\"{}\" = \"{}\"\n", stage.join("."), random.word(&devices));
    }
    text
}

pub(super) fn attempt(case: &Case, bench: &Bench) -> Outcome {
    let rules = Rules::from_toml(&case.text(FILE)).map_err(refused)?;
    let bundle = bundle::in_memory(&bench.seeds.bundles[0])?;
    rules.check(bundle.programs().values()).map_err(refused)?;
    let options = LoadOptions { placement: Some(rules), ..bundle::load_options(&bundle) };
    let model = Model::load(&bundle, &options).map_err(refused)?;
    let mut session = model.session().map_err(refused)?;
    let options = GenerateOptions { max_new: 2, ..GenerateOptions::default() };
    let generation =
        generate(&mut session, &Prompt::from_ids(vec![1, 2, 3]), &options, &Cancel::default(), &mut |_| ()).map_err(refused)?;
    Ok(format!("{:?}", generation.ids))
}
