//! What steps of so many rows take on a device, measured while it works.

use std::time::Duration;

/// Rows up to which steps are told apart.
const MOST_ROWS: usize = 64;
/// How much a new measurement counts.
const WEIGHT: f64 = 0.2;
/// Measurements of which the smallest counts: the first step of its kind finds nothing at hand, and takes longer than those to come.
const FIRST: u8 = 3;
/// Steps of one row that must be measured before drafts are weighed against them.
const KNOWN_FROM: u8 = 2;
/// What one more row is thought to take before it was measured, as a share of a step.
const GUESSED_SLOPE: f64 = 0.15;

/// The time of decode steps by their number of rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowCosts {
    /// In seconds; the first is of one row.
    measured: [Option<f64>; MOST_ROWS],
    /// How often, as far as it matters.
    counts: [u8; MOST_ROWS],
}

impl Default for RowCosts {
    fn default() -> Self {
        Self { measured: [None; MOST_ROWS], counts: [0; MOST_ROWS] }
    }
}

impl RowCosts {
    /// A step of so many rows took so long.
    pub(crate) fn learn(&mut self, rows: usize, time: Duration) {
        if !(1..=MOST_ROWS).contains(&rows) {
            return;
        }
        let time = time.as_secs_f64();
        let (known, count) = (&mut self.measured[rows - 1], &mut self.counts[rows - 1]);
        *count = count.saturating_add(1);
        *known = Some(match *known {
            Some(least) if *count <= FIRST => least.min(time),
            // A step that was held up by something else says little.
            Some(mean) => mean + WEIGHT * (time.min(2.0 * mean) - mean),
            None => time,
        });
    }

    /// Whether enough is known of plain steps to weigh others against them: those of any number of rows, where several answers are computed at once.
    pub(crate) fn are_known(&self) -> bool {
        self.counts.iter().any(|&count| count >= KNOWN_FROM)
    }

    /// About how long a step of so many rows takes, in seconds; none before anything was measured.
    pub(crate) fn of(&self, rows: usize) -> Option<f64> {
        let known = |rows: usize| Some((rows, (*self.measured.get(rows.checked_sub(1)?)?)?));
        let below = (1..=rows).rev().find_map(known);
        let above = (rows..=MOST_ROWS).find_map(known);
        match (below, above) {
            (Some((_, time)), Some((at, _))) if at == rows => Some(time),
            (Some((low, less)), Some((high, more))) => {
                let part = (rows - low) as f64 / (high - low) as f64;
                // More rows never take less: a smaller number is an old one.
                Some(less + part * (more - less).max(0.0))
            }
            (Some((low, less)), None) => Some(less * (1.0 + GUESSED_SLOPE * (rows - low) as f64)),
            (None, Some((_, more))) => Some(more),
            (None, None) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_lies_between_what_was() {
        let mut costs = RowCosts::default();
        assert_eq!((costs.of(1), costs.are_known()), (None, false));
        // The first one is slow.
        costs.learn(1, Duration::from_millis(300));
        assert_eq!((costs.of(1), costs.are_known()), (Some(0.3), false));
        costs.learn(1, Duration::from_millis(100));
        assert_eq!((costs.of(1), costs.are_known()), (Some(0.1), true));
        costs.learn(1, Duration::from_millis(120));
        assert_eq!(costs.of(1), Some(0.1));
        assert!((costs.of(5).unwrap() - 0.16).abs() < 1e-9);
        costs.learn(5, Duration::from_millis(200));
        assert!((costs.of(3).unwrap() - 0.15).abs() < 1e-9 && costs.of(5) == Some(0.2));
        // One step that took a hundred times as long.
        costs.learn(1, Duration::from_secs(10));
        assert!(costs.of(1).unwrap() < 0.13);
        costs.learn(1000, Duration::from_secs(10));
        assert!(costs.of(1000).unwrap() > 0.2);
    }
}
