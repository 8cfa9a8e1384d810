//! Builds a [`Graph`] node by node: names, result shapes and constants are derived here, so that lowering reads like the formulas.

use crate::graph::{DataType, Graph, Node, Parameter, Quantization, Role, Tensor, TensorId};
use half::f16;
use std::collections::{HashMap, HashSet};

/// A graph under construction.
pub(super) struct Builder {
    graph: Graph,
    names: HashSet<String>,
    /// Constants that several nodes share, by key.
    shared: HashMap<String, TensorId>,
    /// The path of the program's op that is being lowered; its nodes are named after it.
    path: String,
}

impl Builder {
    pub(super) fn new(name: String) -> Self {
        let graph = Graph { name, ..Graph::default() };
        Self { graph, names: HashSet::new(), shared: HashMap::new(), path: String::new() }
    }

    pub(super) fn finish(self) -> Graph {
        self.graph
    }

    /// The nodes that follow belong to this op of the program.
    pub(super) fn set_path(&mut self, path: &str) {
        self.path = path.to_owned();
    }

    pub(super) fn dims(&self, tensor: TensorId) -> Vec<usize> {
        self.graph.tensors[tensor.0].dims.iter().map(|&d| d as usize).collect()
    }

    /// The last dimension.
    pub(super) fn width(&self, tensor: TensorId) -> usize {
        self.dims(tensor).last().copied().unwrap_or(1)
    }

    pub(super) fn input(&mut self, name: &str, dtype: DataType, dims: &[usize], quantization: Quantization) -> TensorId {
        self.tensor(name, Role::Input, dtype, dims, quantization)
    }

    /// Makes a tensor an output of the graph. An input, or a tensor that is already an output, is copied.
    pub(super) fn output(&mut self, tensor: TensorId) -> TensorId {
        let found = &mut self.graph.tensors[tensor.0];
        match found.role {
            Role::Inner => {
                found.role = Role::Output;
                tensor
            }
            _ => {
                let dims = self.dims(tensor);
                let copy = self.node("Reshape", "copy", &[tensor], &dims, vec![]);
                self.graph.tensors[copy.0].role = Role::Output;
                copy
            }
        }
    }

    fn tensor(&mut self, name: &str, role: Role, dtype: DataType, dims: &[usize], quantization: Quantization) -> TensorId {
        let name = self.unique(name);
        let dims = dims.iter().map(|&d| d as u32).collect();
        self.graph.tensors.push(Tensor { name, role, dtype, dims, quantization });
        TensorId(self.graph.tensors.len() - 1)
    }

    fn unique(&mut self, name: &str) -> String {
        let mut candidate = name.to_owned();
        let mut number = 1;
        while !self.names.insert(candidate.clone()) {
            number += 1;
            candidate = format!("{name}.{number}");
        }
        candidate
    }

