//! Sessions as files: saved and restored bit for bit, on the model they were made with.
//!
//! A snapshot is `magic, length of the header, header (JSON), content, sum`. The header says whose session it is and what the content
//! is made of; the sum (SHA-256 over everything before it) finds damage. A file may still lie: every number in it is checked before use.

use super::{Checkpoint, Session, recurrent};
use crate::{
    Encoded, Error, Model, files,
    rows::MediumSpan,
    soft_rows::{deepstack_count, soft_row_width},
};
use qhx_bundle::Digest;
use qhx_ir::{DeviceError, KvType, Program, Slot, SlotData};
use qhx_media::MediaKind;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{fs, io::Read, path::Path, sync::Arc};

const MAGIC: &[u8; 8] = b"qhxsess1";
const SUM_BYTES: usize = 32;
/// The largest snapshot that is read.
const MAX_BYTES: u64 = 64 << 30;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    /// The model's name, for people, and its fingerprint.
    model: String,
    fingerprint: String,
    /// All rows of the session.
    ids: Vec<u32>,
    /// The media among them, in the order of their content: soft rows, then the deepstack sets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    media: Vec<MediumEntry>,
    /// How many rows the state covers, and in which epoch.
    state_rows: usize,
    epoch: usize,
    /// Whether the logits of the last row follow the slots.
    logits: bool,
    /// The slots of the state in the order of their content.
    slots: Vec<SlotEntry>,
    checkpoints: Vec<CheckpointEntry>,
    /// What the caller keeps with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    note: Option<Value>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MediumEntry {
    kind: MediaKind,
    digest: Digest,
    /// Its first row, how many rows of it the session has, and how many it has in all.
    first: usize,
    rows: usize,
    all_rows: usize,
    /// Rows and columns of an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    grid: Option<[usize; 2]>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckpointEntry {
    rows: usize,
    kept: bool,
    slots: Vec<SlotEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SlotEntry {
    name: Arc<str>,
    /// Of a KV slot; absent: recurrent, f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dtype: Option<KvType>,
    /// Bytes of content: keys, then values; or the state.
    bytes: usize,
}

impl Session {
    /// Writes the session to a file, whole or not at all.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        self.save_with(path, None)
    }

    /// The same, with something that the caller wants back.
    pub(crate) fn save_with(&self, path: &Path, note: Option<&Value>) -> Result<(), Error> {
        // A slip of a file name must not cost another file; an empty one costs nothing.
        if fs::metadata(path).is_ok_and(|about| about.is_file() && about.len() > 0) && !is_snapshot(path)? {
            return Err(wrong(path, "exists and is not a saved session: choose another name".into()));
        }
        let program = self.model.program();
        let mut content = Vec::new();
        // A device that kept a window only cannot give all rows: they are saved as ids, and computed again.
        let exported =
            program.slots.keys().map(|name| Ok((name, self.sequence.state.export(name)?))).collect::<Result<Vec<_>, DeviceError>>();
        let exported = exported.ok().filter(|_| !self.lost && !self.sequence.state.is_empty());
        let state_rows = if exported.is_some() { self.sequence.state.len() } else { 0 };
        let exported = exported.unwrap_or_default();
        let slots = exported.iter().map(|(name, data)| put(&mut content, name, data)).collect();
        let mut checkpoints = Vec::new();
        for checkpoint in self.checkpoints.iter().filter(|c| c.len <= state_rows) {
            let slots = checkpoint.slots.iter().map(|(name, data)| put(&mut content, name, data)).collect();
            checkpoints.push(CheckpointEntry { rows: checkpoint.len, kept: checkpoint.kept, slots });
        }
        let logits = &self.sequence.logits;
        content.extend(logits.iter().flat_map(|x| x.to_le_bytes()));
        // A session's media are encoded before they are put in.
        let media = self.sequence.rows.media().iter().filter_map(|medium| put_medium(&mut content, medium)).collect();
        let header = Header {
            model: self.model.name().to_owned(),
            fingerprint: self.model.fingerprint().to_owned(),
            ids: self.sequence.rows.ids().to_vec(),
            media,
            state_rows,
            epoch: self.sequence.epoch,
            logits: !logits.is_empty(),
            slots,
            checkpoints,
            note: note.cloned(),
        };
        let header = serde_json::to_vec(&header).map_err(|e| wrong(path, format!("cannot be written: {e}")))?;
        let mut bytes = Vec::with_capacity(MAGIC.len() + 8 + header.len() + content.len() + SUM_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&(header.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&header);
        bytes.extend_from_slice(&content);
        let sum = Digest::of(&bytes);
        files::write_atomically(path, |file| {
            file.write_all(&bytes)?;
            file.write_all(sum.as_bytes())
        })
    }
}

impl Model {
    /// A session as it was saved. The file must be whole and made with this very model; the device may be another.
    pub fn restore(&self, path: &Path) -> Result<Session, Error> {
        Ok(self.restore_with(path)?.0)
    }

