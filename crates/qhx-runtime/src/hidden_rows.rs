//! What a stage of the text program made of the last rows of a sequence, for a program that drafts.

/// So many rows are kept at least, as far as they were computed; at most twice as many.
pub(crate) const KEPT_ROWS: usize = 256;

/// Consecutive rows up to the last that was computed.
#[derive(Debug)]
pub(crate) struct HiddenRows {
    width: usize,
    /// The number of the first.
    first: usize,
    values: Vec<f32>,
}

impl HiddenRows {
    /// None yet, of so many numbers each.
    pub(crate) fn new(width: usize) -> Self {
        Self { width: width.max(1), first: 0, values: Vec::new() }
    }

    pub(crate) fn first(&self) -> usize {
        self.first
    }

    /// Behind the last.
    pub(crate) fn end(&self) -> usize {
        self.first + self.values.len() / self.width
    }

    /// The rows from number `from` on, which must be there.
    pub(crate) fn from(&self, from: usize) -> &[f32] {
        &self.values[(from - self.first) * self.width..]
    }

    /// Rows from number `first` on were computed; those that were there from `first` on are forgotten, and all where some between are missing.
    pub(crate) fn put(&mut self, first: usize, rows: &[f32]) {
        let skipped = (rows.len() / self.width).saturating_sub(2 * KEPT_ROWS);
        let (first, rows) = (first + skipped, &rows[skipped * self.width..]);
        if (self.first..=self.end()).contains(&first) {
            self.values.truncate((first - self.first) * self.width);
        } else {
            (self.first, self.values) = (first, Vec::new());
        }
        self.values.extend_from_slice(rows);
        if self.end() - self.first > 2 * KEPT_ROWS {
            let old = self.end() - KEPT_ROWS - self.first;
            self.values.drain(..old * self.width);
            self.first += old;
        }
    }

    /// Forgets the rows from number `len` on.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.values.truncate(len.saturating_sub(self.first) * self.width);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_rows_of_what_was_computed() {
        let mut rows = HiddenRows::new(2);
        let numbered = |range: std::ops::Range<usize>| range.flat_map(|n| [n as f32; 2]).collect::<Vec<_>>();
        rows.put(3, &numbered(3..7));
        assert_eq!((rows.first(), rows.end(), rows.from(5)), (3, 7, &numbered(5..7)[..]));
        rows.put(7, &numbered(7..9));
        rows.truncate(8);
        assert_eq!((rows.first(), rows.end()), (3, 8));
        // Computed again from there on.
        rows.put(4, &[9.0, 9.0]);
        assert_eq!((rows.from(3), rows.end()), (&[3.0, 3.0, 9.0, 9.0][..], 5));
        // Not what follows.
        rows.put(6, &numbered(6..7));
        assert_eq!((rows.first(), rows.end()), (6, 7));
        for end in (10..3000).step_by(10) {
            rows.put(end - 3, &numbered(end - 3..end + 7));
            let there = rows.end() - rows.first();
            assert_eq!((rows.end(), rows.from(end)), (end + 7, &numbered(end..end + 7)[..]));
            assert!(there <= 2 * KEPT_ROWS && (there >= KEPT_ROWS || end < KEPT_ROWS), "{there}");
        }
        rows.put(3007, &numbered(3007..9000));
        assert_eq!((rows.end(), rows.from(8999)), (9000, &[8999.0, 8999.0][..]));
        rows.truncate(0);
        assert_eq!(rows.end(), rows.first());
    }
}
