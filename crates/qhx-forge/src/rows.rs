//! Work on rows that do not depend on each other. Who does a row does not change what it becomes.

use std::{panic::resume_unwind, thread};

/// Fewer numbers than this are not worth a second thread.
const WORTH_A_THREAD: usize = 1 << 15;

/// What `work` makes of each part, a thread for each.
pub(crate) fn side_by_side<P: Send, R: Send>(parts: impl ExactSizeIterator<Item = P>, work: impl Fn(P) -> R + Sync) -> Vec<R> {
    if parts.len() <= 1 {
        return parts.map(work).collect();
    }
    let work = &work;
    thread::scope(|scope| {
        let running: Vec<_> = parts.map(|part| scope.spawn(move || work(part))).collect();
        running.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

/// Calls `work` with whole rows and the number of the first of them, on several threads.
pub(crate) fn for_each_part(rows: &mut [f32], columns: usize, threads: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    let share = rows_of_a_part(rows.len(), columns, threads);
    side_by_side(rows.chunks_mut(share * columns.max(1)).enumerate(), |(number, part)| work(number * share, part));
}

/// Calls `work` with every row, on several threads.
pub(crate) fn for_each_row(rows: &mut [f32], columns: usize, threads: usize, work: impl Fn(&mut [f32]) + Sync) {
    for_each_part(rows, columns, threads, |_, part| part.chunks_exact_mut(columns).for_each(&work));
}

/// Rows that each thread gets of so many numbers.
pub(crate) fn rows_of_a_part(numbers: usize, columns: usize, threads: usize) -> usize {
    let threads = threads.min(numbers / WORTH_A_THREAD).max(1);
    (numbers / columns.max(1)).div_ceil(threads).max(1)
}

/// Columns as rows. Tiles keep both sides in the cache.
pub(crate) fn transpose(columns: usize, rows: &[&[f32]], threads: usize) -> Vec<f32> {
    const TILE: usize = 16;
    let count = rows.len();
    let mut out = vec![0.0; columns * count];
    for_each_part(&mut out, count, threads, |first_column, out| {
        let own = out.len() / count.max(1);
        for first in (0..count).step_by(TILE) {
            for column in (0..own).step_by(TILE) {
                for c in column..own.min(column + TILE) {
                    let to = &mut out[c * count + first..(c * count + count).min(c * count + first + TILE)];
                    to.iter_mut().zip(&rows[first..]).for_each(|(to, row)| *to = row[first_column + c]);
                }
            }
        }
    });
    out
}
