//! The crates as they would be published, and a program that depends on them from outside the workspace.

use crate::{Failure, cargo, root, run, target};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Crates of the workspace that are never published.
const OWN: [&str; 2] = ["xtask", "qhx-attack"];
/// Crates that a program for text on the CPU must not build: decoders, grammars, and what loads QNN or Vulkan.
const LEFT_OUT: [&str; 10] =
    ["gif", "image-webp", "png", "zune-jpeg", "symphonia", "qhx-npu", "libloading", "qhx-gpu", "ash", "llguidance"];

/// Packages all crates, unpacks them, and builds and runs `tests/embedder` against them.
pub(crate) fn package() -> Result<(), Failure> {
    let place = target().join("package-check");
    let io = |e: std::io::Error| format!("{}: {e}", place.display());
    let _ = fs::remove_dir_all(&place);
    fs::create_dir_all(&place).map_err(io)?;
    let crates = packaged(&place)?;
    let embedder = place.join("embedder");
    copy(&root().join("tests/embedder"), &embedder).map_err(io)?;
    // The versions that the workspace is tested with.
    fs::copy(root().join("Cargo.lock"), embedder.join("Cargo.lock")).map_err(io)?;
    let command = |name: &str| {
        let mut command = cargo();
        command.current_dir(&embedder).env("CARGO_TARGET_DIR", target()).args([name, "--offline"]);
        for (name, folder) in &crates {
            command.arg("--config").arg(format!("patch.crates-io.{name}.path={:?}", folder.display().to_string()));
        }
        command
    };
    leaves_out(command("tree"))?;
    run(command("run").args(["--quiet", "--profile", "test-opt", "--"]).arg(root().join("crates/qhx/builtin")))
}

/// The crates as `cargo package` makes them, unpacked: their names and folders.
fn packaged(place: &Path) -> Result<Vec<(String, PathBuf)>, Failure> {
    let mut package = cargo();
    package.args(["package", "--quiet", "--workspace", "--no-verify", "--allow-dirty", "--offline"]);
    package.arg("--target-dir").arg(place.join("made"));
    for name in OWN {
        package.args(["--exclude", name]);
    }
    run(&mut package)?;
    let made = place.join("made/package");
    let io = |e: std::io::Error| format!("{}: {e}", made.display());
    let mut crates = Vec::new();
    for entry in fs::read_dir(&made).map_err(io)? {
        let file = entry.map_err(io)?.path();
        let Some(name) = file.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".crate")) else { continue };
        // With the time of now: packages date all their files alike, and cargo would take what it built of an earlier one.
        run(Command::new("tar").arg("-xzmf").arg(&file).arg("-C").arg(place))?;
        let (crate_name, _) = name.rsplit_once('-').ok_or_else(|| format!("{name} has no version"))?;
        crates.push((crate_name.to_owned(), place.join(name)));
    }
    Ok(crates)
}

/// Whether the program's dependencies are without what its features leave out.
fn leaves_out(mut tree: Command) -> Result<(), Failure> {
    tree.args(["--edges", "normal", "--prefix", "none", "--format", "{p}"]);
    let output = tree.output().map_err(|e| format!("cannot start {tree:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{tree:?} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr)));
    }
    let listed = String::from_utf8_lossy(&output.stdout);
    let names: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().next()).collect();
    if !names.contains(&"qhx-cpu") {
        return Err(format!("the tree of tests/embedder is not one: {listed}"));
    }
    let is_left_out = |name: &&&str| LEFT_OUT.iter().any(|left_out| **name == *left_out || name.starts_with(&format!("{left_out}-")));
    match names.iter().find(is_left_out) {
        None => Ok(()),
        Some(name) => Err(format!("a program for text on the CPU depends on {name}: see `cargo tree` of tests/embedder")),
    }
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let place = to.join(entry.file_name());
        if entry.file_type()?.is_dir() { copy(&entry.path(), &place)? } else { fs::copy(entry.path(), place).map(drop)? }
    }
    Ok(())
}
