//! The runtime, the CPU device and the bundle know no model family: what differs between models is data.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Cut in two, so that this file does not contain them.
const NAMES: &[(&str, &str)] = &[
    ("qw", "en"),
    ("lla", "ma"),
    ("gem", "ma"),
    ("ph", "i"),
    ("phi", "moe"),
    ("smol", "lm"),
    ("mist", "ral"),
    ("mixt", "ral"),
    ("deep", "seek"),
    ("gran", "ite"),
    ("fal", "con"),
    ("ol", "mo"),
    ("inter", "nlm"),
    ("chat", "glm"),
    ("mam", "ba"),
];

#[test]
fn sources_mention_no_model_family() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate stands in a folder of crates");
    let mut files = Vec::new();
    for name in ["qhx-runtime", "qhx-text", "qhx-media", "qhx-cpu", "qhx-bundle"] {
        let source = crates.join(name).join("src");
        rust_files(&source, &mut files);
        assert!(files.iter().any(|file| file.starts_with(&source)), "no sources in {}", source.display());
    }
    let mut found = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file).expect("sources are readable");
        for (number, line) in text.lines().enumerate() {
            if let Some(name) = family_in(line) {
                found.push(format!("{}:{}: {name}: {}", file.display(), number + 1, line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "model families are named in\n{}", found.join("\n"));
}

#[test]
fn names_are_found_as_words_and_as_parts_of_identifiers() {
    let name = |n: usize| format!("{}{}", NAMES[n].0, NAMES[n].1);
    for line in
        [format!("// like {}3 does", name(0)), format!("fn {}_rope()", name(2)), format!("struct {}Config;", name(1).to_uppercase())]
    {
        assert!(family_in(&line).is_some(), "{line}");
    }
    assert!(family_in(&format!("// as in {}-3", name(3))).is_some());
    // Short names are also parts of ordinary words.
    for line in ["// graphics, Delphic, amphibian", "let sigma = dolphin_phrase;"] {
        assert_eq!(family_in(line), None, "{line}");
    }
}

/// The family that a line names. Names of up to four letters must stand alone (digits and signs around them do not matter): they occur in ordinary words.
fn family_in(line: &str) -> Option<String> {
    let line = line.to_lowercase();
    NAMES.iter().map(|(a, b)| format!("{a}{b}")).find(|name| {
        line.match_indices(name.as_str()).any(|(at, _)| {
            let letter = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphabetic());
            let alone = !letter(line[..at].chars().next_back()) && !letter(line[at + name.len()..].chars().next());
            name.len() > 4 || alone
        })
    })
}

fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder is readable") {
        let path = entry.expect("the entry is readable").path();
        if path.is_dir() {
            rust_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}
