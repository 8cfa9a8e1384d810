//! The backend and the processor: opened on first use, closed with the last context on them.
#![allow(unsafe_code)] // Calls the library.

use crate::{
    binary::{self, Expected},
    compile::{self, CompileOptions},
    context::{self, Context},
    error::Result,
    ffi,
    graph::Graph,
    library::{Library, function},
    log,
};
use std::{
    fmt,
    path::Path,
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

/// A generation of the Hexagon processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Arch {
    /// Snapdragon 8 Elite (SM8750).
    V79,
    /// Snapdragon 8 Elite Gen 5 (SM8850).
    V81,
}

impl Arch {
    /// All supported generations.
    pub const ALL: [Self; 2] = [Self::V79, Self::V81];

    /// `79` or `81`.
    pub fn number(self) -> u32 {
        match self {
            Self::V79 => 79,
            Self::V81 => 81,
        }
    }

    /// The generation with that number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|arch| arch.number() == number)
    }

    /// QNN's SoC model number of the generation's representative chip.
    pub fn soc_model(self) -> u32 {
        match self {
            Self::V79 => 69,
            Self::V81 => 87,
        }
    }

    /// That chip's name.
    pub fn soc_name(self) -> &'static str {
        match self {
            Self::V79 => "SM8750",
            Self::V81 => "SM8850",
        }
    }

    /// Fast memory (VTCM) of the chip.
    pub fn vtcm_mb(self) -> u32 {
        8
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.number())
    }
}

impl std::str::FromStr for Arch {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Self::ALL.into_iter().find(|arch| arch.to_string() == text).ok_or_else(|| format!("`{text}` is not one of v79, v81"))
    }
}

/// A processor: compiles graphs and loads context binaries. It is opened on the first such call.
pub struct Device {
    library: Library,
    arch: Arch,
    opened: Mutex<Option<Arc<Opened>>>,
}

impl Device {
    pub(crate) fn new(library: Library, arch: Arch) -> Self {
        Self { library, arch, opened: Mutex::new(None) }
    }

    /// Its generation.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The library that drives it.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// Compiles graphs into one context. On a PC they can be executed at once, by the emulator.
    ///
    /// Every graph is checked before it is passed to the library.
    pub fn compile(&self, graphs: &[Graph], options: &CompileOptions) -> Result<Context> {
        options.check(self.arch)?;
        compile::check_names(graphs)?;
        for graph in graphs {
            graph.check()?;
        }
        compile::compile(&self.open()?, graphs, options)
    }

    /// Loads a context binary from memory, after checking it against what is expected.
    pub fn load(&self, binary: &[u8], expected: &Expected) -> Result<Context> {
        let metadata = expected.check(&self.library, self.arch, binary)?;
        context::load(&self.open()?, binary, &metadata, expected)
    }

    /// Loads a context binary from a file, which is mapped, not copied.
    pub fn load_file(&self, file: &Path, expected: &Expected) -> Result<Context> {
        let expected = expected.named(file);
        let map = binary::map(file, &expected.name)?;
        self.load(&map, &expected)
    }

    fn open(&self) -> Result<Arc<Opened>> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(opened) = &*opened {
            return Ok(opened.clone());
        }
        let new = Arc::new(Opened::new(&self.library, self.arch)?);
        *opened = Some(new.clone());
        Ok(new)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {:?}", self.arch, self.library)
    }
}

/// The library's backend and its log.
pub(crate) struct Backend {
    pub(crate) library: Library,
    log: ffi::Handle,
    pub(crate) handle: ffi::Handle,
}

/// An opened processor.
pub(crate) struct Opened {
    pub(crate) backend: Arc<Backend>,
    pub(crate) handle: ffi::Handle,
}

// SAFETY: QNN's handles may be used from any thread; what must not run concurrently (freeing) happens in `drop`, which has the only owner.
unsafe impl Send for Backend {}
// SAFETY: as above.
unsafe impl Sync for Backend {}
// SAFETY: as above.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Backend {
    /// The library's backend: one for all its devices.
    fn of(library: &Library) -> Result<Arc<Self>> {
        let mut shared = library.0.backend.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(backend) = shared.upgrade() {
            return Ok(backend);
        }
        let backend = Arc::new(Self::new(library)?);
        *shared = Arc::downgrade(&backend);
        Ok(backend)
    }

    fn new(library: &Library) -> Result<Self> {
        let table = library.table();
        let mut backend = Self { library: library.clone(), log: ptr::null_mut(), handle: ptr::null_mut() };
        let log_create = function(table.log_create, "logCreate")?;
        // SAFETY: the callback has the declared type and lives as long as the process.
        library.call("logCreate", &"the log", || unsafe { log_create(log::callback, log::level(), &raw mut backend.log) })?;
        let create = function(table.backend_create, "backendCreate")?;
        // SAFETY: the log is live; no configuration.
        library.call("backendCreate", &"the HTP backend", || unsafe { create(backend.log, ptr::null(), &raw mut backend.handle) })?;
        Ok(backend)
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        let table = self.library.table();
        if let (Some(free), false) = (table.backend_free, self.handle.is_null()) {
            // SAFETY: made in `new`, freed once, after all devices and contexts, which own this.
            let _ = self.library.call("backendFree", &"the backend", || unsafe { free(self.handle) });
        }
        if let (Some(free), false) = (table.log_free, self.log.is_null()) {
            // SAFETY: made in `new`, freed once, after the backend that used it.
            let _ = self.library.call("logFree", &"the log", || unsafe { free(self.log) });
        }
    }
}

impl Opened {
    fn new(library: &Library, arch: Arch) -> Result<Self> {
        let backend = Backend::of(library)?;
        let soc = ffi::HtpSoc([0, arch.soc_model(), arch.soc_model(), 0]);
        let config = ffi::Config { option: ffi::Config::CUSTOM, custom: (&raw const soc).cast() };
        let configs = [&raw const config, ptr::null()];
        // Only the emulator can choose its chip.
        let configs = if library.emulates() { configs.as_ptr() } else { ptr::null() };
        let create = function(library.table().device_create, "deviceCreate")?;
        let mut handle = ptr::null_mut();
        // SAFETY: the log is live, the configurations outlive the call.
        library.call("deviceCreate", &format_args!("{arch} ({})", arch.soc_name()), || unsafe {
            create(backend.log, configs, &raw mut handle)
        })?;
        Ok(Self { backend, handle })
    }

    pub(crate) fn library(&self) -> &Library {
        &self.backend.library
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(free) = self.library().table().device_free {
            // SAFETY: made in `new`, freed once, after all contexts, which own this.
            let _ = self.library().call("deviceFree", &"the device", || unsafe { free(self.handle) });
        }
    }
}
