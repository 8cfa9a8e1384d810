//! Builds QNN graphs from plain graphs.
#![allow(unsafe_code)] // Passes structs of pointers to the library; what they point to is kept alive with them.

use crate::{
    context::{Context, ContextHandle, ExecGraph, Port, c_string},
    device::{Arch, Opened},
    error::{Error, Result},
    ffi::{self, Configs},
    graph::{DataType, Graph, Node, Parameter, Quantization, Role, Tensor},
    library::function,
};
use std::{
    borrow::Cow,
    collections::HashSet,
    ffi::{CStr, CString, c_void},
    ptr,
    sync::Arc,
};

/// How graphs are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompileOptions {
    /// Effort, 1 to 3.
    pub optimization: u32,
    /// Fast memory (VTCM) that a graph may use; 0: all that the chip has.
    pub vtcm_mb: u32,
    /// HVX (vector) threads; 0: the library decides.
    pub hvx_threads: u32,
    /// Whether graphs of a context store equal constants once. The emulator runs such a context but cannot load its binary.
    pub share_weights: bool,
    /// Whether to compress activations when they are written to memory (DLBC).
    pub dlbc: bool,
}

impl Default for CompileOptions {
    fn default() -> Self {
        Self { optimization: 3, vtcm_mb: 8, hvx_threads: 4, share_weights: false, dlbc: false }
    }
}

impl CompileOptions {
    /// Checks the settings: the library accepts ones that the chip does not support.
    pub(crate) fn check(&self, arch: Arch) -> Result<()> {
        if !(1..=3).contains(&self.optimization) {
            return Err(Error::Unsupported(format!("optimisation {} is not one of 1, 2, 3", self.optimization)));
        }
        if self.vtcm_mb > arch.vtcm_mb() {
            return Err(Error::Unsupported(format!("{} MiB of VTCM were requested, but {arch} has {} MiB", self.vtcm_mb, arch.vtcm_mb())));
        }
        Ok(())
    }
}

const PACKAGE: &CStr = c"qti.aisw";

/// The numbers of HTP's options.
mod option {
    pub(super) const CONTEXT_WEIGHT_SHARING: u32 = 1;
    pub(super) const GRAPH_OPTIMIZATION: u32 = 1;
    pub(super) const GRAPH_PRECISION: u32 = 2;
    pub(super) const GRAPH_VTCM_MB: u32 = 3;
    pub(super) const GRAPH_HVX_THREADS: u32 = 6;
    /// Kinds of optimisation.
    pub(super) const LEVEL: u32 = 3;
    pub(super) const DLBC: u32 = 4;
}

/// Checks that the graphs of a context have distinct names.
pub(crate) fn check_names(graphs: &[Graph]) -> Result<()> {
    let mut names = HashSet::new();
    match graphs.iter().find(|graph| !names.insert(&graph.name)) {
        Some(graph) => {
            Err(Error::Graph { graph: graph.name.clone(), place: "name".into(), reason: "two graphs of the context have this name".into() })
        }
        None if graphs.is_empty() => Err(Error::Unsupported("cannot compile a context without graphs".into())),
        None => Ok(()),
    }
}

/// Compiles graphs, which have been checked, into one context.
pub(crate) fn compile(device: &Arc<Opened>, graphs: &[Graph], options: &CompileOptions) -> Result<Context> {
    let library = device.library();
    let sharing = ffi::HtpContextOption { option: option::CONTEXT_WEIGHT_SHARING, _pad: 0, value: [1, 0, 0, 0] };
    let configs = if options.share_weights { vec![(&raw const sharing).cast()] } else { vec![] };
    let create = function(library.table().context_create, "contextCreate")?;
    let mut handle = ptr::null_mut();
    let configs = Customs::new(&configs);
    // SAFETY: backend and device are live, the configurations outlive the call.
    library.call("contextCreate", &graphs[0].name, || unsafe {
        create(device.backend.handle, device.handle, configs.pointer(), &raw mut handle)
    })?;
    let context = Arc::new(ContextHandle { device: device.clone(), handle });
    let graphs = graphs.iter().map(|graph| add_graph(&context, graph, options)).collect::<Result<_>>()?;
    Ok(Context::new(context, graphs))
}

