//! Loading: devices, placement, memory, options; and what bench and trace make of a loaded model.

use crate::common::{self, Kind, VOCABULARY, device_choices, ids, model, options, parts};
use qhx_ir::{Checked, Device, DeviceError, Machine, Op, reference::ReferenceDevice};
use qhx_runtime::{
    Cancel, DeviceChoice, Error, LoadOptions, Model, ModelParts,
    bench::{BenchOptions, TestProfile, bench},
    memory::{self, MemoryEstimate},
    placement,
    registry::{self, CpuSettings, NpuSettings},
    trace::{diff, trace},
};
use std::sync::Arc;

#[test]
fn devices_are_chosen_by_name() {
    for name in ["auto", "cpu", "gpu", "gpu:1", "npu", "split", "reference"] {
        assert_eq!(name.parse::<DeviceChoice>().unwrap().to_string(), name);
    }
    let error = "tpu".parse::<DeviceChoice>().unwrap_err().to_string();
    assert!(error.contains("`tpu`") && error.contains("auto, cpu, gpu"), "{error}");
    assert!("gpu:99".parse::<DeviceChoice>().is_err());
    for choice in [DeviceChoice::Npu, DeviceChoice::Split] {
        let error = Model::from_parts(parts(Kind::Dense), &options(choice, 8, 16)).err().unwrap().to_string();
        assert!(error.contains(choice.name()) && error.contains("this build of qhx"), "{error}");
    }
    assert!(
        registry::devices(CpuSettings::default(), &NpuSettings::default()).iter().all(|device| device.name != "reference"),
        "the interpreter is never chosen by itself"
    );
    let error = registry::candidates(DeviceChoice::Auto, Some(0)).err().unwrap().to_string();
    assert!(error.contains("threads"), "{error}");
}

