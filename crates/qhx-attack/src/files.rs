//! A case is a handful of files.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// Files by their path within a folder, with `/` between names.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// Reads the files of a folder whose path is wanted, folders within it too.
pub(crate) fn read_folder(folder: &Path, wanted: &dyn Fn(&str) -> bool) -> io::Result<Files> {
    let mut files = Files::new();
    let mut waiting = vec![(folder.to_path_buf(), String::new())];
    while let Some((place, prefix)) = waiting.pop() {
        for entry in fs::read_dir(&place)? {
            let entry = entry?;
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                waiting.push((entry.path(), name + "/"));
            } else if wanted(&name) {
                files.insert(name, fs::read(entry.path())?);
            }
        }
    }
    Ok(files)
}

/// Writes files into a folder that is made, or emptied, for them.
pub(crate) fn write_folder(folder: &Path, files: &Files) -> io::Result<()> {
    empty_folder(folder)?;
    for (name, content) in files {
        let path = folder.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(path, content)?;
    }
    Ok(())
}

/// Makes a folder that has nothing in it.
pub(crate) fn empty_folder(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::create_dir_all(folder)
}

/// What is in a folder, by name.
pub(crate) fn names_in(folder: &Path) -> io::Result<Vec<String>> {
    let mut names: Vec<String> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect::<io::Result<_>>()?;
    names.sort();
    Ok(names)
}

/// The repository: where fixtures, demo models and seeds are.
pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
