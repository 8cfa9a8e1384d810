//! Sessions longer than what the graphs keep, against the reference with a window as long as the ring's.

use super::support::{call, device, prepare};
use qhx_ir::{
    Checked, Device, LoadOptions, Mask, OpKind, Slot, State,
    conformance::models::{TinyModel, tiny},
    reference::ReferenceDevice,
};
use qhx_npu::{Kv, NpuDevice, NpuOptions};

/// The most rows that attention sees.
const WINDOW: usize = 10;
/// The most rows of a call.
const CALL: usize = 20;
const SESSION: usize = 128;
/// Beyond the buffers of 32 rows: many rows at once, exactly up to the window at first, then one by one.
const CALLS: [usize; 7] = [10, 20, 9, 1, 17, 1, 1];

fn ring(options: NpuOptions) -> NpuDevice {
    device(NpuOptions { kv: Kv::Ring, ..options })
}

/// The same model, its attention limited to the window.
fn windowed(model: &TinyModel) -> Checked {
    let mut program = (*model.program).clone();
    for op in &mut program.ops {
        if let OpKind::Attend { mask, slot: Some(_), .. } = &mut op.op {
            *mask = match *mask {
                Mask::Window(own) => Mask::Window(own.min(WINDOW)),
                _ => Mask::Window(WINDOW),
            };
        }
    }
    for slot in program.slots.values_mut() {
        if let Slot::Kv { window, .. } = slot {
            *window = Some(window.unwrap_or(WINDOW).min(WINDOW));
        }
    }
    Checked::new(program).unwrap()
}

fn near(a: &[f32], b: &[f32]) -> bool {
    let scale = b.iter().fold(1f32, |m, x| m.max(x.abs()));
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 0.03 * scale)
}

/// The decoders: with and without a window of their own, and with layers that share a slot.
fn models() -> impl Iterator<Item = TinyModel> {
    tiny(0).into_iter().filter(|model| model.program.slots.values().any(|slot| matches!(slot, Slot::Kv { .. })))
}

fn check(model: &TinyModel, device: &NpuDevice, artifacts: Option<&std::path::Path>) {
    let options = LoadOptions {
        max_rows: CALL,
        max_soft_rows: CALL,
        max_wanted: 1,
        max_segments: 1,
        max_state_bytes: None,
        replaceable: Vec::new(),
        pauses: Vec::new(),
        scratch_group: None,
        history: None,
        artifacts: artifacts.map(Into::into),
        progress: None,
        timeline: None,
    };
    let mut found = device.load(&model.program, &model.weights, &options).unwrap();
    let mut right = ReferenceDevice.load(&windowed(model), &model.weights, &options).unwrap();
    let (mut a, mut b) = (found.new_state(SESSION).unwrap(), right.new_state(SESSION).unwrap());
    let recurrent: Vec<_> = model.program.slots.iter().filter(|(_, slot)| slot.is_recurrent()).map(|(name, _)| name.clone()).collect();
    for (number, rows) in CALLS.into_iter().enumerate() {
        let [x, y] = [call(&mut *found, &mut *a, rows), call(&mut *right, &mut *b, rows)].map(Result::unwrap);
        assert!(near(&x, &y), "{}: call {number}: {x:?} {y:?}", model.name);
    }
    // A few rows back is possible, many are gone.
    let (back, len) = (a.len() - 3, a.len());
    if recurrent.is_empty() {
        [&mut a, &mut b].into_iter().for_each(|state| state.truncate(back).unwrap());
        let [x, y] = [call(&mut *found, &mut *a, 5), call(&mut *right, &mut *b, 5)].map(Result::unwrap);
        assert!(near(&x, &y), "{}: after going back: {x:?} {y:?}", model.name);
    }
    let error = a.truncate(WINDOW).unwrap_err().to_string();
    assert!(error.contains("cannot go back to row 10") && error.contains("is a ring"), "{error}");
    assert!(a.len() >= len && export(&*a, model).unwrap_err().contains("no longer has the rows before"));
    // From the beginning it starts again.
    a.truncate(0).unwrap();
    let mut fresh = right.new_state(SESSION).unwrap();
    for name in &recurrent {
        a.import(name, &fresh.export(name).unwrap()).unwrap();
    }
    let [x, y] = [call(&mut *found, &mut *a, 9), call(&mut *right, &mut *fresh, 9)].map(Result::unwrap);
    assert!(near(&x, &y), "{}: from the beginning: {x:?} {y:?}", model.name);
}

fn export(state: &dyn State, model: &TinyModel) -> Result<(), String> {
    model.program.slots.keys().try_for_each(|slot| state.export(slot).map(drop)).map_err(|e| e.to_string())
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_ring_goes_on_where_the_context_ends() {
    for model in models() {
        check(&model, &ring(NpuOptions { context: Some(WINDOW), ..Default::default() }), None);
    }
}

/// Layers that share a slot in graphs of their own: they read rows of the call that another graph wrote.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_ring_is_shared_between_graphs() {
    for model in models().filter(|model| model.program.slots.values().any(|slot| !slot.is_recurrent())).take(2) {
        check(&model, &ring(NpuOptions { context: Some(WINDOW), part_bytes: 4000, ..Default::default() }), None);
    }
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_prepared_ring_knows_its_window() {
    let model = models().next().unwrap();
    let device = ring(NpuOptions::default());
    let artifacts = prepare(&device, &model, &[1, CALL], WINDOW).unwrap();
    let folder = artifacts[0].file.parent().unwrap().to_owned();
    check(&model, &device, Some(&folder));
    let long = LoadOptions { max_rows: CALL + 1, artifacts: Some(folder.clone()), ..Default::default() };
    let error = device.load(&model.program, &model.weights, &long).err().unwrap().to_string();
    assert!(error.contains("ring buffers for calls of at most 20 rows"), "{error}");
    std::fs::remove_dir_all(folder).unwrap();
}

/// Without rings a session that the graphs do not hold is refused before it begins.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_full_context_is_refused_with_the_numbers() {
    let device = device(NpuOptions { context: Some(32), ..Default::default() });
    let model = models().next().unwrap();
    let executable = device.load(&model.program, &model.weights, &LoadOptions::default()).unwrap();
    assert!(executable.new_state(32).is_ok());
    let error = executable.new_state(33).err().unwrap().to_string();
    assert!(error.contains("33 rows") && error.contains("for 32") && error.contains("ring"), "{error}");
}
