//! Ops that combine neighbouring rows: convolutions and pooling.

use super::{Drain, Feed, Lowering, builder::u32s};
use crate::graph::TensorId;
use qhx_ir::{Activation, DeviceError, Name};

impl Lowering<'_> {
    /// Causal depthwise convolution: the rows before, then the rows of this execution, under one kernel.
    pub(super) fn short_conv(
        &mut self,
        x: &Name,
        weight: &Name,
        bias: Option<&Name>,
        slot: Option<&Name>,
        activation: Option<Activation>,
    ) -> Result<TensorId, DeviceError> {
        let x = self.value(x)?;
        let [rows, channels] = self.builder.dims(x)[..] else { unreachable!("checked: [rows, channels]") };
        let kernel = self.program.weights[weight].shape[1];
        let mut all = x;
        if kernel > 1 {
            let before = [kernel - 1, channels];
            let earlier = match slot {
                Some(slot) => {
                    self.drain(x, Drain::Fifo(slot.clone()));
                    self.feed(Feed::Fifo(slot.clone()), &before)
                }
                None => self.builder.shared(&format!("zeros.{kernel}.{channels}"), &before, || vec![0.0; (kernel - 1) * channels]),
            };
            all = self.builder.concat("with_earlier", &[earlier, x], 0);
        }
        let taps = self.derived(&format!("{weight}.taps"), &[weight], &[1, kernel, 1, channels], |w| {
            let w = w.concat();
            (0..kernel).flat_map(|tap| (0..channels).map(move |c| (c, tap))).map(|(c, tap)| w[c * kernel + tap]).collect()
        })?;
        let bias = bias.map(|bias| self.plain_weight(bias)).transpose()?;
        let b = &mut self.builder;
        let all = b.reshape("picture", all, &[1, 1, rows + kernel - 1, channels]);
        let inputs: Vec<TensorId> = [all, taps].into_iter().chain(bias).collect();
        let parameters = vec![("stride", u32s(&[2], &[1, 1])), ("pad_amount", u32s(&[2, 2], &[0; 4])), ("dilation", u32s(&[2], &[1, 1]))];
        let y = b.node("DepthWiseConv2d", "convolved", &inputs, &[1, 1, rows, channels], parameters);
        let y = b.reshape("rows", y, &[rows, channels]);
        Ok(match activation {
            Some(activation) => self.activation(y, activation),
            None => y,
        })
    }

    pub(super) fn conv2d(&mut self, x: &Name, weight: &Name, bias: Option<&Name>, stride: usize) -> Result<TensorId, DeviceError> {
        let per_row = self.per_row(x);
        let x = self.value(x)?;
        let [rows, width, inputs] = self.builder.dims(x)[..] else { unreachable!("checked: [rows, width, in]") };
        let [outputs, kernel, ..] = self.program.weights[weight].shape[..] else { unreachable!("checked: rank 4") };
        let x = self.zero_padding(x, per_row);
        let taps = self.derived(&format!("{weight}.taps"), &[weight], &[kernel, kernel, inputs, outputs], |w| {
            let w = w.concat();
            let size = kernel * kernel * inputs;
            (0..size).flat_map(|place| (0..outputs).map(move |o| o * size + place)).map(|at| w[at]).collect()
        })?;
        let bias = bias.map(|bias| self.plain_weight(bias)).transpose()?;
        let before = (kernel - 1) / 2;
        // As many trailing zeros as the last step needs.
        let behind = |size: usize| ((size.div_ceil(stride) - 1) * stride + kernel).saturating_sub(size + before);
        let pads = [before, behind(rows), before, behind(width)];
        let b = &mut self.builder;
        let picture = b.reshape("picture", x, &[1, rows, width, inputs]);
        let (out_rows, out_width) = (rows.div_ceil(stride), width.div_ceil(stride));
        let parameters =
            vec![("stride", u32s(&[2], &[stride, stride])), ("pad_amount", u32s(&[2, 2], &pads)), ("dilation", u32s(&[2], &[1, 1]))];
        let read: Vec<TensorId> = [picture, taps].into_iter().chain(bias).collect();
        let y = b.node("Conv2d", "convolved", &read, &[1, out_rows, out_width, outputs], parameters);
        Ok(b.reshape("rows", y, &[out_rows, out_width, outputs]))
    }

    /// The mean of each group. Padding counts as zeros; a factor from the host corrects partial groups.
    pub(super) fn pool(&mut self, x: &Name, size: usize) -> Result<TensorId, DeviceError> {
        let per_row = self.per_row(x);
        let x = self.value(x)?;
        if size == 1 {
            return Ok(x);
        }
        let dims = self.builder.dims(x);
        let width: usize = dims[1..].iter().product();
        let groups = dims[0] / size;
        let x = self.zero_padding(x, per_row);
        let x = self.builder.reshape("groups", x, &[groups, size, width]);
        let mean = self.builder.reduce("ReduceMean", "mean", x, 1);
        let factor = self.feed(Feed::Pooled { per_row, size }, &[groups, 1]);
        let y = self.builder.multiply("of_valid", mean, factor);
        let dims: Vec<usize> = std::iter::once(groups).chain(dims[1..].iter().copied()).collect();
        Ok(self.builder.reshape("pooled", y, &dims))
    }

    /// `x` with zeros in the rows after the segment.
    fn zero_padding(&mut self, x: TensorId, per_row: usize) -> TensorId {
        let dims = self.builder.dims(x);
        let valid = self.feed(Feed::Valid(per_row), &[dims[0], 1]);
        let shape: Vec<usize> = dims.iter().enumerate().map(|(i, &d)| if i == 0 { d } else { 1 }).collect();
        let valid = self.builder.reshape("valid", valid, &shape);
        self.builder.multiply("of_segment", x, valid)
    }
}
