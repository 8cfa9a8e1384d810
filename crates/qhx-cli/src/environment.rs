//! What the environment says. The library reads none of it: here it becomes settings.

use crate::failure::Failure;
use qhx::Places;
use qhx_npu::Arch;
use qhx_runtime::registry::{CpuSettings, GpuSettings, InstructionSet, NpuLibraries, NpuSettings};
use std::{env, path::PathBuf};

/// Names an instruction set of the processor, for comparisons.
const INSTRUCTIONS: &str = "QHX_INSTRUCTIONS";
/// Set to 1, software Vulkan counts as a GPU for `auto`: for tests.
const GPU_SOFTWARE: &str = "QHX_GPU_SOFTWARE";
/// Names the folder with QNN's libraries.
const QNN_DIR: &str = "QHX_QNN_DIR";
/// Names the generation of this machine's NPU where the system does not tell it, or the one to emulate.
const NPU_ARCH: &str = "QHX_NPU_ARCH";
/// List folders in which the DSP's loader looks for libraries, with semicolons between them.
const DSP_PATHS: [&str; 2] = ["ADSP_LIBRARY_PATH", "DSP_LIBRARY_PATH"];

/// Where models are looked for and kept: `QHX_CACHE_DIR` or `qhx` in the user's cache folder, and the cache of the Hugging Face hub, which is `HF_HUB_CACHE`, or `hub` in
/// `HF_HOME`.
pub(crate) fn places() -> Places {
    let own = Places::default();
    let user = folder("XDG_CACHE_HOME");
    let cache = folder("QHX_CACHE_DIR")
        .or_else(|| user.as_ref().map(|path| path.join("qhx")))
        .or_else(|| folder("LOCALAPPDATA").map(|path| path.join("qhx").join("cache")))
        .or_else(|| own.cache.clone());
    let hub = folder("HF_HUB_CACHE")
        .or_else(|| folder("HF_HOME").map(|path| path.join("hub")))
        .or_else(|| user.map(|path| path.join("huggingface").join("hub")))
        .or_else(|| own.hub.clone());
    own.with_cache(cache).with_hub(hub)
}

fn folder(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// The instruction set that is asked for; absent: the best.
pub(crate) fn instructions() -> Result<Option<InstructionSet>, Failure> {
    let Some(name) = env::var_os(INSTRUCTIONS).filter(|name| !name.is_empty()) else { return Ok(None) };
    let name = name.to_string_lossy();
    let wrong = |why| Failure::usage(format!("{INSTRUCTIONS} is {name}, expected an instruction set ({why})"));
    name.parse().map(Some).map_err(wrong)
}

/// How the processor is used where no flag says more.
pub(crate) fn cpu() -> Result<CpuSettings, Failure> {
    Ok(CpuSettings { instructions: instructions()?, ..CpuSettings::default() })
}

/// How graphics processors are used: compiled shaders, and what was measured, are kept with the models.
pub(crate) fn gpu() -> GpuSettings {
    let software = env::var_os(GPU_SOFTWARE).is_some_and(|value| value == "1");
    GpuSettings { cache: places().cache.map(|cache| cache.join("gpu")), software, ..GpuSettings::default() }
}

/// Where QNN is, and what this machine's NPU is.
pub(crate) fn npu() -> Result<NpuSettings, Failure> {
    let here = env::var_os(NPU_ARCH).map(|name| name.to_string_lossy().into_owned());
    if let Some(named) = here.as_ref().filter(|named| named.parse::<Arch>().is_err()) {
        return Err(Failure::usage(format!("{NPU_ARCH} is `{named}`, expected v79 or v81")));
    }
    Ok(NpuSettings { libraries: qnn_dir().map(NpuLibraries::Folder), here, ..NpuSettings::default() })
}

/// The folder with QNN's libraries.
pub(crate) fn qnn_dir() -> Option<PathBuf> {
    env::var_os(QNN_DIR).map(PathBuf::from)
}

/// Folders in which the DSP's loader looks for libraries.
pub(crate) fn dsp_folders() -> Vec<PathBuf> {
    let listed = DSP_PATHS.iter().find_map(|name| env::var(name).ok()).unwrap_or_default();
    listed.split(';').filter(|folder| !folder.is_empty()).map(PathBuf::from).collect()
}
