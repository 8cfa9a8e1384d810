//! The library as a program uses it: the built-in model, a GGUF file through a cache of its own, and what goes wrong.

#![cfg(feature = "builtin")]

use qhx::{Cancel, DeviceChoice, Error, FinishReason, LogitBias, Model, ModelOptions, OpenEvent, Places, ReplyRequest, text};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// The processor, or in a build without it the interpreter; no folder of the user's is touched.
fn options<'a>() -> ModelOptions<'a> {
    let device = if cfg!(feature = "cpu") { DeviceChoice::Cpu } else { DeviceChoice::Reference };
    Model::options().device(device).places(Places::none()).context(512)
}

fn builtin() -> Model {
    options().open("builtin").unwrap()
}

#[test]
fn all_ways_to_an_answer_agree() {
    let model = builtin();
    let chat = || model.chat().max_tokens(24);
    let question = "What is the capital of Portugal?";
    let whole = chat().ask(question).unwrap();
    let mut pieces = String::new();
    let told = chat().ask_with(question, |piece| pieces.push_str(piece)).unwrap();
    assert_eq!((&told.text, &told.ids, &pieces), (&whole.text, &whole.ids, &whole.text));

    let mut streaming = chat();
    let mut stream = streaming.stream(question).unwrap();
    let first = stream.next().unwrap().unwrap();
    let rest: String = stream.by_ref().map(Result::unwrap).collect();
    assert_eq!(first + &rest, whole.text);
    assert_eq!(stream.answer().unwrap().ids, whole.ids);
    assert_eq!(chat().stream(question).unwrap().answer().unwrap().ids, whole.ids);

    // The conversation goes on as if nothing had been streamed.
    let mut asked = chat();
    asked.ask(question).unwrap();
    let next = "What is the capital of Italy?";
    assert_eq!(streaming.ask(next).unwrap().ids, asked.ask(next).unwrap().ids);
    assert_eq!(streaming.messages(), asked.messages());
    let json = format!(r#"[{{"role": "user", "content": {question:?}}}]"#);
    assert_eq!(chat().openai(&json).unwrap().answer().unwrap().ids, whole.ids);
    assert_eq!(chat().user(question).answer().unwrap().ids, whole.ids);
}

#[test]
fn a_stream_that_is_dropped_leaves_a_conversation_that_goes_on() {
    let model = builtin();
    let mut chat = model.chat().max_tokens(200);
    let first = chat.stream("Tell me a story.").unwrap().next().unwrap().unwrap();
    let messages = chat.messages();
    assert_eq!(messages.len(), 2, "{messages:?}");
    assert!(messages[1].content().as_str().unwrap().starts_with(&first));
    assert!(chat.ask("What is the capital of Spain?").unwrap().text.contains("Madrid"));
    // One that nobody reads at all.
    drop(chat.stream("Tell me a story.").unwrap());
    assert!(chat.ask("What is the capital of Spain?").unwrap().text.contains("Madrid"));
}

#[test]
fn answers_can_be_stopped_from_elsewhere() {
    let model = builtin();
    let cancel = Cancel::new();
    let mut chat = model.chat().max_tokens(200).cancel(cancel.clone());
    let mut count = 0;
    let answer = chat.ask_with("Tell me a story.", |_| {
        count += 1;
        if count == 3 {
            cancel.cancel();
        }
    });
    let answer = answer.unwrap();
    assert_eq!(answer.finish_reason, FinishReason::Cancelled);
    // The model works ahead of its reader.
    assert!((3..150).contains(&answer.ids.len()), "{}", answer.ids.len());
    cancel.clear();
    assert_ne!(chat.ask("What is the capital of Spain?").unwrap().finish_reason, FinishReason::Cancelled);
}

#[test]
fn a_conversation_that_nobody_waits_for_is_not_rendered() {
    let request = || ReplyRequest::new(text::Chat::new(vec![text::Message::new("user", "Tell me a story.")]));
    let stopped = request();
    stopped.cancel.cancel();
    let model = builtin();
    assert!(model.count_tokens(request()).is_ok());
    assert!(model.count_tokens(stopped).err().is_some_and(|error| error.is_cancelled()));
}

#[test]
fn conversations_are_saved_and_restored() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("chat.qhx");
    let model = builtin();
    let mut chat = model.chat().system("Be brief.");
    chat.ask("What is the capital of Portugal?").unwrap();
    chat.save(&file).unwrap();
    // On a model that has computed nothing yet.
    let fresh = options().open("builtin").unwrap();
    let mut restored = fresh.restore_chat(&file).unwrap();
    assert_eq!(restored.messages(), chat.messages());
    let question = "What is the capital of Italy?";
    let (again, before) = (restored.ask(question).unwrap(), chat.ask(question).unwrap());
    assert_eq!(again.ids, before.ids);
    assert!(
        again.kept_rows >= before.kept_rows && before.kept_rows > 0,
        "what was computed is there: {} {}",
        again.kept_rows,
        before.kept_rows
    );
    // Saved again as it was restored, and as it never began.
    let again = fresh.restore_chat(&file).unwrap();
    again.save(&file).unwrap();
    assert_eq!(model.restore_chat(&file).unwrap().messages(), again.messages());
    model.chat().user("Hello").save(&file).unwrap();
    assert_eq!(model.restore_chat(&file).unwrap().messages().len(), 1);
    assert!(model.restore_chat(folder.path().join("none")).is_err());
}

