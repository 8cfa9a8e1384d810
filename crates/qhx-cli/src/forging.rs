//! Making a bundle with a progress bar, for every command that does.

use crate::{
    failure::Failure,
    hints::is_full,
    interrupt::Interrupt,
    progress::{ForgeBar, GateBar, Told, tell_time},
};
use qhx_bundle::{BundleError, parity::GateKind};
use qhx_forge::{
    Calibration, ForgeError, ForgeOptions, Forged, GateOptions, Gated, MadeTarget, Material, Precision, TargetOrder,
    forge_gated_with_targets, forge_with_targets, gate::suite::GivenPrompt,
};
use qhx_runtime::{Error, verify::VerifyError};
use std::{cell::RefCell, path::Path, time::Duration};

/// Where a bundle goes and how it is stored.
#[derive(Clone, Copy)]
pub(crate) struct Order<'a> {
    pub(crate) out: &'a Path,
    pub(crate) precision: Precision,
    /// How weights that become integers are rounded; absent: each number to the nearest.
    pub(crate) calibration: Option<&'a Calibration>,
    pub(crate) replace: bool,
    pub(crate) interrupt: &'a Interrupt,
}

/// Runs `work`, which makes a bundle. Either the bundle is complete, or nothing of it is left.
pub(crate) fn forge<T>(order: Order<'_>, work: impl FnOnce(&mut ForgeOptions<'_>) -> Result<T, ForgeError>) -> Result<T, Failure> {
    let bar = ForgeBar::new();
    let mut told = Told::default();
    let mut progress = |progress: qhx_forge::Progress<'_>| {
        told.calibration(&progress, Some(&bar));
        bar.update(progress);
    };
    let Order { out, precision, calibration, replace, interrupt } = order;
    let calibration = calibration.cloned();
    let forged = work(&mut ForgeOptions {
        replace,
        calibration,
        cancel: interrupt.flag(),
        progress: Some(&mut progress),
        ..ForgeOptions::new(out, precision)
    });
    drop(bar);
    forged.map_err(|error| explain(error, order))
}

/// Makes a bundle with its arch folders and holds it to nothing.
pub(crate) fn ungated(material: &Material, order: Order<'_>, targets: &[TargetOrder]) -> Result<(Forged, Vec<MadeTarget>), Failure> {
    let bar: RefCell<Option<GateBar>> = RefCell::default();
    let mut compiled = |progress: qhx_forge::GateProgress<'_>| {
        bar.borrow_mut().get_or_insert_with(GateBar::new).follow(progress);
    };
    forge(order, |options| forge_with_targets(material, options, targets, &mut compiled))
}

/// How a bundle is gated.
pub(crate) struct GateOrder {
    pub(crate) kind: Option<GateKind>,
    pub(crate) auto: bool,
    /// Limits of one's own.
    pub(crate) max_flips: Option<f64>,
    pub(crate) max_kl: Option<f64>,
    pub(crate) prompts: Option<Vec<GivenPrompt>>,
    pub(crate) budget: Option<Duration>,
    /// A few short prompts instead of the whole suite.
    pub(crate) quick: bool,
    /// The same numbers on every machine, where that is affordable.
    pub(crate) reproducible: bool,
}

/// Makes a bundle and holds it to its gate; one that fails it is a failure that says where it is left and what to try.
pub(crate) fn gated(material: &Material, order: Order<'_>, gate: GateOrder, targets: &[TargetOrder]) -> Result<Gated, Failure> {
    let gated = measured(material, order, gate, targets)?;
    if !gated.parity.gate.passed {
        let result = &gated.parity.gate.result;
        let note = gated.parity.choices.iter().map(|choices| choices.note.clone());
        let hint = format!(
            "{}; the failed bundle is left as {} with its report, parity.html, and there is none at {}",
            what_to_try(&gated),
            gated.path.display(),
            order.out.display()
        );
        return Err(Failure::work(format!("the bundle failed its gate: {result}")).causes(note).hint(hint));
    }
    Ok(gated)
}

/// What may pass where this bundle failed.
fn what_to_try(gated: &Gated) -> String {
    let precision = &*gated.manifest.precision;
    let others = match precision {
        "f32" => return "its program or its weights do not compute what the checkpoint says: please report it".into(),
        "f16" | "native" => "--precision f32",
        "w8-f16head" | "auto" => "--precision f16 or native",
        "w8" => "--precision w8-f16head, f16 or native (the weights as the checkpoint has them)",
        _ => "--precision w8 or auto (the smallest mixture that comes as close as int8 does), or --bits with a larger number",
    };
    match gated.parity.gate.kind {
        GateKind::Strict => format!("try {others}, or --gate tolerant"),
        GateKind::Tolerant => format!("try {others}"),
    }
}

/// Makes a bundle and holds it to its gate, whatever comes of it.
pub(crate) fn measured(material: &Material, order: Order<'_>, gate: GateOrder, targets: &[TargetOrder]) -> Result<Gated, Failure> {
    // The two take turns: a search writes and measures several times.
    let bars: RefCell<(Option<ForgeBar>, Option<GateBar>)> = RefCell::default();
    let mut time_told = false;
    let mut told = Told::default();
    let mut written = |progress: qhx_forge::Progress<'_>| {
        let mut bars = bars.borrow_mut();
        bars.1 = None;
        told.calibration(&progress, bars.0.as_ref());
        bars.0.get_or_insert_with(ForgeBar::new).update(progress);
    };
    let mut measured = |progress: qhx_forge::GateProgress<'_>| {
        let mut bars = bars.borrow_mut();
        bars.0 = None;
        if let Some(left) = progress.left.filter(|_| !time_told) {
            time_told = true;
            bars.1 = None;
            tell_time(left);
        }
        bars.1.get_or_insert_with(GateBar::new).follow(progress);
    };
    let Order { out, precision, calibration, replace, interrupt } = order;
    let calibration = calibration.cloned();
    let mut options =
        ForgeOptions { replace, calibration, cancel: interrupt.flag(), progress: Some(&mut written), ..ForgeOptions::new(out, precision) };
    let GateOrder { kind, auto, max_flips, max_kl, prompts, budget, quick, reproducible } = gate;
    let cancel = interrupt.cancel().clone();
    let progress = &mut measured;
    let gate = GateOptions { kind, auto, max_flips, max_kl, prompts, budget, quick, reproducible, threads: None, cancel, progress };
    let gated = forge_gated_with_targets(material, &mut options, gate, targets);
    drop(bars.take());
    gated.map_err(|error| explain(error, order))
}

fn explain(error: ForgeError, order: Order<'_>) -> Failure {
    match &error {
        ForgeError::Run(Error::Cancelled)
        | ForgeError::Verify(VerifyError::Run(Error::Cancelled))
        | ForgeError::Bundle(BundleError::Cancelled) => Failure::work("cancelled: nothing was written"),
        ForgeError::Bundle(BundleError::Exists(_)) if !order.replace => {
            Failure::from(error).hint("--force replaces a bundle that is there already")
        }
        ForgeError::Bundle(BundleError::Io { source, .. }) if is_full(source) => {
            Failure::from(error).hint("nothing was left behind; make room, or choose another place with --out")
        }
        _ => error.into(),
    }
}
