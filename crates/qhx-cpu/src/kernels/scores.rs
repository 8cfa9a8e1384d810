//! Products of a few queries with the keys of a block, while what is read next is asked for.
//!
//! Each product is summed as in [`super::dot`], to the last bit. What differs is memory: a cache of keys and values lies in many short pieces, of which no CPU foresees
//! the next, so that whoever scores a block names them.
#![allow(unsafe_code)] // Vector loads.
#![allow(clippy::needless_range_loop)] // Register tiles are indexed in two directions.

use super::{
    Instructions, dot,
    element::Element,
    run,
    vector::{Kernel, Vector},
};

/// Keys that share a register tile.
const KEYS: usize = 4;
/// Bytes of a cache line.
const LINE: usize = 64;

/// `out[i · out_stride + j] = query_i · key_j`, where query `i` starts at `i · dim`, key `j` at `j · key_stride`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scores<'a, E> {
    pub(crate) queries: &'a [f32],
    pub(crate) dim: usize,
    pub(crate) keys: &'a [E],
    pub(crate) key_stride: usize,
    /// How many keys.
    pub(crate) count: usize,
    /// What is asked for meanwhile, in pieces of the same size from first to last.
    pub(crate) next: [&'a [E]; 2],
}

/// Whether queries of `dim` numbers are summed in one piece, as they must be here.
pub(crate) fn in_one_piece(dim: usize) -> bool {
    dim <= dot::MOST_OF_A_PIECE
}

impl<E: Element> Scores<'_, E> {
    /// Computes the products of all queries.
    pub(crate) fn into(self, instructions: Instructions, out: &mut [f32], out_stride: usize) {
        let queries = self.queries.len() / self.dim;
        if queries == 0 || self.count == 0 {
            return;
        }
        assert!(in_one_piece(self.dim), "long rows are summed in pieces");
        assert!((self.count - 1) * self.key_stride + self.dim <= self.keys.len(), "keys are too short");
        assert!((queries - 1) * out_stride + self.count <= out.len(), "out is too short");
        run(instructions, All { scores: self, queries, out: out.as_mut_ptr(), out_stride });
    }
}

struct All<'a, E> {
    scores: Scores<'a, E>,
    queries: usize,
    out: *mut f32,
    out_stride: usize,
}

impl<E: Element> Kernel for All<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let count = self.scores.count;
        let tiles = count.div_ceil(KEYS);
        // SAFETY: `Scores::into` saw that all rows are there; whatever is asked for is never looked at.
        unsafe {
            for j in (0..count).step_by(KEYS) {
                for next in self.scores.next {
                    let bytes = size_of_val(next);
                    let piece = bytes.div_ceil(tiles).next_multiple_of(LINE);
                    let first = j / KEYS * piece;
                    for line in (first..bytes.min(first + piece)).step_by(LINE) {
                        V::fetch_early(next.as_ptr().cast::<u8>().wrapping_add(line));
                    }
                }
                let mut i = 0;
                while i < self.queries {
                    i += match (self.queries - i, count - j) {
                        // Sums in registers, as far as there are registers for them.
                        (6.., KEYS..) if V::LANES == 16 => self.tile::<V, 6, KEYS>(i, j),
                        (4.., KEYS..) if V::LANES == 16 => self.tile::<V, 4, KEYS>(i, j),
                        // Four queries with two keys at a time read each key once, where three and then one would read it twice.
                        (4 | 8, KEYS..) => self.pairs::<V>(i, j),
                        (3.., KEYS..) => self.tile::<V, 3, KEYS>(i, j),
                        (2, KEYS..) => self.tile::<V, 2, KEYS>(i, j),
                        (_, KEYS..) => self.tile::<V, 1, KEYS>(i, j),
                        (_, left) => (j..j + left).map(|j| self.tile::<V, 1, 1>(i, j)).max().unwrap_or(1),
                    };
                }
            }
        }
    }
}

