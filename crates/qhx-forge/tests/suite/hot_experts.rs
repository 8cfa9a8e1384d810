//! A mixture of which the accelerator holds some experts: the same answers for any number of them, at every precision. The reference stands for the accelerator.

use crate::common::{self, Fixture, relative_difference};
use qhx_forge::Precision;
use qhx_ir::{Device, ExpertCache, OpKind, Program, reference::ReferenceDevice};
use qhx_runtime::{
    Cancel, DeviceChoice, GenerateOptions, Generation, LoadOptions, Model, ModelParts, Prompt, generate,
    placement::Rules,
    registry::{self, GpuSettings},
    split::HotExperts,
};
use std::{path::Path, sync::Arc};

/// No mixture here has more.
const EXPERTS: usize = 15;

/// The paths of the ops with experts, and how many each has.
fn experts(program: &Program) -> impl Iterator<Item = (&str, usize)> {
    program.ops.iter().filter_map(|op| match &op.op {
        OpKind::Experts { gate, .. } => Some((&*op.path, program.weights[gate].shape[0])),
        _ => None,
    })
}

fn load(fixture: &Fixture, hot: Option<HotExperts>, chunk: usize, cache: Option<&Path>) -> Model {
    let processor = registry::candidates(DeviceChoice::Cpu, Some(2)).unwrap().swap_remove(0);
    let stages = experts(fixture.program()).map(|(path, _)| (path.to_owned(), "cpu".to_owned())).collect();
    let rules = Rules { default: Some("reference".into()), stages, hot_experts: hot, ..Rules::default() };
    let devices: [Arc<dyn Device>; 2] = [Arc::new(ReferenceDevice), processor];
    let gpu = GpuSettings { cache: cache.map(Into::into), ..GpuSettings::default() };
    let options = LoadOptions { context: Some(512), chunk, placement: Some(rules), gpu, ..LoadOptions::default() };
    Model::on_devices(ModelParts::of(fixture.bundle()).unwrap(), &devices, &options).unwrap()
}

fn answer(model: &Model, ids: &[u32], count: usize) -> Generation {
    let options = GenerateOptions { max_new: count, ignore_eos: true, ..Default::default() };
    generate(&mut model.session().unwrap(), &Prompt::from_ids(ids.to_vec()), &options, &Cancel::new(), &mut |_| {}).unwrap()
}

fn case(fixture: &Fixture) -> (Vec<u32>, Vec<u32>) {
    let prompt = fixture.prompts.iter().find(|p| p.ids.len() == 63).unwrap();
    let unsigned = |ids: &[i32]| ids.iter().map(|&id| id as u32).collect();
    (unsigned(&prompt.ids), unsigned(&prompt.greedy))
}

fn counts(answer: &Generation) -> ExpertCache {
    answer.timing.expert_cache.map(|cache| cache.counts).unwrap_or_default()
}

/// For any number of experts and any rule of transfer, in chunks and in two halves, the tokens of transformers; every choice is counted once.
#[test]
fn any_number_of_experts_gives_the_same_tokens() {
    for family in ["phimoe", "phimoe_longrope"] {
        let fixture = Fixture::forge(&common::fixtures().join(family));
        let (ids, greedy) = case(&fixture);
        let total = experts(fixture.program()).map(|(_, count)| count).sum::<usize>();
        let mut hit_rates = Vec::new();
        for (count, transfer_from, chunk) in [
            (1, None, 16),
            (4, Some(1), 16),
            (8, None, 64),
            (9, Some(1), 64),
            (12, Some(2), 7),
            (EXPERTS - 1, Some(30), 64),
            (EXPERTS, None, 16),
        ] {
            let model = load(&fixture, Some(HotExperts { count, transfer_from }), chunk, None);
            let found = answer(&model, &ids, greedy.len());
            let what = format!("{family}: {count} experts, transfer from {transfer_from:?}, chunks of {chunk}");
            assert_eq!(found.ids, greedy, "{what}");
            let cache = counts(&found);
            let rows = ids.len() + greedy.len() - 1;
            // A text that grows beyond the length for which its constants hold is computed again.
            let choices = ((cache.hits + cache.fetched + cache.misses) as usize, 2 * experts(fixture.program()).count() * rows);
            assert!(choices.0 == choices.1 || (family == "phimoe_longrope" && choices.0 > choices.1), "{what}: {cache:?}");
            assert_eq!(cache.fetched > 0, transfer_from.is_some_and(|from| from < 10) && (8..total).contains(&count), "{what}: {cache:?}");
            assert_eq!(cache.misses == 0, count >= total, "{what}: {cache:?}");
            assert!(cache.transfers > 0 || cache.fetched == 0, "{what}: {cache:?}");
            hit_rates.push(cache.hit_rate());
        }
        assert!(hit_rates[0] < 0.3 && hit_rates.last() == Some(&1.0), "{hit_rates:?}");
        assert_eq!(counts(&answer(&load(&fixture, None, 16, None), &ids, 2)), ExpertCache::default());
    }
}

/// Below f32, up to what two devices differ by.
#[test]
fn every_precision_gives_the_same_logits() {
    let folder = common::fixtures().join("phimoe");
    let calibrated = Fixture::forge_calibrated(&folder, Precision::W8);
    let is_biased = |fixture: &Fixture| fixture.program().ops.iter().any(|op| matches!(op.op, OpKind::Experts { bias: Some(_), .. }));
    assert!(is_biased(&calibrated), "experts whose biases go where they go");
    let fixtures = [Precision::F16, Precision::W8, Precision::W4].map(|precision| Fixture::forge_at(&folder, precision));
    for fixture in fixtures.into_iter().chain([calibrated]) {
        let precision = &fixture.bundle().manifest().precision;
        let (ids, _) = case(&fixture);
        let logits = |hot| load(&fixture, hot, 16, None).session().unwrap().append(&ids, &Cancel::new()).unwrap().to_vec();
        let expected = logits(None);
        for transfer_from in [None, Some(2)] {
            let difference = relative_difference(&logits(Some(HotExperts { count: 9, transfer_from })), &expected);
            assert!(difference <= 1e-3, "{precision}, {transfer_from:?}: differs by {difference}");
        }
    }
}

/// The experts that are chosen come to stay, and are there from the start the next time. A damaged file is ignored.
#[test]
fn what_is_chosen_is_remembered() {
    let fixture = Fixture::forge(&common::fixtures().join("phimoe"));
    let folder = tempfile::tempdir().unwrap();
    // One token again and again chooses few experts.
    let ids = vec![7; 200];
    let run = || counts(&answer(&load(&fixture, Some(HotExperts { count: 7, transfer_from: None }), 16, Some(folder.path())), &ids, 2));
    let first = run();
    let file = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let file = file.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("experts-")).collect::<Vec<_>>();
    let [file] = &file[..] else { panic!("{file:?}") };
    let second = run();
    assert!(second.hit_rate() > first.hit_rate() && second.transfers < first.transfers, "{first:?}, {second:?}");
    std::fs::write(file, "{").unwrap();
    assert_eq!(run(), first);
}
