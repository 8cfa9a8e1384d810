//! Bundles that were forged from checkpoints, kept in the user's cache: `models/KEY/NAME`, where the key changes with the checkpoint's files.

use crate::{Checkpoint, Error, OpenEvent, Places, forge_lock::ForgeLock, source::bundle_at};
use qhx_bundle::{Digest, files::Identity, manifest::SCHEMA_VERSION, parity::PARITY_PAGE, write::check_replaceable};
use qhx_forge::{ForgeOptions, GateOptions, GateProgress, Material, Precision, Progress, forge_gated};
use qhx_ir::PROGRAM_VERSION;
use qhx_runtime::Cancel;
use std::{
    cell::RefCell,
    fs::{self, Metadata},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

/// About how long the gate of a bundle in the cache may take: somebody waits for an answer.
const GATE_BUDGET: Duration = Duration::from_secs(20);
/// Checkpoints are kept as they store their weights.
const PRECISION: Precision = Precision::Native;

/// The names of the bundles in the cache, and where they are.
pub(crate) fn cached_names(places: &Places) -> Vec<(String, PathBuf)> {
    let entries =
        |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().take(1000).map(|entry| entry.path()).collect::<Vec<_>>();
    let bundles = places.cache.iter().flat_map(|cache| entries(&cache.join("models"))).flat_map(|key| entries(&key));
    bundles.filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), path))).collect()
}

/// Making a bundle in the cache.
pub(crate) struct Forging<'a> {
    pub(crate) source: &'a Path,
    pub(crate) place: &'a Path,
    pub(crate) places: &'a Places,
    pub(crate) cancel: &'a Cancel,
    pub(crate) on_event: &'a mut dyn FnMut(OpenEvent<'_>),
}

impl Forging<'_> {
    /// Makes the bundle unless it is there. The first process that needs it makes it; others wait for that.
    pub(crate) fn once(mut self) -> Result<(), Error> {
        if let Some(Ok(())) = self.cached() {
            return Ok(());
        }
        let _lock = ForgeLock::wait_for(self.place, self.cancel, &mut self.on_event)?;
        // Whoever held the lock may have made it.
        let replace = match self.cached() {
            None => false,
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) if self.cancel.is_cancelled() => return Err(error),
            Some(Err(error)) => {
                (self.on_event)(OpenEvent::ForgingAgain { reason: &error });
                self.keep_foreign()?;
                true
            }
        };
        (self.on_event)(OpenEvent::Forging { source: self.source, place: self.place });
        match self.forge(replace) {
            // Where files cannot be locked, another process may have been faster.
            Err(error) if self.cancel.is_cancelled() || !matches!(self.cached(), Some(Ok(()))) => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether the cache has it, and has it whole.
    fn cached(&self) -> Option<Result<(), Error>> {
        self.place.exists().then(|| bundle_at(self.place, self.places, self.cancel).map(drop))
    }

    fn forge(&mut self, replace: bool) -> Result<(), Error> {
        let material = Material::open(self.source)?;
        // Writing and measuring take turns.
        let on_event = RefCell::new(&mut self.on_event);
        let mut written = |progress: Progress<'_>| (on_event.borrow_mut())(OpenEvent::Writing(progress));
        let mut measured = |progress: GateProgress<'_>| (on_event.borrow_mut())(OpenEvent::Gating(progress));
        let mut options = ForgeOptions {
            replace,
            cancel: self.cancel.shared(),
            progress: Some(&mut written),
            ..ForgeOptions::new(self.place, PRECISION)
        };
        let gate = GateOptions {
            budget: Some(GATE_BUDGET),
            quick: true,
            reproducible: false,
            cancel: self.cancel.clone(),
            ..GateOptions::new(&mut measured)
        };
        let gated = forge_gated(&material, &mut options, gate)?;
        let gate = &gated.parity.gate;
        if !gate.passed {
            let (source_path, report) = (self.source.to_path_buf(), gated.path.join(PARITY_PAGE));
            return Err(Error::FailedGate { source_path, result: gate.result.clone(), report });
        }
        (self.on_event)(OpenEvent::Passed(gate));
        Ok(())
    }

    /// Gives a folder in the cache another name where it may not be replaced: whoever put something into it finds it there.
    fn keep_foreign(&mut self) -> Result<(), Error> {
        let Err(reason) = check_replaceable(self.place) else { return Ok(()) };
        let beside = |number: u32| {
            let mut name = self.place.as_os_str().to_owned();
            name.push(format!(".kept-{number}"));
            PathBuf::from(name)
        };
        let kept = (1..).map(beside).find(|kept| !kept.exists()).unwrap_or_else(|| beside(0));
        fs::rename(self.place, &kept).map_err(Error::io("rename", self.place))?;
        (self.on_event)(OpenEvent::Kept { place: self.place, kept: &kept, reason: &reason.to_string() });
        Ok(())
    }
}

/// Where the bundle of this very checkpoint is kept: another place once any of its files has changed, or qhx makes bundles of another form.
pub(crate) fn place_of(checkpoint: &Checkpoint, places: &Places) -> Result<PathBuf, Error> {
    let cache = places.cache.as_ref().ok_or(Error::NoCache)?;
    let cannot = Error::io("look at", &checkpoint.path);
    let source = checkpoint.path.canonicalize().map_err(&cannot)?;
    let key = format!(
        "{}\n{PRECISION} gated {SCHEMA_VERSION} {PROGRAM_VERSION}\n{}",
        env!("CARGO_PKG_VERSION"),
        identity(&source).map_err(&cannot)?
    );
    let by_path = if source.is_dir() { source.file_name() } else { source.file_stem() };
    let by_path = || by_path.map_or("model".into(), |name| name.to_string_lossy().into_owned());
    let name = checkpoint.name.clone().unwrap_or_else(by_path);
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
    use std::fs::File;

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
        // The file system's clock ticks: what is changed within one tick cannot be seen.
        let began = std::time::Instant::now();
        let seen = std::iter::repeat_with(|| {
            fs::write(folder.path().join("config.json"), "[ ]").unwrap();
            file.set_modified(written).unwrap();
            identity(folder.path()).unwrap() != larger
        });
        assert_eq!(cfg!(unix), seen.take_while(|_| began.elapsed() < Duration::from_secs(1)).any(|seen| seen));
        let larger = identity(folder.path()).unwrap();
        fs::write(folder.path().join("tokenizer.json"), "").unwrap();
        assert_ne!(identity(folder.path()).unwrap(), larger);
    }
}
