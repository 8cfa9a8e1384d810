//! The context binaries of a bundle, as `qhx doctor` sees them: files and what they say of themselves, held against this machine.

use crate::units::show_bytes;
use qhx_bundle::{
    BundlePath,
    files::{self, ReadError},
};
use qhx_npu::{
    Arch, Expected, Metadata,
    budget::Limits,
    probe::{Finding, Probe, State},
};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

const MOST_MANIFEST_BYTES: u64 = 4 << 20;
/// The subject of what is found where there are no context binaries for this machine.
pub(crate) const NONE: &str = "context binaries";

/// A context binary, and what a manifest beside it says.
#[derive(Default)]
struct Named {
    /// The manifests that name it.
    by: BTreeSet<String>,
    bytes: Option<u64>,
    sha256: Option<[u8; 32]>,
}

/// What there is to say of all context binaries of a bundle, of a folder of it, of those beside a manifest, or of one file.
pub(crate) fn examine(path: &Path, probe: &Probe) -> Vec<Finding> {
    let is_manifest = path.is_file() && path.extension().is_some_and(|kind| kind == "json");
    let path = path.parent().filter(|_| is_manifest).unwrap_or(path);
    let binaries = if path.is_file() { BTreeMap::from([(path.to_path_buf(), Named::default())]) } else { binaries(path) };
    if binaries.is_empty() {
        let advice = "for phones: qhx forge SRC --out DIR --target v79,v81";
        let (state, found) = match probe.emulated {
            true => (State::Doubtful, "the bundle has none: the emulator compiles its programs on loading, which takes time"),
            false => (State::Wrong, "the bundle has none"),
        };
        return vec![finding(NONE, state, found.into(), Some(advice))];
    }
    // Folders of other generations are no trouble: a phone takes its own. What stands above the bundle says nothing.
    let folders = |file: &PathBuf| file.ancestors().skip(1).take_while(|folder| folder.starts_with(path)).find_map(arch_of);
    let own = |file: &&PathBuf| match (probe.arch, folders(file)) {
        (Some(here), Some(folder)) => here == folder,
        _ => true,
    };
    let chosen: Vec<&PathBuf> = binaries.keys().filter(own).collect();
    if let (true, Some(arch)) = (chosen.is_empty(), probe.arch) {
        let found = format!("none of the {} is in a folder for {arch}", binaries.len());
        return vec![finding(NONE, State::Wrong, found, Some(&format!("qhx forge SRC --out DIR --target {arch} makes them")))];
    }
    chosen.into_iter().map(|file| examine_one(path, file, &binaries[file], probe)).collect()
}

fn examine_one(root: &Path, file: &Path, named: &Named, probe: &Probe) -> Finding {
    let subject = file.strip_prefix(root).ok().filter(|rest| !rest.as_os_str().is_empty()).unwrap_or(file).display().to_string();
    let wrong = |found: String, advice: &str| finding(&subject, State::Wrong, found, Some(advice));
    let Ok(about) = fs::metadata(file) else {
        let by: Vec<&str> = named.by.iter().map(String::as_str).collect();
        let verb = if by.len() == 1 { "names" } else { "name" };
        return wrong(format!("is missing, though {} {verb} it", by.join(", ")), "copy it again");
    };
    if let Err(error) = open_here(root, file) {
        return wrong(error.reason(), "copy the file itself");
    }
    let size = about.len();
    let too_large = |described: &str, arch: Arch| {
        let most = Limits::of(arch).context_bytes;
        let found = format!("{described}; a phone loads about {}", show_bytes(most));
        let advice = Some("forge it again with a larger --optimize, at which graphs share more, or a lower precision");
        (size > most).then(|| finding(&subject, State::Doubtful, found, advice))
    };
    let Some(library) = &probe.library else {
        let unseen = format!("{}; its metadata cannot be read without QNN's libraries", show_bytes(size));
        let large = too_large(&unseen, probe.arch.unwrap_or(Arch::V81));
        return large.unwrap_or_else(|| finding(&subject, State::Doubtful, unseen, None));
    };
    let expected = Expected { name: String::new(), bytes: named.bytes, sha256: named.sha256, graphs: Vec::new() };
    let metadata = match library.inspect_file(file, &expected) {
        Ok(metadata) => metadata,
        Err(error) => return wrong(error.to_string(), "copy it again or forge it again"),
    };
    let Metadata { arch, build, graphs, .. } = &metadata;
    let described = format!("{}, Hexagon v{arch}, made with {build}, {} graphs", show_bytes(size), graphs.len());
    let Some(here) = probe.arch.or(Arch::from_number(*arch)) else {
        return wrong(described, "qhx runs binaries for v79 and v81");
    };
    if let Some(obstacle) = metadata.obstacle(library, here) {
        return finding(&subject, State::Wrong, format!("{described}: it {obstacle}"), None);
    }
    if let Some(large) = too_large(&described, here) {
        return large;
    }
    match metadata.soc_model == here.soc_model() {
        true => finding(&subject, State::Fine, described, None),
        false => finding(
            &subject,
            State::Doubtful,
            format!("{described}, for chip {}; {} is {}", metadata.soc_model, here.soc_name(), here.soc_model()),
            Some("it may be laid out for other memory sizes: qhx forge --target makes one for this chip"),
        ),
    }
}

