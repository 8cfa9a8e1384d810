//! Whether a word was meant as a model, and which one: for a single argument that could be a prompt, and for models that are not there.

use crate::{
    builtin,
    model_ref::{cached_names, kind_of},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// How the names of published checkpoints begin.
const FAMILIES: [&str; 12] =
    ["smol", "smollm", "tinyllama", "llama", "qwen", "phi", "phimoe", "gemma", "mistral", "mixtral", "deepseek", "gpt"];
/// What files of models end in.
const ENDINGS: [&str; 3] = [".gguf", ".safetensors", ".json"];
/// How many entries of a folder are looked at.
const MOST_ENTRIES: usize = 2000;
/// The longest word that may be a slip of a name.
const MOST_NAME_LENGTH: usize = 100;
/// How many suggestions are made.
const MOST_SUGGESTIONS: usize = 3;

/// Whether an argument that names no model was meant as one, and not as a prompt: it has the shape of a path, of a file or of a checkpoint's name, or is close to the
/// name of a model that is there.
pub(crate) fn looks_like_model(argument: &str) -> bool {
    let begins_as_path = ["./", "../", "/", "~/", ".\\", "..\\"].iter().any(|start| argument.starts_with(start)) || has_drive(argument);
    let ends_as_file = ENDINGS.iter().any(|ending| argument.to_ascii_lowercase().ends_with(ending));
    if argument.contains(char::is_whitespace) {
        // A sentence may mention a file; a file with spaces in its name is given by its path.
        return begins_as_path && ends_as_file;
    }
    begins_as_path
        || ends_as_file
        || is_repository(argument)
        || is_checkpoint_name(argument)
        || !suggestions(Path::new(argument)).is_empty()
}

/// `org/name`, as the Hugging Face hub and relative paths have it; not `1/2`, `and/or?`.
pub(crate) fn is_repository(argument: &str) -> bool {
    let is_part =
        |part: &str| part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) && part.chars().any(|c| c.is_ascii_alphabetic());
    argument.contains('/') && argument.trim_end_matches('/').split('/').all(is_part)
}

/// What a model that is not there was probably meant to be, the closest first: paths and names as they can be given.
pub(crate) fn suggestions(missing: &Path) -> Vec<String> {
    let Some(word) = missing.file_name().and_then(|name| name.to_str()) else { return Vec::new() };
    let folder = missing.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut known = folder_entries(folder);
    if folder.is_none() {
        known.push((builtin::NAME.into(), builtin::NAME.into()));
        known.extend(cached_names());
    }
    let mut near: Vec<(usize, String)> = known
        .into_iter()
        .filter_map(|(name, path)| Some((closeness(word, &name)?, path)))
        .filter(|(_, path)| kind_of(path).is_some())
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

/// A family, alone or with a version, or a name with a size in it: `smol`, `qwen3`, `Phi-3-mini`, `my-model-1.5b-instruct`.
fn is_checkpoint_name(word: &str) -> bool {
    let word = word.to_ascii_lowercase();
    let is_name = word.chars().all(|c| c.is_ascii_alphanumeric() || "._-:".contains(c)) && !word.ends_with(['.', ':']);
    let of_family = |family: &&str| word.strip_prefix(*family).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphabetic()));
    let parts: Vec<&str> = word.split(['-', '_', ':']).collect();
    let is_size = |part: &&str| part.strip_suffix(['b', 'm']).is_some_and(|number| number.parse::<f64>().is_ok());
    let tells = |part: &&str| is_size(part) || ["instruct", "gguf"].contains(part);
    is_name && (FAMILIES.iter().any(of_family) || parts.len() > 1 && parts.iter().any(tells))
}

fn has_drive(argument: &str) -> bool {
    matches!(argument.as_bytes(), [drive, b':', b'\\' | b'/', ..] if drive.is_ascii_alphabetic())
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
    fn models_are_told_from_prompts() {
        for model in [
            "./missing.gguf",
            "../x",
            "/models/x",
            "~/x",
            "C:\\x",
            "missing.GGUF",
            "model.safetensors",
            "./my model.gguf",
            "org/name",
            "HuggingFaceTB/SmolLM2-135M",
            "models/smol/",
            "smol",
            "SmolLM2",
            "SmolLM2-135M-Instruct",
            "qwen3",
            "qwen2.5:0.5b",
            "Phi-3-mini",
            "gemma-3-1b-it",
            "llama",
            "my-model-1.5b",
            "x-instruct",
            "buitlin",
            "built",
        ] {
            assert!(looks_like_model(model), "{model}");
        }
        for prompt in [
            "hello",
            "Hello",
            "Hi!",
            "Hello.",
            "What is 2+2?",
            "What is in ./model.gguf",
            "1/2",
            "2+2",
            "and/or?",
            "philosophy",
            "llamas",
            "smoldering",
            "Paris",
            "well-known",
            "",
            "a",
            "don't",
            "/ is a path",
            "Grüße",
            "smol?",
            "15b",
            "1b",
        ] {
            assert!(!looks_like_model(prompt), "{prompt}");
        }
    }

    #[test]
    fn near_names_are_suggested() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("SmolLM2.gguf"), b"GGUF").unwrap();
        fs::write(folder.path().join("smollm3.txt"), b"no model").unwrap();
        let near = |name: &str| suggestions(&folder.path().join(name));
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
