//! The gated delta rule over rows, on the state of one head.
//!
//! Columns of the state are independent: a strip of them goes through all rows, each row in two passes over the strip. Between its first and its last pass the strip
//! stands densely in a room of its own, which stays in the nearest cache. Every number is computed in one order, whatever the number of rows.
#![allow(unsafe_code)] // Vector loads and stores.

use super::{
    Instructions, run,
    vector::{Kernel, MOST_LANES, Vector},
};

/// Vectors of a strip.
const STRIP: usize = 4;

/// Numbers of a state that is large: with those of other heads and layers it does not stay in a cache until the next call.
const LARGE: usize = 8192;

/// `S ← e^g S; δ = β (v − Sᵀk); S ← S + k δᵀ; y = Sᵀq` for each row.
pub(crate) struct DeltaRows<'a> {
    /// `[rows, key_dim]`.
    pub(crate) queries: &'a [f32],
    /// `[rows, key_dim]`.
    pub(crate) keys: &'a [f32],
    /// `e^g` and `β` of each row.
    pub(crate) gates: &'a [(f32, f32)],
    pub(crate) key_dim: usize,
    /// Rows of `value_dim` numbers.
    pub(crate) values: &'a [f32],
    /// From one of them to the next.
    pub(crate) value_stride: usize,
    pub(crate) value_dim: usize,
}

impl DeltaRows<'_> {
    /// Numbers of room that a strip needs.
    pub(crate) fn room(key_dim: usize) -> usize {
        key_dim * STRIP * MOST_LANES
    }

    /// From the state `before`, or where there is none, from `state` itself, to `state`, both `[key_dim, value_dim]`; the results of rows go to the tile's.
    pub(crate) fn into_tile(
        self,
        instructions: Instructions,
        before: Option<&[f32]>,
        state: &mut [f32],
        room: &mut [f32],
        out: &mut crate::work::Tile<'_, f32>,
    ) {
        let (rows, size) = (self.gates.len(), self.key_dim * self.value_dim);
        assert!(state.len() == size && before.is_none_or(|before| before.len() == size), "the state has another shape");
        assert!(self.queries.len() >= rows * self.key_dim && self.keys.len() >= rows * self.key_dim, "keys are too short");
        assert!(room.len() >= Self::room(self.key_dim), "the room is too small");
        assert!(out.rows == rows && out.columns == self.value_dim, "the tile must have the results' shape");
        if rows == 0 {
            return;
        }
        assert!((rows - 1) * self.value_stride + self.value_dim <= self.values.len(), "values are too short");
        let (out, out_stride) = out.as_mut_ptr();
        let state = state.as_mut_ptr();
        let before = before.map_or(state.cast_const(), <[f32]>::as_ptr);
        run(instructions, All { rule: self, before, state, strip: room.as_mut_ptr(), out, out_stride });
    }
}

struct All<'a> {
    rule: DeltaRows<'a>,
    before: *const f32,
    state: *mut f32,
    strip: *mut f32,
    out: *mut f32,
    out_stride: usize,
}

impl Kernel for All<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let mut j = 0;
        // SAFETY: `into_tile` checked that all rows and both states are there; strips lie side by side.
        unsafe {
            while j < self.rule.value_dim {
                j += match self.rule.value_dim - j {
                    left if left >= STRIP * V::LANES => self.strip::<V, STRIP, false>(j),
                    left if left >= V::LANES => self.strip::<V, 1, false>(j),
                    _ => self.strip::<V, 1, true>(j),
                };
            }
            V::streamed();
        }
    }
}

