//! Every family on the GPU that Vulkan offers, against Hugging Face transformers in f32: in CI, Mesa's software Vulkan. Run by `cargo xtask test gpu`.

use crate::common::{
    self, Fixture, Overlay,
    drafted::check_answers_on,
    drafts::{Counts, FAMILIES, PRECISIONS, Source, check},
    media::MediaCases,
    relative_difference,
};
use half::f16;
use qhx_bundle::Bundle;
use qhx_forge::{ForgeOptions, Precision, forge_checkpoint, gate::limits::Class};
use qhx_ir::{AlignedBytes, Device, Encoding, OpKind, WeightTensor};
use qhx_runtime::{
    Cancel, DeviceChoice, GenerateOptions, Generation, LoadOptions, LoadPlan, Model, Prompt, Session,
    engine::{Engine, EngineOptions, Request},
    generate,
    placement::Rules,
    registry::{self, GpuFault, GpuSettings, NpuLibraries, NpuSettings},
    split::HotExperts,
};
use std::{path::Path, sync::LazyLock};

/// Prompts are read in pieces.
const CHUNK: usize = 16;

/// Compiled shaders are shared by all tests.
fn gpu() -> GpuSettings {
    static SHADERS: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().unwrap());
    GpuSettings { cache: Some(SHADERS.path().into()), ..Default::default() }
}

fn options(device: DeviceChoice) -> LoadOptions {
    LoadOptions { device, threads: Some(2), context: Some(512), chunk: CHUNK, gpu: gpu(), ..LoadOptions::default() }
}

fn answer(session: &mut Session, prompt: &[u32], count: usize) -> Generation {
    let options = GenerateOptions { max_new: count, ignore_eos: true, ..Default::default() };
    generate(session, &Prompt::from_ids(prompt.to_vec()), &options, &Cancel::new(), &mut |_| {}).unwrap()
}

fn unsigned(ids: &[i32]) -> Vec<u32> {
    ids.iter().map(|&id| id as u32).collect()
}

/// The prompt of 63 tokens and what transformers answers.
fn case(fixture: &Fixture) -> (Vec<u32>, Vec<u32>) {
    let prompt = fixture.prompts.iter().find(|p| p.ids.len() == 63).unwrap();
    (unsigned(&prompt.ids), unsigned(&prompt.greedy))
}

/// Tokens as transformers gives them; sessions that move between GPU and CPU, both ways, go on the same way.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn families_equal_the_oracle() {
    for family in FAMILIES {
        let fixture = Fixture::forge(&common::fixtures().join(family));
        let (ids, greedy) = case(&fixture);
        let [gpu, cpu] = [DeviceChoice::GPU, DeviceChoice::Cpu].map(|device| Model::load(fixture.bundle(), &options(device)).unwrap());
        let found = answer(&mut gpu.session().unwrap(), &ids, greedy.len());
        assert_eq!(found.ids, greedy, "{family}");
        assert!(found.stages.iter().all(|stage| stage.device == "gpu"), "{family}: {:?}", found.stages);
        for (from, to) in [(&gpu, &cpu), (&cpu, &gpu)] {
            let mut session = from.session().unwrap();
            session.append(&ids[..50], &Cancel::new()).unwrap();
            let file = tempfile::NamedTempFile::new().unwrap();
            session.save(file.path()).unwrap();
            let moved = answer(&mut to.restore(file.path()).unwrap(), &ids, greedy.len());
            assert_eq!((moved.ids, moved.kept_rows), (greedy.clone(), 50), "{family}: moved");
        }
        println!("{family}: equal");
    }
}

