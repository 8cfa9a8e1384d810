//! What a model reference names: a bundle, a Hugging Face folder, a GGUF file, the built-in model, or a repository in the Hugging Face cache.

use crate::{Error, NotFound, Places, Source, error::Found, hub, names::suggestions, source::at_path};
use std::{
    fs,
    path::{Path, PathBuf},
};

impl Source {
    /// Finds out what `reference` names. What exists at that path comes before the same name elsewhere.
    pub fn find(reference: impl AsRef<Path>, places: &Places) -> Result<Self, Error> {
        let reference = reference.as_ref();
        if let Some(source) = at_path(reference) {
            return Ok(source);
        }
        let missing = |found, hub| {
            let near = suggestions(reference, places);
            Err(Error::NotFound(Box::new(NotFound { reference: reference.to_path_buf(), found, near, hub })))
        };
        match (hub::repository(reference).filter(|_| !reference.exists()), &places.hub) {
            (Some(repository), Some(hub)) => {
                let folder = hub::folder(hub, repository);
                let Some(snapshot) = hub::snapshot(&folder) else { return missing(Found::Nothing, Some(folder)) };
                match in_snapshot(&snapshot) {
                    Ok(source) => Ok(source.named(repository.1)),
                    Err(found) => missing(found, Some(snapshot)),
                }
            }
            _ => missing(Found::at(reference), None),
        }
    }
}

/// The model in a snapshot of a repository: the folder itself, or the one GGUF file in it.
fn in_snapshot(snapshot: &Path) -> Result<Source, Found> {
    if let Some(source) = at_path(snapshot) {
        return Ok(source);
    }
    let files = fs::read_dir(snapshot).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut gguf: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|ending| ending == "gguf")).collect();
    gguf.sort();
    match &gguf[..] {
        [file] => at_path(file).ok_or(Found::File),
        [] => Err(Found::Folder),
        _ => Err(Found::SeveralGguf(gguf)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Checkpoint;

    #[test]
    fn repositories_are_found_in_the_hub_and_missed_with_the_place() {
        let hub = tempfile::tempdir().unwrap();
        let places = Places::none().with_hub(hub.path().to_path_buf());
        let find = |reference: &str| Source::find(reference, &places);
        let error = find("some-org/some-name").unwrap_err().to_string();
        assert!(error.contains("there is no model at some-org/some-name") && error.contains("models--some-org--some-name"), "{error}");
        assert!(error.contains("does not download"), "{error}");
        assert!(!Source::find("some-org/some-name", &Places::none()).unwrap_err().to_string().contains("Hugging Face cache"));

        let snapshot = hub.path().join("models--some-org--some-name/snapshots/0123abc");
        fs::create_dir_all(&snapshot).unwrap();
        assert!(find("some-org/some-name").unwrap_err().to_string().contains("a folder with neither"));
        fs::write(snapshot.join("a.gguf"), b"GGUF").unwrap();
        let found = find("some-org/some-name").unwrap();
        assert_eq!(found, Checkpoint::at(&snapshot.join("a.gguf")).named("some-name"));
        fs::write(snapshot.join("b.gguf"), b"GGUF").unwrap();
        let error = find("some-org/some-name").unwrap_err().to_string();
        assert!(error.contains("a.gguf") && error.contains("b.gguf"), "{error}");
        fs::write(snapshot.join("config.json"), "{}").unwrap();
        assert_eq!(find("some-org/some-name").unwrap(), Checkpoint::at(&snapshot).named("some-name"));
    }
}
