//! Gates: what is right gets its name, what is not is left as `.rejected`; the search for activation forms and precisions.

use qhx_bundle::{
    Bundle, BundlePath,
    parity::{CaseKind, GateKind, Parity, StageChoice},
};
use qhx_forge::{
    ForgeError, ForgeOptions, GateOptions, GateProgress, Gated, Material, MeanBits, Precision, forge_gated, gate::suite::GivenPrompt,
};
use qhx_runtime::{LoadOptions, Model, verify};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::Duration,
};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// A few prompts, so that a search is quick.
fn few() -> Option<Vec<GivenPrompt>> {
    Some([3usize, 40, 90].map(|n| GivenPrompt::Ids((0..n as u32).map(|i| i * 37 % 300).collect())).to_vec())
}

fn forge(
    name: &str,
    out: &Path,
    precision: Precision,
    auto: bool,
    kind: Option<GateKind>,
    prompts: Option<Vec<GivenPrompt>>,
) -> Result<Gated, ForgeError> {
    let material = Material::open(&fixture(name)).unwrap();
    let mut options = ForgeOptions::new(out, precision);
    forge_gated(&material, &mut options, GateOptions { kind, auto, prompts, ..GateOptions::new(&mut |_| {}) })
}

fn parity_of(bundle: &Bundle) -> Parity {
    Parity::from_json(&bundle.read_text(&BundlePath::new("parity.json").unwrap()).unwrap()).unwrap()
}

#[test]
fn an_f32_bundle_is_through_the_strict_gate_and_verifies() {
    let folder = tempfile::tempdir().unwrap();
    // Recurrent state, shared keys and values with windows, experts, a change of rotary within the suite.
    for name in ["qwen3_5", "gemma4", "phimoe_longrope"] {
        let out = folder.path().join(name);
        let gated = forge(name, &out, Precision::F32, false, None, None).unwrap();
        let gate = &gated.parity.gate;
        assert!(gate.passed && gate.kind == GateKind::Strict && gate.flips == 0, "{name}: {}", gate.result);
        assert!(gate.result.starts_with("f32: all ") && gate.result.contains("tokens are the f32 model's choice"), "{}", gate.result);
        assert!(gate.prompts >= 10 && gate.tokens == 64 * gate.prompts, "{name}: {gate:?}");
        let lengths: Vec<_> = gated.parity.cases.iter().map(|case| case.prompt_ids.len()).collect();
        assert!(lengths.contains(&1) && lengths.iter().any(|&n| n > 512) && lengths.contains(&600), "{name}: {lengths:?}");
        let media: Vec<_> = gated.parity.cases.iter().filter(|case| case.kind == CaseKind::Media).map(|case| &*case.name).collect();
        let expected: &[&str] = match name {
            "gemma4" => &["image1", "sound1", "image and sound", "image2", "sound2"],
            "qwen3_5" => &["image1", "image2"],
            _ => &[],
        };
        assert_eq!(media, expected, "{name}");
        let covered: usize = gate.covered.iter().map(|covered| covered.prompts).sum();
        assert!(covered == gate.prompts && gate.covered.iter().all(|c| c.prompts == c.of) && gate.limited.is_none(), "{name}: {gate:?}");
        let towers: BTreeSet<_> = gated.parity.stages.iter().map(|stage| stage.stage.split('.').next().unwrap()).collect();
        assert_eq!((towers.contains("vision"), towers.contains("audio")), (!expected.is_empty(), expected.len() > 2), "{name}");
        assert!(gate.max_logit_error < 1e-2 && gate.worst_cosine > 0.999999, "{name}: {gate:?}");
        let bundle = Bundle::open(&out).unwrap();
        let file = bundle.read_text(&BundlePath::new("parity.json").unwrap()).unwrap();
        assert!(file == gated.parity.to_json().unwrap(), "{name}: the file says what was measured");
        assert_eq!(parity_of(&bundle).gate.result, gated.parity.gate.result, "{name}: and can be read");
        let page = bundle.read_text(&BundlePath::new("parity.html").unwrap()).unwrap();
        assert!(page.contains("<svg") && !page.contains("http"), "{name}: a page of its own");
        let model = Model::load(&bundle, &LoadOptions { context: Some(700), ..Default::default() }).unwrap();
        let report = verify::replay(&bundle, &model, &Default::default(), &mut |_, _| {}).unwrap();
        assert!(report.passed, "{name}: {:?}", report.problems);
        println!("{name}: {}; worst stage on this machine's instructions {:?}", report.result, report.worst_stage);
    }
}

