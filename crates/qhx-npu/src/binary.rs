//! Context binaries: their metadata, and whether one may be loaded here.
//!
//! The library has no checksum, does not compare processors and crashes on some files, so everything that can be known beforehand is checked here.
#![allow(unsafe_code)] // Reads structs that the system library returns.

use crate::{
    device::Arch,
    error::{Error, Result},
    ffi,
    graph::DataType,
    library::{Build, HTP_BACKEND, Library, function, text},
};
use memmap2::Mmap;
use sha2::{Digest, Sha256};
use std::{fs::File, io, path::Path, ptr};

/// More graphs, tensors or axes than any real binary has: a sign that the metadata is damaged.
const MOST: u32 = 65_536;
const MOST_AXES: u32 = 8;
/// The supported version of the metadata layout.
const INFO_VERSION: u32 = 3;

/// The metadata of a context binary.
#[derive(Clone, Debug)]
pub struct Metadata {
    /// The QAIRT release that made it.
    pub build: Build,
    /// The version of QNN's interface it was made with.
    pub core_version: (u32, u32, u32),
    /// The processor generation it was compiled for (79, 81 …).
    pub arch: u32,
    /// The chip it was compiled for, as QNN's SoC model number.
    pub soc_model: u32,
    /// Its graphs.
    pub graphs: Vec<GraphInfo>,
    /// Whether its graphs share one set of weights: such a binary is for phones and crashes the emulator.
    pub shared_weights: bool,
}

/// A graph in the metadata of a context binary.
#[derive(Clone, Debug)]
pub struct GraphInfo {
    /// Its name.
    pub name: String,
    /// Inputs.
    pub inputs: Vec<TensorInfo>,
    /// Outputs.
    pub outputs: Vec<TensorInfo>,
    /// How it was compiled, where the binary records it.
    pub compiled: Option<Compiled>,
}

/// How a graph was compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// Fast memory (VTCM) that it uses.
    pub vtcm_bytes: u32,
    /// Optimisation level, 1 to 3.
    pub optimization: u32,
    /// Whether activations are compressed when written to memory (DLBC).
    pub dlbc: bool,
    /// HVX (vector) threads.
    pub hvx_threads: u64,
    /// Spill memory for what does not fit into VTCM.
    pub spill_fill_bytes: u64,
}

/// An input or output in the metadata of a context binary.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// The library's id for it.
    pub id: u32,
    /// QNN's code of its data type.
    pub type_code: u32,
    /// The data type, if qhx supports it.
    pub dtype: Option<DataType>,
    /// Shape.
    pub dims: Vec<u32>,
    /// Its scale, if it has exactly one.
    pub scale: Option<f32>,
}

/// What a context binary must be; fields that are absent are not checked.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    /// The file's name, for messages.
    pub name: String,
    /// Its size.
    pub bytes: Option<u64>,
    /// Its SHA-256.
    pub sha256: Option<[u8; 32]>,
    /// Graphs and tensors that it must contain; it may contain further graphs.
    pub graphs: Vec<ExpectedGraph>,
}

/// A graph that a context binary must contain.
#[derive(Clone, Debug, Default)]
pub struct ExpectedGraph {
    /// Its name.
    pub name: String,
    /// All inputs.
    pub inputs: Vec<ExpectedTensor>,
    /// All outputs.
    pub outputs: Vec<ExpectedTensor>,
}

/// An input or output that a graph must have.
#[derive(Clone, Debug)]
pub struct ExpectedTensor {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: DataType,
    /// Its shape.
    pub dims: Vec<u32>,
}

impl Library {
    /// Reads the metadata of a context binary file, once it has been found to be the expected one.
    pub fn inspect_file(&self, file: &Path, expected: &Expected) -> Result<Metadata> {
        let expected = expected.named(file);
        expected.check_file(self, &map(file, &expected.name)?)
    }

