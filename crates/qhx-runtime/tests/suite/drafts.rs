//! Drafts change nothing: answers with guesses, right, wrong and senseless ones, are the answers without.

use crate::common::{self, KINDS, Kind, VOCABULARY, device_choices, devices::Troubled, ids, parts, predicting};
use qhx_ir::{Device, reference::ReferenceDevice};
use qhx_runtime::{
    Cancel, DeviceChoice, Error, FinishReason, GenerateOptions, Generation, LoadOptions, LogitProcessor, Model, Prompt,
    draft::{Draft, DraftModel, DraftSource, Lookup},
    engine::{Engine, EngineOptions, Request},
    generate,
    placement::{Overlap, Rules},
    sample::{SamplerConfig, random::uniform},
};
use std::sync::{Arc, Mutex};

const CONTEXT: usize = 60;

/// Knows the answer, and is wrong about so large a share of it.
struct Oracle {
    answer: Vec<u32>,
    wrong: f64,
    seed: u64,
}

impl Draft for Oracle {
    fn propose(&mut self, ids: &[u32], most: usize) -> Result<Vec<u32>, Error> {
        let known = self.answer.get(ids.len()..).unwrap_or_default();
        let guess = |(at, &id): (usize, &u32)| match uniform(self.seed, (1000 * ids.len() + at) as u64) < self.wrong {
            true => (id + 1) % VOCABULARY as u32,
            false => id,
        };
        Ok(known.iter().enumerate().take(most).map(guess).collect())
    }
}

fn load_options(sessions: usize) -> LoadOptions {
    LoadOptions { chunk: 16, context: Some(CONTEXT), sessions, ..LoadOptions::default() }
}

fn plain(temperature: f32) -> GenerateOptions {
    let sampler = SamplerConfig { temperature, seed: 7, ..SamplerConfig::default() };
    GenerateOptions { max_new: 40, ignore_eos: true, draft: DraftSource::None, sampler, ..GenerateOptions::default() }
}

fn alone(model: &Model, prompt: &[u32], options: &GenerateOptions) -> Generation {
    let mut session = model.session().unwrap();
    generate(&mut session, &Prompt::from_ids(prompt.to_vec()), options, &Cancel::new(), &mut |_| {}).unwrap()
}

/// A request whose drafts are wrong now and then.
fn drafted(prompt: &[u32], answer: &Generation, wrong: f64, options: &GenerateOptions) -> Request {
    let answer = [prompt, &answer.ids].concat();
    Request::new(Prompt::from_ids(prompt.to_vec())).with_options(options.clone()).with_draft(Oracle { answer, wrong, seed: 3 })
}

/// A model on each device here, and on two of which one has the first rows of a call while the other has those behind them.
fn models(kind: Kind) -> Vec<(String, Model)> {
    let on_one =
        |device: DeviceChoice| (device.to_string(), Model::from_parts(parts(kind), &LoadOptions { device, ..load_options(4) }).unwrap());
    let mut models: Vec<_> = device_choices().into_iter().map(on_one).collect();
    let other = Troubled::default();
    other.set(|trouble| trouble.invariant_rows = 100);
    let devices: [Arc<dyn Device>; 2] = [Arc::new(ReferenceDevice), Arc::new(other)];
    let stages = ["layers.0.ffn", "lm_head"].map(|stage| (stage.to_owned(), "troubled".to_owned())).into();
    let rules = Rules { stages, overlap: Some(Overlap::From(2.try_into().unwrap())), ..Rules::default() };
    let options = LoadOptions { placement: Some(rules), ..load_options(4) };
    models.push(("two devices".into(), Model::on_devices(parts(kind), &devices, &options).unwrap()));
    models
}

/// Every kind of state, greedy and sampled, across epochs and up to the end of the context, four answers in a call.
#[test]
fn answers_are_those_without_drafts() {
    for kind in KINDS {
        for (device, model) in models(kind) {
            let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
            for (temperature, wrong) in [(0.0, 0.0), (0.0, 0.3), (1.3, 0.3), (0.0, 1.0)] {
                let options = plain(temperature);
                let prompts: Vec<Vec<u32>> = (0..6).map(|n| ids(n, 1 + 5 * n as usize)).collect();
                let expected: Vec<Generation> = prompts.iter().map(|prompt| alone(&model, prompt, &options)).collect();
                let both = prompts.iter().zip(&expected);
                let answers: Vec<_> =
                    both.map(|(prompt, answer)| engine.submit(drafted(prompt, answer, wrong, &options)).unwrap()).collect();
                for (expected, answer) in expected.iter().zip(answers) {
                    let answer = answer.finish().unwrap();
                    let timing = &answer.timing;
                    assert_eq!(answer.ids, expected.ids, "{kind:?} on {device}, temperature {temperature}, {wrong} wrong");
                    assert_eq!((expected.timing.drafted, timing.drafted > 0), (0, true));
                    match wrong {
                        0.0 => assert_eq!(timing.accepted, timing.drafted),
                        1.0 => assert_eq!(timing.accepted, 0),
                        _ => assert!(timing.accepted > 0 && timing.accepted < timing.drafted),
                    }
                }
            }
        }
    }
}

