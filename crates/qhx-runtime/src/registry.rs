//! The devices of this build, by name.
//!
//! Each device crate stands behind a cargo feature of its name. `reference` is always there: slow and obviously right, for verification
//! only, and never chosen automatically.

use crate::{
    DeviceChoice, Error,
    isolate::{self, Worker},
    placement::Rules,
};
use qhx_ir::{
    Device, DeviceError, DeviceInfo,
    reference::{HalfSumsDevice, ReferenceDevice},
};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, Read, Write},
    path::PathBuf,
    sync::{Arc, OnceLock},
};

/// How the processor is to be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuSettings {
    /// Threads; absent: one for each core.
    pub threads: Option<usize>,
    /// Whether each thread is kept on a core of its own, where the system can: see [`CAN_PIN`].
    pub pin: bool,
    /// The instruction set, for comparisons; absent: the best that the processor has.
    pub instructions: Option<InstructionSet>,
}

#[cfg(feature = "cpu")]
pub use qhx_cpu::InstructionSet;
/// Instructions of a processor that was not built in: there are none.
#[cfg(not(feature = "cpu"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {}

#[cfg(not(feature = "cpu"))]
impl std::str::FromStr for InstructionSet {
    type Err = String;
    fn from_str(_: &str) -> Result<Self, String> {
        Err("the feature `cpu` was not built in".into())
    }
}

/// Whether threads can be kept on cores of their own here.
#[cfg(feature = "cpu")]
pub use qhx_cpu::CAN_PIN;
/// Whether threads can be kept on cores of their own here.
#[cfg(not(feature = "cpu"))]
pub const CAN_PIN: bool = false;

/// Where QNN is, and what the NPU is to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NpuSettings {
    /// QNN's libraries; absent: the system's.
    pub libraries: Option<NpuLibraries>,
    /// The generation of this machine's processor, where the system does not report it, or on a PC the one to emulate.
    pub here: Option<String>,
    /// The generation of the processor, `v79` or `v81`; absent: this machine's, or in an emulator the newest.
    pub arch: Option<String>,
    /// Whether graphs that are prepared for several rows store their weights once, as phones take them and emulators do not.
    pub share_weights: bool,
    /// Whether graphs are prepared with rings: sessions may then be longer than their context.
    pub ring: bool,
    /// Whether graphs are prepared though there are so many that they may restart the phone.
    pub allow_risky: bool,
    /// Effort of compiling, 1 to 3; absent: the device's own choice.
    pub optimization: Option<u32>,
    /// Rows of the graph that takes many at once; absent: the device's own choice.
    pub prefill_rows: Option<usize>,
    /// From so many rows on it is used; absent: the device's own choice.
    pub prefill_min_rows: Option<usize>,
}

#[cfg(feature = "npu")]
impl NpuSettings {
    /// What they are to the device, for a generation of the processor.
    pub fn options(&self, arch: qhx_npu::Arch) -> qhx_npu::NpuOptions {
        let own = qhx_npu::NpuOptions::default();
        qhx_npu::NpuOptions {
            arch,
            share_weights: self.share_weights,
            kv: if self.ring { qhx_npu::Kv::Ring } else { qhx_npu::Kv::Full },
            prefill_rows: self.prefill_rows.unwrap_or(own.prefill_rows),
            prefill_min_rows: self.prefill_min_rows.unwrap_or(own.prefill_min_rows),
            allow_risky: self.allow_risky,
            optimization: self.optimization.unwrap_or(own.optimization),
            ..own
        }
    }
}

/// QNN's libraries.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NpuLibraries {
    /// All in one folder.
    Folder(PathBuf),
    /// The two that are loaded, each by its path.
    Files {
        /// `libQnnHtp.so`.
        htp: PathBuf,
        /// `libQnnSystem.so`.
        system: PathBuf,
    },
}

