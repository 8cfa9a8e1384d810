//! Opening a bundle: everything that can be wrong with one is found here, before any of it is used.
//!
//! The order is by cost: the manifest, sizes and small files; headers, programs and weights; then the sums of large files that this user has not loaded before.

use crate::{
    BundleError, BundlePath, Digest, Manifest, ManifestError, files,
    layout::{PADDING_PREFIX, Part, StoredPart, stored_parts},
    manifest::{FileEntry, MANIFEST_FILE, MAX_MANIFEST_BYTES},
    safetensors::{Header, StoredTensor, description, read_header},
    source::{Opened, Source},
    verified::Verified,
};
use qhx_ir::{ALIGNMENT, Bytes, Checked, Name, Program, Weight, WeightTensor, Weights};
use std::{
    collections::{BTreeMap, HashMap},
    fs,
    io::{self, Read},
    panic::resume_unwind,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::SystemTime,
};

/// Files up to this many bytes are hashed at every opening.
const SMALL_FILE: u64 = 1 << 20;
/// The largest program that is read, in bytes.
const MAX_PROGRAM_BYTES: u64 = 64 << 20;

/// A checked bundle: its manifest, its programs and its weights.
pub struct Bundle {
    place: String,
    source: Source,
    manifest: Manifest,
    programs: BTreeMap<String, Checked>,
    weights: Arc<HashMap<String, WeightTensor>>,
}

/// How a bundle is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// When large files are hashed.
    pub verify: Verify,
    /// The folder that remembers which files were found whole; absent, the default: none does, and large files are hashed each time.
    pub cache_dir: Option<PathBuf>,
    /// Ends the hashing of large files when set.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// When large files are hashed. Small ones always are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// The first time that this user loads that file, and again when it has changed.
    Once,
    /// Always.
    Always,
    /// Never: for the process that just wrote and hashed them, and for memory.
    Written,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { verify: Verify::Once, cache_dir: None, cancel: None }
    }
}

