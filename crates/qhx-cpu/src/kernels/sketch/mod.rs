//! Matrices in a few bits a number, together with what that leaves out: enough to tell for certain which rows of a product cannot be the largest.
//!
//! What all rows have in common is taken off first: it moves all products alike. Then a number is sketched as `step · (code − (2ⁿ − 1)/2)`: one step for a row, codes
//! of 4 or 5 bits. A row's upper four bits lie in its first plane, two numbers to a byte (`i` and `i + 64` of each 128); a fifth has a plane of its own.
//! With the length of what is left out, Cauchy and Schwarz bound the product. A few columns that meet far larger numbers than the others would spoil these bounds:
//! they are kept apart, in bytes.
#![allow(unsafe_code)] // Kernels, and the call of them.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::{
    InstructionSet, Instructions,
    integer::activation::{Layout, Row},
    run,
    vector::{Kernel, Vector},
};
use qhx_ir::Bytes;

/// Numbers in a block of a plane.
pub(crate) const BLOCK: usize = 128;

/// How rows of some length are sketched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    columns: usize,
    /// Bits beyond four: 0 or 1.
    extra: usize,
}

/// A matrix in few bits.
#[derive(Debug)]
pub(crate) struct Sketch {
    pub(crate) shape: Shape,
    /// What was taken off each row.
    pub(crate) common: Vec<f32>,
    /// The columns that are kept apart: [`APART`] or none.
    pub(crate) apart: Vec<usize>,
    /// Row after row, [`Shape::stride`] bytes apart.
    pub(crate) planes: Bytes,
    /// Of each row.
    pub(crate) terms: Vec<Terms>,
    /// Of all rows, where columns are kept apart.
    pub(crate) apart_rows: Vec<ApartRows>,
    /// The length of the longest row that is sketched.
    pub(crate) longest: f32,
}

/// Columns that are kept apart.
pub(crate) const APART: usize = 32;
/// The numbers of a row in them.
pub(crate) type Apart = [i8; APART];
/// Those of some rows, column by column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ApartRows([[i8; ApartRows::ROWS]; APART]);

impl ApartRows {
    /// Rows that stand together.
    pub(crate) const ROWS: usize = 16;
    pub(crate) const ZERO: Self = Self([[0; Self::ROWS]; APART]);

    pub(crate) fn set(&mut self, row: usize, apart: &Apart) {
        self.0.iter_mut().zip(apart).for_each(|(column, &number)| column[row] = number);
    }
}

/// What belongs to a sketched row beside its codes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Terms {
    /// From one code to the next.
    step: f32,
    /// The length of what the sketch leaves out of the row is at most this. Infinite where a row cannot be sketched.
    lost: f32,
    /// The length of the sketched row is at most this.
    length: f32,
    /// From one byte to the next, in the columns that are kept apart.
    apart_step: f32,
}

/// A row that products are taken with, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query<'a> {
    row: Row<'a>,
    scale: f32,
    /// Σ quants.
    sum: i32,
    /// The length of the row is at most this; here and below without the columns that are kept apart.
    length: f32,
    /// The length of what its bytes leave out is at most this.
    lost: f32,
    apart_scale: f32,
    apart: Apart,
    /// For each unit of a row's `apart_step`: what bytes on both sides can leave out of the product.
    apart_lost: f32,
}

/// What sums of 32-bit floats may add to a length.
const ROUNDING: f32 = 1.0001;

impl Shape {
    /// The longest rows for which a sketch pays: bounds grow with the number of columns, what largest products differ by only with its root, and in six bits or
    /// more too little is spared.
    pub(crate) const MOST_COLUMNS: usize = 1536;

    /// Four bits for short rows, five for longer ones.
    pub(crate) fn new(columns: usize) -> Self {
        Self { columns, extra: usize::from(columns > 384) }
    }

    fn blocks(self) -> usize {
        self.columns.div_ceil(BLOCK)
    }

    /// Bytes of a sketched row: whole cache lines.
    pub(crate) fn stride(self) -> usize {
        (self.blocks() * (BLOCK / 2 + self.extra * BLOCK / 8)).next_multiple_of(64)
    }

    /// Numbers of a row, padded to whole blocks.
    pub(crate) fn padded(self) -> usize {
        self.blocks() * BLOCK
    }

    fn levels(self) -> usize {
        16 << self.extra
    }

    /// What sums of 32-bit floats can add to a product of two rows of length 1, in whichever order they are summed: in four lanes at least.
    pub(crate) fn rounding(self) -> f32 {
        (self.columns / 4 + 32) as f32 * f32::EPSILON
    }

