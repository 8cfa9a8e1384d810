//! Answers of a model with a drafting program: they are those without.

use super::Fixture;
use qhx_runtime::{
    Cancel, DeviceChoice, GenerateOptions, Generation, LoadOptions, Model, ModelParts, Prompt,
    draft::DraftSource,
    engine::{Engine, EngineOptions, Request},
    generate,
    sample::random::uniform,
};

const NEW: usize = 60;

/// On the CPU.
pub(crate) fn check_answers(fixture: &Fixture, lengths: &[u64], first: u32) -> usize {
    check_answers_on(fixture, &LoadOptions { device: DeviceChoice::Cpu, ..Default::default() }, lengths, first)
}

/// Lets a model, loaded like this, answer prompts of these lengths, with ids from `first` on, alone and four at a time. Gives the number of drafts.
pub(crate) fn check_answers_on(fixture: &Fixture, load: &LoadOptions, lengths: &[u64], first: u32) -> usize {
    let prompt = |&length: &u64| (0..length).map(|n| first + (uniform(length, n) * 300.0) as u32).collect();
    let prompts: Vec<Vec<u32>> = lengths.iter().map(prompt).collect();
    let context = prompts.iter().map(Vec::len).max().map(|longest| longest + NEW + 1);
    let load = LoadOptions { threads: Some(2), context, chunk: 64, sessions: 4, ..load.clone() };
    let model = Model::from_parts(ModelParts::of(fixture.bundle()).unwrap(), &load).unwrap();
    let engine = Engine::start(model.clone(), EngineOptions::default()).unwrap();
    let expected: Vec<_> = prompts.iter().map(|prompt| answer(&model, prompt, DraftSource::None).ids).collect();
    let mut drafted = 0;
    let mut check = |found: Generation, expected: &Vec<u32>| {
        assert_eq!((&found.ids, found.note), (expected, None), "{}", fixture.name);
        drafted += found.timing.drafted;
    };
    for (prompt, expected) in prompts.iter().zip(&expected) {
        check(answer(&model, prompt, DraftSource::Mtp), expected);
    }
    // The second time from what was kept of the first.
    for _ in 0..2 {
        let request = |prompt: &Vec<u32>| Request::new(Prompt::from_ids(prompt.clone())).with_options(options(DraftSource::Mtp));
        let answers: Vec<_> = prompts.iter().map(|prompt| engine.submit(request(prompt)).unwrap()).collect();
        answers.into_iter().zip(&expected).for_each(|(found, expected)| check(found.finish().unwrap(), expected));
    }
    drafted
}

pub(crate) fn options(draft: DraftSource) -> GenerateOptions {
    GenerateOptions { max_new: NEW, ignore_eos: true, draft, ..GenerateOptions::default() }
}

fn answer(model: &Model, prompt: &[u32], draft: DraftSource) -> Generation {
    let mut session = model.session().unwrap();
    generate(&mut session, &Prompt::from_ids(prompt.to_vec()), &options(draft), &Cancel::new(), &mut |_| {}).unwrap()
}
