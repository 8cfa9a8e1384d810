//! What needs a process of its own: a binary that another process runs, and the library's prints.

use crate::emulator::{binaries::graph, support::*};
use qhx_npu::{Arch, Expected};
use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};
use tempfile::TempDir;

const FOLDER: &str = "QHX_TEST_FOLDER";

/// Runs a test of this file in a process of its own, on a folder.
fn child(test: &str, folder: &Path) -> Output {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--ignored", "--exact", test, "--nocapture", "--test-threads=1"]).env(FOLDER, folder);
    let output = command.stderr(Stdio::piped()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn another_process_computes_the_same_bits() {
    let x = f16_bytes(&noise(2 * 64, 12));
    if let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) {
        for arch in Arch::ALL {
            let context = device(arch).load_file(&folder.join(format!("{arch}.bin")), &Expected::default()).unwrap();
            fs::write(folder.join(format!("{arch}.out")), &execute(&context, &[("x", &x)])[0]).unwrap();
        }
        return;
    }
    let folder = TempDir::new().unwrap();
    let run = |arch: Arch| {
        let context = compile(&device(arch), &graph());
        context.save(&folder.path().join(format!("{arch}.bin"))).unwrap();
        execute(&context, &[("x", &x)]).remove(0)
    };
    let here = Arch::ALL.map(run);
    child("emulator::processes::another_process_computes_the_same_bits", folder.path());
    for (arch, here) in Arch::ALL.into_iter().zip(here) {
        assert!(fs::read(folder.path().join(format!("{arch}.out"))).unwrap() == here, "{arch}");
    }
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn the_library_prints_nothing_on_our_output() {
    if env::var_os(FOLDER).is_some() {
        let say = |text: &str| std::io::stdout().write_all(text.as_bytes()).unwrap();
        say("before\n");
        let device = device(Arch::V81);
        let context = compile(&device, &graph());
        let x = f16_bytes(&noise(2 * 64, 12));
        execute(&context, &[("x", &x)]);
        let loaded = device.load(&context.binary().unwrap(), &Expected::default()).unwrap();
        execute(&loaded, &[("x", &x)]);
        drop((loaded, context, device));
        say("after\n");
        return;
    }
    let printed = child("emulator::processes::the_library_prints_nothing_on_our_output", Path::new("here")).stdout;
    let printed = String::from_utf8(printed).unwrap();
    assert!(printed.contains("before\nafter\n"), "{printed}");
}
