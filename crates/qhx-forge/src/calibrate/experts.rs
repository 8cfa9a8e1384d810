//! Experts: each is rounded by the rows that are routed to it.

use super::{
    moments::Moments,
    run::{Calibrator, Inputs, Taken, tensor_of},
};
use crate::{ForgeError, encode::EncodedRows, gate::teacher::Values, pen::Written};
use qhx_ir::{Name, OpKind, Weight, WeightTensor};
use std::{collections::HashMap, ops::Range};

/// The mean moments of all rows of a layer count as this share of as many rows as there are columns: an expert that few rows reach is rounded by them.
const OTHERS: f32 = 0.25;

/// Rounds the weights of all experts of an op.
pub(super) fn round(
    calibrator: &Calibrator<'_>,
    stored: &Written,
    op: &OpKind,
    [exact_values, values]: [&[Values]; 2],
    take: &mut Taken<'_>,
) -> Result<HashMap<Name, WeightTensor>, ForgeError> {
    let OpKind::Experts { x, experts, gate, up, down, activation, bias, .. } = op else { return Ok(HashMap::new()) };
    let weight = |name: &Name| &stored.program.weights[name];
    let &[count, inner, hidden] = &weight(gate).shape[..] else {
        return Err(ForgeError::Calibration(format!("`{gate}` is not one matrix for each expert")));
    };
    let inputs = Inputs::of(x, None, hidden, exact_values, values)?;
    let all = inputs.rows();
    let routed = routed_rows(experts, values, count, all.len())?;
    let rows: Vec<&[f32]> = all.iter().map(|(stored, _)| *stored).collect();
    let layer = Moments::of(&calibrator.multiplier(), hidden, &rows)?;
    let mut kept = [gate, up, down].map(|name| (name, EncodedRows::default()));
    for (expert, routed) in routed.iter().enumerate() {
        let (own, own_exact): (Vec<&[f32]>, Vec<&[f32]>) = routed.iter().map(|&row| all[row]).unzip();
        let inputs = Inputs::made(hidden, own.concat(), own_exact.concat());
        let guide = calibrator.guide(&inputs, 2 * inner, Some((&layer, OTHERS * hidden as f32)))?;
        let own_rows = expert * inner..(expert + 1) * inner;
        let mut rounded = Vec::new();
        for (name, kept) in &mut kept[..2] {
            let mut own = EncodedRows::default();
            calibrator.round_weight(stored, name, own_rows.clone(), guide.as_ref(), take, Some(&mut own))?;
            rounded.push(tensor_of(&own, &Weight { encoding: weight(name).encoding, shape: vec![inner, hidden] })?);
            kept.add(&own);
        }
        drop(guide);
        let in_f32 = |name: &Name, rows: Range<usize>, shape: &[usize]| -> Result<WeightTensor, ForgeError> {
            let numbers = calibrator.numbers.floats(weight(name), &stored.recipes[name], rows)?;
            WeightTensor::from_f32(shape, &numbers).map_err(ForgeError::Calibration)
        };
        let exact = |name: &Name| in_f32(name, own_rows.clone(), &[inner, hidden]);
        let own_bias = |name: &Name| in_f32(name, expert..expert + 1, &[inner]);
        let biases = bias.as_ref().map(|bias| Ok::<_, ForgeError>([own_bias(&bias.gate)?, own_bias(&bias.up)?])).transpose()?;
        let (x, exact_x): (Vec<&[f32]>, Vec<&[f32]>) = inputs.rows().into_iter().unzip();
        let multiplier = calibrator.multiplier();
        let (up_tensor, gate_tensor) = (rounded.pop(), rounded.pop());
        let (Some(gate_tensor), Some(up_tensor)) = (gate_tensor, up_tensor) else { continue };
        let stored_rows = multiplier.gated(&x.concat(), [gate_tensor, up_tensor], biases.as_ref(), *activation)?;
        let exact_rows = multiplier.gated(&exact_x.concat(), [exact(gate)?, exact(up)?], biases.as_ref(), *activation)?;
        let inputs = Inputs::made(inner, stored_rows, exact_rows);
        let guide = calibrator.guide(&inputs, hidden, None)?;
        let rows = expert * hidden..(expert + 1) * hidden;
        calibrator.round_weight(stored, down, rows, guide.as_ref(), take, Some(&mut kept[2].1))?;
    }
    kept.into_iter().map(|(name, rows)| Ok((name.clone(), tensor_of(&rows, weight(name))?))).collect()
}

/// The rows that each expert gets from the bundle's program.
fn routed_rows(experts: &Name, values: &[Values], count: usize, rows: usize) -> Result<Vec<Vec<usize>>, ForgeError> {
    let mut routed = vec![Vec::new(); count];
    let chosen: Vec<f32> = values.iter().filter_map(|values| values.get(experts)).flatten().copied().collect();
    let per_row = chosen.len().checked_div(rows).unwrap_or(0).max(1);
    for (row, chosen) in chosen.chunks_exact(per_row).enumerate() {
        for &expert in chosen {
            let place = routed.get_mut(expert as usize);
            place.ok_or_else(|| ForgeError::Calibration(format!("`{experts}` chose expert {expert} of {count}")))?.push(row);
        }
    }
    Ok(routed)
}