/// However short the time: text, images, sound and both together are measured, and the verdict says how much of each.
#[test]
fn a_budget_shortens_the_suite_and_drops_no_kind() {
    let folder = tempfile::tempdir().unwrap();
    let material = Material::open(&fixture("gemma4")).unwrap();
    let out = folder.path().join("model");
    let mut options = ForgeOptions::new(&out, Precision::F32);
    let mut told = Vec::new();
    let mut progress = |progress: qhx_forge::GateProgress<'_>| told.push((progress.what.to_owned(), progress.left.is_some()));
    let gate = GateOptions { budget: Some(Duration::from_millis(1)), ..GateOptions::new(&mut progress) };
    let parity = forge_gated(&material, &mut options, gate).unwrap().parity;
    let covered: Vec<_> = parity.gate.covered.iter().map(|c| (&*c.kind, c.prompts, c.of)).collect();
    assert_eq!(covered, [("text", 1, 16), ("image", 1, 2), ("sound", 1, 2), ("image and sound", 1, 1)], "{:?}", parity.gate);
    assert_eq!(parity.gate.coverage().unwrap(), "text 1 of 16 prompts, image 1 of 2, sound 1 of 2, image and sound 1 of 1");
    assert_eq!(parity.gate.limited.as_deref(), Some("a budget of 0.001 s: 4 of 21 prompts"));
    let towers: BTreeSet<_> = parity.stages.iter().map(|stage| stage.stage.split('.').next().unwrap()).collect();
    assert!(towers.contains("vision") && towers.contains("audio"), "{towers:?}");
    assert!(parity.gate.passed, "{:?}", parity.gate);
    // The time is told as soon as the first prompt has shown it.
    let first = told.iter().position(|(_, left)| *left).unwrap();
    assert!(told[..first].iter().all(|(what, _)| what == "answering prompts") && told.len() > first + 10, "{first} of {}", told.len());
}

/// A gate for somebody who waits: a few prompts, short answers, and it says so.
#[test]
fn a_quick_gate_says_that_it_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let material = Material::open(&fixture("qwen3_vl")).unwrap();
    let out = folder.path().join("model");
    let mut options = ForgeOptions::new(&out, Precision::F32);
    let mut silent = |_: GateProgress<'_>| {};
    let gate = GateOptions { quick: true, ..GateOptions::new(&mut silent) };
    let parity = forge_gated(&material, &mut options, gate).unwrap().parity;
    assert!(parity.gate.passed && parity.cases.iter().all(|case| case.ids.len() == 13), "{:?}", parity.gate);
    assert!(parity.cases.iter().all(|case| case.kind == CaseKind::Media || case.prompt_ids.len() <= 100));
    let [text, image] = &parity.gate.covered[..] else { panic!("{:?}", parity.gate.covered) };
    assert!(text.prompts >= 6 && text.prompts < text.of && image.prompts == 1, "{:?}", parity.gate.covered);
    assert!(parity.gate.limited.unwrap().starts_with("a quick gate: "));
}