    /// Reads the metadata of a context binary. Needs no device.
    pub fn inspect(&self, name: &str, binary: &[u8]) -> Result<Metadata> {
        let table = &self.system()?.interface.table;
        let damaged =
            |reason: &str| Error::Binary { name: name.into(), reason: format!("{reason}: copy it again, or forge the bundle again") };
        if binary.is_empty() {
            return Err(damaged("it is empty"));
        }
        let mut reader = Reader { library: self, handle: ptr::null_mut() };
        let create = function(table.context_create, "systemContextCreate")?;
        // SAFETY: fills in the handle.
        self.call("systemContextCreate", &name, || unsafe { create(&raw mut reader.handle) })?;
        let get = function(table.get_metadata, "systemContextGetMetaData")?;
        let mut info = ptr::null();
        // SAFETY: the handle is live and the library is told the buffer's size.
        let read = self.call("systemContextGetMetaData", &name, || unsafe {
            get(reader.handle, binary.as_ptr().cast(), binary.len() as u64, &raw mut info)
        });
        read.map_err(|e| match e {
            Error::Call(call) => damaged(&format!("it is not a complete context binary (QNN error {})", call.code)),
            other => other,
        })?;
        // SAFETY: on success a struct that lives as long as the handle; checked for null.
        let info = unsafe { info.as_ref() }.ok_or_else(|| damaged("it has no metadata"))?;
        if info.version != INFO_VERSION {
            return Err(Error::Binary {
                name: name.into(),
                reason: format!("its metadata has version {}, but qhx reads version {INFO_VERSION}: forge the bundle again", info.version),
            });
        }
        // SAFETY: the version says that this is the layout.
        let mut metadata = unsafe { metadata(&info.v3) }.map_err(|reason| damaged(&reason))?;
        metadata.shared_weights = has_shared_section(binary);
        Ok(metadata)
    }
}

/// Maps a file, which must not be empty.
pub(crate) fn map(file: &Path, name: &str) -> Result<Mmap> {
    let wrong = |e: io::Error| Error::Binary { name: name.into(), reason: format!("cannot be read: {e}") };
    let open = File::open(file).map_err(wrong)?;
    if open.metadata().map_err(wrong)?.len() == 0 {
        return Err(Error::Binary { name: name.into(), reason: "the file is empty: copy it again".into() });
    }
    // SAFETY: as for every mapped file of a bundle, nobody may cut it off while it is read.
    unsafe { Mmap::map(&open) }.map_err(wrong)
}

impl Expected {
    /// The same expectations under the name of a file.
    pub(crate) fn named(&self, file: &Path) -> Self {
        Self { name: file.display().to_string(), ..self.clone() }
    }

    /// Checks that a binary may be loaded on a processor: size and checksum, then its metadata.
    pub fn check(&self, library: &Library, arch: Arch, binary: &[u8]) -> Result<Metadata> {
        let metadata = self.check_file(library, binary)?;
        match metadata.obstacle(library, arch) {
            Some(reason) => Err(Error::Binary { name: self.name.clone(), reason }),
            None => Ok(metadata),
        }
    }

    /// Checks that a binary is the expected one, for any processor.
    fn check_file(&self, library: &Library, binary: &[u8]) -> Result<Metadata> {
        let wrong = |reason: String| Err(Error::Binary { name: self.name.clone(), reason });
        if let Some(bytes) = self.bytes
            && bytes != binary.len() as u64
        {
            return wrong(format!(
                "has {} bytes, but {bytes} were expected: it is truncated or a different file; copy it again",
                binary.len()
            ));
        }
        if let Some(sum) = &self.sha256 {
            let found = Sha256::digest(binary);
            if found[..] != sum[..] {
                return wrong(format!("its SHA-256 is {}, but {} was expected: it is damaged; copy it again", hex(&found), hex(sum)));
            }
        }
        let metadata = library.inspect(&self.name, binary)?;
        match self.mismatch(&metadata) {
            Some(reason) => wrong(reason),
            None => Ok(metadata),
        }
    }

