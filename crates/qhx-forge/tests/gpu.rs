//! Every family on the GPU that Vulkan offers, against Hugging Face transformers in f32: in CI, Mesa's software Vulkan. Run by `cargo xtask gpu`.

mod common;

use common::{Fixture, Overlay, media::MediaCases, relative_difference};
use qhx_ir::Device;
use qhx_runtime::{
    Cancel, DeviceChoice, GenerateOptions, Generation, LoadOptions, Model, Prompt, Session, generate,
    registry::{self, GpuSettings},
};

const FAMILIES: [&str; 7] = ["llama", "qwen3", "qwen3_vl", "phimoe", "phimoe_longrope", "qwen3_5", "gemma4"];
/// Prompts are read in pieces.
const CHUNK: usize = 16;

fn options(device: DeviceChoice) -> LoadOptions {
    LoadOptions { device, threads: Some(2), context: Some(512), chunk: CHUNK, ..LoadOptions::default() }
}

fn answer(session: &mut Session, prompt: &[u32], count: usize) -> Generation {
    let options = GenerateOptions { max_new: count, ignore_eos: true, ..Default::default() };
    generate(session, &Prompt::from_ids(prompt.to_vec()), &options, &Cancel::new(), &mut |_| {}).unwrap()
}

fn unsigned(ids: &[i32]) -> Vec<u32> {
    ids.iter().map(|&id| id as u32).collect()
}

/// The prompt of 63 tokens and what transformers answers.
fn case(fixture: &Fixture) -> (Vec<u32>, Vec<u32>) {
    let prompt = fixture.prompts.iter().find(|p| p.ids.len() == 63).unwrap();
    (unsigned(&prompt.ids), unsigned(&prompt.greedy))
}

/// Tokens as transformers gives them; sessions that move between GPU and CPU, both ways, go on the same way.
#[test]
#[ignore = "needs Vulkan: cargo xtask gpu"]
fn families_equal_the_oracle() {
    for family in FAMILIES {
        let fixture = Fixture::forge(&common::fixtures().join(family));
        let (ids, greedy) = case(&fixture);
        let [gpu, cpu] = [DeviceChoice::GPU, DeviceChoice::Cpu].map(|device| Model::load(fixture.bundle(), &options(device)).unwrap());
        let found = answer(&mut gpu.session().unwrap(), &ids, greedy.len());
        assert_eq!(found.ids, greedy, "{family}");
        assert!(found.stages.iter().all(|stage| stage.device == "gpu"), "{family}: {:?}", found.stages);
        for (from, to) in [(&gpu, &cpu), (&cpu, &gpu)] {
            let mut session = from.session().unwrap();
            session.append(&ids[..50], &Cancel::new()).unwrap();
            let file = tempfile::NamedTempFile::new().unwrap();
            session.save(file.path()).unwrap();
            let moved = answer(&mut to.restore(file.path()).unwrap(), &ids, greedy.len());
            assert_eq!((moved.ids, moved.kept_rows), (greedy.clone(), 50), "{family}: moved");
        }
        println!("{family}: equal");
    }
}

#[test]
#[ignore = "needs Vulkan: cargo xtask gpu"]
fn towers_equal_the_oracle() {
    let device = registry::candidates(DeviceChoice::GPU, None).unwrap().swap_remove(0);
    for family in ["qwen3_vl", "qwen3_5", "gemma4"] {
        let Some(cases) = MediaCases::forge(&common::fixtures().join(family)) else { continue };
        for (medium, (program, _)) in cases.media.iter().filter(|(medium, _)| medium.ends_with(".0")) {
            let program = cases.fixture.bundle().program(program).unwrap();
            let outcome = cases.encode(&*device as &dyn Device, (**program).clone(), &Overlay::default(), &[medium]);
            for (output, values) in &outcome.outputs {
                let expected = cases.oracle(&format!("{medium}.{output}")).unwrap();
                let difference = relative_difference(values, &expected);
                assert!(difference <= 1e-4, "{family}: {medium}.{output} differs by {difference}");
            }
            println!("{family}: {medium} equal");
        }
    }
}

/// A GPU that is lost in the middle of an answer: the answer goes on elsewhere, token for token the same.
#[test]
#[ignore = "needs Vulkan: cargo xtask gpu"]
fn an_answer_outlives_its_gpu() {
    for family in ["qwen3", "qwen3_5"] {
        let fixture = Fixture::forge(&common::fixtures().join(family));
        let (ids, greedy) = case(&fixture);
        // In the prompt, and among the answer's tokens.
        for fails_at in [3, 10] {
            let gpu = GpuSettings { fails_at: Some(fails_at), ..Default::default() };
            let model = Model::load(fixture.bundle(), &LoadOptions { gpu, ..options(DeviceChoice::GPU) }).unwrap();
            let found = answer(&mut model.session().unwrap(), &ids, greedy.len());
            assert_eq!(found.ids, greedy, "{family}, lost at submission {fails_at}");
            let note = found.note.unwrap_or_default();
            assert!(note.contains("gpu was lost") && note.contains("cpu"), "{family}: {note}");
        }
    }
}

/// A GPU with too little memory says so, with numbers.
#[test]
#[ignore = "needs Vulkan: cargo xtask gpu"]
fn too_little_memory_is_an_error() {
    let fixture = Fixture::forge(&common::fixtures().join("llama"));
    let gpu = GpuSettings { memory_limit: Some(100_000), ..Default::default() };
    let error = Model::load(fixture.bundle(), &LoadOptions { gpu, ..options(DeviceChoice::GPU) }).err().unwrap().to_string();
    assert!(error.contains("bytes of weights") && error.contains("100000"), "{error}");
}
