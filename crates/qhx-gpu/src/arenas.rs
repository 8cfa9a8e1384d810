//! Memory for inputs, intermediate values and outputs, which programs share that never run at the same time.

use crate::vulkan::{Buffer, Fault, Gpu, Use};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

/// The arenas of groups of programs, one for each use, as long as one of the programs lives.
#[derive(Default)]
pub(crate) struct Arenas(Mutex<HashMap<(u64, Use), Weak<Buffer>>>);

impl Arenas {
    /// An arena of so many bytes at least, that of the group if it is large enough.
    pub(crate) fn get(&self, gpu: &Arc<Gpu>, group: Option<u64>, purpose: Use, bytes: u64) -> Result<Arc<Buffer>, Fault> {
        let new = |bytes: u64| Ok(Arc::new(Buffer::new(gpu, bytes, purpose)?));
        let Some(group) = group else { return new(bytes) };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, arena| arena.strong_count() > 0);
        if let Some(arena) = all.get(&(group, purpose)).and_then(Weak::upgrade).filter(|arena| arena.bytes() >= bytes) {
            return Ok(arena);
        }
        // A little more, so that it serves the next one that needs about as much.
        let more = bytes.next_multiple_of((bytes.next_power_of_two() / 8).max(1)).min(gpu.largest_buffer().max(bytes));
        let arena = new(more).or_else(|_: Fault| new(bytes))?;
        all.insert((group, purpose), Arc::downgrade(&arena));
        Ok(arena)
    }
}
