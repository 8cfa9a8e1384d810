//! Conversations of several turns: token for token what a fresh session on the whole conversation gives, reading only what is new.

use crate::common::{self, Kind, VOCABULARY, devices::Troubled, parts};
use qhx_runtime::{
    Cancel, Conversation, DeviceChoice, FinishReason, GenerateOptions, LoadOptions, Model, ModelParts, ModelTemplate, Prompt, generate,
    text::{Chat, ChatTemplate, Message, Tokenizer},
};
use serde_json::{Value, json};
use std::sync::Arc;

const CONTEXT: usize = 200;
/// Ids 0 to 3 are the template's own; words are the others.
const PLAIN: &str =
    "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}{% if add_generation_prompt %}assistant {% endif %}";
/// Shows earlier answers shortened to their first word, as templates do that leave out what a model thought.
const REWRITING: &str = "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}{{ m.content.split(' ')[0] }}{% else %}{{ m.content }}{% endif %} end {% endfor %}{% if add_generation_prompt %}assistant {% endif %}";

fn tokenizer() -> Tokenizer {
    let special = ["user", "assistant", "system", "end"];
    let name = |n: usize| special.get(n).map_or(format!("w{n}"), |s| (*s).to_owned());
    let vocabulary: serde_json::Map<String, Value> = (0..VOCABULARY).map(|n| (name(n), json!(n))).collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w4"}
    });
    Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap()
}

fn talking(kind: Kind, template: &str) -> ModelParts {
    let template = Arc::new(ChatTemplate::new(template, []).unwrap());
    ModelParts {
        tokenizer: Some(tokenizer()),
        template: Some(ModelTemplate { template, defaults: serde_json::Map::new() }),
        context_limit: CONTEXT,
        ..parts(kind)
    }
}

fn options() -> GenerateOptions {
    GenerateOptions { max_new: 6, ignore_eos: true, keep_logits: true, ..GenerateOptions::default() }
}

fn turns() -> Vec<Message> {
    ["w5 w6 w7", "w8", "w9 w10 w11 w12", "w13 w6", "w7 w7 w20"].map(|text| Message::new("user", text)).into()
}

#[test]
fn five_turns_are_what_fresh_sessions_give() {
    for kind in common::KINDS {
        for template in [PLAIN, REWRITING] {
            let device = Troubled::default();
            let load = LoadOptions { chunk: 16, ..LoadOptions::default() };
            let model = Model::on_device(talking(kind, template), Arc::new(device.clone()), &load).unwrap();
            let mut talk = Conversation::new(&model, Chat::new(vec![Message::new("system", "w4 w5")])).unwrap();
            let mut last_prompt = 0;
            for (turn, message) in turns().into_iter().enumerate() {
                let cancel = Cancel::new();
                if turn == 2 {
                    // The third answer is interrupted: its prompt takes a call or two, then a call per token.
                    device.set(|t| (t.cancel_in_call, t.cancel) = (5, cancel.clone()));
                }
                let before = talk.session().ids().to_vec();
                let mut asked = talk.chat().clone();
                asked.messages.push(message.clone());
                let answer = talk.say(message, &options(), &cancel, &mut |_| {}).unwrap();
                device.set(|t| t.cancel_in_call = 0);
                assert_eq!(answer.finish_reason == FinishReason::Cancelled, turn == 2);
                assert!(!answer.ids.is_empty());
                assert_eq!(talk.chat().messages.last().unwrap().content(), &json!(answer.text), "the conversation keeps what came");

                let prompt = Prompt::chat(&model, &asked).unwrap();
                assert_eq!(prompt.ids(), answer.prompt_ids);
                let fresh = generate(&mut model.session().unwrap(), &prompt, &options(), &Cancel::new(), &mut |_| {}).unwrap();
                assert!(fresh.ids.starts_with(&answer.ids), "{kind:?}, turn {turn}");
                assert!(fresh.step_logits.starts_with(&answer.step_logits), "{kind:?}, turn {turn}: not bit for bit");

                let common = before.iter().zip(prompt.ids()).take_while(|(a, b)| a == b).count();
                match kind {
                    Kind::Dense | Kind::Windowed => assert_eq!(answer.kept_rows, common.min(prompt.ids().len() - 1)),
                    Kind::Recurrent if template == PLAIN => assert_eq!(answer.kept_rows, common, "the session only grows"),
                    Kind::Recurrent => assert_eq!(answer.kept_rows, last_prompt, "the nearest checkpoint is the end of the last prompt"),
                    _ => assert!(answer.kept_rows <= common),
                }
                last_prompt = prompt.ids().len();
            }
        }
    }
}

#[test]
fn a_turn_that_never_began_leaves_no_trace() {
    let device = Troubled::default();
    let model = Model::on_device(talking(Kind::Recurrent, PLAIN), Arc::new(device.clone()), &LoadOptions::default()).unwrap();
    let mut talk = Conversation::new(&model, Chat::new(vec![])).unwrap();
    talk.say(Message::new("user", "w5"), &options(), &Cancel::new(), &mut |_| {}).unwrap();
    let before = (talk.chat().clone(), talk.session().ids().to_vec());

    let cancel = Cancel::new();
    cancel.cancel();
    let answer = talk.say(Message::new("user", "w6"), &options(), &cancel, &mut |_| {}).unwrap();
    assert_eq!((answer.finish_reason, answer.ids.len()), (FinishReason::Cancelled, 0));
    assert_eq!((talk.chat().clone(), talk.session().ids().to_vec()), before);

    device.set(|t| t.fail_in_call = 1);
    assert!(talk.say(Message::new("user", "w6"), &options(), &Cancel::new(), &mut |_| {}).is_err());
    device.set(|t| t.fail_in_call = 0);
    let long = Message::new("user", "w6 ".repeat(CONTEXT));
    assert!(talk.say(long, &options(), &Cancel::new(), &mut |_| {}).unwrap_err().to_string().contains("the context holds 200"));
    assert_eq!((talk.chat().clone(), talk.session().ids().to_vec()), before);
    assert!(talk.say(Message::new("user", "w6"), &options(), &Cancel::new(), &mut |_| {}).is_ok());
}

