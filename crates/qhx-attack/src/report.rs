//! What was found: a table or JSON, and a folder for each case that failed.

use crate::{
    classes::Class,
    files::write_folder,
    seeds::Seeds,
    supervise::{Failure, Tally},
    worker::{Order, is_for_the_binary},
};
use serde_json::{Value, json};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// So many failing cases of a class are kept and shown; all are counted.
const KEPT: usize = 10;

/// A class and what came of it.
pub(crate) struct Result {
    /// The class.
    pub(crate) class: &'static Class,
    /// Its counts.
    pub(crate) tally: Tally,
    /// How long it took.
    pub(crate) seconds: f64,
}

/// Keeps the files of failing cases, each with what happened and how to repeat it; says where.
pub(crate) fn keep(order: &Order, failures: &[Failure], seeds: &Seeds, folder: &Path) -> io::Result<Vec<PathBuf>> {
    failures.iter().take(KEPT).map(|failure| keep_one(order, failure.number, &failure.problem, seeds, folder)).collect()
}

/// Keeps the files of one case.
pub(crate) fn keep_one(order: &Order, number: u64, problem: &str, seeds: &Seeds, folder: &Path) -> io::Result<PathBuf> {
    let (name, seed) = (order.class.name, order.seed);
    let place = folder.join(format!("{name}-{seed}-{number}"));
    let case = order.case(seeds, number);
    write_folder(&place.join("case"), &case.files)?;
    let run_by = match is_for_the_binary(&case, number) {
        true => format!("qhx {}", case.arguments.join(" ")),
        false => "the libraries".to_owned(),
    };
    let text = format!("{problem}\n\nrun by: {run_by}\nagain:  cargo xtask attack {name} --seed {seed} --case {number}\n");
    fs::write(place.join("report.txt"), text)?;
    Ok(place)
}

/// The counts of all classes, for people.
pub(crate) fn table(results: &[Result]) -> String {
    let mut text = format!("{:<12} {:>8} {:>9} {:>8} {:>9} {:>8}\n", "class", "cases", "accepted", "refused", "failures", "cases/s");
    for Result { class, tally, seconds } in results {
        let (accepted, refused, failures) = (tally.accepted, tally.refused, tally.failures.len());
        let speed = tally.cases as f64 / seconds;
        text += &format!("{:<12} {:>8} {accepted:>9} {refused:>8} {failures:>9} {speed:>8.0}\n", class.name, tally.cases);
    }
    text
}

/// The same for programs.
pub(crate) fn as_json(seed: u64, results: &[Result]) -> Value {
    let classes: Vec<Value> = results
        .iter()
        .map(|Result { class, tally, seconds }| {
            let failures: Vec<Value> =
                tally.failures.iter().map(|failure| json!({ "case": failure.number, "problem": failure.problem })).collect();
            json!({
                "class": class.name, "cases": tally.cases, "accepted": tally.accepted, "refused": tally.refused,
                "failures": failures, "seconds": seconds, "cases_per_second": tally.cases as f64 / seconds,
            })
        })
        .collect();
    json!({ "seed": seed, "classes": classes })
}
