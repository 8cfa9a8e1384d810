//! Where whole numbers with scales may go.

use super::{Checked, Operation};
use crate::graph::{DataType, Quantization, Role, Tensor};

/// Ops that only move numbers: they take one scale for all, the same on both sides.
const MOVERS: [&str; 7] = ["Reshape", "Transpose", "StridedSlice", "Concat", "Split", "Gather", "ScatterNd"];

/// Rows of quantised weights have a length of whole steps: of others the library makes wrong products, without a word, where there are more than 32 (seen in QAIRT 2.51).
pub(crate) const QUANTISED_STEP: u32 = 4;

impl Operation<'_> {
    /// What the library would compute wrongly, or die of.
    pub(super) fn check_quantized(&self) -> Checked {
        let kind = self.node.kind;
        match kind {
            "FullyConnected" => self.check_weight(0),
            // With transposed weights the output channels come first.
            "MatMul" => self.check_weight(self.inputs[1].dims.len() - if self.flag("transpose_in1") { 2 } else { 1 }),
            "Conv2d" => self.check_weight(3),
            "Dequantize" => match (&self.inputs[0].quantization, self.outputs[0].dtype) {
                (Quantization::Tensor(_), DataType::F16 | DataType::F32) => Ok(()),
                _ => Err("makes floats of whole numbers with one scale".into()),
            },
            "Quantize" => match (self.inputs[0].dtype, &self.outputs[0].quantization) {
                (DataType::F16 | DataType::F32, Quantization::Tensor(_)) => Ok(()),
                _ => Err("makes whole numbers with one scale of floats".into()),
            },
            _ => match self.tensors().find(|tensor| tensor.dtype == DataType::Fixed8) {
                None => Ok(()),
                Some(_) if MOVERS.contains(&kind) => self.check_moved(),
                Some(tensor) => Err(format!("does not take whole numbers with a scale (`{}`): put a Dequantize before it", tensor.name)),
            },
        }
    }

    /// Only the second input may be quantised: a constant beside f16 activations, its scales along the output channels.
    fn check_weight(&self, channels: usize) -> Checked {
        if let Some(tensor) = self.tensors().filter(|t| t.dtype == DataType::Fixed8).find(|t| !std::ptr::eq(*t, self.inputs[1])) {
            return Err(format!("`{}` is quantised: only weights may be; put a Dequantize before it", tensor.name));
        }
        let Tensor { name, dims, role, quantization, .. } = self.inputs[1];
        let axis = match quantization {
            Quantization::None => return Ok(()),
            Quantization::Tensor(_) => return Err(format!("`{name}` has one scale: weights need one per output channel, or a Dequantize")),
            Quantization::Block4 { .. } if self.node.kind == "FullyConnected" => channels,
            Quantization::Block4 { .. } => return Err(format!("`{name}` is in blocks: only FullyConnected takes such weights")),
            Quantization::Channel8 { axis, .. } | Quantization::Channel4 { axis, .. } => *axis as usize,
        };
        if axis != channels {
            return Err(format!("`{name}` {dims:?} has its scales along axis {axis}, output channels are along axis {channels}"));
        }
        if self.node.kind == "FullyConnected" && dims[1] % QUANTISED_STEP != 0 {
            return Err(format!(
                "`{name}` {dims:?} is quantised: the library multiplies such rows wrongly unless {QUANTISED_STEP} divides their length"
            ));
        }
        if !matches!(role, Role::Constant(_) | Role::Lazy(_)) {
            return Err(format!("`{name}` is quantised and no constant: put a Dequantize before it"));
        }
        match self.tensors().find(|t| t.dtype != DataType::F16 && t.dtype != DataType::Fixed8) {
            Some(other) => Err(format!("`{}` has type {:?}: beside quantised weights everything is F16", other.name, other.dtype)),
            None => Ok(()),
        }
    }

    /// Numbers that are only moved keep their scale.
    fn check_moved(&self) -> Checked {
        let data = || self.tensors().filter(|tensor| !matches!(tensor.dtype, DataType::I32 | DataType::U32));
        let mut scales = data().map(|tensor| &tensor.quantization);
        let first = scales.next();
        match scales.all(|scale| Some(scale) == first) && matches!(first, Some(Quantization::Tensor(_))) {
            true => Ok(()),
            false => Err("moves whole numbers: all of them must have the same one scale".into()),
        }
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.inputs.iter().chain(&self.outputs).copied()
    }
}
