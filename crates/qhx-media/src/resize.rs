//! Antialiased bicubic scaling of 8-bit RGB, bit for bit as the models' preprocessing does it.
//!
//! Across first, then down, 8 bits in between; an axis whose length stays is left alone. Weights are integers of at most 15 bits and their common
//! shift; both passes add up `weight · level` in 32 bits, round, shift and clamp. Both run over long runs of neighbouring numbers, which compilers
//! turn into vector code: the pass down takes whole rows, the pass across first turns a few rows into columns of `ROWS` numbers.
//!
//! Work is cut into bands of output rows. A band scales only the input rows that it needs, so that memory stays bounded whatever the image's shape.

use std::{num::NonZero, thread};

/// Input rows that go through the pass across together.
const ROWS: usize = 16;
/// Channels.
const RGB: usize = 3;
/// Bytes between the two passes that a band aims at.
const BAND_BYTES: usize = 4 << 20;
/// Output bytes from which a second thread pays.
const PARALLEL_BYTES: usize = 1 << 18;
/// More threads only wait for memory.
const MOST_THREADS: usize = 8;

/// `height · width · 3` levels from `from` (rows, columns) to `to`. The sizes are not zero.
pub(super) fn bicubic(rgb: &[u8], from: (usize, usize), to: (usize, usize)) -> Vec<u8> {
    assert_eq!(rgb.len(), from.0 * from.1 * RGB);
    if from == to {
        return rgb.to_vec();
    }
    let scaler = Scaler {
        rgb,
        from,
        width: to.1,
        across: (from.1 != to.1).then(|| Axis::new(from.1, to.1)),
        down: (from.0 != to.0).then(|| Axis::new(from.0, to.0)),
    };
    let mut output = vec![0; to.0 * to.1 * RGB];
    let is_small = output.len() < PARALLEL_BYTES;
    let threads = if is_small { 1 } else { thread::available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS) };
    let band = scaler.band_rows(to.0, threads) * to.1 * RGB;
    // Bands are dealt in turn: all are of one height, so that nobody waits long.
    let mut hands: Vec<Vec<(usize, &mut [u8])>> = (0..threads).map(|_| Vec::new()).collect();
    for (number, rows) in output.chunks_mut(band).enumerate() {
        let hand = number % hands.len();
        hands[hand].push((number * band / (to.1 * RGB), rows));
    }
    thread::scope(|scope| {
        let mut hands = hands.into_iter();
        let mine = hands.next();
        for hand in hands.filter(|hand| !hand.is_empty()) {
            scope.spawn(|| hand.into_iter().for_each(|(first, rows)| scaler.band(first, rows)));
        }
        mine.into_iter().flatten().for_each(|(first, rows)| scaler.band(first, rows));
    });
    output
}

struct Scaler<'a> {
    rgb: &'a [u8],
    from: (usize, usize),
    width: usize,
    across: Option<Axis>,
    down: Option<Axis>,
}

