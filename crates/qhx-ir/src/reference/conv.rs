//! Ops that combine neighbouring rows without a running state: 2-D convolution and pooling.

use super::frame::Frame;
use crate::Name;

pub(super) fn conv2d(frame: &Frame<'_>, x: &Name, weight: &Name, bias: Option<&Name>, stride: usize) -> Vec<f32> {
    let [rows, width, inputs] = *frame.shape(x) else { unreachable!("checked: [rows, width, in]") };
    let [outputs, kernel, _, _] = *frame.weight(weight).shape() else { unreachable!("checked: [out, kernel, kernel, in]") };
    let taps = frame.plain_weight(weight);
    let bias = bias.map_or(vec![0.0; outputs], |b| frame.plain_weight(b));
    let per_row = frame.rows_per_row(x);
    let (out_width, padding) = (width.div_ceil(stride), (kernel - 1) / 2);
    let mut y = vec![0.0; rows.div_ceil(stride) * out_width * outputs];
    for span in &frame.spans {
        let valid = span.rows(per_row);
        let x = &frame.f32s(x)[valid.start * width * inputs..valid.end * width * inputs];
        // The value at (row, column) of the segment, zero outside it.
        let at = |row: usize, column: usize, i: usize| match (row.checked_sub(padding), column.checked_sub(padding)) {
            (Some(row), Some(column)) if row < valid.len() && column < width => x[(row * width + column) * inputs + i] as f64,
            _ => 0.0,
        };
        for (row, out_row) in span.rows(per_row * stride).enumerate() {
            for column in 0..out_width {
                for o in 0..outputs {
                    let mut sum = bias[o] as f64;
                    for r in 0..kernel {
                        for c in 0..kernel {
                            for i in 0..inputs {
                                let tap = taps[((o * kernel + r) * kernel + c) * inputs + i] as f64;
                                sum += tap * at(row * stride + r, column * stride + c, i);
                            }
                        }
                    }
                    y[(out_row * out_width + column) * outputs + o] = sum as f32;
                }
            }
        }
    }
    y
}

/// The mean of each group of rows; for a segment's last, partial group, the mean of its valid rows.
pub(super) fn pool(frame: &Frame<'_>, x: &Name, size: usize) -> Vec<f32> {
    let shape = frame.shape(x);
    let width: usize = shape[1..].iter().product();
    let per_row = frame.rows_per_row(x);
    let mut y = vec![0.0; shape[0] / size * width];
    for span in &frame.spans {
        let valid = span.rows(per_row);
        for out_row in span.rows(per_row * size) {
            let group = out_row * size..((out_row + 1) * size).min(valid.end);
            for c in 0..width {
                let sum: f64 = group.clone().map(|row| frame.f32s(x)[row * width + c] as f64).sum();
                y[out_row * width + c] = (sum / group.len() as f64) as f32;
            }
        }
    }
    y
}
