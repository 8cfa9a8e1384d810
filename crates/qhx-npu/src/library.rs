//! QNN's libraries: finds and loads them, checks their version, and calls them with their output and errors captured.
#![allow(unsafe_code)] // Loads foreign libraries and reads the tables they hand out.

use crate::{
    device::{Arch, Backend, Device},
    error::{CallError, Error, Result},
    ffi, log,
    quiet::Quiet,
};
use std::{
    ffi::{CStr, c_char},
    fmt,
    path::{Path, PathBuf},
    ptr,
    sync::{Arc, Mutex, OnceLock, Weak},
};

#[cfg(not(windows))]
pub(crate) const HTP: &str = "libQnnHtp.so";
#[cfg(not(windows))]
pub(crate) const SYSTEM: &str = "libQnnSystem.so";
#[cfg(windows)]
pub(crate) const HTP: &str = "QnnHtp.dll";
#[cfg(windows)]
pub(crate) const SYSTEM: &str = "QnnSystem.dll";

/// QNN's backend id of the Hexagon Tensor Processor (HTP).
pub(crate) const HTP_BACKEND: u32 = 6;
/// The oldest supported version of the interface table.
const OLDEST_CORE: ffi::Version = ffi::Version { major: 2, minor: 32, patch: 0 };
const SYSTEM_MAJOR: u32 = 1;

const FOLDER_ADVICE: &str = "name a folder with libQnnHtp.so and libQnnSystem.so from a QAIRT release; \
    on a PC, the Python package onnxruntime-qnn contains them";
const NEEDS_ADVICE: &str = "it needs glibc 2.35 or newer, libgcc_s, libatomic.so.1 (Debian: libatomic1) and, in the same folder, the libraries it was shipped with";

/// The loaded QNN library. Opening it does not open a device.
#[derive(Clone)]
pub struct Library(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    path: PathBuf,
    /// Lives as long as the process: libraries are never unloaded because they leave threads and thread-local destructors behind.
    interface: &'static ffi::Interface,
    build: Build,
    system_path: PathBuf,
    system: OnceLock<std::result::Result<System, (PathBuf, String)>>,
    /// The backend, while a device is open.
    pub(crate) backend: Mutex<Weak<Backend>>,
}

/// The library that reads context binaries.
pub(crate) struct System {
    pub(crate) interface: &'static ffi::SystemInterface,
}

// SAFETY: the tables are constant data of the libraries, whose functions may be called from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}
// SAFETY: as above.
unsafe impl Send for System {}
// SAFETY: as above.
unsafe impl Sync for System {}

/// A QAIRT release, as in `v2.51.0.260929181845`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Build {
    /// `2.51.0`; `None` where the text has another form.
    pub release: Option<(u32, u32, u32)>,
    /// The whole text.
    pub text: String,
}

impl Build {
    pub(crate) fn parse(text: &str) -> Self {
        let mut numbers = text.trim_start_matches('v').split(['.', '_']).map(|part| part.parse::<u32>().ok());
        let mut next = || numbers.next().flatten();
        let release = match (next(), next(), next()) {
            (Some(major), Some(minor), Some(patch)) => Some((major, minor, patch)),
            _ => None,
        };
        Self { release, text: text.to_owned() }
    }

    /// Whether a library of this build is too old for a binary of another. Patch versions of one release can load each other's files.
    pub(crate) fn older_than(&self, binary: &Self) -> bool {
        match (self.release, binary.release) {
            (Some((major, minor, _)), Some((their_major, their_minor, _))) => (major, minor) < (their_major, their_minor),
            _ => false,
        }
    }
}

impl fmt::Display for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.release {
            Some((major, minor, patch)) => write!(f, "QAIRT {major}.{minor}.{patch}"),
            None => write!(f, "QAIRT {}", self.text),
        }
    }
}

impl Library {
    /// Loads QNN from a folder; without one, from the system's library path.
    pub fn open(directory: Option<&Path>) -> Result<Self> {
        match directory {
            Some(directory) => Self::open_files(&directory.join(HTP), &directory.join(SYSTEM)),
            None => Self::open_files(Path::new(HTP), Path::new(SYSTEM)),
        }
    }

