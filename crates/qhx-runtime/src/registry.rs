//! The devices of this build, by name.
//!
//! Each device crate stands behind a cargo feature of its name. `reference` is always there: slow and obviously right, for verification
//! only, and never chosen automatically.

use crate::Error;
use qhx_ir::{Device, DeviceInfo, reference::ReferenceDevice};
use std::{fmt, str::FromStr, sync::Arc};

/// What a user may ask for with `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// The best that takes the whole program.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// The graphics processor.
    Gpu,
    /// The neural processor.
    Npu,
    /// Several devices together.
    Split,
    /// The plain interpreter, for verification.
    Reference,
}

impl DeviceChoice {
    /// Every choice, in the order of help texts.
    pub const ALL: [Self; 6] = [Self::Auto, Self::Cpu, Self::Gpu, Self::Npu, Self::Split, Self::Reference];

    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
            Self::Npu => "npu",
            Self::Split => "split",
            Self::Reference => "reference",
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DeviceChoice {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL
            .into_iter()
            .find(|choice| choice.name() == text)
            .ok_or_else(|| Error::UnknownDevice { found: text.to_owned(), known: Self::ALL.map(Self::name).join(", ") })
    }
}

/// What this build and this machine offer: the devices that `auto` chooses from, best first, then those that are used only when asked for.
pub fn devices() -> Vec<DeviceInfo> {
    let offered = [DeviceChoice::Auto, DeviceChoice::Npu].into_iter().filter_map(|choice| candidates(choice, None).ok());
    offered.flatten().map(|device| device.describe()).collect()
}

/// The devices that `choice` stands for, best first; `threads` is for devices that work with threads of this machine (absent: their own choice).
pub fn candidates(choice: DeviceChoice, threads: Option<usize>) -> Result<Vec<Arc<dyn Device>>, Error> {
    if threads == Some(0) {
        return Err(Error::Option { option: "threads", found: "0".into(), expected: "1 or more".into() });
    }
    match choice {
        DeviceChoice::Auto | DeviceChoice::Cpu => cpu(choice, threads),
        DeviceChoice::Gpu => none(choice, "was built without a GPU device"),
        DeviceChoice::Npu => npu(choice),
        DeviceChoice::Split => none(choice, "has one device only, so there is nothing to split between"),
        DeviceChoice::Reference => Ok(vec![Arc::new(ReferenceDevice)]),
    }
}

#[cfg(feature = "cpu")]
fn cpu(_: DeviceChoice, threads: Option<usize>) -> Result<Vec<Arc<dyn Device>>, Error> {
    Ok(vec![Arc::new(qhx_cpu::CpuDevice::new(qhx_cpu::CpuOptions { threads, ..Default::default() })?)])
}

#[cfg(not(feature = "cpu"))]
fn cpu(choice: DeviceChoice, _: Option<usize>) -> Result<Vec<Arc<dyn Device>>, Error> {
    none(choice, "was built without the feature `cpu`")
}

/// The NPU, or on a machine without one its emulator: whatever QNN's library offers.
#[cfg(feature = "npu")]
fn npu(choice: DeviceChoice) -> Result<Vec<Arc<dyn Device>>, Error> {
    match qhx_npu::Library::open(None) {
        Ok(library) => Ok(vec![Arc::new(qhx_npu::NpuDevice::new(&library, qhx_npu::NpuOptions::default())?)]),
        Err(e) => none(choice, &format!("cannot use QNN: {e}")),
    }
}

#[cfg(not(feature = "npu"))]
fn npu(choice: DeviceChoice) -> Result<Vec<Arc<dyn Device>>, Error> {
    none(choice, "was built without the feature `npu`")
}

/// The processor with the instructions that every machine has: slower, and the same numbers everywhere. For gates of small models.
pub fn plain(threads: Option<usize>) -> Result<Arc<dyn Device>, Error> {
    #[cfg(feature = "cpu")]
    {
        let instructions = Some(qhx_cpu::InstructionSet::Portable);
        Ok(Arc::new(qhx_cpu::CpuDevice::new(qhx_cpu::CpuOptions { threads, instructions })?))
    }
    #[cfg(not(feature = "cpu"))]
    {
        let _ = threads;
        Ok(Arc::new(ReferenceDevice))
    }
}

fn none(choice: DeviceChoice, reason: &str) -> Result<Vec<Arc<dyn Device>>, Error> {
    let offered = if cfg!(feature = "cpu") { "cpu, auto" } else { "nothing but reference" };
    Err(Error::NoDevice { asked: choice.to_string(), reason: reason.to_owned(), offered: offered.to_owned() })
}
