//! Many answers at once: each is what it would be alone, whatever company it had, and what several begin with is computed and stored once.

use crate::common::{self, Fixture};
use qhx_ir::IdMask;
use qhx_runtime::{
    Cancel, DeviceChoice, Error, FinishReason, GenerateOptions, LoadOptions, LogitProcessor, Model, ModelParts, Prompt,
    engine::{Answer, Engine, EngineOptions, EngineStats, Request},
    generate,
    sample::{SamplerConfig, random::uniform},
};
use std::time::{Duration, Instant};

const FAMILIES: [&str; 7] = ["llama", "qwen3", "qwen3_vl", "phimoe", "phimoe_longrope", "qwen3_5", "gemma4"];

fn model(family: &str, context: usize, sessions: usize) -> Model {
    let fixture = Fixture::forge(&common::fixtures().join(family));
    let parts = ModelParts { context_limit: context, ..ModelParts::of(fixture.bundle()).unwrap() };
    let options =
        LoadOptions { device: DeviceChoice::Cpu, threads: Some(2), context: Some(context), chunk: 64, sessions, ..Default::default() };
    Model::from_parts(parts, &options).unwrap()
}

fn engine(model: &Model) -> Engine {
    Engine::start(model.clone(), EngineOptions::default()).unwrap()
}