    /// The first graph or tensor that is missing or different.
    fn mismatch(&self, metadata: &Metadata) -> Option<String> {
        for graph in &self.graphs {
            let Some(found) = metadata.graphs.iter().find(|found| found.name == graph.name) else {
                let names: Vec<&str> = metadata.graphs.iter().map(|graph| &*graph.name).collect();
                return Some(format!("has no graph `{}` (it has {}): it belongs to another manifest", graph.name, names.join(", ")));
            };
            let sides = [("input", &graph.inputs, &found.inputs), ("output", &graph.outputs, &found.outputs)];
            for (side, wanted, found) in sides {
                if let Some(reason) = side_mismatch(wanted, found) {
                    return Some(format!("graph `{}`: {side} {reason}: it belongs to another manifest", graph.name));
                }
            }
        }
        None
    }
}

fn side_mismatch(wanted: &[ExpectedTensor], found: &[TensorInfo]) -> Option<String> {
    for ExpectedTensor { name, dtype, dims } in wanted {
        match found.iter().find(|tensor| tensor.name == *name) {
            None => return Some(format!("`{name}` is missing")),
            Some(tensor) if tensor.dtype != Some(*dtype) => {
                return Some(format!("`{name}` has type {:#x}, but {dtype:?} was expected", tensor.type_code));
            }
            Some(tensor) if tensor.dims != *dims => {
                return Some(format!("`{name}` has shape {:?}, but {dims:?} was expected", tensor.dims));
            }
            Some(_) => {}
        }
    }
    let extra = found.iter().find(|tensor| wanted.iter().all(|wanted| wanted.name != tensor.name));
    extra.map(|tensor| format!("`{}` was not expected", tensor.name))
}

impl Metadata {
    /// Why a library cannot load this binary on a processor, and what to do.
    pub fn obstacle(&self, library: &Library, arch: Arch) -> Option<String> {
        if self.arch != arch.number() {
            return Some(format!(
                "was compiled for Hexagon v{}, but this processor is {arch} ({}): use the `{arch}` folder of the bundle, or forge it for {arch}",
                self.arch,
                arch.soc_name()
            ));
        }
        if self.shared_weights && self.graphs.len() > 1 && library.emulates() {
            return Some(
                "shares weights between its graphs, which QNN's emulator cannot load: run it on a phone, or forge the bundle for the emulator"
                    .into(),
            );
        }
        if library.build().older_than(&self.build) {
            return Some(format!(
                "was compiled with {}, but the library is the older {}: use the libraries of {} or newer, or forge the bundle with the older ones",
                self.build,
                library.build(),
                self.build
            ));
        }
        let most = u64::from(arch.vtcm_mb()) << 20;
        let large = self.graphs.iter().find(|graph| graph.compiled.is_some_and(|compiled| u64::from(compiled.vtcm_bytes) > most));
        large.map(|graph| {
            let bytes = graph.compiled.map_or(0, |compiled| compiled.vtcm_bytes);
            format!(
                "graph `{}` needs {} MiB of VTCM, but {arch} has {} MiB: forge the bundle again",
                graph.name,
                bytes >> 20,
                arch.vtcm_mb()
            )
        })
    }
}

/// Whether the section table at the start of the binary names a section of shared weights.
fn has_shared_section(binary: &[u8]) -> bool {
    const SECTION: &[u8] = b"WEIGHTS/";
    const TABLE: usize = 4 << 20;
    let table = &binary[..binary.len().min(TABLE)];
    // Names are preceded by their length, unlike weight data that happens to look like a name.
    let named = |window: &[u8]| window[4..].starts_with(SECTION) && window[0] > SECTION.len() as u8 && window[1..4] == [0; 3];
    table.windows(4 + SECTION.len()).any(named)
}

/// Frees the system library's context, and with it the metadata.
struct Reader<'a> {
    library: &'a Library,
    handle: ffi::Handle,
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        let free = self.library.system().ok().and_then(|system| system.interface.table.context_free);
        if let (Some(free), false) = (free, self.handle.is_null()) {
            // SAFETY: made by the same library, freed once; all that was read of it has been copied.
            let _ = self.library.call("systemContextFree", &"metadata", || unsafe { free(self.handle) });
        }
    }
}

