//! Programs compiled ahead of time: what is loaded from the files computes, bit for bit, what is compiled in memory; and what does not fit is refused.

use super::support::{CONTEXT, ROWS, call, device, library, load, prepare};
use qhx_ir::{
    DeviceError, Piece, WeightTensor, Weights,
    conformance::models::{TinyModel, tiny},
};
use qhx_npu::{
    Arch, NpuDevice, NpuOptions,
    budget::{Budget, Limits, Wanted, budget},
    lower::{Work, parts::work_of},
};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What is planned for a model.
fn planned(model: &TinyModel, rows: &[usize], options: &NpuOptions) -> Budget {
    budget(&[Wanted { name: &model.program.name, pieces: &[Piece { program: &model.program, rows }] }], CONTEXT, options).unwrap()
}

/// Prepares a model into `folder`.
fn prepare_into(device: &NpuDevice, model: &TinyModel, folder: &Path) {
    for artifact in prepare(device, model, &[1, ROWS], CONTEXT).unwrap() {
        std::fs::copy(&artifact.file, folder.join(&artifact.name)).unwrap();
        std::fs::remove_file(&artifact.file).unwrap();
    }
}

/// The weights that the host reads itself: all that a phone has beside the contexts.
fn host_weights(model: &TinyModel) -> Arc<dyn Weights> {
    let ops = model.program.ops.iter().filter(|op| work_of(&model.program, op) == Work::Host);
    let names = ops.flat_map(|op| op.op.weights());
    let kept: HashMap<String, WeightTensor> = names.map(|n| (n.to_string(), model.weights.tensor(n).unwrap())).collect();
    Arc::new(kept)
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn files_compute_what_memory_computes() {
    // By default one of each kind: with slots, and a tower.
    let models = tiny(0).into_iter().chain(tiny(3).into_iter().filter(|_| crate::extended()));
    for model in models.filter(|m| m.name.starts_with("model.")) {
        // Three contexts or more, and two at once, so that contexts are released and loaded again.
        let rows: &[usize] = &[1, ROWS];
        let whole = planned(&model, rows, &NpuOptions::default());
        let options = NpuOptions { part_bytes: whole.bytes / 3, context_bytes: 1, most_contexts: 2, ..Default::default() };
        let device = device(options);
        let folder = tempfile::tempdir().unwrap();
        prepare_into(&device, &model, folder.path());
        let contexts = binaries(folder.path());
        assert!(contexts.len() >= 3, "{}: {contexts:?}", model.name);
        let mut memory = load(&device, &model, &model.weights, None).unwrap();
        let mut files = load(&device, &model, &host_weights(&model), Some(folder.path())).unwrap();
        let (mut a, mut b) = (memory.new_state(CONTEXT).unwrap(), files.new_state(CONTEXT).unwrap());
        // Towers take all rows at once.
        let calls: &[usize] = if model.program.slots.is_empty() { &[8, 4] } else { &[11, 1, 3] };
        for &rows in calls {
            let (expected, found) = (call(&mut *memory, &mut *a, rows).unwrap(), call(&mut *files, &mut *b, rows).unwrap());
            // A tower that is compiled in memory has other rows than the one that was prepared: there only the numbers are alike.
            let near = expected.iter().zip(&found).all(|(e, f)| (e - f).abs() <= 0.01 * e.abs().max(1.0));
            assert!(near && (model.program.slots.is_empty() || expected == found), "{}: {rows} rows", model.name);
            assert_eq!(device.machine().unwrap().loaded_contexts(), 2, "{}", model.name);
        }
        // Another program of the same device: two contexts at once are for both together.
        let copy = tempfile::tempdir().unwrap();
        for file in std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()) {
            std::fs::copy(&file, copy.path().join(file.file_name().unwrap())).unwrap();
        }
        let mut other = load(&device, &model, &host_weights(&model), Some(copy.path())).unwrap();
        let (mut c, mut d) = (other.new_state(CONTEXT).unwrap(), files.new_state(CONTEXT).unwrap());
        let (first, second) = (call(&mut *other, &mut *c, 4).unwrap(), call(&mut *files, &mut *d, 4).unwrap());
        assert!(first == second && device.machine().unwrap().loaded_contexts() == 2, "{}", model.name);
        drop((files, other));
        assert_eq!(device.machine().unwrap().loaded_contexts(), 0, "{}", model.name);
    }
}

fn binaries(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().path());
    files.filter(|f| f.extension().unwrap() == "bin").collect()
}

