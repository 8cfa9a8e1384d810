//! Every family on several devices: what a split changes is where things run, never a bit of what comes out.

use crate::common::{self, Fixture};
use qhx_ir::{Checked, Device, DeviceError, Machine, Op};
use qhx_runtime::{
    Cancel, DeviceChoice, GenerateOptions, LoadOptions, Model, ModelParts, Prompt, Session, generate, placement::Rules, registry,
};
use std::{collections::BTreeMap, sync::Arc};

const FAMILIES: [&str; 7] = ["llama", "qwen3", "qwen3_vl", "phimoe", "phimoe_longrope", "qwen3_5", "gemma4"];
const CHUNK: usize = 16;

/// The processor under another name.
struct Other(Arc<dyn Device>);

impl Device for Other {
    fn name(&self) -> &str {
        "other"
    }

    fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
        self.0.accepts(program, op)
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        self.0.open()
    }
}

fn model(fixture: &Fixture, rules: Option<Rules>) -> Model {
    let cpu = || registry::candidates(DeviceChoice::Cpu, Some(2)).unwrap().swap_remove(0);
    let options = LoadOptions { context: Some(512), chunk: CHUNK, placement: rules, ..LoadOptions::default() };
    Model::on_devices(ModelParts::of(fixture.bundle()).unwrap(), &[cpu(), Arc::new(Other(cpu()))], &options).unwrap()
}

fn stages(names: impl Iterator<Item = String>) -> BTreeMap<String, String> {
    names.map(|name| (name, "other".to_owned())).collect()
}