impl<E: Element> All<'_, E> {
    /// Four queries from `i` on with [`KEYS`] keys from `j` on, two at a time.
    #[inline(always)]
    unsafe fn pairs<V: Vector>(&self, i: usize, j: usize) -> usize {
        // SAFETY: passed on.
        unsafe {
            self.tile::<V, 4, 2>(i, j);
            self.tile::<V, 4, 2>(i, j + 2)
        }
    }

    /// `M` queries from `i` on with `R` keys from `j` on. Gives `M`.
    #[inline(always)]
    unsafe fn tile<V: Vector, const M: usize, const R: usize>(&self, i: usize, j: usize) -> usize {
        let Scores { dim, key_stride, .. } = self.scores;
        // SAFETY: the caller's rows are all inside their slices.
        unsafe {
            let queries = self.scores.queries.as_ptr().add(i * dim);
            let keys = self.scores.keys.as_ptr().add(j * key_stride);
            let mut sums = [[V::splat(0.0); R]; M];
            let mut p = 0;
            while p + V::LANES <= dim {
                let lanes: [V; M] = std::array::from_fn(|m| V::load(queries.add(m * dim + p)));
                for r in 0..R {
                    let key = E::load::<V>(keys.add(r * key_stride + p));
                    for m in 0..M {
                        sums[m][r] = lanes[m].mul_add(key, sums[m][r]);
                    }
                }
                p += V::LANES;
            }
            if p < dim {
                let lanes: [V; M] = std::array::from_fn(|m| V::load_part(queries.add(m * dim + p), dim - p));
                for r in 0..R {
                    let key = E::load_part::<V>(keys.add(r * key_stride + p), dim - p);
                    for m in 0..M {
                        sums[m][r] = lanes[m].mul_add(key, sums[m][r]);
                    }
                }
            }
            if M == 4 && R == 2 {
                for m in [0, 2] {
                    let [a, b, c, d] = V::sums([sums[m][0], sums[m][1], sums[m + 1][0], sums[m + 1][1]]);
                    let out = self.out.add((i + m) * self.out_stride + j);
                    out.cast::<[f32; 2]>().write_unaligned([a, b]);
                    out.add(self.out_stride).cast::<[f32; 2]>().write_unaligned([c, d]);
                }
                return M;
            }
            for m in 0..M {
                let out = self.out.add((i + m) * self.out_stride + j);
                if let Some(&four) = sums[m].first_chunk::<4>() {
                    out.cast::<[f32; 4]>().write_unaligned(V::sums(four));
                } else {
                    (0..R).for_each(|r| *out.add(r) = sums[m][r].sum());
                }
            }
            M
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::dot::Dots;
    use half::f16;

    #[test]
    fn the_very_bits_of_dots() {
        for instructions in Instructions::all() {
            for (queries, count, dim) in
                [(1, 1, 1), (1, 9, 33), (2, 4, 64), (3, 7, 65), (4, 64, 128), (5, 6, 40), (9, 63, 100), (16, 5, 640)]
            {
                let key_stride = dim + 1;
                let x: Vec<f32> = (0..queries * dim).map(|i| ((i * 13 % 29) as f32 - 14.0) / 7.0).collect();
                let w: Vec<f16> = (0..count * key_stride).map(|i| f16::from_f32(((i * 7 % 31) as f32 - 15.0) / 11.0)).collect();
                let mut wanted = vec![7.0; queries * (count + 3)];
                let mut found = wanted.clone();
                let dots = Dots { x: &x, x_stride: dim, x_rows: queries, w: &w, w_stride: key_stride, w_rows: count, k: dim };
                dots.into(instructions, &mut wanted, count + 3);
                let scores = Scores { queries: &x, dim, keys: &w, key_stride, count, next: [&w, &w[..3 * count / 2]] };
                scores.into(instructions, &mut found, count + 3);
                assert_eq!(wanted, found, "{instructions:?} {queries} {count} {dim}");
            }
        }
    }
}
