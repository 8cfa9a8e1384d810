//! Graphs written in a few lines, and numbers.

use half::f16;
use qhx_npu::{
    Arch, CompileOptions, Context, Device, Library,
    graph::{DataType, Graph, Node, Parameter, Quantization, Role, Tensor, TensorId},
};

pub(crate) fn device(arch: Arch) -> Device {
    let folder = std::env::var_os("QHX_QNN_DIR").expect("QHX_QNN_DIR names the folder with libQnnHtp.so; `cargo xtask test` fetches it");
    Library::open(Some(folder.as_ref())).unwrap_or_else(|e| panic!("{e}")).device(arch)
}

/// Numbers in -1..1 that look random and are the same every time.
pub(crate) fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    // What f16 can hold, so that inputs are exact.
    (0..count).map(|_| f16::from_f32(next()).to_f32()).collect()
}

pub(crate) fn f16_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|&n| f16::from_f32(n).to_le_bytes()).collect()
}

pub(crate) fn f16_numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
}

/// Writes graphs.
pub(crate) struct Pen(pub(crate) Graph);

impl Pen {
    pub(crate) fn new(name: &str) -> Self {
        Self(Graph { name: name.into(), ..Graph::default() })
    }

    pub(crate) fn tensor(&mut self, name: &str, role: Role, dtype: DataType, dims: &[u32], quantization: Quantization) -> TensorId {
        self.0.tensors.push(Tensor { name: name.into(), role, dtype, dims: dims.into(), quantization });
        TensorId(self.0.tensors.len() - 1)
    }

    pub(crate) fn input(&mut self, name: &str, dims: &[u32]) -> TensorId {
        self.tensor(name, Role::Input, DataType::F16, dims, Quantization::None)
    }

    pub(crate) fn output(&mut self, name: &str, dims: &[u32]) -> TensorId {
        self.tensor(name, Role::Output, DataType::F16, dims, Quantization::None)
    }

    pub(crate) fn inner(&mut self, name: &str, dims: &[u32]) -> TensorId {
        self.tensor(name, Role::Inner, DataType::F16, dims, Quantization::None)
    }

    pub(crate) fn constant(&mut self, name: &str, dims: &[u32], numbers: &[f32]) -> TensorId {
        self.tensor(name, Role::Constant(f16_bytes(numbers).into()), DataType::F16, dims, Quantization::None)
    }

    pub(crate) fn node(&mut self, kind: &'static str, parameters: &[(&'static str, Parameter)], inputs: &[TensorId], outputs: &[TensorId]) {
        let name = format!("node{}", self.0.nodes.len());
        self.0.nodes.push(Node { name, kind, parameters: parameters.to_vec(), inputs: inputs.to_vec(), outputs: outputs.to_vec() });
    }
}

/// Compiles one graph.
pub(crate) fn compile(device: &Device, graph: &Graph) -> Context {
    device.compile(std::slice::from_ref(graph), &CompileOptions::default()).unwrap_or_else(|e| panic!("{e}"))
}

/// Executes the only graph of a context and returns its outputs' bytes.
pub(crate) fn execute(context: &Context, inputs: &[(&str, &[u8])]) -> Vec<Vec<u8>> {
    let graph = &context.graphs()[0];
    let mut buffers: Vec<Vec<u8>> = graph.outputs().iter().map(|port| vec![0xa5; port.bytes]).collect();
    let mut outputs: Vec<(&str, &mut [u8])> = graph.outputs().iter().zip(&mut buffers).map(|(port, b)| (&*port.name, &mut **b)).collect();
    graph.execute(inputs, &mut outputs).unwrap_or_else(|e| panic!("{e}"));
    buffers
}

/// Compares with a tolerance relative to the largest expected number.
pub(crate) fn close(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f32, |most, n| most.max(n.abs())).max(1e-3);
    for (at, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= tolerance * largest, "{what}: number {at} is {f}, expected {e} (largest {largest})");
    }
}
