//! Weights as constants of a graph.

use super::Lowering;
use crate::graph::{DataType, Quantization, TensorId};
use half::f16;
use qhx_ir::{BlockEncoding, DeviceError, Encoding, Name, Quants, WeightTensor};
use std::sync::Arc;

impl Lowering<'_> {
    /// The numbers of a weight that is read as plain numbers; zeros where only shapes are asked for.
    pub(super) fn numbers(&self, name: &Name) -> Result<Vec<f32>, DeviceError> {
        let shape = &self.program.weights[name].shape;
        match self.weights {
            None => Ok(vec![0.0; shape.iter().product()]),
            Some(weights) => plain(name, &weights.declared(self.program, name)?),
        }
    }

    /// A weight as f16 numbers in its own shape.
    pub(super) fn plain_weight(&mut self, name: &Name) -> Result<TensorId, DeviceError> {
        let shape = self.program.weights[name].shape.clone();
        self.derived(&format!("{name}"), &[name], &shape, |numbers| numbers.concat())
    }

    /// Numbers worked out from weights, as f16.
    pub(super) fn derived(
        &mut self,
        key: &str,
        names: &[&Name],
        dims: &[usize],
        from: impl FnOnce(Vec<Vec<f32>>) -> Vec<f32>,
    ) -> Result<TensorId, DeviceError> {
        if let Some(known) = self.builder.known(key) {
            return Ok(known);
        }
        let numbers = names.iter().map(|name| self.numbers(name)).collect::<Result<_, _>>()?;
        let numbers = from(numbers);
        if let Some(x) = numbers.iter().find(|x| !f16::from_f32(**x).is_finite()) {
            return Err(DeviceError::Weight { name: key.into(), reason: format!("{x} is beyond the range of f16") });
        }
        Ok(self.builder.shared(key, dims, || numbers))
    }

    /// The weight `[out, in]` of a product, in the most compact form that the processor multiplies by f16 rows: int8 with a scale per row,
    /// int4 with a scale per 32, or f16.
    pub(super) fn matrix(&mut self, name: &Name) -> Result<TensorId, DeviceError> {
        let weight = &self.program.weights[name];
        let (shape, encoding) = (weight.shape.clone(), weight.encoding);
        if let Some(known) = self.builder.known(&format!("{name}.matrix")) {
            return Ok(known);
        }
        let compact = match (self.weights, encoding) {
            (Some(weights), Encoding::I8Row) => int8_rows(&weights.declared(self.program, name)?),
            (Some(weights), Encoding::Block(BlockEncoding { quants: Quants::I4, min: false, block, .. })) if shape[1] % block == 0 => {
                int4_blocks(&weights.declared(self.program, name)?, block)
            }
            _ => None,
        };
        let key = format!("{name}.matrix");
        match compact {
            Some((bytes, quantization)) => Ok(self.builder.constant(&key, DataType::Fixed8, &shape, quantization, || bytes)),
            None => self.derived(&key, &[name], &shape, |numbers| numbers.concat()),
        }
    }
}

/// All numbers of a weight, without padding.
fn plain(name: &Name, weight: &WeightTensor) -> Result<Vec<f32>, DeviceError> {
    let count = weight.rows().checked_mul(weight.columns());
    let mut numbers = Vec::new();
    count
        .and_then(|count| numbers.try_reserve_exact(count).ok().map(|()| numbers.resize(count, 0.0)))
        .ok_or_else(|| DeviceError::Resources(format!("there is no memory to convert weight `{name}` of shape {:?}", weight.shape())))?;
    numbers.chunks_exact_mut(weight.columns()).enumerate().for_each(|(row, out)| weight.decode_row(row, out));
    Ok(numbers)
}

type Compact = Option<(Arc<[u8]>, Quantization)>;

/// Quants without row padding and a positive scale for each row. Rows of zeros keep a scale of 1; a negative scale has no such form, because the
/// quant −128 has no opposite.
fn int8_rows(weight: &WeightTensor) -> Compact {
    let columns = weight.columns();
    let mut scales: Vec<f32> = (0..weight.rows()).map(|row| weight.scale_at(row, 0)).collect();
    let mut bytes: Vec<u8> = weight.data().chunks_exact(weight.row_bytes().data).flat_map(|row| &row[..columns]).copied().collect();
    for (scale, row) in scales.iter_mut().zip(bytes.chunks_exact_mut(columns)) {
        if *scale == 0.0 {
            *scale = 1.0;
            row.fill(0);
        }
    }
    positive(&scales).then(|| (bytes.into(), Quantization::Channel8 { axis: 0, scales }))
}

/// One byte for each quant in −8..=7 and a positive scale for each block.
fn int4_blocks(weight: &WeightTensor, block: usize) -> Compact {
    let (rows, columns) = (weight.rows(), weight.columns());
    let mut bytes = vec![0u8; rows * columns];
    let mut scales = Vec::with_capacity(rows * columns / block);
    for (number, quants) in bytes.chunks_exact_mut(block).enumerate() {
        let (row, first) = (number * block / columns, number * block % columns);
        let scale = weight.scale_at(row, first);
        scales.push(if scale == 0.0 { 1.0 } else { scale.abs() });
        for (i, quant) in quants.iter_mut().enumerate() {
            let q = weight.quant(row, first + i);
            *quant = match scale {
                0.0 => 0,
                s if s > 0.0 => q as i8 as u8,
                // The opposite of −8 is beyond the range.
                _ if q == -8 => return None,
                _ => -q as i8 as u8,
            };
        }
    }
    positive(&scales).then(|| (bytes.into(), Quantization::Block4 { block: block as u32, scales }))
}

fn positive(scales: &[f32]) -> bool {
    scales.iter().all(|s| s.is_finite() && *s > 0.0)
}