#[test]
fn options_outside_their_limits_are_named() {
    let load = |options: LoadOptions| Model::from_parts(parts(Kind::Dense), &options).err().unwrap().to_string();
    let base = || options(DeviceChoice::Reference, 8, 16);
    assert_eq!(load(LoadOptions { context: Some(65), ..base() }), "context is 65, expected 1 to 64");
    assert!(load(LoadOptions { context: Some(0), ..base() }).starts_with("context is 0"));
    assert!(load(LoadOptions { chunk: 0, ..base() }).starts_with("chunk is 0"));
    assert!(load(LoadOptions { wanted: 0, ..base() }).starts_with("wanted is 0"));
    let default = Model::from_parts(parts(Kind::Dense), &LoadOptions { context: None, ..base() }).unwrap();
    assert_eq!((default.context(), default.chunk()), (64, 8), "the model's own limit is below the default");
    let short = Model::from_parts(parts(Kind::Dense), &LoadOptions { chunk: 100, ..base() }).unwrap();
    assert_eq!(short.chunk(), 16, "no call has more rows than a session");
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers() {
    let huge = ModelParts { context_limit: 1 << 50, ..parts(Kind::Dense) };
    let asked = LoadOptions { context: Some(1 << 50), ..options(DeviceChoice::Reference, 8, 16) };
    if memory::available_bytes().is_none() {
        return;
    }
    let error = Model::from_parts(huge, &asked).err().unwrap();
    let Error::DoesNotFit(estimate) = &error else { panic!("{error}") };
    // Two layers of keys and values of 2 heads of 4 numbers in f32.
    assert_eq!(estimate.state_bytes, (1 << 50) * 2 * 2 * 8 * 4);
    assert!(error.to_string().contains("128.0 PiB") && error.to_string().contains("a smaller context"), "{error}");
}

#[test]
fn the_estimate_is_what_is_there() {
    for kind in common::KINDS {
        let program = parts(kind).program;
        let estimate = MemoryEstimate::of(&program, 40, 8, 1);
        let stored: u64 = program.weights.keys().map(|name| parts(kind).weights.tensor(name).unwrap().stored_bytes() as u64).sum();
        assert_eq!(estimate.weight_bytes, stored);
        assert_eq!(estimate.total_bytes, estimate.weight_bytes + estimate.state_bytes + estimate.scratch_bytes);
        // At least the widest pair of values, at most all of them.
        assert!((8 * 4 * (8 + 12)..100_000).contains(&estimate.scratch_bytes), "{}", estimate.scratch_bytes);
        let per_token = memory::weight_bytes_per_token(&program);
        assert!(per_token < stored && per_token > stored / 2, "one row of the table instead of {VOCABULARY}");
    }
}

/// Refuses the feed-forward stages.
struct Picky;

impl Device for Picky {
    fn name(&self) -> &str {
        "picky"
    }

    fn accepts(&self, _: &Checked, op: &Op) -> Result<(), DeviceError> {
        match op.path.contains(".ffn.") {
            true => Err(DeviceError::Refused { device: "picky".into(), path: op.path.clone(), reason: "too plain".into() }),
            false => Ok(()),
        }
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Err(DeviceError::Resources("was never meant to be opened".into()))
    }
}

#[test]
fn a_refused_stage_goes_elsewhere_or_is_an_error() {
    let program = parts(Kind::Dense).program;
    let both: [Arc<dyn Device>; 2] = [Arc::new(Picky), Arc::new(ReferenceDevice)];
    let (device, placed) = placement::place(&program, DeviceChoice::Auto, None, &both).unwrap();
    assert_eq!(device.name(), "split");
    let stages: Vec<_> = placed.stages.iter().map(|s| (s.stage.as_str(), s.device.as_str())).collect();
    let (picky, other) = ("picky", "reference");
    let layers = [("layers.0.attn", picky), ("layers.0.ffn", other), ("layers.1.attn", picky), ("layers.1.ffn", other)];
    assert_eq!(stages, [&[("embed", picky)][..], &layers, &[("lm_head", picky)]].concat());
    assert!(placed.stages.iter().all(|s| s.phase.is_none() && !s.reason.is_empty()));
    let fallbacks: Vec<_> = placed.fallbacks.iter().map(|f| (f.stage.as_str(), f.from.as_str(), f.to.as_str())).collect();
    assert_eq!(fallbacks, [("layers.0.ffn", "picky", "reference"), ("layers.1.ffn", "picky", "reference")]);
    assert!(placed.fallbacks[0].reason.contains("too plain"));
    let error = placement::place(&program, DeviceChoice::GPU, None, &both[..1]).err().unwrap().to_string();
    assert!(error.contains("layers.0.ffn") && error.contains("too plain") && error.contains("`gpu`"), "{error}");
}

#[test]
fn programs_that_are_not_text_are_refused() {
    let change = |change: fn(&mut qhx_ir::Program)| {
        let mut program = qhx_ir::Program::clone(&parts(Kind::Dense).program);
        change(&mut program);
        let parts = ModelParts { program: Checked::new(program).unwrap(), ..parts(Kind::Dense) };
        Model::from_parts(parts, &options(DeviceChoice::Reference, 8, 16)).err().unwrap().to_string()
    };
    assert!(change(|p| p.outputs[0].name = "scores".into()).contains("no output `logits`"));
    let error = change(|p| p.inputs[1].generator = qhx_ir::Generator::PatchGrid);
    assert!(error.contains("`positions`") && error.contains("patch_grid"), "{error}");
}

#[test]
fn bench_measures_what_it_says() {
    for device in device_choices() {
        let model = model(Kind::Dense, device, 8, 40);
        let options = BenchOptions {
            prompt: vec![16, 0],
            generate: vec![4],
            repeats: 3,
            sessions: vec![1],
            depth: vec![0, 5],
            profile: true,
            ..BenchOptions::default()
        };
        let mut shown = Vec::new();
        let report = bench(&model, "f32", &options, &Cancel::new(), &mut |result| shown.push(result.test.clone())).unwrap();
        assert_eq!(shown, ["pp16", "tg4", "pp16@d5", "tg4@d5"]);
        assert!(report.results.iter().all(|r| r.runs.len() == 3 && r.mean > 0.0 && r.sd >= 0.0));
        assert_eq!((report.device.as_str(), report.precision.as_str()), (device.name(), "f32"));
        if cfg!(feature = "cpu") {
            assert!(report.read_bandwidth_bytes_per_s > 1e8 && report.bandwidth_share > 0.0);
        }
        let profiled: Vec<&str> = report.profiles.iter().map(|profile| profile.test.as_str()).collect();
        assert_eq!(profiled, if device.name() == "cpu" { &shown[..] } else { &[] });
        for TestProfile { test, seconds, calls } in &report.profiles {
            let in_steps: f64 = calls.steps.iter().map(|step| step.seconds).sum();
            assert!(0.0 < in_steps && in_steps <= calls.seconds && calls.seconds <= *seconds, "{test}: {in_steps} {calls:?} {seconds}");
            assert!(!test.starts_with("tg") || calls.calls == 4, "{test}: {calls:?}");
            let read: u64 = calls.steps.iter().map(|step| step.weight_bytes).sum();
            assert!(!test.starts_with("tg") || read == 4 * report.weight_bytes_per_token, "{test}: {calls:?}");
        }
        let beyond = BenchOptions { prompt: vec![36], ..options.clone() };
        assert!(bench(&model, "f32", &beyond, &Cancel::new(), &mut |_| {}).unwrap_err().to_string().contains("41"));
        let none = BenchOptions { repeats: 0, ..options };
        assert!(bench(&model, "f32", &none, &Cancel::new(), &mut |_| {}).is_err());
    }
}

#[test]
fn a_trace_does_not_depend_on_chunks() {
    for device in device_choices() {
        for kind in [Kind::Dense, Kind::Recurrent] {
            let traced = |chunk, wanted| {
                let options = LoadOptions { wanted, ..options(device, chunk, 40) };
                let model = Model::from_parts(parts(kind), &options).unwrap();
                trace(&mut model.session().unwrap(), &ids(1, 13), &Cancel::new()).unwrap()
            };
            let whole = traced(40, 40);
            let names: Vec<_> = whole.iter().map(|t| t.name.as_str()).collect();
            assert_eq!(names, ["embed", "layers.0.attn", "layers.0.ffn", "layers.1.attn", "layers.1.ffn", "lm_head", "logits"]);
            assert!(whole.iter().all(|t| t.shape[0] == 13));
            let tolerance = f64::from(kind.tolerance(device));
            for difference in diff(&whole, &traced(5, 5)) {
                assert!(difference.is_within(tolerance), "{kind:?} on {device}: {difference:?}");
            }
            let last = traced(5, 1);
            let (all, one) = (&whole[6], &last[6]);
            assert_eq!((one.name.as_str(), &one.shape[..]), ("logits", &[1, VOCABULARY][..]));
            let rest = &all.values[12 * VOCABULARY..];
            assert!(one.values.iter().zip(rest).all(|(a, b)| (a - b).abs() <= tolerance as f32));
        }
    }
}
