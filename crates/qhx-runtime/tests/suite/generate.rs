//! The generate loop on tiny models.

use crate::common::{self, KINDS, Kind, VOCABULARY, device_choices, devices::Troubled, ids, model, parts};
use qhx_runtime::{
    Cancel, DeviceChoice, Error, FinishReason, GenerateOptions, Generation, LoadOptions, Model, Prompt, generate,
    sample::{Sampler, SamplerConfig, argmax},
    text::Tokenizer,
    timing::PrefillPath,
};
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};

fn greedy(max_new: usize) -> GenerateOptions {
    GenerateOptions { max_new, ignore_eos: true, keep_logits: true, ..GenerateOptions::default() }
}

fn answer(model: &Model, prompt: &[u32], options: &GenerateOptions) -> Generation {
    generate(&mut model.session().unwrap(), &Prompt::from_ids(prompt.to_vec()), options, &Cancel::new(), &mut |_| {}).unwrap()
}

/// A tokenizer of one word per id: `w0 w1 …`.
fn tokenizer() -> Tokenizer {
    let vocabulary: serde_json::Map<String, Value> = (0..VOCABULARY).map(|n| (format!("w{n}"), json!(n))).collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    });
    Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap()
}

fn talking_model(eos: Vec<u32>) -> Model {
    let parts = qhx_runtime::ModelParts { tokenizer: Some(tokenizer()), eos, ..parts(Kind::Dense) };
    Model::from_parts(parts, &common::options(DeviceChoice::Reference, 8, 40)).unwrap()
}

#[test]
fn greedy_is_what_a_fresh_pass_over_everything_chooses() {
    for device in device_choices() {
        for kind in KINDS {
            for (length, chunk) in [(1, 8), (9, 1), (9, 4), (19, 32)] {
                let model = model(kind, device, chunk, 40);
                let prompt = ids(length as u64, length);
                let generation = answer(&model, &prompt, &greedy(12));
                assert_eq!((generation.ids.len(), generation.finish_reason), (12, FinishReason::Length));
                assert_eq!(generation.step_logits.len(), 12 * VOCABULARY);
                for n in 0..12 {
                    let all = [&prompt[..], &generation.ids[..n]].concat();
                    let mut session = model.session().unwrap();
                    let logits = session.append(&all, &Cancel::new()).unwrap();
                    assert_eq!(argmax(logits).unwrap() as u32, generation.ids[n], "{kind:?} on {device}, token {n}");
                    let kept = &generation.step_logits[n * VOCABULARY..][..VOCABULARY];
                    let largest = logits.iter().zip(kept).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(largest <= kind.tolerance(device), "{kind:?} on {device}, token {n}: {largest}");
                }
            }
        }
    }
}

#[test]
fn the_prefill_path_and_the_stages_are_told() {
    let prompt = ids(1, 9);
    for (chunk, path, calls) in
        [(16, PrefillPath::Batched, 1), (9, PrefillPath::Batched, 1), (4, PrefillPath::Chunked, 3), (1, PrefillPath::DecodeOverPrompt, 9)]
    {
        let generation = answer(&model(Kind::Dense, DeviceChoice::Reference, chunk, 40), &prompt, &greedy(3));
        assert_eq!(generation.prefill_path, path);
        // The last token is chosen but never read.
        let stages: Vec<_> = generation.stages.iter().map(|s| (s.stage.as_str(), s.device.as_str(), s.runs)).collect();
        assert_eq!(stages[0], ("embed", "reference", calls + 2));
        assert_eq!(stages.len(), 6);
        let value = serde_json::to_value(&generation).unwrap();
        let fields: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(fields.join(" "), "prompt_ids ids text finish_reason timing prefill_path stages fallbacks");
        assert_eq!((&value["finish_reason"], &value["timing"]["prompt_tokens"]), (&json!("length"), &json!(9)));
        assert_eq!(value["timing"]["generated_tokens"], 3);
        assert!(value["timing"]["decode_tokens_per_second"].as_f64().unwrap() > 0.0);
        assert!(generation.timing.ttft_ms >= generation.timing.prefill_ms && generation.timing.prefill_ms > 0.0);
    }
}

/// The first token is there when the prompt is read; every further one takes a call.
#[test]
fn the_first_token_is_not_charged_for_the_second() {
    let device = Troubled::default();
    device.set(|trouble| trouble.delay = Duration::from_millis(200));
    let model = Model::on_device(parts(Kind::Dense), Arc::new(device), &common::options(DeviceChoice::Reference, 16, 40)).unwrap();
    let timing = answer(&model, &ids(1, 9), &greedy(2)).timing;
    assert!(timing.prefill_ms >= 200.0 && timing.ttft_ms - timing.prefill_ms < 150.0 && timing.decode_ms >= 200.0, "{timing:?}");
    assert!(timing.decode_tokens_per_second <= 5.0, "{timing:?}");
}

