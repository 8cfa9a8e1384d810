//! The project's chores: `cargo xtask COMMAND`. It depends on next to nothing, so that it builds in seconds.

mod aarch64;
mod assets;
mod attack;
mod changed;
mod conventions;
mod debian;
mod deps;
mod features;
mod fuzz;
mod gpu;
mod graph;
mod judges;
mod licenses;
mod llama;
mod loom;
mod measure;
mod mutants;
mod package;
mod peers;
mod policy;
mod programs;
mod repeat;
mod size;
mod suites;
mod timings;

use std::{
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

const HELP: &str = "cargo xtask COMMAND

  demo [PROMPT]   fetch a small real model, forge it and let it answer
  test [SUITE…]   all suites, with their set-up, or those named; in CI (CI=true) a suite that cannot run fails
  test --quick [COMMIT]
                  the tests of the crates that differ from a commit (HEAD), without those of the crates that depend on them
  test --extended [SUITE…]
                  all that takes long: docs/testing.md
  repeat N [--beside-build] [--skip TEST]… CRATE[:TEST]…
                  the tests of crates, or those whose names hold TEST, N times, and which of them failed how often
  mutants [FILE…] mistakes that cargo-mutants makes in guards, one at a time, which the tests of their crates must notice
  fetch           all that the suites need from elsewhere, to test without a network later
  aarch64 COMMAND …
                  a command of cargo for aarch64, with tools that are fetched where they are missing: build --release
  shaders         compile the GPU's shaders anew, with a compiler that is fetched
  man             write man pages to target/man and shell completions to target/completions
  attack [CLASS…] [--seconds N] [--seed S]
                  hostile input of each class against the libraries, the binary and a server, a minute each; --help says more
  fuzz SECONDS    coverage-guided fuzzing of every reader, from the same good files
  builtin         forge the model inside the library and the binary anew from demo/qwen3_5
  bench-peers [NAME…] [--instructions avx2] …
                  speed beside llama.cpp, in one run, on SmolLM2 and the four full-size models; needs disk and minutes
  bench-sessions …
                  the same for several sessions at once
  bench-server …  the same for the server and its clients
  bench-drafts …  decoding with drafts and without, and llama.cpp's lookup decoding
  bench-busy …    the same next to busy processes
  bench-quantisation …
                  what precisions lose, beside llama.cpp's quantisations of the same weights; needs oracle/setup.sh
  bench-gpu [NAME…] [--peer FOLDER] …
                  speed on this machine's GPU, of the full-size models with random weights; beside llama.cpp where FOLDER has it
  bench-split [--memory 1GiB,2GiB,3GiB] …
                  a mixture whose experts do not fit into this machine's GPU: CPU, whole layers on the GPU, hot experts
  fullsize [NAME] full-size models with seeded weights against the oracle; needs disk and minutes
  lint            fmt, clippy and doc, no warning allowed; what git tracks is not too much, crates of others not too many, and
                  as deny.toml allows, and the notices of licences are current
  licenses        write anew what `qhx licenses` prints, after a change of Cargo.lock
  timings         build the binary anew, one job at a time, and list the crates that take longest
  deps NAME       what a dependency costs: the crates that it alone brings, their time in the last timings, their source
  help            this text";

/// What went wrong, for people.
type Failure = String;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        ["demo"] => demo("Name three kinds of trees."),
        ["demo", prompt] => demo(prompt),
        ["test", ref arguments @ ..] => suites::test(arguments),
        ["fetch"] => suites::fetch(),
        // Steps of `test`, each a process so that its time is known.
        ["build-tests", ref packages @ ..] => programs::build(packages),
        ["suite", name] => suites::one(name),
        ["aarch64", ref arguments @ ..] => aarch64::pass_on(arguments),
        ["repeat", ref arguments @ ..] => repeat::repeat(arguments),
        ["mutants", ref files @ ..] => mutants::test(files),
        ["shaders"] => gpu::shaders(),
        ["man"] => man(),
        ["attack", ref arguments @ ..] => programs::build(&[]).and_then(|()| attack::attack(arguments)),
        ["fuzz", seconds] => match seconds.parse() {
            Ok(seconds) => programs::build(&[]).and_then(|()| fuzz::fuzz(seconds)),
            Err(_) => Err(format!("fuzz needs a number of seconds, found `{seconds}`")),
        },
        ["builtin"] => builtin(),
        ["bench-peers", ref arguments @ ..] => peers::bench(arguments),
        ["bench-sessions", ref arguments @ ..] => peers::bench_sessions(arguments),
        ["bench-server", ref arguments @ ..] => peers::bench_server(arguments),
        ["bench-drafts", ref arguments @ ..] => peers::bench_drafts(arguments),
        ["bench-busy", ref arguments @ ..] => peers::bench_busy(arguments),
        ["bench-quantisation", ref arguments @ ..] => peers::bench_quantisation(arguments),
        ["bench-gpu", ref arguments @ ..] => peers::bench_gpu("bench/gpu.py", arguments),
        ["bench-split", ref arguments @ ..] => peers::bench_gpu("bench/split.py", arguments),
        ["fullsize"] => suites::fullsize(""),
        ["fullsize", names] => suites::fullsize(names),
        ["lint"] => suites::lint(),
        ["licenses"] => licenses::licenses(),
        ["timings"] => timings::timings(),
        ["deps", name] => deps::deps(name),
        [] | ["help" | "--help" | "-h"] => {
            println!("{HELP}");
            Ok(())
        }
        _ => {
            eprintln!("error: no such command: {}\n\n{HELP}", arguments.join(" "));
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// The main job on a real model: a 135-million-parameter one, small enough to fetch and forge within a minute.
fn demo(prompt: &str) -> Result<(), Failure> {
    let model = assets::smollm2()?;
    let mut qhx = cargo();
    qhx.args(["run", "--release", "--quiet", "--package", "qhx-cli", "--bin", "qhx", "--"]);
    // The model's own template adds a system prompt with which it answers badly.
    qhx.args(["run", "--system", ""]).arg(model).arg(prompt);
    run(&mut qhx)
}

/// The bundle that the library and the binary carry.
fn builtin() -> Result<(), Failure> {
    let mut qhx = cargo();
    qhx.args(["run", "--release", "--package", "qhx-cli", "--bin", "qhx", "--"]);
    run(qhx.args(["forge", "demo/qwen3_5", "--precision", "w8", "--out", "crates/qhx/builtin", "--force"]))
}

/// Man pages and completions, for packages. The binary writes them from its own definitions.
fn man() -> Result<(), Failure> {
    let qhx = || {
        let mut qhx = cargo();
        qhx.args(["run", "--release", "--quiet", "--package", "qhx-cli", "--bin", "qhx", "--"]);
        qhx
    };
    run(qhx().args(["man", "--out"]).arg(target().join("man")))?;
    let folder = target().join("completions");
    let cannot = |e: std::io::Error| format!("cannot write to {}: {e}", folder.display());
    fs::create_dir_all(&folder).map_err(cannot)?;
    for (shell, name) in [("bash", "qhx"), ("zsh", "_qhx"), ("fish", "qhx.fish"), ("powershell", "qhx.ps1"), ("elvish", "qhx.elv")] {
        let script = File::create(folder.join(name)).map_err(cannot)?;
        run(qhx().args(["completions", shell]).stdout(script))?;
    }
    println!("{}\n{}", target().join("man").display(), folder.display());
    Ok(())
}

/// The workspace's folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Where fetched files live, beside the build: ignored by git, kept between runs.
fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    // `cargo run` describes xtask in these. Build scripts that watch them would run again whenever a build comes from here
    // after one from a shell, or the other way round, and all that depends on them would be compiled again.
    let of_xtask = |name: &str| ["CARGO_MANIFEST_", "CARGO_PKG_"].iter().any(|prefix| name.starts_with(prefix));
    env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_xtask)).for_each(|(name, _)| _ = command.env_remove(name));
    command
}

/// A command as a person would write it.
fn shown(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn run(command: &mut Command) -> Result<(), Failure> {
    let shown = shown(command);
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{shown} ended with {status}")),
        Err(e) => Err(format!("cannot start {shown}: {e}")),
    }
}