impl Scaler<'_> {
    /// Output rows of a band: each thread has one, and what its input rows become after the first pass is not much.
    fn band_rows(&self, height: usize, threads: usize) -> usize {
        let input_rows = (BAND_BYTES / (self.width * RGB)).max(1);
        (input_rows * height / self.from.0).clamp(1, height.div_ceil(threads))
    }

    /// Output rows from `first`.
    fn band(&self, first: usize, output: &mut [u8]) {
        let count = output.len() / (self.width * RGB);
        let Some(down) = &self.down else {
            return self.rows_across(first, output);
        };
        let taps = &down.taps[first..first + count];
        let lowest = taps.iter().map(|t| t.first).min().unwrap_or(0);
        let end = taps.iter().map(|t| t.first + t.count).max().unwrap_or(0);
        let scaled;
        let input = if self.across.is_some() {
            let mut rows = vec![0; (end - lowest) * self.width * RGB];
            self.rows_across(lowest, &mut rows);
            scaled = rows;
            &scaled[..]
        } else {
            &self.rgb[lowest * self.width * RGB..end * self.width * RGB]
        };
        let row = self.width * RGB;
        for (taps, output) in taps.iter().zip(output.chunks_exact_mut(row)) {
            let start = taps.first - lowest;
            weigh_rows(&input[start * row..(start + taps.count) * row], down.weights(taps), down.shift, output);
        }
    }

    /// Input rows from `first`, scaled across.
    fn rows_across(&self, first: usize, output: &mut [u8]) {
        let (from, to) = (self.from.1 * RGB, self.width * RGB);
        let count = output.len() / to;
        let input = &self.rgb[first * from..(first + count) * from];
        let Some(across) = &self.across else {
            output.copy_from_slice(input);
            return;
        };
        let mut columns = vec![0; from * ROWS];
        for (input, output) in input.chunks(from * ROWS).zip(output.chunks_mut(to * ROWS)) {
            for (y, row) in input.chunks_exact(from).enumerate() {
                for (x, &level) in row.iter().enumerate() {
                    columns[x * ROWS + y] = level;
                }
            }
            let rows = output.len() / to;
            for (x, taps) in across.taps.iter().enumerate() {
                let mut pixel = [0; RGB * ROWS];
                let column = RGB * ROWS;
                let run = &columns[taps.first * column..(taps.first + taps.count) * column];
                weigh_rows(run, across.weights(taps), across.shift, &mut pixel);
                for (channel, levels) in pixel.chunks_exact(ROWS).enumerate() {
                    for (y, &level) in levels[..rows].iter().enumerate() {
                        output[y * to + x * RGB + channel] = level;
                    }
                }
            }
        }
    }
}

/// Each number of `output` is the weighted sum of those above it in the rows of `input`, which are as long.
fn weigh_rows(input: &[u8], weights: &[i16], shift: u32, output: &mut [u8]) {
    const RUN: usize = 48;
    let row = output.len();
    let half = 1 << (shift - 1);
    let mut runs = output.chunks_exact_mut(RUN);
    for (number, output) in runs.by_ref().enumerate() {
        let mut sums = [half; RUN];
        for (&weight, row) in weights.iter().zip(input.chunks_exact(row)) {
            let levels: &[u8; RUN] = row[number * RUN..].first_chunk().expect("the run lies in the row");
            for (sum, &level) in sums.iter_mut().zip(levels) {
                *sum += i32::from(weight) * i32::from(level);
            }
        }
        for (output, sum) in output.iter_mut().zip(sums) {
            *output = (sum >> shift).clamp(0, 255) as u8;
        }
    }
    let rest = runs.into_remainder();
    let start = row - rest.len();
    for (i, output) in rest.iter_mut().enumerate() {
        let sum: i32 = weights.iter().zip(input.chunks_exact(row)).map(|(&w, row)| i32::from(w) * i32::from(row[start + i])).sum();
        *output = ((half + sum) >> shift).clamp(0, 255) as u8;
    }
}

/// Which input positions make each output position of an axis, and by how much.
struct Axis {
    taps: Vec<Taps>,
    /// Of all positions, in order.
    weights: Vec<i16>,
    /// A weight of 1 is `1 << shift`.
    shift: u32,
}

struct Taps {
    first: usize,
    count: usize,
    /// Where the weights begin.
    weights: usize,
}