#[test]
fn an_end_id_ends_the_answer_unless_ignored() {
    // The end id is whatever the undisturbed answer has at some place.
    let undisturbed = answer(&talking_model(vec![]), &ids(2, 7), &greedy(12));
    let end = undisturbed.ids[5];
    let first = undisturbed.ids.iter().position(|&id| id == end).unwrap();
    let model = talking_model(vec![end]);
    let options = GenerateOptions { ignore_eos: false, ..greedy(12) };
    let generation = answer(&model, &ids(2, 7), &options);
    assert_eq!((&generation.ids[..], generation.finish_reason), (&undisturbed.ids[..=first], FinishReason::Stop));
    assert_eq!(generation.step_logits.len(), (first + 1) * VOCABULARY);
    assert!(!generation.text.split(' ').any(|word| word == format!("w{end}")), "{}", generation.text);
    assert_eq!(answer(&model, &ids(2, 7), &greedy(12)).ids, undisturbed.ids);
}

#[test]
fn pieces_put_together_are_the_text() {
    let model = talking_model(vec![]);
    let mut pieces = String::new();
    let mut streamed = Vec::new();
    let mut on_piece = |piece: qhx_runtime::Piece<'_>| {
        pieces += piece.text;
        streamed.extend(piece.id);
    };
    let prompt = Prompt::completion(&model, "w3 w4 w5").unwrap();
    assert_eq!(prompt.ids(), [3, 4, 5]);
    let generation = generate(&mut model.session().unwrap(), &prompt, &greedy(8), &Cancel::new(), &mut on_piece).unwrap();
    let words: Vec<_> = generation.ids.iter().map(|id| format!("w{id}")).collect();
    assert_eq!((generation.text.clone(), pieces, streamed), (words.join(" "), generation.text, generation.ids));
}

#[test]
fn stop_strings_end_the_answer_and_are_no_part_of_it() {
    let model = talking_model(vec![]);
    let whole = answer(&model, &ids(2, 7), &greedy(12));
    let words: Vec<_> = whole.text.split(' ').collect();
    let at = (1..12).find(|&n| !words[..n].iter().any(|w| w.starts_with(words[n]))).unwrap();
    let options = GenerateOptions { stop: vec![format!(" {}", words[at])], ..greedy(12) };
    let stopped = answer(&model, &ids(2, 7), &options);
    assert_eq!((stopped.text, stopped.finish_reason), (words[..at].join(" "), FinishReason::Stop));
    assert_eq!(stopped.ids, whole.ids[..=at]);
    // The beginning of a stop string that never comes is given back at the end.
    let options = GenerateOptions { stop: vec![format!("{} never", words[11])], ..greedy(12) };
    let unstopped = answer(&model, &ids(2, 7), &options);
    assert_eq!((unstopped.text, unstopped.finish_reason), (whole.text, FinishReason::Length));
    let empty = GenerateOptions { stop: vec![String::new()], ..greedy(1) };
    let prompt = Prompt::from_ids(vec![1]);
    assert!(
        generate(&mut model.session().unwrap(), &prompt, &empty, &Cancel::new(), &mut |_| {}).unwrap_err().to_string().contains("empty")
    );
}

#[test]
fn the_context_ends_an_answer_with_a_note() {
    for device in device_choices() {
        let model = model(Kind::Recurrent, device, 8, 16);
        // 10 rows of prompt leave room for 6 more; the token chosen after the last row needs no room.
        let generation = answer(&model, &ids(3, 10), &greedy(100));
        assert_eq!((generation.ids.len(), generation.finish_reason), (7, FinishReason::Length));
        assert!(generation.note.unwrap().contains("context of 16"));
        let full = answer(&model, &ids(3, 16), &greedy(100));
        assert_eq!((full.ids.len(), full.finish_reason), (1, FinishReason::Length));
        assert!(answer(&model, &ids(3, 10), &greedy(7)).note.is_none(), "exactly as many as were asked for");
        let prompt = Prompt::from_ids(ids(3, 17));
        let error = generate(&mut model.session().unwrap(), &prompt, &greedy(1), &Cancel::new(), &mut |_| {}).unwrap_err();
        assert!(matches!(error, Error::PromptTooLong { prompt: 17, context: 16, limit: 64 }), "{error}");
    }
}