#[test]
fn completion_models_refuse_to_chat() {
    let parts = ModelParts { template: None, ..talking(Kind::Dense, PLAIN) };
    let model = Model::from_parts(parts, &common::options(DeviceChoice::Reference, 8, 40)).unwrap();
    let error = Conversation::new(&model, Chat::new(vec![])).err().unwrap().to_string();
    assert!(error.contains("completion model") && error.contains("no chat template"), "{error}");
    assert!(Prompt::chat(&model, &Chat::new(turns())).is_err());
    assert!(Prompt::completion(&model, "w5 w6").is_ok());
}

#[test]
fn template_variables_have_defaults_that_a_conversation_may_change() {
    let mut parts = talking(Kind::Dense, "{% if loud %}w20 {% endif %}{{ messages[0].content }}");
    parts.template.as_mut().unwrap().defaults.insert("loud".into(), json!(true));
    let model = Model::from_parts(parts, &common::options(DeviceChoice::Reference, 8, 40)).unwrap();
    let mut chat = Chat::new(vec![Message::new("user", "w5")]);
    assert_eq!(Prompt::chat(&model, &chat).unwrap().ids(), [20, 5]);
    chat.options.insert("loud".into(), json!(false));
    assert_eq!(Prompt::chat(&model, &chat).unwrap().ids(), [5]);
}

#[test]
fn a_saved_conversation_goes_on_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("session");
    for kind in common::KINDS {
        let load = LoadOptions { device: DeviceChoice::Reference, chunk: 16, ..LoadOptions::default() };
        let model = || Model::from_parts(talking(kind, PLAIN), &load).unwrap();
        let mut talk = Conversation::new(&model(), Chat::new(vec![Message::new("system", "w4 w5")])).unwrap();
        let say = |talk: &mut Conversation, message: &Message| {
            let answer = talk.say(message.clone(), &options(), &Cancel::new(), &mut |_| {}).unwrap();
            (answer.ids, answer.step_logits, answer.kept_rows)
        };
        let [first, second, ..] = &turns()[..] else { panic!("there are turns") };
        say(&mut talk, first);
        talk.save(&file).unwrap();
        let mut restored = Conversation::restore(&model(), &file).unwrap();
        assert_eq!(restored.chat(), talk.chat());
        assert_eq!(restored.tokens_with(second).unwrap(), talk.tokens_with(second).unwrap());
        assert_eq!(say(&mut restored, second), say(&mut talk, second), "{kind:?}");
        // A session alone is no conversation.
        talk.session().save(&file).unwrap();
        assert!(Conversation::restore(&model(), &file).err().unwrap().to_string().contains("holds no conversation"));
    }
}

#[test]
fn the_oldest_turns_are_dropped_one_by_one() {
    let model =
        Model::from_parts(talking(Kind::Dense, PLAIN), &LoadOptions { device: DeviceChoice::Reference, ..LoadOptions::default() }).unwrap();
    let messages =
        [("system", "w4"), ("user", "w5"), ("assistant", "w6"), ("tool", "w7"), ("assistant", "w8"), ("user", "w9"), ("assistant", "w10")];
    let mut talk = Conversation::new(&model, Chat::new(messages.map(|(role, text)| Message::new(role, text)).into())).unwrap();
    let next = Message::new("user", "w11 w12");
    let mut roles = Vec::new();
    while talk.drop_oldest_turn() {
        roles.push(talk.chat().messages.iter().map(|message| message.role().to_owned()).collect::<Vec<_>>().join(" "));
    }
    assert_eq!(roles, ["system user assistant", "system"]);
    // Three tokens of the system turn, four of the message, and the beginning of the answer.
    assert_eq!(talk.tokens_with(&next).unwrap(), 8);
    assert_eq!(talk.chat().messages.len(), 1);
}

#[test]
fn a_text_that_cannot_fit_is_refused_at_once() {
    let model = Model::from_parts(talking(common::KINDS[0], PLAIN), &common::options(DeviceChoice::Reference, 8, 40)).unwrap();
    let text = "w5 ".repeat(20_000_000);
    let started = std::time::Instant::now();
    let completion = Prompt::completion(&model, &text).unwrap_err().to_string();
    let chat = Prompt::chat(&model, &Chat::new(vec![Message::new("user", text)])).unwrap_err().to_string();
    assert!(started.elapsed().as_millis() < 1000, "{:?}", started.elapsed());
    let expected = "the prompt has 60000000 bytes of text, and a context of 40 tokens cannot hold more than 1048936: shorten the prompt \
        or raise the context (this model allows up to 200)";
    assert_eq!(completion, expected);
    // The role counts too.
    assert_eq!(chat, expected.replace("60000000", "60000004"));
}
