//! Multi-token prediction: the drafting program equals its formula (`oracle/mtp.py`), and answers with it are those without.

use crate::common::{
    self, Fixture, Overlay, Running, cpu,
    drafted::{check_answers, options},
    relative_difference,
};
use qhx_forge::Precision;
use qhx_ir::{
    Bindings, Call, Checked, Device, Executable, Generator, InputData, LoadOptions, OpKind, Outputs, Program, Segment, State,
    reference::ReferenceDevice,
};
use qhx_runtime::{Cancel, DraftParts, Model, ModelParts, Prompt, draft::DraftSource, generate};

/// A drafting program with its state.
struct Drafting {
    executable: Box<dyn Executable>,
    state: Box<dyn State>,
}

impl Drafting {
    fn load(fixture: &Fixture, device: &dyn Device, program: &Checked) -> Self {
        let options = LoadOptions { max_rows: 64, max_wanted: 64, ..LoadOptions::default() };
        let executable = device.load(program, &fixture.bundle().weights(), &options).unwrap();
        Self { state: executable.new_state(64).unwrap(), executable }
    }

    /// Output `hidden` and the logits of all rows. `chained`: the rows are the program's own.
    fn rows(&mut self, hidden: &[f32], chained: bool, next: &[i32]) -> (Vec<f32>, Vec<f32>) {
        let (program, count, first) = (self.executable.program().clone(), next.len() as i32, self.state.len() as i32);
        let (positions, all): (Vec<i32>, Vec<i32>) = ((first..first + count).cycle().take(3 * next.len()).collect(), (0..count).collect());
        let nothing = vec![f32::NAN; hidden.len()];
        let inputs = program.inputs.iter().map(|input| match input.generator {
            Generator::NextIds => InputData::I32(next),
            Generator::HiddenRows => InputData::F32(if chained { &nothing } else { hidden }),
            Generator::ChainedRows => InputData::F32(if chained { hidden } else { &[] }),
            Generator::ChainedRowsAt => InputData::I32(if chained { &all } else { &[] }),
            Generator::PositionsMrope => InputData::I32(&positions),
            Generator::WantedRows => InputData::I32(&all),
            ref other => panic!("no {other:?}"),
        });
        let (inputs, mut outputs): (Vec<_>, _) = (inputs.collect(), Outputs::new());
        let mut segments = [Segment::new(Some(&mut *self.state), 0, next.len())];
        let bindings = Bindings { rows: next.len(), soft_rows: if chained { next.len() } else { 0 }, wanted: next.len() };
        self.executable.run(&mut Call::new(bindings, &inputs, &mut segments, &mut outputs)).unwrap();
        self.state.commit(next.len()).unwrap();
        (outputs.value("hidden").unwrap().to_vec(), outputs.value("logits").unwrap().to_vec())
    }
}

#[test]
fn the_program_equals_the_formula() {
    let fixture = Fixture::forge_mtp(&common::fixtures().join("qwen3_5"));
    let draft = fixture.bundle().manifest().draft.clone().unwrap();
    for device in [&ReferenceDevice as &dyn Device, &*cpu()] {
        for prompt in &fixture.prompts {
            let name = format!("{} on {}", prompt.name, device.name());
            let expected = |what: &str| fixture.oracle(&format!("{}.{what}", prompt.name)).unwrap();
            let close = |what: &str, found: &[f32], expected: &[f32], tolerance: f32| {
                let difference = relative_difference(found, expected);
                assert!(difference <= tolerance, "{name}: {what} differs by {difference}");
            };
            // The stage that the manifest names makes the rows.
            let (next, mut shown) = (&prompt.ids[1..], Vec::new());
            let mut text: Running = fixture.load(device, fixture.program().clone(), &Overlay::default(), prompt);
            text.step(&prompt.ids[..next.len()], 0, false, &mut |tap| {
                if tap.stage == draft.stage {
                    shown = tap.values.to_vec();
                }
            });
            close("hidden rows", &shown, &expected("hidden"), 1e-4);
            let mut drafting = Drafting::load(&fixture, device, fixture.bundle().program("mtp").unwrap());
            let (mut hidden, logits) = drafting.rows(&shown, false, next);
            close("logits", &logits, &expected("logits"), 1e-3);
            let width = hidden.len() / next.len();
            hidden.drain(..hidden.len() - width);
            let (mut last, vocabulary) = (logits[logits.len() - logits.len() / next.len()..].to_vec(), logits.len() / next.len());
            for (step, &id) in prompt.greedy.iter().enumerate() {
                let best = (0..vocabulary).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
                assert_eq!(best as i32, id, "{name}: prediction {step}");
                (hidden, last) = drafting.rows(&hidden, true, &[id]);
                close(&format!("chained logits {step}"), &last, &expected("chained_logits")[step * vocabulary..][..vocabulary], 1e-3);
            }
        }
    }
}

