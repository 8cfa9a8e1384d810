//! A QNN graph as a plain value: produced by lowering and passed to the library by the bindings.
//!
//! Defines tensor types, quantisations and parameters; independent of both programs and the C interface.

use std::{fmt, sync::Arc};

pub use crate::check::operation::operations;

/// A tensor of a [`Graph`], by its index in [`Graph::tensors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub usize);

/// A graph with static shapes.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Its name, unique in its context.
    pub name: String,
    /// All tensors; inputs and outputs are exchanged in this order.
    pub tensors: Vec<Tensor>,
    /// The operations, each after those whose outputs it reads.
    pub nodes: Vec<Node>,
}

/// A tensor.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name, unique in its graph.
    pub name: String,
    /// Where its values come from.
    pub role: Role,
    /// Element type.
    pub dtype: DataType,
    /// Shape.
    pub dims: Vec<u32>,
    /// How stored integers map to real values.
    pub quantization: Quantization,
}

/// Where a tensor's values come from.
#[derive(Clone, Debug)]
pub enum Role {
    /// The host writes it before each execution.
    Input,
    /// The host reads it after each execution.
    Output,
    /// An intermediate result inside the graph.
    Inner,
    /// Stored in the context binary: little-endian, row-major.
    Constant(Arc<[u8]>),
    /// Stored in the context binary like [`Role::Constant`], but created only when the library takes it, so that only one large weight is in memory at a time.
    Lazy(Lazy),
}

/// A constant that is created on demand.
#[derive(Clone)]
pub struct Lazy(Arc<dyn Fn() -> Result<Vec<u8>, String> + Send + Sync>);

impl Lazy {
    /// A constant whose bytes the function creates; its error says why it could not.
    pub fn new(make: impl Fn() -> Result<Vec<u8>, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(make))
    }

    /// Creates the bytes.
    pub fn read(&self) -> Result<Vec<u8>, String> {
        (self.0)()
    }
}

impl fmt::Debug for Lazy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lazy")
    }
}

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataType {
    /// 16-bit floats: the type in which the processor computes.
    F16,
    /// 32-bit floats: only for a graph's inputs and outputs.
    F32,
    /// Row indexes and positions.
    I32,
    /// Parameters.
    U32,
    /// Conditions, one byte each.
    Bool,
    /// Signed 8-bit integers with a [`Quantization`]; 4-bit weights also take one byte each.
    Fixed8,
}

impl DataType {
    /// QNN's code for it.
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

    /// The type with this QNN code, if qhx supports it.
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        [Self::F16, Self::F32, Self::I32, Self::U32, Self::Bool, Self::Fixed8].into_iter().find(|dtype| dtype.code() == code)
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::Bool | Self::Fixed8 => 1,
        }
    }

    /// Bytes of a tensor; `None` on overflow.
    pub fn byte_len(self, dims: &[u32]) -> Option<usize> {
        dims.iter().try_fold(self.size(), |product, &dim| product.checked_mul(dim as usize))
    }
}

/// How stored integers map to real values: `real = stored x scale`.
#[derive(Clone, Debug, PartialEq)]
pub enum Quantization {
    /// Not quantised.
    None,
    /// One scale.
    Tensor(f32),
    /// One scale per index of an axis, 8-bit values.
    Channel8 {
        /// The axis.
        axis: u32,
        /// The scales along it.
        scales: Vec<f32>,
    },
    /// One scale per index of an axis, values in -8..=7.
    Channel4 {
        /// The axis.
        axis: u32,
        /// The scales along it.
        scales: Vec<f32>,
    },
    /// One scale per row and block of columns of a weight `[out, in]`, values in -8..=7.
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
    /// Its name, unique in its graph: the path of the program's op and what this part of it does.
    pub name: String,
    /// The operation's QNN name: `FullyConnected` …
    pub kind: &'static str,
    /// Parameters by their QNN names.
    pub parameters: Vec<(&'static str, Parameter)>,
    /// Inputs.
    pub inputs: Vec<TensorId>,
    /// Outputs.
    pub outputs: Vec<TensorId>,
}

/// A parameter of an operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Parameter {
    /// A flag.
    Bool(bool),
    /// An unsigned integer.
    U32(u32),
    /// A signed integer.
    I32(i32),
    /// A float.
    F32(f32),
    /// An array of unsigned integers.
    U32s {
        /// Shape.
        dims: Vec<u32>,
        /// Values, row-major.
        values: Vec<u32>,
    },
    /// An array of signed integers.
    I32s {
        /// Shape.
        dims: Vec<u32>,
        /// Values, row-major.
        values: Vec<i32>,
    },
}
