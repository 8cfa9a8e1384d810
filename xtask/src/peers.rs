//! Sets up the comparisons with other programs; scripts in `bench` make them.

use crate::{Failure, assets, cargo, llama, root, run, target};
use std::{path::PathBuf, process::Command};

/// The speed of one session (`bench/peers.py`).
pub(crate) fn bench(arguments: &[&str]) -> Result<(), Failure> {
    let (model, bench, quantise) = (assets::smollm2()?, llama::tool("llama-bench")?, llama::tool("quantize")?);
    let python = assets::python("peers-1", "import gguf, openvino_genai", &["gguf==0.19.0", OPENVINO])?;
    let mut script = Command::new(python);
    script.arg(root().join("bench/peers.py")).arg(qhx()?).args([bench, quantise, model]);
    run(script.args(arguments))
}

/// Several sessions at once (`bench/sessions.py`).
pub(crate) fn bench_sessions(arguments: &[&str]) -> Result<(), Failure> {
    let (bench, python) = (llama::tool("batched-bench")?, gguf_writer()?);
    run(Command::new(python).arg(root().join("bench/sessions.py")).arg(qhx()?).arg(bench).args(arguments))
}

/// The server and its clients (`bench/server.py`).
pub(crate) fn bench_server(arguments: &[&str]) -> Result<(), Failure> {
    let (model, bench, python) = (assets::smollm2()?, llama::tool("batched-bench")?, gguf_writer()?);
    run(Command::new(python).arg(root().join("bench/server.py")).arg(qhx()?).args([bench, model]).args(arguments))
}

/// Decoding with drafts (`bench/drafts.py`).
pub(crate) fn bench_drafts(arguments: &[&str]) -> Result<(), Failure> {
    let (model, lookup) = (assets::smollm2()?, llama::example("lookup")?);
    run(Command::new("python3").arg(root().join("bench/drafts.py")).arg(qhx()?).args([model, lookup]).args(arguments))
}

/// What quantisation costs (`bench/quantisation.py`). Needs the oracle's environment.
pub(crate) fn bench_quantisation(arguments: &[&str]) -> Result<(), Failure> {
    let python = target().join("oracle-venv/bin/python");
    if !python.exists() {
        return Err("the oracle's environment is missing: run `sh oracle/setup.sh` (1.7 GB)".into());
    }
    let (model, quantise, logits) = (assets::smollm2()?, llama::tool("quantize")?, llama::program(&root().join("bench/llama_logits.cpp"))?);
    run(Command::new(python).arg(root().join("bench/quantisation.py")).arg(qhx()?).args([quantise, logits, model]).args(arguments))
}

/// Beside busy processes (`bench/busy.py`).
pub(crate) fn bench_busy(arguments: &[&str]) -> Result<(), Failure> {
    let (model, bench) = (assets::smollm2()?, llama::tool("llama-bench")?);
    run(Command::new("python3").arg(root().join("bench/busy.py")).arg(qhx()?).args([bench, model]).args(arguments))
}

/// On a GPU, with a script that knows the arguments (`bench/gpu.py`, `bench/split.py`).
pub(crate) fn bench_gpu(script: &str, arguments: &[&str]) -> Result<(), Failure> {
    run(Command::new("python3").arg(root().join(script)).arg(qhx()?).args(arguments))
}

const OPENVINO: &str = "openvino-genai==2026.4.1.0";

/// The release build.
fn qhx() -> Result<PathBuf, Failure> {
    run(cargo().args(["build", "--release", "--package", "qhx-cli"]))?;
    Ok(target().join("release/qhx"))
}

/// A Python that writes GGUF files.
fn gguf_writer() -> Result<PathBuf, Failure> {
    assets::python("gguf-1", "import gguf", &["gguf==0.19.0"])
}
