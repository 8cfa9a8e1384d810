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
    loaded: Mutex<Loaded<Context>>,
}

/// What is loaded, never more than may be.
struct Loaded<C> {
    most: usize,
    /// With the time of their last use.
    contexts: HashMap<PathBuf, (C, u64)>,
    clock: u64,
}

impl<C> Loaded<C> {
    fn new(most: usize) -> Self {
        Self { most: most.max(1), contexts: HashMap::new(), clock: 0 }
    }

    /// The context of a file, which is loaded if it is not. Before that there is made room for it. One that is of no use to its first user is not kept.
    fn get<U, E>(&mut self, file: &Path, load: impl FnOnce() -> Result<C, E>, take: impl FnOnce(&C) -> Result<U, E>) -> Result<U, E> {
        self.clock += 1;
        if let Some((context, used)) = self.contexts.get_mut(file) {
            *used = self.clock;
            return take(context);
        }
        while self.contexts.len() >= self.most {
            let Some(oldest) = self.contexts.iter().min_by_key(|(_, (_, used))| *used).map(|(file, _)| file.clone()) else { break };
            self.contexts.remove(&oldest);
        }
        let context = load()?;
        let taken = take(&context)?;
        self.contexts.insert(file.to_owned(), (context, self.clock));
        Ok(taken)
    }
}

impl Contexts {
    pub(super) fn new(device: Device, most: usize) -> Self {
        Self { device, loaded: Mutex::new(Loaded::new(most)) }
    }

    /// A graph of a context binary, which is loaded if it is not. The graph keeps its context alive.
    pub(super) fn graph(&self, file: &Path, name: &str, expected: &Expected) -> Result<Arc<ExecGraph>, DeviceError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let graph = loaded.get(file, || self.device.load_file(file, expected), |context| context.graph(name).cloned());
        graph.map_err(failed)
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::{cell::Cell, rc::Rc};

    /// A context that counts those that live.
    struct Counted(Rc<Cell<usize>>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }

    #[test]
    fn no_more_contexts_are_loaded_than_may_be_and_the_least_recently_used_goes_first() {
        for (most, room) in [(0, 1), (1, 1), (2, 2), (3, 3)] {
            let (living, loads) = (Rc::new(Cell::new(0)), Cell::new(0));
            let mut loaded = Loaded::new(most);
            let mut expected: Vec<usize> = Vec::new();
            for file in [0, 1, 0, 2, 0, 3, 3, 1, 0, 2, 4, 4, 0] {
                let before = loads.get();
                let load = || {
                    // While one is loaded, too.
                    living.set(living.get() + 1);
                    assert!(living.get() <= room, "{} contexts where {most} may be", living.get());
                    loads.set(loads.get() + 1);
                    Ok::<_, ()>(Counted(living.clone()))
                };
                loaded.get(Path::new(&file.to_string()), load, |_| Ok(())).unwrap();
                let was_there = expected.contains(&file);
                assert_eq!(loads.get() == before, was_there, "{file} with {most}");
                expected.retain(|other| *other != file);
                expected.push(file);
                if expected.len() > room {
                    expected.remove(0);
                }
                assert_eq!(living.get(), expected.len(), "none goes before it must");
            }
        }
    }

    #[test]
    fn a_context_that_cannot_be_used_is_not_kept() {
        let mut loaded = Loaded::new(2);
        assert_eq!(loaded.get(Path::new("a"), || Err::<(), _>("damaged"), |_| Ok(())), Err("damaged"));
        assert_eq!(loaded.get(Path::new("a"), || Ok(()), |_| Err::<(), _>("no such graph")), Err("no such graph"));
        assert!(loaded.contexts.is_empty());
        assert_eq!(loaded.get(Path::new("a"), || Ok(()), |_| Ok::<_, ()>(())), Ok(()));
        assert_eq!(loaded.contexts.len(), 1);
    }
}
