//! What there is in the repository.

use crate::docs::markdown::Document;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// The repository's files.
pub(crate) struct Sources {
    /// Files and folders, from the root.
    paths: BTreeSet<String>,
    /// The text of code, scripts and settings.
    texts: BTreeMap<String, String>,
    /// All names in them, and in the names of files.
    pub(crate) names: BTreeSet<String>,
}

/// Folders with sources; what else is in the repository's folder was built or fetched.
const FOLDERS: [&str; 12] =
    [".cargo", "bench", "configs", "crates", "demo", "docs", "fixtures", "fuzz", "oracle", "packaging", "tests", "xtask"];
/// What is not in the repository though it may lie in one of them.
const IGNORED: [&str; 6] = ["target", "__pycache__", ".cache", "corpus", "artifacts", ".git"];

impl Sources {
    pub(crate) fn read(root: &Path) -> Self {
        let mut sources = Self { paths: BTreeSet::new(), texts: BTreeMap::new(), names: BTreeSet::new() };
        for entry in fs::read_dir(root).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if FOLDERS.contains(&name.as_str()) || entry.file_type().unwrap().is_file() {
                sources.add(&entry.path(), name);
            }
        }
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let said = sources.texts.iter().filter(|(path, _)| !path.ends_with(".md")).map(|(_, text)| text);
        let names = said.chain(&sources.paths).flat_map(|text| text.split(|c| !is_name(c))).filter(|name| name.contains('_'));
        sources.names = names.map(str::to_owned).collect();
        sources
    }

    fn add(&mut self, place: &Path, path: String) {
        if place.is_dir() {
            for entry in fs::read_dir(place).unwrap() {
                let entry = entry.unwrap();
                let name = entry.file_name().into_string().unwrap();
                if !IGNORED.contains(&name.as_str()) {
                    self.add(&entry.path(), format!("{path}/{name}"));
                }
            }
        } else if !path.starts_with("crates/qhx-cli/tests/suite/docs/") && fs::metadata(place).is_ok_and(|about| about.len() < 1 << 20) {
            // This test's own files must not vouch for anything; files that are not text hold no names.
            if let Ok(text) = fs::read_to_string(place) {
                self.texts.insert(path.clone(), text);
            }
        }
        self.paths.insert(path);
    }

    /// The documents that are checked.
    pub(crate) fn documents(&self) -> Vec<Document> {
        let documents = self.texts.iter().filter(|(path, _)| path.ends_with(".md"));
        let current = |path: &str, text: &str| match path {
            // What earlier releases had may be gone.
            "CHANGELOG.md" => text.match_indices("\n## ").nth(1).map_or(text, |(end, _)| &text[..end]).to_owned(),
            _ => text.to_owned(),
        };
        documents.map(|(path, text)| Document::new(path, current(path, text))).collect()
    }

    /// A text file.
    pub(crate) fn text(&self, path: &str) -> &str {
        self.texts.get(path).unwrap_or_else(|| panic!("there is no {path}"))
    }

    /// Whether there is a file or folder, where `*` is any part of a name.
    pub(crate) fn has(&self, pattern: &str) -> bool {
        if pattern.contains('*') { self.paths.iter().any(|path| matches(path, pattern)) } else { self.paths.contains(pattern) }
    }

    /// Whether there is a file or folder as documents call it: from the root, from a crate, or, for scripts and modules, by the end of its path. Capitals
    /// stand for any name.
    pub(crate) fn has_named(&self, name: &str) -> bool {
        let mut pattern = String::new();
        for c in name.chars() {
            match c.is_ascii_uppercase() {
                true if pattern.ends_with('*') => {}
                true => pattern.push('*'),
                false => pattern.push(c),
            }
        }
        let spellings = [name, &pattern].map(|name| [name.to_owned(), format!("crates/{name}"), format!("crates/{name}.rs")]);
        let by_its_end = is_source(name) && self.paths.iter().any(|path| ends_with(path, &pattern));
        by_its_end || spellings.iter().flatten().any(|spelling| self.has(spelling))
    }

    /// Whether code or a script names a variable of the environment.
    pub(crate) fn quoted(&self, name: &str) -> bool {
        let quotes = [format!("\"{name}\""), format!("'{name}'")];
        self.texts.iter().any(|(path, text)| is_source(path) && quotes.iter().any(|quoted| text.contains(quoted)))
    }

    /// Whether a script takes a flag.
    pub(crate) fn scripts_have(&self, flag: &str) -> bool {
        let quoted = format!("\"{flag}\"");
        let takes_flags = |path: &str| path.ends_with(".py") || path == "crates/qhx-attack/src/options.rs";
        self.texts.iter().any(|(path, text)| takes_flags(path) && text.contains(&quoted))
    }

    /// Whether a file or folder of tests (`qhx-cli/tests/suite/npu`) has a test or a module of that name.
    pub(crate) fn defines(&self, place: &str, name: &str) -> bool {
        let place = format!("crates/{place}");
        let (function, module) = (format!("fn {name}("), format!("/{name}.rs"));
        let within = |path: &str| path.strip_prefix(&place).is_some_and(|rest| rest.is_empty() || rest == ".rs" || rest.starts_with('/'));
        self.texts.iter().any(|(path, text)| within(path) && (text.contains(&function) || path.ends_with(&module)))
    }
}

/// Whether a word in code is meant as a file or folder of the repository.
pub(crate) fn is_of_repository(word: &str) -> bool {
    if word.contains(['$', '…', '~', '<', ':', '\\']) || word.starts_with('/') {
        return false;
    }
    match word.split_once('/') {
        Some((first, _)) => FOLDERS.contains(&first) || first.starts_with("qhx-") || is_source(word),
        None => is_source(word),
    }
}

/// Scripts and modules: names that say by themselves what they are.
fn is_source(path: &str) -> bool {
    [".rs", ".py", ".sh"].iter().any(|end| path.ends_with(end) && path.len() > end.len())
}

/// A path beside a document's.
pub(crate) fn beside(document: &str, link: &str) -> String {
    let mut parts: Vec<&str> = document.split('/').collect();
    parts.pop();
    for part in link.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

fn ends_with(path: &str, pattern: &str) -> bool {
    matches(path, pattern) || path.match_indices('/').any(|(at, _)| matches(&path[at + 1..], pattern))
}

/// `*` is any part of one name.
fn matches(path: &str, pattern: &str) -> bool {
    match pattern.split_once('*') {
        None => path == pattern,
        Some((before, after)) => path.strip_prefix(before).is_some_and(|rest| {
            let name = rest.find('/').unwrap_or(rest.len());
            (0..=name).filter(|&end| rest.is_char_boundary(end)).any(|end| matches(&rest[end..], after))
        }),
    }
}
