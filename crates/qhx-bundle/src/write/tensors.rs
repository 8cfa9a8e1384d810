//! Weight files while they are written: every place is planned first, then rows arrive in any order.

use super::folder::TemporaryFolder;
use crate::{
    BundleError, BundlePath, Digest,
    layout::{PADDING_PREFIX, Part, StoredPart, StoredType, stored_parts},
    manifest::FileEntry,
    safetensors::{description, write_header},
};
use qhx_ir::{ALIGNMENT, Encoding, Program, WeightTensor};
use std::{
    collections::{BTreeMap, HashMap},
    fs::{File, OpenOptions},
    hash::{DefaultHasher, Hasher},
    io::{self, Seek},
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

/// Bytes written between two looks at the cancel flag.
const STEP: usize = 16 << 20;

/// A weight that will be written.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Its name in the programs.
    pub name: String,
    /// How it is stored.
    pub encoding: Encoding,
    /// Its logical shape.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// What the programs declare, in their order; a weight that several share once.
    pub fn of_programs<'a>(programs: impl IntoIterator<Item = &'a Program>) -> Vec<Self> {
        let mut specs: Vec<Self> = Vec::new();
        let mut known = std::collections::HashSet::new();
        for (name, weight) in programs.into_iter().flat_map(|program| &program.weights) {
            if known.insert(name) {
                specs.push(Self { name: name.to_string(), encoding: weight.encoding, shape: weight.shape.clone() });
            }
        }
        specs
    }
}

/// The weight files of a bundle that is being written.
pub(super) struct WeightFiles {
    files: Vec<(BundlePath, File, usize)>,
    tensors: HashMap<String, Tensor>,
    failed: AtomicBool,
}

struct Tensor {
    encoding: Encoding,
    columns: usize,
    file: usize,
    parts: Vec<PlacedPart>,
}

struct PlacedPart {
    stored: StoredPart,
    /// Counted from the start of the file.
    offset: usize,
    written: Mutex<Rows>,
    /// Of the rows as they were given.
    sum: AtomicU64,
}

impl WeightFiles {
    /// Plans the files, for each group of its own, and writes their headers. The names of a group's files begin with its name.
    pub(super) fn create(folder: &TemporaryFolder, groups: Vec<(String, Vec<TensorSpec>)>, file_bytes: u64) -> Result<Self, BundleError> {
        let mut all = Self { files: Vec::new(), tensors: HashMap::new(), failed: AtomicBool::new(false) };
        for (group, specs) in groups {
            all.add(folder, &group, specs, usize::try_from(file_bytes).unwrap_or(usize::MAX))?;
        }
        Ok(all)
    }

    fn add(&mut self, folder: &TemporaryFolder, group: &str, specs: Vec<TensorSpec>, file_bytes: usize) -> Result<(), BundleError> {
        let plans = plan(specs, file_bytes).map_err(|e| folder.wrong(e))?;
        let count = plans.len();
        for (i, plan) in plans.into_iter().enumerate() {
            let path = BundlePath::new(format!("weights/{group}{:05}-of-{count:05}.safetensors", i + 1));
            let path = path.map_err(|e| folder.wrong(e.to_string()))?;
            let header = plan.header().map_err(|e| folder.wrong(e))?;
            let place = folder.make_room(&path)?;
            let file = OpenOptions::new().create_new(true).read(true).write(true).open(&place);
            let file = file.map_err(BundleError::io("create", &place))?;
            write_at(&file, &header, 0).map_err(BundleError::io("write", &place))?;
            for (spec, parts) in plan.tensors {
                let place = |(stored, offset)| PlacedPart {
                    stored,
                    offset: header.len() + offset,
                    written: Mutex::default(),
                    sum: AtomicU64::new(0),
                };
                let columns = spec.shape.last().copied().unwrap_or(0);
                let parts = parts.into_iter().map(place).collect();
                let tensor = Tensor { encoding: spec.encoding, columns, file: self.files.len(), parts };
                if self.tensors.insert(spec.name.clone(), tensor).is_some() {
                    return Err(folder.wrong(format!("the weight `{}` is declared twice", spec.name)));
                }
            }
            self.files.push((path, file, header.len() + plan.bytes));
        }
        Ok(())
    }

