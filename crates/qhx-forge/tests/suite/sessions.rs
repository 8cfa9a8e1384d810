//! Every family in a session that is disturbed: whatever happens in between, the next tokens are those of the oracle.

use crate::common::{self, Fixture};
use qhx_runtime::{
    Cancel, Conversation, DeviceChoice, Error, FinishReason, GenerateOptions, LoadOptions, Model, ModelParts, ModelTemplate, Prompt,
    Session, generate,
    text::{Chat, ChatTemplate, Message},
};
use std::sync::Arc;

const FAMILIES: [&str; 7] = ["llama", "qwen3", "qwen3_vl", "phimoe", "phimoe_longrope", "qwen3_5", "gemma4"];
const CHUNK: usize = 16;

/// Shows only the first four characters of earlier answers, as templates do that leave out what a model thought.
const REWRITING: &str = "{% for m in messages %}{{ m.role }}: {{ m.content[:4] if m.role == 'assistant' else m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

fn options() -> LoadOptions {
    LoadOptions { device: DeviceChoice::Cpu, threads: Some(2), context: Some(512), chunk: CHUNK, ..LoadOptions::default() }
}

fn fixture(family: &str) -> Fixture {
    Fixture::forge(&common::fixtures().join(family))
}

#[test]
fn disturbed_sessions_go_on_as_if_nothing_had_happened() {
    for family in FAMILIES {
        let fixture = fixture(family);
        let model = Model::load(fixture.bundle(), &options()).unwrap();
        let prompt = fixture.prompts.iter().find(|p| p.ids.len() == 63).unwrap();
        let (ids, greedy) = (unsigned(&prompt.ids), unsigned(&prompt.greedy));
        let undisturbed = || model.session().unwrap();
        check(family, "undisturbed", undisturbed(), &ids, &greedy);

        // Stopped in the first and in a later chunk, at an early and at a late stage of it.
        for (chunk, stage) in [(0, "embed"), (0, "layers.1.attn"), (2, "layers.0.attn"), (3, "lm_head")] {
            let mut session = undisturbed();
            stop(&mut session, &ids, chunk * CHUNK, stage);
            assert!(session.is_empty());
            check(family, &format!("stopped in chunk {chunk} at {stage}"), session, &ids, &greedy);
        }
        // Stopped while it decodes.
        let mut session = undisturbed();
        session.append(&ids, &Cancel::new()).unwrap();
        stop(&mut session, &greedy[..1], ids.len(), "layers.1.attn");
        check(family, "stopped in decode", session, &ids, &greedy);

        // Gone astray, then back to the prompt, to its middle, and to nothing.
        for back in [ids.len(), 40, 0] {
            let mut session = undisturbed();
            session.append(&ids, &Cancel::new()).unwrap();
            (0..20).for_each(|n| _ = session.append(&[n % 7], &Cancel::new()).unwrap());
            session.rollback(back).unwrap();
            check(family, &format!("rolled back to {back}"), session, &ids, &greedy);
        }
        // Two ways from one point, and a way through a file.
        let mut session = undisturbed();
        session.append(&ids[..50], &Cancel::new()).unwrap();
        let mut fork = session.fork().unwrap();
        fork.append(&[1, 2, 3], &Cancel::new()).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        session.save(file.path()).unwrap();
        check(family, "forked", session, &ids, &greedy);
        check(family, "saved and restored", model.restore(file.path()).unwrap(), &ids, &greedy);
        check(family, "the other way, back again", fork, &ids, &greedy);
    }
}

/// Appends `ids` and asks to stop when `stage` of the call that starts at row `row` is done.
fn stop(session: &mut Session, ids: &[u32], row: usize, stage: &str) {
    let (before, cancel) = (session.ids().to_vec(), Cancel::new());
    let mut seen = false;
    let stopped = session.append_traced(ids, 1, &cancel, &mut |_, _| {}, &mut |first, tap| {
        if first == row && tap.stage == stage {
            cancel.cancel();
            seen = true;
        }
    });
    assert!(seen, "no stage {stage} in a call at row {row}");
    // The head is the last stage of its call: a request after it is honoured before the next.
    assert!(matches!(stopped, Err(Error::Cancelled)) || stage == "lm_head" && stopped.is_ok());
    if stopped.is_ok() {
        session.rollback(before.len()).unwrap();
    }
    assert_eq!(session.ids(), before, "as it was");
}

fn check(family: &str, what: &str, mut session: Session, prompt: &[u32], greedy: &[u32]) {
    let options = GenerateOptions { max_new: greedy.len(), ignore_eos: true, ..Default::default() };
    let answer = generate(&mut session, &Prompt::from_ids(prompt.to_vec()), &options, &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!(answer.ids, greedy, "{family}, {what}");
}

#[test]
fn five_turns_are_what_fresh_sessions_give() {
    for family in FAMILIES {
        let fixture = fixture(family);
        let own = ModelParts::of(fixture.bundle()).unwrap();
        let template = Arc::new(ChatTemplate::new(REWRITING, []).unwrap());
        let rewriting = ModelParts { template: Some(ModelTemplate { template, defaults: Default::default() }), ..own.clone() };
        for parts in [own, rewriting] {
            let recurrent = parts.program.slots.values().any(|slot| slot.is_recurrent());
            let model = Model::from_parts(parts, &LoadOptions { context: Some(2048), ..options() }).unwrap();
            let mut talk = Conversation::new(&model, Chat::new(vec![])).unwrap();
            let answering = GenerateOptions { max_new: 8, ignore_eos: true, ..Default::default() };
            for (turn, text) in ["Hello there", "2 + 2?", "Write a story", "Why?", "Good bye"].into_iter().enumerate() {
                let message = Message::new("user", text);
                let before = talk.session().ids().to_vec();
                let mut asked = talk.chat().clone();
                asked.messages.push(message.clone());
                // The third answer is interrupted after three tokens.
                let (cancel, mut tokens) = (Cancel::new(), 0);
                let answer = talk.say(message, &answering, &cancel, &mut |_| {
                    tokens += 1;
                    if turn == 2 && tokens == 3 {
                        cancel.cancel();
                    }
                });
                let answer = answer.unwrap();
                assert_eq!(answer.finish_reason == FinishReason::Cancelled, turn == 2);

                let prompt = Prompt::chat(&model, &asked).unwrap();
                let fresh = generate(&mut model.session().unwrap(), &prompt, &answering, &Cancel::new(), &mut |_| {}).unwrap();
                assert_eq!(answer.prompt_ids, prompt.ids());
                assert!(fresh.ids.starts_with(&answer.ids), "{family}, turn {turn}: {:?} against {:?}", answer.ids, fresh.ids);
                // Only what changed is read again; with recurrent state, from the checkpoint at the end of the last prompt on.
                let common = before.iter().zip(prompt.ids()).take_while(|(a, b)| a == b).count();
                match recurrent || !model.program().epochs.is_empty() {
                    false => assert_eq!(answer.kept_rows, common.min(prompt.ids().len() - 1), "{family}, turn {turn}"),
                    true => assert!(answer.kept_rows <= common, "{family}, turn {turn}"),
                }
            }
        }
    }
}

fn unsigned(ids: &[i32]) -> Vec<u32> {
    ids.iter().map(|&id| id as u32).collect()
}
