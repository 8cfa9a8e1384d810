//! What MODEL may be, for every command that takes one: a bundle, a Hugging Face folder or a GGUF file. The latter two are forged once into the user's cache,
//! with a quick gate, and found there from then on.

use crate::{
    builtin,
    failure::Failure,
    forge_lock::ForgeLock,
    forging::{GateOrder, Order, measured},
    interrupt::Interrupt,
    load::{open_bundle, open_for},
    names::{is_repository, suggestions},
    output,
};
use qhx_bundle::{
    Bundle, Digest, cache_dir,
    files::Identity,
    is_target_manifest,
    manifest::{MANIFEST_FILE, SCHEMA_VERSION},
    manifest_in,
    parity::PARITY_PAGE,
    write::check_replaceable,
};
use qhx_forge::{Material, Precision};
use qhx_ir::PROGRAM_VERSION;
use qhx_runtime::DeviceChoice;
use std::{
    fs::{self, File, Metadata},
    io::{self, Read},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// About how long the gate of a bundle in the cache may take: somebody waits for an answer.
const GATE_BUDGET: Duration = Duration::from_secs(20);

/// What a path holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModelKind {
    /// A bundle's folder or an arch folder of it, or a manifest in one; or the built-in one.
    Bundle,
    /// A Hugging Face folder.
    Folder,
    /// A GGUF file.
    Gguf,
}

/// What the path holds, by a first look; `None` where it is no model.
pub(crate) fn kind_of(path: &Path) -> Option<ModelKind> {
    if builtin::is_meant(path) {
        return Some(ModelKind::Bundle);
    }
    let about = fs::metadata(path).ok()?;
    if about.is_dir() {
        return match (manifest_in(path).is_some(), path.join("config.json").is_file()) {
            (true, _) => Some(ModelKind::Bundle),
            (_, true) => Some(ModelKind::Folder),
            _ => None,
        };
    }
    if path.file_name().is_some_and(|name| name == MANIFEST_FILE) || is_target_manifest(path) {
        return Some(ModelKind::Bundle);
    }
    let mut magic = [0; 4];
    // Only a plain file is looked into: reading a pipe would take what it holds.
    let is_gguf = about.is_file() && File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"GGUF";
    is_gguf.then_some(ModelKind::Gguf)
}

/// A bundle that is open.
pub(crate) struct Opened {
    pub(crate) bundle: Bundle,
    /// How long opening it took, without forging it.
    pub(crate) time: Duration,
}

/// Opens the bundle that MODEL stands for, making it first where need be; the built-in one where no MODEL is given.
pub(crate) fn open_model(path: Option<&Path>, device: DeviceChoice, interrupt: &Interrupt) -> Result<Opened, Failure> {
    let timed = |open: &dyn Fn() -> Result<Bundle, Failure>| {
        let started = Instant::now();
        Ok(Opened { bundle: open()?, time: started.elapsed() })
    };
    let Some(path) = path else {
        output::note(builtin::NOTE);
        return timed(&builtin::open);
    };
    match kind_of(path) {
        Some(ModelKind::Bundle) => timed(&|| open_for(path, device, interrupt)),
        Some(ModelKind::Folder | ModelKind::Gguf) => {
            let place = forged(path, interrupt)?;
            timed(&|| open_bundle(&place, interrupt))
        }
        None => Err(Failure::work(format!("there is no model at {}: found {}", path.display(), found_at(path))).hint(advice(path))),
    }
}

/// What is at a path that holds no model.
pub(crate) fn found_at(path: &Path) -> &'static str {
    match fs::metadata(path) {
        Ok(about) if about.is_dir() => "a folder with neither qhx.json nor config.json",
        Ok(_) => "a file that is not a GGUF file",
        Err(_) => "nothing",
    }
}

/// What to do about a model that is not there.
pub(crate) fn advice(missing: &Path) -> String {
    let near = suggestions(missing);
    let name = missing.to_str().unwrap_or_default();
    if !near.is_empty() {
        format!("did you mean {}?", near.join(" or "))
    } else if !missing.exists() && is_repository(name) && name.matches('/').count() == 1 {
        format!(
            "qhx does not download models: if this is a repository of the Hugging Face hub, run `hf download {name} --local-dir DIR` and give DIR"
        )
    } else {
        "give the path of a bundle, a Hugging Face folder or a GGUF file".into()
    }
}

/// The names of the bundles in the cache, and where they are.
pub(crate) fn cached_names() -> Vec<(String, PathBuf)> {
    let entries =
        |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().take(1000).map(|entry| entry.path()).collect::<Vec<_>>();
    let bundles = cache_dir().into_iter().flat_map(|cache| entries(&cache.join("models"))).flat_map(|key| entries(&key));
    bundles.filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), path))).collect()
}

