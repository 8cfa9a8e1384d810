//! The memory of states: regions of large buffers, counted and used again.

use crate::vulkan::{Buffer, Command, Gpu, Use};
use qhx_ir::{DeviceError, StateBytes};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// What a region is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Kv,
    Recurrent,
}

/// Gives out the memory of all states of an executable.
pub(crate) struct Pool {
    pub(crate) gpu: Arc<Gpu>,
    kv: AtomicU64,
    recurrent: AtomicU64,
    /// No more than this is given out.
    limit: Option<u64>,
    inner: Mutex<Inner>,
    /// Copies that have to be made before the next submission.
    errands: Mutex<Vec<Command>>,
}

#[derive(Default)]
struct Inner {
    /// Regions that nobody has, by size.
    free: HashMap<u64, Vec<(Arc<Buffer>, u64)>>,
    /// The buffer that is cut up now, and how much of it is given out.
    slab: Option<(Arc<Buffer>, u64)>,
}

/// Regions begin at multiples of this.
const ALIGNMENT: u64 = 256;
const LARGEST_SLAB: u64 = 64 << 20;
/// Regions for which memory is taken at once.
const MOST_REGIONS: usize = 16;

impl Pool {
    pub(crate) fn new(gpu: &Arc<Gpu>, limit: Option<u64>) -> Arc<Self> {
        let (kv, recurrent) = Default::default();
        Arc::new(Self { gpu: gpu.clone(), kv, recurrent, limit, inner: Mutex::default(), errands: Mutex::default() })
    }

    /// What is given out now.
    pub(crate) fn bytes(&self) -> StateBytes {
        StateBytes { kv: self.kv.load(Ordering::Relaxed), recurrent: self.recurrent.load(Ordering::Relaxed) }
    }

    /// A region of `bytes` bytes with any content, of which a state has `most` at most.
    pub(crate) fn region(self: &Arc<Self>, bytes: u64, most: usize, content: Content) -> Result<Region, DeviceError> {
        let bytes = bytes.max(4).next_multiple_of(ALIGNMENT);
        let counter = self.counter(content);
        counter.fetch_add(bytes, Ordering::Relaxed);
        let needed = self.bytes().total();
        let found = match self.limit {
            Some(limit) if needed > limit => Err(DeviceError::StatesFull { needed, limit }),
            _ => self.place(bytes, most),
        };
        match found {
            Ok((buffer, offset)) => Ok(Region { pool: self.clone(), buffer, offset, bytes, content }),
            Err(error) => {
                counter.fetch_sub(bytes, Ordering::Relaxed);
                Err(error)
            }
        }
    }

    fn counter(&self, content: Content) -> &AtomicU64 {
        match content {
            Content::Kv => &self.kv,
            Content::Recurrent => &self.recurrent,
        }
    }

    fn place(&self, bytes: u64, most: usize) -> Result<(Arc<Buffer>, u64), DeviceError> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = inner.free.get_mut(&bytes).and_then(Vec::pop) {
            return Ok(place);
        }
        if let Some((slab, used)) = &mut inner.slab
            && *used + bytes <= slab.bytes()
        {
            *used += bytes;
            return Ok((slab.clone(), *used - bytes));
        }
        // What is left of the last slab is not lost for long: slabs hold many regions of one size.
        let size =
            (bytes * most.min(MOST_REGIONS) as u64).clamp(1 << 16, LARGEST_SLAB).max(bytes).min(self.gpu.largest_buffer().max(bytes));
        let slab = match Buffer::new(&self.gpu, size, Use::Device) {
            Err(_) if size > bytes => Buffer::new(&self.gpu, bytes, Use::Device)?,
            slab => slab?,
        };
        let slab = Arc::new(slab);
        inner.slab = Some((slab.clone(), bytes));
        Ok((slab, 0))
    }

    /// Copies a region before anything else is submitted.
    pub(crate) fn copy(&self, from: &Region, to: &Region) {
        let bytes = from.bytes.min(to.bytes);
        let copy =
            Command::Copy { from: from.buffer.clone(), from_offset: from.offset, to: to.buffer.clone(), to_offset: to.offset, bytes };
        self.add_errand(copy);
    }

    /// Has a command done before the next submission, after those that were added before.
    pub(crate) fn add_errand(&self, command: Command) {
        self.errands.lock().unwrap_or_else(PoisonError::into_inner).extend([command, Command::Barrier]);
    }

    /// What has to be done before the next submission.
    pub(crate) fn take_errands(&self) -> Vec<Command> {
        std::mem::take(&mut *self.errands.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Some memory of a state.
pub(crate) struct Region {
    pool: Arc<Pool>,
    pub(crate) buffer: Arc<Buffer>,
    pub(crate) offset: u64,
    bytes: u64,
    content: Content,
}

impl Region {
    pub(crate) fn address(&self) -> u64 {
        self.buffer.address() + self.offset
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Work that is under way may still read it; whoever gets it next writes to it in later submissions only.
        self.pool.counter(self.content).fetch_sub(self.bytes, Ordering::Relaxed);
        let mut inner = self.pool.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.free.entry(self.bytes).or_default().push((self.buffer.clone(), self.offset));
    }
}