/// Right drafts are worth their rows: 40 tokens take few calls, and every row is computed once.
#[test]
fn accepted_drafts_save_calls() {
    let model = Model::from_parts(parts(Kind::Recurrent), &load_options(1)).unwrap();
    let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
    let expected = alone(&model, &[1, 2, 3], &plain(0.0));
    let before = engine.stats().steps;
    let answer = engine.submit(drafted(&[1, 2, 3], &expected, 0.0, &plain(0.0))).unwrap().finish().unwrap();
    assert_eq!(answer.ids, expected.ids);
    // A step is counted after what it gave was handed out.
    common::wait_until("all rows are counted", || engine.stats().rows >= 3 + 39);
    assert!(engine.stats().steps - before <= 8, "{} steps", engine.stats().steps - before);
    assert_eq!(engine.stats().rows, 3 + 39);
}

/// Guesses that are no tokens, more guesses than asked for, and a source that fails.
struct Senseless(usize);

impl Draft for Senseless {
    fn propose(&mut self, _: &[u32], most: usize) -> Result<Vec<u32>, Error> {
        self.0 += 1;
        match self.0 % 4 {
            0 => Ok(vec![u32::MAX; 3]),
            1 => Ok(vec![1, VOCABULARY as u32]),
            2 => Ok(vec![2; 10 * most]),
            _ if self.0 > 12 => Err(Error::NoTokenizer { what: "guessing" }),
            _ => Ok(Vec::new()),
        }
    }
}

#[test]
fn senseless_guesses_are_harmless() {
    let model = Model::from_parts(parts(Kind::RecurrentEpochs), &load_options(2)).unwrap();
    let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
    let request = Request::new(Prompt::from_ids(vec![1, 2])).with_options(plain(0.0)).with_draft(Senseless(0));
    let answer = engine.submit(request).unwrap().finish().unwrap();
    assert_eq!(answer.ids, alone(&model, &[1, 2], &plain(0.0)).ids);
    assert!(answer.note.is_some_and(|note| note.starts_with("nothing more was drafted: ")));
}

/// Forbids what was chosen last, and remembers what it was shown.
struct NoEcho(Arc<Mutex<Vec<Vec<u32>>>>);

impl LogitProcessor for NoEcho {
    fn process(&mut self, ids: &[u32], logits: &mut [f32]) {
        self.0.lock().unwrap().push(ids.to_vec());
        logits[ids[ids.len() - 1] as usize] = f32::NEG_INFINITY;
    }
}

/// Processors see each token once, and never a guess.
#[test]
fn processors_see_what_they_would_see() {
    let model = Model::from_parts(parts(Kind::Dense), &load_options(1)).unwrap();
    let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
    let ask = |request: Request| {
        let seen = Arc::<Mutex<Vec<Vec<u32>>>>::default();
        let answer = engine.submit(request.with_options(plain(0.0)).with_processor(NoEcho(seen.clone()))).unwrap().finish().unwrap();
        let seen = seen.lock().unwrap().clone();
        (answer, seen)
    };
    let prompt = || Request::new(Prompt::from_ids(vec![4, 5]));
    let (expected, expected_seen) = ask(prompt());
    let answer = [&[4, 5], &expected.ids[..]].concat();
    let (found, seen) = ask(prompt().with_draft(Oracle { answer, wrong: 0.3, seed: 5 }));
    assert_eq!((found.ids, seen), (expected.ids, expected_seen));
    assert!(found.timing.accepted > 0);
}

/// An answer that ends among right drafts ends there: at its last token, or at the limit.
#[test]
fn answers_end_where_they_would() {
    let model = Model::from_parts(parts(Kind::Recurrent), &load_options(1)).unwrap();
    let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
    let long = alone(&model, &[1, 2, 3], &plain(0.0));
    for max_new in 1..12 {
        let options = GenerateOptions { max_new, ..plain(0.0) };
        let found = engine.submit(drafted(&[1, 2, 3], &long, 0.0, &options)).unwrap().finish().unwrap();
        assert_eq!((&found.ids[..], found.finish_reason), (&long.ids[..max_new], FinishReason::Length));
        // What was kept of it is right: the next answer goes on from there.
        let next = [&[1, 2, 3], &long.ids[..max_new], &[7]].concat();
        let going_on = Request::new(Prompt::from_ids(next.clone())).with_options(plain(0.0));
        assert_eq!(engine.submit(going_on).unwrap().finish().unwrap().ids, alone(&model, &next, &plain(0.0)).ids, "after {max_new}");
    }
    for seed in 0..20 {
        let prompt = ids(seed, 4);
        let options = GenerateOptions { ignore_eos: false, ..plain(1.5) };
        let expected = alone(&model, &prompt, &options);
        let found = engine.submit(drafted(&prompt, &expected, 0.1, &options)).unwrap().finish().unwrap();
        assert_eq!((found.ids, found.finish_reason), (expected.ids, expected.finish_reason));
    }
}

