//! Weights as constants of a graph.

use super::Lowering;
use crate::{
    check::QUANTISED_STEP,
    graph::{DataType, Lazy, Quantization, Role, TensorId},
};
use half::f16;
use qhx_ir::{BlockEncoding, DeviceError, Encoding, Name, Quants, WeightTensor};

/// Creates the stored bytes of a weight.
type Bytes = fn(&WeightTensor) -> Vec<u8>;

impl Lowering<'_> {
    /// A weight as f16 in its own shape.
    pub(super) fn plain_weight(&mut self, name: &Name) -> Result<TensorId, DeviceError> {
        let shape = self.program.weights[name].shape.clone();
        self.derived(&format!("{name}"), &[name], &shape, |numbers| numbers.concat())
    }

    /// Values computed from weights, as f16.
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
        let Some(weights) = self.weights else { return Ok(self.only_shape(key, dims)) };
        let numbers = names.iter().map(|name| plain(name, &weights.declared(self.program, name)?)).collect::<Result<_, _>>()?;
        let numbers = from(numbers);
        if let Some(x) = numbers.iter().find(|x| !f16::from_f32(**x).is_finite()) {
            return Err(DeviceError::Weight { name: key.into(), reason: format!("{x} is outside the range of f16") });
        }
        Ok(self.builder.shared(key, dims, || numbers))
    }

    /// The weight `[out, in]` of a product, in the most compact form that the processor multiplies by f16 rows: int8 with a scale per row,
    /// int4 with a scale per block (or per row where all blocks of a row have the same), or f16. Its bytes are created when the library takes them.
    pub(super) fn matrix(&mut self, name: &Name) -> Result<TensorId, DeviceError> {
        let key = format!("{name}.matrix");
        if let Some(known) = self.builder.known(&key) {
            return Ok(known);
        }
        let shape = self.program.weights[name].shape.clone();
        let Some(weights) = self.weights else { return Ok(self.only_shape(&key, &shape)) };
        let weight = weights.declared(self.program, name)?;
        let compact: Option<(Quantization, Bytes)> = match weight.encoding() {
            Encoding::I8Row if weight.columns() % QUANTISED_STEP as usize == 0 => {
                int8_scales(&weight).map(|scales| (Quantization::Channel8 { axis: 0, scales }, int8_rows as _))
            }
            Encoding::Block(b) => int4_scales(&weight, b).map(|scales| {
                let quantization = match one_for_each_row(&scales, weight.columns() / b.block) {
                    Some(scales) => Quantization::Channel4 { axis: 0, scales },
                    None => Quantization::Block4 { block: b.block as u32, scales },
                };
                (quantization, int4_blocks as _)
            }),
            _ => None,
        };
        let dtype = if compact.is_some() { DataType::Fixed8 } else { DataType::F16 };
        let (quantization, compact) = compact.map_or((Quantization::None, None), |(quantization, make)| (quantization, Some(make)));
        let name = name.clone();
        let bytes = Lazy::new(move || match compact {
            Some(make) => Ok(make(&weight)),
            None => halves(&weight).map_err(|reason| format!("weight `{name}`: {reason}")),
        });
        Ok(self.builder.constant(&key, dtype, &shape, quantization, Role::Lazy(bytes)))
    }

    /// Replaces a weight where only shapes are needed.
    fn only_shape(&mut self, key: &str, dims: &[usize]) -> TensorId {
        self.builder.constant(key, DataType::F16, dims, Quantization::None, Role::Constant([].into()))
    }
}

/// All values of a weight, without padding.
fn plain(name: &Name, weight: &WeightTensor) -> Result<Vec<f32>, DeviceError> {
    let count = weight.rows().checked_mul(weight.columns());
    let mut numbers = Vec::new();
    count
        .and_then(|count| numbers.try_reserve_exact(count).ok().map(|()| numbers.resize(count, 0.0)))
        .ok_or_else(|| DeviceError::Resources(format!("not enough memory to convert weight `{name}` of shape {:?}", weight.shape())))?;
    numbers.chunks_exact_mut(weight.columns()).enumerate().for_each(|(row, out)| weight.decode_row(row, out));
    Ok(numbers)
}

/// The values as f16, row by row.
fn halves(weight: &WeightTensor) -> Result<Vec<u8>, String> {
    let mut row = vec![0.0; weight.columns()];
    let mut bytes = Vec::with_capacity(weight.rows() * weight.columns() * 2);
    for number in 0..weight.rows() {
        weight.decode_row(number, &mut row);
        for &x in &row {
            let half = f16::from_f32(x);
            if !half.is_finite() {
                return Err(format!("{x} is outside the range of f16"));
            }
            bytes.extend(half.to_le_bytes());
        }
    }
    Ok(bytes)
}

/// A positive scale for each row: 1 for rows of zeros. A negative scale cannot be made positive because −128 has no opposite.
fn int8_scales(weight: &WeightTensor) -> Option<Vec<f32>> {
    let scales: Vec<f32> = (0..weight.rows()).map(|row| scale_or_one(weight.scale_at(row, 0))).collect();
    scales.iter().all(|s| *s > 0.0 && s.is_finite()).then_some(scales)
}

/// The quants without the padding of rows.
fn int8_rows(weight: &WeightTensor) -> Vec<u8> {
    let columns = weight.columns();
    let mut bytes = Vec::with_capacity(weight.rows() * columns);
    for (number, row) in weight.data().chunks_exact(weight.row_bytes().data).enumerate() {
        match weight.scale_at(number, 0) == 0.0 {
            true => bytes.resize(bytes.len() + columns, 0),
            false => bytes.extend(&row[..columns]),
        }
    }
    bytes
}

/// A scale for each block, where blocks are complete and have no minimum: 1 for blocks of zeros.
fn int4_scales(weight: &WeightTensor, b: BlockEncoding) -> Option<Vec<f32>> {
    let columns = weight.columns();
    if b.quants != Quants::I4 || b.min || columns % b.block != 0 {
        return None;
    }
    let blocks = (0..weight.rows()).flat_map(|row| (0..columns).step_by(b.block).map(move |first| (row, first)));
    blocks.map(|(row, first)| Some(scale_or_one(weight.scale_at(row, first))).filter(|scale| scale.is_normal())).collect()
}

/// The scales of rows, where all blocks of each row have the same positive one: the weight then takes an eighth less than with block scales.
fn one_for_each_row(scales: &[f32], blocks: usize) -> Option<Vec<f32>> {
    scales.chunks(blocks).map(|row| Some(row[0]).filter(|first| *first > 0.0 && row.iter().all(|scale| scale == first))).collect()
}

/// One byte for each quant in −8..=7.
fn int4_blocks(weight: &WeightTensor) -> Vec<u8> {
    let columns = weight.columns();
    let mut bytes = Vec::with_capacity(weight.rows() * columns);
    for (row, column) in (0..weight.rows()).flat_map(|row| (0..columns).map(move |column| (row, column))) {
        let is_zero = weight.scale_at(row, column) == 0.0;
        bytes.push(if is_zero { 0 } else { weight.quant(row, column) as i8 as u8 });
    }
    bytes
}

fn scale_or_one(scale: f32) -> f32 {
    if scale == 0.0 { 1.0 } else { scale }
}