/// # Safety
/// The struct and all it points to must be live.
unsafe fn metadata(info: &ffi::BinaryInfoV3) -> std::result::Result<Metadata, String> {
    if info.backend_id != HTP_BACKEND {
        return Err(format!("it is for QNN's backend {}, not for the Hexagon processor", info.backend_id));
    }
    // SAFETY: the caller's; checked for null and for the size that the library tells.
    let meta = if info.meta_size as usize >= size_of::<ffi::HtpBinaryMeta>() { unsafe { info.meta.as_ref() } } else { None };
    let meta = meta.ok_or("it does not name its processor")?;
    // SAFETY: the caller's.
    let graphs = unsafe { slice(info.graphs, info.graph_count, "graphs") }?;
    Ok(Metadata {
        build: Build::parse(&text(info.build_id).unwrap_or_default()),
        core_version: (info.core.major, info.core.minor, info.core.patch),
        arch: meta.arch,
        soc_model: info.soc_model,
        shared_weights: false,
        // SAFETY: the caller's.
        graphs: graphs.iter().map(|graph| unsafe { graph_info(graph) }).collect::<std::result::Result<_, _>>()?,
    })
}

/// # Safety
/// The struct and all it points to must be live.
unsafe fn graph_info(graph: &ffi::GraphInfo) -> std::result::Result<GraphInfo, String> {
    if graph.version != 3 {
        return Err(format!("a graph's metadata has version {}, but qhx reads version 3", graph.version));
    }
    // SAFETY: the caller's.
    let tensors = |list, count| unsafe { slice(list, count, "tensors") }?.iter().map(|tensor| unsafe { tensor_info(tensor) }).collect();
    let inputs: std::result::Result<Vec<TensorInfo>, String> = tensors(graph.inputs, graph.input_count);
    let outputs: std::result::Result<Vec<TensorInfo>, String> = tensors(graph.outputs, graph.output_count);
    // SAFETY: the caller's; checked for null, size and version.
    let blob = if graph.blob_size as usize >= size_of::<ffi::HtpGraphBlob>() { unsafe { graph.blob.as_ref() } } else { None };
    Ok(GraphInfo {
        name: text(graph.name).ok_or("a graph has no name")?,
        inputs: inputs?,
        outputs: outputs?,
        compiled: blob.filter(|blob| blob.version == 1).map(|blob| Compiled {
            vtcm_bytes: blob.vtcm_bytes,
            optimization: blob.optimization,
            dlbc: blob.dlbc != 0,
            hvx_threads: blob.hvx_threads,
            spill_fill_bytes: blob.spill_fill,
        }),
    })
}

/// # Safety
/// The struct and all it points to must be live.
unsafe fn tensor_info(tensor: &ffi::Tensor) -> std::result::Result<TensorInfo, String> {
    let name = text(tensor.name).ok_or("a tensor has no name")?;
    if tensor.rank > MOST_AXES {
        return Err(format!("the tensor `{name}` has {} axes", tensor.rank));
    }
    // SAFETY: the caller's.
    let dims = unsafe { slice(tensor.dims, tensor.rank, "axes") }?.to_vec();
    let ffi::Quantize { definition, encoding, value } = tensor.quantize;
    // SAFETY: every bit pattern is a number; the tags say whether this is the union's member.
    let scale = (definition == 1 && encoding == 0).then_some(unsafe { value.tensor.scale });
    Ok(TensorInfo { name, id: tensor.id, type_code: tensor.dtype, dtype: DataType::from_code(tensor.dtype), dims, scale })
}

/// # Safety
/// The list must hold `count` live elements.
unsafe fn slice<'a, T>(list: *const T, count: u32, what: &str) -> std::result::Result<&'a [T], String> {
    match count {
        0 => Ok(&[]),
        _ if count > MOST || list.is_null() => Err(format!("its list of {what} is damaged")),
        // SAFETY: the caller's; checked for null.
        _ => Ok(unsafe { std::slice::from_raw_parts(list, count as usize) }),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