/// How graphics processors are to be used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSettings {
    /// The most bytes of its memory that are used; absent: all of it.
    pub memory_limit: Option<u64>,
    /// The folder in which compiled shaders, and what `auto` measured, are kept between starts; absent: nowhere.
    pub cache: Option<PathBuf>,
    /// Run the processor's driver in a process of its own, which this command starts: see [`crate::isolate`].
    #[serde(skip)]
    pub isolate: Option<Worker>,
    /// Measure again which device `auto` means.
    pub measure_again: bool,
    /// Let `auto` count software on the CPU as a graphics processor: for tests.
    pub software: bool,
    /// Have every call checked by Vulkan's validation layer, where it is installed: for tests.
    pub validate: bool,
    /// For tests: what goes wrong on the processor, and when.
    pub fault: Option<(GpuFault, u64)>,
}

/// What goes wrong on a graphics processor, for tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuFault {
    /// It is lost, when so many submissions were made.
    Loss,
    /// Its work does not end, when so many submissions were made.
    Hang,
    /// It has no memory left, when so many buffers were made.
    OutOfMemory,
}

/// What this build and this machine offer: the devices that `auto` chooses from, best first, then those that are used only when asked for.
pub fn devices(cpu: CpuSettings, npu: &NpuSettings) -> Vec<DeviceInfo> {
    let opened = |choice| {
        let devices = candidates_with(choice, cpu, npu, &GpuSettings::default()).unwrap_or_default();
        devices.into_iter().filter_map(|device| Some(device.open().ok()?.describe())).collect::<Vec<_>>()
    };
    opened(DeviceChoice::Auto).into_iter().chain(gpus()).chain(opened(DeviceChoice::Npu)).collect()
}

/// The graphics processors of this machine; `gpu:1` is the second of them.
pub fn gpus() -> Vec<DeviceInfo> {
    #[cfg(feature = "gpu")]
    return qhx_gpu::GpuDevice::list().unwrap_or_default();
    #[cfg(not(feature = "gpu"))]
    Vec::new()
}

/// The graphics processor that `auto` may choose: the first that is no software.
pub(crate) fn gpu_for_auto(settings: &GpuSettings) -> Option<DeviceInfo> {
    found_gpus(settings).into_iter().find(|device| settings.software || !device.is_software())
}

/// The graphics processor that a split uses.
pub(crate) fn first_gpu(settings: &GpuSettings) -> Option<DeviceInfo> {
    found_gpus(settings).into_iter().next()
}

fn found_gpus(settings: &GpuSettings) -> Vec<DeviceInfo> {
    // A driver that has a process of its own is not loaded here.
    if settings.isolate.is_some() {
        let isolated = gpu(DeviceChoice::GPU, 0, settings).unwrap_or_default();
        return isolated.iter().filter_map(|device| Some(device.open().ok()?.describe())).collect();
    }
    // Which there are does not change while a program runs.
    static FOUND: OnceLock<Vec<DeviceInfo>> = OnceLock::new();
    FOUND.get_or_init(gpus).clone()
}

/// The devices that `choice` stands for, best first; `threads` is for devices that work with threads of this machine (absent: their own choice).
pub fn candidates(choice: DeviceChoice, threads: Option<usize>) -> Result<Vec<Arc<dyn Device>>, Error> {
    candidates_with(choice, CpuSettings { threads, ..CpuSettings::default() }, &NpuSettings::default(), &GpuSettings::default())
}

/// The same with a say in how processor, NPU and GPU are used.
pub fn candidates_with(
    choice: DeviceChoice,
    settings: CpuSettings,
    npu_settings: &NpuSettings,
    gpu_settings: &GpuSettings,
) -> Result<Vec<Arc<dyn Device>>, Error> {
    if settings.threads == Some(0) {
        return Err(Error::Option { option: "threads", found: "0".into(), expected: "1 or more".into() });
    }
    match choice {
        DeviceChoice::Auto | DeviceChoice::Cpu => cpu(choice, settings),
        DeviceChoice::Gpu(number) => gpu(choice, number, gpu_settings),
        DeviceChoice::Npu => npu(choice, npu_settings),
        DeviceChoice::Split => cpu(choice, settings),
        DeviceChoice::Reference => Ok(vec![Arc::new(ReferenceDevice)]),
        DeviceChoice::ReferenceF16 => Ok(vec![Arc::new(HalfSumsDevice)]),
    }
}