/// Answers with drafts are answers without: each second family, extended every one at every precision (224 prompts); and where the model is cut in two, with the rows of a call in
/// halves.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn drafts_change_no_answer() {
    let (mut counts, mut models) = (Counts::default(), 0);
    for (place, family) in FAMILIES.into_iter().enumerate() {
        for (number, precision) in PRECISIONS.into_iter().enumerate() {
            if crate::extended() || place % 2 == 0 && number == place % PRECISIONS.len() {
                let sources = if number == 2 { &Source::ALL[..] } else { &[Source::Answer] };
                counts += check(family, precision, &options(DeviceChoice::GPU), sources);
                models += 1;
            }
        }
    }
    let Counts { drafted, accepted, stopped } = counts;
    assert!(accepted > 36 * models && drafted > accepted && stopped > models / 6, "{accepted} of {drafted}, {stopped}");
    let rules = Rules::from_toml("default = \"gpu\"\noverlap = 2\n[stages]\n\"layers.1\" = \"cpu\"").unwrap();
    let cut = [("qwen3_5", Precision::W8), ("gemma4", Precision::W4), ("phimoe", Precision::F16)];
    for &(family, precision) in if crate::extended() { &cut[..] } else { &cut[..1] } {
        let split = LoadOptions { placement: Some(rules.clone()), ..options(DeviceChoice::Auto) };
        let Counts { drafted, accepted, .. } = check(family, precision, &split, &[Source::Answer]);
        assert!(accepted > 10 && drafted > accepted, "{family}: {accepted} of {drafted}");
    }
}

/// The same where a program of the model itself drafts, on the GPU, too.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn drafting_programs_change_no_answer() {
    let multi_token = Fixture::forge_at(&common::fixtures().join("qwen3_5"), Precision::W8);
    let drafter = Fixture::forge_drafter(&common::fixtures().join("gemma4"), Precision::W4);
    for (fixture, lengths, first) in [(multi_token, [2, 65], 0), (drafter, [1, 100], 20)] {
        let lengths = &lengths[..if crate::extended() { 2 } else { 1 }];
        let drafted = check_answers_on(&fixture, &options(DeviceChoice::GPU), lengths, first);
        assert!(drafted > 0, "{}: a first guess is always tried", fixture.name);
    }
}

/// Any assignment of stages to CPU and GPU, alike or not in the two phases, gives the tokens of transformers.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn random_placements_equal_the_oracle() {
    let mut random = 20u64;
    let mut coin = || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        if random >> 63 == 0 { "cpu" } else { "gpu" }.to_owned()
    };
    for family in ["phimoe", "qwen3_5", "gemma4"] {
        let fixture = Fixture::forge(&common::fixtures().join(family));
        let (ids, greedy) = case(&fixture);
        for round in 0..2 {
            let (stages, ops) = (&fixture.program().stages, &fixture.program().ops);
            let assigned = match round {
                0 => stages.iter().map(|stage| (stage.name.to_string(), coin())).collect(),
                // What no rule names follows the phase.
                _ => ops.iter().step_by(5).map(|op| (op.path.to_string(), coin())).collect(),
            };
            let rules = Rules { default: Some("cpu".into()), prefill: Some("gpu".into()), stages: assigned, ..Rules::default() };
            let model = Model::load(fixture.bundle(), &LoadOptions { placement: Some(rules), ..options(DeviceChoice::Auto) }).unwrap();
            let found = answer(&mut model.session().unwrap(), &ids, greedy.len());
            assert_eq!(found.ids, greedy, "{family}, {:?}", model.placement().stages);
            assert!(["cpu", "gpu"].iter().all(|device| found.stages.iter().any(|stage| stage.device == *device)), "{family}: both work");
        }
    }
}

#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn towers_equal_the_oracle() {
    let device = registry::candidates(DeviceChoice::GPU, None).unwrap().swap_remove(0);
    for family in ["qwen3_vl", "qwen3_5", "gemma4"] {
        let Some(cases) = MediaCases::forge(&common::fixtures().join(family)) else { continue };
        for (medium, (program, _)) in cases.media.iter().filter(|(medium, _)| medium.ends_with(".0")) {
            let program = cases.fixture.bundle().program(program).unwrap();
            let outcome = cases.encode(&*device as &dyn Device, (**program).clone(), &Overlay::default(), &[medium]);
            for (output, values) in &outcome.outputs {
                let expected = cases.oracle(&format!("{medium}.{output}")).unwrap();
                let difference = relative_difference(values, &expected);
                assert!(difference <= 1e-4, "{family}: {medium}.{output} differs by {difference}");
            }
            println!("{family}: {medium} equal");
        }
    }
}

