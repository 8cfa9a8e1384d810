//! Conversations and texts with images and sounds: where the placeholders stand, and what is read again from turn to turn.

use crate::common::{
    self, Kind,
    media::{AUDIO, BEGIN, END, IMAGE, image, seeing, sound},
};
use qhx_runtime::{
    Cancel, Conversation, DeviceChoice, GenerateOptions, LoadOptions, MediaKind, Medium, Model, ModelParts, ModelTemplate, Prompt,
    generate,
    text::{Chat, ChatTemplate, Message, Tokenizer},
};
use serde_json::{Value, json};
use std::sync::Arc;

/// Knows content in parts. Control tokens stand around an image.
const PARTS: &str = "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
    {% if part.type == 'image' %} <begin><image><end> {% elif part.type == 'audio' %} w3 <audio> {% else %} {{ part.text }}{% endif %}\
    {% endfor %}{% endif %} end {% endfor %}{% if add_generation_prompt %}assistant {% endif %}";
/// Knows content as text only.
const TEXT: &str =
    "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}{% if add_generation_prompt %}assistant {% endif %}";
/// Refuses what is no text.
const REFUSING: &str = "{% for m in messages %}{% if m.content is not string %}{{ raise_exception('text only') }}{% endif %}{{ m.content }}\
    {% endfor %}";
/// Forgets what it is given.
const SILENT: &str = "{% for m in messages %}w5 {% endfor %}";

const USER: u32 = 0;
const ASSISTANT: u32 = 1;
const OVER: u32 = 2;
const UNKNOWN: u32 = 4;

fn tokenizer() -> Tokenizer {
    let names = [(0, "user"), (1, "assistant"), (2, "end"), (18, "<image>"), (19, "<audio>"), (20, "<begin>"), (21, "<end>")];
    let name = |n: usize| names.iter().find(|(id, _)| *id == n).map_or(format!("w{n}"), |(_, name)| (*name).to_owned());
    // Control tokens are no words: their spelling alone does not make them.
    let vocabulary: serde_json::Map<String, Value> = (0..IMAGE as usize).map(|n| (name(n), json!(n))).collect();
    let special = |id: u32| {
        let content = name(id as usize);
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    };
    let added = [IMAGE, AUDIO, BEGIN, END].map(special);
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w4"}
    });
    Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap()
}

fn talking(kind: Kind, template: &str) -> ModelParts {
    let template = Arc::new(ChatTemplate::new(template, []).unwrap());
    ModelParts { tokenizer: Some(tokenizer()), template: Some(ModelTemplate { template, defaults: Default::default() }), ..seeing(kind) }
}

fn model(kind: Kind, template: &str, chunk: usize) -> Model {
    let load = LoadOptions { device: DeviceChoice::Reference, chunk, ..LoadOptions::default() };
    Model::from_parts(talking(kind, template), &load).unwrap()
}

fn asked(message: Message) -> Chat {
    Chat::new(vec![message])
}

fn with_media(media: &[Medium], text: &str) -> Chat {
    asked(Message::with_media("user", media.to_vec(), text))
}

fn places(prompt: &Prompt) -> Vec<(MediaKind, usize)> {
    prompt.media().iter().map(|placed| (placed.medium().kind(), placed.first())).collect()
}

#[test]
fn one_placeholder_becomes_as_many_as_there_are_rows() {
    let model = model(Kind::Dense, PARTS, 16);
    let (picture, noise) = (image(1, 1, 3), sound(1, 330));
    let heard = model.soft_rows(&noise).unwrap();
    let prompt = Prompt::chat(&model, &with_media(&[picture.clone(), noise.clone()], "w5 w6")).unwrap();
    let mut expected = vec![USER, BEGIN, IMAGE, IMAGE, IMAGE, END, 3, BEGIN];
    expected.extend(vec![AUDIO; heard]);
    expected.extend([END, 5, 6, OVER, ASSISTANT]);
    assert_eq!(prompt.ids(), expected, "the manifest's own ids stand around a sound, the template's around an image");
    assert_eq!(places(&prompt), [(MediaKind::Image, 2), (MediaKind::Audio, 8)]);

    let other_order = Prompt::chat(&model, &with_media(&[noise.clone(), picture.clone()], "")).unwrap();
    assert_eq!(places(&other_order), [(MediaKind::Audio, 3), (MediaKind::Image, heard + 5)]);
    assert_eq!(other_order.ids()[heard + 8..], [END, OVER, ASSISTANT], "no text, no part for it");

    // Text before an image, and an image in a later message.
    let mut message = Message::from_json(json!({"role": "user", "content": [{"type": "text", "text": "w7"}, {"type": "image"}]})).unwrap();
    message.media = vec![picture.clone()];
    let turns = vec![Message::new("user", "w8"), Message::new("assistant", "w9"), message];
    let prompt = Prompt::chat(&model, &Chat::new(turns)).unwrap();
    assert_eq!(prompt.ids(), [USER, 8, OVER, ASSISTANT, 9, OVER, USER, 7, BEGIN, IMAGE, IMAGE, IMAGE, END, OVER, ASSISTANT]);
    assert_eq!(places(&prompt), [(MediaKind::Image, 9)]);
}

