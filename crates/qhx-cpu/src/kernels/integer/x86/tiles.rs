//! The instructions of AMX: eight registers that each hold a tile, up to sixteen rows of 64 bytes. Written as instructions: the intrinsics for them are not stable.
//!
//! The kernel is written over [`Tiles`], so that a model of them in plain code can stand in where the CPU has none: see the tests.

use std::arch::asm;

/// Bytes in a row of a tile.
pub(super) const ROW: usize = 64;

/// The tiles of a thread. Numbers 0 to 3 hold sums, 4 and 5 the left sides of products, 6 and 7 their right sides.
///
/// # Safety
/// All methods: the CPU has the instructions, [`Self::shape`] came first and [`Self::release`] has not come yet; memory is as large as the shape says.
pub(super) trait Tiles {
    unsafe fn shape(&mut self, shape: &Shape);

    unsafe fn zero<const T: u8>(&mut self);

    /// Rows are `stride` bytes apart.
    unsafe fn load<const T: u8>(&mut self, from: *const u8, stride: usize);

    /// `SUMS[m][n] += Σ LEFT[m][k] · RIGHT[k / 4][n][k % 4]`, of signed bytes, in 32 bits.
    unsafe fn multiply<const SUMS: u8, const LEFT: u8, const RIGHT: u8>(&mut self);

    /// Rows are [`ROW`] bytes apart.
    unsafe fn store<const T: u8>(&mut self, to: *mut i32);

    unsafe fn release(&mut self);
}

/// The shapes of all tiles, as the CPU reads them.
#[repr(C, align(64))]
pub(super) struct Shape {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    /// Bytes in a row.
    pub(super) bytes: [u16; 16],
    pub(super) rows: [u8; 16],
}

impl Shape {
    /// Tiles for products of `rows` rows with `columns` others, of `quants` bytes each: sixteen, sixteen and 64 at most.
    pub(super) fn new(rows: usize, columns: usize, quants: usize) -> Self {
        let fits = (1..=16).contains(&rows) && (1..=16).contains(&columns) && (4..=ROW).contains(&quants) && quants % 4 == 0;
        assert!(fits, "a shape that no tile has");
        let mut shape = Self { palette: 1, start: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        shape.bytes[..8].fill(4 * columns as u16);
        shape.bytes[4..6].fill(quants as u16);
        shape.rows[..6].fill(rows as u8);
        shape.rows[6..8].fill(quants as u8 / 4);
        shape
    }
}

/// Those of the CPU.
pub(super) struct Registers;

// SAFETY of all blocks: the promises that `Tiles` asks of its callers. The compiler itself never uses these registers, and keeps the order of the blocks.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Tiles for Registers {
    #[inline(always)]
    unsafe fn shape(&mut self, shape: &Shape) {
        unsafe { asm!("ldtilecfg [{}]", in(reg) shape, options(nostack, preserves_flags, readonly)) }
    }

    #[inline(always)]
    unsafe fn zero<const T: u8>(&mut self) {
        unsafe { asm!("tilezero tmm{}", const T, options(nostack, preserves_flags, nomem)) }
    }

    #[inline(always)]
    unsafe fn load<const T: u8>(&mut self, from: *const u8, stride: usize) {
        unsafe { asm!("tileloadd tmm{}, [{} + {}]", const T, in(reg) from, in(reg) stride, options(nostack, preserves_flags, readonly)) }
    }

    #[inline(always)]
    unsafe fn multiply<const SUMS: u8, const LEFT: u8, const RIGHT: u8>(&mut self) {
        unsafe { asm!("tdpbssd tmm{}, tmm{}, tmm{}", const SUMS, const LEFT, const RIGHT, options(nostack, preserves_flags, nomem)) }
    }

    #[inline(always)]
    unsafe fn store<const T: u8>(&mut self, to: *mut i32) {
        unsafe { asm!("tilestored [{} + {}], tmm{}", in(reg) to, in(reg) ROW, const T, options(nostack, preserves_flags)) }
    }

    #[inline(always)]
    unsafe fn release(&mut self) {
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) }
    }
}

/// Tiles in plain code, as Intel's manual states the instructions. What the CPU refuses is a panic here.
/// The sums of one block for 16 rows by 16.
pub(super) type Sums = [[i32; 16]; 16];
/// Those of four blocks.
pub(super) type Four = [Sums; 4];

