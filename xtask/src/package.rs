//! The crates as they would be published, and a program that depends on them from outside the workspace.

use crate::{Failure, cargo, root, run, target};
use std::{
    fs, io,
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
    let io = |e: io::Error| format!("{}: {e}", place.display());
    let crates = packaged(&place)?;
    let embedder = place.join("embedder");
    same(&root().join("tests/embedder"), &embedder, &["Cargo.lock"]).map_err(io)?;
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

/// The crates as `cargo package` makes them, unpacked: their names and folders. What has not changed since the last time stays as it is, and is not built again.
fn packaged(place: &Path) -> Result<Vec<(String, PathBuf)>, Failure> {
    let mut package = cargo();
    package.args(["package", "--quiet", "--workspace", "--no-verify", "--allow-dirty", "--offline"]);
    let made = place.join("made");
    let _ = fs::remove_dir_all(&made);
    package.arg("--target-dir").arg(&made);
    for name in OWN {
        package.args(["--exclude", name]);
    }
    run(&mut package)?;
    let made = made.join("package");
    let io = |e: io::Error| format!("{}: {e}", made.display());
    let mut crates = Vec::new();
    for entry in fs::read_dir(&made).map_err(io)? {
        let file = entry.map_err(io)?.path();
        let Some(name) = file.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".crate")) else { continue };
        run(Command::new("tar").arg("-xzf").arg(&file).arg("-C").arg(&made))?;
        let (crate_name, _) = name.rsplit_once('-').ok_or_else(|| format!("{name} has no version"))?;
        let folder = place.join(crate_name);
        same(&made.join(name), &folder, &[]).map_err(io)?;
        crates.push((crate_name.to_owned(), folder));
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

/// Makes a folder the same as another, but for entries of these names, and touches no file that is the same already.
fn same(from: &Path, to: &Path, but: &[&str]) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(to)? {
        let entry = entry?;
        let source = from.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            _ if but.iter().any(|name| entry.file_name() == *name) => (),
            true if !source.is_dir() => fs::remove_dir_all(entry.path())?,
            false if !source.is_file() => fs::remove_file(entry.path())?,
            _ => (),
        }
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, place) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            same(&source, &place, &[])?;
        } else {
            let bytes = fs::read(source)?;
            if fs::read(&place).ok().as_ref() != Some(&bytes) {
                fs::write(place, bytes)?;
            }
        }
    }
    Ok(())
}
