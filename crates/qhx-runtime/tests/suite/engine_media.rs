//! The engine with images whose tower has a device of its own: what can be computed meanwhile is, and nobody waits for a tower that is not theirs.

use crate::common::{
    self, Kind,
    devices::Troubled,
    media::{IMAGE, image, seeing, words},
};
use qhx_ir::{Device, reference::ReferenceDevice};
use qhx_runtime::{
    Cancel, Error, GenerateOptions, LoadOptions, Medium, Model, Prompt,
    engine::{Answer, Engine, EngineOptions, EngineStats, Request},
    generate,
    placement::Rules,
};
use std::{sync::Arc, thread};

/// The tower on a device that can be held up, the text on another.
fn apart(kind: Kind, sessions: usize) -> (Troubled, Engine) {
    let tower = Troubled::default();
    let stages = [("vision".to_owned(), "troubled".to_owned())].into();
    let placement = Some(Rules { stages, ..Rules::default() });
    let options = LoadOptions { chunk: 16, context: Some(90), sessions, placement, ..LoadOptions::default() };
    let devices: [Arc<dyn Device>; 2] = [Arc::new(ReferenceDevice), Arc::new(tower.clone())];
    let model = Model::on_devices(seeing(kind), &devices, &options).unwrap();
    (tower, Engine::start(model, EngineOptions::default()).unwrap())
}

fn options() -> GenerateOptions {
    GenerateOptions { max_new: 6, ignore_eos: true, ..GenerateOptions::default() }
}

/// Words, an image, words, and so on.
fn prompt(model: &Model, images: &[Medium]) -> Prompt {
    let mut ids = words(7, 5);
    for (seed, image) in (8..).zip(images) {
        ids.extend(std::iter::repeat_n(IMAGE, model.soft_rows(image).unwrap()));
        ids.extend(words(seed, 4));
    }
    Prompt::from_ids_with_media(model, ids, images).unwrap()
}

/// Submits on a thread of its own: that waits for the tower.
fn submit(engine: &Engine, prompt: Prompt, cancel: &Cancel) -> thread::JoinHandle<Result<Answer, Error>> {
    let mut request = Request::new(prompt).with_options(options());
    request.cancel = cancel.clone();
    let engine = engine.clone();
    thread::spawn(move || engine.submit(request))
}

#[track_caller]
fn wait_until(engine: &Engine, what: &str, is_so: impl Fn(EngineStats) -> bool) {
    common::wait_until(what, || is_so(engine.stats()));
}

fn alone(model: &Model, prompt: &Prompt) -> Vec<u32> {
    generate(&mut model.session().unwrap(), prompt, &options(), &Cancel::new(), &mut |_| {}).unwrap().ids
}

/// While the tower is at work, the text before its image is computed, and after each image what stands before the next.
#[test]
fn text_is_computed_while_a_tower_is_at_work() {
    for kind in [Kind::Dense, Kind::Recurrent, Kind::Epochs] {
        let (tower, engine) = apart(kind, 2);
        let images = [image(1, 2, 3), image(2, 1, 2)];
        let prompt = prompt(engine.model(), &images);
        tower.set(|trouble| trouble.held = true);
        let submitted = submit(&engine, prompt.clone(), &Cancel::new());
        wait_until(&engine, "the words before the first image", |stats| stats.rows == 5);
        tower.set(|trouble| trouble.held = false);
        let answer = submitted.join().unwrap().unwrap().finish().unwrap();
        assert!(answer.timing.encode_ms > 0.0 && answer.timing.prefill_ms <= answer.timing.ttft_ms, "{:?}", answer.timing);
        assert_eq!(answer.ids, alone(engine.model(), &prompt), "{kind:?}");
    }
}

/// An engine that can only wait for a tower rests, and requests of text alone are answered meanwhile, however many images wait.
#[test]
fn others_do_not_wait_for_a_tower() {
    let (tower, engine) = apart(Kind::Dense, 2);
    let text = Prompt::from_ids(words(3, 9));
    tower.set(|trouble| trouble.held = true);
    let waiting: Vec<_> = (1..4)
        .map(|seed| prompt(engine.model(), &[image(seed, 2, 2)]))
        .map(|prompt| (submit(&engine, prompt.clone(), &Cancel::new()), prompt))
        .collect();
    wait_until(&engine, "all have come", |stats| stats.active == 1 && stats.waiting == 2 && stats.rows == 5);
    let answer = submit(&engine, text.clone(), &Cancel::new()).join().unwrap().unwrap().finish().unwrap();
    assert_eq!(answer.ids, alone(engine.model(), &text));
    // A step for the words before the image, and those of this answer: nothing is done while nothing can be.
    let most = 1 + 9 + answer.ids.len();
    assert!(engine.stats().steps <= most as u64, "{:?}", engine.stats());
    tower.set(|trouble| trouble.held = false);
    for (submitted, prompt) in waiting {
        let answer = submitted.join().unwrap().unwrap().finish().unwrap();
        assert_eq!(answer.ids, alone(engine.model(), &prompt));
    }
}

/// Whoever is cancelled, or whose tower fails, leaves nothing behind.
#[test]
fn a_tower_that_fails_ends_its_request_alone() {
    let (tower, engine) = apart(Kind::Recurrent, 2);
    let prompt = prompt(engine.model(), &[image(1, 2, 3)]);
    tower.set(|trouble| trouble.fail_in_call = 1);
    let error = submit(&engine, prompt.clone(), &Cancel::new()).join().unwrap().err().unwrap();
    assert!(error.to_string().contains("went away"), "{error}");
    wait_until(&engine, "it is gone", |stats| stats.active == 0 && stats.waiting == 0);
    let cancel = Cancel::new();
    tower.set(|trouble| (trouble.fail_in_call, trouble.held) = (0, true));
    let submitted = submit(&engine, prompt.clone(), &cancel);
    wait_until(&engine, "it has begun", |stats| stats.active == 1);
    cancel.cancel();
    assert!(matches!(submitted.join().unwrap(), Err(Error::Cancelled)));
    wait_until(&engine, "it is gone", |stats| stats.active == 0 && stats.waiting == 0);
    tower.set(|trouble| trouble.held = false);
    let answer = submit(&engine, prompt.clone(), &Cancel::new()).join().unwrap().unwrap().finish().unwrap();
    assert_eq!(answer.ids, alone(engine.model(), &prompt));
}

/// Where tower and text have one device between them, the tower comes first: two at once would not be faster.
#[test]
fn one_device_encodes_first() {
    let device = Troubled::default();
    let options = LoadOptions { chunk: 16, context: Some(90), sessions: 2, ..LoadOptions::default() };
    let model = Model::on_device(seeing(Kind::Dense), Arc::new(device.clone()), &options).unwrap();
    let engine = Engine::start(model, EngineOptions::default()).unwrap();
    let prompt = prompt(engine.model(), &[image(1, 2, 3)]);
    device.set(|trouble| trouble.held = true);
    let submitted = submit(&engine, prompt.clone(), &Cancel::new());
    common::wait_until("the tower runs", || device.calls() > 0);
    assert_eq!((engine.stats().active, engine.stats().waiting), (0, 0), "it is not queued yet");
    device.set(|trouble| trouble.held = false);
    assert_eq!(submitted.join().unwrap().unwrap().finish().unwrap().ids, alone(engine.model(), &prompt));
}
