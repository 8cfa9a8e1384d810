//! Sets up the comparison with llama.cpp; `bench/peers.py` does it.

use crate::{Failure, assets, cargo, root, run, target};
use std::{path::PathBuf, process::Command};

/// Runs the comparison on the models of these names, on all where there is none.
pub(crate) fn bench(names: &[&str]) -> Result<(), Failure> {
    let model = assets::smollm2()?;
    let python = peer()?;
    run(cargo().args(["build", "--release", "--package", "qhx-cli"]))?;
    run(Command::new(&python).arg(root().join("bench/peers.py")).arg(target().join("release/qhx")).arg(&model).args(names))
}

/// Runs measurements on a GPU with a script (`bench/gpu.py`, `bench/split.py`), which knows the arguments.
pub(crate) fn bench_gpu(script: &str, arguments: &[&str]) -> Result<(), Failure> {
    run(cargo().args(["build", "--release", "--package", "qhx-cli"]))?;
    run(Command::new("python3").arg(root().join(script)).arg(target().join("release/qhx")).args(arguments))
}

/// A Python with llama-cpp-python, built natively (about six minutes, once).
fn peer() -> Result<PathBuf, Failure> {
    let folder = target().join("assets/llama-cpp-python");
    let python = folder.join("bin/python");
    let installed = Command::new(&python).args(["-c", "import llama_cpp, gguf"]).output().is_ok_and(|o| o.status.success());
    if !installed {
        eprintln!("building llama-cpp-python …");
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "llama-cpp-python==0.3.36", "gguf==0.19.0"]))?;
    }
    Ok(python)
}
