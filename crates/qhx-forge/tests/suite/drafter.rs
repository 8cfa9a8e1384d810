//! The drafter of Gemma 4: its program gives what transformers gives (`oracle/drafter.py`), and answers with it are those without.

use crate::common::{self, Fixture, Overlay, Running, cpu, drafted::check_answers, relative_difference};
use qhx_forge::{Config, Material, Precision, families};
use qhx_ir::{
    Bindings, Call, Checked, Device, Executable, Generator, InputData, LoadOptions, OpKind, Outputs, Program, Segment, SlotData, State,
    reference::ReferenceDevice,
};
use std::{collections::HashMap, path::PathBuf};

fn folder() -> PathBuf {
    common::fixtures().join("gemma4")
}

/// What the text program keeps of its rows, and what the stage that the manifest names made of the last one.
struct Text {
    state: Box<dyn State>,
    hidden: Vec<f32>,
}

impl Text {
    fn read(fixture: &Fixture, device: &dyn Device, prompt: &common::Prompt) -> Self {
        let stage = fixture.bundle().manifest().draft.clone().unwrap().stage;
        let (rows, mut hidden) = (prompt.ids.len() - 1, Vec::new());
        let mut text: Running = fixture.load(device, fixture.program().clone(), &Overlay::default(), prompt);
        text.step(&prompt.ids[..rows], 0, false, &mut |tap| {
            if tap.stage == stage {
                hidden = tap.values[tap.values.len() - tap.values.len() / rows..].to_vec();
            }
        });
        Self { state: text.state, hidden }
    }
}

/// A drafting program with a state that has all rows of the text but the last, and that one's keys and values.
struct Drafting {
    executable: Box<dyn Executable>,
    state: Box<dyn State>,
    last: HashMap<String, (Vec<f32>, Vec<f32>)>,
}

impl Drafting {
    fn load(fixture: &Fixture, device: &dyn Device, program: &Checked, text: &Text) -> Self {
        let executable = device.load(program, &fixture.bundle().weights(), &LoadOptions::default()).unwrap();
        let (mut state, mut last) = (executable.new_state(64).unwrap(), HashMap::new());
        for slot in program.slots.keys() {
            let SlotData::Kv { dtype, rows, mut keys, mut values } = text.state.export(slot).unwrap() else { panic!("{slot}") };
            let before = keys.len() / rows * (rows - 1);
            last.insert(slot.to_string(), (dtype.numbers(&keys[before..]), dtype.numbers(&values[before..])));
            keys.truncate(before);
            values.truncate(before);
            state.import(slot, &SlotData::Kv { dtype, rows: rows - 1, keys, values }).unwrap();
        }
        state.set_len(text.state.len() - 1).unwrap();
        Self { executable, state, last }
    }

    /// Output `hidden` and the logits of a guess behind the last row, given the id before it. `chained`: the hidden row is the program's own.
    fn guess(&mut self, hidden: &[f32], chained: bool, next: i32) -> (Vec<f32>, Vec<f32>) {
        let program = self.executable.program().clone();
        let (next, position, nothing) = ([next], [self.state.len() as i32 + 1], vec![f32::NAN; hidden.len()]);
        let inputs = program.inputs.iter().map(|input| match &input.generator {
            Generator::NextIds => InputData::I32(&next),
            Generator::HiddenRows => InputData::F32(if chained { &nothing } else { hidden }),
            Generator::ChainedRows => InputData::F32(if chained { hidden } else { &[] }),
            Generator::ChainedRowsAt => InputData::I32(if chained { &[0] } else { &[] }),
            Generator::PositionsNext => InputData::I32(&position),
            Generator::TextKeys(slot) => InputData::F32(&self.last[&**slot].0),
            Generator::TextValues(slot) => InputData::F32(&self.last[&**slot].1),
            Generator::WantedRows => InputData::I32(&[0]),
            other => panic!("no {other:?}"),
        });
        let (inputs, mut outputs): (Vec<_>, _) = (inputs.collect(), Outputs::new());
        let mut segments = [Segment::new(Some(&mut *self.state), 0, 1)];
        let bindings = Bindings { rows: 1, soft_rows: usize::from(chained), wanted: 1 };
        self.executable.run(&mut Call::new(bindings, &inputs, &mut segments, &mut outputs)).unwrap();
        (outputs.value("hidden").unwrap().to_vec(), outputs.value("logits").unwrap().to_vec())
    }
}

/// The largest relative difference of the guesses for a prompt, each made behind the one that transformers made; and whether all are the largest among the logits that transformers has.
fn difference(fixture: &Fixture, device: &dyn Device, program: &Checked, prompt: &common::Prompt) -> (f32, bool) {
    let expected = |what: &str| fixture.oracle(&format!("{}.{what}", prompt.name)).unwrap();
    let (logits, chained) = (expected("logits"), expected("hidden"));
    let (logits, chained) = (logits.chunks(logits.len() / prompt.greedy.len()), chained.chunks(chained.len() / prompt.greedy.len()));
    let text = Text::read(fixture, device, prompt);
    let mut drafting = Drafting::load(fixture, device, program, &text);
    let (mut hidden, mut next, mut worst, mut is_same) = (text.hidden.clone(), prompt.ids[prompt.ids.len() - 1], 0f32, true);
    for (step, (expected, expected_hidden)) in logits.zip(chained).enumerate() {
        let (made, found) = drafting.guess(&hidden, step > 0, next);
        // Logits that were not computed are all alike, below the others.
        let least = expected.iter().fold(f32::INFINITY, |least, &logit| least.min(logit));
        let computed: Vec<usize> = (0..expected.len()).filter(|&id| expected[id] > least).collect();
        assert_eq!(computed.len(), 120);
        let of = |all: &[f32]| computed.iter().map(|&id| all[id]).collect::<Vec<f32>>();
        worst = worst.max(relative_difference(&of(&found), &of(expected))).max(relative_difference(&made, expected_hidden));
        is_same &= computed.iter().copied().max_by(|&a, &b| found[a].total_cmp(&found[b])) == Some(prompt.greedy[step] as usize);
        (hidden, next) = (made, prompt.greedy[step]);
    }
    (worst, is_same)
}

