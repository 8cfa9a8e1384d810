//! The loaded contexts of all programs on a device: a processor can hold only a few at once.

use super::graphs::failed;
use crate::{Context, Device, ExecGraph, Expected};
use qhx_ir::DeviceError;
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// A device with its loaded contexts. Beyond a limit, the least recently used one is released.
pub(super) struct Contexts {
    pub(super) device: Device,
    most: usize,
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    /// With the time of their last use.
    contexts: HashMap<PathBuf, (Context, u64)>,
    clock: u64,
}

impl Contexts {
    pub(super) fn new(device: Device, most: usize) -> Self {
        Self { device, most, loaded: Mutex::default() }
    }

    /// A graph of a context binary, which is loaded if it is not. The graph keeps its context alive.
    pub(super) fn graph(&self, file: &Path, name: &str, expected: &Expected) -> Result<Arc<ExecGraph>, DeviceError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let Loaded { contexts, clock } = &mut *loaded;
        *clock += 1;
        if let Some((context, used)) = contexts.get_mut(file) {
            *used = *clock;
            return Ok(context.graph(name).map_err(failed)?.clone());
        }
        while contexts.len() >= self.most.max(1) {
            let Some(oldest) = contexts.iter().min_by_key(|(_, (_, used))| *used).map(|(file, _)| file.clone()) else { break };
            contexts.remove(&oldest);
        }
        let context = self.device.load_file(file, expected).map_err(failed)?;
        let graph = context.graph(name).map_err(failed)?.clone();
        contexts.insert(file.to_owned(), (context, *clock));
        Ok(graph)
    }

    /// Releases a context; it is loaded again when it is needed.
    pub(super) fn release(&self, file: &Path) {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).contexts.remove(file);
    }

    /// The number of loaded contexts.
    pub(super) fn count(&self) -> usize {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).contexts.len()
    }
}