/// Opens a file that must be a regular one, in the folder `root` where it is not that file itself.
fn open_here(root: &Path, file: &Path) -> Result<(), ReadError> {
    let inside = file.strip_prefix(root).ok().and_then(|rest| BundlePath::new(rest.to_str()?).ok());
    match (inside, root.canonicalize()) {
        (Some(inside), Ok(root)) => files::open_inside(&root, &inside).map(drop),
        _ => files::open(file).map(drop),
    }
}

/// Context binaries in a folder and in its arch folders: those that are there and those that a manifest there names.
fn binaries(folder: &Path) -> BTreeMap<PathBuf, Named> {
    let mut found: BTreeMap<PathBuf, Named> = BTreeMap::new();
    let inside = entries(folder).into_iter().filter(|entry| entry.is_dir() && arch_of(entry).is_some());
    for folder in std::iter::once(folder.to_path_buf()).chain(inside) {
        for entry in entries(&folder) {
            let extension = entry.extension().and_then(|extension| extension.to_str());
            match extension {
                Some("bin") if entry.is_file() => drop(found.entry(entry).or_default()),
                Some("json") => read_manifest(&folder, &entry, &mut found),
                _ => {}
            }
        }
    }
    found
}

/// `v79`, `v81-w8` … are folders for a generation, `v81-w8.rejected` is none.
fn arch_of(folder: &Path) -> Option<Arch> {
    let name = folder.file_name()?.to_str()?;
    let arch = name.split('-').next().filter(|_| !name.ends_with(".rejected"))?;
    arch.parse().ok()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let list = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    list.map(|entry| entry.path()).collect()
}

/// Takes down the context binaries that a manifest names, as plain strings, with their sizes and sums where it lists files.
fn read_manifest(folder: &Path, file: &Path, found: &mut BTreeMap<PathBuf, Named>) {
    let text = files::read(file, MOST_MANIFEST_BYTES).ok();
    let Some(manifest) = text.and_then(|text| serde_json::from_slice::<Value>(&text).ok()) else { return };
    let mut names = Vec::new();
    strings(&manifest, &mut names);
    for name in names {
        let relative = Path::new(name);
        let plain = relative.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        if !plain || relative.extension().is_none_or(|extension| extension != "bin") {
            continue;
        }
        let entry = found.entry(folder.join(relative)).or_default();
        let listed = &manifest["files"][name];
        entry.bytes = listed["bytes"].as_u64().or(entry.bytes);
        entry.sha256 = listed["sha256"].as_str().and_then(sum).or(entry.sha256);
        entry.by.insert(file.file_name().unwrap_or_default().to_string_lossy().into_owned());
    }
}

/// All strings of a JSON value, the names of its fields included.
fn strings<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => found.push(text),
        Value::Array(list) => list.iter().for_each(|value| strings(value, found)),
        Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            found.push(name);
            strings(value, found);
        }),
        _ => {}
    }
}

/// A checksum of 64 hexadecimal digits.
fn sum(text: &str) -> Option<[u8; 32]> {
    let mut sum = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (at, byte) in sum.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(sum)
}