#[test]
fn the_program_gives_what_transformers_gives() {
    let fixture = Fixture::forge_drafter(&folder(), Precision::F32);
    let program = fixture.bundle().program("drafter").unwrap();
    for device in [&ReferenceDevice as &dyn Device, &*cpu()] {
        for prompt in &fixture.prompts {
            let (worst, is_same) = difference(&fixture, device, program, prompt);
            assert!(worst <= 1e-3 && is_same, "{} on {}: differs by {worst}, the same: {is_same}", prompt.name, device.name());
        }
    }
}

/// A mistake in the formula is seen.
#[test]
fn mistakes_are_seen() {
    let fixture = Fixture::forge_drafter(&folder(), Precision::F32);
    let program = fixture.bundle().program("drafter").unwrap();
    let prompt = fixture.prompts.iter().find(|prompt| prompt.name == "drafter.40").unwrap();
    type Mistake<'a> = (&'a str, &'a dyn Fn(&mut OpKind));
    let mistakes: [Mistake<'_>; 5] = [
        ("the hidden row before the embedding", &|op| {
            if let OpKind::Concat { xs } = op {
                xs.reverse();
            }
        }),
        ("no norm of the text", &|op| {
            if let OpKind::ScatterRows { x, .. } = op {
                *x = "hidden_rows".into();
            }
        }),
        ("embeddings without their factor", &|op| {
            if let OpKind::Embed { scale, .. } = op {
                *scale = 1.0;
            }
        }),
        ("a window of half as many rows", &|op| {
            if let OpKind::Attend { mask: qhx_ir::Mask::Window(rows), .. } = op {
                *rows /= 2;
            }
        }),
        ("attention without positions", &|op| {
            if let OpKind::Rope { x, .. } = op {
                *op = OpKind::Scale { x: x.clone(), factor: 1.0, weight: None };
            }
        }),
    ];
    for (mistake, change) in mistakes {
        let mut program = Program::clone(program);
        program.ops.iter_mut().for_each(|op| change(&mut op.op));
        let (worst, _) = difference(&fixture, &ReferenceDevice, &Checked::new(program).unwrap(), prompt);
        assert!(worst > 1e-2, "{mistake}: {worst}");
    }
}

/// At every precision, behind prompts that are shorter and longer than the window.
#[test]
fn answers_are_those_without() {
    let precisions = [Precision::F32, Precision::F16, Precision::W8, Precision::W4];
    let forged = |precision| Fixture::forge_drafter(&folder(), precision);
    let drafted: usize = precisions.map(|precision| check_answers(&forged(precision), &[1, 2, 15, 16, 17, 200], 20)).iter().sum();
    assert!(drafted > 0, "a first guess is always tried");
}

/// A drafter that was made for another model, or given as a model, is refused with the reason.
#[test]
fn what_does_not_fit_is_refused() {
    let read = |path: PathBuf| serde_json::from_str::<serde_json::Value>(&std::fs::read_to_string(path).unwrap()).unwrap();
    let (text, drafter) = (read(folder().join("config.json")), read(folder().join("drafter/config.json")));
    let error = |config: &serde_json::Value| {
        let config = Config::new(config);
        let written = families::of(config).and_then(|family| (family.write)(config, Precision::F32, &()));
        written.err().map(|error| error.to_string()).unwrap_or_default()
    };
    let beside = |change: &dyn Fn(&mut serde_json::Value)| {
        let (mut config, mut drafter) = (text.clone(), drafter.clone());
        change(&mut drafter);
        config["drafter"] = drafter;
        error(&config)
    };
    assert_eq!(beside(&|_| {}), "");
    assert!(error(&drafter).contains("is `gemma4_assistant`, a drafter for models of the family Gemma 4"), "{}", error(&drafter));
    let found = beside(&|drafter| drafter["backbone_hidden_size"] = 45.into());
    assert!(found.contains("`drafter.backbone_hidden_size` is 45, but the model that it drafts for has 44"), "{found}");
    let found = beside(&|drafter| drafter["text_config"]["head_dim"] = 16.into());
    assert!(found.contains("head_dim` is 16, but the model that it drafts for has 12"), "{found}");
    let found = beside(&|drafter| drafter["model_type"] = "llama".into());
    assert!(found.contains("is `llama`; the family Gemma 4 takes as its drafter: gemma4_assistant"), "{found}");
    let error = Material::open_with_drafter(&common::fixtures().join("llama"), &folder().join("drafter")).and_then(|material| {
        let out = tempfile::tempdir().unwrap();
        material.forge(&mut qhx_forge::ForgeOptions::new(&out.path().join("out"), Precision::F32))
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("is `gemma4_assistant`; the family Llama takes as its drafter: none"), "{error}");
}