/// What the engine has done when it is done with everything.
fn settled(engine: &Engine) -> EngineStats {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let stats = engine.stats();
        if stats.active + stats.waiting == 0 {
            return stats;
        }
        assert!(Instant::now() < deadline, "{stats:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Ids from all over the vocabulary.
fn ids(model: &Model, seed: u64, count: usize) -> Vec<u32> {
    let vocabulary = model.vocabulary().ids as f64;
    (0..count as u64).map(|n| (uniform(seed, n) * vocabulary) as u32).collect()
}

/// Requests of all kinds: long and short, greedy and sampled, with and without all logits, some of which begin alike.
fn requests(model: &Model, count: usize) -> Vec<(Vec<u32>, GenerateOptions)> {
    let shared = ids(model, 1000, 90);
    let request = |number: usize| {
        let length = [1, 5, 63, 64, 65, 130, 200, 17][number % 8];
        let own = ids(model, number as u64, length);
        let prompt = if number % 3 == 0 { [&shared[..40 + number], &own].concat() } else { own };
        let temperature = if number % 2 == 0 { 0.0 } else { 0.9 };
        let sampler = SamplerConfig { temperature, top_p: 0.95, seed: number as u64, ..SamplerConfig::default() };
        let options =
            GenerateOptions { max_new: 4 + 3 * (number % 5), ignore_eos: true, sampler, keep_logits: number % 4 < 2, ..Default::default() };
        (prompt, options)
    };
    (0..count).map(request).collect()
}

fn request((ids, options): &(Vec<u32>, GenerateOptions)) -> Request {
    Request::new(Prompt::from_ids(ids.clone())).with_options(options.clone())
}

fn serial(model: &Model, (ids, options): &(Vec<u32>, GenerateOptions)) -> (Vec<u32>, Vec<u32>) {
    let mut session = model.session().unwrap();
    let answer = generate(&mut session, &Prompt::from_ids(ids.clone()), options, &Cancel::new(), &mut |_| {}).unwrap();
    (answer.ids, answer.step_logits.iter().map(|x| x.to_bits()).collect())
}

/// Sixteen at once, some of them cancelled on the way: the others have the tokens, and to the last bit the logits, that they have alone.
#[test]
fn an_answer_does_not_depend_on_company() {
    for family in FAMILIES {
        let model = model(family, 512, 16);
        let engine = engine(&model);
        let all = requests(&model, 16);
        let alone: Vec<_> = all.iter().map(|one| serial(&model, one)).collect();
        for round in 0..2 {
            let mut answers: Vec<Answer> = all.iter().map(|one| engine.submit(request(one)).unwrap()).collect();
            for (number, mut answer) in answers.drain(..).enumerate() {
                if number % 5 == 4 {
                    answer.next_piece();
                    answer.cancel();
                    let end = answer.finish().unwrap();
                    assert!(alone[number].0.starts_with(&end.ids), "{family}: {number} was cancelled");
                    continue;
                }
                let end = answer.finish().unwrap_or_else(|e| panic!("{family}, {number}: {e}"));
                assert_eq!(end.ids, alone[number].0, "{family}, round {round}, request {number}");
                let bits: Vec<u32> = end.step_logits.iter().map(|x| x.to_bits()).collect();
                assert!(bits == alone[number].1, "{family}, round {round}, request {number}: other logits");
            }
        }
        let stats = settled(&engine);
        assert!(stats.reused_rows > 0, "{family}: {stats:?}");
    }
}

/// Twenty requests with one long beginning: it is computed once, and its keys and values are stored once.
#[test]
fn a_shared_beginning_is_computed_and_stored_once() {
    const SHARED: usize = 1000;
    const OWN: usize = 20;
    let families = ["qwen3_5", "gemma4", "qwen3_vl", "phimoe"];
    for family in if crate::extended() { &families[..] } else { &families[..2] } {
        let model = model(family, 2048, 20);
        let beginning = ids(&model, 7, SHARED);
        let one = |number: u64| {
            let prompt = [&beginning[..], &[number as u32], &ids(&model, number, OWN - 1)].concat();
            (prompt, GenerateOptions { max_new: 2, ignore_eos: true, ..Default::default() })
        };
        let expected: Vec<_> = (0..20).map(|number| serial(&model, &one(number)).0).collect();
        let engine = engine(&model);
        let answers: Vec<Answer> = (0..20).map(|number| engine.submit(request(&one(number))).unwrap()).collect();
        for (answer, expected) in answers.into_iter().zip(&expected) {
            assert_eq!(answer.finish().unwrap().ids, *expected, "{family}");
        }
        let stats = settled(&engine);
        // Each has its own rows and its first token.
        assert_eq!(stats.rows, (SHARED + 20 * (OWN + 1)) as u64, "{family}: {stats:?}");
        assert_eq!(stats.reused_rows, 19 * SHARED as u64, "{family}: {stats:?}");
        // The beginning's pages once, and of each request the page that it wrote to; with recurrent slots once more, because the end of its prompt is kept apart from that of its answer.
        let own = if model.program().slots.values().any(|slot| slot.is_recurrent()) { 2 } else { 1 };
        let row: u64 = model.program().slots.values().filter(|slot| !slot.is_recurrent()).map(|slot| slot.bytes(1)).sum();
        let most = row * (SHARED.next_multiple_of(64) + (20 * own + 2) * 64) as u64;
        assert!(stats.kv_bytes <= most && stats.kv_bytes >= row * SHARED as u64, "{family}: {} of {most}", stats.kv_bytes);
    }
}

/// A second turn computes what is new, or with recurrent slots what follows the end of the first prompt.
#[test]
fn a_second_turn_computes_only_what_is_new() {
    for family in FAMILIES {
        let model = model(family, 512, 4);
        let engine = engine(&model);
        let options = GenerateOptions { max_new: 12, ignore_eos: true, ..Default::default() };
        let first = (ids(&model, 3, 150), options.clone());
        let said = engine.submit(request(&first)).unwrap().finish().unwrap().ids;
        let before = engine.stats();
        // The whole answer, then more; and a template that drops part of the answer.
        for (kept, longest) in [(12, 150 + 11), (4, if model.program().slots.values().any(|slot| slot.is_recurrent()) { 150 } else { 154 })]
        {
            let second = ([&first.0[..], &said[..kept], &[1], &ids(&model, 4 + kept as u64, 29)].concat(), options.clone());
            let expected = serial(&model, &second).0;
            let answer = engine.submit(request(&second)).unwrap().finish().unwrap();
            assert_eq!((answer.ids, answer.kept_rows), (expected, longest), "{family}, {kept} tokens of the answer kept");
        }
        assert!(engine.stats().rows > before.rows);
    }
}

#[test]
fn cancelling_reaches_a_request_wherever_it_is() {
    let model = model("qwen3_5", 4096, 1);
    let engine = engine(&model);
    let long = |seed| (ids(&model, seed, 3000), GenerateOptions { max_new: 500, ignore_eos: true, ..Default::default() });
    let (running, waiting) = (engine.submit(request(&long(1))).unwrap(), engine.submit(request(&long(2))).unwrap());
    waiting.cancel();
    let began = Instant::now();
    let end = waiting.finish().unwrap();
    assert_eq!((end.finish_reason, end.ids.len()), (FinishReason::Cancelled, 0));
    assert!(began.elapsed() < Duration::from_secs(10));
    running.cancel();
    assert_eq!(running.finish().unwrap().finish_reason, FinishReason::Cancelled);
    // A request whose answer nobody waits for is cancelled, too, and what it held is free.
    drop(engine.submit(request(&long(3))).unwrap());
    let last = (ids(&model, 9, 5), GenerateOptions { max_new: 3, ignore_eos: true, ..Default::default() });
    assert_eq!(engine.submit(request(&last)).unwrap().finish().unwrap().ids, serial(&model, &last).0);
    settled(&engine);
}

#[test]
fn bad_requests_are_refused_and_the_queue_has_an_end() {
    let model = model("llama", 64, 1);
    let options = || {
        let mut options = EngineOptions::default();
        options.queue = 2;
        options
    };
    let engine = Engine::start(model.clone(), options()).unwrap();
    let refused = |prompt: Vec<u32>| engine.submit(Request::new(Prompt::from_ids(prompt))).err().unwrap();
    assert!(matches!(refused(vec![]), Error::EmptyPrompt));
    assert!(matches!(refused(vec![u32::MAX]), Error::UnknownId { .. }));
    assert!(matches!(refused(vec![0; 65]), Error::PromptTooLong { .. }));
    let mut full = None;
    let answers: Vec<_> = (0..200)
        .map_while(|n| match engine.submit(request(&(ids(&model, n, 60), GenerateOptions { ignore_eos: true, ..Default::default() }))) {
            Ok(answer) => Some(answer),
            Err(error) => {
                full = Some(error);
                None
            }
        })
        .collect();
    assert!(matches!(full, Some(Error::QueueFull { .. })), "{full:?}");
    drop(engine);
    // Whoever still waits is told.
    let ends: Vec<_> = answers.into_iter().map(Answer::finish).collect();
    assert!(matches!(ends.last(), Some(Err(Error::EngineStopped))), "{ends:?}");
}

/// Allows even ids only.
struct Even {
    masks: bool,
    count: usize,
}

impl LogitProcessor for Even {
    fn process(&mut self, _: &[u32], logits: &mut [f32]) {
        logits.iter_mut().skip(1).step_by(2).for_each(|logit| *logit = f32::NEG_INFINITY);
    }

    fn mask(&mut self, _: &[u32]) -> Option<IdMask> {
        let mut mask = IdMask::none(self.count);
        (0..self.count as u32).step_by(2).for_each(|id| mask.allow(id));
        Some(mask).filter(|_| self.masks)
    }
}

/// A processor that forbids gives the same answer by its mask as by the logits that it changes.
#[test]
fn processors_stand_before_the_samplers() {
    let model = model("qwen3", 512, 4);
    let engine = engine(&model);
    let count = model.vocabulary().logits;
    for temperature in [0.0, 0.8] {
        let sampler = SamplerConfig { temperature, seed: 5, ..SamplerConfig::default() };
        let options = GenerateOptions { max_new: 20, ignore_eos: true, sampler, ..Default::default() };
        let answer = |masks| {
            let request = Request::new(Prompt::from_ids(ids(&model, 2, 30))).with_options(options.clone());
            engine.submit(request.with_processor(Even { masks, count })).unwrap().finish().unwrap().ids
        };
        let (by_mask, by_logits) = (answer(true), answer(false));
        assert!(by_mask.iter().all(|id| id % 2 == 0) && by_mask.len() == 20);
        assert_eq!(by_mask, by_logits);
    }
}

/// Memory for two long sessions and a half: prefixes are given up first, then the last request is refused with the numbers.
#[test]
fn memory_is_given_up_before_anybody_is_refused() {
    let fixture = Fixture::forge(&common::fixtures().join("qwen3"));
    let row: u64 = fixture.bundle().programs()["text"].slots.values().map(|slot| slot.bytes(1)).sum();
    let options = LoadOptions {
        device: DeviceChoice::Cpu,
        threads: Some(2),
        context: Some(512),
        sessions: 4,
        state_bytes: Some(row * 1024),
        ..Default::default()
    };
    let model = Model::load(fixture.bundle(), &options).unwrap();
    let engine = engine(&model);
    let one = |seed, rows| (ids(&model, seed, rows), GenerateOptions { max_new: 3, ignore_eos: true, ..Default::default() });
    // One after the other there is always room.
    for seed in 0..6 {
        let asked = one(seed, 400);
        assert_eq!(engine.submit(request(&asked)).unwrap().finish().unwrap().ids, serial_within(&asked));
    }
    // All at once there is not.
    let answers: Vec<_> = (10..14).map(|seed| engine.submit(request(&one(seed, 400))).unwrap()).collect();
    let ends: Vec<_> = answers.into_iter().map(Answer::finish).collect();
    let (fine, refused): (Vec<_>, Vec<_>) = ends.into_iter().partition(Result::is_ok);
    assert!(fine.len() >= 2 && !refused.is_empty(), "{} answered, {} refused", fine.len(), refused.len());
    for error in refused {
        let error = error.err().unwrap().to_string();
        assert!(error.contains("more than the"), "{error}");
    }

    fn serial_within(asked: &(Vec<u32>, GenerateOptions)) -> Vec<u32> {
        serial(&self::model("qwen3", 512, 1), asked).0
    }
}

/// Random arrivals, lengths and cancellations, by a seed: no answer is lost or mixed up, and in the end nothing is held but prefixes.
#[test]
fn a_crowd_that_comes_and_goes() {
    for (family, seed) in [("qwen3_5", 1), ("gemma4", 2), ("phimoe_longrope", 3)] {
        let model = model(family, 512, 8);
        let engine = engine(&model);
        let kinds = requests(&model, 24);
        let expected: Vec<_> = kinds.iter().map(|kind| serial(&model, kind)).collect();
        std::thread::scope(|scope| {
            for client in 0..6u64 {
                let (engine, kinds, expected) = (engine.clone(), &kinds, &expected);
                scope.spawn(move || {
                    for turn in 0..8u64 {
                        let draw = |n| uniform(seed * 1000 + client * 100 + turn, n);
                        let kind = (draw(0) * kinds.len() as f64) as usize;
                        let mut answer = engine.submit(request(&kinds[kind])).unwrap();
                        if draw(1) < 0.25 {
                            let pieces = (draw(2) * 4.0) as usize;
                            (0..pieces).for_each(|_| drop(answer.next_piece()));
                            // Told to stop, or left alone.
                            if draw(3) < 0.5 {
                                answer.cancel();
                                let end = answer.finish().unwrap();
                                assert!(expected[kind].0.starts_with(&end.ids), "{family}: client {client}, turn {turn}");
                            }
                            continue;
                        }
                        let end = answer.finish().unwrap();
                        assert_eq!(end.ids, expected[kind].0, "{family}: client {client}, turn {turn}, kind {kind}");
                    }
                });
            }
        });
        settled(&engine);
    }
}
