//! Runs expert graphs: a single row goes through all its experts at once; many rows are grouped by expert.

use super::{
    graphs::{Graphs, failed},
    meter::Meter,
    values::{Data, Values},
};
use crate::lower::experts::{ExpertSizes, INT8_SCALE, expert_sizes, lower_experts};
use half::f16;
use qhx_ir::{Checked, DeviceError, Encoding, Name, Op, OpKind, WeightTensor};
use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
};

/// An op's experts, as the host stores them.
struct Mixture<'a> {
    gate: &'a WeightTensor,
    up: &'a WeightTensor,
    down: &'a WeightTensor,
    names: [&'a Name; 3],
    /// Of gate and up.
    biases: Option<[&'a WeightTensor; 2]>,
}

pub(super) fn run(
    program: &Checked,
    values: &mut Values<'_>,
    tables: &HashMap<Name, WeightTensor>,
    (graphs, meter): (&mut Graphs, &mut Meter),
    op: &Op,
    valid: &[usize],
    batch: usize,
) -> Result<(), DeviceError> {
    let OpKind::Experts { x, experts, weights, gate, up, down, bias, .. } = &op.op else { unreachable!("called for experts") };
    let sizes = expert_sizes(program, op, batch);
    let (single, many) = (sizes[0], sizes.get(1).copied());
    let (rows, k, hidden) = (values.get(x).shape[0], single.experts, single.hidden);
    let biases = bias.as_ref().map(|bias| [&tables[&bias.gate], &tables[&bias.up]]);
    let mixture = Mixture { gate: &tables[gate], up: &tables[up], down: &tables[down], names: [gate, up, down], biases };
    let mut y = vec![0.0f32; rows * hidden];
    let mut rows_of = vec![0; mixture.gate.shape()[0]];
    let (x, chosen, shares) = (values.f32s(x), values.i32s(experts), values.f32s(weights));
    if let (false, Some(sizes)) = (valid.len() == 1, many) {
        // Ordered by expert, so that sums have the same order in every run.
        let mut users_of: BTreeMap<usize, Vec<(usize, f32)>> = BTreeMap::new();
        for place in valid.iter().flat_map(|row| row * k..(row + 1) * k) {
            users_of.entry(chosen[place] as usize).or_default().push((place / k, shares[place]));
        }
        for (expert, users) in users_of {
            for users in users.chunks(batch) {
                let input: Vec<f32> = users.iter().flat_map(|&(row, _)| &x[row * hidden..][..hidden]).copied().collect();
                let share = vec![users.iter().map(|u| u.1).collect()];
                let made = mixture.execute(program, (graphs, meter), sizes, &input, &[expert], &share)?;
                for (&(row, _), made) in users.iter().zip(made.chunks_exact(hidden)) {
                    y[row * hidden..][..hidden].iter_mut().zip(made).for_each(|(y, m)| *y += m);
                }
            }
        }
    } else {
        for &row in valid {
            let chosen: Vec<usize> = chosen[row * k..][..k].iter().map(|&e| e as usize).collect();
            let share: Vec<Vec<f32>> = shares[row * k..][..k].iter().map(|&w| vec![w]).collect();
            let made = mixture.execute(program, (graphs, meter), single, &x[row * hidden..][..hidden], &chosen, &share)?;
            y[row * hidden..][..hidden].copy_from_slice(&made);
        }
    }
    valid.iter().flat_map(|row| &chosen[row * k..][..k]).for_each(|&expert| rows_of[expert as usize] += 1);
    meter.expert_rows.push(rows_of);
    values.insert(&op.path, Data::F32(y))
}

impl Mixture<'_> {
    /// One execution: the rows `x`, and for each chosen expert its weight in every row.
    fn execute(
        &self,
        program: &Checked,
        (graphs, meter): (&mut Graphs, &mut Meter),
        sizes: ExpertSizes,
        x: &[f32],
        chosen: &[usize],
        shares: &[Vec<f32>],
    ) -> Result<Vec<f32>, DeviceError> {
        let graph = graphs.experts(sizes, |name| lower_experts(program, sizes, name))?;
        let mut inputs: Vec<Cow<'_, [u8]>> = vec![padded(x, sizes.rows * sizes.hidden)];
        for (&expert, share) in chosen.iter().zip(shares) {
            inputs.push(padded(share, sizes.rows));
            let stacks = [self.gate, self.up, self.down];
            for (stack, name) in stacks.iter().zip(self.names) {
                inputs.push(if sizes.int8 { quants(stack, expert) } else { halves(name, stack, expert)? });
            }
            if sizes.int8 {
                for (stack, name) in stacks.iter().zip(self.names) {
                    inputs.push(scales(name, stack, expert)?);
                }
            }
            for bias in self.biases.into_iter().flatten() {
                let mut numbers = vec![0.0; bias.columns()];
                bias.decode_row(expert, &mut numbers);
                inputs.push(padded(&numbers, numbers.len()));
            }
        }
        let is_lent = inputs.iter().map(|input| matches!(input, Cow::Borrowed(_)));
        meter.executed(inputs.iter().map(|input| input.len()).zip(is_lent), [2 * sizes.rows * sizes.hidden].into_iter());
        // All inputs but the rows and their expert weights are model weights.
        let rows = 2 * sizes.rows * (sizes.hidden + chosen.len());
        meter.read_bytes((inputs.iter().map(|input| input.len()).sum::<usize>() - rows) as u64);
        let inputs: Vec<&[u8]> = inputs.iter().map(|i| &**i).collect();
        let mut output = vec![f16::ZERO; sizes.rows * sizes.hidden];
        graph.execute_in_order(&inputs, &mut [bytemuck::cast_slice_mut(&mut output)]).map_err(failed)?;
        let numbers: Vec<f32> = output[..x.len()].iter().map(|y| y.to_f32()).collect();
        match numbers.iter().all(|y| y.is_finite()) {
            true => Ok(numbers),
            false => Err(DeviceError::Call("an expert's result left the range of f16 on the NPU: place its stage on the CPU".into())),
        }
    }
}