/// What a plan says of one token is what a call of one row counts, and `prepare` writes it down with the contexts that were planned.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn plans_count_what_calls_move() {
    for model in [0, 3].into_iter().flat_map(tiny).filter(|m| !m.program.slots.is_empty()) {
        let options = NpuOptions { part_bytes: 30_000, ..Default::default() };
        let plan = planned(&model, &[1], &options);
        let device = device(options);
        let mut executable = load(&device, &model, &model.weights, None).unwrap();
        let mut state = executable.new_state(CONTEXT).unwrap();
        call(&mut *executable, &mut *state, 1).unwrap();
        let (token, read) = (plan.per_token.unwrap(), executable.weights_read().unwrap());
        assert_eq!((executable.traffic().unwrap(), read.bytes), (token.traffic, token.weight_bytes), "{}", model.name);
        assert!(token.traffic.executions >= 2 && token.traffic.bytes_in > 0 && token.traffic.bytes_out > 0, "{token:?}");
        let used = |rows: &Vec<usize>| rows.iter().sum::<usize>();
        assert!(read.expert_rows.iter().all(|rows| used(rows) == 2), "{:?}", read.expert_rows);
        // A second call counts anew.
        call(&mut *executable, &mut *state, 1).unwrap();
        assert_eq!(executable.traffic().unwrap(), token.traffic);
    }
}

/// Where all graphs might restart the phone, those that write are prepared alone, and prompts go through them.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn without_leave_only_the_graphs_that_write_are_prepared() {
    let model = tiny(0).remove(0);
    let limits = Some(Limits { risky_graphs: Some(3), ..Limits::of(Arch::V81) });
    let host = host_weights(&model);
    let names = |allow_risky| {
        let device = device(NpuOptions { limits, allow_risky, ..Default::default() });
        let folder = tempfile::tempdir().unwrap();
        prepare_into(&device, &model, folder.path());
        let mut executable = load(&device, &model, &host, Some(folder.path())).unwrap();
        let mut state = executable.new_state(CONTEXT).unwrap();
        let numbers = call(&mut *executable, &mut *state, 9).unwrap();
        let mut names: Vec<String> =
            binaries(folder.path()).iter().map(|file| file.file_stem().unwrap().to_string_lossy().into_owned()).collect();
        names.sort();
        let plan = std::fs::read_to_string(folder.path().join(format!("{}.npu.json", model.program.name))).unwrap();
        (names, numbers, plan)
    };
    let ((few, slow, plan), (all, fast, _)) = (names(false), names(true));
    let name = &model.program.name;
    assert_eq!((few, all), (vec![format!("{name}_decode_0")], vec![format!("{name}_decode_0"), format!("{name}_prefill{ROWS}_0")]));
    assert!(plan.contains("only graphs of row count 1") && plan.contains("\"executions\": "), "{plan}");
    assert!(slow.iter().zip(&fast).all(|(a, b)| (a - b).abs() <= 0.03 * b.abs().max(1.0)), "{slow:?} {fast:?}");
    let hopeless = Some(Limits { context_bytes: 64, ..Limits::of(Arch::V81) });
    let refused = prepare(&device(NpuOptions { limits: hopeless, ..Default::default() }), &model, &[1], CONTEXT);
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("does not fit") && error.contains("a context holds 64"), "{error}");
}

/// A processor may lack memory for the prefill graphs: prompts are then processed row by row, and that is reported.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn what_cannot_be_loaded_for_many_rows_goes_row_by_row() {
    for model in tiny(0).into_iter().filter(|model| !model.program.slots.is_empty()) {
        let device = device(NpuOptions::default());
        let folder = tempfile::tempdir().unwrap();
        prepare_into(&device, &model, folder.path());
        let run = || {
            let mut executable = load(&device, &model, &host_weights(&model), Some(folder.path())).unwrap();
            let mut state = executable.new_state(CONTEXT).unwrap();
            let numbers: Result<Vec<_>, _> = [9, 1, 5].iter().map(|&rows| call(&mut *executable, &mut *state, rows)).collect();
            numbers.map(|numbers| (numbers.concat(), executable.row_by_row().map(str::to_owned)))
        };
        let (fast, reason) = run().unwrap();
        assert_eq!(reason, None, "{}", model.name);
        let name = &model.program.name;
        let context = |rows: &str| folder.path().join(format!("{name}_{rows}_0.bin"));
        std::fs::write(context(&format!("prefill{ROWS}")), "no binary").unwrap();
        let (slow, reason) = run().unwrap();
        assert!(reason.as_ref().is_some_and(|reason| reason.contains("prefill")), "{name}: {reason:?}");
        assert!(slow.iter().zip(&fast).all(|(a, b)| (a - b).abs() <= 0.03 * b.abs().max(1.0)), "{name}: {slow:?} {fast:?}");
        // Without those for one row nothing is left.
        std::fs::write(context("decode"), "no binary").unwrap();
        assert!(run().is_err(), "{name}");
    }
}

