//! A command that must end by itself, and how it may.

use crate::limits::{Watch, wait};
use qhx_attack::probes::Outcome;
use serde_json::Value;
use std::{
    fs::{self, File},
    io,
    path::Path,
    process::{Command, ExitStatus},
    time::Duration,
};

/// The most that a command may say on stderr.
const MOST_STDERR: usize = 64 << 10;

/// Runs a command that must end by itself, and what it said on stderr.
pub(crate) fn run_to_its_end(
    command: &mut Command,
    scratch: &Path,
    limit: Duration,
    wants_json: bool,
) -> Result<(Outcome, Vec<u8>), String> {
    let cannot = |error: io::Error| format!("the harness cannot work with its files: {error}");
    let [stdout, stderr] = ["stdout", "stderr"].map(|name| scratch.join(name));
    command.stdout(File::create(&stdout).map_err(cannot)?).stderr(File::create(&stderr).map_err(cannot)?);
    let mut child = command.spawn().map_err(cannot)?;
    let watch = Watch::new(child.id(), limit);
    let ended = wait(&mut child, &watch);
    let (stdout, stderr) = (fs::read(stdout).map_err(cannot)?, fs::read(stderr).map_err(cannot)?);
    match ended.and_then(|status| judge(status, &stdout, &stderr, wants_json)) {
        Ok(outcome) => Ok((outcome, stderr)),
        Err(problem) => Err(shown(&problem, &stderr)),
    }
}

/// A problem with what was said on stderr.
pub(crate) fn shown(problem: &str, stderr: &[u8]) -> String {
    format!("{problem}; stderr: {}", String::from_utf8_lossy(&stderr[..stderr.len().min(4000)]).escape_debug())
}

/// What a command is asked to make, and the name of one that failed its gate.
pub(crate) fn is_output(name: &str) -> bool {
    ["made", "made.rejected", ".made.lock"].contains(&name)
}

/// Whether a command ended as every command must.
fn judge(status: ExitStatus, stdout: &[u8], stderr: &[u8], wants_json: bool) -> Result<Outcome, String> {
    let code = match status.code() {
        Some(code @ 0..=2) => code,
        _ => return Err(format!("ended with {status}")),
    };
    let Ok(said) = std::str::from_utf8(stderr) else { return Err("stderr is not UTF-8".into()) };
    if said.contains("panicked at") {
        return Err("panicked".into());
    }
    if let Some(control) = said.chars().find(|&character| is_raw_control(character)) {
        return Err(format!("printed the control character {control:?}"));
    }
    if stderr.len() > MOST_STDERR {
        return Err(format!("said {} bytes on stderr", stderr.len()));
    }
    if code == 0 && wants_json && !matches!(serde_json::from_slice(stdout), Ok(Value::Object(_))) {
        return Err("stdout is not one JSON object".into());
    }
    match code {
        0 => Ok(Ok("exit code 0".into())),
        _ if said.trim().is_empty() => Err(format!("ended with exit code {code} and said nothing")),
        _ => Ok(Err(said.to_owned())),
    }
}

/// What a terminal would obey, or what would show a text in another order than it is in.
fn is_raw_control(character: char) -> bool {
    (character.is_control() && !matches!(character, '\n' | '\t')) || matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn judged(raw: i32, stdout: &str, stderr: &str) -> Result<Outcome, String> {
        judge(ExitStatus::from_raw(raw), stdout.as_bytes(), stderr.as_bytes(), true)
    }

    #[test]
    fn good_behaviour_passes() {
        assert!(matches!(judged(0, "{}\n", ""), Ok(Ok(_))));
        assert!(matches!(judged(1 << 8, "", "error: é is not a bundle\n"), Ok(Err(_))));
        assert!(matches!(judged(2 << 8, "", "usage\n"), Ok(Err(_))));
    }

    #[test]
    fn bad_behaviour_is_named() {
        let long = "x".repeat(MOST_STDERR + 1);
        for (raw, stdout, stderr, expected) in [
            (11, "", "", "signal"),
            (101 << 8, "", "error", "exit status: 101"),
            (1 << 8, "", "thread 'main' panicked at src/x.rs", "panicked"),
            (1 << 8, "", "error: \u{1b}[2J", "control"),
            (1 << 8, "", "error: \u{202e}", "control"),
            (1 << 8, "", &long, "bytes on stderr"),
            (1 << 8, "", "", "said nothing"),
            (0, "", "", "JSON"),
            (0, "{}{}", "", "JSON"),
        ] {
            let problem = judged(raw, stdout, stderr).unwrap_err();
            assert!(problem.contains(expected), "{problem}");
        }
    }
}
