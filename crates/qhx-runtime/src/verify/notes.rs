//! What stages made of some rows: kept while a case is played, and the few numbers that stand for it in an oracle.

use qhx_ir::{Checked, Dim, Name, Tap};
use std::collections::HashMap;

/// The stages whose tap has one row for each row of the call, in order. The others (the output head) show themselves in the logits.
pub fn row_stages(program: &Checked) -> Vec<Name> {
    let by_rows = |tap: &Name| program.value_type(tap).shape.first() == Some(&Dim::T);
    program.stages.iter().filter(|stage| stage.tap.as_ref().is_some_and(by_rows)).map(|stage| stage.name.clone()).collect()
}

/// What stages made of some rows of a session. A row that is computed again replaces what it was.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    rows: Vec<usize>,
    stages: HashMap<Name, Vec<Vec<f32>>>,
}

impl Notes {
    /// For these rows, rising, and these stages.
    pub fn new(stages: &[Name], rows: &[usize]) -> Self {
        let stages = stages.iter().map(|stage| (stage.clone(), vec![Vec::new(); rows.len()])).collect();
        Self { rows: rows.to_vec(), stages }
    }

    /// The rows.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Takes what it wants of a tap of a call whose first row is `first`.
    pub fn take(&mut self, first: usize, tap: Tap<'_>) {
        let Some(noted) = self.stages.get_mut(tap.stage) else { return };
        let count = tap.shape.first().copied().unwrap_or(0).max(1);
        let width = tap.values.len() / count;
        for (row, values) in self.rows.iter().zip(noted) {
            if (first..first + count).contains(row) {
                values.clear();
                values.extend_from_slice(&tap.values[(row - first) * width..][..width]);
            }
        }
    }

    /// What a stage made of the noted rows; a row that was not computed is empty.
    pub fn stage(&self, stage: &str) -> &[Vec<f32>] {
        self.stages.get(stage).map_or(&[], Vec::as_slice)
    }

    /// Three numbers for each row: see [`check_numbers`].
    pub fn numbers(&self, stage: &str) -> Vec<f32> {
        self.stage(stage).iter().flat_map(|row| check_numbers(stage, row)).collect()
    }
}

/// A row in three numbers: its norm and two sums with random signs that depend on the stage's name alone.
pub fn check_numbers(stage: &str, row: &[f32]) -> [f32; 3] {
    let key = super::sums::key(stage);
    let norm = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    let sum = |which: u64| {
        let sign = |i: usize| if super::sums::signs(key ^ which, i as u64 / 64) >> (i % 64) & 1 == 1 { -1.0 } else { 1.0 };
        row.iter().enumerate().map(|(i, &x)| f64::from(x) * sign(i)).sum::<f64>()
    };
    [norm as f32, sum(1) as f32, sum(2) as f32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_in_any_call() {
        let mut notes = Notes::new(&["a".into()], &[1, 4]);
        notes.take(0, Tap { stage: "a", shape: &[3, 2], values: &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0] });
        notes.take(0, Tap { stage: "other", shape: &[3, 1], values: &[9.0; 3] });
        assert_eq!(notes.stage("a"), [vec![2.0, 3.0], vec![]]);
        notes.take(3, Tap { stage: "a", shape: &[2, 2], values: &[6.0, 7.0, 8.0, 9.0] });
        notes.take(1, Tap { stage: "a", shape: &[1, 2], values: &[0.5, 0.5] });
        assert_eq!(notes.stage("a"), [vec![0.5, 0.5], vec![8.0, 9.0]]);
        assert_eq!(notes.numbers("a").len(), 6);
    }

    #[test]
    fn every_number_of_a_row_counts() {
        let row: Vec<f32> = (0..100).map(|i| (i as f32).sin() + 2.0).collect();
        let whole = check_numbers("s", &row);
        for i in 0..100 {
            let mut other = row.clone();
            other[i] = -other[i];
            let found = check_numbers("s", &other);
            assert!((found[1] - whole[1]).abs() > 1.0 && (found[2] - whole[2]).abs() > 1.0, "{i}");
        }
        assert_ne!(check_numbers("t", &row)[1], whole[1]);
    }
}