/// A plan counts weights; what the library makes of them may be larger than a processor loads.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn contexts_that_came_out_too_large_are_refused() {
    let model = tiny(0).remove(0);
    let plan = planned(&model, &[1], &NpuOptions::default());
    let room = plan.bytes + plan.contexts[0].slot_bytes;
    let limits = Some(Limits { context_bytes: room, ..Limits::of(Arch::V81) });
    let refused = prepare(&device(NpuOptions { limits, ..Default::default() }), &model, &[1], CONTEXT);
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("bytes of weights, but") && error.contains(&format!("v81 loads at most {room}")), "{error}");
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn what_does_not_fit_is_refused() {
    let device = device(NpuOptions::default());
    let model = tiny(0).remove(0);
    let folder = tempfile::tempdir().unwrap();
    prepare_into(&device, &model, folder.path());
    let host = host_weights(&model);
    let executable = load(&device, &model, &host, Some(folder.path())).unwrap();
    let error = executable.new_state(CONTEXT + 1).err().unwrap().to_string();
    assert!(error.contains("has graphs for 32"), "{error}");
    let fails = |what: &str| {
        let mut executable = load(&device, &model, &host, Some(folder.path()))?;
        let mut state = executable.new_state(CONTEXT)?;
        call(&mut *executable, &mut *state, 3).map(|_| println!("{what}: runs"))
    };
    fails("nothing").unwrap();
    let contexts = binaries(folder.path());
    assert_eq!(contexts.len(), 2, "decode and prefill: {contexts:?}");
    let mut damaged = Vec::new();
    for file in &contexts {
        let bytes = std::fs::read(file).unwrap();
        let mut flipped = bytes.clone();
        let middle = flipped.len() / 2;
        flipped[middle] ^= 1;
        std::fs::write(file, &flipped).unwrap();
        let seen = fails("a flipped byte");
        std::fs::write(file, &bytes).unwrap();
        // Three rows go through the graphs that write: the others' file is not read at all.
        if let Err(error) = seen {
            assert!(error.to_string().contains("it is damaged"), "{error}");
            damaged.push(file.file_name().unwrap().to_string_lossy().into_owned());
        }
    }
    assert_eq!(damaged, [format!("{}_decode_0.bin", model.program.name)]);
    std::fs::remove_file(&contexts[0]).unwrap();
    std::fs::remove_file(&contexts[1]).unwrap();
    let error = fails("a missing file").unwrap_err().to_string();
    assert!(error.contains("cannot be read"), "{error}");
    let other = NpuDevice::new(&library(), NpuOptions { arch: Arch::V79, ..Default::default() }).unwrap();
    let error = load(&other, &model, &host, Some(folder.path())).err().unwrap().to_string();
    assert!(error.contains("is for v81, but the processor is v79"), "{error}");
}

/// A plan is a file like any other: what it says makes nothing large.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_plan_that_lies_is_not_followed() {
    let device = device(NpuOptions::default());
    let model = tiny(0).remove(0);
    let folder = tempfile::tempdir().unwrap();
    prepare_into(&device, &model, folder.path());
    let (host, file) = (host_weights(&model), folder.path().join(format!("{}.npu.json", model.program.name)));
    let right: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let run = |field: &str, value: serde_json::Value, rows: usize| {
        let mut plan = right.clone();
        plan[field] = value;
        std::fs::write(&file, plan.to_string()).unwrap();
        let mut executable = load(&device, &model, &host, Some(folder.path()))?;
        let mut state = executable.new_state(CONTEXT)?;
        call(&mut *executable, &mut *state, rows)?;
        Ok::<_, DeviceError>(executable.row_by_row().map(str::to_owned))
    };
    // Graphs of so many rows would take terabytes; nobody has prepared them.
    let reason = run("rows", vec![1, 1 << 24].into(), 11).unwrap().unwrap();
    assert!(reason.contains("_t16777216_") && reason.contains("was not prepared"), "{reason}");
    let error = run("rows", vec![1 << 24].into(), 11).unwrap_err().to_string();
    assert!(error.contains("was not prepared"), "{error}");
    let error = run("ring", u64::MAX.into(), 1).unwrap_err().to_string();
    assert!(error.contains("impossible"), "{error}");
}

/// Contexts that go to a phone store the weights of all their graphs once; the emulator says that it cannot load them.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn shared_weights_are_stored_once() {
    let separate = device(NpuOptions::default());
    let shared = NpuDevice::new(&library(), NpuOptions { prefill_rows: ROWS, ..Default::default() }).unwrap();
    let model = tiny(0).remove(0);
    let size = |device: &NpuDevice| {
        let folder = tempfile::tempdir().unwrap();
        prepare_into(device, &model, folder.path());
        let mut loaded = load(device, &model, &host_weights(&model), Some(folder.path())).unwrap();
        let mut state = loaded.new_state(CONTEXT).unwrap();
        let ran = call(&mut *loaded, &mut *state, 3).map(drop).map_err(|e| e.to_string());
        let files = std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().metadata().unwrap().len());
        (files.sum::<u64>(), ran)
    };
    let ((together, ran), (apart, ran_apart)) = (size(&shared), size(&separate));
    ran_apart.unwrap();
    assert!(together < apart, "{together} bytes shared, {apart} apart");
    let error = ran.unwrap_err();
    assert!(error.contains("share"), "{error}");
}