/// The devices that `choice` and `rules` name, the one for everything else first, and behind them the processor, which takes what others refuse.
pub fn candidates_for(
    choice: DeviceChoice,
    rules: Option<&Rules>,
    settings: CpuSettings,
    npu_settings: &NpuSettings,
    gpu_settings: &GpuSettings,
) -> Result<Vec<Arc<dyn Device>>, Error> {
    let Some(rules) = rules else { return candidates_with(choice, settings, npu_settings, gpu_settings) };
    let own = match (&rules.default, choice) {
        (Some(_), _) => None,
        (None, DeviceChoice::Auto | DeviceChoice::Split) => Some(DeviceChoice::Cpu.name()),
        (None, named) => Some(named.name()),
    };
    let mut devices: Vec<Arc<dyn Device>> = Vec::new();
    let mut names: Vec<&str> = own.into_iter().chain(rules.devices()).collect();
    if cfg!(feature = "cpu") {
        names.push(DeviceChoice::Cpu.name());
    }
    for (_, name) in names.iter().enumerate().filter(|(at, name)| !names[..*at].contains(name)) {
        let choice = match name.parse()? {
            DeviceChoice::Auto | DeviceChoice::Split => {
                return Err(Error::Placement { reason: format!("`{name}` is no device: name one, such as cpu or npu") });
            }
            choice => choice,
        };
        devices.extend(candidates_with(choice, settings, npu_settings, gpu_settings)?);
    }
    Ok(devices)
}

#[cfg(feature = "cpu")]
fn cpu(_: DeviceChoice, CpuSettings { threads, pin, instructions }: CpuSettings) -> Result<Vec<Arc<dyn Device>>, Error> {
    Ok(vec![Arc::new(qhx_cpu::CpuDevice::new(qhx_cpu::CpuOptions { threads, instructions, pin, ..Default::default() })?)])
}

#[cfg(not(feature = "cpu"))]
fn cpu(choice: DeviceChoice, _: CpuSettings) -> Result<Vec<Arc<dyn Device>>, Error> {
    none(choice, "the feature `cpu` was not built in")
}

/// A graphics processor. It is looked for when it is opened.
#[cfg(feature = "gpu")]
fn gpu(_: DeviceChoice, number: u8, settings: &GpuSettings) -> Result<Vec<Arc<dyn Device>>, Error> {
    let GpuSettings { memory_limit, cache, validate, fault, .. } = settings.clone();
    let fault = fault.map(|(fault, at)| {
        let kind = match fault {
            GpuFault::Loss => qhx_gpu::Injected::Loss,
            GpuFault::Hang => qhx_gpu::Injected::Hang,
            GpuFault::OutOfMemory => qhx_gpu::Injected::OutOfMemory,
        };
        (kind, at)
    });
    let options = qhx_gpu::GpuOptions { number: number.into(), memory_limit, cache, validate, fault, ..Default::default() };
    let device: Arc<dyn Device> = Arc::new(qhx_gpu::GpuDevice::new(options));
    Ok(vec![match &settings.isolate {
        Some(worker) => Arc::new(isolate::IsolatedDevice::new(device, worker.clone(), serde_json::json!((number, settings)))),
        None => device,
    }])
}

/// What the process of a [`Worker`] does: has a graphics processor, and serves another process over input and output until its input ends.
pub fn work(input: impl Read + Send + 'static, output: impl Write + Send + 'static) -> io::Result<()> {
    isolate::serve(input, output, |settings| {
        let wrong = |reason: String| DeviceError::Absent { device: DeviceChoice::GPU.to_string(), reason };
        let (number, settings): (u8, GpuSettings) = serde_json::from_value(settings).map_err(|e| wrong(e.to_string()))?;
        let devices = gpu(DeviceChoice::Gpu(number), number, &settings).map_err(|e| wrong(e.to_string()))?;
        devices.into_iter().next().ok_or_else(|| wrong("there is none".into()))
    })
}