    /// Writes all parts of consecutive rows, given as a tensor of the same encoding and row length.
    pub(super) fn write_tensor(
        &self,
        folder: &TemporaryFolder,
        name: &str,
        first_row: usize,
        rows: &WeightTensor,
        check_cancel: &dyn Fn() -> Result<(), BundleError>,
    ) -> Result<(), BundleError> {
        if let Some(reason) = self.misfit(name, rows) {
            return Err(folder.wrong(reason));
        }
        let parts = [(Part::Data, rows.data()), (Part::Scale, rows.scale()), (Part::Min, rows.min())];
        parts
            .into_iter()
            .filter(|(_, bytes)| !bytes.is_empty())
            .try_for_each(|(part, bytes)| self.write_rows(folder, name, part, first_row, bytes, check_cancel))
    }

    /// Writes whole rows of one part.
    pub(super) fn write_rows(
        &self,
        folder: &TemporaryFolder,
        name: &str,
        part: Part,
        first_row: usize,
        bytes: &[u8],
        check_cancel: impl Fn() -> Result<(), BundleError>,
    ) -> Result<(), BundleError> {
        let wrong = |reason: String| folder.wrong(format!("weight `{name}`: {reason}"));
        let tensor = self.tensors.get(name).ok_or_else(|| wrong("was not declared".into()))?;
        let placed = tensor.parts.iter().find(|placed| placed.stored.part == part);
        let placed = placed.ok_or_else(|| wrong(format!("{} has no {part:?} part", tensor.encoding)))?;
        let StoredPart { rows, row_bytes, .. } = placed.stored;
        if bytes.len() % row_bytes != 0 {
            return Err(wrong(format!("{} bytes are not whole rows of {row_bytes} bytes", bytes.len())));
        }
        let range = first_row..first_row.saturating_add(bytes.len() / row_bytes);
        if range.end > rows {
            return Err(wrong(format!("rows {range:?} are beyond its {rows}")));
        }
        placed.written.lock().unwrap_or_else(|e| e.into_inner()).add(range).map_err(|row| wrong(format!("row {row} is written twice")))?;
        placed.sum.fetch_add(sum_of_rows(first_row, row_bytes, bytes), Ordering::Relaxed);
        let (path, file, _) = &self.files[tensor.file];
        for (step, bytes) in bytes.chunks(STEP).enumerate() {
            let written = check_cancel().and_then(|()| {
                let offset = placed.offset + first_row * row_bytes + step * STEP;
                write_at(file, bytes, offset as u64).map_err(BundleError::io("write", folder.path().join(path.to_relative())))
            });
            if written.is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            written?;
        }
        Ok(())
    }

    /// Why `rows` cannot be rows of the weight `name`.
    fn misfit(&self, name: &str, rows: &WeightTensor) -> Option<String> {
        let tensor = self.tensors.get(name)?;
        let (expected, found) = ((tensor.encoding, tensor.columns), (rows.encoding(), rows.columns()));
        (expected != found).then(|| {
            format!("weight `{name}`: expected {} rows of {} numbers, found {} rows of {}", expected.0, expected.1, found.0, found.1)
        })
    }

