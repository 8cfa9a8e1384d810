//! What every stage made for a prompt, and how two such records differ.

use crate::{Cancel, Error, MediaKind, Prompt, Session, placement::tower_stage, tensors::Tensor};
use qhx_ir::Tap;
use serde::Serialize;

/// Reads `ids` on a fresh session: see [`trace_prompt`].
pub fn trace(session: &mut Session, ids: &[u32], cancel: &Cancel) -> Result<Vec<Tensor>, Error> {
    trace_prompt(session, &Prompt::from_ids(ids.to_vec()), cancel)
}

/// Reads a prompt on a fresh session and records every stage's output under the stage's name, rows of all calls put together, and `logits`: of all
/// rows where the model was loaded for it ([`crate::LoadOptions::wanted`] as large as the chunk), else of the last one. What the towers made of the
/// prompt's media comes first, under the names of their stages and as `soft_rows` and `deepstack.N`.
pub fn trace_prompt(session: &mut Session, prompt: &Prompt, cancel: &Cancel) -> Result<Vec<Tensor>, Error> {
    session.reset();
    let model = session.model().clone();
    let rows = prompt.ids().len();
    let wanted = if model.wanted() >= model.chunk().min(rows) { rows } else { 1 };
    let mut tensors = trace_media(session, prompt, cancel)?;
    let mut logits = Tensor { name: "logits".into(), shape: vec![0, model.vocabulary().logits], values: Vec::new() };
    let mut show = |_: usize, row: &[f32]| {
        logits.values.extend_from_slice(row);
        logits.shape[0] += 1;
    };
    let mut tap = |_: usize, tap: Tap<'_>| add(&mut tensors, tap.stage, tap.shape, tap.values);
    session.append_prompt_traced(prompt, wanted, cancel, &mut show, &mut tap)?;
    tensors.push(logits);
    Ok(tensors)
}

fn trace_media(session: &Session, prompt: &Prompt, cancel: &Cancel) -> Result<Vec<Tensor>, Error> {
    let model = session.model();
    let mut tensors = Vec::new();
    for medium in prompt.media().iter().map(|placed| placed.medium()) {
        let program = model.tower_program(medium.kind());
        let name = |stage: &str| program.map_or_else(|| stage.to_owned(), |program| tower_stage(program, stage));
        let mut tap = |tap: Tap<'_>| add(&mut tensors, &name(tap.stage), tap.shape, tap.values);
        let encoded = model.encode_traced(medium, cancel, &mut tap)?;
        let shape = [encoded.rows(), encoded.width()];
        add(&mut tensors, "soft_rows", &shape, encoded.soft_rows(0..encoded.rows()));
        for number in (0..encoded.deepstack_count()).filter(|_| medium.kind() == MediaKind::Image) {
            add(&mut tensors, &format!("deepstack.{number}"), &shape, encoded.deepstack_rows(number, 0..encoded.rows()));
        }
    }
    Ok(tensors)
}

/// Puts rows behind those that have this name already.
fn add(tensors: &mut Vec<Tensor>, name: &str, shape: &[usize], values: &[f32]) {
    match tensors.iter_mut().find(|tensor| tensor.name == name) {
        Some(tensor) => {
            tensor.values.extend_from_slice(values);
            tensor.shape[0] += shape[0];
        }
        None => tensors.push(Tensor { name: name.to_owned(), shape: shape.to_vec(), values: values.to_vec() }),
    }
}

/// How a tensor of one file compares with that of the same name in another.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The tensor's name.
    pub name: String,
    /// What the comparison gave.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What comparing two tensors gave.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub enum Outcome {
    /// Both are there with one shape.
    Compared {
        /// Cosine of the angle between them (1 for two equal tensors, also where both are zero).
        cosine: f64,
        /// Largest difference of two numbers; NaN where either has a NaN that the other has not at the same place.
        max_difference: f64,
        /// Largest magnitude in the first.
        max_value: f64,
    },
    /// The shapes differ.
    Shapes {
        /// In the first.
        a: Vec<usize>,
        /// In the second.
        b: Vec<usize>,
    },
    /// Only in the first.
    OnlyInA,
    /// Only in the second.
    OnlyInB,
}