    /// Sketches one row, which is padded with zeros, into its planes. The columns that are kept apart are taken from it.
    pub(crate) fn sketch(self, instructions: Instructions, row: &mut [f32], apart: &[usize], planes: &mut [u8]) -> (Terms, Apart) {
        assert!(row.len() == self.padded() && planes.len() == self.stride(), "a row and its planes must have the shape's sizes");
        let (apart_step, bytes) = take_apart(row, apart);
        let zeros = row.len() - self.columns + apart.len();
        let terms = run(instructions, Sketching { shape: self, row, zeros, planes });
        (Terms { apart_step, ..terms }, bytes)
    }
}

/// Whether products with a sketch are faster than those with int8 weights. Other CPUs have no kernel of their own for it.
pub(crate) fn pays(instructions: Instructions) -> bool {
    matches!(instructions.set(), InstructionSet::Avx2 | InstructionSet::Avx512Vnni | InstructionSet::Avx512Amx)
}

/// `out[r]` becomes a number that the product of row `first + r` with the query does not exceed, however it was rounded; not a number where there is none.
pub(crate) fn bounds(instructions: Instructions, sketch: &Sketch, first: usize, query: &Query<'_>, out: &mut [f32]) {
    let (shape, planes) = (sketch.shape, &*sketch.planes);
    let rows = first..first + out.len();
    let planes = &planes[rows.start * shape.stride()..rows.end * shape.stride()];
    assert!(query.row.quants.len() >= shape.padded(), "the query is too short");
    match instructions.set() {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => x86::dots_avx2(instructions, shape, planes, query.row.quants, out),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Vnni | InstructionSet::Avx512Amx => x86::dots_vnni(instructions, shape, planes, query.row.quants, out),
        _ => portable::dots(shape, planes, query.row.quants, out),
    }
    let zero = (shape.levels() as i32 - 1) * query.sum;
    assert_eq!(first % ApartRows::ROWS, 0, "rows that stand together are taken together");
    let apart = sketch.apart_rows.get(first / ApartRows::ROWS..).unwrap_or(&[]);
    run(instructions, Bounding { zero, query, terms: &sketch.terms[rows], apart, out });
}

impl Terms {
    /// Whether the sketch says anything of the row.
    pub(crate) fn is_sketched(&self) -> bool {
        self.lost.is_finite()
    }

    /// How far the product may be from the sketched one.
    #[inline(always)]
    pub(crate) fn margin(&self, query: &Query<'_>) -> f32 {
        self.lost * query.length + self.length * query.lost + self.apart_step * query.apart_lost
    }
}

/// Turns the whole numbers that the kernels left in the places of the results into bounds.
struct Bounding<'a> {
    /// What half a step below the middle makes of the query.
    zero: i32,
    query: &'a Query<'a>,
    terms: &'a [Terms],
    apart: &'a [ApartRows],
    out: &'a mut [f32],
}

impl Kernel for Bounding<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Self { zero, query, terms, apart, out } = self;
        for (out, terms) in out.iter_mut().zip(terms) {
            let dot = 2 * out.to_bits().cast_signed() - zero;
            *out = dot as f32 * (0.5 * terms.step * query.scale) + terms.margin(query);
        }
        for ((out, terms), apart) in out.chunks_mut(ApartRows::ROWS).zip(terms.chunks(ApartRows::ROWS)).zip(apart) {
            let mut dots = [0i32; ApartRows::ROWS];
            for (column, &x) in apart.0.iter().zip(&query.apart) {
                for (dot, &number) in dots.iter_mut().zip(column) {
                    *dot += number as i32 * x as i32;
                }
            }
            for ((out, terms), dot) in out.iter_mut().zip(terms).zip(dots) {
                *out += terms.apart_step * (dot as f32 * query.apart_scale);
            }
        }
    }
}

impl<'a> Query<'a> {
    /// f32 numbers of room that [`Query::new`] needs.
    pub(crate) fn room(columns: usize) -> usize {
        Layout::new(columns).width()
    }

    /// A row of numbers, from which those of columns that are kept apart are taken; `room` holds its bytes.
    pub(crate) fn new(instructions: Instructions, numbers: &mut [f32], apart: &[usize], room: &'a mut [f32]) -> Self {
        let (apart_scale, bytes) = take_apart(numbers, apart);
        let layout = Layout::new(numbers.len());
        layout.quantise(instructions, true, numbers, room);
        let row = layout.row(room);
        let scale = row.scales.first().copied().unwrap_or(0.0);
        let (mut square, mut lost) = (0.0, 0.0);
        for (&x, &q) in numbers.iter().zip(row.quants) {
            let (x, left) = (x as f64, x as f64 - q as f64 * scale as f64);
            (square, lost) = (square + x * x, lost + left * left);
        }
        // A byte is half a step away at most. Bytes of the one side times what is left out of the other, and the rest of both.
        let (most, root) = (127.5, (APART as f32).sqrt());
        let length = bytes.iter().map(|&q| (q as f32).powi(2)).sum::<f32>().sqrt() + 0.5 * root;
        Self {
            row,
            scale,
            sum: row.quants.iter().map(|&q| q as i32).sum(),
            length: square.sqrt() as f32 * ROUNDING,
            lost: lost.sqrt() as f32 * ROUNDING,
            apart_scale,
            apart: bytes,
            apart_lost: apart_scale * (0.5 * root * length + 0.5 * root * most * root) * ROUNDING,
        }
    }
}