impl All<'_> {
    /// All rows of `N` vectors of columns from `j` on (the last, partial one where `PART`). Gives the number of columns.
    #[inline(always)]
    unsafe fn strip<V: Vector, const N: usize, const PART: bool>(&self, j: usize) -> usize {
        let DeltaRows { key_dim, value_dim, value_stride, .. } = self.rule;
        let part = value_dim - j;
        // SAFETY: the caller's columns are inside all rows.
        unsafe {
            let load = |from: *const f32| -> [V; N] {
                std::array::from_fn(|v| if PART { V::load_part(from, part) } else { V::load(from.add(v * V::LANES)) })
            };
            let store = |lanes: [V; N], to: *mut f32| {
                for (v, lanes) in lanes.into_iter().enumerate() {
                    if PART { lanes.store_part(to, part) } else { lanes.store(to.add(v * V::LANES)) }
                }
            };
            let place = |p: usize| self.strip.add(p * N * V::LANES);
            let load_strip = |p: usize| -> [V; N] { std::array::from_fn(|v| V::load(place(p).add(v * V::LANES))) };
            let store_strip = |lanes: [V; N], p: usize| {
                for (v, lanes) in lanes.into_iter().enumerate() {
                    lanes.store(place(p).add(v * V::LANES));
                }
            };
            let last = self.rule.gates.len() - 1;
            // A large state is read again in the next call, long after it has left the caches.
            let vector = V::LANES * size_of::<f32>();
            let aligned = self.state.add(j) as usize % vector == 0 && value_dim % V::LANES == 0;
            let stream = !PART && aligned && key_dim * value_dim >= LARGE;
            for (t, &(decay, step)) in self.rule.gates.iter().enumerate() {
                let (query, key) = (self.rule.queries.as_ptr().add(t * key_dim), self.rule.keys.as_ptr().add(t * key_dim));
                let (decay, step) = (V::splat(decay), V::splat(step));
                // The state fades, and is read with the key.
                let mut read = [V::splat(0.0); N];
                for p in 0..key_dim {
                    let row = if t == 0 { load(self.before.add(p * value_dim + j)) } else { load_strip(p) };
                    let (row, key) = (row.map(|lanes| lanes.mul(decay)), V::splat(*key.add(p)));
                    store_strip(row, p);
                    read = std::array::from_fn(|v| key.mul_add(row[v], read[v]));
                }
                let value = load(self.rule.values.as_ptr().add(t * value_stride + j));
                let change: [V; N] = std::array::from_fn(|v| value[v].sub(read[v]).mul(step));
                // It changes at the key, and is read with the query.
                let mut result = [V::splat(0.0); N];
                for p in 0..key_dim {
                    let (row, key, query) = (load_strip(p), V::splat(*key.add(p)), V::splat(*query.add(p)));
                    let row: [V; N] = std::array::from_fn(|v| key.mul_add(change[v], row[v]));
                    let to = self.state.add(p * value_dim + j);
                    if t == last && stream {
                        for (v, lanes) in row.into_iter().enumerate() {
                            lanes.stream(to.add(v * V::LANES));
                        }
                    } else if t == last {
                        store(row, to)
                    } else {
                        store_strip(row, p)
                    }
                    result = std::array::from_fn(|v| query.mul_add(row[v], result[v]));
                }
                store(result, self.out.add(t * self.out_stride + j));
            }
        }
        if PART { part } else { N * V::LANES }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        matrix::tests::Noise,
        work::{Chunks, Tiles, for_each_here},
    };
    use qhx_ir::AlignedBytes;

    #[test]
    fn the_rule_as_it_is_written() {
        let mut noise = Noise::new(5);
        for instructions in Instructions::all() {
            for (rows, key_dim, value_dim) in [(1, 1, 1), (3, 16, 8), (5, 24, 70), (9, 128, 128)] {
                let [queries, keys] = [(); 2].map(|()| noise.floats(rows * key_dim));
                let (values, start) = (noise.floats(rows * value_dim), noise.floats(key_dim * value_dim));
                let gates: Vec<(f32, f32)> = (0..rows).map(|_| (noise.float().abs(), noise.float().abs())).collect();
                // Aligned, so that a large state is streamed.
                let mut state = AlignedBytes::zeroed(4 * key_dim * value_dim);
                let state: &mut [f32] = bytemuck::cast_slice_mut(state.as_mut());
                state.fill(f32::NAN);
                let mut out = vec![f32::NAN; rows * value_dim];
                let cuts = (Tiles::new(&mut out, value_dim, rows, value_dim), Chunks::new(state, key_dim * value_dim));
                for_each_here(cuts, &mut [], |_, (mut tile, state), _| {
                    let (queries, keys, gates, values) = (&queries[..], &keys[..], &gates[..], &values[..]);
                    let rule = DeltaRows { queries, keys, gates, key_dim, values, value_stride: value_dim, value_dim };
                    rule.into_tile(instructions, Some(&start), state, &mut vec![f32::NAN; DeltaRows::room(key_dim)], &mut tile);
                });
                let mut wanted: Vec<f64> = start.iter().map(|&x| x as f64).collect();
                for (t, &(decay, step)) in gates.iter().enumerate() {
                    let number = |x: &[f32], p: usize| x[t * key_dim + p] as f64;
                    wanted.iter_mut().for_each(|s| *s *= decay as f64);
                    for j in 0..value_dim {
                        let read: f64 = (0..key_dim).map(|p| number(&keys, p) * wanted[p * value_dim + j]).sum();
                        let change = step as f64 * (values[t * value_dim + j] as f64 - read);
                        (0..key_dim).for_each(|p| wanted[p * value_dim + j] += number(&keys, p) * change);
                        let result: f64 = (0..key_dim).map(|p| number(&queries, p) * wanted[p * value_dim + j]).sum();
                        let size = 1.0 + wanted.iter().fold(0.0f64, |size, s| size.max(s.abs())) * key_dim as f64;
                        assert!(
                            (out[t * value_dim + j] as f64 - result).abs() < 1e-5 * size,
                            "{instructions:?} {rows} {key_dim} {value_dim}"
                        );
                    }
                }
            }
        }
    }
}