    /// Loads QNN from its two files. The second is loaded only when a context binary is read.
    pub fn open_files(htp: &Path, system: &Path) -> Result<Self> {
        let interface = providers::<ffi::Interface>(htp, b"QnnInterface_getProviders\0")?;
        let wrong = |reason| Error::Library { path: htp.to_path_buf(), reason };
        let ffi::Version { major, minor, patch } = interface.core;
        // The version comes first: the layout of the rest depends on it.
        if major != OLDEST_CORE.major || minor < OLDEST_CORE.minor {
            return Err(wrong(format!(
                "its QNN interface is version {major}.{minor}.{patch}, but qhx needs 2.32 or a newer 2.x (QAIRT 2.43 or newer): {FOLDER_ADVICE}"
            )));
        }
        if interface.backend_id != HTP_BACKEND {
            return Err(wrong(format!(
                "it is for `{}` (backend {}), not for the Hexagon processor (backend {HTP_BACKEND}): use {HTP}",
                text(interface.provider).unwrap_or_default(),
                interface.backend_id
            )));
        }
        let mut build = ptr::null();
        // SAFETY: the function writes a pointer to a constant text of the library.
        let status = interface.table.backend_get_build_id.map(|get| unsafe { get(&raw mut build) });
        let build = match status {
            Some(0) => text(build).map(|text| Build::parse(&text)),
            _ => None,
        };
        let build = build.ok_or_else(|| wrong("it does not report its build: use another QAIRT release".into()))?;
        Ok(Self(Arc::new(Inner {
            path: htp.to_path_buf(),
            interface,
            build,
            system_path: system.to_path_buf(),
            system: OnceLock::new(),
            backend: Mutex::default(),
        })))
    }

    /// The QAIRT release it belongs to.
    pub fn build(&self) -> &Build {
        &self.0.build
    }

    /// The file it was loaded from.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Whether graphs are executed by an emulator on the host instead of a Hexagon processor.
    pub fn emulates(&self) -> bool {
        cfg!(target_arch = "x86_64")
    }

    /// A processor of this generation. It is opened when the first context is compiled or loaded.
    pub fn device(&self, arch: Arch) -> Device {
        Device::new(self.clone(), arch)
    }

    pub(crate) fn table(&self) -> &'static ffi::Table {
        &self.0.interface.table
    }

    /// The library that reads context binaries, loaded at the first use.
    pub(crate) fn system(&self) -> Result<&System> {
        let loaded = self.0.system.get_or_init(|| {
            let path = &self.0.system_path;
            let load = || {
                let interface = providers::<ffi::SystemInterface>(path, b"QnnSystemInterface_getProviders\0")?;
                let ffi::Version { major, minor, .. } = interface.version;
                match major == SYSTEM_MAJOR {
                    true => Ok(System { interface }),
                    false => Err(Error::Library {
                        path: path.clone(),
                        reason: format!(
                            "its system interface is version {major}.{minor}, but qhx supports {SYSTEM_MAJOR}.x: {FOLDER_ADVICE}"
                        ),
                    }),
                }
            };
            load().map_err(|e: Error| (path.clone(), e.to_string()))
        });
        loaded.as_ref().map_err(|(path, reason)| Error::Library { path: path.clone(), reason: reason.clone() })
    }

    /// Calls the library, suppressing what it prints and turning a failure into an error.
    pub(crate) fn call(&self, name: &'static str, subject: &dyn fmt::Display, call: impl FnOnce() -> ffi::Status) -> Result<()> {
        let mark = log::mark();
        let status = {
            let _quiet = Quiet::begin();
            call()
        };
        match status {
            0 => Ok(()),
            status => Err(self.failed(name, subject, status, mark)),
        }
    }

    fn failed(&self, call: &'static str, subject: &dyn fmt::Display, status: ffi::Status, mark: u64) -> Error {
        let mut message = ptr::null();
        // SAFETY: the function writes a pointer to a constant text of the library, or fails.
        let found = self.table().error_get_message.map(|get| unsafe { get(status, &raw mut message) });
        let message = if found == Some(0) { text(message) } else { None };
        CallError { call, subject: subject.to_string(), code: (status & 0xffff) as u16, message, log: log::since(mark) }.into()
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0.path.display(), self.0.build)
    }
}

