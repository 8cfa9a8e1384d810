//! Contexts and their graphs, ready to execute.
#![allow(unsafe_code)] // Calls the library with our buffers; every length is checked first.

use crate::{
    binary::{Expected, Metadata, TensorInfo},
    device::Opened,
    error::{Error, Result},
    ffi,
    graph::DataType,
    library::{Library, function},
};
use memmap2::MmapMut;
#[cfg(any(target_os = "linux", target_os = "android"))]
use std::os::fd::AsRawFd;
use std::{
    ffi::CString,
    fs::{File, OpenOptions},
    io,
    path::Path,
    ptr,
    sync::Arc,
};

/// Compiled graphs on a processor.
pub struct Context {
    handle: Arc<ContextHandle>,
    graphs: Vec<Arc<ExecGraph>>,
}

/// A graph that can be executed. It keeps its context alive.
pub struct ExecGraph {
    context: Arc<ContextHandle>,
    handle: ffi::Handle,
    name: String,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
}

/// An input or output of a graph.
#[derive(Clone, Debug)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: DataType,
    /// Shape.
    pub dims: Vec<u32>,
    /// The factor on stored values, for [`DataType::Fixed8`].
    pub scale: Option<f32>,
    /// Size of its buffer in bytes.
    pub bytes: usize,
    /// The library's id for it, which is all it uses to tell buffers apart.
    id: u32,
    c_name: CString,
}

pub(crate) struct ContextHandle {
    pub(crate) device: Arc<Opened>,
    pub(crate) handle: ffi::Handle,
}

// SAFETY: QNN's handles may be used from any thread, executions of one graph included; freeing happens in `drop`, which has the only owner.
unsafe impl Send for ContextHandle {}
// SAFETY: as above.
unsafe impl Sync for ContextHandle {}
// SAFETY: as above.
unsafe impl Send for ExecGraph {}
// SAFETY: as above.
unsafe impl Sync for ExecGraph {}

impl Context {
    pub(crate) fn new(handle: Arc<ContextHandle>, graphs: Vec<ExecGraph>) -> Self {
        Self { handle, graphs: graphs.into_iter().map(Arc::new).collect() }
    }

    /// Its graphs.
    pub fn graphs(&self) -> &[Arc<ExecGraph>] {
        &self.graphs
    }

    /// The graph of that name.
    pub fn graph(&self, name: &str) -> Result<&Arc<ExecGraph>> {
        self.graphs.iter().find(|graph| graph.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.graphs.iter().map(|graph| &*graph.name).collect();
            Error::Execute { graph: name.into(), reason: format!("is not in the context, which contains {}", names.join(", ")) }
        })
    }

    /// The context binary: what a phone loads.
    pub fn binary(&self) -> Result<Vec<u8>> {
        let size = self.binary_size()?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(size).map_err(|_| Error::Unsupported(format!("not enough memory for a context binary of {size} bytes")))?;
        bytes.resize(size, 0);
        self.write_binary(&mut bytes)?;
        Ok(bytes)
    }

    /// Writes the context binary to a new file, without a copy in memory.
    pub fn save(&self, file: &Path) -> Result<u64> {
        let wrong = |e: io::Error| Error::Binary { name: file.display().to_string(), reason: format!("cannot be written: {e}") };
        let size = self.binary_size()?;
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(file).map_err(wrong)?;
        reserve(&open, size as u64).map_err(wrong)?;
        // SAFETY: the file was just made, by us and for us.
        let mut map = unsafe { MmapMut::map_mut(&open) }.map_err(wrong)?;
        self.write_binary(&mut map)?;
        map.flush().map_err(wrong)?;
        Ok(size as u64)
    }

    fn binary_size(&self) -> Result<usize> {
        let library = self.handle.device.library();
        let get = function(library.table().context_get_binary_size, "contextGetBinarySize")?;
        let mut size = 0;
        // SAFETY: the context is live.
        library.call("contextGetBinarySize", &"the context", || unsafe { get(self.handle.handle, &raw mut size) })?;
        match usize::try_from(size) {
            Ok(size) if size > 0 => Ok(size),
            _ => Err(Error::Unsupported(format!("the library reports an impossible context binary size of {size} bytes"))),
        }
    }

    fn write_binary(&self, bytes: &mut [u8]) -> Result<()> {
        let library = self.handle.device.library();
        let get = function(library.table().context_get_binary, "contextGetBinary")?;
        let mut written = 0;
        // SAFETY: the context is live, and the library is told the buffer's size.
        library.call("contextGetBinary", &"the context", || unsafe {
            get(self.handle.handle, bytes.as_mut_ptr().cast(), bytes.len() as u64, &raw mut written)
        })?;
        match written == bytes.len() as u64 {
            true => Ok(()),
            false => Err(Error::Unsupported(format!("the library wrote only {written} of the {} bytes of a context binary", bytes.len()))),
        }
    }
}

