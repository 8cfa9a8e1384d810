//! Cuts outputs into parts that threads fill at the same time.
//!
//! Ops never share a mutable slice between threads by hand: they say how an output is cut ([`Chunks`], [`Tiles`], a tuple of two cuts), and
//! [`for_each`] gives each part to exactly one unit. Cuts depend on shapes only.
#![allow(unsafe_code)] // Hands disjoint parts of one slice to several threads.

use crate::pool::Pool;
use std::{marker::PhantomData, ops::Range};

/// Something that can be cut into parts which do not overlap.
///
/// # Safety
/// Parts of different indexes must not overlap.
pub(crate) unsafe trait Split: Sync {
    /// What one unit fills.
    type Part;

    /// Number of parts.
    fn parts(&self) -> usize;

    /// One part.
    ///
    /// # Safety
    /// `index < parts()`, and each index is asked for at most once.
    unsafe fn part(&self, index: usize) -> Self::Part;
}

/// Runs `body` once for each part, with the part's index and the scratch of the thread that does it. `scratch` is shared out evenly.
pub(crate) fn for_each<S: Split>(pool: &Pool, split: S, scratch: &mut [f32], body: impl Fn(usize, S::Part, &mut [f32]) + Sync) {
    let threads = pool.threads();
    let scratch = Chunks::new(scratch, scratch.len() / threads);
    pool.run(split.parts(), &|unit, thread| {
        // SAFETY: the pool runs each unit once, and one thread runs one unit at a time, so nobody else has this scratch now.
        let (part, scratch) = unsafe { (split.part(unit), if scratch.length == 0 { &mut [] } else { scratch.part(thread) }) };
        body(unit, part, scratch);
    });
}

/// [`for_each`] by the calling thread alone, for work that is not worth waking anybody.
pub(crate) fn for_each_here<S: Split>(split: S, scratch: &mut [f32], mut body: impl FnMut(usize, S::Part, &mut [f32])) {
    for unit in 0..split.parts() {
        // SAFETY: each unit once.
        body(unit, unsafe { split.part(unit) }, scratch);
    }
}

/// No output, only a number of units (a pass that fills scratch or reads).
#[cfg(test)]
pub(crate) struct Units(pub(crate) usize);

#[cfg(test)]
// SAFETY: there is nothing to overlap.
unsafe impl Split for Units {
    type Part = ();

    fn parts(&self) -> usize {
        self.0
    }

    unsafe fn part(&self, _: usize) {}
}

/// A slice cut into runs of `length`, the last one perhaps shorter.
pub(crate) struct Chunks<'a, T> {
    start: *mut T,
    total: usize,
    length: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]` whose parts go to different threads.
unsafe impl<T: Send> Sync for Chunks<'_, T> {}

impl<'a, T> Chunks<'a, T> {
    /// Cuts `slice` into runs of `length`.
    pub(crate) fn new(slice: &'a mut [T], length: usize) -> Self {
        Self { start: slice.as_mut_ptr(), total: slice.len(), length, owner: PhantomData }
    }
}

// SAFETY: runs start `length` apart and are at most that long.
unsafe impl<'a, T: Send> Split for Chunks<'a, T> {
    type Part = &'a mut [T];

    fn parts(&self) -> usize {
        if self.length == 0 { 0 } else { self.total.div_ceil(self.length) }
    }

    unsafe fn part(&self, index: usize) -> &'a mut [T] {
        let first = index * self.length;
        let length = self.length.min(self.total - first);
        // SAFETY: `first + length <= total`; the caller asks for each index once.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), length) }
    }
}

/// Segments whose work is shared out together: their parts stand in an array, so that a call allocates nothing.
pub(crate) const SEGMENTS: usize = 16;

/// The rows of a dense matrix that belong to segments, which are asked for from first to last. Rows between them are padding and become zero.
pub(crate) struct SegmentRows<'a> {
    rest: &'a mut [f32],
    width: usize,
    /// The row that `rest` begins with.
    done: usize,
}

impl<'a> SegmentRows<'a> {
    /// Of rows of `width` numbers.
    pub(crate) fn new(out: &'a mut [f32], width: usize) -> Self {
        Self { rest: out, width, done: 0 }
    }

    /// A segment's rows.
    pub(crate) fn take(&mut self, rows: &Range<usize>) -> &'a mut [f32] {
        let (padding, rest) = std::mem::take(&mut self.rest).split_at_mut((rows.start - self.done) * self.width);
        padding.fill(0.0);
        let (own, rest) = rest.split_at_mut(rows.len() * self.width);
        (self.rest, self.done) = (rest, rows.end);
        own
    }

    /// What follows the last segment is padding, too.
    pub(crate) fn finish(self) {
        self.rest.fill(0.0);
    }
}

/// A matrix cut into tiles, in the order of column panels, then rows.
pub(crate) struct Tiles<'a, T> {
    start: *mut T,
    /// From one row of the matrix to the next.
    stride: usize,
    rows: usize,
    columns: usize,
    tile_rows: usize,
    tile_columns: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]` whose parts go to different threads.
