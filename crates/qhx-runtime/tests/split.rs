//! Several devices as one are held to the reference by the suite that holds every device: cut at every op, and changing with the phase.

use qhx_ir::{
    Checked, Device, Op,
    conformance::{Options, Outcome, run},
    reference::ReferenceDevice,
};
use qhx_runtime::{DeviceChoice, placement::Phase, registry, split::SplitDevice};
use std::sync::Arc;

fn conforms(devices: Vec<Arc<dyn Device>>, choose: impl Fn(&Checked, &Op, Phase) -> usize + Send + Sync + 'static) {
    hold(&SplitDevice::new(devices, choose));
}

fn hold(split: &SplitDevice) {
    let options = Options { strict: true, cases: 6, ..Options::from_environment() };
    let summary = run(split, &options, &mut |case| {
        if !matches!(case.outcome, Outcome::Passed { .. }) {
            println!("{case}");
        }
    });
    println!("{summary}");
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

/// Prompts in two halves, from two rows on.
#[test]
fn in_two_halves() {
    hold(&SplitDevice::new(vec![cpu(), Arc::new(ReferenceDevice)], |program, op, _| place(program, op) % 2).halved_from(2));
    hold(&SplitDevice::new(vec![cpu(), cpu()], |program, op, _| place(program, op) / 3 % 2).halved_from(3));
}
