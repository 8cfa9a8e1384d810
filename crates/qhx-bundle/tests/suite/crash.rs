//! Writers that fail half-way: a full disk, a killed process, Ctrl-C. Nothing half-written remains.
//!
//! Children are this test program itself, asked for one ignored test.

use crate::fixture::*;
use qhx_bundle::{layout::Part, *};
use qhx_ir::Encoding;
use std::{
    env, fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

const PLACE: &str = "QHX_TEST_PLACE";

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn start(place: &Path, options: WriteOptions) -> BundleWriter {
    let text = program("text", &[("table", Encoding::F32, vec![1 << 14, 16])]);
    let mut writer = BundleWriter::create(place, options).unwrap();
    writer.add_program(&text).unwrap();
    writer.declare_weights(TensorSpec::of_programs([&text])).unwrap();
    writer
}

fn child_place() -> PathBuf {
    PathBuf::from(env::var_os(PLACE).expect("run by another test"))
}

/// No file may grow beyond what the limit allows, as on a disk that is full.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let status = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 300; exec \"$@\"", "sh"])
        .arg(env::current_exe().unwrap())
        .args(["--exact", "crash::child_on_a_full_disk", "--ignored"])
        .env(PLACE, dir.path().join("sub/model"))
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    assert!(names(dir.path()).is_empty());
}

#[test]
#[ignore = "run by a_full_disk_leaves_nothing"]
fn child_on_a_full_disk() {
    let writer = start(&child_place(), WriteOptions::default());
    let row = [1; 64];
    let failed = (0..1 << 14).find_map(|i| writer.write_rows("table", Part::Data, i, &row).err().map(|e| (i, e)));
    let (row, error) = failed.expect("the limit must be met");
    assert!(row > 100 && matches!(error, BundleError::Io { doing: "write", .. }), "{row}: {error}");
    // Going on as if nothing had happened does not help.
    let error = writer.finish(manifest()).unwrap_err().to_string();
    assert!(error.contains("could not be written"), "{error}");
}

#[test]
fn what_a_killed_writer_left_is_cleared_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "crash::child_that_waits", "--ignored", "--nocapture"])
        .env(PLACE, &place)
        .stdout(Stdio::piped())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("half-written")));
    let busy = BundleWriter::create(&place, WriteOptions::default()).err().unwrap();
    assert!(matches!(busy, BundleError::Busy(_)), "{busy}");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(names(dir.path()).len(), 2, "its lock file and its folder");
    drop(BundleWriter::create(&place, WriteOptions::default()).unwrap());
    assert!(names(dir.path()).is_empty());
}

#[test]
#[ignore = "run by what_a_killed_writer_left_is_cleared_by_the_next"]
fn child_that_waits() {
    let writer = start(&child_place(), WriteOptions::default());
    writer.write_rows("table", Part::Data, 0, &[1; 6400]).unwrap();
    println!("half-written");
    // Until it is killed, or its parent is gone.
    let _ = std::io::stdin().lines().next();
}

#[test]
fn cancelling_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cancel = Arc::new(AtomicBool::new(false));
    let options = WriteOptions { cancel: Some(cancel.clone()), ..WriteOptions::default() };
    let writer = start(&dir.path().join("model"), options);
    writer.write_rows("table", Part::Data, 0, &[1; 6400]).unwrap();
    cancel.store(true, Ordering::Relaxed);
    assert!(matches!(writer.write_rows("table", Part::Data, 100, &[1; 6400]), Err(BundleError::Cancelled)));
    assert!(matches!(writer.stage(manifest()).map(drop), Err(BundleError::Cancelled)));
    assert!(names(dir.path()).is_empty());
}

#[test]
fn a_failed_replacement_keeps_the_old_bundle() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    write_usual(&place);
    let before = open(&place).unwrap().fingerprint();
    let replace = || WriteOptions { replace: true, ..WriteOptions::default() };
    drop(start(&place, replace()).stage(manifest()).map(drop).unwrap_err());
    assert_eq!(open(&place).unwrap().fingerprint(), before);
    let (writer, _) = write(&place, &[usual_program()], replace(), &mut Random(8));
    writer.finish(manifest()).unwrap();
    assert_ne!(open(&place).unwrap().fingerprint(), before);
    assert_eq!(names(dir.path()), ["model"]);
}