    /// The same, and what was saved with it.
    pub(crate) fn restore_with(&self, path: &Path) -> Result<(Session, Option<Value>), Error> {
        let bytes = read(path)?;
        let (mut header, mut content) = open(&bytes).map_err(|reason| wrong(path, reason))?;
        if header.fingerprint != self.fingerprint() {
            let (saved, here) = (header.fingerprint.get(..8).unwrap_or_default(), self.fingerprint().get(..8).unwrap_or_default());
            let reason =
                format!("was saved with another model: `{}` (fingerprint {saved}…), and this is `{}` ({here}…)", header.model, self.name());
            return Err(wrong(path, reason));
        }
        let session = self.restore_checked(&header, &mut content).map_err(|reason| wrong(path, reason))?;
        Ok((session, header.note.take()))
    }

    fn restore_checked(&self, header: &Header, content: &mut Content<'_>) -> Result<Session, String> {
        let program = self.program();
        let Header { ids, state_rows, epoch, .. } = header;
        if !ids.is_empty() && ids.len() > self.context() {
            return Err(format!("has {} rows, this model was loaded with a context of {}", ids.len(), self.context()));
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocabulary().ids) {
            return Err(format!("holds the id {id}, which is not in the vocabulary of {}", self.vocabulary().ids));
        }
        if *state_rows > ids.len() || *epoch > program.epochs.len() {
            return Err(format!("claims {state_rows} computed rows of {} in epoch {epoch}", ids.len()));
        }
        let mut session = self.session().map_err(|e| e.to_string())?;
        let expected = program.slots.keys().filter(|_| *state_rows > 0);
        if !header.slots.iter().map(|s| &s.name).eq(expected) {
            return Err("does not hold the slots of this model's program".into());
        }
        for entry in &header.slots {
            let data = content.slot(program, entry, *state_rows)?;
            session.sequence.state.import(&entry.name, &data).map_err(|e| e.to_string())?;
        }
        if *state_rows > 0 {
            session.sequence.state.set_len(*state_rows).map_err(|e| e.to_string())?;
        }
        let mut last = 0;
        for entry in &header.checkpoints {
            if entry.rows <= last || entry.rows > *state_rows {
                return Err(format!("has a checkpoint at row {} of {state_rows} after one at row {last}", entry.rows));
            }
            last = entry.rows;
            if !entry.slots.iter().map(|s| &s.name).eq(recurrent(program).map(|(name, _)| name)) {
                return Err(format!("the checkpoint at row {last} does not hold the recurrent slots of this model's program"));
            }
            let slots = entry.slots.iter().map(|e| Ok((e.name.clone(), content.slot(program, e, 0)?))).collect::<Result<_, String>>()?;
            session.checkpoints.push(Checkpoint { len: entry.rows, slots: Arc::new(slots), kept: entry.kept });
        }
        if header.logits {
            let bytes = content.take(self.vocabulary().logits.saturating_mul(4), "the logits")?;
            session.sequence.logits.extend(floats(bytes));
        }
        let media = self.restore_media(header, content)?;
        if !content.0.is_empty() {
            return Err(format!("{} bytes are left over at its end", content.0.len()));
        }
        session.sequence.rows.extend(ids, &media);
        session.sequence.epoch = *epoch;
        Ok(session)
    }
}

impl Model {
    fn restore_media(&self, header: &Header, content: &mut Content<'_>) -> Result<Vec<MediumSpan>, String> {
        let mut media: Vec<MediumSpan> = Vec::new();
        for entry in &header.media {
            let MediumEntry { kind, digest, first, rows, all_rows, grid } = *entry;
            let width = soft_row_width(self.program()).filter(|_| self.placeholder(kind).is_some());
            let width = width.ok_or_else(|| format!("holds an {kind}, which this model does not take"))?;
            let end = first.checked_add(rows).filter(|&end| end <= header.ids.len());
            let free = media.last().map_or(0, MediumSpan::end);
            let in_place = rows > 0 && rows <= all_rows && first >= free && end.is_some();
            let on_grid = grid.is_none_or(|[down, across]| down.checked_mul(across) == Some(all_rows));
            if !in_place || !on_grid || grid.is_some() != (kind == MediaKind::Image) {
                return Err(format!("claims {rows} of {all_rows} rows of a medium from row {first} on, of {} rows", header.ids.len()));
            }
            let bytes = all_rows.checked_mul(width).and_then(|n| n.checked_mul(4)).ok_or("claims a medium beyond all bounds")?;
            let mut numbers = || Ok::<_, String>(floats(content.take(bytes, "the rows of a medium")?).collect::<Vec<f32>>());
            let soft = numbers()?;
            let deepstack = (0..deepstack_count(self.program())).map(|_| numbers()).collect::<Result<_, _>>()?;
            let mut medium = MediumSpan::new(first, Arc::new(Encoded::new(kind, digest, all_rows, grid, soft, deepstack)));
            medium.rows = rows;
            media.push(medium);
        }
        Ok(media)
    }
}

