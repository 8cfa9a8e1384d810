//! Several devices as one are held to the reference by the suite that holds every device: cut at every op, and changing with the phase.

use qhx_ir::{
    Checked, Device, Op, OpKind,
    conformance::{Options, Outcome, run, same_bits_in_company},
    reference::ReferenceDevice,
};
use qhx_runtime::{
    DeviceChoice,
    placement::Phase,
    registry,
    split::{HotExperts, SplitDevice},
};
use std::sync::Arc;

fn conforms(devices: Vec<Arc<dyn Device>>, choose: impl Fn(&Checked, &Op, Phase) -> usize + Send + Sync + 'static) {
    hold(&SplitDevice::new(devices, choose));
}

fn hold(split: &SplitDevice) {
    hold_in(split, None, true);
}

/// The same in some cases only, of a device whose bits may change from call to call unless it `repeats` them.
fn hold_in(split: &SplitDevice, only: Option<&str>, repeats: bool) {
    let options = Options { strict: true, cases: 6, only: only.map(Into::into), repeats, ..Options::from_environment() };
    let summary = run(split, &options, &mut |case| {
        if !matches!(case.outcome, Outcome::Passed { .. }) {
            println!("{case}");
        }
    });
    println!("{summary}");
    assert!(only.is_none() || !summary.passed.is_empty(), "{only:?}: no such case");
    assert!(summary.failed.is_empty(), "{} cases failed", summary.failed.len());
}

fn cpu() -> Arc<dyn Device> {
    registry::candidates(if cfg!(feature = "cpu") { DeviceChoice::Cpu } else { DeviceChoice::Reference }, Some(1)).unwrap().swap_remove(0)
}

fn place(program: &Checked, op: &Op) -> usize {
    program.ops.iter().position(|own| own.path == op.path).unwrap()
}

#[test]
fn cut_at_every_op() {
    conforms(vec![cpu(), Arc::new(ReferenceDevice)], |program, op, _| place(program, op) % 2);
}

#[test]
fn another_device_for_every_phase() {
    conforms(vec![cpu(), Arc::new(ReferenceDevice)], |_, _, phase| phase as usize);
}

#[test]
fn cut_differently_in_every_phase() {
    conforms(vec![cpu(), Arc::new(ReferenceDevice), cpu()], |program, op, phase| (place(program, op) + phase as usize) % 3);
}

/// A row is the same in any company if it is so on every device that has a part of the program.
#[test]
fn company_changes_nothing() {
    let split = SplitDevice::new(vec![cpu(), Arc::new(ReferenceDevice)], |program, op, _| place(program, op) % 2).halved_from(2);
    for only in ["model.decoder", "model.hybrid", "model.mixture", "attend_shared"] {
        let summary = same_bits_in_company(&split, &Options { cases: 1, only: Some(only.into()), ..Options::default() }, &mut |_| {});
        assert!(summary.failed.is_empty() && !summary.passed.is_empty(), "{summary}");
    }
}

/// Prompts in two halves, from two rows on.
#[test]
fn in_two_halves() {
    hold(&SplitDevice::new(vec![cpu(), Arc::new(ReferenceDevice)], |program, op, _| place(program, op) % 2).halved_from(2));
    // Side by side, and in turns by bandwidth tokens.
    for together in [1.0, 3.0] {
        let split = SplitDevice::new(vec![cpu(), cpu()], |program, op, _| place(program, op) / 3 % 2);
        hold(&split.halved_from(3).with_bandwidth_tokens(together));
    }
}

/// Experts on another device than the rest, of which some lie beside the rest: few or nearly all, never transferred for a call or always.
#[test]
fn with_hot_experts() {
    for (count, transfer_from) in [(1, None), (3, Some(1)), (40, Some(1)), (40, Some(4)), (1000, None)] {
        // Which of them computes a choice changes from call to call, and with it the order of sums.
        let devices: Vec<Arc<dyn Device>> = vec![Arc::new(ReferenceDevice), Arc::new(ReferenceDevice)];
        let split = SplitDevice::new(devices, |_, op, _| usize::from(matches!(op.op, OpKind::Experts { .. })));
        let split = split.with_hot_experts(0, HotExperts { count, transfer_from }).with_bandwidth_tokens(count as f64);
        ["experts", "model.mixture"].into_iter().for_each(|case| hold_in(&split, Some(case), false));
    }
}