impl Bundle {
    /// Opens the bundle at `path`: its folder, or its manifest. Of an arch folder's manifests the one with the most programs is taken.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, BundleError> {
        Self::open_with(path, &OpenOptions::default())
    }

    /// As [`Bundle::open`], with a say in how large files are checked.
    pub fn open_with(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Self, BundleError> {
        let path = path.as_ref();
        let not_a_bundle = |reason: String| BundleError::NotABundle { path: path.into(), reason };
        let metadata = fs::metadata(path).map_err(|e| not_a_bundle(e.to_string()))?;
        let (folder, file) = if metadata.is_dir() {
            (path.to_path_buf(), manifest_in(path).unwrap_or_else(|| MANIFEST_FILE.to_string()))
        } else {
            let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(|| not_a_bundle("has no readable name".into()))?;
            (path.parent().map(Path::to_path_buf).unwrap_or_default(), name.to_string())
        };
        let folder = if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder };
        let source = Source::folder(&folder).map_err(BundleError::io("open", &folder))?;
        let manifest = BundlePath::new(file).map_err(|e| not_a_bundle(e.to_string()))?;
        let place = folder.display().to_string();
        let manifest = read_manifest(&place, &source, &manifest)?;
        Self::load(place, source, manifest, options)
    }

    /// Opens the bundle of a manifest whose files are in `root`, wherever the manifest itself is.
    pub fn open_in(manifest: &Path, root: &Path, options: &OpenOptions) -> Result<Self, BundleError> {
        let not_a_bundle = |reason: &str| BundleError::NotABundle { path: manifest.into(), reason: reason.into() };
        if !fs::metadata(manifest).map_err(|e| not_a_bundle(&e.to_string()))?.is_file() {
            return Err(not_a_bundle("is no file: a manifest is expected"));
        }
        let name = manifest.file_name().and_then(|name| name.to_str()).and_then(|name| BundlePath::new(name).ok());
        let name = name.ok_or_else(|| not_a_bundle("has no readable name"))?;
        let beside = manifest.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = |path: &Path| Source::folder(path).map_err(BundleError::io("open", path));
        let read = read_manifest(&beside.display().to_string(), &folder(beside)?, &name)?;
        Self::load(root.display().to_string(), folder(root)?, read, options)
    }

    /// A bundle whose files are in memory, such as a model built into a program. Large files are trusted as the program itself is.
    pub fn from_memory(files: impl IntoIterator<Item = (BundlePath, Bytes)>) -> Result<Self, BundleError> {
        let source = Source::Memory(files.into_iter().collect());
        let options = OpenOptions { verify: Verify::Written, cache_dir: None, cancel: None };
        let manifest =
            BundlePath::new(MANIFEST_FILE).map_err(|e| BundleError::NotABundle { path: "memory".into(), reason: e.to_string() })?;
        let manifest = read_manifest("built-in bundle", &source, &manifest)?;
        Self::load("built-in bundle".into(), source, manifest, &options)
    }

    fn load(place: String, source: Source, manifest: Manifest, options: &OpenOptions) -> Result<Self, BundleError> {
        let mut bundle = Self { place, source, manifest, programs: BTreeMap::new(), weights: Arc::default() };
        let cancel = options.cancel.as_deref();
        bundle.for_each_file(cancel, |path, entry| match bundle.open_file(path)? {
            opened if entry.bytes <= SMALL_FILE || options.verify == Verify::Always => bundle.check_sum(path, entry, &opened, cancel),
            _ => Ok(()),
        })?;
        bundle.programs = bundle.read_programs()?;
        let files = bundle.map_weights()?;
        bundle.weights = Arc::new(bundle.find_weights(&files)?);
        if options.verify == Verify::Once {
            bundle.check_new_files(options)?;
        }
        Ok(bundle)
    }

    /// Where it is, for people.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The bundle's folder; `None` for one in memory.
    pub fn folder(&self) -> Option<&Path> {
        match &self.source {
            Source::Folder(root) => Some(root),
            Source::Memory(_) => None,
        }
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The programs by name.
    pub fn programs(&self) -> &BTreeMap<String, Checked> {
        &self.programs
    }

    /// The program of that name.
    pub fn program(&self, name: &str) -> Option<&Checked> {
        self.programs.get(name)
    }

    /// Every weight that a program declares, checked against the declaration and not copied.
    pub fn weights(&self) -> Arc<dyn Weights> {
        self.weights.clone()
    }

    /// The content of a file of the bundle, its sum checked.
    pub fn read(&self, path: &BundlePath) -> Result<Vec<u8>, BundleError> {
        let entry = self.manifest.files.get(path).ok_or_else(|| self.wrong_file(path, "is not listed in `files`".into()))?;
        let content = self.open_file(path)?.read().map_err(|e| self.wrong_file(path, format!("cannot be read: {e}")))?;
        self.compare(path, entry, Digest::of(&content))?;
        Ok(content)
    }

    /// As [`Bundle::read`], for text.
    pub fn read_text(&self, path: &BundlePath) -> Result<String, BundleError> {
        String::from_utf8(self.read(path)?).map_err(|_| self.wrong_file(path, "is not UTF-8 text".into()))
    }

    /// Hashes every file, whatever is remembered. Stops with [`BundleError::Cancelled`] once `cancel` is set.
    pub fn verify_all(&self, cancel: Option<&AtomicBool>) -> Result<(), BundleError> {
        self.for_each_file(cancel, |path, entry| self.check_sum(path, entry, &self.open_file(path)?, cancel))
    }

    /// One sum for all files: see [`Manifest::fingerprint`].
    pub fn fingerprint(&self) -> Digest {
        self.manifest.fingerprint()
    }

    /// Opens a listed file and compares its size.
    fn open_file(&self, path: &BundlePath) -> Result<Opened, BundleError> {
        let opened = self.source.open(path).map_err(|reason| self.wrong_file(path, reason))?;
        match self.manifest.files.get(path) {
            Some(entry) if entry.bytes != opened.len() => {
                Err(self
                    .wrong_file(path, format!("must have {} bytes, found {}: it is truncated or was changed", entry.bytes, opened.len())))
            }
            _ => Ok(opened),
        }
    }

    fn check_sum(&self, path: &BundlePath, entry: &FileEntry, file: &Opened, cancel: Option<&AtomicBool>) -> Result<(), BundleError> {
        match file.sum(cancel) {
            Ok(sum) => self.compare(path, entry, sum),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Err(BundleError::Cancelled),
            Err(e) => Err(self.wrong_file(path, format!("cannot be read: {e}"))),
        }
    }

    fn compare(&self, path: &BundlePath, entry: &FileEntry, found: Digest) -> Result<(), BundleError> {
        if found == entry.sha256 {
            return Ok(());
        }
        Err(BundleError::Sum { bundle: self.place.clone(), file: path.to_string(), expected: entry.sha256, found })
    }

    /// Hashes large files that were not found whole before, and remembers them.
    fn check_new_files(&self, options: &OpenOptions) -> Result<(), BundleError> {
        let began = SystemTime::now();
        let verified = Verified::load(options.cache_dir.clone());
        let found = std::sync::Mutex::new(Vec::new());
        let checked = self.for_each_file(options.cancel.as_deref(), |path, entry| {
            let file = self.open_file(path)?;
            let known = file.identity().is_some_and(|identity| verified.contains(identity, &entry.sha256));
            if entry.bytes > SMALL_FILE && !known {
                self.check_sum(path, entry, &file, options.cancel.as_deref())?;
                if let Some(identity) = file.identity().filter(|_| file.is_unchanged()) {
                    found.lock().unwrap_or_else(|e| e.into_inner()).push((identity.clone(), entry.sha256));
                }
            }
            Ok(())
        });
        // What was found whole before another file failed stays found.
        verified.remember(found.lock().unwrap_or_else(|e| e.into_inner()).iter().map(|(identity, sum)| (identity, sum)), began);
        checked
    }

    /// Does `work` for every listed file, on all cores; of several errors, that of the first path is told.
    fn for_each_file(
        &self,
        cancel: Option<&AtomicBool>,
        work: impl Fn(&BundlePath, &FileEntry) -> Result<(), BundleError> + Sync,
    ) -> Result<(), BundleError> {
        let files: Vec<_> = self.manifest.files.iter().collect();
        let next = AtomicUsize::new(0);
        let worker = || {
            while let Some((place, (path, entry))) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, files.get(i)?))) {
                if cancel.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
                    return Err((place, BundleError::Cancelled));
                }
                work(path, entry).map_err(|e| (place, e))?;
            }
            Ok(())
        };
        let threads = thread::available_parallelism().map_or(1, usize::from).min(files.len());
        let first = thread::scope(|scope| {
            // This thread works too, so that a system that grants no thread is only slower.
            let others: Vec<_> = (1..threads).filter_map(|_| thread::Builder::new().spawn_scoped(scope, worker).ok()).collect();
            let mine = worker().err();
            let theirs = others.into_iter().filter_map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)).err());
            theirs.chain(mine).min_by_key(|(place, _)| *place)
        });
        first.map_or(Ok(()), |(_, error)| Err(error))
    }

    fn read_programs(&self) -> Result<BTreeMap<String, Checked>, BundleError> {
        let mut programs = BTreeMap::new();
        for (name, entry) in &self.manifest.programs {
            let wrong = |reason| BundleError::Program { bundle: self.place.clone(), file: entry.file.to_string(), reason };
            if self.manifest.files.get(&entry.file).is_some_and(|file| file.bytes > MAX_PROGRAM_BYTES) {
                return Err(wrong(format!("a program may have {MAX_PROGRAM_BYTES} bytes at most")));
            }
            let program = Program::from_json(&self.read_text(&entry.file)?).map_err(wrong)?;
            if *program.name != **name {
                return Err(wrong(format!("the manifest calls this program `{name}`, the file `{}`", program.name)));
            }
            programs.insert(name.clone(), Checked::new(program).map_err(|e| wrong(e.to_string()))?);
        }
        Ok(programs)
    }

    /// Maps the weight files: every stored tensor by name, with its file.
    fn map_weights(&self) -> Result<StoredTensors, BundleError> {
        let mut all = StoredTensors::new();
        for path in &self.manifest.weights {
            let bytes = self.open_file(path)?.map().map_err(|e| self.wrong_file(path, format!("cannot be mapped: {e}")))?;
            let Header { tensors, mut metadata } = read_header(&bytes).map_err(|reason| self.wrong_file(path, reason))?;
            for (name, tensor) in tensors {
                if name.starts_with(PADDING_PREFIX) {
                    continue;
                }
                if let Some(Stored { file, .. }) = all.get(&name) {
                    return Err(self.wrong_file(path, format!("tensor `{name}` is in `{file}` already")));
                }
                let description = metadata.remove(&name);
                all.insert(name, Stored { file: path.clone(), bytes: bytes.clone(), tensor, description });
            }
        }
        Ok(all)
    }

    /// Puts together the weights that the programs declare.
    fn find_weights(&self, stored: &StoredTensors) -> Result<HashMap<String, WeightTensor>, BundleError> {
        let mut declared: HashMap<&Name, &Weight> = HashMap::new();
        let mut weights = HashMap::new();
        for (program, checked) in &self.programs {
            for (name, weight) in &checked.weights {
                let wrong =
                    |reason| BundleError::Weight { bundle: self.place.clone(), program: program.clone(), name: name.to_string(), reason };
                match declared.insert(name, weight) {
                    Some(other) if other != weight => {
                        let shown = |w: &Weight| format!("{} {:?}", w.encoding, w.shape);
                        return Err(wrong(format!("is {} here and {} in another program", shown(weight), shown(other))));
                    }
                    Some(_) => {}
                    // Its numbers are in a context binary; what the host reads, the device asks for.
                    None if self.manifest.plan.is_some() && !stored.contains_key(&**name) => {}
                    None => drop(weights.insert(name.to_string(), assemble(name, weight, stored).map_err(wrong)?)),
                }
            }
        }
        Ok(weights)
    }

    fn wrong_file(&self, path: &BundlePath, reason: String) -> BundleError {
        let field = self.manifest.named_files().find(|(_, file)| *file == path).map_or("files".into(), |(field, _)| field);
        BundleError::File { bundle: self.place.clone(), file: path.to_string(), field, reason }
    }
}

