//! A QNN graph as a plain value: what lowering writes and the bindings hand to the library.
//!
//! Owns the vocabulary (tensor types, quantisations, parameters); knows neither programs nor the C interface.

use std::{fmt, sync::Arc};

pub use crate::check::operation::operations;

/// A tensor of a [`Graph`], by its place in [`Graph::tensors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub usize);

/// A graph of static shapes.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Its name, alone in its context.
    pub name: String,
    /// All tensors; inputs and outputs are exchanged in this order.
    pub tensors: Vec<Tensor>,
    /// The operations, each after those whose outputs it reads.
    pub nodes: Vec<Node>,
}

/// A tensor.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name, alone in its graph.
    pub name: String,
    /// Where its numbers come from.
    pub role: Role,
    /// Number type.
    pub dtype: DataType,
    /// Shape.
    pub dims: Vec<u32>,
    /// How stored numbers become real ones.
    pub quantization: Quantization,
}

/// Where a tensor's numbers come from.
#[derive(Clone, Debug)]
pub enum Role {
    /// The host writes it before each execution.
    Input,
    /// The host reads it after each execution.
    Output,
    /// Lives inside the graph.
    Inner,
    /// Stored in the context binary: little-endian, row-major.
    Constant(Arc<[u8]>),
    /// Stored in the context binary like [`Role::Constant`], but made only when the library takes it: large weights are in memory one at a time.
    Lazy(Lazy),
}

/// A constant that is made when it is needed.
#[derive(Clone)]
pub struct Lazy(Arc<dyn Fn() -> Result<Vec<u8>, String> + Send + Sync>);

impl Lazy {
    /// A constant whose bytes the function makes; its error says why it could not.
    pub fn new(make: impl Fn() -> Result<Vec<u8>, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(make))
    }

    /// Makes the bytes.
    pub fn read(&self) -> Result<Vec<u8>, String> {
        (self.0)()
    }
}

impl fmt::Debug for Lazy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lazy")
    }
}

/// Number types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataType {
    /// 16-bit floats: what the processor computes in.
    F16,
    /// 32-bit floats: only at the graph's edges.
    F32,
    /// Row numbers and positions.
    I32,
    /// Parameters.
    U32,
    /// Conditions, one byte each.
    Bool,
    /// Signed 8-bit numbers with a [`Quantization`]; 4-bit weights too come as one number per byte.
    Fixed8,
}

impl DataType {
    /// QNN's number for it.
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::F16 => 0x216,
            Self::F32 => 0x232,
            Self::I32 => 0x32,
            Self::U32 => 0x132,
            Self::Bool => 0x508,
            Self::Fixed8 => 0x308,
        }
    }

    /// The type that QNN's number means, if it is one of ours.
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        [Self::F16, Self::F32, Self::I32, Self::U32, Self::Bool, Self::Fixed8].into_iter().find(|dtype| dtype.code() == code)
    }

    /// Bytes of one number.
    pub fn size(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::Bool | Self::Fixed8 => 1,
        }
    }

    /// Bytes of a tensor; nothing if there are too many to count.
    pub fn byte_len(self, dims: &[u32]) -> Option<usize> {
        dims.iter().try_fold(self.size(), |product, &dim| product.checked_mul(dim as usize))
    }
}

/// How stored whole numbers become real ones: `real = stored x scale`.
#[derive(Clone, Debug, PartialEq)]
pub enum Quantization {
    /// They are real already.
    None,
    /// One scale.
    Tensor(f32),
    /// One scale per index of an axis, 8-bit numbers.
    Channel8 {
        /// The axis.
        axis: u32,
        /// The scales along it.
        scales: Vec<f32>,
    },
    /// One scale per index of an axis, numbers in -8..=7.
    Channel4 {
        /// The axis.
        axis: u32,
        /// The scales along it.
        scales: Vec<f32>,
    },
    /// One scale per row and block of columns of a weight `[out, in]`, numbers in -8..=7.
    Block4 {
        /// Columns that share a scale.
        block: u32,
        /// `[out, in / block]`.
        scales: Vec<f32>,
    },
}

/// An operation.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its name, alone in its graph: the path of the program's op and what this part of it does.
    pub name: String,
    /// The library's name for it: `FullyConnected` …
    pub kind: &'static str,
    /// Parameters by the library's names.
    pub parameters: Vec<(&'static str, Parameter)>,
    /// What it reads.
    pub inputs: Vec<TensorId>,
    /// What it makes.
    pub outputs: Vec<TensorId>,
}

/// A parameter of an operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Parameter {
    /// A switch.
    Bool(bool),
    /// A whole number.
    U32(u32),
    /// A whole number that may be negative.
    I32(i32),
    /// A real number.
    F32(f32),
    /// Whole numbers of a shape.
    U32s {
        /// Shape.
        dims: Vec<u32>,
        /// Values, row-major.
        values: Vec<u32>,
    },
    /// Whole numbers of a shape, that may be negative.
    I32s {
        /// Shape.
        dims: Vec<u32>,
        /// Values, row-major.
        values: Vec<i32>,
    },
}