/// Values as f16, padded with zeros.
fn padded(numbers: &[f32], count: usize) -> Cow<'static, [u8]> {
    let mut bytes: Vec<u8> = numbers.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
    bytes.resize(count * 2, 0);
    Cow::Owned(bytes)
}

/// The quants of one expert; without row padding, these are the stored bytes themselves.
fn quants(stack: &WeightTensor, expert: usize) -> Cow<'_, [u8]> {
    let (rows, columns, stride) = (stack.shape()[1], stack.columns(), stack.row_bytes().data);
    let bytes = &stack.data()[expert * rows * stride..][..rows * stride];
    match stride == columns {
        true => Cow::Borrowed(bytes),
        false => Cow::Owned(bytes.chunks_exact(stride).flat_map(|row| &row[..columns]).copied().collect()),
    }
}

/// The scales of one expert, divided by the scale that the graph applies to all quants. (A scale too small for f16 becomes 0: its weights are below 1e-7.)
fn scales(name: &Name, stack: &WeightTensor, expert: usize) -> Result<Cow<'static, [u8]>, DeviceError> {
    let rows = stack.shape()[1];
    let mut bytes = Vec::with_capacity(rows * 2);
    for row in expert * rows..(expert + 1) * rows {
        let scale = stack.scale_at(row, 0);
        let half = f16::from_f32(scale / INT8_SCALE);
        if !half.is_finite() {
            let reason = format!("the scale {scale} of row {row} is outside the range of f16 on the NPU: place its stage on the CPU");
            return Err(DeviceError::Weight { name: name.clone(), reason });
        }
        bytes.extend(half.to_le_bytes());
    }
    Ok(Cow::Owned(bytes))
}

/// The weights of one expert as f16; where they are stored as f16 without padding, these are the stored bytes themselves.
fn halves<'a>(name: &Name, stack: &'a WeightTensor, expert: usize) -> Result<Cow<'a, [u8]>, DeviceError> {
    let (rows, columns, stride) = (stack.shape()[1], stack.columns(), stack.row_bytes().data);
    if stack.encoding() == Encoding::F16 && stride == columns * 2 {
        return Ok(Cow::Borrowed(&stack.data()[expert * rows * stride..][..rows * stride]));
    }
    let mut bytes = Vec::with_capacity(rows * columns * 2);
    let mut row = vec![0.0; columns];
    for number in 0..rows {
        stack.decode_row(expert * rows + number, &mut row);
        for &x in &row {
            let x = f16::from_f32(x);
            if !x.is_finite() {
                return Err(DeviceError::Weight {
                    name: name.clone(),
                    reason: "contains values outside the range of f16: place its stage on the CPU".into(),
                });
            }
            bytes.extend(x.to_le_bytes());
        }
    }
    Ok(Cow::Owned(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_ir::AlignedBytes;

    #[test]
    fn scales_are_held_to_the_range_of_f16() {
        let name = Name::from("experts.down");
        let of = |scale: f32| {
            let (mut quants, mut numbers) = (AlignedBytes::zeroed(2 * 64), AlignedBytes::zeroed(2 * 4));
            quants.as_mut()[64] = 1;
            numbers.as_mut().copy_from_slice(bytemuck::cast_slice(&[0.5, scale]));
            let stack = WeightTensor::new(Encoding::I8Row, vec![1, 2, 64], quants.into(), Some(numbers.into()), None).unwrap();
            scales(&name, &stack, 0)
        };
        assert_eq!(*of(0.25).unwrap(), *[64.0, 32.0].map(|scale| f16::from_f32(scale).to_le_bytes()).concat());
        let error = of(600.0).unwrap_err().to_string();
        assert!(error.contains("experts.down") && error.contains("600") && error.contains("row 1"), "{error}");
    }
}
