//! What stages made of some rows: kept while a case is played, and the few numbers that stand for it in an oracle.

use crate::{Cancel, Error, Medium, Model, placement::tower_stage};
use qhx_bundle::manifest::TEXT_PROGRAM;
use qhx_ir::{Checked, Dim, Name, Tap};
use std::collections::{BTreeSet, HashMap};

/// The stages whose tap has one row for each row of the call, in order. The others (the output head) show themselves in the logits.
pub fn row_stages(program: &Checked) -> Vec<Name> {
    let by_rows = |tap: &Name| program.value_type(tap).shape.first() == Some(&Dim::T);
    program.stages.iter().filter(|stage| stage.tap.as_ref().is_some_and(by_rows)).map(|stage| stage.name.clone()).collect()
}

/// The stages of a tower that show what they made, in order, as people call them.
pub fn tower_stages(program: &Checked) -> Vec<Name> {
    program.stages.iter().filter(|stage| stage.tap.is_some()).map(|stage| tower_stage(program, &stage.name).as_str().into()).collect()
}

/// The stages whose rows programs keep without their mean, as people call them: see [`qhx_ir::Stage::centred`].
pub fn centred_stages<'p>(programs: impl IntoIterator<Item = &'p Checked>) -> BTreeSet<String> {
    let name = |program: &Checked, stage: &Name| match &*program.name {
        TEXT_PROGRAM => stage.to_string(),
        _ => tower_stage(program, stage),
    };
    let of = |program: &'p Checked| program.stages.iter().filter(|stage| stage.centred).map(move |stage| name(program, &stage.name));
    programs.into_iter().flat_map(of).collect()
}

/// A row without its mean, to be compared with one of a stage of [`centred_stages`].
pub fn centred(row: &[f32]) -> Vec<f32> {
    let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / row.len() as f64;
    row.iter().map(|&x| (f64::from(x) - mean) as f32).collect()
}

/// Encodes a medium, whatever was made of it before, and notes what every stage of its tower made of some rows of the call.
pub fn encode_noted(model: &Model, medium: &Medium, rows: &[usize], cancel: &Cancel) -> Result<Notes, Error> {
    let Some(program) = model.tower_program(medium.kind()) else { return model.encode(medium, cancel).map(|_| Notes::default()) };
    let mut notes = Notes::new(&tower_stages(program), rows);
    model.encode_traced(medium, cancel, &mut |tap| notes.take_share(medium.rows(), &tower_stage(program, tap.stage), tap))?;
    Ok(notes)
}

/// What stages made of some rows of a session. A row that is computed again replaces what it was.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    rows: Vec<usize>,
    /// In the order in which they were asked for.
    names: Vec<Name>,
    stages: HashMap<Name, Vec<Vec<f32>>>,
}

impl Notes {
    /// For these rows, rising, and these stages.
    pub fn new(stages: &[Name], rows: &[usize]) -> Self {
        let noted = stages.iter().map(|stage| (stage.clone(), vec![Vec::new(); rows.len()])).collect();
        Self { rows: rows.to_vec(), names: stages.to_vec(), stages: noted }
    }

    /// The stages, in order.
    pub fn stages(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|name| &**name)
    }

    /// Forgets the rows from `end` on.
    pub fn truncate(&mut self, end: usize) {
        let kept = self.rows.partition_point(|&row| row < end);
        self.rows.truncate(kept);
        self.stages.values_mut().for_each(|rows| rows.truncate(kept));
    }

    /// The rows.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Takes what it wants of a tap of a call whose first row is `first`.
    pub fn take(&mut self, first: usize, tap: Tap<'_>) {
        self.note(tap.stage, tap, |row, count| row.checked_sub(first).filter(|at| *at < count));
    }

    /// Takes what it wants of a tap of a call of `rows` rows, which may have fewer: of each row that is noted the one at the same share of them.
    fn take_share(&mut self, rows: usize, stage: &str, tap: Tap<'_>) {
        self.note(stage, tap, |row, count| share(row, rows, count));
    }

    /// Takes those rows of a tap for which `place` gives their place among its rows, whose number it is told.
    fn note(&mut self, stage: &str, tap: Tap<'_>, place: impl Fn(usize, usize) -> Option<usize>) {
        let Some(noted) = self.stages.get_mut(stage) else { return };
        let count = tap.shape.first().copied().unwrap_or(0).max(1);
        let width = tap.values.len() / count;
        for (row, values) in self.rows.iter().zip(noted) {
            if let Some(at) = place(*row, count) {
                values.clear();
                values.extend_from_slice(&tap.values[at * width..][..width]);
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

/// The row of a value of `count` rows that stands for row `row` of a call of `rows`; none where there is no such row.
pub fn share(row: usize, rows: usize, count: usize) -> Option<usize> {
    (row < rows && count > 0).then(|| row * count / rows)
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
    fn rows_of_a_tower_by_their_share() {
        let mut notes = Notes::new(&["v.0".into()], &[0, 5, 7, 9]);
        notes.take_share(8, "v.0", Tap { stage: "0", shape: &[2, 2], values: &[1.0, 2.0, 3.0, 4.0] });
        assert_eq!(notes.stage("v.0"), [vec![1.0, 2.0], vec![3.0, 4.0], vec![3.0, 4.0], vec![]]);
        assert_eq!((share(7, 8, 8), share(7, 8, 16), share(8, 8, 8), share(0, 0, 1)), (Some(7), Some(14), None, None));
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
