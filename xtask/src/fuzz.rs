//! Coverage-guided fuzzing: `fuzz/` is a workspace of its own, built with instrumentation by a `cargo fuzz` that is fetched.

use crate::{Failure, assets, programs, root, run, suites::Tier, target};
use std::{fs, process::Command};

/// The version of `cargo fuzz` that is fetched.
const CARGO_FUZZ: &str = "0.13.2";
/// Seconds for each target.
const SECONDS: u32 = 60;
/// A target fails if an input takes more seconds or MiB.
const LIMITS: [&str; 2] = ["-timeout=30", "-rss_limit_mb=2048"];

/// A minute for each target.
pub(crate) fn test(_: Tier) -> Result<(), Failure> {
    fuzz(SECONDS)
}

/// Some seconds for each target, from the same seeds as `cargo xtask attack`. New inputs are kept in `fuzz/corpus`, crashes in `fuzz/artifacts`.
pub(crate) fn fuzz(seconds: u32) -> Result<(), Failure> {
    let program = assets::cargo_tool("cargo-fuzz", CARGO_FUZZ)?;
    let seeds = target().join("fuzz-seeds");
    run(Command::new(programs::binary("qhx-attack")).arg("corpus").arg(&seeds))?;
    for name in targets()? {
        let corpus = root().join("fuzz/corpus").join(&name);
        fs::create_dir_all(&corpus).map_err(|e| format!("{}: {e}", corpus.display()))?;
        let mut fuzz = Command::new(&program);
        // Stable Rust has the instrumentation, and keeps it to those who ask for what may change.
        fuzz.current_dir(root()).env("RUSTC_BOOTSTRAP", "1").args(["fuzz", "run", "--target-dir"]).arg(target().join("fuzz"));
        fuzz.arg(&name).args([&corpus, &seeds.join(&name)]).arg("--").arg(format!("-max_total_time={seconds}")).args(LIMITS);
        run(fuzz.args(["-print_final_stats=1", "-print_funcs=0", "-verbosity=0"]))
            .map_err(|e| format!("{name}: its input is in fuzz/artifacts: {e}"))?;
    }
    Ok(())
}

/// The targets in `fuzz/Cargo.toml`.
fn targets() -> Result<Vec<String>, Failure> {
    let file = root().join("fuzz/Cargo.toml");
    let manifest = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    let manifest: toml::Table = manifest.parse().map_err(|e| format!("{}: {e}", file.display()))?;
    let bins = manifest.get("bin").and_then(toml::Value::as_array).into_iter().flatten();
    Ok(bins.filter_map(|bin| bin.get("name")?.as_str().map(str::to_owned)).collect())
}
