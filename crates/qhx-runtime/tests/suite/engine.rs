//! The engine on tiny models with every kind of state, on a device that misbehaves on request.

use crate::common::{EOS, KINDS, Kind, VOCABULARY, devices::Troubled, ids, parts};
use qhx_ir::IdMask;
use qhx_runtime::{
    Cancel, Error, GenerateOptions, LoadOptions, LogitProcessor, Model, Prompt,
    engine::{Engine, EngineOptions, Request},
    generate,
};
use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
};

const CONTEXT: usize = 60;

fn troubled(kind: Kind) -> (Model, Troubled, Engine) {
    let device = Troubled::default();
    let options = LoadOptions { chunk: 8, context: Some(CONTEXT), sessions: 4, ..LoadOptions::default() };
    let model = Model::on_device(parts(kind), Arc::new(device.clone()), &options).unwrap();
    let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
    (model, device, engine)
}

fn options() -> GenerateOptions {
    GenerateOptions { max_new: 6, ignore_eos: true, ..GenerateOptions::default() }
}

fn request(ids: &[u32]) -> Request {
    Request::new(Prompt::from_ids(ids.to_vec())).with_options(options())
}

fn alone(model: &Model, ids: &[u32]) -> Vec<u32> {
    let mut session = model.session().unwrap();
    generate(&mut session, &Prompt::from_ids(ids.to_vec()), &options(), &Cancel::new(), &mut |_| {}).unwrap().ids
}

/// In whatever call the device is lost, the answers are what they would have been.
#[test]
fn a_lost_device_costs_time_and_no_answer() {
    for kind in KINDS {
        let (model, device, engine) = troubled(kind);
        let prompts = [ids(1, 19), ids(2, 5), ids(3, 26)];
        let expected = prompts.clone().map(|prompt| alone(&model, &prompt));
        for call in 1..12 {
            device.set(|trouble| trouble.lost_in_call = call);
            let answers: Vec<_> = prompts.iter().map(|prompt| engine.submit(request(prompt)).unwrap()).collect();
            let found: Vec<_> = answers.into_iter().map(|answer| answer.finish().unwrap().ids).collect();
            assert_eq!(found, expected, "{kind:?}, lost in call {call}");
            // The same for a session by itself, which tells what happened.
            device.set(|trouble| trouble.lost_in_call = call.min(8));
            let mut session = model.session().unwrap();
            let answer = generate(&mut session, &Prompt::from_ids(prompts[0].clone()), &options(), &Cancel::new(), &mut |_| {}).unwrap();
            assert_eq!(answer.ids, expected[0], "{kind:?}, lost in call {call}");
            assert!(answer.note.is_some_and(|note| note.contains("unplugged")), "{kind:?}, lost in call {call}");
        }
    }
}

/// A failed call ends the answers that were in it, and no others.
#[test]
fn a_failure_is_told_and_the_engine_goes_on() {
    let (model, device, engine) = troubled(Kind::Recurrent);
    device.set(|trouble| trouble.fail_in_call = 2);
    let error = engine.submit(request(&ids(1, 19))).unwrap().finish().unwrap_err();
    assert!(error.to_string().contains("went away"), "{error}");
    device.set(|trouble| trouble.fail_in_call = 0);
    assert_eq!(engine.submit(request(&ids(1, 19))).unwrap().finish().unwrap().ids, alone(&model, &ids(1, 19)));
}

/// Answers of several lengths cross the rows at which constants change, in one call with others that do not.
#[test]
fn epochs_change_in_company() {
    for kind in [Kind::Epochs, Kind::RecurrentEpochs] {
        let (model, _, engine) = troubled(kind);
        let prompts: Vec<Vec<u32>> = (1..25).map(|length| ids(length as u64, length)).collect();
        let answers: Vec<_> = prompts.iter().map(|prompt| engine.submit(request(prompt)).unwrap()).collect();
        for (prompt, answer) in prompts.iter().zip(answers) {
            assert_eq!(answer.finish().unwrap().ids, alone(&model, prompt), "{kind:?}, {} rows", prompt.len());
        }
    }
}