impl std::fmt::Debug for Bundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bundle").field("place", &self.place).field("model", &self.manifest.model).finish_non_exhaustive()
    }
}

type StoredTensors = HashMap<String, Stored>;

/// How much of a file is looked at to tell whether it is a manifest of an arch folder.
const SNIFFED_BYTES: u64 = 8 << 10;

/// The manifest of a folder: `qhx.json`, or of an arch folder's manifests the one with the most programs (the first by name of several).
pub fn manifest_in(folder: &Path) -> Option<String> {
    if folder.join(MANIFEST_FILE).is_file() {
        return Some(MANIFEST_FILE.into());
    }
    let mut names: Vec<String> = fs::read_dir(folder)
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|n| n.ends_with(".json"))
        .collect();
    names.sort();
    let programs = |name: &String| {
        let path = folder.join(name);
        is_target_manifest(&path).then(|| {
            // A damaged one is taken where there is no other, so that opening it tells what is wrong.
            let text = files::read(&path, MAX_MANIFEST_BYTES).ok().and_then(|text| String::from_utf8(text).ok());
            text.and_then(|text| Manifest::from_json(&text).ok()).map_or(0, |manifest| manifest.programs.len())
        })
    };
    let found = names.iter().filter_map(|name| Some((name, programs(name)?)));
    // The first of the largest.
    found
        .fold(None, |best: Option<(&String, usize)>, new| if best.is_some_and(|b| b.1 >= new.1) { best } else { Some(new) })
        .map(|(n, _)| n.clone())
}

