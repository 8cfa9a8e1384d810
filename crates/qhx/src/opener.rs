//! From a reference to an open bundle, with whatever has to be made on the way.

use crate::{
    Checkpoint, Error, OpenEvent, Places, Source, builtin,
    cache::{self, Forging},
    source::bundle_at,
};
use qhx_bundle::{Bundle, manifest::MANIFEST_FILE, manifest_in, target::MadeFor};
use qhx_runtime::{
    Cancel, DeviceChoice,
    registry::{self, NpuSettings},
};
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Opens what references name.
///
/// ```
/// # fn main() -> Result<(), qhx::Error> {
/// let opened = qhx::Opener::new(qhx::Places::none()).open("builtin")?;
/// println!("{}", opened.bundle.manifest().model.name);
/// # Ok(()) }
/// ```
pub struct Opener<'a> {
    places: Places,
    device: DeviceChoice,
    npu: NpuSettings,
    cancel: Cancel,
    on_event: Box<dyn FnMut(OpenEvent<'_>) + 'a>,
}

/// A bundle that is open.
#[non_exhaustive]
pub struct Opened {
    /// The bundle.
    pub bundle: Bundle,
    /// How long opening it took, without forging it.
    pub time: Duration,
}

impl<'a> Opener<'a> {
    /// Looks in these places, for the device that is best.
    pub fn new(places: Places) -> Self {
        Self { places, device: DeviceChoice::Auto, npu: NpuSettings::default(), cancel: Cancel::new(), on_event: Box::new(|_| {}) }
    }

    /// Looks in other places.
    pub fn places(self, places: Places) -> Self {
        Self { places, ..self }
    }

    /// Opens what this device runs: for the NPU the arch folder of a bundle, where there is one for it.
    pub fn device(self, device: DeviceChoice) -> Self {
        Self { device, ..self }
    }

    /// What the NPU is.
    pub fn npu(self, npu: NpuSettings) -> Self {
        Self { npu, ..self }
    }

    /// Lets another thread stop it.
    pub fn cancel(self, cancel: Cancel) -> Self {
        Self { cancel, ..self }
    }

    /// Tells what is done on the way.
    pub fn on_event(self, on_event: impl FnMut(OpenEvent<'_>) + 'a) -> Self {
        Self { on_event: Box::new(on_event), ..self }
    }

    /// Opens the bundle that a reference stands for. A checkpoint is forged into the cache first, with a quick gate, and found there from then on.
    pub fn open(&mut self, reference: impl AsRef<Path>) -> Result<Opened, Error> {
        let mut source = Source::find(reference, &self.places)?;
        if let Source::Checkpoint(checkpoint) = &source {
            source = Source::Bundle(self.forged(checkpoint)?);
        }
        let Source::Bundle(path) = &source else { return self.builtin() };
        let started = Instant::now();
        Ok(Opened { bundle: self.bundle_for_device(path)?, time: started.elapsed() })
    }

    /// Opens the built-in model, whatever else has its name.
    pub fn builtin(&mut self) -> Result<Opened, Error> {
        let started = Instant::now();
        Ok(Opened { bundle: builtin::open()?, time: started.elapsed() })
    }

    /// Opens the bundle at a path; anything else is an error.
    pub fn bundle(&mut self, path: &Path) -> Result<Bundle, Error> {
        bundle_at(path, &self.places, &self.cancel)
    }

    /// Opens what the device runs of the bundle at a path.
    pub fn bundle_for_device(&mut self, path: &Path) -> Result<Bundle, Error> {
        if self.device != DeviceChoice::Npu || !path.join(MANIFEST_FILE).is_file() {
            return self.bundle(path);
        }
        let arches = registry::npu_arch(&self.npu)?.map_or_else(|| vec!["v81".to_owned(), "v79".to_owned()], |arch| vec![arch]);
        // Folders with a precision behind the generation are for those who ask for them.
        for folder in arches.iter().map(|arch| path.join(arch)).filter(|folder| manifest_in(folder).is_some()) {
            let bundle = self.bundle(&folder)?;
            let for_phones = bundle.manifest().plan.as_ref().is_some_and(|plan| plan.made_for == MadeFor::Phone);
            if !(for_phones && registry::npu_is_emulated()) {
                return Ok(bundle);
            }
            (self.on_event)(OpenEvent::ForPhonesOnly { folder: &folder });
        }
        self.bundle(path)
    }

    /// Where the cache has the bundle of a checkpoint.
    fn forged(&mut self, checkpoint: &Checkpoint) -> Result<PathBuf, Error> {
        let place = cache::place_of(checkpoint, &self.places)?;
        let Self { places, cancel, on_event, .. } = self;
        Forging { source: &checkpoint.path, place: &place, places, cancel, on_event }.once()?;
        Ok(place)
    }
}