/// A GPU that fails in the middle of an answer: the answer goes on elsewhere, token for token the same.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn an_answer_outlives_its_gpu() {
    for family in ["qwen3", "qwen3_5"] {
        let fixture = Fixture::forge(&common::fixtures().join(family));
        let (ids, greedy) = case(&fixture);
        // In the prompt, and among the answer's tokens.
        for fault in [(GpuFault::Loss, 3), (GpuFault::Loss, 10), (GpuFault::Hang, 4), (GpuFault::Hang, 12)] {
            let model = Model::load(fixture.bundle(), &with_fault(fault)).unwrap();
            let found = answer(&mut model.session().unwrap(), &ids, greedy.len());
            assert_eq!(found.ids, greedy, "{family}, {fault:?}");
            assert_moved(&found, "gpu was lost", &format!("{family}, {fault:?}"));
        }
    }
}

/// The same where the GPU has a part of the model: the answer goes on, token for token, without it.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn a_split_outlives_its_gpu() {
    let fixture = Fixture::forge(&common::fixtures().join("phimoe"));
    let (ids, greedy) = case(&fixture);
    // In the prompt, in its halves, and among the answer's tokens; with hot experts also while one of them is transferred, which every third submission is about, and in a pause.
    let apart = [(GpuFault::Loss, 5), (GpuFault::Loss, 60), (GpuFault::Hang, 7), (GpuFault::Hang, 50), (GpuFault::OutOfMemory, 12)];
    let in_turn: Vec<_> = (14..20).chain([31]).map(|number| (GpuFault::Loss, number)).chain([(GpuFault::Hang, 20)]).collect();
    for (rules, faults) in [(Rules::from_toml(EXPERTS_ON_CPU).unwrap(), &apart[..]), (hot_experts(9, Some(1)), &in_turn)] {
        for &fault in faults {
            let options = LoadOptions { device: DeviceChoice::Auto, placement: Some(rules.clone()), chunk: 64, ..with_fault(fault) };
            let model = match Model::load(fixture.bundle(), &options) {
                Ok(model) => model,
                Err(error) => {
                    assert!(matches!(fault.0, GpuFault::OutOfMemory) && error.to_string().contains("no memory left"), "{fault:?}: {error}");
                    continue;
                }
            };
            let found = answer(&mut model.session().unwrap(), &ids, greedy.len());
            assert_eq!(found.ids, greedy, "{fault:?}");
            assert!(found.note.as_ref().is_some_and(|note| note.contains("continued on cpu")), "{fault:?}: {:?}", found.note);
        }
    }
    // Memory that runs out: while the model is loaded, or in the middle.
    let (mut refused, mut moved) = (0, 0);
    for buffers in 1..16 {
        let options = LoadOptions {
            device: DeviceChoice::Auto,
            placement: Some(hot_experts(9, Some(1))),
            ..with_fault((GpuFault::OutOfMemory, buffers))
        };
        match Model::load(fixture.bundle(), &options) {
            Err(error) => {
                assert!(error.to_string().contains("no memory left"), "{buffers} buffers: {error}");
                refused += 1;
            }
            Ok(model) => {
                let found = answer(&mut model.session().unwrap(), &ids, greedy.len());
                assert_eq!(found.ids, greedy, "{buffers} buffers");
                moved += usize::from(found.note.is_some_and(|note| note.contains("no memory left")));
            }
        }
    }
    assert!(refused > 0 && moved > 0, "{refused} refused, {moved} moved");
}

const EXPERTS_ON_CPU: &str = "default = \"gpu\"\n[stages]\n\"layers.*.moe.experts\" = \"cpu\"";

/// A mixture with so many experts on the GPU.
fn hot_experts(count: usize, transfer_from: Option<usize>) -> Rules {
    Rules { hot_experts: Some(HotExperts { count, transfer_from }), ..Rules::from_toml(EXPERTS_ON_CPU).unwrap() }
}

