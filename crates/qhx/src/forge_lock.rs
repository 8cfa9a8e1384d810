//! One process at a time forges a checkpoint into the cache; the others wait, and tell.
//!
//! The lock is the operating system's, on a small file in the cache that stays there: it is free again when its holder ends, however it ends.

use crate::{Error, OpenEvent};
use qhx_runtime::Cancel;
use std::{
    fs::{self, File, TryLockError},
    io,
    path::Path,
    thread,
    time::Duration,
};

/// How often a waiting process looks whether it is its turn.
const PAUSE: Duration = Duration::from_millis(50);

/// Held while a checkpoint is forged.
pub(crate) struct ForgeLock {
    /// Closing the file frees the lock.
    _file: File,
}

impl ForgeLock {
    /// Waits for the turn to forge the bundle at `place`, which is `models/KEY/NAME` in the cache.
    pub(crate) fn wait_for(place: &Path, cancel: &Cancel, on_event: &mut dyn FnMut(OpenEvent<'_>)) -> Result<Self, Error> {
        let cannot = Error::io("lock the cache for", place);
        let (Some(key), Some(cache)) = (place.parent().and_then(Path::file_name), place.ancestors().nth(3)) else {
            return Err(cannot(io::ErrorKind::InvalidInput.into()));
        };
        let folder = cache.join("locks");
        fs::create_dir_all(&folder).map_err(&cannot)?;
        let file = File::options().create(true).truncate(false).write(true).open(folder.join(key)).map_err(&cannot)?;
        let mut told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::WouldBlock) if cancel.is_cancelled() => return Err(Error::Cancelled),
                Err(TryLockError::WouldBlock) => {
                    if !std::mem::replace(&mut told, true) {
                        on_event(OpenEvent::Waiting { place });
                    }
                    thread::sleep(PAUSE);
                }
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                    // Bundles appear whole or not at all; without locks some work is done twice.
                    return Ok(Self { _file: file });
                }
                Err(TryLockError::Error(error)) => return Err(cannot(error)),
            }
        }
    }
}