/// A device that is lost in a step with drafts, and an answer that is cancelled in one.
#[test]
fn trouble_in_a_step_with_drafts() {
    for kind in KINDS {
        let device = Troubled::default();
        device.set(|trouble| trouble.invariant_rows = usize::MAX);
        let model = Model::on_device(parts(kind), Arc::new(device.clone()), &load_options(2)).unwrap();
        let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
        let prompt = ids(2, 9);
        let expected = alone(&model, &prompt, &plain(0.0));
        for call in 1..10 {
            device.set(|trouble| trouble.lost_in_call = call);
            let found = engine.submit(drafted(&prompt, &expected, 0.2, &plain(0.0))).unwrap().finish().unwrap();
            assert_eq!((found.ids, found.timing.drafted > 0), (expected.ids.clone(), true), "{kind:?}, lost in call {call}");
            device.set(|trouble| trouble.lost_in_call = 0);
            let mut cancelled = engine.submit(drafted(&prompt, &expected, 0.2, &plain(0.0))).unwrap();
            for _ in 0..call {
                cancelled.next_piece();
            }
            cancelled.cancel();
            let ids = cancelled.finish().unwrap().ids;
            assert!(expected.ids.starts_with(&ids), "{kind:?}, cancelled after {call}");
        }
        let again = engine.submit(drafted(&prompt, &expected, 0.2, &plain(0.0))).unwrap().finish().unwrap();
        assert_eq!(again.ids, expected.ids, "{kind:?}, what was kept of cancelled answers is right");
    }
}

/// What the tiny model that predicts answers.
fn predicted(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut all = prompt.to_vec();
    while all.len() < prompt.len() + count {
        all.push(predicting::after(all[all.len().saturating_sub(2)]));
    }
    all.split_off(prompt.len())
}

/// The model's own program gets the rows that it should, also of drafts that were accepted, behind a beginning that was there, and after chaining: every guess is right.
#[test]
fn the_own_program_follows_the_answer() {
    let mut drafted = 0;
    for device in device_choices() {
        let model = Model::from_parts(predicting::predicting(), &LoadOptions { device, ..load_options(4) }).unwrap();
        let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
        let options = GenerateOptions { draft: DraftSource::Mtp, max_new: 20, ..plain(0.0) };
        let prompts: Vec<Vec<u32>> = (0..8).map(|n| ids(n, 1 + 5 * n as usize)).collect();
        let mut hold = |prompt: &[u32], found: Generation| {
            assert_eq!((found.ids, found.note), (predicted(prompt, 20), None), "{device}");
            assert_eq!(found.timing.accepted, found.timing.drafted, "{device}, {} tokens", prompt.len());
            drafted += found.timing.drafted;
        };
        for prompt in &prompts {
            hold(prompt, alone(&model, prompt, &options));
        }
        for _ in 0..2 {
            let request = |prompt: &Vec<u32>| Request::new(Prompt::from_ids(prompt.clone())).with_options(options.clone());
            let answers: Vec<_> = prompts.iter().map(|prompt| engine.submit(request(prompt)).unwrap()).collect();
            prompts.iter().zip(answers).for_each(|(prompt, answer)| hold(prompt, answer.finish().unwrap()));
        }
    }
    // On a model that is as fast as this it hardly ever pays; a few guesses are tried.
    assert!(drafted > 20, "{drafted}");
}

