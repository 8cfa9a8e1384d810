//! Where quantised tensors are allowed.

use super::{Checked, Operation};
use crate::graph::{DataType, Quantization, Role, Tensor};

/// Ops that only move values: all their tensors share one scale.
const MOVERS: [&str; 7] = ["Reshape", "Transpose", "StridedSlice", "Concat", "Split", "Gather", "ScatterNd"];

/// The length of quantised weight rows is a multiple of this: with other lengths, the library silently computes wrong products when there are more than 32 rows (seen in
/// QAIRT 2.51).
pub(crate) const QUANTISED_STEP: u32 = 4;

impl Operation<'_> {
    /// Rejects what the library would compute wrongly or crash on.
    pub(super) fn check_quantized(&self) -> Checked {
        let kind = self.node.kind;
        match kind {
            "FullyConnected" => self.check_weight(0),
            // Transposed weights have the output channels first.
            "MatMul" => self.check_weight(self.inputs[1].dims.len() - if self.flag("transpose_in1") { 2 } else { 1 }),
            "Conv2d" => self.check_weight(3),
            "Dequantize" => match (&self.inputs[0].quantization, self.outputs[0].dtype) {
                (Quantization::Tensor(_), DataType::F16 | DataType::F32) => Ok(()),
                _ => Err("needs an input with one scale and a float output".into()),
            },
            "Quantize" => match (self.inputs[0].dtype, &self.outputs[0].quantization) {
                (DataType::F16 | DataType::F32, Quantization::Tensor(_)) => Ok(()),
                _ => Err("needs a float input and an output with one scale".into()),
            },
            _ => match self.tensors().find(|tensor| tensor.dtype == DataType::Fixed8) {
                None => Ok(()),
                Some(_) if MOVERS.contains(&kind) => self.check_moved(),
                Some(tensor) => Err(format!("does not support quantised tensors (`{}`): put a Dequantize before it", tensor.name)),
            },
        }
    }

    /// Only the second input may be quantised: a constant next to f16 activations, with its scales along the output channels.
    fn check_weight(&self, channels: usize) -> Checked {
        if let Some(tensor) = self.tensors().filter(|t| t.dtype == DataType::Fixed8).find(|t| !std::ptr::eq(*t, self.inputs[1])) {
            return Err(format!("`{}` is quantised, but only weights may be: put a Dequantize before it", tensor.name));
        }
        let Tensor { name, dims, role, quantization, .. } = self.inputs[1];
        let axis = match quantization {
            Quantization::None => return Ok(()),
            Quantization::Tensor(_) => {
                return Err(format!("`{name}` has one scale, but weights need one per output channel, or a Dequantize"));
            }
            Quantization::Block4 { .. } if self.node.kind == "FullyConnected" => channels,
            Quantization::Block4 { .. } => return Err(format!("`{name}` has block scales, which only FullyConnected supports")),
            Quantization::Channel8 { axis, .. } | Quantization::Channel4 { axis, .. } => *axis as usize,
        };
        if axis != channels {
            return Err(format!("`{name}` {dims:?} has its scales along axis {axis}, but its output channels are along axis {channels}"));
        }
        if self.node.kind == "FullyConnected" && dims[1] % QUANTISED_STEP != 0 {
            return Err(format!(
                "`{name}` {dims:?} is quantised: the library multiplies its rows wrongly unless their length is a multiple of {QUANTISED_STEP}"
            ));
        }
        if !matches!(role, Role::Constant(_) | Role::Lazy(_)) {
            return Err(format!("`{name}` is quantised but not a constant: put a Dequantize before it"));
        }
        match self.tensors().find(|t| t.dtype != DataType::F16 && t.dtype != DataType::Fixed8) {
            Some(other) => {
                Err(format!("`{}` has type {:?}, but with quantised weights all other tensors must be F16", other.name, other.dtype))
            }
            None => Ok(()),
        }
    }

    /// Values that are only moved keep their scale.
    fn check_moved(&self) -> Checked {
        let data = || self.tensors().filter(|tensor| !matches!(tensor.dtype, DataType::I32 | DataType::U32));
        let mut scales = data().map(|tensor| &tensor.quantization);
        let first = scales.next();
        match scales.all(|scale| Some(scale) == first) && matches!(first, Some(Quantization::Tensor(_))) {
            true => Ok(()),
            false => Err("moves quantised values: all its tensors must have the same single scale".into()),
        }
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.inputs.iter().chain(&self.outputs).copied()
    }
}
