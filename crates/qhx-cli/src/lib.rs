//! The command line: `qhx`, and `qhx_generate` in the order that published bundles document.
//!
//! Each command is a file in `commands`: its flags, what it does, what it prints. This file only parses, dispatches and turns the outcome into
//! an exit code: 0 success, 1 a failure of the work, 2 wrong usage.
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod answer;
mod bar;
mod commands;
mod connect;
mod contexts;
mod cost;
mod draft;
mod environment;
mod failure;
mod flags;
mod foreign;
mod forging;
mod heap;
mod hints;
mod input;
mod interrupt;
mod lines;
mod load;
mod log;
mod media;
mod names;
mod open;
mod output;
mod peak;
mod progress;
mod published;
mod sessions;
mod settings;
#[cfg(unix)]
mod signals;
#[cfg(unix)]
mod supervise;
mod table;
mod targets;
mod texts;
mod units;
mod windows;

use clap::{Parser, error::ErrorKind};
use failure::Failure;
use interrupt::Interrupt;
use qhx_runtime::text::guard;
use std::{env, ffi::OsString, io, panic, process::ExitCode};

/// Forges Hugging Face checkpoints and GGUF files into verified bundles, and runs them
#[derive(Parser)]
#[command(name = "qhx", version, arg_required_else_help = true)]
#[command(
    after_help = "Examples:\n  qhx run \"Why is the sky blue?\"\n  qhx forge ./SmolLM2-135M-Instruct --out smol\n  qhx run smol \"Why is the sky blue?\""
)]
struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

/// `qhx`.
pub fn qhx() -> ExitCode {
    prepare();
    let arguments: Vec<OsString> = env::args_os().collect();
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) => return not_parsed(&error, &arguments),
    };
    match Interrupt::install().and_then(|interrupt| cli.command.run(&interrupt)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// `qhx_generate`.
pub fn qhx_generate() -> ExitCode {
    prepare();
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    match Interrupt::install().and_then(|interrupt| published::run(&arguments, &interrupt)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// What is a program's to do, and not a library's: the whole process notices it.
fn prepare() {
    #[cfg(unix)]
    signals::install();
    // Panics are reported as Rust does, less those that a library turns into errors.
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if !guard::is_quiet() {
            report(panic);
        }
    }));
}

/// Help and version are successes that clap prints; anything else is wrong usage.
fn not_parsed(error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    if error.kind() == ErrorKind::InvalidUtf8 {
        return failure::not_utf8(arguments).report();
    }
    // The error shows arguments; a script may have taken them from anywhere.
    let text = error.render().to_string();
    if error.use_stderr() && foreign::shown(&text) != text {
        output::note(text.trim_end());
    } else if let Err(problem) = error.print()
        && problem.kind() != io::ErrorKind::BrokenPipe
    {
        // A closed pipe is no reason to complain about help.
        return Failure::work(format!("cannot write to the output: {problem}")).report();
    }
    if error.exit_code() == 0 { ExitCode::SUCCESS } else { Failure::USAGE.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_every_command_shows_an_example() {
        let mut command = Cli::command();
        command.build();
        command.clone().debug_assert();
        for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
            let help = sub.clone().render_long_help().to_string();
            let (_, examples) = help.split_once("Example").unwrap_or_else(|| panic!("{help}"));
            assert!(examples.contains(":\n  ") && examples.contains(&format!("qhx {}", sub.get_name())), "{help}");
        }
    }
}
