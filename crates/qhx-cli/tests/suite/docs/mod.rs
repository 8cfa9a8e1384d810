//! What the documents say exists: every file, link, command, flag, variable, test and name that they mention.

mod markdown;
mod sources;

use markdown::{Code, Document};
use sources::Sources;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    path::Path,
    process::Command,
    sync::LazyLock,
};

static SOURCES: LazyLock<Sources> = LazyLock::new(|| Sources::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")));
static DOCUMENTS: LazyLock<Vec<Document>> = LazyLock::new(|| SOURCES.documents());
/// The flags of each command of `qhx`, from its own help.
static COMMANDS: LazyLock<BTreeMap<String, BTreeSet<String>>> = LazyLock::new(commands);

/// Fails with all that a check found.
fn report(problems: impl IntoIterator<Item = String>) {
    let mut text = String::new();
    for problem in problems {
        let _ = writeln!(text, "{problem}");
    }
    assert!(text.is_empty(), "the documents speak of what does not exist:\n{text}");
}

/// What `qhx help …` says; `None` if there is no such command.
fn help(of: &[&str]) -> Option<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_qhx")).arg("help").args(of).output().unwrap();
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
}

fn commands() -> BTreeMap<String, BTreeSet<String>> {
    let whole = help(&[]).expect("`qhx help` lists the commands");
    let listed = whole.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = listed.filter(|line| line.starts_with("  ") && !line.starts_with("   ")).filter_map(|line| line.split_whitespace().next());
    let commands: BTreeMap<_, _> =
        names.map(|name| (name.to_owned(), flags_of(name).unwrap_or_else(|| panic!("`qhx help {name}` fails")))).collect();
    assert!(commands.len() > 10, "the commands cannot be told from:\n{whole}");
    commands
}

/// The flags of a command, which may be hidden from the list; `None` if there is no such command.
fn flags_of(command: &str) -> Option<BTreeSet<String>> {
    help(&[command]).map(|text| flags_in(&text))
}

/// The flags that a help text defines: at the beginning of a line.
fn flags_in(help: &str) -> BTreeSet<String> {
    let lines = help.lines().filter(|line| line.trim_start().starts_with('-'));
    let words = lines.flat_map(|line| line.split([' ', ',', '=', '[', '<']));
    words.filter(|word| word.starts_with('-')).map(str::to_owned).chain(["--help".into(), "--version".into(), "-h".into()]).collect()
}

/// The flags among words, as they are spelled without a value.
fn flags<'a>(words: impl IntoIterator<Item = &'a str>) -> impl Iterator<Item = &'a str> {
    let spelled = |word: &'a str| {
        let end = word.char_indices().find(|(_, c)| !(c.is_ascii_alphanumeric() || *c == '-')).map_or(word.len(), |(at, _)| at);
        &word[..end]
    };
    let is_flag = |word: &&str| match word.strip_prefix("--") {
        Some(name) => name.starts_with(|c: char| c.is_ascii_lowercase()),
        None => word.len() == 2 && word.starts_with('-') && word[1..].starts_with(|c: char| c.is_ascii_alphabetic()),
    };
    words.into_iter().map(move |word| spelled(word.trim_start_matches(['[', '(']))).filter(is_flag)
}

/// What stands behind `qhx` or `cargo xtask` in a piece of code, word by word, for each time that one of them is called.
fn calls(code: &Code, program: &[&str]) -> Vec<Vec<String>> {
    let mut calls = Vec::new();
    for line in code.lines() {
        let line = if line.starts_with('#') { "" } else { line.split(" #").next().unwrap_or_default() };
        let words: Vec<&str> = line.split_whitespace().map(|word| word.trim_matches(['"', '\'', '`', '(', ')', ','])).collect();
        let is_program = |found: &&[&str]| {
            let first = found[0].rsplit('/').next().unwrap_or_default();
            first == program[0] && found[1..] == program[1..]
        };
        for (place, _) in words.windows(program.len()).enumerate().filter(|(_, found)| is_program(found)) {
            let ends = |word: &&&str| ["&&", "|", ";", "||", "then"].contains(*word);
            let rest = &words[place + program.len()..];
            calls.push(rest.iter().take_while(|word| !ends(word)).map(|word| (*word).to_owned()).collect());
        }
    }
    calls
}

