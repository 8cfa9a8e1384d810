//! Models in the cache of the Hugging Face hub, as `hf download` and transformers leave them there.
//!
//! ```text
//! hub/models--org--name/refs/main            the commit that `main` was at
//!                       snapshots/COMMIT/    its files, links into blobs/
//! ```

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The longest name of a commit that is read.
const MAX_COMMIT_BYTES: u64 = 256;

/// Whether a reference has the form `org/name`, as repositories of the hub and relative paths have; not `1/2`, `and/or?`.
pub fn is_repository(reference: &str) -> bool {
    let is_part =
        |part: &str| part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) && part.chars().any(|c| c.is_ascii_alphabetic());
    reference.contains('/') && reference.trim_end_matches('/').split('/').all(is_part)
}

/// The two parts of `org/name`.
pub(crate) fn repository(reference: &Path) -> Option<(&str, &str)> {
    reference.to_str().filter(|text| is_repository(text))?.split_once('/').filter(|(_, name)| !name.contains('/') && !name.is_empty())
}

/// The folder of a repository in the cache.
pub(crate) fn folder(hub: &Path, (organisation, name): (&str, &str)) -> PathBuf {
    hub.join(format!("models--{organisation}--{name}"))
}

/// The files of a repository: those of its `main`, or of its only snapshot.
pub(crate) fn snapshot(folder: &Path) -> Option<PathBuf> {
    let snapshots = folder.join("snapshots");
    let main = qhx_bundle::files::read(&folder.join("refs/main"), MAX_COMMIT_BYTES).ok();
    let main = main.and_then(|commit| String::from_utf8(commit).ok()).map(|commit| commit.trim().to_owned());
    // A name, and not a way out of the folder.
    let is_commit = |commit: &String| !commit.is_empty() && commit.chars().all(|c| c.is_ascii_alphanumeric());
    if let Some(snapshot) = main.filter(is_commit).map(|commit| snapshots.join(commit)).filter(|snapshot| snapshot.is_dir()) {
        return Some(snapshot);
    }
    let mut all = fs::read_dir(&snapshots).ok()?.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    all.next().filter(|_| all.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_are_two_names() {
        for (reference, expected) in
            [("org/name", true), ("HuggingFaceTB/SmolLM2-135M", true), ("org/name/", false), ("a/b/c", false), ("1/2", false)]
        {
            assert_eq!(repository(Path::new(reference)).is_some(), expected, "{reference}");
        }
    }

    #[test]
    fn main_is_found_or_the_only_snapshot() {
        let hub = tempfile::tempdir().unwrap();
        let place = folder(hub.path(), ("org", "name"));
        assert!(place.ends_with("models--org--name") && snapshot(&place).is_none());
        let snapshot_of = |commit: &str| place.join("snapshots").join(commit);
        fs::create_dir_all(snapshot_of("abc")).unwrap();
        assert_eq!(snapshot(&place), Some(snapshot_of("abc")));
        fs::create_dir_all(snapshot_of("def")).unwrap();
        assert_eq!(snapshot(&place), None, "which one is not known");
        fs::create_dir_all(place.join("refs")).unwrap();
        fs::write(place.join("refs/main"), "def\n").unwrap();
        assert_eq!(snapshot(&place), Some(snapshot_of("def")));
        fs::write(place.join("refs/main"), "../../..").unwrap();
        assert_eq!(snapshot(&place), None, "no way out");
    }
}
