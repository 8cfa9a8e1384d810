//! The memory of states: pages of keys and values, and recurrent contents, counted and shared.
//!
//! A page holds [`PAGE_ROWS`] rows of one KV slot. States that were forked from one another share their pages; a page is copied before it is written to while
//! somebody else has it. Pages that nobody has go back to the pool they came from.

use half::f16;
use qhx_ir::{AlignedBytes, DeviceError, KvType, StateBytes};
use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Rows of a page: the keys that attention scores at once.
pub(crate) const PAGE_ROWS: usize = 64;
/// Free pages are kept up to so many bytes.
const MOST_FREE: u64 = 256 << 20;

/// Gives out the memory of all states of an executable.
#[derive(Default)]
pub(crate) struct PagePool {
    kv: AtomicU64,
    recurrent: AtomicU64,
    /// No more than this is given out.
    limit: Option<u64>,
    /// By size.
    free: Mutex<Free>,
}

#[derive(Default)]
struct Free {
    pages: HashMap<usize, Vec<AlignedBytes>>,
    bytes: u64,
}

impl PagePool {
    pub(crate) fn new(limit: Option<u64>) -> Self {
        Self { limit, ..Self::default() }
    }

    /// What is given out now.
    pub(crate) fn bytes(&self) -> StateBytes {
        StateBytes { kv: self.kv.load(Ordering::Relaxed), recurrent: self.recurrent.load(Ordering::Relaxed) }
    }

    /// Counts `bytes` more, if the limit allows them.
    fn count(&self, counter: &AtomicU64, bytes: usize) -> Result<(), DeviceError> {
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
        let total = self.bytes().total();
        match self.limit {
            Some(limit) if total > limit => {
                counter.fetch_sub(bytes as u64, Ordering::Relaxed);
                Err(DeviceError::StatesFull { needed: total, limit })
            }
            _ => Ok(()),
        }
    }
}

/// Some rows of a KV slot: keys `[kv_heads, PAGE_ROWS, head_dim]`, then values.
pub(crate) struct Page {
    bytes: AlignedBytes,
    pool: Arc<PagePool>,
}

impl Page {
    fn new(pool: &Arc<PagePool>, bytes: usize) -> Result<Self, DeviceError> {
        pool.count(&pool.kv, bytes)?;
        let mut free = pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        let reused = free.pages.get_mut(&bytes).and_then(Vec::pop);
        if reused.is_some() {
            free.bytes -= bytes as u64;
        }
        drop(free);
        Ok(Self { bytes: reused.unwrap_or_else(|| AlignedBytes::zeroed(bytes)), pool: pool.clone() })
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let size = bytes.as_ref().len();
        self.pool.kv.fetch_sub(size as u64, Ordering::Relaxed);
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.bytes + size as u64 <= MOST_FREE {
            free.bytes += size as u64;
            free.pages.entry(size).or_default().push(bytes);
        }
    }
}

/// The rows of a KV slot.
pub(crate) struct KvRows {
    pages: Vec<Arc<Page>>,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) dtype: KvType,
    pool: Arc<PagePool>,
}

/// Keys and values of one head, from some row of a page to its end.
pub(crate) type Block<'a, E> = (&'a [E], &'a [E]);

/// A type in which keys and values are kept.
pub(crate) trait Kept: bytemuck::Pod {}
impl Kept for f32 {}
impl Kept for f16 {}

impl KvRows {
    pub(crate) fn new(pool: &Arc<PagePool>, kv_heads: usize, head_dim: usize, dtype: KvType, capacity: usize) -> Self {
        Self { pages: Vec::with_capacity(capacity.div_ceil(PAGE_ROWS)), kv_heads, head_dim, dtype, pool: pool.clone() }
    }

    fn page_bytes(&self) -> usize {
        2 * self.kv_heads * PAGE_ROWS * self.head_dim * self.dtype.bytes()
    }

    /// Bytes of its pages.
    pub(crate) fn bytes(&self) -> u64 {
        (self.pages.len() * self.page_bytes()) as u64
    }

    /// Gets `rows` ready to be written: their pages are there and are this slot's alone. What is before them stays.
    pub(crate) fn touch(&mut self, rows: Range<usize>) -> Result<(), DeviceError> {
        if rows.is_empty() {
            return Ok(());
        }
        let bytes = self.page_bytes();
        let first = rows.start / PAGE_ROWS;
        for number in first..rows.end.div_ceil(PAGE_ROWS) {
            let Some(page) = self.pages.get_mut(number) else {
                self.pages.push(Arc::new(Page::new(&self.pool, bytes)?));
                continue;
            };
            if Arc::get_mut(page).is_none() {
                let mut own = Page::new(&self.pool, bytes)?;
                own.bytes.as_mut().copy_from_slice(page.bytes.as_ref());
                *page = Arc::new(own);
            }
        }
        Ok(())
    }

    /// Gives up the pages that have none of the first `rows` rows.
    pub(crate) fn truncate(&mut self, rows: usize) {
        self.pages.truncate(rows.div_ceil(PAGE_ROWS));
    }

    /// The same rows for a state of this capacity, sharing their pages.
    pub(crate) fn fork(&self, rows: usize, capacity: usize) -> Self {
        let mut fork = Self::new(&self.pool, self.kv_heads, self.head_dim, self.dtype, capacity);
        fork.pages.extend_from_slice(&self.pages[..rows.div_ceil(PAGE_ROWS)]);
        fork
    }