/// Gives a new file its size and reserves the disk space: writing to a mapping of a file without space would kill the process.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn reserve(file: &File, size: u64) -> io::Result<()> {
    let size = libc::off64_t::try_from(size).map_err(io::Error::other)?;
    // SAFETY: the file is open.
    match unsafe { libc::posix_fallocate64(file.as_raw_fd(), 0, size) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// The same on other systems, by writing.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn reserve(mut file: &File, size: u64) -> io::Result<()> {
    io::copy(&mut io::Read::take(io::repeat(0), size), &mut file).map(drop)
}

/// Creates a context from a binary that has been checked.
pub(crate) fn load(device: &Arc<Opened>, binary: &[u8], metadata: &Metadata, expected: &Expected) -> Result<Context> {
    let library = device.library();
    let create = function(library.table().context_create_from_binary, "contextCreateFromBinary")?;
    let mut handle = ptr::null_mut();
    // SAFETY: backend and device are live; the library is told the buffer's size and keeps no pointer into it.
    library.call("contextCreateFromBinary", &expected.name, || unsafe {
        create(
            device.backend.handle,
            device.handle,
            ptr::null(),
            binary.as_ptr().cast(),
            binary.len() as u64,
            &raw mut handle,
            ptr::null_mut(),
        )
    })?;
    let context = Arc::new(ContextHandle { device: device.clone(), handle });
    let retrieve = function(library.table().graph_retrieve, "graphRetrieve")?;
    let mut graphs = Vec::with_capacity(metadata.graphs.len());
    for graph in &metadata.graphs {
        let name = c_string(&graph.name)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the context is live, the name is closed by a zero byte.
        library.call("graphRetrieve", &graph.name, || unsafe { retrieve(context.handle, name.as_ptr(), &raw mut handle) })?;
        let ports = |tensors: &[TensorInfo]| tensors.iter().map(|tensor| Port::loaded(tensor, &graph.name)).collect::<Result<Vec<_>>>();
        graphs.push(ExecGraph::new(context.clone(), handle, graph.name.clone(), ports(&graph.inputs)?, ports(&graph.outputs)?));
    }
    Ok(Context::new(context, graphs))
}

