//! Products with weights, and norms.

use super::{Lowering, builder::u32s};
use crate::graph::{Parameter, TensorId};
use qhx_ir::{Clip, DeviceError, Name};

impl Lowering<'_> {
    pub(super) fn linear(&mut self, x: &Name, weight: &Name, bias: Option<&Name>, clip: Option<&Clip>) -> Result<TensorId, DeviceError> {
        let mut x = self.value(x)?;
        let mut dims = self.builder.dims(x);
        if let Some(Clip { input: [low, high], .. }) = clip {
            x = self.builder.clamp(x, *low, *high);
        }
        let width = self.builder.width(x);
        let rows = dims[..dims.len() - 1].iter().product();
        let x = self.builder.reshape("rows", x, &[rows, width]);
        let weight = self.matrix(weight)?;
        let bias = bias.map(|bias| self.plain_weight(bias)).transpose()?;
        let mut y = self.builder.fully_connected("product", x, weight, bias);
        if let Some(Clip { output: [low, high], .. }) = clip {
            y = self.builder.clamp(y, *low, *high);
        }
        let last = dims.len() - 1;
        dims[last] = self.builder.width(y);
        Ok(self.builder.reshape("shaped", y, &dims))
    }

    pub(super) fn rms_norm(&mut self, x: &Name, weight: Option<&Name>, eps: f32) -> Result<TensorId, DeviceError> {
        let x = self.value(x)?;
        let width = self.builder.width(x);
        let gamma = match weight {
            Some(weight) => self.plain_weight(weight)?,
            None => self.builder.shared(&format!("ones.{width}"), &[width], || vec![1.0; width]),
        };
        Ok(self.root_mean_square(x, gamma, eps))
    }

    /// The library's norm squares and sums in more than f16, so rows up to the limit of f16 are safe. The zero bias is always given
    /// because older libraries need one.
    pub(super) fn root_mean_square(&mut self, x: TensorId, gamma: TensorId, eps: f32) -> TensorId {
        let width = self.builder.width(x);
        let beta = self.builder.shared(&format!("zeros.{width}"), &[width], || vec![0.0; width]);
        self.norm("RmsNorm", x, gamma, beta, eps)
    }

    pub(super) fn layer_norm(&mut self, x: &Name, weight: &Name, bias: Option<&Name>, eps: f32) -> Result<TensorId, DeviceError> {
        let x = self.value(x)?;
        let width = self.builder.width(x);
        let gamma = self.plain_weight(weight)?;
        let beta = match bias {
            Some(bias) => self.plain_weight(bias)?,
            None => self.builder.shared(&format!("zeros.{width}"), &[width], || vec![0.0; width]),
        };
        Ok(self.norm("LayerNorm", x, gamma, beta, eps))
    }

    fn norm(&mut self, kind: &'static str, x: TensorId, gamma: TensorId, beta: TensorId, eps: f32) -> TensorId {
        // As a matrix: with more dimensions, the library normalises only the first eight entries of the first one (seen in QAIRT 2.51).
        let (dims, width) = (self.builder.dims(x), self.builder.width(x));
        let rows = dims.iter().product::<usize>() / width;
        let x = self.builder.reshape("norm_rows", x, &[rows, width]);
        let parameters = vec![("epsilon", Parameter::F32(eps)), ("axes", u32s(&[1], &[1]))];
        let y = self.builder.node(kind, "norm", &[x, gamma, beta], &[rows, width], parameters);
        self.builder.reshape("normed", y, &dims)
    }
}