#[cfg(not(feature = "gpu"))]
fn gpu(choice: DeviceChoice, _: u8, _: &GpuSettings) -> Result<Vec<Arc<dyn Device>>, Error> {
    none(choice, "the feature `gpu` was not built in")
}

/// The NPU, or on a machine without one its emulator: whatever QNN's library offers.
#[cfg(feature = "npu")]
fn npu(_: DeviceChoice, settings: &NpuSettings) -> Result<Vec<Arc<dyn Device>>, Error> {
    let here = npu_arch(settings)?;
    let wrong = |reason: String| Error::Option { option: "NPU", found: settings.arch.clone().unwrap_or_default(), expected: reason };
    let arch = match (&settings.arch, &here) {
        (Some(asked), Some(here)) if asked != here => {
            return Err(Error::OtherArch { asked: asked.clone(), here: here.clone() });
        }
        (Some(arch), _) | (None, Some(arch)) => arch.parse().map_err(wrong)?,
        (None, None) => qhx_npu::NpuOptions::default().arch,
    };
    let libraries = settings.libraries.clone();
    let open = move || open_library(libraries.as_ref());
    Ok(vec![Arc::new(qhx_npu::NpuDevice::with_library(open, settings.options(arch))?)])
}

/// QNN's library; the error says why there is none.
#[cfg(feature = "npu")]
fn open_library(libraries: Option<&NpuLibraries>) -> Result<qhx_npu::Library, String> {
    let library = match libraries {
        Some(NpuLibraries::Folder(folder)) if !folder.is_dir() => {
            let wanted = "name that of a QAIRT release with libQnnHtp.so and libQnnSystem.so";
            return Err(format!("there is no folder {}, {wanted}", folder.display()));
        }
        None => qhx_npu::Library::open(None),
        Some(NpuLibraries::Folder(folder)) => qhx_npu::Library::open(Some(folder)),
        Some(NpuLibraries::Files { htp, system }) => qhx_npu::Library::open_files(htp, system),
    };
    library.map_err(|error| error.to_string())
}

#[cfg(not(feature = "npu"))]
fn npu(choice: DeviceChoice, _: &NpuSettings) -> Result<Vec<Arc<dyn Device>>, Error> {
    none(choice, "the feature `npu` was not built in")
}

/// The generation of this machine's NPU; none where it is not told, or where all are emulated.
pub fn npu_arch(settings: &NpuSettings) -> Result<Option<String>, Error> {
    #[cfg(feature = "npu")]
    {
        let wrong =
            |_| Error::Option { option: "this machine's NPU", found: format!("{:?}", settings.here), expected: "v79 or v81".into() };
        let named = settings.here.as_deref().map(str::parse::<qhx_npu::Arch>).transpose().map_err(|_: String| ()).map_err(wrong)?;
        Ok(named.or_else(qhx_npu::probe::arch_here).map(|arch| arch.to_string()))
    }
    #[cfg(not(feature = "npu"))]
    Ok(settings.here.clone())
}

/// Whether an NPU of this machine is emulated.
pub fn npu_is_emulated() -> bool {
    cfg!(target_arch = "x86_64")
}

/// The processor with the instructions that every machine has: slower, and the same numbers everywhere. For gates of small models.
pub fn plain(threads: Option<usize>) -> Result<Arc<dyn Device>, Error> {
    #[cfg(feature = "cpu")]
    {
        let instructions = Some(qhx_cpu::InstructionSet::Portable);
        Ok(Arc::new(qhx_cpu::CpuDevice::new(qhx_cpu::CpuOptions { threads, instructions, ..Default::default() })?))
    }
    #[cfg(not(feature = "cpu"))]
    {
        let _ = threads;
        Ok(Arc::new(ReferenceDevice))
    }
}

#[cfg(not(all(feature = "cpu", feature = "gpu", feature = "npu")))]
fn none(choice: DeviceChoice, reason: &str) -> Result<Vec<Arc<dyn Device>>, Error> {
    Err(Error::absent(choice.to_string(), reason.to_owned()))
}