impl Difference {
    /// Whether both are there and no two numbers differ by more than `tolerance`.
    pub fn is_within(&self, tolerance: f64) -> bool {
        matches!(self.outcome, Outcome::Compared { max_difference, .. } if max_difference <= tolerance)
    }
}

/// Compares two records, name by name, in the first one's order.
pub fn diff(a: &[Tensor], b: &[Tensor]) -> Vec<Difference> {
    let in_a = a.iter().map(|x| {
        let outcome = match b.iter().find(|y| y.name == x.name) {
            Some(y) if y.shape != x.shape => Outcome::Shapes { a: x.shape.clone(), b: y.shape.clone() },
            Some(y) => compare(&x.values, &y.values),
            None => Outcome::OnlyInA,
        };
        Difference { name: x.name.clone(), outcome }
    });
    let only_in_b = b.iter().filter(|y| !a.iter().any(|x| x.name == y.name));
    in_a.chain(only_in_b.map(|y| Difference { name: y.name.clone(), outcome: Outcome::OnlyInB })).collect()
}

fn compare(a: &[f32], b: &[f32]) -> Outcome {
    let (mut product, mut square_a, mut square_b) = (0f64, 0f64, 0f64);
    let (mut max_difference, mut max_value) = (0f64, 0f64);
    for (&x, &y) in a.iter().zip(b) {
        max_value = max_value.max(f64::from(x).abs());
        // Equal bits are equal, infinities and NaN included.
        let difference = if x.to_bits() == y.to_bits() { 0.0 } else { (f64::from(x) - f64::from(y)).abs() };
        max_difference = if difference.is_nan() || max_difference.is_nan() { f64::NAN } else { max_difference.max(difference) };
        let (x, y) = (f64::from(x), f64::from(y));
        product += x * y;
        square_a += x * x;
        square_b += y * y;
    }
    let norm = square_a.sqrt() * square_b.sqrt();
    let cosine = if square_a == 0.0 && square_b == 0.0 {
        1.0
    } else if norm == 0.0 {
        0.0
    } else {
        product / norm
    };
    Outcome::Compared { cosine, max_difference, max_value }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, values: &[f32]) -> Tensor {
        Tensor { name: name.into(), shape: vec![values.len()], values: values.to_vec() }
    }

    #[test]
    fn differences_are_found_and_named() {
        let a = [tensor("same", &[1.0, 2.0]), tensor("off", &[1.0, 0.0]), tensor("short", &[1.0]), tensor("gone", &[1.0])];
        let b = [tensor("new", &[0.0]), tensor("same", &[1.0, 2.0]), tensor("off", &[0.0, 2.0]), tensor("short", &[1.0, 2.0])];
        let found = diff(&a, &b);
        let names: Vec<_> = found.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(names, ["same", "off", "short", "gone", "new"]);
        assert!(
            matches!(found[0].outcome, Outcome::Compared { cosine, max_difference, .. } if (cosine - 1.0).abs() < 1e-12 && max_difference == 0.0)
        );
        assert!(
            matches!(found[1].outcome, Outcome::Compared { cosine, max_difference, max_value } if (cosine, max_difference, max_value) == (0.0, 2.0, 1.0))
        );
        assert_eq!(found[2].outcome, Outcome::Shapes { a: vec![1], b: vec![2] });
        assert_eq!((&found[3].outcome, &found[4].outcome), (&Outcome::OnlyInA, &Outcome::OnlyInB));
        assert!(found[0].is_within(0.0) && !found[1].is_within(1.9) && found[1].is_within(2.0) && !found[3].is_within(9.0));
    }

    #[test]
    fn a_nan_is_never_within() {
        let found = diff(&[tensor("x", &[1.0, f32::NAN])], &[tensor("x", &[1.0, 2.0])]);
        assert!(!found[0].is_within(f64::INFINITY));
    }
}
