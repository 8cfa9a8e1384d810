//! Moving data: concatenating, slicing and gathering rows.

use super::frame::Frame;
use crate::Name;

pub(super) fn concat(frame: &Frame<'_>, xs: &[Name]) -> Vec<f32> {
    let shape = frame.shape(&xs[0]);
    let rows: usize = shape[..shape.len() - 1].iter().product();
    let parts = |row: usize| xs.iter().flat_map(move |x| &frame.f32s(x)[row * frame.width(x)..][..frame.width(x)]);
    (0..rows).flat_map(parts).copied().collect()
}

pub(super) fn slice(frame: &Frame<'_>, x: &Name, axis: usize, start: usize, length: usize) -> Vec<f32> {
    let shape = frame.shape(x);
    let inner: usize = shape[axis + 1..].iter().product();
    let outer = frame.f32s(x).chunks_exact(shape[axis] * inner);
    outer.flat_map(|block| &block[start * inner..(start + length) * inner]).copied().collect()
}

pub(super) fn gather(frame: &Frame<'_>, x: &Name, rows: &Name) -> Vec<f32> {
    let width: usize = frame.shape(x)[1..].iter().product();
    let picked = frame.i32s(rows).iter().flat_map(|&row| &frame.f32s(x)[row as usize * width..][..width]);
    picked.copied().collect()
}

/// `x` with every `x[at[r]]` replaced by `join(x[at[r]], rows[r])`.
pub(super) fn scatter(frame: &Frame<'_>, x: &Name, rows: &Name, at: &Name, join: impl Fn(f32, f32) -> f32) -> Vec<f32> {
    let width: usize = frame.shape(x)[1..].iter().product();
    let mut y = frame.f32s(x).to_vec();
    for (&at, new) in frame.i32s(at).iter().zip(frame.f32s(rows).chunks_exact(width)) {
        y[at as usize * width..][..width].iter_mut().zip(new).for_each(|(y, &new)| *y = join(*y, new));
    }
    y
}
