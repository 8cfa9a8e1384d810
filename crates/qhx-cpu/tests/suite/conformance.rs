//! Holds the CPU device to the reference, for every instruction set this CPU has and for several thread counts.
//!
//! `QHX_CONFORMANCE_ONLY=attend/3` runs one case again; see `qhx_ir::conformance::Options`. `QHX_INSTRUCTIONS=neon+dotprod` says which set is the best
//! that this CPU has, and only that one is tested: an emulated CPU is slow.

use qhx_cpu::{CpuDevice, CpuOptions, InstructionSet};
use qhx_ir::conformance::{Options, Outcome, run};

fn conforms(instructions: InstructionSet, threads: usize) {
    let device = CpuDevice::new(CpuOptions { threads: Some(threads), instructions: Some(instructions), ..Default::default() }).unwrap();
    let options = Options { strict: true, ..Options::from_environment() };
    let summary = run(&device, &options, &mut |case| {
        if !matches!(case.outcome, Outcome::Passed { .. }) {
            println!("{case}");
        }
    });
    println!("{instructions}, {threads} threads:\n{summary}");
    assert!(summary.failed.is_empty(), "{} cases failed", summary.failed.len());
}

fn asked_for() -> Option<InstructionSet> {
    std::env::var("QHX_INSTRUCTIONS").ok().map(|name| name.parse().unwrap())
}

#[test]
fn the_best_set_is_found() {
    let best = CpuDevice::new(CpuOptions { threads: Some(1), ..Default::default() }).unwrap().instructions();
    assert_eq!(best, *InstructionSet::available().last().unwrap());
    assert_eq!(best, asked_for().unwrap_or(best));
}

fn conforms_if_available(instructions: InstructionSet, threads: usize) {
    match instructions.is_available() {
        true if asked_for().is_some_and(|set| set != instructions) => println!("{instructions} is not asked for: not run"),
        true => conforms(instructions, threads),
        false => println!("this CPU has no {instructions}: not run"),
    }
}

#[test]
fn portable() {
    conforms_if_available(InstructionSet::Portable, 2);
}

#[test]
fn avx2() {
    conforms_if_available(InstructionSet::Avx2, 1);
}

#[test]
fn avx512_vnni() {
    conforms_if_available(InstructionSet::Avx512Vnni, 3);
}

#[test]
fn avx512_amx() {
    conforms_if_available(InstructionSet::Avx512Amx, 2);
}

#[test]
fn neon() {
    conforms_if_available(InstructionSet::Neon, 2);
}

#[test]
fn neon_dotprod() {
    conforms_if_available(InstructionSet::NeonDotprod, 1);
}

#[test]
fn neon_i8mm() {
    conforms_if_available(InstructionSet::NeonI8mm, 3);
}
