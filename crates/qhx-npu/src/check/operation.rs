//! Operations: number of tensors, parameters and types.

use super::{Checked, Operation};
use crate::graph::{DataType, Parameter};
use std::ops::RangeInclusive;

/// The kind of a parameter; arrays with their number of axes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Bool,
    U32,
    I32,
    F32,
    U32s(usize),
    I32s(usize),
}
use Kind::{Bool, F32, I32, I32s, U32, U32s};

/// The rules for one operation.
struct Rule {
    kind: &'static str,
    inputs: RangeInclusive<usize>,
    outputs: RangeInclusive<usize>,
    /// Required parameters.
    needed: &'static [(&'static str, Kind)],
    /// Optional parameters.
    optional: &'static [(&'static str, Kind)],
    types: Types,
}

/// Which types an operation reads and writes.
#[derive(Clone, Copy)]
enum Types {
    /// All floats, or all integers, of one type.
    Equal,
    /// All floats of one type.
    Floats,
    /// As [`Types::Floats`], except for quantised tensors: see [`Operation::check_quantized`].
    Weights,
    /// The second input (row indexes) is `I32`, or `U32` for `Gather`; all others have one type.
    Rows,
    /// Comparison: inputs of one type, a `Bool` output.
    Compare,
    /// The first input is `Bool`; all others have one type.
    Select,
    /// A float input, an index output.
    Index,
    /// Values and their indexes.
    TopK,
    /// Between the types of [`CASTS`].
    Cast,
    /// See [`Operation::check_quantized`].
    Quantize,
    /// Floats of one type, the last input is `I32`.
    Rotary,
}

/// Conversions that the library supports.
const CASTS: [(DataType, DataType); 5] = [
    (DataType::F16, DataType::F32),
    (DataType::F32, DataType::F16),
    (DataType::I32, DataType::F16),
    (DataType::F16, DataType::I32),
    (DataType::I32, DataType::F32),
];

