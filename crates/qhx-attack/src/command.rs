//! Cases for the `qhx` binary: it is given the files as a user would, and judged from outside.

use crate::{
    classes::{Bench, Case, Outcome},
    ending::{is_output, run_to_its_end, shown},
    files::{empty_folder, names_in, write_folder},
    limits::{FOLDERS, contained},
};
use std::io;

/// Runs `qhx` on a case. The error is what is wrong with how it behaved.
pub(crate) fn run(case: &Case, bench: &Bench) -> Result<Outcome, String> {
    let cannot = |error: io::Error| format!("the harness cannot work with its files: {error}");
    let at = |name: &str| bench.scratch.join(name);
    for folder in FOLDERS.into_iter().chain(["out"]) {
        empty_folder(&at(folder)).map_err(cannot)?;
    }
    write_folder(&at("case"), &case.files).map_err(cannot)?;
    let before = names_in(&at("case")).map_err(cannot)?;

    let fill = |argument: &String| {
        let place = |folder: std::path::PathBuf| folder.to_string_lossy().into_owned();
        let argument = argument.replace("{case}", &place(at("case"))).replace("{out}", &place(at("out").join("made")));
        argument.replace("{bundles}", &place(bench.bundles.clone()))
    };
    let mut command = contained(&bench.qhx, &bench.scratch);
    command.args(case.arguments.iter().map(fill));
    let wants_json = case.arguments.iter().any(|argument| argument == "--json");
    let (outcome, stderr) = run_to_its_end(&mut command, &bench.scratch, bench.limit, wants_json)?;

    let mut left: Vec<String> = Vec::new();
    for folder in FOLDERS {
        left.extend(names_in(&at(folder)).map_err(cannot)?);
    }
    left.extend(names_in(&at("out")).map_err(cannot)?.into_iter().filter(|name| !is_output(name)));
    left.extend(names_in(&at("case")).map_err(cannot)?.into_iter().filter(|name| !before.contains(name)));
    match left.is_empty() {
        true => Ok(outcome),
        false => Err(shown(&format!("left files behind: {}", left.join(", ")), &stderr)),
    }
}