/// A function of the table, or why it cannot be called.
pub(crate) fn function<F: Copy>(slot: Option<F>, name: &'static str) -> Result<F> {
    slot.ok_or_else(|| Error::Unsupported(format!("this QNN library lacks the function {name}: use another QAIRT release")))
}

/// Loads a library and takes its only provider.
fn providers<I: 'static>(path: &Path, symbol: &[u8]) -> Result<&'static I> {
    let bare = path.components().count() == 1;
    if !bare && !path.is_file() {
        let reason = "there is no such file".into();
        return Err(Error::Load { path: path.to_path_buf(), reason, advice: FOLDER_ADVICE });
    }
    let library = {
        let _quiet = Quiet::begin();
        // SAFETY: the user names the library; its constructors run, as with every library a program is linked to.
        unsafe { open(path) }
    };
    let library = library.map_err(|e| Error::Load {
        path: path.to_path_buf(),
        reason: reason(&e),
        advice: if bare { FOLDER_ADVICE } else { NEEDS_ADVICE },
    })?;
    let wrong = |reason: &str| Error::Library { path: path.to_path_buf(), reason: reason.into() };
    // SAFETY: the symbol of that name has this type in all releases; `I` is the struct that goes with it.
    let get = unsafe { library.get::<unsafe extern "C" fn(*mut *const *const I, *mut u32) -> ffi::Status>(symbol) };
    let get = *get.map_err(|_| wrong("it is not a QNN library: it has no function that returns its interface"))?;
    let (mut list, mut count) = (ptr::null(), 0);
    let status = {
        let _quiet = Quiet::begin();
        // SAFETY: the function fills in a constant list and its length.
        unsafe { get(&raw mut list, &raw mut count) }
    };
    if status != 0 || count == 0 || list.is_null() {
        return Err(wrong(&format!("it provides no interface (error {status}, {count} providers)")));
    }
    // SAFETY: the list holds `count` > 0 pointers.
    let first = unsafe { *list };
    std::mem::forget(library);
    // SAFETY: checked for null; the interface is constant data of a library that is never unloaded.
    unsafe { first.as_ref() }.ok_or_else(|| wrong("it provides an empty interface"))
}

/// # Safety
/// Runs the constructors of the library.
unsafe fn open(path: &Path) -> std::result::Result<libloading::Library, libloading::Error> {
    #[cfg(unix)]
    {
        use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
        // Binds all symbols now, so that a missing one is reported here and not during a call.
        // SAFETY: the caller's.
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map(Into::into)
    }
    #[cfg(not(unix))]
    // SAFETY: the caller's.
    unsafe {
        libloading::Library::new(path)
    }
}

/// The message of the system's loader.
fn reason(error: &libloading::Error) -> String {
    use std::error::Error as _;
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// A string owned by the library.
pub(crate) fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: the library's strings end with a zero byte and outlive the call that handed them out.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_are_compared_by_release() {
        let build = |text| Build::parse(text);
        assert_eq!(build("v2.51.0.260929181845").release, Some((2, 51, 0)));
        assert_eq!(build("v2.51.0.260929181845_12-auto").to_string(), "QAIRT 2.51.0");
        assert_eq!(build("odd").to_string(), "QAIRT odd");
        assert!(build("v2.47.0.1").older_than(&build("v2.51.0.1")));
        assert!(!build("v2.51.0.1").older_than(&build("v2.51.40.1")) && !build("v2.51.0.1").older_than(&build("v2.47.0.1")));
        assert!(!build("odd").older_than(&build("v2.47.0.1")));
    }
}
