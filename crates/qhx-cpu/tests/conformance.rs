//! Holds the CPU device to the reference, for every instruction set this CPU has and for several thread counts.
//!
//! `QHX_CONFORMANCE_ONLY=attend/3` runs one case again; see `qhx_ir::conformance::Options`.

use qhx_cpu::{CpuDevice, CpuOptions, InstructionSet};
use qhx_ir::conformance::{Options, Outcome, run};

fn conforms(instructions: InstructionSet, threads: usize) {
    let device = CpuDevice::new(CpuOptions { threads: Some(threads), instructions: Some(instructions) }).unwrap();
    let options = Options { strict: true, ..Options::from_environment() };
    let summary = run(&device, &options, &mut |case| {
        if !matches!(case.outcome, Outcome::Passed { .. }) {
            println!("{case}");
        }
    });
    println!("{instructions}, {threads} threads:\n{summary}");
    assert!(summary.failed.is_empty(), "{} cases failed", summary.failed.len());
}

fn conforms_if_available(instructions: InstructionSet, threads: usize) {
    match instructions.is_available() {
        true => conforms(instructions, threads),
        false => println!("this CPU has no {instructions}: not run"),
    }
}

#[test]
fn portable() {
    conforms(InstructionSet::Portable, 2);
}

#[test]
fn avx2() {
    conforms_if_available(InstructionSet::Avx2, 1);
}

#[test]
fn avx512_vnni() {
    conforms_if_available(InstructionSet::Avx512Vnni, 3);
}