/// Where the cache has the bundle of a checkpoint. The first process that needs it makes it; others wait for that.
fn forged(source: &Path, interrupt: &Interrupt) -> Result<PathBuf, Failure> {
    let precision = Precision::Native;
    let place = cached_place(source, precision)?;
    let cached = || place.exists().then(|| open_bundle(&place, interrupt));
    if let Some(Ok(_)) = cached() {
        return Ok(place);
    }
    let _lock = ForgeLock::wait_for(&place, interrupt)?;
    // Whoever held the lock may have made it.
    let replace = match cached() {
        None => false,
        Some(Ok(_)) => return Ok(place),
        Some(Err(failure)) if interrupt.is_set() => return Err(failure),
        Some(Err(failure)) => {
            output::note(&format!("forging again: the cached bundle cannot be used: {}", failure.message()));
            keep_foreign(&place)?;
            true
        }
    };
    output::dim_note(&format!("forging {} into {} (once)", source.display(), place.display()));
    let material = Material::open(source)?;
    let gate = GateOrder { kind: None, auto: false, prompts: None, budget: Some(GATE_BUDGET), quick: true, reproducible: false };
    let gated = match measured(&material, Order { out: &place, precision, replace, interrupt }, gate, &[]) {
        Ok(gated) => gated,
        // Where files cannot be locked, another process may have been faster.
        Err(_) if !interrupt.is_set() && matches!(cached(), Some(Ok(_))) => return Ok(place),
        Err(failure) => return Err(failure),
    };
    let gate = &gated.parity.gate;
    if !gate.passed {
        let (source, report) = (source.display(), gated.path.join(PARITY_PAGE));
        return Err(Failure::work(format!("{source} at its stored precision failed its gate: {}", gate.result)).hint(format!(
            "see {}; `qhx forge {source} --precision f32 --out DIR` makes an f32 bundle, --gate none one without a gate",
            report.display()
        )));
    }
    let limited = gate.limited.as_ref().map_or(String::new(), |limited| format!(" ({limited}; `qhx forge` runs the whole suite)"));
    output::dim_note(&format!("gate passed: {}{limited}", gate.result));
    Ok(place)
}

/// Gives a folder in the cache another name where it may not be replaced: whoever put something into it finds it there.
fn keep_foreign(place: &Path) -> Result<(), Failure> {
    let Err(reason) = check_replaceable(place) else { return Ok(()) };
    let beside = |number: u32| {
        let mut name = place.as_os_str().to_owned();
        name.push(format!(".kept-{number}"));
        PathBuf::from(name)
    };
    let kept = (1..).map(beside).find(|kept| !kept.exists()).unwrap_or_else(|| beside(0));
    let cannot = |error: io::Error| Failure::work(format!("cannot rename {}: {error}", place.display())).causes([reason.to_string()]);
    fs::rename(place, &kept).map_err(cannot)?;
    output::note(&format!("{} is kept as {}: {reason}", place.display(), kept.display()));
    Ok(())
}

/// Where the bundle of this very checkpoint is kept: another place once any of its files has changed, or qhx makes bundles of another form.
fn cached_place(source: &Path, precision: Precision) -> Result<PathBuf, Failure> {
    let cache = cache_dir().ok_or_else(|| {
        Failure::work("there is no cache folder to keep the forged bundle in")
            .hint("set QHX_CACHE_DIR, or run `qhx forge SRC --out DIR` and use DIR")
    })?;
    let cannot = |error: io::Error| Failure::work(format!("cannot look at {}: {error}", source.display()));
    let source = source.canonicalize().map_err(cannot)?;
    let key = format!(
        "{}\n{precision} gated {SCHEMA_VERSION} {PROGRAM_VERSION}\n{}",
        env!("CARGO_PKG_VERSION"),
        identity(&source).map_err(cannot)?
    );
    let name = if source.is_dir() { source.file_name() } else { source.file_stem() };
    let name = name.map_or("model".into(), |name| name.to_string_lossy().into_owned());
    Ok(cache.join("models").join(&Digest::of(key.as_bytes()).to_string()[..24]).join(name))
}

/// Path, and name, size and times of every file. A file that was changed and given its old time of writing is another one.
fn identity(source: &Path) -> io::Result<String> {
    let mut lines = Vec::new();
    if source.is_dir() {
        for entry in fs::read_dir(source)? {
            let path = entry?.path();
            // Through links: the Hugging Face cache is made of them. What cannot be looked at cannot be read by the forge either.
            if let Some(about) = fs::metadata(&path).ok().filter(Metadata::is_file) {
                lines.push(line(&path, &about));
            }
        }
    } else {
        lines.push(line(source, &fs::metadata(source)?));
    }
    lines.sort();
    Ok(format!("{}\n{}", source.as_os_str().as_encoded_bytes().escape_ascii(), lines.concat()))
}

fn line(path: &Path, about: &Metadata) -> String {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes().escape_ascii();
    format!("{name}\t{}\n", Identity::of(about, path).version())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("a.gguf"), b"GGUF\x03\0\0\0").unwrap();
        fs::write(at("b.gguf"), b"GG").unwrap();
        assert_eq!(
            [kind_of(&at("a.gguf")), kind_of(&at("b.gguf")), kind_of(&at("none")), kind_of(folder.path())],
            [Some(ModelKind::Gguf), None, None, None]
        );
        fs::write(at("config.json"), "{}").unwrap();
        assert_eq!(kind_of(folder.path()), Some(ModelKind::Folder));
        fs::write(at("qhx.json"), "{}").unwrap();
        assert_eq!([kind_of(folder.path()), kind_of(&at("qhx.json"))], [Some(ModelKind::Bundle); 2]);
    }

    #[test]
    fn a_changed_file_is_another_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), "{}").unwrap();
        let before = identity(folder.path()).unwrap();
        assert_eq!(identity(folder.path()).unwrap(), before);
        fs::write(folder.path().join("config.json"), "{ }").unwrap();
        let larger = identity(folder.path()).unwrap();
        assert_ne!(larger, before);
        // The same size and the old time of writing.
        let file = File::options().write(true).open(folder.path().join("config.json")).unwrap();
        let written = file.metadata().unwrap().modified().unwrap();
        std::thread::sleep(Duration::from_millis(30));
        fs::write(folder.path().join("config.json"), "[ ]").unwrap();
        file.set_modified(written).unwrap();
        assert_eq!(cfg!(unix), identity(folder.path()).unwrap() != larger);
        let larger = identity(folder.path()).unwrap();
        fs::write(folder.path().join("tokenizer.json"), "").unwrap();
        assert_ne!(identity(folder.path()).unwrap(), larger);
    }
}