    /// The sums of all parts of the weights, of what was given so far.
    pub(super) fn sums(&self) -> PartSums {
        let sum = |placed: &PlacedPart| PartSum {
            part: placed.stored.part,
            row_bytes: placed.stored.row_bytes,
            sum: placed.sum.load(Ordering::Relaxed),
        };
        self.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.parts.iter().map(sum).collect())).collect()
    }

    /// Waits until all files are complete on the disk, and takes their sums.
    pub(super) fn complete(
        self,
        folder: &TemporaryFolder,
        cancel: Option<&AtomicBool>,
    ) -> Result<Vec<(BundlePath, FileEntry)>, BundleError> {
        if self.failed.into_inner() {
            return Err(folder.wrong("a weight could not be written".into()));
        }
        for (name, tensor) in &self.tensors {
            for PlacedPart { stored, written, .. } in &tensor.parts {
                let missing = written.lock().unwrap_or_else(|e| e.into_inner()).missing(stored.rows);
                if let Some(row) = missing {
                    let stored_name = stored.part.stored_name(name);
                    return Err(folder.wrong(format!("row {row} of `{stored_name}` was never written")));
                }
            }
        }
        let finish = |(path, mut file, bytes): (BundlePath, File, usize)| {
            let mut sum = || {
                // The end of the last tensor may be padding that nobody wrote.
                file.set_len(bytes as u64)?;
                file.sync_all()?;
                file.rewind()?;
                Digest::of_reader(&file, cancel)
            };
            match sum() {
                Ok((sha256, bytes)) => Ok((path, FileEntry { bytes, sha256 })),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => Err(BundleError::Cancelled),
                Err(e) => Err(BundleError::io("complete", folder.path().join(path.to_relative()))(e)),
            }
        };
        let queue = Mutex::new(self.files.into_iter());
        let take = || queue.lock().unwrap_or_else(|e| e.into_inner()).next();
        let worker = || std::iter::from_fn(take).map(finish).collect::<Result<Vec<_>, _>>();
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let mut done = thread::scope(|scope| {
            let others: Vec<_> = (1..threads).filter_map(|_| thread::Builder::new().spawn_scoped(scope, worker).ok()).collect();
            let mut done = worker()?;
            for other in others {
                done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
            }
            Ok::<_, BundleError>(done)
        })?;
        done.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(done)
    }
}

/// For each weight the sums of its parts.
pub(super) type PartSums = BTreeMap<String, Vec<PartSum>>;

/// One part of a weight, and the sum of its rows.
pub(super) struct PartSum {
    pub(super) part: Part,
    pub(super) row_bytes: usize,
    pub(super) sum: u64,
}

/// A sum of rows and their numbers that does not depend on the order in which they come. It finds mistakes, not forgers.
pub(super) fn sum_of_rows(first_row: usize, row_bytes: usize, bytes: &[u8]) -> u64 {
    let sum = |(row, bytes): (usize, &[u8])| {
        let mut hasher = DefaultHasher::new();
        hasher.write_usize(first_row + row);
        hasher.write(bytes);
        hasher.finish()
    };
    bytes.chunks(row_bytes).enumerate().map(sum).fold(0, u64::wrapping_add)
}

/// One file: its tensors with the places of their parts, counted from the start of the data, and everything that stands in its header.
#[derive(Default)]
struct FilePlan {
    tensors: Vec<(TensorSpec, Vec<(StoredPart, usize)>)>,
    entries: Vec<(String, StoredType, Vec<usize>, usize)>,
    paddings: usize,
    bytes: usize,
}

fn plan(specs: Vec<TensorSpec>, file_bytes: usize) -> Result<Vec<FilePlan>, String> {
    let mut files: Vec<FilePlan> = Vec::new();
    for spec in specs {
        let told = |reason| format!("weight `{}`: {reason}", spec.name);
        if spec.name.is_empty() || spec.name.starts_with(PADDING_PREFIX) {
            return Err(told("this name is not allowed".into()));
        }
        let parts = stored_parts(spec.encoding, &spec.shape).map_err(told)?;
        let bytes: usize = parts.iter().map(StoredPart::bytes).sum();
        let full = |file: &FilePlan| file.bytes > 0 && file.bytes.saturating_add(bytes) > file_bytes;
        match files.last_mut() {
            Some(file) if !full(file) => file.add(spec, parts)?,
            _ => {
                let mut file = FilePlan::default();
                file.add(spec, parts)?;
                files.push(file);
            }
        }
    }
    Ok(files)
}

impl FilePlan {
    fn add(&mut self, spec: TensorSpec, parts: Vec<StoredPart>) -> Result<(), String> {
        let mut placed = Vec::with_capacity(parts.len());
        for part in parts {
            placed.push((part.clone(), self.bytes));
            let stored_name = part.part.stored_name(&spec.name);
            self.entry(stored_name, part.dtype, part.shape.clone(), part.bytes())?;
            let gap = self.bytes.next_multiple_of(ALIGNMENT) - self.bytes;
            if gap > 0 {
                let name = format!("{PADDING_PREFIX}{}", self.paddings);
                self.paddings += 1;
                self.entry(name, StoredType::U8, vec![gap], gap)?;
            }
        }
        self.tensors.push((spec, placed));
        Ok(())
    }