/// Some experts on the GPU and the others on the CPU: the tokens of transformers, whatever their number. A GPU that is not there is named.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn hot_experts_equal_the_oracle() {
    let fixture = Fixture::forge(&common::fixtures().join("phimoe"));
    let (ids, greedy) = case(&fixture);
    for (count, transfer_from) in [(1, None), (9, Some(1)), (12, Some(6)), (14, None)] {
        let options = LoadOptions { placement: Some(hot_experts(count, transfer_from)), ..options(DeviceChoice::Auto) };
        let model = Model::load(fixture.bundle(), &options).unwrap();
        let found = answer(&mut model.session().unwrap(), &ids, greedy.len());
        assert_eq!(found.ids, greedy, "{count} experts, transfer from {transfer_from:?}");
        let cache = found.timing.expert_cache.unwrap().counts;
        assert!(cache.hits > 0 && cache.misses > 0 && (cache.fetched > 0) == transfer_from.is_some(), "{cache:?}");
    }
    let absent = Rules { default: Some("gpu:1".into()), ..hot_experts(9, None) };
    let error = Model::load(fixture.bundle(), &LoadOptions { placement: Some(absent), ..options(DeviceChoice::Auto) }).err().unwrap();
    assert!(error.to_string().contains("there is no GPU 1"), "{error}");
}

/// Without memory for one more buffer a model is not loaded, or its answer goes on elsewhere.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn an_answer_outlives_the_memory_of_its_gpu() {
    let fixture = Fixture::forge(&common::fixtures().join("qwen3_5"));
    let (ids, greedy) = case(&fixture);
    let (mut refused, mut moved) = (0, 0);
    for buffers in 0..16 {
        match Model::load(fixture.bundle(), &with_fault((GpuFault::OutOfMemory, buffers))) {
            Err(error) => {
                assert!(error.to_string().contains("gpu has no memory left"), "{error}");
                refused += 1;
            }
            Ok(model) => {
                let engine = Engine::start(model, EngineOptions::default()).unwrap();
                let request = || {
                    let options = GenerateOptions { max_new: greedy.len(), ignore_eos: true, ..Default::default() };
                    engine.submit(Request::new(Prompt::from_ids(ids.clone())).with_options(options)).unwrap()
                };
                let answers = [request(), request()];
                for answer in answers.into_iter().map(|answer| answer.finish().unwrap()) {
                    assert_eq!(answer.ids, greedy, "{buffers} buffers");
                    moved += usize::from(answer.note.is_some_and(|note| note.contains("no memory left")));
                }
            }
        }
    }
    assert!(refused > 0 && moved > 0, "{refused} refused, {moved} moved");
}

/// A GPU with too little memory says so, with numbers, before anything is loaded; `auto` then takes the CPU.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn too_little_memory_is_an_error() {
    let fixture = Fixture::forge(&common::fixtures().join("llama"));
    let gpu = GpuSettings { memory_limit: Some(100_000), software: true, ..Default::default() };
    let load = |device| Model::load(fixture.bundle(), &LoadOptions { gpu: gpu.clone(), ..options(device) });
    let error = load(DeviceChoice::GPU).err().unwrap().to_string();
    assert!(error.contains("97.7 KiB available on gpu") && error.contains("or the CPU"), "{error}");
    let model = load(DeviceChoice::Auto).unwrap();
    let choice = model.choice().unwrap();
    assert_eq!((model.device().name.as_str(), choice.device.as_str()), ("cpu", "cpu"));
    assert!(choice.reason.contains("97.7 KiB available on gpu"), "{}", choice.reason);
}

