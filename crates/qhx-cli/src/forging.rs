//! Making a bundle with a progress bar, for every command that does.

use crate::{failure::Failure, interrupt::Interrupt, progress::ForgeBar};
use qhx_bundle::BundleError;
use qhx_forge::{ForgeError, ForgeOptions, Forged, Precision};
use std::{io::ErrorKind, path::Path};

/// Where a bundle goes and how it is stored.
#[derive(Clone, Copy)]
pub(crate) struct Order<'a> {
    pub(crate) out: &'a Path,
    pub(crate) precision: Precision,
    pub(crate) replace: bool,
}

/// Runs `work`, which makes a bundle. Either the bundle is complete, or nothing of it is left.
pub(crate) fn forge(
    order: Order<'_>,
    interrupt: &Interrupt,
    work: impl FnOnce(&mut ForgeOptions<'_>) -> Result<Forged, ForgeError>,
) -> Result<Forged, Failure> {
    let bar = ForgeBar::new();
    let mut progress = |progress: qhx_forge::Progress<'_>| bar.update(progress);
    let Order { out, precision, replace } = order;
    let forged = work(&mut ForgeOptions { out, precision, replace, cancel: interrupt.flag(), progress: &mut progress });
    drop(bar);
    forged.map_err(|error| explain(error, order))
}

fn explain(error: ForgeError, order: Order<'_>) -> Failure {
    match &error {
        ForgeError::Bundle(BundleError::Cancelled) => Failure::work("cancelled: nothing was written"),
        ForgeError::Bundle(BundleError::Exists(_)) if !order.replace => {
            Failure::from(error).hint("--force replaces a bundle that is there already")
        }
        ForgeError::Bundle(BundleError::Io { source, .. }) => match source.kind() {
            ErrorKind::StorageFull | ErrorKind::FileTooLarge | ErrorKind::QuotaExceeded => {
                Failure::from(error).hint("nothing was left behind; make room, or choose another place with --out")
            }
            _ => error.into(),
        },
        _ => error.into(),
    }
}