/// Whether a file is a manifest of an arch folder, by its first bytes.
pub fn is_target_manifest(path: &Path) -> bool {
    let Ok(file) = files::open(path) else { return false };
    let mut start = Vec::new();
    let read = file.take(SNIFFED_BYTES).read_to_end(&mut start);
    let text = String::from_utf8_lossy(&start);
    read.is_ok() && ["\"schema_version\"", "\"plan\"", "\"dsp_arch\""].iter().all(|field| text.contains(field))
}

/// A stored tensor: its file with all its bytes, the place in it, and what the file says about the weight.
struct Stored {
    file: BundlePath,
    bytes: Bytes,
    tensor: StoredTensor,
    description: Option<String>,
}

fn read_manifest(place: &str, source: &Source, path: &BundlePath) -> Result<Manifest, BundleError> {
    let missing = |reason| BundleError::NotABundle { path: place.into(), reason };
    let file = source.open(path).map_err(|reason| missing(format!("not a bundle: its manifest `{path}` {reason}")))?;
    let wrong = |source| BundleError::Manifest { manifest: format!("{place}/{path}"), source };
    if file.len() > MAX_MANIFEST_BYTES {
        let reason = format!("{} bytes are more than the {MAX_MANIFEST_BYTES} that are read", file.len());
        return Err(wrong(ManifestError::NotAManifest(reason)));
    }
    let text = file.read().map_err(|e| missing(format!("cannot read `{path}`: {e}")))?;
    let text = String::from_utf8(text).map_err(|_| wrong(ManifestError::NotAManifest("is not UTF-8 text".into())))?;
    Manifest::from_json(&text).map_err(wrong)
}