/// What follows the header and is not yet read.
struct Content<'a>(&'a [u8]);

impl<'a> Content<'a> {
    fn take(&mut self, bytes: usize, what: &str) -> Result<&'a [u8], String> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or_else(|| format!("ends within {what}"))?;
        self.0 = rest;
        Ok(taken)
    }

    /// The content of a slot, which must be exactly as large as the program's slot is after `rows` rows.
    fn slot(&mut self, program: &Program, entry: &SlotEntry, rows: usize) -> Result<SlotData, String> {
        let slot = &program.slots[&entry.name];
        let numbers = |sizes: &[usize]| sizes.iter().try_fold(4usize, |n, &d| n.checked_mul(d));
        let (dtype, expected) = match *slot {
            Slot::Kv { kv_heads, head_dim, dtype, .. } => {
                let bytes = numbers(&[rows, kv_heads, head_dim]).map(|n| n / 4 * dtype.bytes());
                (Some(dtype), bytes.and_then(|n| n.checked_mul(2)))
            }
            Slot::Fifo { rows, channels } => (None, numbers(&[rows, channels])),
            Slot::Delta { heads, key_dim, value_dim } => (None, numbers(&[heads, key_dim, value_dim])),
        };
        if entry.dtype != dtype || Some(entry.bytes) != expected {
            return Err(format!(
                "slot `{}` must have {expected:?} bytes of {dtype:?}, found {} of {:?}",
                entry.name, entry.bytes, entry.dtype
            ));
        }
        let bytes = self.take(entry.bytes, &format!("slot `{}`", entry.name))?;
        Ok(match dtype {
            Some(dtype) => {
                let (keys, values) = bytes.split_at(bytes.len() / 2);
                SlotData::Kv { dtype, rows, keys: keys.to_vec(), values: values.to_vec() }
            }
            None => SlotData::Recurrent(floats(bytes).collect()),
        })
    }
}

fn put(content: &mut Vec<u8>, name: &Arc<str>, data: &SlotData) -> SlotEntry {
    let start = content.len();
    let dtype = match data {
        SlotData::Kv { dtype, keys, values, .. } => {
            content.extend_from_slice(keys);
            content.extend_from_slice(values);
            Some(*dtype)
        }
        SlotData::Recurrent(numbers) => {
            content.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
            None
        }
    };
    SlotEntry { name: name.clone(), dtype, bytes: content.len() - start }
}

fn put_medium(content: &mut Vec<u8>, medium: &MediumSpan) -> Option<MediumEntry> {
    let encoded = medium.encoded()?;
    let all_rows = encoded.rows();
    let sets = (0..encoded.deepstack_count()).map(|number| encoded.deepstack_rows(number, 0..all_rows));
    for numbers in std::iter::once(encoded.soft_rows(0..all_rows)).chain(sets) {
        content.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
    }
    let (kind, digest, grid) = (encoded.kind(), encoded.digest(), encoded.grid());
    Some(MediumEntry { kind, digest, first: medium.first, rows: medium.rows, all_rows, grid })
}

/// All bytes of a file that begins as a snapshot does. Anything else, however long, is refused by its first bytes.
fn read(path: &Path) -> Result<Vec<u8>, Error> {
    if !is_snapshot(path)? {
        return Err(wrong(path, "is not a session saved by this version of qhx".into()));
    }
    Ok(qhx_bundle::files::read(path, MAX_BYTES)?)
}

/// Whether a regular file begins as a snapshot does.
fn is_snapshot(path: &Path) -> Result<bool, Error> {
    let mut start = Vec::new();
    let read = qhx_bundle::files::open(path)?.take(MAGIC.len() as u64).read_to_end(&mut start);
    read.map_err(|source| Error::File { what: "read", path: path.to_owned(), source })?;
    Ok(start == MAGIC)
}

/// The header and the content of a file that is whole.
fn open(bytes: &[u8]) -> Result<(Header, Content<'_>), String> {
    let (body, sum) = bytes.split_at_checked(bytes.len().saturating_sub(SUM_BYTES)).ok_or("is truncated")?;
    let rest = body.strip_prefix(MAGIC).ok_or("is truncated")?;
    if Digest::of(body).as_bytes() != sum {
        return Err("is damaged: its checksum does not match its content".into());
    }
    let (length, rest) = rest.split_first_chunk::<8>().ok_or("ends within its header")?;
    let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| "has an impossible header")?;
    let (header, content) = rest.split_at_checked(length).ok_or("ends within its header")?;
    let header = serde_json::from_slice(header).map_err(|e| format!("has an invalid header: {e}"))?;
    Ok((header, Content(content)))
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

fn wrong(path: &Path, reason: String) -> Error {
    Error::Snapshot { path: path.to_owned(), reason }
}