#[test]
fn scopes_share_nothing() {
    let (_, _, engine) = troubled(Kind::Dense);
    let ask = |scope: u64, alone: bool| {
        let mut request = request(&ids(1, 30));
        (request.scope, request.alone) = (scope, alone);
        engine.submit(request).unwrap().finish().unwrap().kept_rows
    };
    assert_eq!([ask(1, false), ask(1, false), ask(2, false), ask(1, true), ask(2, false)], [0, 29, 0, 0, 29]);
}

/// Stops the engine at the first choice for an answer: says that it is there, and goes on when it is told to.
struct Gate {
    reached: mpsc::Sender<()>,
    go_on: mpsc::Receiver<()>,
    passed: bool,
}

impl Gate {
    /// The gate, what tells that it is reached, and what opens it.
    fn new() -> (Self, mpsc::Receiver<()>, mpsc::Sender<()>) {
        let ((reached, is_reached), (open, go_on)) = (mpsc::channel(), mpsc::channel());
        (Self { reached, go_on, passed: false }, is_reached, open)
    }
}

impl LogitProcessor for Gate {
    fn process(&mut self, _: &[u32], _: &mut [f32]) {
        if !std::mem::replace(&mut self.passed, true) {
            // A test that has failed meanwhile is waiting for nothing.
            let _ = self.reached.send(());
            let _ = self.go_on.recv();
        }
    }
}

/// What a running answer has computed is read by requests of its scope only, as is what is kept of one that has ended.
#[test]
fn scopes_share_nothing_with_what_is_running() {
    for (running, asking, expected) in [
        ((1, false), (1, false), 29),
        ((1, false), (2, false), 0),
        ((0, false), (1, false), 0),
        ((1, true), (1, false), 0),
        ((1, false), (1, true), 0),
    ] {
        let (_, _, engine) = troubled(Kind::Dense);
        let ask = |(scope, alone): (u64, bool)| {
            let mut request = request(&ids(1, 30));
            (request.scope, request.alone) = (scope, alone);
            request
        };
        let (gate, is_reached, open) = Gate::new();
        let first = engine.submit(ask(running).with_processor(gate)).unwrap();
        is_reached.recv().unwrap();
        // The engine stands still with all rows of the prompt computed: the next is begun while this one runs.
        let second = engine.submit(ask(asking)).unwrap();
        open.send(()).unwrap();
        assert_eq!(second.finish().unwrap().kept_rows, expected, "{asking:?} while {running:?} runs (scope, alone)");
        first.finish().unwrap();
    }
}

/// A request waits for rows that another is computing only if it may have them: else the wait would tell what the other asks.
#[test]
fn nobody_waits_for_the_prompt_of_another_scope() {
    for (scope, active, reused) in [(1, 1, 49), (2, 2, 0)] {
        let (_, _, engine) = troubled(Kind::Dense);
        let ask = |scope: u64| {
            let mut request = request(&ids(1, 50));
            request.scope = scope;
            request
        };
        // While the engine stands still for another answer, both come: neither prompt is computed when the second could begin.
        let ((gate, is_reached, open), mut before) = (Gate::new(), request(&[1, 2]));
        before.options.max_new = 1;
        let before = engine.submit(before.with_processor(gate)).unwrap();
        is_reached.recv().unwrap();
        let (gate, is_computed, go_on) = Gate::new();
        let (first, second) = (engine.submit(ask(1).with_processor(gate)).unwrap(), engine.submit(ask(scope)).unwrap());
        open.send(()).unwrap();
        is_computed.recv().unwrap();
        assert_eq!(engine.stats().active, active, "scope {scope} beside scope 1");
        go_on.send(()).unwrap();
        assert_eq!([first, second].map(|answer| answer.finish().unwrap().kept_rows), [0, reused], "scope {scope} beside scope 1");
        before.finish().unwrap();
    }
}

/// Tells when an answer is begun.
struct Begun(mpsc::Sender<usize>, usize);

impl LogitProcessor for Begun {
    fn process(&mut self, _: &[u32], _: &mut [f32]) {
        // A test that has failed meanwhile does not listen.
        let _ = self.0.send(self.1);
    }
}

