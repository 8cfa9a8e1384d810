//! Holds the NPU device to the reference, in the emulator.
//!
//! `QHX_CONFORMANCE_ONLY=attend/3` runs one case again; see `qhx_ir::conformance::Options`.

use qhx_ir::conformance::{Options, Outcome, run};
use qhx_npu::{Arch, Library, NpuDevice, NpuOptions};

fn conforms(arch: Arch, only: Option<&str>) {
    let folder = std::env::var_os("QHX_QNN_DIR").expect("QHX_QNN_DIR names the folder with libQnnHtp.so; `cargo xtask test` fetches it");
    let library = Library::open(Some(folder.as_ref())).unwrap();
    let device = NpuDevice::new(&library, NpuOptions { arch, prefill_rows: 16, ..Default::default() }).unwrap();
    let options = Options::from_environment();
    let only = options.only.clone().or(only.map(str::to_owned));
    // The emulator is slow.
    let (few, every) = if crate::extended() { (2, 1) } else { (1, 3) };
    let cases = if std::env::var_os("QHX_CONFORMANCE_CASES").is_some() { options.cases } else { few };
    let summary =
        run(&device, &Options { half: true, cases, every, only, max_segments: 3, partial_commits: false, ..options }, &mut |case| {
            if !matches!(case.outcome, Outcome::Passed { .. }) {
                println!("{case}");
            }
        });
    println!("{arch}:\n{summary}");
    assert!(summary.failed.is_empty(), "{} cases failed", summary.failed.len());
    // Only two things are refused: relative keys over a slot, and experts that are elsewhere in part.
    let expected = ["relative keys", "only some are there"];
    assert!(summary.refused.keys().all(|(_, reason)| expected.iter().any(|part| reason.contains(part))), "{summary}");
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn v81() {
    conforms(Arch::V81, None);
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn v79_decoder() {
    conforms(Arch::V79, Some("model.decoder"));
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn v79_hybrid() {
    conforms(Arch::V79, Some("model.hybrid"));
}