impl ExecGraph {
    pub(crate) fn new(context: Arc<ContextHandle>, handle: ffi::Handle, name: String, inputs: Vec<Port>, outputs: Vec<Port>) -> Self {
        Self { context, handle, name, inputs, outputs }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its inputs, in the order of its tensors.
    pub fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    /// Its outputs, in the order of its tensors.
    pub fn outputs(&self) -> &[Port] {
        &self.outputs
    }

    /// Executes the graph with buffers by name, in any order: each input and each output exactly once.
    pub fn execute(&self, inputs: &[(&str, &[u8])], outputs: &mut [(&str, &mut [u8])]) -> Result<()> {
        let given = self.arrange("input", &self.inputs, inputs.iter().map(|(name, _)| *name))?;
        let inputs: Vec<&[u8]> = given.iter().map(|&at| inputs[at].1).collect();
        let wanted = self.arrange("output", &self.outputs, outputs.iter().map(|(name, _)| *name))?;
        let mut buffers: Vec<Option<&mut [u8]>> = outputs.iter_mut().map(|(_, buffer)| Some(&mut **buffer)).collect();
        let mut outputs: Vec<&mut [u8]> = wanted.iter().filter_map(|&at| buffers[at].take()).collect();
        self.execute_in_order(&inputs, &mut outputs)
    }

    /// Executes the graph with buffers in the order of [`Self::inputs`] and [`Self::outputs`].
    pub fn execute_in_order(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> Result<()> {
        // The library does not check sizes: it would read and write beyond short buffers.
        self.check_sizes("input", &self.inputs, inputs.iter().map(|buffer| buffer.len()))?;
        self.check_sizes("output", &self.outputs, outputs.iter().map(|buffer| buffer.len()))?;
        let read =
            self.inputs.iter().zip(inputs).map(|(port, buffer)| port.tensor(ffi::role::INPUT, buffer.as_ptr().cast_mut(), buffer.len()));
        let read: Vec<ffi::Tensor> = read.collect();
        let made = self.outputs.iter().zip(outputs.iter_mut());
        let mut made: Vec<ffi::Tensor> =
            made.map(|(port, buffer)| port.tensor(ffi::role::OUTPUT, buffer.as_mut_ptr(), buffer.len())).collect();
        let library = self.context.device.library();
        let execute = function(library.table().graph_execute, "graphExecute")?;
        // SAFETY: the graph is live (its context is owned here); names, shapes and buffers outlive the call; inputs are only read; the sizes are
        // those of the graph's tensors.
        library.call("graphExecute", &self.name, || unsafe {
            execute(self.handle, read.as_ptr(), read.len() as u32, made.as_mut_ptr(), made.len() as u32, ptr::null_mut(), ptr::null_mut())
        })
    }

    /// The index of each port's buffer among those given by name.
    fn arrange<'a>(&self, what: &str, ports: &[Port], names: impl Iterator<Item = &'a str>) -> Result<Vec<usize>> {
        let wrong = |reason: String| Err(Error::Execute { graph: self.name.clone(), reason });
        let mut places = vec![None; ports.len()];
        for (at, name) in names.enumerate() {
            match ports.iter().position(|port| port.name == name) {
                None => return wrong(format!("has no {what} `{name}`; it has {}", list(ports))),
                Some(port) if places[port].is_some() => return wrong(format!("{what} `{name}` is given twice")),
                Some(port) => places[port] = Some(at),
            }
        }
        let missing = ports.iter().zip(&places).find(|(_, place)| place.is_none());
        match missing {
            Some((port, _)) => wrong(format!("{what} `{}` is missing", port.name)),
            None => Ok(places.into_iter().flatten().collect()),
        }
    }

    fn check_sizes(&self, what: &str, ports: &[Port], sizes: impl ExactSizeIterator<Item = usize>) -> Result<()> {
        let wrong = |reason: String| Err(Error::Execute { graph: self.name.clone(), reason });
        if sizes.len() != ports.len() {
            return wrong(format!("{} {what}s are given, but it has {}: {}", sizes.len(), ports.len(), list(ports)));
        }
        for (port, size) in ports.iter().zip(sizes) {
            if size != port.bytes {
                return wrong(format!("{what} `{}` {:?} needs {} bytes, but {size} are given", port.name, port.dims, port.bytes));
            }
        }
        Ok(())
    }
}

impl Port {
    /// A port of a compiled graph.
    pub(crate) fn new(name: &str, dtype: DataType, dims: &[u32], scale: Option<f32>, id: u32) -> Result<Self> {
        let wrong = || Error::Unsupported(format!("the tensor `{name}` {dims:?} is larger than QNN's largest buffer"));
        let bytes = dtype.byte_len(dims).filter(|&bytes| u32::try_from(bytes).is_ok()).ok_or_else(wrong)?;
        Ok(Self { name: name.into(), dtype, dims: dims.into(), scale, bytes, id, c_name: c_string(name)? })
    }

    fn loaded(tensor: &TensorInfo, graph: &str) -> Result<Self> {
        let dtype = tensor.dtype.ok_or_else(|| {
            Error::Unsupported(format!(
                "graph `{graph}`: `{}` has the QNN data type {:#x}, which qhx does not support for inputs and outputs",
                tensor.name, tensor.type_code
            ))
        })?;
        Self::new(&tensor.name, dtype, &tensor.dims, tensor.scale, tensor.id)
    }

    fn tensor(&self, role: u32, data: *mut u8, size: usize) -> ffi::Tensor {
        ffi::Tensor {
            id: self.id,
            name: self.c_name.as_ptr(),
            role,
            dtype: self.dtype.code(),
            quantize: self.scale.map_or(ffi::Quantize::NONE, ffi::Quantize::tensor),
            rank: self.dims.len() as u32,
            dims: self.dims.as_ptr(),
            data: data.cast(),
            size: size as u32,
            ..ffi::Tensor::EMPTY
        }
    }
}

impl ContextHandle {
    pub(crate) fn library(&self) -> &Library {
        self.device.library()
    }
}

impl Drop for ContextHandle {
    fn drop(&mut self) {
        if let Some(free) = self.library().table().context_free {
            // SAFETY: made by us, freed once, after all its graphs, which own this.
            let _ = self.library().call("contextFree", &"the context", || unsafe { free(self.handle, ptr::null_mut()) });
        }
    }
}

pub(crate) fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Unsupported(format!("the name `{}` contains a zero byte", text.escape_debug())))
}

fn list(ports: &[Port]) -> String {
    ports.iter().map(|port| &*port.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mapped file has its disk space before anything is written to it.
    #[test]
    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn room_is_taken_and_not_only_promised() {
        use std::os::unix::fs::MetadataExt;
        let file = tempfile::tempfile().unwrap();
        reserve(&file, 1 << 20).unwrap();
        let found = file.metadata().unwrap();
        assert!(found.len() == 1 << 20 && found.blocks() * 512 >= 1 << 20, "{found:?}");
    }
}
