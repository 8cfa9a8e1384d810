//! `qhx diff`: how two traces differ, name by name.

use crate::{
    failure::Failure,
    output,
    table::{Align, Table},
};
use clap::Args;
use qhx_runtime::{
    tensors,
    trace::{Difference, Outcome, diff},
};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Compare two traces: cosine and largest difference per tensor
///
/// The exit code is 1 if names or shapes differ, or if a difference exceeds --tolerance.
#[derive(Args)]
#[command(after_help = "Example:\n  qhx diff cpu.safetensors reference.safetensors --tolerance 1e-4")]
pub(crate) struct Diff {
    /// File written by `qhx trace`
    a: PathBuf,
    /// File to compare it with
    b: PathBuf,
    /// Largest difference between two numbers that is accepted
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    tolerance: Option<f64>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    a: &'a Path,
    b: &'a Path,
    tolerance: Option<f64>,
    /// Whether names and shapes are equal and nothing is beyond the tolerance.
    same: bool,
    /// The name with the lowest cosine.
    worst: Option<&'a str>,
    differences: Vec<Row<'a>>,
}

#[derive(Serialize)]
struct Row<'a> {
    #[serde(flatten)]
    difference: &'a Difference,
    shape: Option<&'a [usize]>,
}

impl Diff {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        if self.tolerance.is_some_and(|tolerance| tolerance.is_nan() || tolerance < 0.0) {
            return Err(Failure::usage("--tolerance must be a number from 0 up"));
        }
        let (a, b) = (tensors::read(&self.a)?, tensors::read(&self.b)?);
        let differences = diff(&a, &b);
        let beyond: Vec<_> = differences.iter().filter(|d| !self.accepts(d)).map(|d| d.name.as_str()).collect();
        let worst = worst(&differences);
        let shape = |name: &str| a.iter().chain(&b).find(|tensor| tensor.name == name).map(|tensor| &tensor.shape[..]);
        let rows: Vec<_> = differences.iter().map(|difference| Row { difference, shape: shape(&difference.name) }).collect();
        if self.json {
            let (tolerance, same) = (self.tolerance, beyond.is_empty());
            output::print_json(&Report { a: &self.a, b: &self.b, tolerance, same, worst, differences: rows })?;
        } else {
            output::print(&table(&rows, worst))?;
        }
        match &beyond[..] {
            [] => Ok(()),
            [first, ..] => Err(Failure::work(format!("{} of {} tensors differ, first `{first}`", beyond.len(), differences.len()))),
        }
    }

    /// Without a tolerance every difference of numbers is accepted, unlike one of names or shapes.
    fn accepts(&self, difference: &Difference) -> bool {
        match self.tolerance {
            Some(tolerance) => difference.is_within(tolerance),
            None => matches!(difference.outcome, Outcome::Compared { .. }),
        }
    }
}

/// The compared tensor that is furthest away. A NaN is further than anything.
fn worst(differences: &[Difference]) -> Option<&str> {
    let distance = |d: &Difference| match d.outcome {
        Outcome::Compared { cosine, max_difference, .. } if max_difference > 0.0 || max_difference.is_nan() => {
            Some(if cosine.is_nan() || max_difference.is_nan() { f64::INFINITY } else { 1.0 - cosine })
        }
        _ => None,
    };
    let compared = differences.iter().filter_map(|d| Some((distance(d)?, d)));
    compared.max_by(|(x, _), (y, _)| x.total_cmp(y)).map(|(_, d)| d.name.as_str())
}

fn table(rows: &[Row<'_>], worst: Option<&str>) -> String {
    let header =
        [("name", Align::Left), ("cosine", Align::Right), ("max difference", Align::Right), ("shape", Align::Left), ("", Align::Left)];
    let mut table = Table::new(header);
    for Row { difference, shape } in rows {
        let shape = format!("{:?}", shape.unwrap_or_default());
        let (cosine, difference_shown, shape, mark) = match &difference.outcome {
            Outcome::Compared { cosine, max_difference, .. } => {
                let mark = if worst == Some(difference.name.as_str()) { "← worst" } else { "" };
                (format!("{cosine:.9}"), format!("{max_difference:.3e}"), shape, mark)
            }
            Outcome::Shapes { a, b } => (String::new(), String::new(), format!("{a:?} against {b:?}"), "← shapes differ"),
            Outcome::OnlyInA => (String::new(), String::new(), shape, "← only in the first"),
            Outcome::OnlyInB => (String::new(), String::new(), shape, "← only in the second"),
        };
        table.row([difference.name.clone(), cosine, difference_shown, shape, mark.to_owned()]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_is_the_lowest_cosine_and_nan_before_all() {
        let difference = |name: &str, cosine: f64, max_difference: f64| Difference {
            name: name.into(),
            outcome: Outcome::Compared { cosine, max_difference, max_value: 1.0 },
        };
        let mut all = vec![difference("a", 1.0, 0.0), difference("b", 0.9, 0.1), difference("c", 0.99, 3.0)];
        assert_eq!(worst(&all[..1]), None);
        assert_eq!(worst(&all), Some("b"));
        all.push(difference("d", f64::NAN, f64::NAN));
        assert_eq!(worst(&all), Some("d"));
    }
}