#[test]
fn conversations_that_run_together_are_those_that_run_alone() {
    let questions = ["What is the capital of Portugal?", "Tell me a story.", "What is 3 plus 4?", "What is the capital of Italy?"];
    let turns = |model: &Model, seed: usize| {
        let mut chat = model.chat().max_tokens(40).temperature(0.7).seed(seed as u64);
        let answers: Vec<_> = questions.iter().cycle().skip(seed).take(3).map(|question| chat.ask(question).unwrap()).collect();
        assert!(answers[2].kept_rows > answers[1].kept_rows, "a turn starts from the one before");
        answers.into_iter().map(|answer| answer.ids).collect::<Vec<_>>()
    };
    let model = builtin();
    let alone: Vec<_> = (0..4).map(|seed| turns(&options().open("builtin").unwrap(), seed)).collect();
    let together: Vec<_> = std::thread::scope(|scope| {
        let begun: Vec<_> = (0..4)
            .map(|seed| {
                scope.spawn({
                    let model = &model;
                    move || turns(model, seed)
                })
            })
            .collect();
        begun.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
}

#[test]
fn settings_reach_the_answer() {
    let model = builtin();
    let complete = || model.completion("Once");
    assert_eq!(complete().max_tokens(5).answer().unwrap().ids.len(), 5);
    let sampled = |seed| complete().max_tokens(20).temperature(1.5).seed(seed).answer().unwrap().ids;
    assert_eq!(sampled(1), sampled(1));
    assert!((2..6).any(|seed| sampled(seed) != sampled(1)));
    let plain = model.complete("Once").unwrap();
    let word = plain.text.split_whitespace().nth(3).unwrap();
    let stopped = complete().stop(word).answer().unwrap();
    assert!(plain.text.starts_with(&stopped.text) && !stopped.text.contains(word), "{stopped:?}");
    assert!(matches!(complete().temperature(-1.0).answer(), Err(Error::Runtime(_))));
    let streamed: String = complete().max_tokens(20).stream().unwrap().map(Result::unwrap).collect();
    assert_eq!(streamed, complete().max_tokens(20).answer().unwrap().text);
}

#[test]
fn completions_that_run_together_are_those_that_run_alone() {
    let model = builtin();
    let prompts = ["Once", "The capital of Portugal is", "There was a", "The capital of Italy is", "What is 3 plus", "Greta"];
    let begin = |prompt: &str, n: usize| model.completion(prompt).max_tokens(4 + 7 * n).temperature(0.4).seed(n as u64).stream().unwrap();
    let alone: Vec<_> = prompts.iter().enumerate().map(|(n, prompt)| begin(prompt, n).answer().unwrap().ids).collect();
    let together: Vec<_> = prompts.iter().enumerate().map(|(n, prompt)| begin(prompt, n)).collect();
    let dropped = begin("Once there was a stubborn goat", 30);
    drop(dropped);
    let together: Vec<_> = together.into_iter().map(|stream| stream.answer().unwrap().ids).collect();
    assert_eq!(together, alone);
    // A stream needs nobody but itself.
    let stream = options().open("builtin").unwrap().completion("Once").max_tokens(3).stream().unwrap();
    assert_eq!(stream.answer().unwrap().ids.len(), 3);
}

#[test]
fn tokens_can_be_forbidden() {
    let model = builtin();
    let plain = model.complete("The capital of Portugal is").unwrap();
    let first = plain.ids[0];
    let without = model.completion("The capital of Portugal is").processor(LogitBias(vec![(first, f32::NEG_INFINITY)])).answer().unwrap();
    assert!(!without.ids.contains(&first) && !without.ids.is_empty(), "{without:?}");
}

#[test]
fn a_checkpoint_is_forged_once() {
    let cache = tempfile::tempdir().unwrap();
    let open = || {
        let mut events = Vec::new();
        let places = Places::none().with_cache(cache.path().to_path_buf());
        let watch = |event: OpenEvent<'_>| {
            events.push(match event {
                OpenEvent::Forging { .. } => "forging",
                OpenEvent::Writing(_) => "writing",
                OpenEvent::Gating(_) => "gating",
                OpenEvent::Passed(_) => "passed",
                _ => "other",
            })
        };
        let model = options().places(places).on_event(watch).open(fixture("llama-gguf/model.gguf")).unwrap();
        events.dedup();
        (model, events)
    };
    let (model, events) = open();
    assert_eq!((events.first(), events.last()), (Some(&"forging"), Some(&"passed")));
    assert!(events.contains(&"writing") && events.contains(&"gating"), "{events:?}");
    let ids = model.complete("hello").unwrap().ids;
    let (again, events) = open();
    assert!(events.is_empty(), "{events:?}");
    assert_eq!(again.complete("hello").unwrap().ids, ids);
    assert!(model.verify().unwrap().passed);
}

#[test]
fn errors_say_what_to_look_at() {
    let error = |reference: &str| options().open(reference).err().unwrap();
    let Error::NotFound(missing) = error("buitlin") else { panic!("another error") };
    assert_eq!(missing.near, ["builtin"]);
    assert!(matches!(error("./none.gguf"), Error::NotFound(_)));
    let gguf = fixture("llama-gguf/model.gguf");
    assert!(matches!(error(gguf.to_str().unwrap()), Error::NoCache));
    let stopped = Cancel::new();
    stopped.cancel();
    let cache = tempfile::tempdir().unwrap();
    let places = Places::none().with_cache(cache.path().to_path_buf());
    let cancelled = options().places(places).cancel(stopped).open(&gguf).err().unwrap();
    assert!(cancelled.is_cancelled(), "{cancelled}");

    let model = builtin();
    assert!(model.image(fixture("media/files/rgb.png")).err().unwrap().to_string().contains("takes no images"));
    let mut chat = model.chat();
    assert!(chat.answer().is_err(), "there is nothing to answer");
    assert!(matches!(model.chat().openai("{}").err(), Some(Error::Messages(_))));
    assert!(chat.ask(&"word ".repeat(2000)).is_err());
    assert!(chat.messages().is_empty(), "as it was before the question");
}

#[test]
fn a_model_serves_many_threads() {
    let model = builtin();
    let question = "What is the capital of Portugal?";
    let expected = model.chat().ask(question).unwrap().text;
    std::thread::scope(|scope| {
        let ask = || model.chat().ask(question).unwrap().text;
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), expected));
    });
}
