//! Answers with drafts are answers without, token for token: greedy and sampled, shaped by grammars, ended by stop strings, cancelled, four at a time.

use super::{Fixture, fixtures};
use qhx_forge::Precision;
use qhx_runtime::{
    Cancel, Constraint, Error, FinishReason, GenerateOptions, Generation, LoadOptions, Model, ModelParts, Prompt,
    draft::{Draft, DraftSource, Lookup},
    engine::{Engine, EngineOptions, Request},
    generate,
    sample::{SamplerConfig, random::uniform},
};
use std::ops::AddAssign;

pub(crate) const FAMILIES: [&str; 7] = ["llama", "qwen3", "qwen3_vl", "phimoe", "phimoe_longrope", "qwen3_5", "gemma4"];
pub(crate) const PRECISIONS: [Precision; 4] = [Precision::F32, Precision::F16, Precision::W8, Precision::W4];
const CONTEXT: usize = 128;
/// Of each model.
const PROMPTS: usize = 8;

/// Where drafts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The answer itself, with mistakes.
    Answer,
    Lookup,
    /// Whatever pays.
    Auto,
}

impl Source {
    pub(crate) const ALL: [Self; 3] = [Self::Answer, Self::Lookup, Self::Auto];
}

/// What became of drafts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) drafted: usize,
    pub(crate) accepted: usize,
    /// Answers that a stop string ended.
    pub(crate) stopped: usize,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        let Self { drafted, accepted, stopped } = other;
        (self.drafted, self.accepted, self.stopped) = (self.drafted + drafted, self.accepted + accepted, self.stopped + stopped);
    }
}

/// Knows the text, and is wrong about a third of it.
struct Oracle(Vec<u32>);

impl Draft for Oracle {
    fn propose(&mut self, ids: &[u32], most: usize) -> Result<Vec<u32>, Error> {
        let known = self.0.get(ids.len()..).unwrap_or_default().iter().enumerate();
        Ok(known.take(most).map(|(at, &id)| if uniform(5, (100 * ids.len() + at) as u64) < 0.3 { id / 2 } else { id }).collect())
    }
}

/// What is asked: lengths around the chunk and across a change of constants, some with a repeated part for lookup.
fn prompt(number: usize) -> Vec<u32> {
    let length = [1, 5, 15, 16, 17, 33, 50, 60][number % 8];
    let once: Vec<u32> = (0..length as u64).map(|n| (uniform(number as u64, n) * 250.0) as u32).collect();
    if number % 2 == 1 { once.iter().chain(&once).copied().take(70).collect() } else { once }
}

fn options(number: usize) -> GenerateOptions {
    let mut options = GenerateOptions { max_new: 24, ignore_eos: true, draft: DraftSource::None, ..GenerateOptions::default() };
    match number % 8 {
        2 | 3 => options.sampler = SamplerConfig { temperature: 0.9, top_p: 0.95, seed: number as u64, ..SamplerConfig::default() },
        4 => options.sampler.repetition_penalty = 1.3,
        5 => options.structure.constraint = Some(Constraint::Regex("[a-z ]{2,30}".into())),
        6 => options.structure.constraint = Some(Constraint::JsonObject),
        _ => {}
    }
    options.ignore_eos = options.structure.is_free();
    options
}

fn alone(model: &Model, number: usize, options: &GenerateOptions) -> Generation {
    let mut session = model.session().unwrap();
    generate(&mut session, &Prompt::from_ids(prompt(number)), options, &Cancel::new(), &mut |_| {}).unwrap()
}

fn request(number: usize, options: &GenerateOptions) -> Request {
    Request::new(Prompt::from_ids(prompt(number))).with_options(options.clone())
}

/// Lets a model, loaded like this, answer eight prompts without drafts, alone, and with drafts from some sources, four at a time.
pub(crate) fn check(family: &str, precision: Precision, load: &LoadOptions, sources: &[Source]) -> Counts {
    let fixture = Fixture::forge_at(&fixtures().join(family), precision);
    let load = LoadOptions { threads: Some(2), context: Some(CONTEXT), chunk: 16, sessions: 4, ..load.clone() };
    let model = match &load.placement {
        // Which devices there are follows from the rules.
        Some(_) => Model::load(fixture.bundle(), &load),
        None => Model::from_parts(ModelParts::of(fixture.bundle()).unwrap(), &load),
    };
    let model = model.unwrap();
    let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
    let mut counts = Counts::default();
    let asked: Vec<(GenerateOptions, Generation)> = (0..PROMPTS)
        .map(|number| {
            let mut options = options(number);
            let mut expected = alone(&model, number, &options);
            // The middle of the answer ends the next one.
            if number == 7 {
                let text: Vec<char> = expected.text.chars().collect();
                options.stop = vec![text.iter().skip(text.len() / 2).take(2).collect()];
                expected = alone(&model, number, &options);
                counts.stopped += usize::from(expected.finish_reason == FinishReason::Stop);
            }
            assert_eq!(expected.timing.drafted, 0);
            (options, expected)
        })
        .collect();
    for &source in sources {
        let drafting = |number: usize| {
            let (options, expected) = &asked[number];
            match source {
                Source::Answer => request(number, options).with_draft(Oracle([&expected.prompt_ids[..], &expected.ids].concat())),
                Source::Lookup => request(number, options).with_draft(Lookup::with_capacity(CONTEXT)),
                Source::Auto => request(number, &GenerateOptions { draft: DraftSource::Auto, ..options.clone() }),
            }
        };
        let answers: Vec<_> = (0..PROMPTS).map(|number| engine.submit(drafting(number)).unwrap()).collect();
        for (number, mut found) in answers.into_iter().enumerate() {
            let expected = &asked[number].1;
            let name = format!("{family} at {precision}, prompt {number}, drafts from {source:?}");
            if number == 1 {
                found.next_piece();
                found.cancel();
                let found = found.finish().unwrap();
                assert!(expected.ids.starts_with(&found.ids), "{name}: {:?}", found.ids);
                continue;
            }
            let found = found.finish().unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!((&found.ids, &found.text, found.finish_reason), (&expected.ids, &expected.text, expected.finish_reason), "{name}");
            counts.drafted += found.timing.drafted;
            counts.accepted += found.timing.accepted;
        }
    }
    counts
}
