//! Work on rows that do not depend on each other.

/// Calls `work` with every row, on several threads. Who does a row does not change what it becomes.
pub(crate) fn for_each_row(rows: &mut [f32], columns: usize, threads: usize, work: impl Fn(&mut [f32]) + Sync) {
    let share = (rows.len() / columns).div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        for part in rows.chunks_mut(share * columns) {
            scope.spawn(|| part.chunks_exact_mut(columns).for_each(&work));
        }
    });
}