/// The operations that have been seen to work, with their parameters.
#[rustfmt::skip]
const RULES: &[Rule] = &[
    rule("FullyConnected", 2..=3, &[], &[("keep_dims", Bool)], Types::Weights),
    rule("MatMul", 2..=3, &[], &[("transpose_in0", Bool), ("transpose_in1", Bool)], Types::Weights),
    rule("Conv2d", 2..=3, &[("stride", U32s(1)), ("pad_amount", U32s(2))], &[("dilation", U32s(1)), ("group", U32)], Types::Weights),
    rule("DepthWiseConv2d", 2..=3, &[("stride", U32s(1)), ("pad_amount", U32s(2))], &[("dilation", U32s(1))], Types::Floats),
    // Releases before QAIRT 2.49 cannot prepare it without beta (zeros will do).
    rule("RmsNorm", 3..=3, &[("epsilon", F32), ("axes", U32s(1))], &[], Types::Floats),
    rule("LayerNorm", 2..=3, &[("epsilon", F32), ("axes", U32s(1))], &[], Types::Floats),
    rule("L2Norm", 1..=1, &[("epsilon", F32), ("axes", U32s(1))], &[], Types::Floats),
    rule("Softmax", 1..=1, &[("axis", U32)], &[("beta", F32)], Types::Floats),
    rule("ElementWiseAdd", 2..=2, &[], &[], Types::Equal),
    rule("ElementWiseSubtract", 2..=2, &[], &[], Types::Equal),
    rule("ElementWiseMultiply", 2..=2, &[], &[], Types::Equal),
    rule("ElementWiseDivide", 2..=2, &[], &[], Types::Floats),
    rule("ElementWiseMaximum", 2..=2, &[], &[], Types::Equal),
    rule("ElementWiseMinimum", 2..=2, &[], &[], Types::Equal),
    rule("ElementWisePower", 2..=2, &[], &[], Types::Floats),
    rule("ElementWiseExp", 1..=1, &[], &[], Types::Floats),
    rule("ElementWiseLog", 1..=1, &[], &[], Types::Floats),
    rule("ElementWiseAbs", 1..=1, &[], &[], Types::Floats),
    rule("ElementWiseNeg", 1..=1, &[], &[], Types::Floats),
    rule("ElementWiseSin", 1..=1, &[], &[], Types::Floats),
    rule("ElementWiseCos", 1..=1, &[], &[], Types::Floats),
    rule("ElementWiseFloor", 1..=1, &[], &[], Types::Floats),
    rule("ElementWiseRound", 1..=1, &[], &[], Types::Floats),
    rule("ElementWiseRsqrt", 1..=1, &[], &[], Types::Floats),
    rule("ElementWiseSquareRoot", 1..=1, &[], &[], Types::Floats),
    rule("ElementWiseNeuron", 1..=1, &[("operation", U32)], &[("beta", F32), ("threshold", F32), ("alpha", F32)], Types::Floats),
    rule("Sigmoid", 1..=1, &[], &[], Types::Floats),
    rule("Tanh", 1..=1, &[], &[], Types::Floats),
    rule("Relu", 1..=1, &[], &[], Types::Floats),
    rule("Gelu", 1..=1, &[], &[], Types::Floats),
    rule("HardSwish", 1..=1, &[], &[], Types::Floats),
    rule("ElementWiseGreater", 2..=2, &[], &[], Types::Compare),
    rule("ElementWiseGreaterEqual", 2..=2, &[], &[], Types::Compare),
    rule("ElementWiseLess", 2..=2, &[], &[], Types::Compare),
    rule("ElementWiseLessEqual", 2..=2, &[], &[], Types::Compare),
    rule("ElementWiseEqual", 2..=2, &[], &[], Types::Compare),
    rule("ElementWiseSelect", 3..=3, &[], &[], Types::Select),
    rule("Reshape", 1..=1, &[], &[], Types::Equal),
    rule("Transpose", 1..=1, &[("perm", U32s(1))], &[], Types::Equal),
    rule("Concat", 1..=usize::MAX, &[("axis", U32)], &[], Types::Equal),
    many("Split", &[("axis", U32), ("split_index", U32s(1))], Types::Equal),
    rule("StridedSlice", 1..=1, &[("ranges", I32s(2))], &[], Types::Equal),
    rule("Gather", 2..=2, &[("axis", I32)], &[], Types::Rows),
    rule("ScatterNd", 3..=3, &[], &[("reduction", U32)], Types::Rows),
    rule("ScatterElements", 3..=3, &[("axis", U32)], &[("reduction", U32)], Types::Rows),
    rule("Tile", 1..=1, &[("multiples", U32s(1))], &[], Types::Equal),
    rule("ExpandDims", 1..=1, &[("axis", U32)], &[], Types::Equal),
    rule("Pack", 1..=usize::MAX, &[("axis", U32)], &[], Types::Equal),
    rule("Pad", 1..=1, &[("scheme", U32), ("pad_amount", U32s(2))], &[("pad_constant_value", F32)], Types::Floats),
    rule("CumulativeSum", 1..=1, &[("axis", U32), ("exclusive", Bool), ("reverse", Bool)], &[], Types::Floats),
    rule("ReduceMean", 1..=1, &[("axes", U32s(1))], &[("keep_dims", Bool)], Types::Floats),
    rule("ReduceSum", 1..=1, &[("axes", U32s(1))], &[("keep_dims", Bool)], Types::Floats),
    rule("ReduceMax", 1..=1, &[("axes", U32s(1))], &[("keep_dims", Bool)], Types::Floats),
    rule("Argmax", 1..=1, &[("axis", U32)], &[("keep_dims", Bool)], Types::Index),
    Rule { outputs: 2..=2, ..rule("TopK", 1..=1, &[("k", U32)], &[("largest", Bool)], Types::TopK) },
    rule("Cast", 1..=1, &[], &[], Types::Cast),
    rule("Quantize", 1..=1, &[], &[], Types::Quantize),
    rule("Dequantize", 1..=1, &[], &[], Types::Quantize),
    rule("RotaryEmbedding", 4..=4, &[("rotary_embedding_dim", U32)], &[("interleaved", Bool)], Types::Rotary),
];

/// The QNN names of the operations that a graph may contain: those that have been seen to work.
pub fn operations() -> impl Iterator<Item = &'static str> {
    RULES.iter().map(|rule| rule.kind)
}

const fn rule(
    kind: &'static str,
    inputs: RangeInclusive<usize>,
    needed: &'static [(&'static str, Kind)],
    optional: &'static [(&'static str, Kind)],
    types: Types,
) -> Rule {
    Rule { kind, inputs, outputs: 1..=1, needed, optional, types }
}