impl Axis {
    fn new(from: usize, to: usize) -> Self {
        let scale = from as f64 / to as f64;
        let stretch = scale.max(1.0);
        let support = 2.0 * stretch;
        let (mut taps, mut exact) = (Vec::with_capacity(to), Vec::new());
        for position in 0..to {
            let centre = scale * (position as f64 + 0.5);
            let first = ((centre - support + 0.5) as i64).max(0) as usize;
            let end = ((centre + support + 0.5) as usize).min(from);
            let start = exact.len();
            exact.extend((first..end).map(|at| cubic((at as f64 - centre + 0.5) / stretch)));
            let sum: f64 = exact[start..].iter().sum();
            exact[start..].iter_mut().for_each(|weight| *weight /= sum);
            taps.push(Taps { first, count: end - first, weights: start });
        }
        let largest = exact.iter().copied().fold(0.0, f64::max);
        let mut shift = 0;
        while shift < 22 && (0.5 + largest * f64::from(1 << (shift + 1))) < 32768.0 {
            shift += 1;
        }
        let unit = f64::from(1 << shift);
        let weights = exact.iter().map(|weight| (weight * unit + 0.5_f64.copysign(*weight)) as i16).collect();
        Self { taps, weights, shift }
    }

    fn weights(&self, taps: &Taps) -> &[i16] {
        &self.weights[taps.weights..taps.weights + taps.count]
    }
}

/// The cubic convolution kernel with a slope of −½ at 1.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(height: usize, width: usize) -> Vec<u8> {
        (0..height * width * RGB).map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 13) as u8).collect()
    }

    /// One number after the other, without bands, runs or threads.
    fn plain(rgb: &[u8], from: (usize, usize), to: (usize, usize)) -> Vec<u8> {
        let weigh = |axis: &Axis, at: usize, level: &dyn Fn(usize) -> u8| {
            let taps = &axis.taps[at];
            let sum: i32 = axis.weights(taps).iter().enumerate().map(|(i, &w)| i32::from(w) * i32::from(level(taps.first + i))).sum();
            ((sum + (1 << (axis.shift - 1))) >> axis.shift).clamp(0, 255) as u8
        };
        let mut middle = rgb.to_vec();
        if from.1 != to.1 {
            let axis = Axis::new(from.1, to.1);
            middle.clear();
            for i in 0..from.0 * to.1 * RGB {
                let (y, x, c) = (i / RGB / to.1, i / RGB % to.1, i % RGB);
                middle.push(weigh(&axis, x, &|at| rgb[(y * from.1 + at) * RGB + c]));
            }
        }
        if from.0 == to.0 {
            return middle;
        }
        let axis = Axis::new(from.0, to.0);
        let row = to.1 * RGB;
        (0..to.0 * row).map(|i| weigh(&axis, i / row, &|at| middle[at * row + i % row])).collect()
    }

    #[test]
    fn bands_runs_and_threads_change_nothing() {
        let sizes = [
            ((1, 1), (32, 32)),
            ((37, 41), (96, 64)),
            ((700, 33), (32, 700)),
            ((40, 900), (400, 900)),
            ((3, 17), (3, 16)),
            ((900, 700), (512, 416)),
        ];
        for (from, to) in sizes {
            let rgb = noise(from.0, from.1);
            assert!(bicubic(&rgb, from, to) == plain(&rgb, from, to), "{from:?} to {to:?}");
        }
    }

    #[test]
    fn one_colour_stays_that_colour() {
        for (from, to) in [((5, 7), (64, 32)), ((640, 480), (32, 64)), ((1, 5000), (48, 480))] {
            let rgb = [10, 200, 255].repeat(from.0 * from.1);
            assert!(bicubic(&rgb, from, to) == [10, 200, 255].repeat(to.0 * to.1), "{from:?} to {to:?}");
        }
    }

    #[test]
    fn memory_between_the_passes_is_bounded_for_strips() {
        let scaler = Scaler { rgb: &[], from: (100_000_000, 1), width: 48, across: None, down: None };
        assert_eq!(scaler.band_rows(13_440, 2), 3, "a few output rows of many input rows each");
        let scaler = Scaler { rgb: &[], from: (1, 1), width: 13_440, across: None, down: None };
        assert_eq!((scaler.band_rows(48, 1), scaler.band_rows(48, 5)), (48, 10));
    }
}