/// A choice that depended on the time it had would depend on how busy the machine is.
#[test]
fn auto_has_no_budget() {
    let folder = tempfile::tempdir().unwrap();
    let (material, out) = (Material::open(&fixture("llama")).unwrap(), folder.path().join("model"));
    let mut silent = |_: GateProgress<'_>| {};
    let gate = GateOptions { auto: true, budget: Some(Duration::from_secs(9)), ..GateOptions::new(&mut silent) };
    let error = forge_gated(&material, &mut ForgeOptions::new(&out, Precision::W8), gate).unwrap_err();
    assert!(error.to_string().contains("`auto` cannot have a budget") && !out.exists(), "{error}");
}

#[test]
fn what_is_below_its_gate_is_left_as_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    // Four bits cannot give every token of a tiny random model.
    let gated = forge("llama", &out, Precision::W4, false, Some(GateKind::Strict), few()).unwrap();
    assert!(!gated.parity.gate.passed && gated.parity.gate.flips > 0);
    assert!(!out.exists() && gated.path == folder.path().canonicalize().unwrap().join("model.rejected"), "{:?}", gated.path);
    let rejected = Bundle::open(&gated.path).unwrap();
    let parity = parity_of(&rejected);
    let flips: usize = parity.cases.iter().map(|case| case.flips.len()).sum();
    assert_eq!(flips, parity.gate.flips, "every flip is in the report");
    assert!(parity.choices.is_some_and(|choices| choices.tried.len() == 2 && choices.note.contains("even with f32 activations")));
}