/// The same when the device of both programs is lost, in a call of either, and when the answer is cancelled.
#[test]
fn the_own_program_survives_trouble() {
    let device = Troubled::default();
    device.set(|trouble| trouble.invariant_rows = usize::MAX);
    let model = Model::on_device(predicting::predicting(), Arc::new(device.clone()), &load_options(2)).unwrap();
    let engine = Engine::start(model, EngineOptions::default()).unwrap();
    let prompt = ids(2, 9);
    let request = || {
        let options = GenerateOptions { draft: DraftSource::Mtp, max_new: 20, ..plain(0.0) };
        Request::new(Prompt::from_ids(prompt.clone())).with_options(options)
    };
    let expected = predicted(&prompt, 20);
    for call in 1..14 {
        device.set(|trouble| trouble.lost_in_call = call);
        let found = engine.submit(request()).unwrap().finish().unwrap();
        assert_eq!((found.ids, found.timing.accepted), (expected.clone(), found.timing.drafted), "lost in call {call}");
        device.set(|trouble| trouble.lost_in_call = 0);
        let mut cancelled = engine.submit(request()).unwrap();
        for _ in 0..call {
            cancelled.next_piece();
        }
        cancelled.cancel();
        assert!(expected.starts_with(&cancelled.finish().unwrap().ids), "cancelled after {call}");
    }
    assert_eq!(engine.submit(request()).unwrap().finish().unwrap().ids, expected);
}

/// Where a row depends on its company, as on GPUs and NPUs, or where decoding is placed apart with room for one row of each session, nothing is drafted, whatever is asked for.
#[test]
fn nothing_is_drafted_where_company_matters() {
    let apart = Rules { decode: Some("reference-f16".into()), ..Rules::default() };
    let apart = LoadOptions { device: DeviceChoice::Reference, placement: Some(apart), ..load_options(2) };
    for model in [
        Model::on_device(predicting::predicting(), Arc::new(Troubled::default()), &load_options(2)).unwrap(),
        Model::from_parts(predicting::predicting(), &apart).unwrap(),
    ] {
        let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
        let prompt = [ids(1, 6), ids(1, 6)].concat();
        let expected = alone(&model, &prompt, &plain(0.0));
        for draft in [DraftSource::Auto, DraftSource::Lookup, DraftSource::Mtp] {
            let found = alone(&model, &prompt, &GenerateOptions { draft: draft.clone(), ..plain(0.0) });
            assert_eq!((found.ids, found.timing.drafted), (expected.ids.clone(), 0), "{draft:?}");
        }
        let found = engine.submit(drafted(&prompt, &expected, 0.0, &plain(0.0))).unwrap().finish().unwrap();
        assert_eq!((found.ids, found.timing.drafted), (expected.ids, 0));
    }
}

/// Beside more rows than a device bears, those of prompts included, nothing is drafted; an answer that is alone again drafts.
#[test]
fn drafts_keep_to_small_company() {
    for rows in [1, 2, 3] {
        let device = Troubled::default();
        device.set(|trouble| trouble.invariant_rows = rows);
        let model = Model::on_device(parts(Kind::Recurrent), Arc::new(device), &load_options(4)).unwrap();
        let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
        let prompts: Vec<Vec<u32>> = (0..6).map(|n| ids(n, 3 + 4 * n as usize)).collect();
        let expected: Vec<Generation> = prompts.iter().map(|prompt| alone(&model, prompt, &plain(0.0))).collect();
        let request = |n: usize| engine.submit(drafted(&prompts[n], &expected[n], 0.2, &plain(0.0))).unwrap();
        for (answer, expected) in (0..6).map(request).collect::<Vec<_>>().into_iter().zip(&expected) {
            assert_eq!(answer.finish().unwrap().ids, expected.ids, "beside {rows} rows");
        }
        let last = request(0).finish().unwrap();
        assert_eq!((&last.ids, last.timing.drafted > 0), (&expected[0].ids, true), "beside {rows} rows");
    }
}

/// The sources that options name, on a session by itself and on the engine.
#[test]
fn lookup_and_models_draft() {
    for kind in KINDS {
        let model = Model::from_parts(parts(kind), &load_options(2)).unwrap();
        let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
        let draft = Model::from_parts(parts(Kind::Dense), &load_options(1)).unwrap();
        let sources = [DraftSource::Lookup, DraftSource::Model(DraftModel::new(draft, &model).unwrap())];
        for seed in 0..4 {
            let prompt = [ids(seed, 6), ids(seed, 6)].concat();
            let expected = alone(&model, &prompt, &plain(0.0));
            for source in &sources {
                let options = GenerateOptions { draft: source.clone(), ..plain(0.0) };
                assert_eq!(alone(&model, &prompt, &options).ids, expected.ids, "{kind:?}, {source:?}");
                let request = Request::new(Prompt::from_ids(prompt.clone())).with_options(options);
                assert_eq!(engine.submit(request).unwrap().finish().unwrap().ids, expected.ids, "{kind:?}, {source:?}");
            }
            let request = Request::new(Prompt::from_ids(prompt.clone())).with_options(plain(0.0));
            let answer = engine.submit(request.with_draft(Lookup::with_capacity(CONTEXT))).unwrap().finish().unwrap();
            assert_eq!(answer.ids, expected.ids, "{kind:?}");
        }
    }
}