/// Whether a word stands for any other: `NAME`, `…`, `COMMAND`.
fn is_placeholder(word: &str) -> bool {
    word.is_empty()
        || word.contains('…')
        || word.starts_with(['$', '<', '[', '-'])
        || word.chars().all(|c| c.is_ascii_uppercase() || c == '_')
}

#[test]
fn commands_and_their_flags() {
    let mut problems = Vec::new();
    for code in DOCUMENTS.iter().flat_map(Document::code) {
        // `cargo run -- COMMAND` is `qhx COMMAND`.
        let is_ours = |words: &Vec<String>| words.iter().all(|word| !["--example", "-p", "--package"].contains(&word.as_str()));
        let by_cargo = calls(code, &["cargo", "run"]).into_iter().filter(is_ours);
        let by_cargo = by_cargo.filter_map(|words| Some(words.split(|word| word == "--").nth(1)?.to_vec()));
        for words in calls(code, &["qhx"]).into_iter().chain(by_cargo) {
            let Some((name, rest)) = words.split_first().filter(|(name, _)| !is_placeholder(name)) else { continue };
            match COMMANDS.get(name).cloned().or_else(|| flags_of(name)) {
                None => problems.push(format!("{}: `qhx {name}` is no command", code.place())),
                Some(known) => {
                    let unknown = flags(rest.iter().map(String::as_str)).filter(|flag| !known.contains(*flag));
                    problems.extend(unknown.map(|flag| format!("{}: `qhx {name}` has no flag {flag}", code.place())));
                }
            }
        }
    }
    report(problems);
}

#[test]
fn flags_alone() {
    let of_qhx: BTreeSet<&str> = COMMANDS.values().flatten().map(String::as_str).collect();
    let spans = DOCUMENTS.iter().flat_map(Document::code).filter(|code| !code.is_block && code.text.starts_with('-'));
    report(spans.flat_map(|code| {
        let known = |flag: &&str| of_qhx.contains(flag) || FLAGS_OF_CARGO.contains(flag) || SOURCES.scripts_have(flag);
        let unknown: Vec<&str> = flags(code.text.split_whitespace()).filter(|flag| !known(flag)).collect();
        unknown.into_iter().map(|flag| format!("{}: no command has a flag {flag}", code.place())).collect::<Vec<_>>()
    }));
}

/// Named alone where a test of the workspace is meant.
const FLAGS_OF_CARGO: [&str; 2] = ["--test", "--example"];

#[test]
fn chores() {
    let main = SOURCES.text("xtask/src/main.rs");
    let attack = SOURCES.text("crates/qhx-attack/src/options.rs");
    let help = main.split_once("HELP: &str = \"").and_then(|(_, rest)| rest.split_once("\";")).unwrap().0;
    let known: BTreeSet<&str> = help
        .lines()
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    let mut problems = Vec::new();
    for code in DOCUMENTS.iter().flat_map(Document::code) {
        for words in calls(code, &["cargo", "xtask"]) {
            let Some((name, rest)) = words.split_first().filter(|(name, _)| !is_placeholder(name)) else { continue };
            if !known.contains(name.as_str()) {
                problems.push(format!("{}: `cargo xtask {name}` is no chore", code.place()));
            }
            if name == "attack" {
                let unknown = flags(rest.iter().map(String::as_str)).filter(|flag| !attack.contains(&format!("\"{flag}\"")));
                problems.extend(unknown.map(|flag| format!("{}: `cargo xtask attack` has no flag {flag}", code.place())));
            }
        }
    }
    report(problems);
}

#[test]
fn targets_of_cargo() {
    let mut problems = Vec::new();
    for code in DOCUMENTS.iter().flat_map(Document::code) {
        for line in code.lines().filter(|line| line.contains("cargo ") || line.starts_with("--")) {
            let words: Vec<&str> = line.split_whitespace().collect();
            for pair in words.windows(2).filter(|pair| !is_placeholder(pair[1])) {
                let name = pair[1].trim_end_matches(['`', ',', ')']);
                let exists = match pair[0] {
                    "--test" => SOURCES.has(&format!("crates/*/tests/{name}.rs")) || SOURCES.has(&format!("crates/*/tests/{name}/main.rs")),
                    "--example" => SOURCES.has(&format!("crates/*/examples/{name}.rs")),
                    "-p" | "--package" if line.contains("cargo ") => SOURCES.has(&format!("crates/{name}/Cargo.toml")),
                    _ => true,
                };
                if !exists {
                    problems.push(format!("{}: there is no {} {name}", code.place(), pair[0]));
                }
            }
        }
    }
    report(problems);
}

