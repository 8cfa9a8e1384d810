//! Whether a folder may be replaced: only a bundle may, and only one that holds nothing but what its manifests list.

use crate::{
    BundleError, Manifest, files, is_target_manifest,
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// So many files that are not ours are named.
const NAMED: usize = 8;

/// Whether the folder `place` is a bundle, and nothing but a bundle. Damaged files count: a bundle that cannot be used is replaced, too.
pub fn check_replaceable(place: &Path) -> Result<(), BundleError> {
    let not_a_bundle = |reason: String| BundleError::Write {
        path: place.into(),
        reason: format!("the folder is not a bundle, so it is not replaced: {reason}; remove it, or choose another place"),
    };
    let mut listed = listed_by(Path::new(""), place, MANIFEST_FILE, |_| true).map_err(not_a_bundle)?;
    for folder in entries(place)?.into_iter().filter(|entry| entry.is_folder) {
        for file in entries(&place.join(&folder.name))?.into_iter().filter_map(|entry| entry.name.into_string().ok()) {
            // What was prepared for a processor stands in a folder that is named after it: `v81`, `v81-w8`, `v81-w8.rejected`.
            let is_own = |manifest: &Manifest| {
                let arch = manifest.plan.as_ref().and(manifest.model.dsp_arch.as_deref());
                arch.is_some_and(|arch| folder.name.as_encoded_bytes().starts_with(arch.as_bytes()))
            };
            let path = place.join(&folder.name);
            if file.ends_with(".json") && is_target_manifest(&path.join(&file)) {
                listed.extend(listed_by(Path::new(&folder.name), &path, &file, is_own).unwrap_or_default());
            }
        }
    }
    let foreign = foreign(place, &listed)?;
    if foreign.is_empty() { Ok(()) } else { Err(BundleError::Foreign { path: place.into(), files: foreign }) }
}

/// The manifest `name` of `folder` and the files that it lists, under `prefix`; the error says why it is no manifest.
fn listed_by(prefix: &Path, folder: &Path, name: &str, accept: impl Fn(&Manifest) -> bool) -> Result<BTreeSet<PathBuf>, String> {
    let text = files::read(&folder.join(name), MAX_MANIFEST_BYTES).map_err(|error| match error.is_missing() {
        true => format!("it has no {name}"),
        false => error.to_string(),
    })?;
    let text = String::from_utf8(text).map_err(|_| format!("its {name} is not UTF-8 text"))?;
    let manifest = Manifest::from_json(&text).map_err(|error| format!("its {name} is no manifest that this qhx reads: {error}"))?;
    if !accept(&manifest) {
        return Err(format!("its {name} is of another folder"));
    }
    let files = manifest.files.keys().map(|file| prefix.join(file.to_relative()));
    Ok(files.chain([prefix.join(name)]).collect())
}

/// What is in a folder and all folders below it but is not listed; links are not followed. Folders that hold nothing listed are named as a whole.
fn foreign(place: &Path, listed: &BTreeSet<PathBuf>) -> Result<Vec<String>, BundleError> {
    let holds_listed = |path: &PathBuf| listed.range(path.clone()..).next().is_some_and(|next| next.starts_with(path));
    let (mut found, mut folders) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(folder) = folders.pop() {
        for Entry { name, is_folder } in entries(&place.join(&folder))? {
            let path = folder.join(name);
            match is_folder {
                true if holds_listed(&path) => folders.push(path),
                true => found.push(format!("{}/", path.display())),
                false if listed.contains(&path) => {}
                false => found.push(path.display().to_string()),
            }
            if found.len() > NAMED {
                found[NAMED] = "…".into();
                return Ok(found);
            }
        }
    }
    Ok(found)
}

struct Entry {
    name: std::ffi::OsString,
    /// A folder itself, not a link to one.
    is_folder: bool,
}

/// What is in a folder, by name.
fn entries(folder: &Path) -> Result<Vec<Entry>, BundleError> {
    let look = || {
        let entry = |entry: std::io::Result<fs::DirEntry>| {
            let entry = entry?;
            Ok(Entry { name: entry.file_name(), is_folder: entry.file_type()?.is_dir() })
        };
        fs::read_dir(folder)?.map(entry).collect::<std::io::Result<Vec<_>>>()
    };
    let mut entries = look().map_err(BundleError::io("look into", folder))?;
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}
