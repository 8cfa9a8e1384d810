//! A simulated laptop: two devices with a speed, a latency and a memory of their own. What is chosen is held against the best that trying everything finds.

use crate::common::{
    self, Fixture,
    simulated::{Simulated, Traits, VirtualClock},
};
use qhx_ir::{Checked, Device, DeviceError, DeviceInfo, Executable, Machine, Op, Timeline, Weights};
use qhx_runtime::{
    Cancel, DeviceChoice, GenerateOptions, LoadOptions, Model, ModelParts, Prompt, Wanted, generate,
    memory::MemoryEstimate,
    placement::{Overlap, Rules},
    planner::{Clock, Pair, Way},
    registry,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

const CHUNK: usize = 64;
const PROCESSOR: Traits = Traits { call_seconds: 1e-6, op_seconds: 2e-7, read: 1e9, products: 2e9, copy: 1e10, memory: None, waking: 0 };

fn pair(accelerator: Traits, processor: Traits) -> (Pair, Arc<VirtualClock>) {
    let clock = Arc::new(VirtualClock::default());
    let cpu = || registry::candidates(DeviceChoice::Cpu, Some(1)).unwrap().swap_remove(0);
    let accelerator = Simulated::device("gpu", cpu(), accelerator, clock.clone());
    let processor = Simulated::device("cpu", cpu(), processor, clock.clone());
    (Pair { accelerator, processor, clock: clock.clone() }, clock)
}

fn options(device: DeviceChoice) -> LoadOptions {
    LoadOptions { device, context: Some(512), chunk: CHUNK, ..LoadOptions::default() }
}

/// A GPU that is fast, and near.
const NEAR: Traits = Traits { call_seconds: 1e-6, op_seconds: 1e-7, read: 2e10, products: 1e11, copy: 1e10, memory: None, waking: 0 };

/// How long a request of 256 tokens with an answer of 128 takes, by the clock of the simulated machine.
fn request(model: &Model, clock: &dyn Clock) -> f64 {
    let ids: Vec<u32> = (0..256).map(|n| n * 7 % 50).collect();
    let mut session = model.session().unwrap();
    session.want(Wanted::Largest);
    let started = clock.now();
    session.append(&ids, &Cancel::new()).unwrap();
    for id in 0..128 {
        session.append(&[id % 50], &Cancel::new()).unwrap();
    }
    (clock.now() - started).as_secs_f64()
}

/// The model in one way.
fn in_one_way(parts: &ModelParts, pair: &Pair, way: &Way) -> Model {
    let devices = [pair.processor.clone(), pair.accelerator.clone()];
    Model::on_devices(parts.clone(), &devices, &LoadOptions { placement: Some(way.rules.clone()), ..options(DeviceChoice::Auto) }).unwrap()
}

/// In each setting the way that is chosen takes at most 5 % longer than the best of all ways that fit.
#[test]
fn the_planner_finds_the_best_way() {
    let parts = ["phimoe", "qwen3"].map(|family| ModelParts::of(Fixture::forge(&common::fixtures().join(family)).bundle()).unwrap());
    let whole = MemoryEstimate::of(&parts[0].program, 512, CHUNK, 8).total_bytes;
    // Latency of a call, reading, computing, copying, memory: from a discrete GPU to one that is worse than the processor in everything.
    let fast = Traits { call_seconds: 2e-5, op_seconds: 1e-7, read: 2e10, products: 1e11, copy: 1e9, memory: None, waking: 0 };
    let settings = [
        ("a fast GPU", fast),
        ("a fast GPU with half the memory", Traits { memory: Some(whole / 2), ..fast }),
        ("a fast GPU with three quarters of the memory", Traits { memory: Some(3 * whole / 4), ..fast }),
        ("a fast GPU with next to no memory", Traits { memory: Some(300_000), ..fast }),
        ("a GPU that answers late", Traits { call_seconds: 3e-3, ..fast }),
        ("a GPU that answers late, with little memory", Traits { call_seconds: 1e-3, memory: Some(3 * whole / 4), ..fast }),
        ("a shared bus", Traits { read: 1e9, products: 2e10, ..fast }),
        ("a shared bus and a cheap crossing", Traits { read: 1.1e9, products: 4e9, call_seconds: 1e-6, ..fast }),
        ("reads slowly, computes fast", Traits { read: 2e8, products: 1e11, ..fast }),
        ("reads fast, computes slowly", Traits { read: 2e10, products: 5e8, ..fast }),
        ("a slow crossing", Traits { copy: 1e6, ..fast }),
        ("worse in everything", Traits { read: 1e8, products: 1e8, call_seconds: 1e-3, copy: 1e8, ..fast }),
        ("a near GPU with half the memory", Traits { memory: Some(whole / 2), ..NEAR }),
        ("a near GPU with two thirds of the memory", Traits { memory: Some(2 * whole / 3), ..NEAR }),
        ("a near GPU with most of the memory", Traits { memory: Some(9 * whole / 10), ..NEAR }),
        ("a near GPU with two thirds of the memory and a fast crossing", Traits { memory: Some(2 * whole / 3), copy: 5e10, ..NEAR }),
        ("slow ops", Traits { op_seconds: 2e-5, ..fast }),
        ("slow ops, but computes fast", Traits { op_seconds: 5e-6, products: 1e12, ..fast }),
    ];
    let mut chosen = BTreeSet::new();
    // By default the mixture alone, which has more ways.
    for parts in if crate::extended() { &parts[..] } else { &parts[..1] } {
        for (what, accelerator) in settings {
            let (pair, clock) = pair(accelerator, PROCESSOR);
            let model = Model::on_pair(parts.clone(), pair.clone(), &options(DeviceChoice::Auto)).unwrap();
            let choice = model.choice().unwrap().clone();
            let (way, taken) = (choice.way.unwrap(), request(&model, &*clock));
            let tried = choice.measured.unwrap().ways;
            // The room of the embedding table is for experts.
            let mut hot = tried.iter().filter(|tried| tried.way.rules.hot_experts.is_some());
            assert!(hot.all(|tried| tried.way.rules.stages.contains_key("embed.embed_tokens")), "{tried:?}");
            let fitting = tried.iter().filter(|tried| tried.predicted.is_some());
            let all: Vec<(String, f64)> =
                fitting.map(|tried| (tried.way.name.clone(), request(&in_one_way(parts, &pair, &tried.way), &*clock))).collect();
            let (best, least) = all.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
            println!("{}, {what}: {} ({:.1} ms), best {best} ({:.1} ms) of {all:?}", parts.name, way.name, 1e3 * taken, 1e3 * least);
            assert!(taken <= 1.05 * least, "{}, {what}: {} takes {taken}, {best} takes {least}: {all:?}", parts.name, way.name);
            chosen.insert(way.name);
        }
    }
    assert!(chosen.iter().any(|way| way.contains("hot experts")), "{chosen:?}");
    assert!(chosen.len() >= 5, "the settings ask for different ways: {chosen:?}");
}

/// A GPU compiles at its first steps, and raises its clocks slowly: what it does when it is awake counts.
#[test]
fn a_gpu_that_wakes_slowly_is_waited_for() {
    let parts = ModelParts::of(Fixture::forge(&common::fixtures().join("phimoe")).bundle()).unwrap();
    let prefill = |waking| {
        let model = Model::on_pair(parts.clone(), pair(Traits { waking, ..NEAR }, PROCESSOR).0, &options(DeviceChoice::Auto)).unwrap();
        let choice = model.choice().unwrap();
        assert_eq!(choice.way.as_ref().unwrap().name, "gpu", "{:?}", choice.measured);
        let ways = choice.measured.as_ref().unwrap().ways.iter();
        ways.clone().find(|tried| tried.way.name == "gpu").unwrap().speed.unwrap().prefill_tokens_per_second.unwrap()
    };
    let (slow, awake) = (prefill(60), prefill(0));
    assert!((slow / awake - 1.0).abs() < 0.01, "{slow}, {awake}");
}

/// Asked for by name, a split that loses to a single device says what it costs; `auto` does not take it.
#[test]
fn a_split_that_loses_says_so() {
    let parts = ModelParts::of(Fixture::forge(&common::fixtures().join("phimoe")).bundle()).unwrap();
    let slow = Traits { call_seconds: 1e-3, ..PROCESSOR };
    let load = |device, accelerator| Model::on_pair(parts.clone(), pair(accelerator, PROCESSOR).0, &options(device)).unwrap();
    let split = load(DeviceChoice::Split, slow);
    let choice = split.choice().unwrap();
    assert_eq!((split.device().name.as_str(), choice.device.as_str()), ("split", "split"));
    let cost = choice.cost.as_ref().unwrap();
    assert!(cost.contains("% longer") && cost.contains("than on cpu alone"), "{cost}");
    let auto = load(DeviceChoice::Auto, slow);
    assert_eq!((auto.device().name.as_str(), &auto.choice().unwrap().cost), ("cpu", &None));
}

/// While the GPU has one half of a call the CPU has the other: a prompt, and rows of which all logits are wanted as of drafts, take less time than their parts one after the other.
#[test]
fn two_halves_of_a_call_overlap() {
    let parts = ModelParts::of(Fixture::forge(&common::fixtures().join("phimoe")).bundle()).unwrap();
    let accelerator = Traits { call_seconds: 1e-6, memory: None, ..PROCESSOR };
    let (pair, clock) = pair(accelerator, PROCESSOR);
    let call = |overlap, rows: u32, wanted: usize| {
        let stages = parts.program.stages.iter().step_by(2).map(|stage| (stage.name.to_string(), "gpu".to_owned())).collect();
        let rules = Rules { default: Some("cpu".into()), overlap, stages, ..Rules::default() };
        let model = in_one_way(&parts, &pair, &Way { name: "every second stage".into(), rules });
        let mut session = model.session().unwrap();
        let started = clock.now();
        let ids: Vec<u32> = (0..rows).map(|n| n * 7 % 50).collect();
        let mut shown = Vec::new();
        session.append_showing(&ids, wanted, &Cancel::new(), &mut |_, logits| shown.extend_from_slice(logits)).unwrap();
        (shown, (clock.now() - started).as_secs_f64())
    };
    let from = |rows: usize| Some(Overlap::From(rows.try_into().unwrap()));
    for (overlap, rows, wanted) in [(None, 256, 1), (from(24), 64, 8)] {
        let ((logits, together), (expected, apart)) = (call(overlap, rows, wanted), call(Some(Overlap::Whether(false)), rows, wanted));
        assert!(logits == expected, "the halves are the same rows");
        assert!(together < 0.9 * apart, "{rows} rows: {together} against {apart}");
    }
    let [(_, few), (_, apart)] = [from(24), Some(Overlap::Whether(false))].map(|overlap| call(overlap, 16, 8));
    assert!((few - apart).abs() < 0.01 * apart, "too few rows for halves: {few} against {apart}");
}

/// The plan says from how many rows on halves are faster, by what both devices can do: earlier where rows cost much and weights are read fast.
#[test]
fn the_plan_says_which_calls_are_halved() {
    let parts = ModelParts::of(Fixture::forge(&common::fixtures().join("qwen3")).bundle()).unwrap();
    let whole = MemoryEstimate::of(&parts.program, 512, CHUNK, 8).total_bytes;
    let from = |read: f64, products: f64| {
        let traits = Traits { call_seconds: 1e-7, op_seconds: 1e-8, read, products, copy: 1e11, memory: Some(2 * whole / 3), waking: 0 };
        let model =
            Model::on_pair(parts.clone(), pair(traits, Traits { memory: None, ..traits }).0, &options(DeviceChoice::Split)).unwrap();
        let tried = model.choice().unwrap().measured.clone().unwrap().ways;
        let layers = tried.iter().find(|tried| tried.way.name.starts_with("first")).unwrap_or_else(|| panic!("{tried:?}"));
        layers.way.rules.overlap.unwrap()
    };
    let (Overlap::From(few), Overlap::From(many)) = (from(1e11, 1e9), from(1e9, 3e9)) else { panic!("prompts are halved") };
    assert!(few < many && many.get() <= 256, "{few}, {many}");
}

/// Whatever may be chosen, with much memory or little, gives the tokens of transformers.
#[test]
fn every_way_gives_the_same_tokens() {
    let mut kinds = BTreeSet::new();
    for family in ["llama", "qwen3", "qwen3_vl", "phimoe", "phimoe_longrope", "qwen3_5", "gemma4"] {
        let fixture = Fixture::forge(&common::fixtures().join(family));
        // Long enough for two halves.
        let prompt = fixture.prompts.iter().find(|p| p.ids.len() == 70).unwrap();
        let [ids, greedy] = [&prompt.ids, &prompt.greedy].map(|ids| ids.iter().map(|&id| id as u32).collect::<Vec<_>>());
        let parts = ModelParts::of(fixture.bundle()).unwrap();
        let whole = MemoryEstimate::of(&parts.program, 512, CHUNK, 8).total_bytes;
        let mut ways: BTreeMap<String, Way> = BTreeMap::new();
        for memory in [None, Some(9 * whole / 10), Some(2 * whole / 3), Some(whole / 2)] {
            let limited = pair(Traits { memory, ..NEAR }, PROCESSOR).0;
            let model = Model::on_pair(parts.clone(), limited, &options(DeviceChoice::Auto)).unwrap();
            let fitting = model.choice().unwrap().measured.clone().unwrap().ways.into_iter().filter(|tried| tried.predicted.is_some());
            ways.extend(fitting.map(|tried| (tried.way.name.clone(), tried.way)));
        }
        for way in ways.values() {
            let model = in_one_way(&parts, &pair(NEAR, PROCESSOR).0, way);
            let settings = GenerateOptions { max_new: greedy.len(), ignore_eos: true, ..Default::default() };
            let answer = generate(&mut model.session().unwrap(), &Prompt::from_ids(ids.clone()), &settings, &Cancel::new(), &mut |_| {});
            assert_eq!(answer.unwrap().ids, greedy, "{family}: {}", way.name);
        }
        let without_numbers = |name: &String| name.replace(|c: char| c.is_ascii_digit(), "");
        kinds.extend(ways.keys().map(without_numbers));
    }
    let all = [
        " hot experts and all of  of  layers on gpu",
        " hot experts of  on gpu",
        "cpu",
        "experts of  of  layers on cpu",
        "experts of  of  layers on gpu",
        "experts on cpu",
        "first  of  layers on gpu",
        "gpu",
        "prefill on cpu, decode on gpu",
        "prefill on gpu, decode on cpu",
    ];
    assert_eq!(kinds, all.map(str::to_owned).into(), "every kind of way was there");
}

/// Two halves that would disturb one another take turns: no faster than one after the other, and the trace says who waited.
#[test]
fn halves_that_take_turns_are_traced() {
    let parts = ModelParts::of(Fixture::forge(&common::fixtures().join("qwen3")).bundle()).unwrap();
    let waited = |together: Option<f64>| {
        let (pair, _) = pair(Traits { call_seconds: 1e-6, memory: None, ..PROCESSOR }, PROCESSOR);
        let stages = parts.program.stages.iter().step_by(2).map(|stage| (stage.name.to_string(), "gpu".to_owned())).collect();
        let together = together.map(|ratio| ratio.try_into().unwrap());
        let rules = Rules { default: Some("cpu".into()), stages, together, ..Rules::default() };
        let timeline = Timeline::default();
        let options = LoadOptions { placement: Some(rules), timeline: Some(timeline.clone()), ..options(DeviceChoice::Auto) };
        let model = Model::on_devices(parts.clone(), &[pair.processor.clone(), pair.accelerator.clone()], &options).unwrap();
        model.session().unwrap().append(&(0..64).collect::<Vec<u32>>(), &Cancel::new()).unwrap();
        let lanes = timeline.spans().into_iter().map(|span| (span.lane, span.name));
        let (waits, calls): (Vec<_>, Vec<_>) = lanes.partition(|(lane, _)| lane == "waiting for bandwidth tokens");
        assert!(["cpu", "gpu"].iter().all(|device| calls.iter().any(|(lane, _)| lane == device)), "{calls:?}");
        (waits, calls)
    };
    let (waits, calls) = waited(Some(2.4));
    // All parts but the first and the last are computed while another one might be: one of the two waits.
    assert_eq!(2 * waits.len() + 2, calls.len(), "{waits:?} of {calls:?}");
    assert!(waits.iter().all(|(_, name)| calls.iter().any(|(_, called)| called == name)), "{waits:?}");
    assert_eq!(waited(Some(1.5)).0, [], "two at once are faster");
    assert_eq!(waited(None).0, []);
}

/// An accelerator that holds less than it says.
struct Overstated {
    device: Arc<dyn Device>,
    weight_bytes: u64,
}

impl Device for Overstated {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
        self.device.accepts(program, op)
    }

    fn own_memory(&self) -> Result<Option<u64>, DeviceError> {
        self.device.own_memory()
    }

    fn replaces_weights(&self) -> bool {
        self.device.replaces_weights()
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Ok(Arc::new(Self { device: self.device.clone(), ..*self }))
    }
}