#[test]
fn wrong_requests_are_refused() {
    let model = model(Kind::Dense, DeviceChoice::Reference, 8, 16);
    let refused = |prompt: Vec<u32>, options: GenerateOptions| {
        let mut session = model.session().unwrap();
        let error = generate(&mut session, &Prompt::from_ids(prompt), &options, &Cancel::new(), &mut |_| {}).unwrap_err();
        assert!(session.is_empty());
        error.to_string()
    };
    assert!(refused(vec![], greedy(1)).contains("empty"));
    assert!(refused(vec![2, 99], greedy(1)).contains("id 99"));
    let hot = SamplerConfig { temperature: -1.0, ..SamplerConfig::default() };
    assert!(refused(vec![1], GenerateOptions { sampler: hot, ..greedy(1) }).contains("temperature"));
    assert!(refused(vec![1], GenerateOptions { stop: vec!["x".into()], ..greedy(1) }).contains("tokenizer"));
    assert!(Prompt::completion(&model, "hello").unwrap_err().to_string().contains("tokenizer"));
    let nothing = answer(&model, &[1, 2], &greedy(0));
    assert_eq!((nothing.ids.len(), nothing.finish_reason), (0, FinishReason::Length));
}

#[test]
fn sampling_is_reproducible_and_follows_the_seed() {
    for device in device_choices() {
        let model = model(Kind::Recurrent, device, 8, 40);
        let sampled = |seed, chunk_of_history: usize| {
            let sampler = SamplerConfig { temperature: 1.5, top_p: 0.95, repetition_penalty: 1.1, seed, ..SamplerConfig::default() };
            let options = GenerateOptions { sampler, ..greedy(20) };
            let mut session = model.session().unwrap();
            // What the session held before must not matter.
            if chunk_of_history > 0 {
                session.append(&ids(4, chunk_of_history), &Cancel::new()).unwrap();
            }
            generate(&mut session, &Prompt::from_ids(ids(4, 9)), &options, &Cancel::new(), &mut |_| {}).unwrap().ids
        };
        let first = sampled(7, 0);
        assert_eq!(first, sampled(7, 0));
        assert_eq!(first, sampled(7, 5));
        assert_ne!(first, sampled(8, 0));
        assert_ne!(first, answer(&model, &ids(4, 9), &greedy(20)).ids);
    }
}

#[test]
fn a_repetition_penalty_sees_the_prompt_and_the_answer() {
    let model = model(Kind::Dense, DeviceChoice::Reference, 8, 40);
    let sampler = SamplerConfig { repetition_penalty: 1e6, ..SamplerConfig::default() };
    let prompt = ids(6, 9);
    let penalised = answer(&model, &prompt, &GenerateOptions { sampler: sampler.clone(), ..greedy(10) });
    assert_ne!(penalised.ids, answer(&model, &prompt, &greedy(10)).ids);
    for (n, logits) in penalised.step_logits.chunks_exact(VOCABULARY).enumerate() {
        let history = [&prompt[..], &penalised.ids[..n]].concat();
        assert_eq!(Sampler::new(sampler.clone()).unwrap().sample(logits, &history, history.len()).unwrap(), penalised.ids[n]);
    }
}

#[test]
fn a_cancelled_answer_keeps_what_was_chosen() {
    for kind in KINDS {
        let device = Troubled::default();
        let options = LoadOptions { chunk: 4, context: Some(40), ..LoadOptions::default() };
        let model = Model::on_device(parts(kind), Arc::new(device.clone()), &options).unwrap();
        let whole = answer(&model, &ids(5, 8), &greedy(10));
        // Calls: two of the prompt, then one per token. An epoch's crossing adds some.
        for call in [1, 2, 3, 7] {
            let cancel = Cancel::new();
            device.set(|t| (t.cancel_in_call, t.cancel) = (call, cancel.clone()));
            let mut session = model.session().unwrap();
            let prompt = Prompt::from_ids(ids(5, 8));
            let stopped = generate(&mut session, &prompt, &greedy(10), &cancel, &mut |_| {}).unwrap();
            device.set(|t| t.cancel_in_call = 0);
            assert_eq!(stopped.finish_reason, FinishReason::Cancelled);
            assert!(whole.ids.starts_with(&stopped.ids), "{kind:?}");
            assert_eq!(stopped.ids.is_empty(), call <= 2, "stopped in the prompt: nothing was chosen");
            assert_eq!(session.is_empty(), call <= 2);
            // The same request on the same session goes on as if nothing had happened.
            cancel.clear();
            let again = generate(&mut session, &prompt, &greedy(10), &cancel, &mut |_| {}).unwrap();
            assert_eq!((again.ids, again.step_logits), (whole.ids.clone(), whole.step_logits.clone()), "{kind:?}, call {call}");
        }
    }
}