/// The weight `name` out of its stored parts.
fn assemble(name: &str, weight: &Weight, stored: &StoredTensors) -> Result<WeightTensor, String> {
    let Stored { file, description: found, .. } = stored.get(name).ok_or_else(|| missing(name))?;
    let expected = description(weight.encoding, &weight.shape);
    if found.as_ref() != Some(&expected) {
        let found = found.as_deref().unwrap_or("nothing known");
        return Err(format!("the program declares {expected}, `{file}` has {found}"));
    }
    let mut parts = HashMap::new();
    for part in stored_parts(weight.encoding, &weight.shape)? {
        parts.insert(part.part, find_part(name, &part, stored)?);
    }
    let data = parts.remove(&Part::Data).ok_or("has no data")?;
    WeightTensor::new(weight.encoding, weight.shape.clone(), data, parts.remove(&Part::Scale), parts.remove(&Part::Min))
}

fn find_part(name: &str, expected: &StoredPart, stored: &StoredTensors) -> Result<Bytes, String> {
    let name = expected.part.stored_name(name);
    let Stored { file, bytes, tensor: found, .. } = stored.get(&name).ok_or_else(|| missing(&name))?;
    if found.dtype != expected.dtype || found.shape != expected.shape {
        return Err(format!(
            "`{name}` in `{file}` must be {} {:?} (rows padded), found {} {:?}",
            expected.dtype, expected.shape, found.dtype, found.shape
        ));
    }
    if found.range.start % ALIGNMENT != 0 {
        return Err(format!("`{name}` starts at byte {} of `{file}`, which is no multiple of {ALIGNMENT}", found.range.start));
    }
    bytes.slice(found.range.clone()).ok_or_else(|| format!("`{name}` leaves `{file}`"))
}

fn missing(name: &str) -> String {
    format!("no weight file has the tensor `{name}`")
}