fn add_graph(context: &Arc<ContextHandle>, graph: &Graph, options: &CompileOptions) -> Result<ExecGraph> {
    let library = context.library();
    let table = library.table();
    let htp = graph_options(options);
    let configs = Customs::new(&htp.iter().map(|option| (&raw const *option).cast()).collect::<Vec<_>>());
    let name = c_string(&graph.name)?;
    let create = function(table.graph_create, "graphCreate")?;
    let mut handle = ptr::null_mut();
    // SAFETY: the context is live; name and configurations outlive the call.
    library.call("graphCreate", &graph.name, || unsafe { create(context.handle, name.as_ptr(), configs.pointer(), &raw mut handle) })?;

    let mut building = Building { context, graph, handle, tensors: Vec::with_capacity(graph.tensors.len()), parameters: Vec::new() };
    for tensor in &graph.tensors {
        let created = building.create_tensor(tensor)?;
        building.tensors.push(created);
    }
    for node in &graph.nodes {
        building.add_node(node)?;
    }
    let finalize = function(table.graph_finalize, "graphFinalize")?;
    // SAFETY: the graph is live and not finalized yet.
    library.call("graphFinalize", &graph.name, || unsafe { finalize(handle, ptr::null_mut(), ptr::null_mut()) })?;

    let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
    for (tensor, native) in graph.tensors.iter().zip(&building.tensors) {
        let side = match tensor.role {
            Role::Input => &mut inputs,
            Role::Output => &mut outputs,
            Role::Inner | Role::Constant(_) | Role::Lazy(_) => continue,
        };
        let scale = match tensor.quantization {
            Quantization::Tensor(scale) => Some(scale),
            _ => None,
        };
        side.push(Port::new(&tensor.name, tensor.dtype, &tensor.dims, scale, native.tensor.id)?);
    }
    Ok(ExecGraph::new(context.clone(), handle, graph.name.clone(), inputs, outputs))
}

fn graph_options(options: &CompileOptions) -> Vec<ffi::HtpGraphOption> {
    const F16: u32 = 1;
    let float = |kind, value: f32| ffi::HtpGraphOption::new(option::GRAPH_OPTIMIZATION, kind, value.to_bits());
    let mut htp = vec![
        ffi::HtpGraphOption::new(option::GRAPH_PRECISION, F16, 0),
        float(option::LEVEL, options.optimization as f32),
        ffi::HtpGraphOption::new(option::GRAPH_VTCM_MB, options.vtcm_mb, 0),
    ];
    if options.hvx_threads > 0 {
        htp.push(ffi::HtpGraphOption::new(option::GRAPH_HVX_THREADS, options.hvx_threads, 0));
    }
    if options.dlbc {
        htp.push(float(option::DLBC, 1.0));
    }
    htp
}

/// A null-terminated list of backend-specific configurations.
struct Customs {
    _configs: Box<[ffi::Config]>,
    pointers: Vec<*const ffi::Config>,
}

impl Customs {
    fn new(customs: &[*const c_void]) -> Self {
        let configs: Box<[_]> = customs.iter().map(|&custom| ffi::Config { option: ffi::Config::CUSTOM, custom }).collect();
        let pointers = configs.iter().map(|config| &raw const *config).chain([ptr::null()]).collect();
        Self { _configs: configs, pointers }
    }

    fn pointer(&self) -> Configs {
        self.pointers.as_ptr()
    }
}

/// A QNN graph under construction.
struct Building<'a> {
    context: &'a Arc<ContextHandle>,
    graph: &'a Graph,
    handle: ffi::Handle,
    tensors: Vec<Native>,
    parameters: Vec<Native>,
}

/// A QNN tensor with what it points to.
struct Native {
    tensor: ffi::Tensor,
    _name: CString,
    _dims: Box<[u32]>,
    _scales: Scales,
    _data: Option<Arc<[u8]>>,
}

/// What a tensor's quantisation points to.
enum Scales {
    None,
    Axis { _scales: Vec<ffi::ScaleOffset> },
    WidthAxis { _scales: Vec<f32>, _offsets: Vec<i32> },
    Block { _sizes: Box<[u32; 2]>, _scales: Vec<ffi::ScaleOffset> },
}

