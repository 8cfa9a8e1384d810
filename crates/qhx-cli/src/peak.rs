//! The most memory that this process has had, by kind, while something ran.
//!
//! The system remembers only the sum. A thread looks every few moments, so a peak shorter than that is missed.

use serde::Serialize;
use std::{
    fs,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

const EVERY: Duration = Duration::from_millis(20);

/// Peaks in bytes; 0 where the system does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Peak {
    /// Memory of the process's own: anonymous and shared pages.
    pub(crate) own_bytes: u64,
    /// Pages of mapped files, which the system may take back at any time.
    pub(crate) file_bytes: u64,
}

/// Watches until it is finished or dropped.
pub(crate) struct PeakMemory {
    peak: Arc<Mutex<Peak>>,
    stop: Arc<AtomicBool>,
}

impl PeakMemory {
    pub(crate) fn watch() -> Self {
        let watch = Self { peak: Arc::default(), stop: Arc::default() };
        let (peak, stop) = (watch.peak.clone(), watch.stop.clone());
        // Without the thread nothing is known, which is all that is lost.
        let _ = thread::Builder::new().name("memory".into()).spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                look(&peak);
                thread::sleep(EVERY);
            }
        });
        watch
    }

    pub(crate) fn finish(self) -> Peak {
        look(&self.peak);
        *self.peak.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PeakMemory {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn look(peak: &Mutex<Peak>) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bytes = |field: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    let mut peak = peak.lock().unwrap_or_else(PoisonError::into_inner);
    peak.own_bytes = peak.own_bytes.max(bytes("RssAnon:") + bytes("RssShmem:"));
    peak.file_bytes = peak.file_bytes.max(bytes("RssFile:"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    #[cfg(target_os = "linux")]
    fn a_short_peak_is_seen() {
        let watch = PeakMemory::watch();
        let numbers = vec![1u8; 64 << 20];
        let deadline = Instant::now() + Duration::from_secs(60);
        while watch.peak.lock().unwrap().own_bytes < 64 << 20 {
            assert!(Instant::now() < deadline, "it is never seen");
            thread::sleep(EVERY);
        }
        assert!(numbers.iter().all(|&n| n == 1));
        drop(numbers);
        let peak = watch.finish();
        assert!(peak.own_bytes >= 64 << 20 && peak.file_bytes > 0, "{peak:?}");
    }
}
