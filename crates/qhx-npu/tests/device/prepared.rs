//! Programs compiled ahead of time: what is loaded from the files computes, bit for bit, what is compiled in memory; and what does not fit is refused.

use super::support::{CONTEXT, ROWS, call, device, load};
use qhx_ir::{
    Device, Target, WeightTensor, Weights,
    conformance::models::{TinyModel, tiny},
};
use qhx_npu::{
    Library, NpuDevice, NpuOptions,
    lower::{Work, parts::work_of},
};
use std::{collections::HashMap, path::Path, sync::Arc};

/// Prepares a model into `folder`.
fn prepare(device: &NpuDevice, model: &TinyModel, folder: &Path) {
    let target = Target { name: "v81".into(), rows: vec![1, ROWS], context: CONTEXT, ..Default::default() };
    for artifact in device.prepare(&model.program, &model.weights, &target).unwrap() {
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
#[ignore = "needs QNN's library: cargo xtask test"]
fn files_compute_what_memory_computes() {
    // Two contexts at once: fewer than there are, so that contexts are released and loaded again.
    let device = device(NpuOptions { most_contexts: 2, ..Default::default() });
    for model in [tiny(0), tiny(3)].into_iter().flatten().filter(|m| m.name.starts_with("model.")) {
        let folder = tempfile::tempdir().unwrap();
        prepare(&device, &model, folder.path());
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
        }
    }
}

#[test]
#[ignore = "needs QNN's library: cargo xtask test"]
fn what_does_not_fit_is_refused() {
    let device = device(NpuOptions::default());
    let model = tiny(0).remove(0);
    let folder = tempfile::tempdir().unwrap();
    prepare(&device, &model, folder.path());
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
    let contexts: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().path()).filter(|f| f.extension().unwrap() == "bin").collect();
    let mut damaged = 0;
    for file in &contexts {
        let bytes = std::fs::read(file).unwrap();
        let mut flipped = bytes.clone();
        let middle = flipped.len() / 2;
        flipped[middle] ^= 1;
        std::fs::write(file, &flipped).unwrap();
        let seen = fails("a flipped byte");
        std::fs::write(file, &bytes).unwrap();
        // Three rows use one graph of each part: the other graphs' files are not read at all.
        if let Err(error) = seen {
            assert!(error.to_string().contains("it is damaged"), "{error}");
            damaged += 1;
        }
    }
    assert_eq!(damaged, 2, "of the body and of the head");
    std::fs::remove_file(&contexts[0]).unwrap();
    std::fs::remove_file(&contexts[1]).unwrap();
    let error = fails("a missing file").unwrap_err().to_string();
    assert!(error.contains("cannot be read"), "{error}");
    let other = NpuDevice::new(&Library::open(None).unwrap(), NpuOptions { arch: qhx_npu::Arch::V79, ..Default::default() }).unwrap();
    let error = load(&other, &model, &host, Some(folder.path())).err().unwrap().to_string();
    assert!(error.contains("is for v81, the processor is v79"), "{error}");
}

/// Contexts that go to a phone store the weights of all their graphs once; the emulator says that it cannot load them.
#[test]
#[ignore = "needs QNN's library: cargo xtask test"]
fn shared_weights_are_stored_once() {
    let separate = device(NpuOptions::default());
    let shared = NpuDevice::new(&Library::open(None).unwrap(), NpuOptions { prefill_rows: ROWS, ..Default::default() }).unwrap();
    let model = tiny(0).remove(0);
    let size = |device: &NpuDevice| {
        let folder = tempfile::tempdir().unwrap();
        prepare(device, &model, folder.path());
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