/// The sums of four blocks of 32 quants, or of the `left` ones: of rows where they lie, a stride apart, with rows that are packed.
///
/// # Safety
/// Both sides have as many blocks, and the shape of the tiles is set.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: the caller's promise.
pub(super) unsafe fn multiply_four<T: Tiles>(
    tiles: &mut T,
    left: usize,
    (rows, stride): (*const u8, usize),
    packed: *const u8,
    sums: &mut Four,
) {
    unsafe {
        block::<T, 0, 4, 6>(tiles, rows, stride, packed, &mut sums[0]);
        if left > 1 {
            block::<T, 1, 5, 7>(tiles, rows.add(32), stride, packed.add(8 * ROW), &mut sums[1]);
        }
        if left > 2 {
            block::<T, 2, 4, 6>(tiles, rows.add(64), stride, packed.add(16 * ROW), &mut sums[2]);
        }
        if left > 3 {
            block::<T, 3, 5, 7>(tiles, rows.add(96), stride, packed.add(24 * ROW), &mut sums[3]);
        }
    }
}

/// The sums of one block.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: as above.
unsafe fn block<T: Tiles, const SUMS: u8, const ROWS: u8, const PACKED: u8>(
    tiles: &mut T,
    rows: *const u8,
    stride: usize,
    packed: *const u8,
    sums: &mut Sums,
) {
    unsafe {
        tiles.zero::<SUMS>();
        tiles.load::<ROWS>(rows, stride);
        tiles.load::<PACKED>(packed, ROW);
        tiles.multiply::<SUMS, ROWS, PACKED>();
        tiles.store::<SUMS>(sums.as_mut_ptr().cast());
    }
}

#[cfg(test)]
pub(super) struct Model {
    shape: Option<Shape>,
    tiles: [[[u8; ROW]; 16]; 8],
}

#[cfg(test)]
impl Model {
    pub(super) fn new() -> Self {
        // Nothing may depend on what tiles held before.
        Self { shape: None, tiles: [[[0x5a; ROW]; 16]; 8] }
    }

    fn size(&self, tile: u8) -> (usize, usize) {
        let shape = self.shape.as_ref().expect("tiles without a shape");
        (shape.rows[tile as usize].into(), shape.bytes[tile as usize].into())
    }

    fn sum(&mut self, tile: u8, row: usize, column: usize) -> &mut [u8; 4] {
        &mut self.tiles[tile as usize][row].as_chunks_mut().0[column]
    }
}

#[cfg(test)]
#[allow(clippy::undocumented_unsafe_blocks)] // SAFETY: as above.
impl Tiles for Model {
    unsafe fn shape(&mut self, shape: &Shape) {
        assert!(shape.palette == 1 && shape.start == 0 && shape.reserved == [0; 14]);
        assert!(shape.bytes[..8].iter().all(|&bytes| bytes <= 64) && shape.rows[..8].iter().all(|&rows| rows <= 16));
        assert!(shape.bytes[8..] == [0; 8] && shape.rows[8..] == [0; 8] && size_of::<Shape>() == 64);
        self.shape = Some(Shape { ..*shape });
        self.tiles = [[[0; ROW]; 16]; 8];
    }

    unsafe fn zero<const T: u8>(&mut self) {
        self.tiles[T as usize] = [[0; ROW]; 16];
    }

    unsafe fn load<const T: u8>(&mut self, from: *const u8, stride: usize) {
        let (rows, bytes) = self.size(T);
        self.tiles[T as usize] = [[0; ROW]; 16];
        for (r, row) in self.tiles[T as usize][..rows].iter_mut().enumerate() {
            unsafe { row.as_mut_ptr().copy_from_nonoverlapping(from.add(r * stride), bytes) };
        }
    }

    unsafe fn multiply<const SUMS: u8, const LEFT: u8, const RIGHT: u8>(&mut self) {
        let ((rows, width), (left_rows, left_bytes), (right_rows, right_bytes)) = (self.size(SUMS), self.size(LEFT), self.size(RIGHT));
        assert!(SUMS != LEFT && LEFT != RIGHT && RIGHT != SUMS);
        assert!(rows == left_rows && left_bytes == 4 * right_rows && width == right_bytes);
        for m in 0..rows {
            for k in 0..right_rows {
                for n in 0..width / 4 {
                    let (left, right) = (*self.sum(LEFT, m, k), *self.sum(RIGHT, k, n));
                    let products = (0..4).map(|i| left[i] as i8 as i32 * right[i] as i8 as i32);
                    let sum = self.sum(SUMS, m, n);
                    *sum = i32::from_le_bytes(*sum).wrapping_add(products.sum()).to_le_bytes();
                }
            }
        }
    }

    unsafe fn store<const T: u8>(&mut self, to: *mut i32) {
        let (rows, bytes) = self.size(T);
        for r in 0..rows {
            unsafe { to.cast::<u8>().add(r * ROW).copy_from_nonoverlapping(self.tiles[T as usize][r].as_ptr(), bytes) };
        }
    }

    unsafe fn release(&mut self) {
        assert!(self.shape.take().is_some());
    }
}
