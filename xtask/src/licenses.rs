//! The notices of the crates in the binary, which `qhx licenses` prints, from the crates themselves.

use crate::{
    Failure,
    graph::{self, Id, Package},
    policy::satisfied,
    root,
};
use serde_json::json;
use std::{collections::BTreeMap, fs, path::PathBuf};

/// The systems that the binary is built for: each links some crates of its own.
const SYSTEMS: [&str; 5] =
    ["aarch64-apple-darwin", "aarch64-unknown-linux-gnu", "x86_64-apple-darwin", "x86_64-pc-windows-msvc", "x86_64-unknown-linux-gnu"];
/// How the names of files with licences and notices begin.
const NAMES: [&str; 6] = ["license", "licence", "copying", "copyright", "notice", "unlicense"];
/// How a licence begins that is the same for everyone but for what stands before it.
const COMMON: [(&str, &str); 2] = [
    ("MIT", "Permission is hereby granted, free of charge, to any person obtaining a copy"),
    ("BSL-1.0", "Permission is hereby granted, free of charge, to any person or organization"),
];

/// Writes the file.
pub(crate) fn licenses() -> Result<(), Failure> {
    fs::write(file(), generate()?).map_err(|e| format!("cannot write {}: {e}", file().display()))
}

/// Whether the file is the one of Cargo.lock.
pub(crate) fn check() -> Result<(), Failure> {
    match fs::read_to_string(file()).unwrap_or_default() == generate()? {
        true => Ok(()),
        false => Err(format!("{} is not of these crates: run `cargo xtask licenses`", file().display())),
    }
}

fn file() -> PathBuf {
    root().join("crates/qhx-cli/licenses.json")
}

/// Texts, each once: those that differ in line breaks and spaces only are the same.
#[derive(Default)]
struct Texts {
    all: Vec<String>,
    places: BTreeMap<String, usize>,
}

impl Texts {
    fn place(&mut self, text: &str) -> usize {
        *self.places.entry(words(text)).or_insert_with(|| {
            let lines: Vec<&str> = text.trim_matches(['\r', '\n']).lines().map(str::trim_end).collect();
            self.all.push(lines.join("\n"));
            self.all.len() - 1
        })
    }
}

fn generate() -> Result<String, Failure> {
    let packages = graph::packages()?;
    let mut selection = vec!["--package", "qhx-cli", "--edges", "normal,no-proc-macro"];
    SYSTEMS.iter().for_each(|system| selection.extend(["--target", system]));
    let linked: Vec<(Id, &Package)> = graph::tree(&selection)?
        .into_keys()
        .filter_map(|id| packages.get(&id).map(|package| (id, package)))
        .filter(|(_, package)| package.source.is_some())
        .collect();
    let mut texts = Texts::default();
    let mut crates = Vec::new();
    let mut without = Vec::new();
    for ((name, version), package) in linked {
        let (mut copyright, mut places) = (Vec::new(), Vec::new());
        for text in notices(package)? {
            let (before, text) = text.split_at(common(&text).map_or(0, |(at, _)| at));
            copyright.extend(before.lines().map(str::trim).filter(|line| !is_title(line)).map(str::to_owned));
            places.push(texts.place(text));
        }
        places.sort_unstable();
        places.dedup();
        copyright.sort();
        copyright.dedup();
        if places.is_empty() {
            without.push((crates.len(), name.clone(), package));
        }
        crates.push(json!({ "name": name, "version": version, "license": package.license, "copyright": copyright, "texts": places }));
    }
    // A package without a text has the one that its licence has elsewhere.
    for (place, name, package) in without {
        let common = COMMON.iter().find(|(license, _)| satisfied(&package.license, &[*license]) == Some(true));
        let text = common.and_then(|(_, beginning)| texts.places.iter().find(|(text, _)| text.starts_with(beginning)));
        let (_, text) = text.ok_or_else(|| format!("{name}: its package has no text of its licence `{}`", package.license))?;
        crates[place]["texts"] = json!([text]);
        crates[place]["copyright"] = json!(package.authors);
    }
    let all = json!({ "crates": crates, "texts": texts.all });
    serde_json::to_string_pretty(&all).map(|text| text + "\n").map_err(|e| e.to_string())
}

/// The texts that a binary with this crate must carry: where its licence leaves a choice, that of MIT.
fn notices(package: &Package) -> Result<Vec<String>, Failure> {
    let io = |e: std::io::Error| format!("{}: {e}", package.folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(&package.folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        if path.is_file() && NAMES.iter().any(|beginning| name.starts_with(beginning)) {
            files.push((name, String::from_utf8_lossy(&fs::read(&path).map_err(io)?).into_owned()));
        }
    }
    files.sort();
    let is_mit = |text: &str| common(text).is_some_and(|(_, license)| license == "MIT");
    if satisfied(&package.license, &["MIT"]) == Some(true) && files.iter().any(|(_, text)| is_mit(text)) {
        files.retain(|(name, text)| is_mit(text) || name.starts_with("notice") || name.starts_with("copyright"));
    }
    Ok(files.into_iter().map(|(_, text)| text).collect())
}

/// Where one of the common licences begins in a text, and which.
fn common(text: &str) -> Option<(usize, &'static str)> {
    let at = text.find("Permission is hereby granted")?;
    let rest = words(&text[at..]);
    COMMON.iter().find(|(_, beginning)| rest.starts_with(beginning)).map(|(license, _)| (at, *license))
}

/// A text without its line breaks.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Lines before a common licence that name nobody.
fn is_title(line: &str) -> bool {
    let line = line.to_ascii_lowercase();
    line.trim_matches(['#', '=', '-', ' ']).is_empty()
        || ["mit license", "boost software license"].iter().any(|title| line.contains(title)) && !line.contains("copyright")
}