/// An operation with several outputs.
const fn many(kind: &'static str, needed: &'static [(&'static str, Kind)], types: Types) -> Rule {
    Rule { kind, inputs: 1..=1, outputs: 1..=usize::MAX, needed, optional: &[], types }
}

impl Operation<'_> {
    pub(super) fn check(&self) -> Checked {
        let rule = RULES.iter().find(|rule| rule.kind == self.node.kind);
        let rule = rule.ok_or("is an operation that has not been seen to work: add a rule for it and a test in the emulator")?;
        let sides = [("inputs", &self.inputs, &rule.inputs), ("outputs", &self.outputs, &rule.outputs)];
        for (side, tensors, allowed) in sides {
            if !allowed.contains(&tensors.len()) {
                return Err(format!("has {} {side}, but {} to {} are allowed", tensors.len(), allowed.start(), allowed.end()));
            }
        }
        self.check_parameters(rule)?;
        self.check_types(rule.types)?;
        self.check_quantized()?;
        self.check_shapes()
    }

    fn check_parameters(&self, rule: &Rule) -> Checked {
        for (at, (name, value)) in self.node.parameters.iter().enumerate() {
            let known = rule.needed.iter().chain(rule.optional).find(|(known, _)| known == name);
            let (_, kind) = known.ok_or_else(|| format!("has no parameter `{name}`"))?;
            if !kind.fits(value) {
                return Err(format!("parameter `{name}` is {value:?}, but must be {kind:?}"));
            }
            if self.node.parameters[..at].iter().any(|(other, _)| other == name) {
                return Err(format!("parameter `{name}` is given twice"));
            }
        }
        let given = |name: &str| self.node.parameters.iter().any(|(given, _)| *given == name);
        match rule.needed.iter().find(|(name, _)| !given(name)) {
            Some((name, kind)) => Err(format!("needs the parameter `{name}` ({kind:?})")),
            None => Ok(()),
        }
    }

    fn check_types(&self, types: Types) -> Checked {
        let float = |dtype: DataType| matches!(dtype, DataType::F16 | DataType::F32);
        let inputs: Vec<DataType> = self.inputs.iter().map(|tensor| tensor.dtype).collect();
        let outputs: Vec<DataType> = self.outputs.iter().map(|tensor| tensor.dtype).collect();
        let equal = |list: &[DataType]| list.iter().all(|dtype| *dtype == outputs[0]);
        let fits = match types {
            Types::Equal => equal(&inputs) && equal(&outputs),
            Types::Floats => float(outputs[0]) && equal(&inputs),
            Types::Weights => float(outputs[0]) && inputs.iter().all(|dtype| *dtype == outputs[0] || *dtype == DataType::Fixed8),
            Types::Rows => {
                let gather = self.node.kind == "Gather" && inputs[1] == DataType::U32;
                (inputs[1] == DataType::I32 || gather) && equal(&inputs[..1]) && equal(&inputs[2..])
            }
            Types::Compare => outputs[0] == DataType::Bool && inputs[0] == inputs[1],
            Types::Select => inputs[0] == DataType::Bool && equal(&inputs[1..]),
            Types::Index => float(inputs[0]) && outputs[0] == DataType::I32,
            Types::TopK => float(inputs[0]) && outputs[0] == inputs[0] && outputs[1] == DataType::I32,
            Types::Cast => CASTS.contains(&(inputs[0], outputs[0])),
            Types::Quantize => true,
            Types::Rotary => float(outputs[0]) && equal(&inputs[..3]) && inputs[3] == DataType::I32,
        };
        match fits {
            true => Ok(()),
            false => Err(format!("does not compute {outputs:?} from {inputs:?}")),
        }
    }

    fn parameter(&self, name: &str) -> Option<&Parameter> {
        self.node.parameters.iter().find(|(given, _)| *given == name).map(|(_, value)| value)
    }

    /// A flag; off by default.
    pub(super) fn flag(&self, name: &str) -> bool {
        matches!(self.parameter(name), Some(Parameter::Bool(true)))
    }

    /// An unsigned integer whose presence has been checked.
    pub(super) fn number(&self, name: &str) -> u32 {
        match self.parameter(name) {
            Some(Parameter::U32(number)) => *number,
            _ => 0,
        }
    }

    /// A signed integer whose presence has been checked.
    pub(super) fn signed(&self, name: &str) -> i32 {
        match self.parameter(name) {
            Some(Parameter::I32(number)) => *number,
            _ => 0,
        }
    }

    /// An array of unsigned integers and its shape, if given.
    pub(super) fn list(&self, name: &str) -> Option<(&[u32], &[u32])> {
        match self.parameter(name) {
            Some(Parameter::U32s { dims, values }) => Some((dims, values)),
            _ => None,
        }
    }

    /// An array of signed integers and its shape.
    pub(super) fn signed_list(&self, name: &str) -> Option<(&[u32], &[i32])> {
        match self.parameter(name) {
            Some(Parameter::I32s { dims, values }) => Some((dims, values)),
            _ => None,
        }
    }
}

impl Kind {
    fn fits(self, value: &Parameter) -> bool {
        let list = |axes: usize, dims: &[u32], count: usize| {
            let product = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim as usize));
            dims.len() == axes && count > 0 && product == Some(count)
        };
        match (self, value) {
            (Bool, Parameter::Bool(_)) | (U32, Parameter::U32(_)) | (I32, Parameter::I32(_)) => true,
            (F32, Parameter::F32(number)) => number.is_finite(),
            (U32s(axes), Parameter::U32s { dims, values }) => list(axes, dims, values.len()),
            (I32s(axes), Parameter::I32s { dims, values }) => list(axes, dims, values.len()),
            _ => false,
        }
    }
}