/// `auto` measures once, remembers, and says what it found; software is measured only where that is asked for.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn auto_takes_what_is_faster() {
    let fixture = Fixture::forge(&common::fixtures().join("qwen3"));
    let folder = tempfile::tempdir().unwrap();
    let auto = |software, measure_again| {
        let gpu = GpuSettings { cache: Some(folder.path().into()), software, measure_again, ..Default::default() };
        LoadOptions { gpu, ..options(DeviceChoice::Auto) }
    };
    let load = |options: &LoadOptions| {
        let model = Model::load(fixture.bundle(), options).unwrap();
        (model.device().name.clone(), model.choice().cloned(), model.placement().stages[0].clone())
    };
    let (device, choice, _) = load(&auto(false, false));
    assert_eq!((device.as_str(), choice), ("cpu", None), "software is no choice");
    assert!(LoadPlan::of(fixture.bundle(), &auto(true, false)).unwrap().choice.unwrap().reason.contains("not measured yet"));
    let (device, first, stage) = load(&auto(true, false));
    let first = first.unwrap();
    let measured = first.measured.clone().unwrap();
    assert!(first.is_new && first.device == device && stage.reason.contains("tok/s"), "{first:?}");
    let best = &measured.best(false).unwrap().way;
    assert_eq!(device, if best.is_split() { "split" } else { best.name.as_str() });
    let again = load(&auto(true, false)).1.unwrap();
    assert!(!again.is_new && again.measured.as_ref() == Some(&measured), "remembered: {again:?}");
    assert_eq!(LoadPlan::of(fixture.bundle(), &auto(true, false)).unwrap().choice, Some(again));
    // What is kept can say which is faster, and is believed if it is sound.
    let mut files = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let file = files.find(|path| path.to_string_lossy().contains("choice-")).unwrap();
    let kept = std::fs::read_to_string(&file).unwrap();
    let mut faster: serde_json::Value = serde_json::from_str(&kept).unwrap();
    let ways = faster["measured"]["ways"].as_array_mut().unwrap();
    let gpu = ways.iter_mut().find(|tried| tried["way"]["name"] == "gpu").unwrap();
    gpu["speed"] = serde_json::json!({"decode_tokens_per_second": 1e9, "prefill_tokens_per_second": 1e9});
    std::fs::write(&file, faster.to_string()).unwrap();
    let (device, choice, stage) = load(&auto(true, false));
    assert_eq!((device.as_str(), stage.device.as_str(), choice.unwrap().is_new), ("gpu", "gpu", false));
    std::fs::write(&file, &kept[..kept.len() / 2]).unwrap();
    assert!(load(&auto(true, false)).1.unwrap().is_new, "what is damaged is measured again");
    assert!(load(&auto(true, true)).1.unwrap().is_new, "and what was asked for");
}

/// A mixture whose gates are stored otherwise than what they gate, as a mean number of bits may make it.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn experts_of_mixed_encodings_are_taken() {
    let fixture = Fixture::forge(&common::fixtures().join("phimoe"));
    let (mut program, mut weights) = (fixture.program().clone(), fixture.overlay());
    let gates = program.ops.iter().filter_map(|op| match &op.op {
        OpKind::Experts { gate, .. } => Some(gate.clone()),
        _ => None,
    });
    for gate in gates.collect::<Vec<_>>() {
        let (shape, numbers) = weights.numbers(&gate);
        weights.replace(&gate, halves(shape, &numbers));
        program.weights.get_mut(&gate).unwrap().encoding = Encoding::F16;
    }
    let prompt = fixture.prompts.iter().find(|p| p.ids.len() == 63).unwrap();
    let [gpu, cpu] = [DeviceChoice::GPU, DeviceChoice::Cpu].map(|choice| {
        let device = registry::candidates(choice, Some(2)).unwrap().swap_remove(0);
        let mut running = fixture.load(&*device, program.clone(), &weights, prompt);
        running.step(&prompt.ids, program.epoch(prompt.ids.len()), false, &mut |_| {})
    });
    let difference = relative_difference(&gpu, &cpu);
    assert!(difference <= 1e-4, "differs by {difference}");
}

