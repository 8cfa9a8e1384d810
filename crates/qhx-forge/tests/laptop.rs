//! A simulated laptop: two devices with a speed, a latency and a memory of their own. What is chosen is held against the best that trying everything finds.

mod common;

use common::{
    Fixture,
    simulated::{Simulated, Traits, VirtualClock},
};
use qhx_runtime::{
    Cancel, DeviceChoice, LoadOptions, Model, ModelParts, Wanted,
    memory::MemoryEstimate,
    placement::Rules,
    planner::{Clock, Pair, Way},
    registry,
};
use std::{collections::BTreeSet, sync::Arc};

const CHUNK: usize = 64;
const PROCESSOR: Traits = Traits { call_seconds: 1e-6, op_seconds: 2e-7, read: 1e9, products: 2e9, copy: 1e10, memory: None };

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
    let fast = Traits { call_seconds: 2e-5, op_seconds: 1e-7, read: 2e10, products: 1e11, copy: 1e9, memory: None };
    let near = Traits { call_seconds: 1e-6, copy: 1e10, ..fast };
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
        ("a near GPU with half the memory", Traits { memory: Some(whole / 2), ..near }),
        ("a near GPU with two thirds of the memory", Traits { memory: Some(2 * whole / 3), ..near }),
        ("a near GPU with most of the memory", Traits { memory: Some(9 * whole / 10), ..near }),
        ("a near GPU with two thirds of the memory and a fast crossing", Traits { memory: Some(2 * whole / 3), copy: 5e10, ..near }),
        ("slow ops", Traits { op_seconds: 2e-5, ..fast }),
        ("slow ops, but computes fast", Traits { op_seconds: 5e-6, products: 1e12, ..fast }),
    ];
    let mut chosen = BTreeSet::new();
    for parts in &parts {
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

/// While the GPU has one half of a prompt the CPU has the other: a prompt takes less time than its parts one after the other. Where both wait for one bus, they do not.
#[test]
fn two_halves_of_a_prompt_overlap() {
    let parts = ModelParts::of(Fixture::forge(&common::fixtures().join("phimoe")).bundle()).unwrap();
    let accelerator = Traits { call_seconds: 1e-6, memory: None, ..PROCESSOR };
    let (pair, clock) = pair(accelerator, PROCESSOR);
    let prompt = |overlap| {
        let stages = parts.program.stages.iter().step_by(2).map(|stage| (stage.name.to_string(), "gpu".to_owned())).collect();
        let rules = Rules { default: Some("cpu".into()), overlap, stages, ..Rules::default() };
        let model = in_one_way(&parts, &pair, &Way { name: "every second stage".into(), rules });
        let mut session = model.session().unwrap();
        let started = clock.now();
        let logits = session.append(&(0..256).map(|n| n * 7 % 50).collect::<Vec<u32>>(), &Cancel::new()).unwrap().to_vec();
        (logits, (clock.now() - started).as_secs_f64())
    };
    let ((logits, together), (expected, apart)) = (prompt(None), prompt(Some(false)));
    assert!(logits == expected, "the halves are the same rows");
    assert!(together < 0.9 * apart, "{together} against {apart}");
}