#[test]
fn who_comes_first_is_answered_first() {
    for sessions in [1, 2] {
        let options = LoadOptions { chunk: 8, context: Some(CONTEXT), sessions, ..LoadOptions::default() };
        let model = Model::on_device(parts(Kind::Dense), Arc::new(Troubled::default()), &options).unwrap();
        let engine = Engine::start(model, EngineOptions::default()).unwrap();
        // They all come while the engine stands still for another answer.
        let (gate, is_reached, open) = Gate::new();
        let before = engine.submit(request(&[1, 2]).with_processor(gate)).unwrap();
        is_reached.recv().unwrap();
        let (begun, heard) = mpsc::channel();
        let ask = |number: usize| {
            // Of one length, and with nothing in common.
            let prompt: Vec<u32> = (0..6).map(|place| (number as u32 + place) % EOS).collect();
            engine.submit(request(&prompt).with_processor(Begun(begun.clone(), number))).unwrap()
        };
        let answers: Vec<_> = (0..8).map(ask).collect();
        drop(begun);
        open.send(()).unwrap();
        answers.into_iter().chain([before]).for_each(|answer| drop(answer.finish().unwrap()));
        let mut order: Vec<usize> = Vec::new();
        for number in heard {
            if !order.contains(&number) {
                order.push(number);
            }
        }
        assert_eq!(order, [0, 1, 2, 3, 4, 5, 6, 7], "{sessions} at once");
    }
}

struct Broken;

impl LogitProcessor for Broken {
    fn process(&mut self, _: &[u32], _: &mut [f32]) {
        panic!("a bug of the caller's");
    }
}

#[test]
fn a_panic_in_a_processor_ends_its_answer_and_not_the_engine() {
    let (model, _, engine) = troubled(Kind::Dense);
    let error = engine.submit(request(&[1, 2]).with_processor(Broken)).unwrap().finish().unwrap_err();
    assert!(matches!(error, Error::EngineFailed), "{error}");
    assert_eq!(engine.submit(request(&[1, 2])).unwrap().finish().unwrap().ids, alone(&model, &[1, 2]));
}

/// Allows nothing after two tokens, and says so.
struct DeadEnd(usize);

impl LogitProcessor for DeadEnd {
    fn process(&mut self, _: &[u32], logits: &mut [f32]) {
        logits.fill(f32::NEG_INFINITY);
    }

    fn mask(&mut self, ids: &[u32]) -> Option<IdMask> {
        let mut mask = IdMask::none(VOCABULARY);
        if ids.len() < self.0 {
            mask.allow(3);
        }
        Some(mask)
    }

    fn problem(&self) -> Option<Error> {
        Some(Error::Grammar { problem: "there is no way on".into() })
    }
}

#[test]
fn a_dead_end_of_a_grammar_is_its_own_answers_error() {
    let (model, _, engine) = troubled(Kind::Dense);
    let other = engine.submit(request(&[5, 6])).unwrap();
    let error = engine.submit(request(&[1, 2]).with_processor(DeadEnd(4))).unwrap().finish().unwrap_err();
    assert!(matches!(error, Error::Grammar { .. }), "{error}");
    assert_eq!(other.finish().unwrap().ids, alone(&model, &[5, 6]));
}

/// Counts how often it was woken.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn an_answer_is_a_stream() {
    let (model, device, engine) = troubled(Kind::Windowed);
    device.set(|trouble| trouble.held = true);
    let mut answer = engine.submit(request(&ids(4, 9))).unwrap();
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    let mut context = Context::from_waker(&waker);
    let (mut found, mut pending) = (Vec::new(), 0);
    loop {
        match futures_core::Stream::poll_next(Pin::new(&mut answer), &mut context) {
            Poll::Ready(Some(piece)) => found.extend(piece.unwrap().id),
            Poll::Ready(None) => break,
            Poll::Pending => {
                pending += 1;
                device.set(|trouble| trouble.held = false);
                while woken.0.load(Ordering::SeqCst) < pending {
                    std::thread::yield_now();
                }
            }
        }
    }
    assert!(pending > 0, "it never had to wait");
    assert_eq!(found, alone(&model, &ids(4, 9)));
    assert_eq!(answer.finish().unwrap().ids, found);
    assert!(found.iter().all(|&id| (id as usize) < VOCABULARY));
}