/// Every second stage elsewhere, every second op elsewhere, and each phase elsewhere.
fn splits(program: &Checked) -> [(&'static str, Rules); 4] {
    let every_stage = stages(program.stages.iter().step_by(2).map(|stage| stage.name.to_string()));
    let every_op = stages(program.ops.iter().step_by(2).map(|op| op.path.to_string()));
    let decode = Some("other".to_owned());
    [
        ("cut at every stage", Rules { stages: every_stage.clone(), ..Rules::default() }),
        ("cut at every op", Rules { stages: every_op, ..Rules::default() }),
        ("decode elsewhere", Rules { decode: decode.clone(), ..Rules::default() }),
        ("decode elsewhere, cut at every stage", Rules { decode, stages: every_stage, ..Rules::default() }),
    ]
}

/// The logits of a prompt and of some tokens after it, and of the same after the session was disturbed in every way.
fn logits(model: &Model, ids: &[u32]) -> Vec<Vec<f32>> {
    let cancel = Cancel::new();
    let mut session = model.session().unwrap();
    let mut all = Vec::new();
    let mut write = |session: &mut Session, ids: &[u32]| all.push(session.append(ids, &cancel).unwrap().to_vec());
    write(&mut session, &ids[..40]);
    ids[40..44].iter().for_each(|&id| write(&mut session, &[id]));
    session.checkpoint().unwrap();
    write(&mut session, &ids[44..]);
    session.rollback(44).unwrap();
    let mut fork = session.fork().unwrap();
    write(&mut session, &[1, 2, 3]);
    write(&mut session, &[4]);
    write(&mut fork, &ids[44..46]);
    let file = tempfile::NamedTempFile::new().unwrap();
    fork.save(file.path()).unwrap();
    let mut restored = model.restore(file.path()).unwrap();
    write(&mut restored, &ids[46..47]);
    write(&mut restored, &ids[47..]);
    session.rollback(20).unwrap();
    write(&mut session, &[5]);
    all
}

#[test]
fn a_split_changes_no_bit() {
    for family in FAMILIES {
        let fixture = Fixture::forge(&common::fixtures().join(family));
        let prompt = fixture.prompts.iter().find(|p| p.ids.len() == 63).unwrap();
        let ids: Vec<u32> = prompt.ids.iter().map(|&id| id as u32).collect();
        let whole = model(&fixture, None);
        let expected = logits(&whole, &ids);
        for (what, rules) in splits(whole.program()) {
            let split = model(&fixture, Some(rules));
            assert_eq!(split.device().name, "split");
            for (step, (found, expected)) in logits(&split, &ids).iter().zip(&expected).enumerate() {
                assert!(found == expected, "{family}, {what}, step {step}");
            }
        }
    }
}

/// Copies that go both ways, and round: a placement says only where an op runs, values and slots always go from an earlier op to a later one, so each copy has its rows before it is read.
#[test]
fn copies_that_go_round_change_no_bit() {
    let fixture = Fixture::forge(&common::fixtures().join("gemma4"));
    let ids: Vec<u32> = fixture.prompts.iter().find(|p| p.ids.len() == 63).unwrap().ids.iter().map(|&id| id as u32).collect();
    let expected = logits(&model(&fixture, None), &ids);
    let (both_ways, round) = ("layers 5 and 6 read the slot of layer 3, layer 7 that of layer 4", "a slot that comes home");
    for (what, rules, copies) in [
        (
            both_ways,
            "[stages]\n\"layers.4\" = \"other\"\n\"layers.5\" = \"other\"",
            &[("layers.3.kv", "cpu", "other"), ("layers.3.kv", "cpu", "cpu"), ("layers.4.kv", "other", "cpu")][..],
        ),
        (
            round,
            "prefill = \"other\"\ndecode = \"cpu\"\n[stages]\n\"layers.3\" = \"cpu\"\n\"layers.7\" = \"other\"",
            &[("layers.3.kv", "cpu", "other"), ("layers.4.kv", "other", "cpu"), ("layers.4.kv", "cpu", "other")],
        ),
    ] {
        let model = model(&fixture, Some(Rules::from_toml(rules).unwrap()));
        let found = &model.placement().copies;
        for (slot, from, to) in copies {
            assert!(found.iter().any(|copy| (&*copy.slot, &*copy.from, &*copy.to) == (*slot, *from, *to)), "{what}: {found:?}");
        }
        for (step, (found, expected)) in logits(&model, &ids).iter().zip(&expected).enumerate() {
            assert!(found == expected, "{what}, step {step}");
        }
    }
}

#[test]
fn what_ran_where_is_told() {
    let fixture = Fixture::forge(&common::fixtures().join("gemma4"));
    let ids: Vec<u32> = fixture.prompts.iter().find(|p| p.ids.len() == 17).unwrap().ids.iter().map(|&id| id as u32).collect();
    let rules = Rules::from_toml("prefill = \"other\"\n[stages]\n\"layers.4.ffn.down_proj\" = \"cpu\"\nlm_head = \"other\"").unwrap();
    let model = model(&fixture, Some(rules));
    let options = GenerateOptions { max_new: 4, ignore_eos: true, ..Default::default() };
    let answer = generate(&mut model.session().unwrap(), &Prompt::from_ids(ids), &options, &Cancel::new(), &mut |_| {}).unwrap();
    let runs = |stage: &str| -> Vec<(&str, usize)> {
        answer.stages.iter().filter(|s| s.stage == stage).map(|s| (s.device.as_str(), s.runs)).collect()
    };
    // Seventeen rows in chunks of 16: the last one alone is still prefill.
    assert_eq!(runs("layers.0.attn"), [("other", 2), ("cpu", 3)]);
    assert_eq!(runs("layers.4.ffn"), [("other", 2), ("cpu", 5)]);
    assert_eq!(runs("lm_head"), [("other", 5)]);
    // Shared slots are copied where the cut falls between, and all of them with the phase.
    let copies = &model.placement().copies;
    assert!(copies.iter().any(|c| c.reason.contains("every call")) && copies.iter().any(|c| c.reason.contains("writing")), "{copies:?}");
    let program = model.program();
    assert!(model.memory().state_bytes >= 2 * program.slots.values().map(|slot| slot.bytes(512)).sum::<u64>());
}

#[test]
fn an_unknown_stage_is_named_with_what_there_is() {
    let fixture = Fixture::forge(&common::fixtures().join("gemma4"));
    let load = |text: &str| {
        let options = LoadOptions { placement: Some(Rules::from_toml(text).unwrap()), device: DeviceChoice::Cpu, ..LoadOptions::default() };
        Model::load(fixture.bundle(), &options).map(drop).map_err(|e| e.to_string())
    };
    let error = load("[stages]\n\"layers.0.ffn.downproj\" = \"cpu\"").unwrap_err();
    assert!(
        error.contains("`layers.0.ffn.downproj`") && error.contains("under `layers.0.ffn` there are") && error.contains("down_proj"),
        "{error}"
    );
    assert!(load("default = \"tpu\"").unwrap_err().contains("there is no device `tpu`"));
    assert!(load("default = \"auto\"").unwrap_err().contains("`auto` is no device"));
    // Experts that would not come to stay anywhere.
    let mixture = Fixture::forge(&common::fixtures().join("phimoe"));
    let load_mixture = |text: &str| {
        let options = LoadOptions { placement: Some(Rules::from_toml(text).unwrap()), ..LoadOptions::default() };
        Model::load(mixture.bundle(), &options).map(drop).map_err(|e| e.to_string())
    };
    let error = load_mixture("default = \"cpu\"\n[hot_experts]\ncount = 3").unwrap_err();
    assert!(error.contains("hot_experts: cpu cannot hold experts that change"), "{error}");
    let error = load_mixture("default = \"reference\"\n[hot_experts]\ncount = 3\n[stages]\n\"layers.1.moe\" = \"cpu\"").unwrap_err();
    assert!(error.contains("no op with experts alone stands on another device than reference"), "{error}");
    assert_eq!(load("default = \"cpu\"\n[stages]\naudio = \"reference\"\n\"vision.0\" = \"cpu\""), Ok(()));
}