impl Building<'_> {
    fn create_tensor(&self, tensor: &Tensor) -> Result<Native> {
        let (role, data) = match &tensor.role {
            Role::Input => (ffi::role::INPUT, None),
            Role::Output => (ffi::role::OUTPUT, None),
            Role::Inner => (ffi::role::INNER, None),
            Role::Constant(bytes) => (ffi::role::CONSTANT, Some(Cow::Borrowed(&**bytes))),
            Role::Lazy(lazy) => (
                ffi::role::CONSTANT,
                Some(Cow::Owned(lazy.read().map_err(|reason| Error::Graph {
                    graph: self.graph.name.clone(),
                    place: format!("tensor `{}`", tensor.name),
                    reason,
                })?)),
            ),
        };
        let mut native = Native::new(&tensor.name, tensor.dtype, &tensor.dims, &tensor.quantization)?;
        native.tensor.role = role;
        if let Some(bytes) = &data {
            tensor.check_constant(bytes).map_err(|reason| self.graph.wrong(format!("tensor `{}`", tensor.name), reason))?;
        }
        self.register(&mut native, data.as_deref())?;
        // The library has its own copy now. Small constants stay reachable for ops that inspect them during validation.
        if let Role::Constant(bytes) = &tensor.role {
            native.keep(bytes.clone());
        }
        Ok(native)
    }

    /// Registers a tensor with the library, which copies the data.
    fn register(&self, native: &mut Native, data: Option<&[u8]>) -> Result<()> {
        let library = self.context.library();
        let create = function(library.table().tensor_create, "tensorCreateGraphTensor")?;
        if let Some(data) = data {
            native.tensor.data = data.as_ptr().cast_mut().cast();
            native.tensor.size = data.len() as u32;
        }
        let name = native._name.to_string_lossy().into_owned();
        // SAFETY: the graph is live; name, shape, scales and data outlive the call, and the data has the size that shape and type require.
        library.call("tensorCreateGraphTensor", &format_args!("`{name}` of graph `{}`", self.graph.name), || unsafe {
            create(self.handle, &raw mut native.tensor)
        })?;
        native.tensor.data = ptr::null_mut();
        native.tensor.size = 0;
        Ok(())
    }

    fn add_node(&mut self, node: &Node) -> Result<()> {
        let library = self.context.library();
        let table = library.table();
        let (name, kind) = (c_string(&node.name)?, c_string(node.kind)?);
        let mut parameters = Vec::with_capacity(node.parameters.len());
        for (parameter, value) in &node.parameters {
            let c_parameter = c_string(parameter)?;
            let (kind, value) = match scalar(value) {
                Some(scalar) => (0, ffi::ParameterValue { scalar }),
                None => {
                    let native = self.parameter_tensor(&node.parameter_tensor(parameter), value)?;
                    let tensor = native.tensor;
                    self.parameters.push(native);
                    (1, ffi::ParameterValue { tensor })
                }
            };
            parameters.push((c_parameter, kind, value));
        }
        let natives: Vec<ffi::Parameter> =
            parameters.iter().map(|(name, kind, value)| ffi::Parameter { kind: *kind, name: name.as_ptr(), value: *value }).collect();
        let tensors = |ids: &[crate::graph::TensorId]| ids.iter().map(|id| self.tensors[id.0].tensor).collect::<Vec<_>>();
        let (inputs, outputs) = (tensors(&node.inputs), tensors(&node.outputs));
        let op = ffi::Op {
            version: 1,
            name: name.as_ptr(),
            package: PACKAGE.as_ptr(),
            kind: kind.as_ptr(),
            parameter_count: natives.len() as u32,
            parameters: natives.as_ptr(),
            input_count: inputs.len() as u32,
            inputs: inputs.as_ptr(),
            output_count: outputs.len() as u32,
            outputs: outputs.as_ptr(),
        };
        let subject = format!("{} `{}` of graph `{}`", node.kind, node.name, self.graph.name);
        // Adding a node validates nothing: an unknown op or a wrong shape would surface at the end or never.
        let validate = function(table.backend_validate_op, "backendValidateOpConfig")?;
        // SAFETY: the backend is live; all that the op points to is kept until after the calls.
        library.call("backendValidateOpConfig", &subject, || unsafe { validate(self.context.device.backend.handle, op) })?;
        let add = function(table.graph_add_node, "graphAddNode")?;
        // SAFETY: the graph is live; as above.
        library.call("graphAddNode", &subject, || unsafe { add(self.handle, op) })
    }

    /// Array parameters are constants of the graph.
    fn parameter_tensor(&self, name: &str, value: &Parameter) -> Result<Native> {
        let (dtype, dims, bytes): (_, _, Vec<u8>) = match value {
            Parameter::U32s { dims, values } => (DataType::U32, dims, values.iter().flat_map(|v| v.to_le_bytes()).collect()),
            Parameter::I32s { dims, values } => (DataType::I32, dims, values.iter().flat_map(|v| v.to_le_bytes()).collect()),
            _ => unreachable!("scalars are not tensors"),
        };
        let mut native = Native::new(name, dtype, dims, &Quantization::None)?;
        native.tensor.role = ffi::role::CONSTANT;
        // The library reads these through this pointer until the graph is finalized.
        let bytes: Arc<[u8]> = bytes.into();
        self.register(&mut native, Some(&bytes))?;
        native.keep(bytes);
        Ok(native)
    }
}

