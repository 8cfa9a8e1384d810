//! Which model was probably meant by a name that names none.

use crate::{Places, builtin, cache::cached_names, source::at_path};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// How many entries of a folder are looked at.
const MOST_ENTRIES: usize = 2000;
/// The longest word that may be a slip of a name.
const MOST_NAME_LENGTH: usize = 100;
/// How many suggestions are made.
const MOST_SUGGESTIONS: usize = 3;

/// What a model that is not there was probably meant to be, the closest first: paths and names as they can be given.
pub fn suggestions(missing: &Path, places: &Places) -> Vec<String> {
    let Some(word) = missing.file_name().and_then(|name| name.to_str()) else { return Vec::new() };
    let folder = missing.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut known = folder_entries(folder);
    if folder.is_none() {
        known.push((builtin::NAME.into(), builtin::NAME.into()));
        known.extend(cached_names(places));
    }
    let mut near: Vec<(usize, String)> = known
        .into_iter()
        .filter_map(|(name, path)| Some((closeness(word, &name)?, path)))
        .filter(|(_, path)| at_path(path).is_some())
        .map(|(rank, path)| (rank, path.display().to_string()))
        .collect();
    near.sort();
    near.dedup();
    near.into_iter().map(|(_, path)| path).take(MOST_SUGGESTIONS).collect()
}

/// Names in a folder, and their paths.
fn folder_entries(folder: Option<&Path>) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(folder.unwrap_or(Path::new("."))).into_iter().flatten().flatten().take(MOST_ENTRIES);
    let path = |name: &str| folder.map_or_else(|| name.into(), |folder| folder.join(name));
    entries.filter_map(|entry| entry.file_name().into_string().ok()).map(|name| (name.clone(), path(&name))).collect()
}

/// How far a word is from a name, where it is close: 0 for the same name in another spelling, then for its beginning, then for a slip of the fingers.
fn closeness(word: &str, name: &str) -> Option<usize> {
    let length = word.chars().count();
    if length > MOST_NAME_LENGTH {
        return None;
    }
    let (word, name) = (word.to_lowercase(), name.to_lowercase());
    let stem = |text: &'_ str| text.strip_suffix(".gguf").unwrap_or(text).to_owned();
    let slips = match length {
        0..4 => 0,
        4..8 => 1,
        _ => 2,
    };
    match distance(&word, &name).min(distance(&stem(&word), &stem(&name))) {
        0 => Some(0),
        _ if length >= 3 && name.starts_with(&word) => Some(1),
        slipped if slipped <= slips => Some(1 + slipped),
        _ => None,
    }
}

/// The fewest insertions, deletions, replacements and swaps of neighbours that make one word the other.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut fewest = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                fewest = fewest.min(rows[i - 2][j - 2] + 1);
            }
            row.push(fewest);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_suggested() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("SmolLM2.gguf"), b"GGUF").unwrap();
        fs::write(folder.path().join("smollm3.txt"), b"no model").unwrap();
        let near = |name: &str| suggestions(&folder.path().join(name), &Places::none());
        let found = [folder.path().join("SmolLM2.gguf").display().to_string()];
        for name in ["smollm2.gguf", "smollm2", "smo", "smolml2.gguf", "smollm2.guf"] {
            assert_eq!(near(name), found, "{name}");
        }
        assert!(near("hello").is_empty() && near("sm").is_empty());
    }

    #[test]
    fn distances() {
        let cases = [("a", "a", 0), ("ab", "ba", 1), ("abc", "ac", 1), ("abc", "abxc", 1), ("smol", "hello", 4), ("", "ab", 2)];
        cases.iter().for_each(|(a, b, expected)| assert_eq!(distance(a, b), *expected, "{a} {b}"));
    }
}