fn finding(subject: &str, state: State, found: String, advice: Option<&str>) -> Finding {
    Finding { subject: subject.into(), state, found, advice: advice.map(str::to_owned) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(arch: Option<Arch>) -> Probe {
        Probe { emulated: false, arch, library: None, findings: vec![] }
    }

    #[test]
    fn binaries_that_a_manifest_names_must_be_there() {
        let folder = tempfile::tempdir().unwrap();
        let v81 = folder.path().join("v81-w8");
        fs::create_dir(&v81).unwrap();
        fs::write(v81.join("a.bin"), "x").unwrap();
        let manifest = r#"{"plan":[{"context":"a.bin"},{"context":"parts/b.bin"},"../c.bin"],"files":{"parts/b.bin":{}}}"#;
        fs::write(v81.join("model.json"), manifest).unwrap();
        let found = examine(folder.path(), &machine(Some(Arch::V81)));
        let told: Vec<(&str, State)> = found.iter().map(|finding| (&*finding.subject, finding.state)).collect();
        assert_eq!(told, [("v81-w8/a.bin", State::Doubtful), ("v81-w8/parts/b.bin", State::Wrong)]);
        assert!(found[1].found.contains("though model.json names it"), "{found:?}");
        fs::write(v81.join("other.json"), manifest).unwrap();
        let found = examine(folder.path(), &machine(Some(Arch::V81)));
        assert!(found[1].found.contains("though model.json, other.json name it"), "{found:?}");
        // Rejected folders are skipped, and the names of folders above the bundle do not matter.
        let rejected = folder.path().join("v81-w8.rejected");
        fs::create_dir(&rejected).unwrap();
        fs::write(rejected.join("a.bin"), "x").unwrap();
        assert_eq!(examine(folder.path(), &machine(Some(Arch::V81))).len(), 2);
        let above = folder.path().join("v79/bundle");
        fs::create_dir_all(&above).unwrap();
        fs::write(above.join("a.bin"), "x").unwrap();
        assert_eq!(examine(&above, &machine(Some(Arch::V81)))[0].state, State::Doubtful);
        let other = examine(folder.path(), &machine(Some(Arch::V79)));
        assert!(other.len() == 1 && other[0].advice.as_ref().unwrap().contains("--target v79"), "{other:?}");
        fs::remove_dir_all(&v81).unwrap();
        assert!(examine(folder.path(), &machine(None))[0].found.contains("the bundle has none"));
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_regular_file_inside_is_not_looked_into() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("bundle");
        fs::create_dir(&root).unwrap();
        fs::write(folder.path().join("outside.bin"), "x").unwrap();
        std::os::unix::fs::symlink("../outside.bin", root.join("a.bin")).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(root.join("b.bin")).status().unwrap().success());
        fs::write(root.join("model.json"), r#"{"plan":["a.bin","b.bin"]}"#).unwrap();
        let found = examine(&root, &machine(Some(Arch::V81)));
        let told: Vec<(State, &str)> = found.iter().map(|finding| (finding.state, &*finding.found)).collect();
        assert!(told[0].0 == State::Wrong && told[0].1.contains("outside the folder"), "{told:?}");
        assert_eq!(told[1], (State::Wrong, "is a FIFO, not a regular file"));
    }

    #[test]
    fn what_no_phone_loads_is_told_without_looking_into_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.bin");
        fs::File::create(&file).unwrap().set_len(4_000_000_000).unwrap();
        let found = examine(&file, &machine(Some(Arch::V81)));
        assert!(found[0].state == State::Doubtful && found[0].found.contains("a phone loads about 3.3 GiB"), "{found:?}");
    }

    #[test]
    fn sums_are_read_or_left_out() {
        assert_eq!(sum(&"0f".repeat(32)), Some([15; 32]));
        for text in ["", "0f", &"0g".repeat(32), &"é".repeat(32)] {
            assert_eq!(sum(text), None, "{text}");
        }
        let manifest = format!(r#"{{"files":{{"a.bin":{{"bytes":7,"sha256":"{}"}}}}}}"#, "0f".repeat(32));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("qhx.json");
        fs::write(&file, manifest).unwrap();
        let mut found = BTreeMap::new();
        read_manifest(folder.path(), &file, &mut found);
        let named = &found[&folder.path().join("a.bin")];
        assert_eq!((named.bytes, named.sha256), (Some(7), Some([15; 32])));
    }
}