    fn entry(&mut self, name: String, dtype: StoredType, shape: Vec<usize>, bytes: usize) -> Result<(), String> {
        self.bytes = self.bytes.checked_add(bytes).filter(|&n| n < isize::MAX as usize / 2).ok_or("a weight file would be too large")?;
        self.entries.push((name, dtype, shape, bytes));
        Ok(())
    }

    fn header(&self) -> Result<Vec<u8>, String> {
        let entries = self.entries.iter().map(|(name, dtype, shape, bytes)| (name.as_str(), *dtype, shape.as_slice(), *bytes));
        let metadata = self.tensors.iter().map(|(spec, _)| (spec.name.clone(), description(spec.encoding, &spec.shape)));
        write_header(entries, metadata.collect())
    }
}

/// Which rows were written: ranges that neither touch nor overlap, by start.
#[derive(Default)]
struct Rows(BTreeMap<usize, usize>);

impl Rows {
    /// Adds a range; the error is a row that was there already.
    fn add(&mut self, mut range: Range<usize>) -> Result<(), usize> {
        if range.is_empty() {
            return Ok(());
        }
        if let Some((&start, _)) = self.0.range(range.start..range.end).next() {
            return Err(start);
        }
        match self.0.range(..range.start).next_back() {
            Some((_, &end)) if end > range.start => return Err(range.start),
            Some((&start, &end)) if end == range.start => range.start = start,
            _ => {}
        }
        if let Some(end) = self.0.remove(&range.end) {
            range.end = end;
        }
        self.0.insert(range.start, range.end);
        Ok(())
    }

    /// The first row below `rows` that was not written.
    fn missing(&self, rows: usize) -> Option<usize> {
        let written = self.0.get(&0).copied().unwrap_or(0);
        (written < rows).then_some(written)
    }
}

#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
fn write_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, bytes, offset)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            n => (bytes, offset) = (&bytes[n..], offset + n as u64),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_in_any_order_each_once() {
        let mut rows = Rows::default();
        for range in [4..6, 0..2, 8..9, 2..4, 6..6] {
            rows.add(range).unwrap();
        }
        assert_eq!(rows.missing(9), Some(6));
        assert_eq!([rows.add(5..7), rows.add(7..10), rows.add(0..1), rows.add(6..9)], [Err(5), Err(8), Err(0), Err(8)]);
        rows.add(6..8).unwrap();
        assert_eq!((rows.missing(9), rows.missing(10), rows.0.len()), (None, Some(9), 1));
    }

    #[test]
    fn files_are_split_and_parts_aligned() {
        let spec = |name: &str, rows| TensorSpec { name: name.into(), encoding: Encoding::I8Row, shape: vec![rows, 64] };
        let files = plan(vec![spec("a", 10), spec("b", 3), spec("c", 1000), spec("d", 1)], 1000).unwrap();
        let names: Vec<Vec<_>> = files.iter().map(|f| f.tensors.iter().map(|t| t.0.name.as_str()).collect()).collect();
        assert_eq!(names, [vec!["a", "b"], vec!["c"], vec!["d"]]);
        for file in &files {
            assert!(file.tensors.iter().flat_map(|t| &t.1).all(|(_, offset)| offset % ALIGNMENT == 0));
            assert_eq!(file.bytes % ALIGNMENT, 0);
            assert_eq!(file.header().unwrap().len() % 4096, 0);
        }
        assert_eq!(files[0].paddings, 2);
    }

    #[test]
    fn senseless_plans_are_errors() {
        let spec = |name: &str, shape: &[usize]| TensorSpec { name: name.into(), encoding: Encoding::F32, shape: shape.to_vec() };
        assert!(plan(vec![spec("__pad.0", &[1])], 100).err().unwrap().contains("not allowed"));
        assert!(plan(vec![spec("a", &[1 << 40, 1 << 40])], 100).err().unwrap().contains("too large"));
    }
}