    /// A node with one f16 result of the given shape, named after the op's path and `what` it does.
    pub(super) fn node(
        &mut self,
        kind: &'static str,
        what: &str,
        inputs: &[TensorId],
        dims: &[usize],
        parameters: Vec<(&'static str, Parameter)>,
    ) -> TensorId {
        let name = format!("{}.{what}", self.path);
        let result = self.tensor(&name, Role::Inner, DataType::F16, dims, Quantization::None);
        let name = self.graph.tensors[result.0].name.clone();
        self.graph.nodes.push(Node { name, kind, parameters, inputs: inputs.to_vec(), outputs: vec![result] });
        result
    }

    /// An f16 constant, created once for each `key`.
    pub(super) fn shared(&mut self, key: &str, dims: &[usize], numbers: impl FnOnce() -> Vec<f32>) -> TensorId {
        if let Some(&tensor) = self.shared.get(key) {
            return tensor;
        }
        let bytes: Vec<u8> = numbers().into_iter().flat_map(|x| f16::from_f32(x).to_le_bytes()).collect();
        self.constant(key, DataType::F16, dims, Quantization::None, Role::Constant(bytes.into()))
    }

    /// A constant, created once for each `key`.
    pub(super) fn constant(&mut self, key: &str, dtype: DataType, dims: &[usize], quantization: Quantization, role: Role) -> TensorId {
        if let Some(&tensor) = self.shared.get(key) {
            return tensor;
        }
        let tensor = self.tensor(key, role, dtype, dims, quantization);
        self.shared.insert(key.to_owned(), tensor);
        tensor
    }

    /// A constant that already exists.
    pub(super) fn known(&self, key: &str) -> Option<TensorId> {
        self.shared.get(key).copied()
    }

    pub(super) fn number(&mut self, x: f32) -> TensorId {
        self.shared(&format!("number.{x}"), &[1], || vec![x])
    }

    // The operations that lowering uses.

    pub(super) fn unary(&mut self, kind: &'static str, what: &str, x: TensorId) -> TensorId {
        let dims = self.dims(x);
        self.node(kind, what, &[x], &dims, vec![])
    }

    pub(super) fn binary(&mut self, kind: &'static str, what: &str, a: TensorId, b: TensorId) -> TensorId {
        let dims = broadcast(&self.dims(a), &self.dims(b));
        self.node(kind, what, &[a, b], &dims, vec![])
    }

    pub(super) fn add(&mut self, what: &str, a: TensorId, b: TensorId) -> TensorId {
        self.binary("ElementWiseAdd", what, a, b)
    }

    pub(super) fn subtract(&mut self, what: &str, a: TensorId, b: TensorId) -> TensorId {
        self.binary("ElementWiseSubtract", what, a, b)
    }

    pub(super) fn multiply(&mut self, what: &str, a: TensorId, b: TensorId) -> TensorId {
        self.binary("ElementWiseMultiply", what, a, b)
    }

    /// `x · factor`, or `x` itself for a factor of 1.
    pub(super) fn scale(&mut self, what: &str, x: TensorId, factor: f32) -> TensorId {
        if factor == 1.0 {
            return x;
        }
        let factor = self.number(factor);
        self.multiply(what, x, factor)
    }

    /// `min(max(x, low), high)`; bounds outside the range of f16 are left out.
    pub(super) fn clamp(&mut self, x: TensorId, low: f32, high: f32) -> TensorId {
        let mut y = x;
        if low > f16::MIN.to_f32() {
            let low = self.number(low);
            y = self.binary("ElementWiseMaximum", "low", y, low);
        }
        if high < f16::MAX.to_f32() {
            let high = self.number(high);
            y = self.binary("ElementWiseMinimum", "high", y, high);
        }
        y
    }

    pub(super) fn reshape(&mut self, what: &str, x: TensorId, dims: &[usize]) -> TensorId {
        match self.dims(x) == dims {
            true => x,
            false => self.node("Reshape", what, &[x], dims, vec![]),
        }
    }

    pub(super) fn transpose(&mut self, what: &str, x: TensorId, perm: &[usize]) -> TensorId {
        let from = self.dims(x);
        let dims: Vec<usize> = perm.iter().map(|&p| from[p]).collect();
        // Only dimensions of 1 move: the data stays where it is.
        let long = |axes: &mut dyn Iterator<Item = usize>| axes.filter(|&a| from[a] != 1).collect::<Vec<_>>();
        if long(&mut perm.iter().copied()) == long(&mut (0..from.len())) {
            return self.reshape(what, x, &dims);
        }
        let perm = u32s(&[perm.len()], perm);
        self.node("Transpose", what, &[x], &dims, vec![("perm", perm)])
    }

    /// `length` entries of an axis from `start`.
    pub(super) fn slice(&mut self, what: &str, x: TensorId, axis: usize, start: usize, length: usize) -> TensorId {
        let mut dims = self.dims(x);
        if (start, length) == (0, dims[axis]) {
            return x;
        }
        let range = |(i, &d): (usize, &usize)| if i == axis { [start, start + length, 1] } else { [0, d, 1] };
        let values = dims.iter().enumerate().flat_map(range).map(|v| v as i32).collect();
        let ranges = Parameter::I32s { dims: vec![dims.len() as u32, 3], values };
        dims[axis] = length;
        self.node("StridedSlice", what, &[x], &dims, vec![("ranges", ranges)])
    }

    pub(super) fn concat(&mut self, what: &str, xs: &[TensorId], axis: usize) -> TensorId {
        if let [x] = xs {
            return *x;
        }
        let mut dims = self.dims(xs[0]);
        dims[axis] = xs.iter().map(|&x| self.dims(x)[axis]).sum();
        self.node("Concat", what, xs, &dims, vec![("axis", Parameter::U32(axis as u32))])
    }

    /// `a · b`, or `a · bᵀ`; `[.., m, k]` by `[.., k, n]`. For products of two computed tensors only: see [`Self::fully_connected`].
    pub(super) fn matmul(&mut self, what: &str, a: TensorId, b: TensorId, transposed: bool) -> TensorId {
        let (mut dims, right) = (self.dims(a), self.dims(b));
        let rank = dims.len();
        dims[rank - 1] = if transposed { right[right.len() - 2] } else { right[right.len() - 1] };
        let parameters = vec![("transpose_in0", Parameter::Bool(false)), ("transpose_in1", Parameter::Bool(transposed))];
        self.node("MatMul", what, &[a, b], &dims, parameters)
    }

    /// `x [rows, in]` by a stored weight `[out, in]`. The library prepares a `MatMul` of one row by a stored weight in a time that grows
    /// faster than the depth of the graph; this one stays linear and runs twice as fast.
    pub(super) fn fully_connected(&mut self, what: &str, x: TensorId, weight: TensorId, bias: Option<TensorId>) -> TensorId {
        let dims = [self.dims(x)[0], self.dims(weight)[0]];
        let inputs: Vec<TensorId> = [x, weight].into_iter().chain(bias).collect();
        self.node("FullyConnected", what, &inputs, &dims, vec![])
    }

    pub(super) fn softmax(&mut self, what: &str, x: TensorId) -> TensorId {
        let dims = self.dims(x);
        self.node("Softmax", what, &[x], &dims, vec![("axis", Parameter::U32(dims.len() as u32 - 1))])
    }

    pub(super) fn reduce(&mut self, kind: &'static str, what: &str, x: TensorId, axis: usize) -> TensorId {
        let mut dims = self.dims(x);
        dims.remove(axis);
        let parameters = vec![("axes", u32s(&[1], &[axis])), ("keep_dims", Parameter::Bool(false))];
        self.node(kind, what, &[x], &dims, parameters)
    }
}

/// An array parameter of unsigned integers.
pub(super) fn u32s(dims: &[usize], values: &[usize]) -> Parameter {
    Parameter::U32s { dims: dims.iter().map(|&d| d as u32).collect(), values: values.iter().map(|&v| v as u32).collect() }
}

/// The shape of an elementwise result: dimensions are aligned at the end, and 1 is broadcast.
fn broadcast(a: &[usize], b: &[usize]) -> Vec<usize> {
    let (long, short) = if a.len() >= b.len() { (a, b) } else { (b, a) };
    let missing = long.len() - short.len();
    long.iter().enumerate().map(|(i, &d)| if i < missing { d } else { d.max(short[i - missing]) }).collect()
}