/// A tensor in f16.
fn halves(shape: Vec<usize>, numbers: &[f32]) -> WeightTensor {
    let columns = *shape.last().unwrap();
    let row_bytes = Encoding::F16.row_bytes(columns).unwrap().data;
    let mut bytes = AlignedBytes::zeroed(numbers.len() / columns * row_bytes);
    for (row, out) in numbers.chunks(columns).zip(bytes.as_mut().chunks_mut(row_bytes)) {
        row.iter().zip(out.chunks_mut(2)).for_each(|(&number, out)| out.copy_from_slice(&f16::from_f32(number).to_le_bytes()));
    }
    WeightTensor::new(Encoding::F16, shape, bytes.into(), None, None).unwrap()
}

/// What a session holds goes from GPU to NPU to CPU and back to the GPU, bit by bit the same. Needs QNN as well, whose emulator stands for an NPU.
#[test]
#[ignore = "needs Vulkan and QNN: cargo xtask test gpu"]
fn sessions_move_between_gpu_npu_and_cpu() {
    let Some(libraries) = std::env::var_os("QHX_QNN_DIR") else {
        println!("not run: QHX_QNN_DIR does not name QNN's libraries");
        return;
    };
    let npu = NpuSettings { libraries: Some(NpuLibraries::Folder(libraries.into())), ..NpuSettings::default() };
    for family in ["qwen3", "qwen3_5"] {
        let fixture = Fixture::forge_at(&common::fixtures().join(family), Precision::F16);
        let (ids, _) = case(&fixture);
        let load = |device| {
            let options = LoadOptions { npu: npu.clone(), context: Some(64), ..options(device) };
            Model::load(fixture.bundle(), &options).unwrap_or_else(|e| panic!("{family} on {device}: {e}"))
        };
        let [gpu, npu, cpu] = [DeviceChoice::GPU, DeviceChoice::Npu, DeviceChoice::Cpu].map(load);
        let folder = tempfile::tempdir().unwrap();
        let mut session = gpu.session().unwrap();
        session.append(&ids[..40], &Cancel::new()).unwrap();
        let mut saved = Vec::new();
        for (number, next) in [&npu, &cpu, &gpu, &gpu].into_iter().enumerate() {
            let file = folder.path().join(number.to_string());
            session.save(&file).unwrap();
            saved.push(std::fs::read(&file).unwrap());
            session = next.restore(&file).unwrap();
        }
        assert!(saved.iter().all(|content| *content == saved[0]), "{family}: {:?} bytes", saved.iter().map(Vec::len).collect::<Vec<_>>());
        assert!(session.append(&ids[40..], &Cancel::new()).unwrap().iter().all(|logit| logit.is_finite()));
    }
}

/// Below f32 the GPU answers as the CPU does, up to a choice between tokens that are as good as equal.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn precisions_agree_with_the_cpu() {
    for family in FAMILIES {
        for precision in [Precision::F16, Precision::W8, Precision::W4] {
            let fixture = Fixture::forge_at(&common::fixtures().join(family), precision);
            let (ids, greedy) = case(&fixture);
            let exact = || Fixture::forge(&common::fixtures().join(family));
            let margin = |choice: &Choice<'_>| choice.margin(exact().bundle());
            let whole = options(DeviceChoice::GPU);
            let hot = LoadOptions { placement: Some(hot_experts(9, Some(2))), ..options(DeviceChoice::Auto) };
            for options in if family.starts_with("phimoe") { vec![whole, hot] } else { vec![whole] } {
                let (prompt, count) = (Prompt::from_ids(ids.clone()), greedy.len().min(8));
                assert_close((fixture.bundle(), options), precision, &prompt, count, &format!("{family} at {precision}"), &margin);
            }
        }
    }
}

