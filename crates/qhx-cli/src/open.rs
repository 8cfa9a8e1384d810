//! What MODEL may be, for every command that takes one, and what a person is told while it is opened.

use crate::{
    environment,
    failure::Failure,
    interrupt::Interrupt,
    output,
    progress::{ForgeBar, GateBar, Waiting, tell_time},
};
use qhx::{Error, OpenEvent, Opened, Opener, bundle::Bundle};
use qhx_runtime::DeviceChoice;
use std::path::Path;

/// What the built-in model knows, and what to do for a real one: told whenever it is used without being named.
const BUILTIN_NOTE: &str = "using the built-in demo model, which knows capitals and regions of countries, small sums and short stories. \
    For a real model: qhx run MODEL \"PROMPT\", where MODEL is a bundle, a Hugging Face folder or a GGUF file";

/// Opens the bundle that MODEL stands for, making it first where need be; the built-in one where no MODEL is given.
pub(crate) fn open_model(path: Option<&Path>, device: DeviceChoice, interrupt: &Interrupt) -> Result<Opened, Failure> {
    let mut told = Told::default();
    let mut opener = opener(device, interrupt)?.on_event(|event| told.tell(event));
    let opened = match path {
        Some(path) => opener.open(path),
        None => {
            output::note(BUILTIN_NOTE);
            opener.builtin()
        }
    };
    drop(opener);
    drop(told);
    opened.map_err(explain)
}

/// Opens the bundle at a path, and nothing else.
pub(crate) fn open_bundle(path: &Path, interrupt: &Interrupt) -> Result<Bundle, Failure> {
    opener(DeviceChoice::Auto, interrupt)?.bundle(path).map_err(explain)
}

/// Opens what a device runs of the bundle at a path.
pub(crate) fn open_for(path: &Path, device: DeviceChoice, interrupt: &Interrupt) -> Result<Bundle, Failure> {
    let mut told = Told::default();
    opener(device, interrupt)?.on_event(|event| told.tell(event)).bundle_for_device(path).map_err(explain)
}

fn opener<'a>(device: DeviceChoice, interrupt: &Interrupt) -> Result<Opener<'a>, Failure> {
    Ok(Opener::new(environment::places()).device(device).npu(environment::npu()?).cancel(interrupt.cancel().clone()))
}

fn explain(error: Error) -> Failure {
    match error.is_cancelled() {
        true => Failure::work("cancelled: nothing was written"),
        false => error.into(),
    }
}

/// The bar that is shown, if any. Writing and measuring take turns.
#[derive(Default)]
struct Told {
    waiting: Option<Waiting>,
    writing: Option<ForgeBar>,
    gating: Option<GateBar>,
    time_told: bool,
}

impl Told {
    fn tell(&mut self, event: OpenEvent<'_>) {
        if !matches!(event, OpenEvent::Writing(_) | OpenEvent::Gating(_)) {
            (self.waiting, self.writing, self.gating) = (None, None, None);
        }
        match event {
            OpenEvent::Waiting { place } => self.waiting = Some(Waiting::new(place)),
            OpenEvent::Forging { source, place } => {
                output::dim_note(&format!(
                    "forging {} into {} (once), weights as they are stored, uncalibrated",
                    source.display(),
                    place.display()
                ));
            }
            OpenEvent::ForgingAgain { reason } => output::note(&format!("forging again: the cached bundle cannot be used: {reason}")),
            OpenEvent::Kept { place, kept, reason } => {
                output::note(&format!("{} is kept as {}: {reason}", place.display(), kept.display()));
            }
            OpenEvent::Writing(progress) => {
                self.gating = None;
                self.writing.get_or_insert_with(ForgeBar::new).update(progress);
            }
            OpenEvent::Gating(progress) => {
                self.writing = None;
                if let Some(left) = progress.left.filter(|_| !self.time_told) {
                    self.time_told = true;
                    self.gating = None;
                    tell_time(left);
                }
                self.gating.get_or_insert_with(GateBar::new).follow(progress);
            }
            OpenEvent::Passed(gate) => {
                let incomplete =
                    gate.incomplete().map_or(String::new(), |incomplete| format!(" ({incomplete}; `qhx forge` runs the whole suite)"));
                output::dim_note(&format!("gate passed: {}{incomplete}", gate.result));
            }
            OpenEvent::ForPhonesOnly { folder } => {
                output::dim_note(&format!("{} is made for phones: the emulator compiles the bundle instead", folder.display()));
            }
            _ => {}
        }
    }
}