#[test]
fn files() {
    report(DOCUMENTS.iter().flat_map(Document::code).flat_map(|code| {
        let words = code.text.split(|c: char| c.is_whitespace() || "\"'`(){}[],;|=".contains(c));
        let words = words.map(|word| word.trim_start_matches("./").trim_end_matches(['.', ':', '/']));
        let missing = words.filter(|word| sources::is_of_repository(word) && !SOURCES.has_named(word));
        missing.map(|word| format!("{}: there is no file {word}", code.place())).collect::<Vec<_>>()
    }));
}

#[test]
fn links() {
    let mut problems = Vec::new();
    for document in DOCUMENTS.iter() {
        for (line, target) in document.links() {
            if target.contains("://") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((target.as_str(), ""));
            let path = if file.is_empty() { document.path.clone() } else { sources::beside(&document.path, file) };
            if !SOURCES.has(&path) {
                problems.push(format!("{}:{line}: the link {target} leads nowhere", document.path));
            } else if !anchor.is_empty() {
                let there = DOCUMENTS.iter().find(|other| other.path == path).map(Document::anchors);
                if !there.is_some_and(|anchors| anchors.contains(anchor)) {
                    problems.push(format!("{}:{line}: {path} has no heading for #{anchor}", document.path));
                }
            }
        }
    }
    report(problems);
}

#[test]
fn variables_of_the_environment() {
    report(DOCUMENTS.iter().flat_map(|document| {
        let names = document.text.split(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'));
        let unknown: BTreeSet<&str> = names.filter(|name| name.starts_with("QHX_") && !SOURCES.quoted(name)).collect();
        unknown.into_iter().map(|name| format!("{}: nothing reads {name}", document.path)).collect::<Vec<_>>()
    }));
}

/// Benchmarks measure what the README's commands make, which is gated.
#[test]
fn scripts_that_measure_forge_with_gates() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let scripts: Vec<_> = files.filter(|path| path.extension().is_some_and(|kind| kind == "py")).collect();
    let forging = scripts.iter().filter(|path| std::fs::read_to_string(path).unwrap().contains("\"forge\"")).count();
    assert!(forging > 5, "only {forging} scripts were found to forge");
    report(scripts.iter().filter_map(|path| {
        let words: String = std::fs::read_to_string(path).unwrap().replace([' ', '\n', '"', '\'', ',', '='], "");
        words.contains("--gatenone").then(|| format!("{} forges without a gate", path.display()))
    }));
}

/// `some_name` in code is a name in the sources: of a function, a field, a test, a file.
#[test]
fn names() {
    report(DOCUMENTS.iter().flat_map(Document::code).filter(|code| !code.is_block).filter_map(|code| {
        let name = code.text.as_str();
        let is_name = name.contains('_') && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        (is_name && !SOURCES.names.contains(name) && !COMPOSED.contains(&name))
            .then(|| format!("{}: nothing is called {name}", code.place()))
    }));
}

/// Names that the sources put together: an encoding's kind, its block and `min`.
const COMPOSED: [&str; 1] = ["i8_block32_min"];

/// Where docs/status.md says which tests show a claim (`` `qhx-cli/tests/suite/npu`: `edges`, `bundles` ``), they are there.
#[test]
fn tests_that_show_claims() {
    let status = DOCUMENTS.iter().find(|document| document.path == "docs/status.md").unwrap();
    let mut problems = Vec::new();
    let mut found = 0;
    for (number, line) in status.text.lines().enumerate() {
        let Some(how) = line.strip_prefix('|').and_then(|row| row.split(" | ").nth(2)) else { continue };
        for part in how.trim_end_matches([' ', '|']).split(';') {
            let Some((place, names)) = part.split_once("`: ").map(|(place, names)| (place.trim_start_matches([' ', '`']), names)) else {
                continue;
            };
            if !place.contains("/tests") {
                continue;
            }
            for name in names.split(',').map(|name| name.trim().trim_matches(['`', ')'])).filter(|name| is_test_name(name)) {
                found += 1;
                if !SOURCES.defines(place, name) {
                    problems.push(format!("docs/status.md:{}: {place} has no test or module {name}", number + 1));
                }
            }
        }
    }
    report(problems);
    assert!(found > 15, "only {found} names of tests were recognised");
}

fn is_test_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}
