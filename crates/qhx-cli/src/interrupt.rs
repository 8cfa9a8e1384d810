//! Ctrl-C, `kill` and a closed terminal: all ask the running work to stop.

use crate::{failure::Failure, lines::leave_terminal};
use qhx_runtime::Cancel;
use std::{
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// The shell's code for a program that Ctrl-C ended.
const ENDED_BY_CTRL_C: i32 = 130;

/// A request to stop, in the two forms in which the libraries take it.
#[derive(Clone)]
pub(crate) struct Interrupt {
    /// For opening and forging.
    flag: Arc<AtomicBool>,
    /// For generating.
    cancel: Cancel,
}

impl Interrupt {
    /// From now on Ctrl-C asks to stop; asked again before the work has stopped, it ends the process.
    pub(crate) fn install() -> Result<Self, Failure> {
        let interrupt = Self { flag: Arc::default(), cancel: Cancel::new() };
        let handler = interrupt.clone();
        ctrlc::set_handler(move || {
            if handler.is_set() {
                qhx_bundle::files::remove_temporaries();
                leave_terminal();
                process::exit(ENDED_BY_CTRL_C);
            }
            handler.flag.store(true, Ordering::Relaxed);
            handler.cancel.cancel();
        })
        .map_err(|error| Failure::work(format!("cannot listen for Ctrl-C: {error}")))?;
        Ok(interrupt)
    }

    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        self.flag.clone()
    }

    pub(crate) fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Whether somebody asked to stop.
    pub(crate) fn is_set(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }

    /// Takes the request back: what it stopped has stopped.
    pub(crate) fn clear(&self) {
        self.flag.store(false, Ordering::Relaxed);
        self.cancel.clear();
    }

    /// Asks to stop from inside, when nobody reads the answer any more.
    pub(crate) fn stop(&self) {
        self.cancel.cancel();
    }
}
