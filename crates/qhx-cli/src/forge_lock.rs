//! One process at a time forges a checkpoint into the cache; the others wait, and say so.
//!
//! The lock is the operating system's, on a small file in the cache that stays there: it is free again when its holder ends, however it ends.

use crate::{failure::Failure, interrupt::Interrupt, output};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
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
    pub(crate) fn wait_for(place: &Path, interrupt: &Interrupt) -> Result<Self, Failure> {
        let cannot = |error: io::Error| Failure::work(format!("cannot lock the cache for {}: {error}", place.display()));
        let (Some(key), Some(cache)) = (place.parent().and_then(Path::file_name), place.ancestors().nth(3)) else {
            return Err(cannot(io::ErrorKind::InvalidInput.into()));
        };
        let folder = cache.join("locks");
        fs::create_dir_all(&folder).map_err(cannot)?;
        let file = File::options().create(true).truncate(false).write(true).open(folder.join(key)).map_err(cannot)?;
        let mut waiting = None;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::WouldBlock) if interrupt.is_set() => return Err(Failure::work("cancelled: nothing was written")),
                Err(TryLockError::WouldBlock) => {
                    waiting.get_or_insert_with(|| Waiting::new(place));
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

/// What a person sees meanwhile: a line, and on a terminal the time that has passed.
struct Waiting(ProgressBar);

impl Waiting {
    fn new(place: &Path) -> Self {
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        output::dim_note(&format!("another qhx process is forging {name}: waiting for it"));
        let style = ProgressStyle::with_template("{spinner} {elapsed}").unwrap_or_else(|_| ProgressStyle::default_spinner());
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10)).with_style(style);
        bar.enable_steady_tick(2 * PAUSE);
        Self(bar)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