unsafe impl<T: Send> Sync for Tiles<'_, T> {}

/// A part of a matrix.
pub(crate) struct Tile<'a, T> {
    start: *mut T,
    stride: usize,
    /// The first row of the matrix that is in this tile.
    pub(crate) first_row: usize,
    /// The first column of the matrix that is in this tile.
    pub(crate) first_column: usize,
    /// Rows of this tile.
    pub(crate) rows: usize,
    /// Columns of this tile.
    pub(crate) columns: usize,
    owner: PhantomData<&'a mut [T]>,
}

impl<'a, T> Tiles<'a, T> {
    /// Cuts the dense matrix `slice` of rows of `columns` numbers.
    pub(crate) fn new(slice: &'a mut [T], columns: usize, tile_rows: usize, tile_columns: usize) -> Self {
        assert!(columns > 0 && tile_rows > 0 && tile_columns > 0 && slice.len() % columns == 0, "a matrix needs whole rows");
        let rows = slice.len() / columns;
        Self { start: slice.as_mut_ptr(), stride: columns, rows, columns, tile_rows, tile_columns, owner: PhantomData }
    }

    /// The first `columns` columns of so many rows, which are `stride` numbers apart in `slice`.
    pub(crate) fn strided(slice: &'a mut [T], stride: usize, rows: usize, columns: usize, tile_rows: usize, tile_columns: usize) -> Self {
        assert!(rows > 0 && columns > 0 && tile_rows > 0 && tile_columns > 0, "a matrix needs rows and columns");
        assert!(stride >= columns && (rows - 1) * stride + columns <= slice.len(), "the matrix is too short");
        Self { start: slice.as_mut_ptr(), stride, rows, columns, tile_rows, tile_columns, owner: PhantomData }
    }
}

// SAFETY: tiles are rectangles of a grid.
unsafe impl<'a, T: Send> Split for Tiles<'a, T> {
    type Part = Tile<'a, T>;

    fn parts(&self) -> usize {
        self.rows.div_ceil(self.tile_rows) * self.columns.div_ceil(self.tile_columns)
    }

    unsafe fn part(&self, index: usize) -> Tile<'a, T> {
        let down = self.rows.div_ceil(self.tile_rows);
        let (first_row, first_column) = (index % down * self.tile_rows, index / down * self.tile_columns);
        Tile {
            // SAFETY: the tile's first number is in the matrix.
            start: unsafe { self.start.add(first_row * self.stride + first_column) },
            stride: self.stride,
            first_row,
            first_column,
            rows: self.tile_rows.min(self.rows - first_row),
            columns: self.tile_columns.min(self.columns - first_column),
            owner: PhantomData,
        }
    }
}