impl Native {
    fn new(name: &str, dtype: DataType, dims: &[u32], quantization: &Quantization) -> Result<Self> {
        let name = c_string(name)?;
        let dims: Box<[u32]> = dims.into();
        let (quantize, scales) = quantize(quantization);
        let tensor = ffi::Tensor {
            name: name.as_ptr(),
            dtype: dtype.code(),
            quantize,
            rank: dims.len() as u32,
            dims: dims.as_ptr(),
            ..ffi::Tensor::EMPTY
        };
        Ok(Self { tensor, _name: name, _dims: dims, _scales: scales, _data: None })
    }

    /// Keeps the data visible to the validation of ops that use it.
    fn keep(&mut self, data: Arc<[u8]>) {
        self.tensor.data = data.as_ptr().cast_mut().cast();
        self.tensor.size = data.len() as u32;
        self._data = Some(data);
    }
}

/// A quantisation in QNN's form, with what it points to.
fn quantize(quantization: &Quantization) -> (ffi::Quantize, Scales) {
    const AXIS: u32 = 1;
    const WIDTH_AXIS: u32 = 3;
    const BLOCK: u32 = 4;
    let defined = |encoding, value| ffi::Quantize { definition: 1, encoding, value };
    let pairs = |scales: &[f32]| scales.iter().map(|&scale| ffi::ScaleOffset { scale, offset: 0 }).collect::<Vec<_>>();
    match quantization {
        Quantization::None => (ffi::Quantize::NONE, Scales::None),
        Quantization::Tensor(scale) => (ffi::Quantize::tensor(*scale), Scales::None),
        Quantization::Channel8 { axis, scales } => {
            let scales = pairs(scales);
            let value = ffi::AxisScaleOffset { axis: *axis as i32, count: scales.len() as u32, scales: scales.as_ptr() };
            (defined(AXIS, ffi::QuantizeValue { axis: value }), Scales::Axis { _scales: scales })
        }
        Quantization::Channel4 { axis, scales } => {
            let (scales, offsets) = (scales.clone(), vec![0; scales.len()]);
            let value = ffi::WidthAxisScaleOffset {
                width: 4,
                axis: *axis as i32,
                count: scales.len() as u32,
                scales: scales.as_ptr(),
                offsets: offsets.as_ptr(),
            };
            (defined(WIDTH_AXIS, ffi::QuantizeValue { width_axis: value }), Scales::WidthAxis { _scales: scales, _offsets: offsets })
        }
        Quantization::Block4 { block, scales } => {
            let (sizes, scales) = (Box::new([1, *block]), pairs(scales));
            let value = ffi::Block { sizes: sizes.as_ptr(), scales: scales.as_ptr() };
            (defined(BLOCK, ffi::QuantizeValue { block: value }), Scales::Block { _sizes: sizes, _scales: scales })
        }
    }
}

fn scalar(value: &Parameter) -> Option<ffi::Scalar> {
    let scalar = |dtype: DataType, value: u32| Some(ffi::Scalar { dtype: dtype.code(), value: u64::from(value) });
    match value {
        Parameter::Bool(value) => scalar(DataType::Bool, u32::from(*value)),
        Parameter::U32(value) => scalar(DataType::U32, *value),
        Parameter::I32(value) => scalar(DataType::I32, value.cast_unsigned()),
        Parameter::F32(value) => scalar(DataType::F32, value.to_bits()),
        Parameter::U32s { .. } | Parameter::I32s { .. } => None,
    }
}
