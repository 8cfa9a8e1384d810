//! Us beside llama.cpp on one machine, in one run, in turn: ratios, since the machine's own speed says nothing.

use crate::{Failure, assets, cargo, root, run, target};
use std::{
    path::{Path, PathBuf},
    process::Command,
};

const THREADS: &str = "2";
const PROMPT: &str = "512";
const NEW: &str = "64";
const ROUNDS: usize = 3;

/// SmolLM2 (Q4_1): the same GGUF file on both sides, the rounds interleaved.
pub(crate) fn bench() -> Result<(), Failure> {
    let model = assets::smollm2()?;
    let python = peer()?;
    run(cargo().args(["build", "--release", "--package", "qhx-cli"]))?;
    let qhx = target().join("release/qhx");
    let bundle = target().join("assets/smollm2-bundle");
    run(Command::new(&qhx).args(["forge", "--force", "--gate", "none", "--out"]).arg(&bundle).arg(&model))?;
    let (mut ours, mut theirs) = (Speeds::default(), Speeds::default());
    for _ in 0..ROUNDS {
        let peer = Command::new(&python).arg(root().join("bench/peer.py")).arg(&model).args([THREADS, PROMPT, NEW]).output();
        theirs.read(&output(peer, "llama.cpp")?, &[format!("\"pp{PROMPT}\": "), format!("\"tg{NEW}\": ")])?;
        let own = Command::new(&qhx)
            .arg("bench")
            .arg(&bundle)
            .args(["-p", PROMPT, "-n", NEW, "-r", "1", "--threads", THREADS, "--json"])
            .output();
        let key = |test: &str, n: &str| format!("\"test\":\"{test}{n}\",\"mean\":");
        ours.read(&output(own, "qhx bench")?, &[key("pp", PROMPT), key("tg", NEW)])?;
    }
    println!("SmolLM2-135M-Instruct Q4_1, {THREADS} threads, median of {ROUNDS} interleaved rounds\n");
    println!("| test | qhx t/s | llama.cpp t/s | ratio |\n|---|---:|---:|---:|");
    for (test, ours, theirs) in [(format!("pp{PROMPT}"), ours.prefill, theirs.prefill), (format!("tg{NEW}"), ours.decode, theirs.decode)] {
        let (ours, theirs) = (median(ours), median(theirs));
        println!("| {test} | {ours:.1} | {theirs:.1} | {:.2} |", ours / theirs);
    }
    Ok(())
}

/// Tokens per second, a number per round.
#[derive(Default)]
struct Speeds {
    prefill: Vec<f64>,
    decode: Vec<f64>,
}

impl Speeds {
    /// Takes the numbers that follow the two keys; the standard library has no JSON reader, and both programs are ours.
    fn read(&mut self, json: &str, [prefill, decode]: &[String; 2]) -> Result<(), Failure> {
        let number = |key: &str| {
            let rest = json.split_once(key).ok_or_else(|| format!("no {key} in {json}"))?.1;
            let end = rest.find([',', '}']).unwrap_or(rest.len());
            rest[..end].trim().parse::<f64>().map_err(|e| format!("{key} in {json}: {e}"))
        };
        self.prefill.push(number(prefill)?);
        self.decode.push(number(decode)?);
        Ok(())
    }
}

/// A Python with llama-cpp-python, built natively (about six minutes, once).
fn peer() -> Result<PathBuf, Failure> {
    let folder = target().join("assets/llama-cpp-python");
    let python = folder.join("bin/python");
    if !installed(&python) {
        eprintln!("building llama-cpp-python …");
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "llama-cpp-python==0.3.36"]))?;
    }
    Ok(python)
}

fn installed(python: &Path) -> bool {
    Command::new(python).args(["-c", "import llama_cpp"]).output().is_ok_and(|o| o.status.success())
}

fn output(run: std::io::Result<std::process::Output>, what: &str) -> Result<String, Failure> {
    let output = run.map_err(|e| format!("cannot start {what}: {e}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{what} ended with {}:\n{}", output.status, String::from_utf8_lossy(&output.stderr))),
    }
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}
