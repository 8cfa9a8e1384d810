//! Whole tiny models, written by hand: a dense decoder, a hybrid of recurrent and attention layers, a mixture of experts, an image tower and an
//! audio tower. They correspond to no real model, but combine ops the way real ones do.

mod blocks;
mod text;
mod towers;

use super::{Case, Group, Rng};
use crate::{Checked, Program, WeightTensor, Weights};
use std::{collections::HashMap, sync::Arc};

const fn group(name: &'static str, draw: fn(Rng, usize) -> Case) -> Group {
    Group { name, weight: 2, least: 4, draw }
}

pub(super) const GROUPS: &[Group] = &[
    group("model.decoder", text::decoder),
    group("model.hybrid", text::hybrid),
    group("model.mixture", text::mixture),
    group("model.image", towers::image),
    group("model.audio", towers::audio),
];

/// A runnable model, for tests of the layers above devices.
pub struct TinyModel {
    /// `model.decoder` …
    pub name: &'static str,
    /// The program, checked.
    pub program: Checked,
    /// Its weights.
    pub weights: Arc<dyn Weights>,
}

/// One model of each kind; `number` chooses among the weight encodings (0: all f32).
pub fn tiny(number: usize) -> Vec<TinyModel> {
    let model = |group: &Group| {
        let Case { program, weights, .. } = (group.draw)(Rng::new(&[number as u64]), number);
        TinyModel { name: group.name, program: checked(program), weights: share(weights) }
    };
    GROUPS.iter().map(model).collect()
}

fn checked(program: Program) -> Checked {
    Checked::new(program).expect("the suite's models type-check")
}

fn share(weights: HashMap<String, WeightTensor>) -> Arc<dyn Weights> {
    Arc::new(weights)
}
