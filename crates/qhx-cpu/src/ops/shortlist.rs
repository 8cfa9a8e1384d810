//! The largest of a product's numbers without reading the whole matrix: a sketch of it bounds every row's number, and only rows that can still be the largest are multiplied.
//!
//! What is multiplied is what the plain product gives, bit for bit; all other numbers become −∞.

use super::{
    Run,
    linear::{Prepared, product},
};
use crate::{
    kernels::sketch::{self, APART, ApartRows, Query, Shape, Sketch, Terms},
    machine,
    matrix::Matrix,
    work::{Chunks, Tiles, for_each, for_each_here},
};
use qhx_ir::AlignedBytes;
use std::sync::{
    Mutex, OnceLock, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

/// A matrix that only the largest number of its product is wanted of, now and then.
#[derive(Debug)]
pub(crate) struct Shortlist {
    /// Of the softcap that the product goes through afterwards.
    cap: Option<f32>,
    /// Made after some calls; nothing where there is no memory for it.
    sketch: OnceLock<Option<Sketch>>,
    seen: Mutex<Seen>,
    /// Calls that go the plain way, because the sketch told little in the last one.
    pause: AtomicUsize,
}

/// What was seen of the rows, and room for the present one.
#[derive(Debug, Default)]
struct Seen {
    rows: usize,
    /// Σ squares for each column.
    squares: Vec<f32>,
    numbers: Vec<f32>,
    room: Vec<f32>,
    /// For each unit of the present call the row that the sketch takes for the largest, and its number.
    promising: Vec<(usize, f32)>,
}

/// Rows that are seen before the sketch is made: they show which columns are to be kept apart, and a short answer needs none.
const SEEN: usize = 8;
/// Calls without the sketch after one in which it spared nothing.
const PAUSE: usize = 8;
/// How many times longer a row takes that is read alone.
const SCATTERED: usize = 4;
/// Bytes of the sketch that make up a unit.
const UNIT_BYTES: usize = 49152;

impl Shortlist {
    /// For a product that goes through a softcap of `cap`, or nothing, before the largest is looked for.
    pub(crate) fn new(cap: Option<f32>) -> Self {
        Self { cap, sketch: OnceLock::new(), seen: Mutex::default(), pause: AtomicUsize::new(0) }
    }

    /// Scratch numbers that [`Shortlist::run`] needs beside those of the product.
    pub(crate) fn scratch(weight: &Matrix) -> usize {
        Shape::new(weight.columns).padded()
    }

    /// Bytes that it holds.
    pub(crate) fn bytes(&self) -> usize {
        self.sketch.get().and_then(Option::as_ref).map_or(0, bytes)
    }

    /// Fills `out`, one row, so that its largest number is in the place where the plain product has it, and says whether it did.
    pub(crate) fn run(&self, run: &Run<'_>, weight: &Matrix, x: &Prepared<'_>, out: &mut [f32], scratch: &mut [f32]) -> bool {
        if self.pause.load(Ordering::Relaxed) > 0 {
            self.pause.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let Seen { rows, squares, numbers, room, promising } = &mut *seen;
        numbers.resize(weight.columns, 0.0);
        room.resize(Query::room(weight.columns), 0.0);
        read_row(x, numbers);
        if *rows < SEEN {
            *rows += 1;
            squares.resize(weight.columns, 0.0);
            squares.iter_mut().zip(&*numbers).for_each(|(sum, x)| *sum += x * x);
            return false;
        }
        let Some(sketch) = self.sketch.get_or_init(|| make(run, weight, outliers(squares), scratch)) else { return false };
        let moved: f64 = sketch.common.iter().zip(&*numbers).map(|(&a, &b)| a as f64 * b as f64).sum();
        let square: f64 = numbers.iter().map(|&x| x as f64 * x as f64).sum();
        let query = Query::new(run.instructions, numbers, &sketch.apart, room);
        let unit = UNIT_BYTES.div_ceil(sketch.shape.stride()).next_multiple_of(ApartRows::ROWS);
        promising.clear();
        promising.resize(out.len().div_ceil(unit), (0, f32::NEG_INFINITY));
        for_each(run.pool, (Chunks::new(out, unit), Chunks::new(promising, 1)), &mut [], |number, (part, promising), _| {
            sketch::bounds(run.instructions, sketch, number * unit, &query, part);
            // What the sketch itself takes for the largest is seldom far from it.
            for (row, (bound, terms)) in part.iter().zip(&sketch.terms[number * unit..]).enumerate() {
                let estimate = bound - terms.margin(&query);
                if estimate > promising[0].1 {
                    promising[0] = (number * unit + row, estimate);
                }
            }
        });
        let (promising, _) = promising.iter().fold((0, f32::NEG_INFINITY), |best, unit| if unit.1 > best.1 { *unit } else { best });
        let mut reached = [0.0];
        for_each_here(Tiles::new(&mut reached, 1, 1, 1), scratch, |_, mut tile, scratch| {
            product(run, weight, promising, x, &mut tile, scratch);
        });
        // Bounds are of the rows without what they have in common, and of products without their rounding.
        let (reached, length) = (self.before_cap(reached[0]) as f64, square.sqrt() + 1e-30);
        let size = reached.abs() + moved.abs() + sketch.longest as f64 * length;
        let enough = (reached - moved - sketch.shape.rounding() as f64 * size) as f32;
        let left = AtomicUsize::new(0);
        for_each(run.pool, Tiles::new(out, weight.rows, 1, unit), scratch, |_, mut tile, scratch| {
            let mut at = 0;
            while at < tile.columns {
                let row = &mut tile.row(0)[at..];
                // Nearly all are spared, so they are looked at together. A bound that is not a number bounds nothing.
                if let Some(together) = row.first_chunk_mut::<16>()
                    && together.iter().fold(true, |all, &bound| all & (bound < enough))
                {
                    *together = [f32::NEG_INFINITY; 16];
                    at += 16;
                    continue;
                }
                let spared = row.iter().take_while(|&&bound| bound < enough).count();
                row[..spared].fill(f32::NEG_INFINITY);
                at += spared;
                let count = row[spared..].iter().position(|&bound| bound < enough).unwrap_or(row.len() - spared);
                product(run, weight, 0, x, &mut tile.columns_from(at, count), scratch);
                left.fetch_add(count, Ordering::Relaxed);
                at += count;
            }
        });
        let left = (left.into_inner() + 1) * weight.bytes_per_row();
        run.reads(bytes(sketch) + left);
        if bytes(sketch) + SCATTERED * left > weight.rows * weight.bytes_per_row() {
            self.pause.store(PAUSE, Ordering::Relaxed);
        }
        true
    }

    /// What is smaller than this is also smaller than `reached` when both have gone through the softcap, whose rounding may make unequal numbers equal.
    fn before_cap(&self, reached: f32) -> f32 {
        let Some(cap) = self.cap.map(f64::from) else { return reached };
        let capped = (reached as f64 / cap).tanh();
        let below = (capped - capped.abs() * 4e-6 - 1e-30).atanh() * cap;
        // Beyond −1 there is nothing.
        if below.is_nan() { f32::NEG_INFINITY } else { (below as f32).min(reached) }
    }
}

/// Bytes of a sketch: all are read in a call.
fn bytes(sketch: &Sketch) -> usize {
    sketch.planes.len() + size_of_val(&sketch.terms[..]) + size_of_val(&sketch.apart_rows[..])
}

/// The columns whose numbers are far larger than the others', where there are such.
fn outliers(squares: &[f32]) -> Vec<usize> {
    let mut columns: Vec<usize> = (0..squares.len()).collect();
    columns.sort_by(|&a, &b| squares[b].total_cmp(&squares[a]));
    let total: f32 = squares.iter().sum();
    let large: f32 = columns.iter().take(APART).map(|&column| squares[column]).sum();
    // Half as much as all others, though they are few.
    let worth = squares.len() >= 8 * APART && large > total / 3.0;
    columns.truncate(if worth { APART } else { 0 });
    columns
}

fn make(run: &Run<'_>, weight: &Matrix, apart: Vec<usize>, scratch: &mut [f32]) -> Option<Sketch> {
    let shape = Shape::new(weight.columns);
    let bytes = weight.rows.checked_mul(shape.stride())?;
    // A machine that is short of memory reads the matrix, which costs none of its own.
    if machine::memory().is_some_and(|memory| memory.available / 4 < bytes as u64) {
        return None;
    }
    let common = common(run, weight, scratch);
    let mut planes = AlignedBytes::zeroed(bytes);
    let mut terms = vec![Terms::default(); weight.rows];
    let unit = 64;
    let mut longest = vec![0.0f32; weight.rows.div_ceil(unit)];
    let mut apart_rows = vec![ApartRows::ZERO; weight.rows.div_ceil(ApartRows::ROWS)];
    let cuts = (
        (Chunks::new(planes.as_mut(), unit * shape.stride()), Chunks::new(&mut terms, unit)),
        (Chunks::new(&mut apart_rows, unit / ApartRows::ROWS), Chunks::new(&mut longest, 1)),
    );
    for_each(run.pool, cuts, scratch, |number, ((planes, terms), (apart_rows, longest)), scratch| {
        let numbers = &mut scratch[..shape.padded()];
        for (i, (planes, terms)) in planes.chunks_mut(shape.stride()).zip(terms).enumerate() {
            weight.decode(run.instructions, number * unit + i, 0, &mut numbers[..weight.columns]);
            let square: f64 = numbers[..weight.columns].iter().map(|&x| x as f64 * x as f64).sum();
            numbers.iter_mut().zip(&common).for_each(|(x, common)| *x -= common);
            numbers[weight.columns..].fill(0.0);
            let (made, apart_row) = shape.sketch(run.instructions, numbers, &apart, planes);
            *terms = made;
            apart_rows[i / ApartRows::ROWS].set(i % ApartRows::ROWS, &apart_row);
            if terms.is_sketched() {
                longest[0] = longest[0].max(square.sqrt() as f32);
            }
        }
    });
    let longest = 1.001 * longest.into_iter().fold(0.0, f32::max) + common.iter().map(|x| x * x).sum::<f32>().sqrt();
    if apart.is_empty() {
        apart_rows = Vec::new();
    }
    Some(Sketch { shape, common, apart, planes: planes.into(), terms, apart_rows, longest })
}

/// The mean of some of the rows: any numbers would do, and these make the rows shortest.
fn common(run: &Run<'_>, weight: &Matrix, scratch: &mut [f32]) -> Vec<f32> {
    let (row, mut sums) = (&mut scratch[..weight.columns], vec![0.0; weight.columns]);
    let every = (weight.rows / 1024).max(1);
    let mut count = 0;
    for number in (0..weight.rows).step_by(every) {
        weight.decode(run.instructions, number, 0, row);
        if row.iter().all(|x| x.abs() < 1e30) {
            sums.iter_mut().zip(&*row).for_each(|(sum, x)| *sum += x);
            count += 1;
        }
    }
    sums.iter_mut().for_each(|sum| *sum /= count.max(1) as f32);
    sums
}

/// The numbers of the one row of `x`.
fn read_row(x: &Prepared<'_>, numbers: &mut [f32]) {
    match x {
        Prepared::Integer(rows, _) => {
            let row = rows.row(0);
            numbers.iter_mut().enumerate().for_each(|(i, number)| *number = row.quants[i] as f32 * row.scales[i / 32]);
        }
        Prepared::Float(rows) => numbers.copy_from_slice(&rows.row(0)[..numbers.len()]),
    }
}