/// The numbers of some columns in bytes with their scale; zeros take their places. A scale that is no number bounds nothing, as it should.
fn take_apart(row: &mut [f32], columns: &[usize]) -> (f32, Apart) {
    let mut numbers = [0.0; APART];
    for (number, &column) in numbers.iter_mut().zip(columns) {
        *number = std::mem::take(&mut row[column]);
    }
    let largest = numbers.iter().fold(0.0, |largest: f32, x| if x.is_nan() { f32::NAN } else { largest.max(x.abs()) });
    let scale = largest / 127.0;
    (scale, numbers.map(|x| (x / scale).round() as i8))
}

struct Sketching<'a> {
    shape: Shape,
    row: &'a [f32],
    /// Numbers of the row that stand for nothing.
    zeros: usize,
    planes: &'a mut [u8],
}

impl Kernel for Sketching<'_> {
    type Output = Terms;

    // Loops of fixed length over plain numbers, which are compiled for the caller's vectors.
    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> Terms {
        let Self { shape, row, zeros, planes } = self;
        let largest = fold(row, |largest, x| if x.abs() > largest { x.abs() } else { largest }).into_iter().fold(0.0, f32::max);
        planes.fill(0);
        if largest == 0.0 && row.iter().all(|&x| x == 0.0) {
            return Terms::default();
        }
        let unit = 1.0 / largest;
        let square: f32 = fold(row, |sum, x| sum + (x * unit) * (x * unit)).into_iter().sum();
        if !(1e-30..1e30).contains(&largest) || !square.is_finite() {
            return Terms { lost: f32::INFINITY, ..Terms::default() };
        }
        // The step that leaves out least of numbers that are spread like most weights, or the one that reaches the largest.
        let levels = shape.levels() as f32;
        let best = [0.335, 0.188][shape.extra];
        let step = (2.0 / levels).min(best * (square / shape.columns as f32).sqrt());
        let (per_step, mut lost) = (1.0 / step, [0.0f32; LANES]);
        let (nibbles, bits) = planes.split_at_mut(shape.blocks() * BLOCK / 2);
        for (block, numbers) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
            let mut codes = [0u8; BLOCK];
            for (codes, numbers) in codes.as_chunks_mut::<LANES>().0.iter_mut().zip(numbers.as_chunks::<LANES>().0) {
                for i in 0..LANES {
                    let x = numbers[i] * unit;
                    let code = (x * per_step + 0.5 * levels).floor().clamp(0.0, levels - 1.0);
                    let left = x - (code + 0.5 - 0.5 * levels) * step;
                    lost[i] += left * left;
                    // SAFETY: a finite number from 0 to 31.
                    codes[i] = unsafe { code.to_int_unchecked::<i32>() } as u8;
                }
            }
            for (i, byte) in nibbles[block * BLOCK / 2..][..BLOCK / 2].iter_mut().enumerate() {
                *byte = codes[i] >> shape.extra | (codes[i + BLOCK / 2] >> shape.extra) << 4;
            }
            if shape.extra == 1 {
                let bits = &mut bits[block * BLOCK / 8..][..BLOCK / 8];
                for (byte, codes) in bits.iter_mut().zip(codes.as_chunks::<8>().0) {
                    // Gathers the lowest bits of eight bytes into the uppermost byte.
                    let ones = u64::from_le_bytes(*codes) & 0x0101_0101_0101_0101;
                    *byte = (ones.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
                }
            }
        }
        let length = largest * square.sqrt() * ROUNDING;
        // Zeros are half a step away. Those that stand for nothing are no loss: nothing is multiplied with them.
        let nothing = zeros as f32 * 0.25 * step * step;
        let lost = largest * (lost.into_iter().sum::<f32>() - nothing).max(0.0).sqrt() * ROUNDING;
        Terms { step: step * largest, lost, length: length + lost, ..Terms::default() }
    }
}

/// Numbers that loops keep apart.
const LANES: usize = 16;

#[inline(always)]
fn fold(row: &[f32], with: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    for numbers in row.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            lanes[i] = with(lanes[i], numbers[i]);
        }
    }
    lanes
}