/// The same for the demo models, with media, on cases that were held out.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn demos_agree_with_the_cpu() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo");
    for model in ["phimoe", "qwen3_5", "qwen3-vl", "gemma4"] {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join(model);
        forge_checkpoint(&demo.join(model), &mut ForgeOptions::new(&out, Precision::W8)).unwrap();
        let bundle = Bundle::open(&out).unwrap();
        let text = std::fs::read_to_string(demo.join(model).join("heldout.json")).unwrap();
        let cases: serde_json::Value = serde_json::from_str(&text).unwrap();
        let ids = |case: &serde_json::Value| case["prompt_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let case = cases["cases"].as_array().unwrap().iter().find(|case| case["image"].is_null() && case["audio"].is_null()).unwrap();
        let count = case["ids"].as_array().unwrap().len();
        let margin = |choice: &Choice<'_>| {
            let exact = folder.path().join("f32");
            forge_checkpoint(&demo.join(model), &mut ForgeOptions::new(&exact, Precision::F32)).unwrap();
            choice.margin(&Bundle::open(&exact).unwrap())
        };
        assert_close((&bundle, options(DeviceChoice::GPU)), Precision::W8, &Prompt::from_ids(ids(case)), count.min(8), model, &margin);
    }
}

fn with_fault(fault: (GpuFault, u64)) -> LoadOptions {
    LoadOptions { gpu: GpuSettings { fault: Some(fault), ..gpu() }, sessions: 2, ..options(DeviceChoice::GPU) }
}

/// An answer that went on on the CPU says so.
fn assert_moved(found: &Generation, why: &str, case: &str) {
    let note = found.note.clone().unwrap_or_default();
    assert!(note.contains(why) && note.contains("continued on cpu"), "{case}: {note}");
    let moved = found.fallbacks.iter().any(|fallback| fallback.from == "gpu" && fallback.to == "cpu" && fallback.reason.contains(why));
    assert!(moved && found.stages.iter().all(|stage| stage.device == "cpu"), "{case}: {:?}", found.fallbacks);
}

/// A choice between two tokens after a text.
struct Choice<'a> {
    text: &'a [u32],
    tokens: [u32; 2],
}

impl Choice<'_> {
    /// How far apart the logits of the two tokens are in a model.
    fn margin(&self, bundle: &Bundle) -> f32 {
        let model = Model::load(bundle, &options(DeviceChoice::Cpu)).unwrap();
        let mut session = model.session().unwrap();
        let logits = session.append(self.text, &Cancel::new()).unwrap();
        let [a, b] = self.tokens.map(|token| logits[token as usize]);
        (a - b).abs()
    }
}

/// GPU and CPU give the same tokens, up to a first choice between two that is as good as open: their logits differ by less than a tenth of all logits' standard deviation, and in the f32 model
/// by no more than the gate of the precision lets one differ. `exact` finds out the latter.
fn assert_close(
    (bundle, gpu): (&Bundle, LoadOptions),
    precision: Precision,
    prompt: &Prompt,
    count: usize,
    case: &str,
    exact: &dyn Fn(&Choice<'_>) -> f32,
) {
    let [gpu, cpu] = [gpu, options(DeviceChoice::Cpu)].map(|options| Model::load(bundle, &options).unwrap());
    let [found, expected] = [&gpu, &cpu].map(|model| answer(&mut model.session().unwrap(), prompt.ids(), count).ids);
    let Some(at) = found.iter().zip(&expected).position(|(a, b)| a != b) else { return };
    let text = [prompt.ids(), &expected[..at]].concat();
    let mut session = cpu.session().unwrap();
    let logits = session.append(&text, &Cancel::new()).unwrap();
    let mean = logits.iter().sum::<f32>() / logits.len() as f32;
    let deviation = (logits.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / logits.len() as f32).sqrt();
    let margin = logits[expected[at] as usize] - logits[found[at] as usize];
    assert!(margin < 0.1 * deviation, "{case}: token {at} differs by {margin}, deviation {deviation}");
    let class = match precision {
        Precision::F16 => Class::F16,
        Precision::W8 => Class::Int8Both,
        _ => Class::Bits4,
    };
    let (margin, limit) =
        (exact(&Choice { text: &text, tokens: [expected[at], found[at]] }), class.limits(false).wide_flips.unwrap().margin);
    println!("{case}: token {at} differs, f32 margin {margin} (limit {limit})");
    assert!(margin <= limit, "{case}: token {at} differs where the f32 margin is {margin}, limit {limit}");
}