    /// The keys and values of a head, from row `first` to the end of its page.
    pub(crate) fn block<E: Kept>(&self, head: usize, first: usize) -> Block<'_, E> {
        let (page, row) = (&self.pages[first / PAGE_ROWS], first % PAGE_ROWS);
        let (keys, values) = numbers::<E>(page.bytes.as_ref(), self.kv_heads * PAGE_ROWS * self.head_dim);
        let place = (head * PAGE_ROWS + row) * self.head_dim..(head + 1) * PAGE_ROWS * self.head_dim;
        (&keys[place.clone()], &values[place])
    }

    /// The pages of some rows, to be written; see [`KvRows::touch`].
    pub(crate) fn pages_mut(&mut self, rows: &Range<usize>) -> &mut [Arc<Page>] {
        &mut self.pages[rows.start / PAGE_ROWS..rows.end.div_ceil(PAGE_ROWS)]
    }

    /// A row of a head as bytes: its key, then its value.
    pub(crate) fn row(&self, head: usize, row: usize) -> (&[u8], &[u8]) {
        let (keys, values) = self.pages[row / PAGE_ROWS].bytes.as_ref().split_at(self.page_bytes() / 2);
        let place = self.row_bytes(head, row);
        (&keys[place.clone()], &values[place])
    }

    /// Writes a row of a head, of a page that is this slot's alone.
    pub(crate) fn set_row(&mut self, head: usize, row: usize, key: &[u8], value: &[u8]) {
        let (place, half) = (self.row_bytes(head, row), self.page_bytes() / 2);
        let (keys, values) = own(&mut self.pages[row / PAGE_ROWS]).bytes.as_mut().split_at_mut(half);
        keys[place.clone()].copy_from_slice(key);
        values[place].copy_from_slice(value);
    }

    fn row_bytes(&self, head: usize, row: usize) -> Range<usize> {
        let size = self.head_dim * self.dtype.bytes();
        let first = (head * PAGE_ROWS + row % PAGE_ROWS) * size;
        first..first + size
    }
}

/// A page's keys and values as numbers.
fn numbers<E: Kept>(bytes: &[u8], count: usize) -> (&[E], &[E]) {
    bytemuck::cast_slice(bytes).split_at(count)
}

/// Keys and values of a page that is about to be written.
pub(crate) fn numbers_mut<E: Kept>(page: &mut Arc<Page>) -> (&mut [E], &mut [E]) {
    let numbers: &mut [E] = bytemuck::cast_slice_mut(own(page).bytes.as_mut());
    let half = numbers.len() / 2;
    numbers.split_at_mut(half)
}

fn own(page: &mut Arc<Page>) -> &mut Page {
    Arc::get_mut(page).unwrap_or_else(|| unreachable!("a page is made the state's own before it is written to"))
}

/// The content of a recurrent slot, aligned so that vectors of it can be streamed.
pub(crate) struct Numbers {
    bytes: AlignedBytes,
    pool: Arc<PagePool>,
}

impl Numbers {
    pub(crate) fn zeroed(pool: &Arc<PagePool>, count: usize) -> Result<Self, DeviceError> {
        pool.count(&pool.recurrent, 4 * count)?;
        Ok(Self { bytes: AlignedBytes::zeroed(4 * count), pool: pool.clone() })
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        bytemuck::cast_slice(self.bytes.as_ref())
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.bytes.as_mut())
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        self.pool.recurrent.fetch_sub(self.bytes.as_ref().len() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(pool: &Arc<PagePool>) -> KvRows {
        KvRows::new(pool, 2, 4, KvType::F32, 1000)
    }

    fn fill(kv: &mut KvRows, rows: Range<usize>, number: f32) {
        kv.touch(rows.clone()).unwrap();
        for row in rows {
            let bytes = bytemuck::cast_slice::<f32, u8>(&[number; 4]).to_vec();
            (0..2).for_each(|head| kv.set_row(head, row, &bytes, &bytes));
        }
    }

    fn key(kv: &KvRows, row: usize) -> f32 {
        kv.block::<f32>(1, row).0[0]
    }

    #[test]
    fn forks_share_pages_until_they_write() {
        let pool = Arc::new(PagePool::new(None));
        let page = 2 * 2 * 4 * 64 * 4;
        let mut kv = rows(&pool);
        fill(&mut kv, 0..130, 1.0);
        assert_eq!(pool.bytes().kv, 3 * page);
        let mut fork = kv.fork(130, 1000);
        assert_eq!(pool.bytes().kv, 3 * page, "nothing is copied");
        fill(&mut fork, 130..131, 2.0);
        assert_eq!(pool.bytes().kv, 4 * page, "the page that is written to");
        fill(&mut kv, 130..200, 3.0);
        assert_eq!((key(&fork, 129), key(&fork, 130), key(&kv, 130)), (1.0, 2.0, 3.0));
        let first = kv.fork(64, 1000);
        drop((kv, fork));
        assert_eq!((pool.bytes().kv, key(&first, 63)), (page, 1.0));
        drop(first);
        assert_eq!(pool.bytes(), StateBytes::default());
    }

    #[test]
    fn memory_has_a_limit() {
        let page = 2 * 2 * 4 * 64 * 4;
        let pool = Arc::new(PagePool::new(Some(2 * page)));
        let mut kv = rows(&pool);
        kv.touch(0..128).unwrap();
        let error = kv.touch(128..129).unwrap_err();
        assert!(matches!(error, DeviceError::StatesFull { limit, .. } if limit == 2 * page), "{error}");
        kv.truncate(64);
        kv.touch(64..65).unwrap();
        assert!(Numbers::zeroed(&pool, 1).is_err());
        assert_eq!(pool.bytes(), StateBytes { kv: 2 * page, recurrent: 0 });
    }
}
