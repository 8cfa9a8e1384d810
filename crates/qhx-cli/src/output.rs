//! Where text goes: answers and JSON to stdout, everything else to stderr. Nothing here panics when the other end is closed.
//!
//! Whatever is printed for people is made harmless to terminals here, so that nobody else has to think of it. JSON and answers that go to a pipe or a
//! file are printed as they are.

use crate::{failure::Failure, foreign::shown};
use serde::Serialize;
use std::{
    env,
    io::{self, IsTerminal, Write},
    path::Path,
};

/// Prints a report to stdout.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    print_as_is(&shown(text))
}

/// Prints to stdout at once what is ours, or is for a program and not for people. A closed pipe ends the command quietly.
pub(crate) fn print_as_is(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::nobody_reads(),
        _ => Failure::work(format!("cannot write to the output: {error}")),
    })
}

/// Commands the terminal at stdout. A constant: nothing from elsewhere can get here.
pub(crate) fn command_terminal(sequence: &'static str) -> Result<(), Failure> {
    print_as_is(sequence)
}

/// Prints the one object of `--json`.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value).map_err(|error| Failure::work(format!("cannot write JSON: {error}")))?;
    print_as_is(&(text + "\n"))
}

/// Prints a line to stderr.
pub(crate) fn note(line: &str) {
    // With stderr closed there is nobody to tell.
    let _ = writeln!(io::stderr(), "{}", shown(line));
}

/// Prints a line to stderr that a person may overlook.
pub(crate) fn dim_note(line: &str) {
    let (dim, usual) = if colours() { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
    let _ = writeln!(io::stderr(), "{dim}{}{usual}", shown(line));
}

/// Whether stderr shows colours: a terminal, unless `NO_COLOR` is set.
fn colours() -> bool {
    io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// An answer as it is streamed to stdout.
pub(crate) struct Stream {
    terminal: bool,
    ends_line: bool,
    failure: Option<Failure>,
}

impl Stream {
    pub(crate) fn new() -> Self {
        Self { terminal: io::stdout().is_terminal(), ends_line: true, failure: None }
    }

    /// Prints a piece. After a failure it prints nothing more: `false`.
    pub(crate) fn push(&mut self, text: &str) -> bool {
        if self.failure.is_none() && !text.is_empty() {
            self.ends_line = text.ends_with('\n');
            // A model may write anything; a terminal must not obey it.
            let printed = if self.terminal { print(text) } else { print_as_is(text) };
            self.failure = printed.err();
        }
        self.failure.is_none()
    }

    /// Ends the last line and tells a failure.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        if !self.ends_line {
            self.push("\n");
        }
        self.failure.map_or(Ok(()), Err)
    }
}

/// Whether a file can be written there, as far as that can be told before the work is done.
pub(crate) fn check_place(path: &Path) -> Result<(), Failure> {
    qhx_bundle::files::check(path).map_err(|error| Failure::work(format!("cannot write {}: {error}", path.display())))
}
