//! Random weights in every encoding. What has no meaning in the layout (row padding, the surplus of a partial block) contains garbage.

use super::rng::Rng;
use crate::{AlignedBytes, Encoding, Quants, ScaleType, WeightTensor, encoding::RowBytes};
use half::{bf16, f16};

/// A tensor whose values have a standard deviation of about `magnitude`.
pub(crate) fn random(rng: &mut Rng, encoding: Encoding, shape: &[usize], magnitude: f32) -> WeightTensor {
    let columns = *shape.last().expect("the suite's weights have dimensions");
    let rows: usize = shape[..shape.len() - 1].iter().product();
    let row_bytes = encoding.row_bytes(columns).expect("the suite's weights are small");
    let RowBytes { data, scale, min } = row_bytes;
    let [mut data, mut scale, mut min] = [data, scale, min].map(|bytes| garbage(rng, rows * bytes));
    for row in 0..rows {
        let data = &mut data.as_mut()[row * row_bytes.data..][..row_bytes.data];
        let scale = &mut scale.as_mut()[row * row_bytes.scale..][..row_bytes.scale];
        let min = &mut min.as_mut()[row * row_bytes.min..][..row_bytes.min];
        match encoding {
            Encoding::F32 => fill(data, columns, |_| (rng.normal() * magnitude).to_le_bytes()),
            Encoding::F16 => fill(data, columns, |_| f16::from_f32(rng.normal() * magnitude).to_le_bytes()),
            Encoding::Bf16 => fill(data, columns, |_| bf16::from_f32(rng.normal() * magnitude).to_le_bytes()),
            // The data of quantised rows is garbage already: every byte is a legal quant, -128 included.
            Encoding::I8Row => {
                let step = step(rng, magnitude / 74.0);
                fill(scale, 1, |_| step.to_le_bytes());
            }
            Encoding::Block(b) => {
                let spread = match b.quants {
                    Quants::I8 => 74.0,
                    Quants::I6 => 18.5,
                    Quants::I4 => 4.6,
                };
                let steps: Vec<f32> = (0..columns.div_ceil(b.block)).map(|_| step(rng, magnitude / spread)).collect();
                let middle = if b.quants == Quants::I8 { 0.0 } else { -7.5 };
                let minima: Vec<f32> = steps.iter().map(|step| step * middle + rng.normal() * magnitude * 0.3).collect();
                for (bytes, numbers) in [(scale, &steps), (min, &minima)] {
                    match b.scale {
                        _ if bytes.is_empty() => {}
                        ScaleType::F16 => fill(bytes, numbers.len(), |i| f16::from_f32(numbers[i]).to_le_bytes()),
                        ScaleType::F32 => fill(bytes, numbers.len(), |i| numbers[i].to_le_bytes()),
                    }
                }
            }
        }
    }
    let part = |bytes: AlignedBytes, per_row: usize| (per_row > 0).then(|| bytes.into());
    WeightTensor::new(encoding, shape.to_vec(), data.into(), part(scale, row_bytes.scale), part(min, row_bytes.min))
        .expect("the suite builds tensors in the one layout")
}

/// A scale: usually positive, sometimes negative or zero.
fn step(rng: &mut Rng, size: f32) -> f32 {
    match rng.below(16) {
        0 => -size * (0.5 + rng.uniform()),
        1 => 0.0,
        _ => size * (0.5 + rng.uniform()),
    }
}

fn garbage(rng: &mut Rng, bytes: usize) -> AlignedBytes {
    let mut all = AlignedBytes::zeroed(bytes);
    all.as_mut().chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&rng.next().to_le_bytes()[..chunk.len()]));
    all
}

fn fill<const N: usize>(bytes: &mut [u8], count: usize, mut number: impl FnMut(usize) -> [u8; N]) {
    bytes.chunks_exact_mut(N).take(count).enumerate().for_each(|(i, bytes)| bytes.copy_from_slice(&number(i)));
}