/// A matrix whose rows fall into groups, each group cut into tiles of a shape that depends on its number of rows.
pub(crate) struct Grouped<'a, T, F> {
    start: *mut T,
    columns: usize,
    starts: &'a [i32],
    shape: F,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]` whose parts go to different threads.
unsafe impl<T: Send, F: Sync> Sync for Grouped<'_, T, F> {}

impl<'a, T, F: Fn(usize) -> (usize, usize)> Grouped<'a, T, F> {
    /// Group `g` has the rows `starts[g] .. starts[g + 1]` of the dense matrix `slice`; `shape` gives the rows and columns of its tiles.
    pub(crate) fn new(slice: &'a mut [T], columns: usize, starts: &'a [i32], shape: F) -> Self {
        let rising = starts.windows(2).all(|pair| pair[0] <= pair[1]) && starts.first().is_some_and(|&first| first >= 0);
        let rows = starts.last().map_or(0, |&last| last as usize);
        assert!(rising && columns > 0 && rows * columns <= slice.len(), "groups must rise and lie in the matrix");
        Self { start: slice.as_mut_ptr(), columns, starts, shape, owner: PhantomData }
    }

    /// The tiles of a group as a matrix of its own.
    fn tiles(&self, group: usize) -> Tiles<'a, T> {
        let (first, end) = (self.starts[group] as usize, self.starts[group + 1] as usize);
        let (tile_rows, tile_columns) = (self.shape)(end - first);
        // SAFETY: the group's first row is in the matrix (or one beyond it, for an empty group).
        let start = unsafe { self.start.add(first * self.columns) };
        Tiles { start, stride: self.columns, rows: end - first, columns: self.columns, tile_rows, tile_columns, owner: PhantomData }
    }
}

// SAFETY: groups do not overlap, nor do tiles of one group.
unsafe impl<'a, T: Send, F: Fn(usize) -> (usize, usize) + Sync> Split for Grouped<'a, T, F> {
    /// The group, and a tile; its rows are numbered as in the whole matrix.
    type Part = (usize, Tile<'a, T>);

    fn parts(&self) -> usize {
        (0..self.starts.len() - 1).map(|group| self.tiles(group).parts()).sum()
    }

    unsafe fn part(&self, mut index: usize) -> Self::Part {
        for group in 0..self.starts.len() - 1 {
            let tiles = self.tiles(group);
            match tiles.parts() {
                parts if index < parts => {
                    // SAFETY: `index` is one of its parts, asked for once.
                    let mut tile = unsafe { tiles.part(index) };
                    tile.first_row += self.starts[group] as usize;
                    return (group, tile);
                }
                parts => index -= parts,
            }
        }
        unreachable!("a part beyond the last")
    }
}

impl<T> Tile<'_, T> {
    /// One row of this tile.
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of a tile of {}", self.rows);
        // SAFETY: the row lies in this tile, which nobody else has.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.columns) }
    }

    /// The tile's first number and the distance of its rows, for kernels that write `rows` x `columns` from there.
    pub(crate) fn as_mut_ptr(&mut self) -> (*mut T, usize) {
        (self.start, self.stride)
    }

    /// The rows of this tile that start at `first` (of this tile).
    pub(crate) fn rows_from(&mut self, first: usize, rows: usize) -> Tile<'_, T> {
        assert!(first + rows <= self.rows, "rows beyond the tile");
        // SAFETY: still inside this tile, which is borrowed.
        let start = unsafe { self.start.add(if rows == 0 { 0 } else { first * self.stride }) };
        Tile {
            start,
            stride: self.stride,
            first_row: self.first_row + first,
            first_column: self.first_column,
            rows,
            columns: self.columns,
            owner: PhantomData,
        }
    }

    /// The columns of this tile that start at `first` (of this tile).
    pub(crate) fn columns_from(&mut self, first: usize, columns: usize) -> Tile<'_, T> {
        assert!(first + columns <= self.columns, "columns beyond the tile");
        // SAFETY: still inside this tile, which is borrowed.
        let start = unsafe { self.start.add(first) };
        Tile {
            start,
            stride: self.stride,
            first_row: self.first_row,
            first_column: self.first_column + first,
            rows: self.rows,
            columns,
            owner: PhantomData,
        }
    }
}

// SAFETY: both halves are split, and each of their parts goes to one unit.
unsafe impl<A: Split, B: Split> Split for (A, B) {
    type Part = (A::Part, B::Part);

    fn parts(&self) -> usize {
        assert_eq!(self.0.parts(), self.1.parts(), "two outputs must be cut into as many parts");
        self.0.parts()
    }

    unsafe fn part(&self, index: usize) -> Self::Part {
        // SAFETY: passed on.
        unsafe { (self.0.part(index), self.1.part(index)) }
    }
}

/// Several outputs, each cut by itself; their parts stand one after the other.
// SAFETY: each part belongs to one output and one index of it.
unsafe impl<S: Split> Split for &[Option<S>] {
    /// The output's place, and its part.
    type Part = (usize, S::Part);

    fn parts(&self) -> usize {
        self.iter().flatten().map(S::parts).sum()
    }

    unsafe fn part(&self, mut index: usize) -> Self::Part {
        for (place, split) in self.iter().enumerate() {
            let Some(split) = split else { continue };
            match split.parts() {
                parts if index < parts => {
                    // SAFETY: `index` is one of its parts, asked for once.
                    return (place, unsafe { split.part(index) });
                }
                parts => index -= parts,
            }
        }
        unreachable!("a part beyond the last")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_a_matrix_once() {
        let pool = Pool::new(3).unwrap();
        for (rows, columns, tile_rows, tile_columns) in [(1, 1, 1, 1), (5, 7, 2, 3), (8, 8, 8, 8), (3, 100, 9, 16)] {
            let mut matrix = vec![0u32; rows * columns];
            let mut scratch = vec![0.0; 12];
            for_each(&pool, Tiles::new(&mut matrix, columns, tile_rows, tile_columns), &mut scratch, |_, mut tile, scratch| {
                assert_eq!(scratch.len(), 4);
                for row in 0..tile.rows {
                    let (first_row, first_column) = (tile.first_row, tile.first_column);
                    for (i, number) in tile.row(row).iter_mut().enumerate() {
                        *number += ((first_row + row) * columns + first_column + i) as u32 + 1;
                    }
                }
            });
            assert!(matrix.iter().enumerate().all(|(i, &n)| n == i as u32 + 1));
        }
    }

    #[test]
    fn groups_cover_their_rows_once() {
        let pool = Pool::new(2).unwrap();
        let mut matrix = vec![0; 7 * 5];
        let cut = Grouped::new(&mut matrix, 5, &[0, 0, 3, 4, 7], |rows| (2, if rows > 2 { 3 } else { 4 }));
        for_each(&pool, cut, &mut [], |_, (group, mut tile), _| {
            for row in 0..tile.rows {
                let number = 10 * (tile.first_row + row) + group;
                tile.row(row).iter_mut().for_each(|n| *n += number);
            }
        });
        let group = |row: usize| [1, 1, 1, 2, 3, 3, 3][row];
        assert!(matrix.iter().enumerate().all(|(i, &n)| n == 10 * (i / 5) + group(i / 5)));
    }

    #[test]
    fn rows_of_no_segment_are_zero() {
        let mut matrix = vec![f32::NAN; 9 * 2];
        let mut rows = SegmentRows::new(&mut matrix, 2);
        for (number, segment) in [1..3, 3..4, 6..8].iter().enumerate() {
            rows.take(segment).fill(number as f32 + 1.0);
        }
        rows.finish();
        let wanted = [0, 1, 1, 2, 0, 0, 3, 3, 0];
        assert!(matrix.iter().enumerate().all(|(i, &x)| x == wanted[i / 2] as f32), "{matrix:?}");
    }

    #[test]
    fn several_outputs_and_pairs() {
        let pool = Pool::new(2).unwrap();
        let (mut a, mut b) = (vec![0; 10], vec![0; 4]);
        let cuts = [Some(Chunks::new(&mut a, 3)), None, Some(Chunks::new(&mut b, 4))];
        for_each(&pool, &cuts[..], &mut [], |unit, (place, part), _| part.fill(10 * place + unit));
        assert_eq!((a, b), (vec![0, 0, 0, 1, 1, 1, 2, 2, 2, 3], vec![24; 4]));
        let (mut a, mut b) = (vec![0; 4], vec![0; 6]);
        for_each(&pool, (Chunks::new(&mut a, 2), Chunks::new(&mut b, 3)), &mut [], |unit, (a, b), _| {
            a.fill(unit);
            b.fill(unit + 5);
        });
        assert_eq!((a, b), (vec![0, 0, 1, 1], vec![5, 5, 5, 6, 6, 6]));
        for_each(&pool, Units(3), &mut [], |unit, (), _| assert!(unit < 3));
    }
}