/// A mistake in the formula, each of them one that somebody made, is seen.
#[test]
fn mistakes_are_seen() {
    let fixture = Fixture::forge_mtp(&common::fixtures().join("qwen3_5"));
    let program = fixture.bundle().program("mtp").unwrap();
    let prompt = fixture.prompts.iter().find(|prompt| prompt.name == "mtp.17").unwrap();
    let expected = |what: &str| fixture.oracle(&format!("{}.{what}", prompt.name)).unwrap();
    let difference = |change: &dyn Fn(&mut OpKind)| {
        let mut program = Program::clone(program);
        program.ops.iter_mut().for_each(|op| change(&mut op.op));
        let mut drafting = Drafting::load(&fixture, &ReferenceDevice, &Checked::new(program).unwrap());
        let (hidden, logits) = drafting.rows(&expected("hidden"), false, &prompt.ids[1..]);
        let width = hidden.len() / (prompt.ids.len() - 1);
        let (_, chained) = drafting.rows(&hidden[hidden.len() - width..], true, &prompt.greedy[..1]);
        let chained = relative_difference(&chained, &expected("chained_logits")[..chained.len()]);
        (relative_difference(&logits, &expected("logits")), chained)
    };
    let (own, chained) = difference(&|_| {});
    assert!(own < 1e-3 && chained < 1e-3, "{own}, {chained}");
    type Mistake<'a> = (&'a str, &'a dyn Fn(&mut OpKind));
    let mistakes: [Mistake<'_>; 4] = [
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
        ("the row before the norm given to the head", &|op| {
            if let OpKind::Gather { x, .. } = op {
                *x = "mtp.layers.0.ffn.add".into();
            }
        }),
        ("attention without positions", &|op| {
            if let OpKind::Rope { x, .. } = op {
                *op = OpKind::Scale { x: x.clone(), factor: 1.0, weight: None };
            }
        }),
    ];
    for (mistake, change) in mistakes {
        let (rows, chained) = difference(change);
        assert!(rows > 1e-2 || chained > 1e-2, "{mistake}: {rows}, {chained}");
    }
}

/// At every precision, behind prompts that are shorter and longer than what is read before the first guess.
#[test]
fn answers_are_those_without() {
    let forged = |precision| Fixture::forge_at(&common::fixtures().join("qwen3_5"), precision);
    let precisions = [Precision::F32, Precision::F16, Precision::W8, Precision::W4];
    let drafted: usize = precisions.map(|precision| check_answers(&forged(precision), &[1, 2, 40, 64, 65, 600], 0)).iter().sum();
    assert!(drafted > 0, "a first guess is always tried");
}

/// A drafting program that does not fit its text program is refused when the model is loaded, with the reason.
#[test]
fn what_cannot_draft_is_refused() {
    let fixture = Fixture::forge(&common::fixtures().join("qwen3_5"));
    let parts = ModelParts::of(fixture.bundle()).unwrap();
    let own = parts.draft.clone().unwrap();
    let refused = |draft: DraftParts| {
        let parts = ModelParts { draft: Some(draft), ..parts.clone() };
        Model::from_parts(parts, &qhx_runtime::LoadOptions::default()).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let cases = [
        (DraftParts { stage: "layers.9.ffn".into(), ..own.clone() }, "no stage `layers.9.ffn`"),
        (DraftParts { stage: "lm_head".into(), ..own.clone() }, "the stage `lm_head` of the text program does not give a row for each row"),
        (DraftParts { program: parts.program.clone(), ..own.clone() }, "its input `ids` is none that a drafting program can be given"),
    ];
    for (draft, expected) in cases {
        let error = refused(draft);
        assert!(error.starts_with("program `") && error.contains(" cannot draft for the text program: "), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    let changed = |change: &dyn Fn(&mut qhx_ir::Program)| {
        let mut program = (*own.program).clone();
        change(&mut program);
        refused(DraftParts { program: Checked::new(program).unwrap(), ..own.clone() })
    };
    assert!(changed(&|program| program.outputs.truncate(1)).contains("one output with 373 logits"));
    assert!(changed(&|program| drop(program.outputs.remove(0))).contains("an output `hidden` with 56 numbers"));
    assert!(changed(&|program| program.epochs.push(9)).contains("cut at any row"));
    // Without one there is nothing to ask for.
    let plain = Model::from_parts(ModelParts { draft: None, ..parts }, &qhx_runtime::LoadOptions::default()).unwrap();
    let mut session = plain.session().unwrap();
    let error = generate(&mut session, &Prompt::from_ids(vec![1]), &options(DraftSource::Mtp), &Cancel::new(), &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("has no program for multi-token prediction"), "{error}");
}