#[test]
fn what_a_user_writes_is_no_placeholder() {
    for template in [PARTS, TEXT] {
        let model = model(Kind::Dense, template, 16);
        let plain = Prompt::chat(&model, &asked(Message::new("user", "w5 <image> <audio>"))).unwrap();
        assert_eq!(plain.ids(), [USER, 5, UNKNOWN, UNKNOWN, OVER, ASSISTANT]);
        let prompt = Prompt::chat(&model, &with_media(&[image(1, 1, 2)], "<image> w5<image>")).unwrap();
        assert_eq!(prompt.ids().iter().filter(|id| **id == IMAGE).count(), 2, "{:?}", prompt.ids());
        assert_eq!(prompt.media().len(), 1);
        let completion = Prompt::completion_with_media(&model, "<image> w5 <end>", &[image(1, 1, 2)]).unwrap();
        let text = &completion.ids()[completion.ids().len() - 3..];
        assert_eq!(text, [UNKNOWN, 5, UNKNOWN]);
    }
    let model = model(Kind::Dense, PARTS, 16);
    assert_eq!(Prompt::completion(&model, "<image> w5").unwrap().ids(), [UNKNOWN, 5]);
}

#[test]
fn templates_that_know_text_only_get_text() {
    let picture = image(1, 1, 3);
    for template in [TEXT, REFUSING] {
        let model = model(Kind::Dense, template, 16);
        let prompt = Prompt::chat(&model, &with_media(std::slice::from_ref(&picture), "w5 w6")).unwrap();
        let ids: Vec<u32> = prompt.ids().iter().copied().filter(|id| ![USER, OVER, ASSISTANT].contains(id)).collect();
        assert_eq!(ids, [IMAGE, IMAGE, IMAGE, 5, 6]);
    }
    let error = Prompt::chat(&model(Kind::Dense, SILENT, 16), &with_media(&[picture], "w5")).unwrap_err().to_string();
    assert!(error.contains("placeholders for images: found 0 in the prompt, expected 1"), "{error}");
}

#[test]
fn media_stand_before_a_text_to_continue() {
    let (picture, noise) = (image(1, 1, 2), sound(1, 100));
    let seen = model(Kind::Dense, PARTS, 16);
    let heard = seen.soft_rows(&noise).unwrap();
    let prompt = Prompt::completion_with_media(&seen, "w5 w6", &[picture.clone(), noise.clone()]).unwrap();
    let sounds = [vec![BEGIN], vec![AUDIO; heard], vec![END]].concat();
    assert_eq!(prompt.ids(), [vec![BEGIN, IMAGE, IMAGE, END], sounds.clone(), vec![5, 6]].concat(), "framed as in the template");
    let unframed = Model::from_parts(ModelParts { template: None, ..talking(Kind::Dense, PARTS) }, &LoadOptions::default()).unwrap();
    let prompt = Prompt::completion_with_media(&unframed, "w5", &[noise, picture]).unwrap();
    assert_eq!(prompt.ids(), [sounds, vec![IMAGE, IMAGE, 5]].concat());
}

#[test]
fn a_message_must_have_its_media() {
    let model = model(Kind::Dense, PARTS, 16);
    let lost = Message::from_json(json!({"role": "user", "content": [{"type": "image"}]})).unwrap();
    let error = Prompt::chat(&model, &asked(lost)).unwrap_err().to_string();
    assert_eq!(error, "message 1: its content has 1 parts that are media, and 0 media are given for it");
    let mut swapped = Message::with_media("user", vec![image(1, 1, 1)], "");
    swapped.media = vec![sound(1, 100)];
    assert!(Prompt::chat(&model, &asked(swapped)).is_err());
}

fn options() -> GenerateOptions {
    GenerateOptions { max_new: 5, ignore_eos: true, keep_logits: true, ..GenerateOptions::default() }
}

#[test]
fn turns_with_pictures_read_only_what_is_new() {
    for kind in common::KINDS {
        let model = model(kind, PARTS, 16);
        let mut talk = Conversation::new(&model, Chat::new(vec![])).unwrap();
        let turns = [
            Message::with_media("user", vec![image(1, 2, 3)], "w5 w6"),
            Message::new("user", "w7"),
            Message::with_media("user", vec![image(2, 3, 1), sound(3, 150)], "w8"),
            Message::with_media("user", vec![image(1, 2, 3)], "w9"),
        ];
        let encoded = [(1, 0), (0, 0), (1, 1), (0, 0)];
        for (turn, message) in turns.into_iter().enumerate() {
            let before = (talk.session().ids().to_vec(), talk.session().work());
            let mut asked = talk.chat().clone();
            asked.messages.push(message.clone());
            let answer = talk.say(message, &options(), &Cancel::new(), &mut |_| {}).unwrap();
            let prompt = Prompt::chat(&model, &asked).unwrap();
            assert_eq!(prompt.ids(), answer.prompt_ids);
            let fresh = generate(&mut model.session().unwrap(), &prompt, &options(), &Cancel::new(), &mut |_| {}).unwrap();
            assert_eq!((&fresh.ids, &fresh.step_logits), (&answer.ids, &answer.step_logits), "{kind:?}, turn {turn}");
            let work = talk.session().work();
            assert_eq!((work.images - before.1.images, work.sounds - before.1.sounds), encoded[turn], "{kind:?}, turn {turn}");
            let common = before.0.iter().zip(prompt.ids()).take_while(|(a, b)| a == b).count();
            if kind == Kind::Dense {
                assert_eq!(answer.kept_rows, common.min(prompt.ids().len() - 1), "turn {turn}");
                assert_eq!(work.rows - before.1.rows, prompt.ids().len() - answer.kept_rows + answer.ids.len() - 1);
            }
            let stages: Vec<_> = answer.stages.iter().map(|s| (s.stage.as_str(), s.runs)).collect();
            assert!(stages.contains(&("vision.0", encoded[turn].0)), "{stages:?}");
            assert!(stages.contains(&("vision.merger", encoded[turn].0)), "{stages:?}");
            assert_eq!(stages.iter().any(|(name, _)| *name == "audio.subsample"), turn >= 2, "{stages:?}");
        }
    }
}
