//! Choosing experts.

use super::Frame;
use crate::memory::View;
use qhx_ir::Routing;

/// Chooses experts from each row of `scores`.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) scores: View,
    /// Scores in a row.
    pub(crate) experts: usize,
    pub(crate) method: Routing,
    /// i32 `[S, k]`.
    pub(crate) chosen: View,
    /// `[S, k]`.
    pub(crate) weights: View,
}

impl Route {
    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let ([chosen, weights], inputs, _) = frame.memory.split([&self.chosen, &self.weights]);
        let chosen: &mut [i32] = bytemuck::cast_slice_mut(chosen);
        let scores = inputs.rows(&self.scores, self.experts);
        let k = self.method.experts_per_row();
        for (row, (chosen, weights)) in chosen.chunks_mut(k).zip(weights.chunks_mut(k)).enumerate() {
            let scores = scores.row(row);
            match self.method {
                Routing::SparseMixer { jitter } => sparse_mixer(scores, jitter, chosen, weights),
                Routing::Softmax { renormalise, .. } => softmax_top(scores, renormalise, chosen, weights),
            }
        }
    }
}

fn sparse_mixer(r: &[f32], jitter: f32, chosen: &mut [i32], weights: &mut [f32]) {
    let mut skip = None;
    for place in 0..2 {
        let others = || (0..r.len()).filter(|&e| Some(e) != skip);
        let best = others().reduce(|best, e| if r[e] > r[best] { e } else { best }).unwrap_or(0);
        // In f32, and a 0/0 drops nothing: the band test decides, so it must be one for all devices.
        let dropped = |e: usize| (r[best] - r[e]) / r[e].abs().max(r[best]) > 2.0 * jitter;
        let sum: f32 = others().filter(|&e| !dropped(e)).map(|e| (r[e] - r[best]).exp()).sum();
        (chosen[place], weights[place]) = (best as i32, 1.0 / sum);
        skip = Some(best);
    }
}

fn softmax_top(r: &[f32], renormalise: bool, chosen: &mut [i32], weights: &mut [f32]) {
    for place in 0..chosen.len() {
        let (taken, rest) = chosen.split_at_mut(place);
        let free = (0..r.len()).filter(|&e| !taken.contains(&(e as i32)));
        let best = free.reduce(|best, e| if r[e].total_cmp(&r[best]).is_gt() { e } else { best }).unwrap_or(0);
        rest[0] = best as i32;
    }
    let top = r[chosen[0] as usize];
    let sum: f32 = match renormalise {
        true => chosen.iter().map(|&e| (r[e as usize] - top).exp()).sum(),
        false => r.iter().map(|score| (score - top).exp()).sum(),
    };
    weights.iter_mut().zip(&*chosen).for_each(|(weight, &e)| *weight = (r[e as usize] - top).exp() / sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lowest_index() {
        let (mut chosen, mut weights) = ([0; 2], [0.0; 2]);
        softmax_top(&[1.0, 3.0, 3.0, 0.0], true, &mut chosen, &mut weights);
        assert_eq!((chosen, weights), ([1, 2], [0.5, 0.5]));
        sparse_mixer(&[0.0, 0.0, 0.0], 0.01, &mut chosen, &mut weights);
        assert_eq!(chosen, [0, 1]);
        assert!((weights[0] - 1.0 / 3.0).abs() < 1e-6 && (weights[1] - 0.5).abs() < 1e-6);
        sparse_mixer(&[f32::NAN, f32::NAN, f32::NAN], 0.01, &mut chosen, &mut weights);
        assert!(chosen.iter().all(|&e| (0..3).contains(&e)), "garbage in padding rows must still choose experts that exist");
    }
}