/// What is computed follows from the precision, and not from how much time a gate has.
#[test]
fn a_gate_with_a_budget_and_a_quick_one_choose_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let strict =
        || GateOptions { kind: Some(GateKind::Strict), prompts: few(), ..GateOptions::new(Box::leak(Box::new(|_: GateProgress<'_>| {}))) };
    let hour = Some(Duration::from_secs(3600));
    let plain = folder.path().join("plain");
    qhx_forge::forge_checkpoint(&fixture("llama"), &mut ForgeOptions::new(&plain, Precision::W4)).unwrap();
    let program = |path: &Path| std::fs::read(path.join("programs/text.json")).unwrap();
    let material = Material::open(&fixture("llama")).unwrap();
    for (name, gate) in [("budget", GateOptions { budget: hour, ..strict() }), ("quick", GateOptions { quick: true, ..strict() })] {
        let gated = forge_gated(&material, &mut ForgeOptions::new(&folder.path().join(name), Precision::W4), gate).unwrap();
        assert!(!gated.parity.gate.passed && gated.parity.choices.is_none(), "{name}: {:?}", gated.parity.gate);
        assert!(program(&gated.path) == program(&plain), "{name}");
    }
}

/// A scale per row is coarser than one per block, and the search measures what the bundle has.
#[test]
fn stages_are_measured_with_the_scales_that_are_stored() {
    let errors = [Precision::W4, Precision::W4Row].map(|precision| {
        let folder = tempfile::tempdir().unwrap();
        let gated = forge("llama", &folder.path().join("model"), precision, false, Some(GateKind::Strict), few()).unwrap();
        assert_eq!(gated.manifest.precision, precision.to_string());
        let error = |stage: &StageChoice| stage.errors["f32 activations"];
        gated.parity.choices.unwrap().stages.iter().filter(|stage| stage.stage.ends_with("ffn")).map(error).sum::<f64>()
    });
    assert!(errors[1] > 1.2 * errors[0], "{errors:?}");
}

#[test]
fn integer_activations_go_where_they_hurt_too_much() {
    let folder = tempfile::tempdir().unwrap();
    // Strict is harder than int8 activations can do on a random model, and within reach of f32 ones for some: either way the table says what was tried.
    let gated = forge("qwen3", &folder.path().join("model"), Precision::W8, false, Some(GateKind::Strict), few()).unwrap();
    if let Some(choices) = &gated.parity.choices {
        assert!(choices.tried[0].mixture == "w8" && !choices.tried[0].passed);
        let errors = &choices.stages[0].errors;
        assert!(errors["as planned"] > errors["f32 activations"], "{errors:?}");
        assert!(gated.parity.stages.iter().any(|stage| stage.activations == ["f32"]), "the programs take f32 activations");
    }
    let sizes = gated.parity.stages.iter().find(|stage| stage.stage == "layers.0.ffn").unwrap();
    assert_eq!(sizes.encodings[0], "i8_row", "the weights stay");
}

#[test]
fn auto_finds_a_mixture_that_is_through() {
    let folder = tempfile::tempdir().unwrap();
    let gated = forge("llama", &folder.path().join("model"), Precision::W8, true, None, few()).unwrap();
    assert!(gated.parity.gate.passed, "{}", gated.parity.gate.result);
    assert_eq!(gated.manifest.precision, "auto");
    let choices = gated.parity.choices.unwrap();
    let tried_best = choices.tried.iter().filter(|tried| tried.passed).map(|tried| tried.bytes).min();
    let bundle = Bundle::open(&gated.path).unwrap();
    let program = bundle.program("text").unwrap();
    let bytes: u64 = program.weights.values().map(|w| qhx_runtime::memory::tensor_bytes(w.encoding, &w.shape)).sum();
    assert_eq!(Some(bytes), tried_best, "least bytes wins: {:#?}", choices.tried);
    for choice in &choices.stages {
        assert!(choice.errors.len() >= 2 && !choice.chosen.is_empty(), "{choice:?}");
    }
    println!("{}\n{:#?}", choices.note, choices.tried);
}

#[test]
fn bits_are_kept_and_more_of_them_lose_less() {
    let folder = tempfile::tempdir().unwrap();
    let kls = [5.0, 6.0, 8.0].map(|bits| {
        let precision = Precision::Bits(MeanBits::new(bits).unwrap());
        let gated = forge("qwen3", &folder.path().join(format!("model-{bits}")), precision, false, None, few()).unwrap();
        assert_eq!(gated.manifest.precision, bits.to_string());
        let bundle = Bundle::open(&gated.path).unwrap();
        let stored = qhx_runtime::memory::bits_per_weight(bundle.programs().values());
        assert!(stored <= bits && stored > bits - 0.3, "{stored} bits instead of {bits}");
        gated.parity.gate.closeness.unwrap().mean_kl
    });
    assert!(kls.is_sorted_by(|a, b| a > b), "{kls:?}");
}

#[test]
fn the_same_material_gives_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|place| {
        std::fs::create_dir(folder.path().join(place)).unwrap();
        forge("phimoe", &folder.path().join(place).join("model"), Precision::W8, false, None, few()).unwrap()
    });
    assert_eq!(a.manifest, b.manifest);
    assert!(!a.parity.cases.is_empty() && a.parity.numerics == "cpu, portable");
}

#[test]
fn prompts_that_cannot_be_used_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    let error = |prompts| {
        let material = Material::open(&fixture("llama")).unwrap();
        let mut begun = |_: qhx_forge::Progress<'_>| panic!("it is told before any work begins");
        let mut options = ForgeOptions { progress: Some(&mut begun), ..ForgeOptions::new(&out, Precision::F32) };
        let mut measured = |_: qhx_forge::GateProgress<'_>| panic!("nor measured");
        let gate = GateOptions { prompts: Some(prompts), ..GateOptions::new(&mut measured) };
        forge_gated(&material, &mut options, gate).unwrap_err().to_string()
    };
    assert!(
        error(vec![GivenPrompt::Ids(vec![1]), GivenPrompt::Ids(vec![99999])]).contains("prompt 2 of the gate's suite has the id 99999")
    );
    assert!(error(vec![GivenPrompt::Ids(vec![])]).contains("has no ids"));
    assert!(error(vec![GivenPrompt::Ids(vec![1; 4096])]).contains("fit the model's context"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().filter(|e| e.as_ref().unwrap().path().is_dir()).count(), 0, "nothing is left");
}