impl Machine for Overstated {
    fn describe(&self) -> DeviceInfo {
        self.device.open().unwrap().describe()
    }

    fn load(
        &self,
        program: &Checked,
        weights: &Arc<dyn Weights>,
        options: &qhx_ir::LoadOptions,
    ) -> Result<Box<dyn Executable>, DeviceError> {
        let needed = MemoryEstimate::of(program, 1, 1, 1).weight_bytes;
        let is_probe = program.stages.first().is_some_and(|stage| &*stage.name == "probe");
        match needed > self.weight_bytes && !is_probe {
            true => Err(DeviceError::Exhausted { device: self.name().to_owned(), reason: format!("{needed} bytes are too many") }),
            false => self.device.load(program, weights, options),
        }
    }
}

/// Memory that was estimated too low: fewer layers, or fewer hot experts, and the name says how many.
#[test]
fn what_does_not_fit_after_all_is_tried_with_less() {
    for (family, kind, eighths) in [("gemma4", "of 8 layers on gpu", 2), ("phimoe", "hot experts of 15 on gpu", 5)] {
        let parts = ModelParts::of(Fixture::forge(&common::fixtures().join(family)).bundle()).unwrap();
        let whole = MemoryEstimate::of(&parts.program, 512, CHUNK, 8);
        let roomy = pair(Traits { memory: Some(9 * whole.total_bytes / 10), ..NEAR }, PROCESSOR).0;
        // How much of that way lies on the accelerator, and whether it was timed.
        let there = |pair: Pair| {
            let model = Model::on_pair(parts.clone(), pair, &options(DeviceChoice::Split)).unwrap();
            let tried = model.choice().unwrap().measured.clone().unwrap().ways;
            let tried =
                tried.iter().find(|tried| tried.way.name.ends_with(kind) && tried.speed.is_some()).unwrap_or_else(|| panic!("{tried:?}"));
            let Rules { stages, hot_experts, .. } = &tried.way.rules;
            let count = hot_experts.map_or(stages.len(), |hot| hot.count);
            assert!(tried.way.name.split(' ').any(|word| word == count.to_string()), "{}", tried.way.name);
            count
        };
        let narrow = Overstated { device: roomy.accelerator.clone(), weight_bytes: whole.weight_bytes * eighths / 8 };
        let (most, fewer) = (there(roomy.clone()), there(Pair { accelerator: Arc::new(narrow), ..roomy }));
        assert!((1..most).contains(&fewer), "{family}: {fewer} of {most}");
    }
}
