//! Temperature, top-k, top-p, min-p and the draw, over a row of logits.
//!
//! A vocabulary has up to 250,000 entries and this runs for each token, so nothing here sorts the whole row: candidates are thinned
//! by a threshold first, and the top of what remains is sorted only as far as it is needed.

use super::SamplerConfig;
use super::random::exp_of_negative;

/// Scratch memory of the filters, kept between tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Filter {
    weights: Vec<f64>,
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    id: u32,
    /// Probability relative to the most probable token's.
    weight: f64,
}

impl Filter {
    /// The id that `draw` (in [0, 1)) falls on. `row` has no NaN and `best` is its argmax; the temperature is above 0.
    pub(super) fn choose(&mut self, row: &[f32], best: usize, config: &SamplerConfig, draw: f64) -> u32 {
        if (1..row.len()).contains(&config.top_k) {
            largest_k(row, config.top_k, &mut self.candidates);
            return self.choose_of_ranked(config, draw);
        }
        let weight_of = weights(row[best], config);
        let (top_p, min_p) = (f64::from(config.top_p), f64::from(config.min_p));
        self.weights.clear();
        self.weights.extend(row.iter().map(|&logit| weight_of(logit)));
        let total: f64 = self.weights.iter().sum();
        // Tokens below (1 − p)/n of the total cannot, all together, be missed by top-p; min-p's own limit is exact.
        let unneeded = (1.0 - top_p) * total / row.len() as f64;
        let least = if top_p < 1.0 { unneeded.max(min_p) } else { min_p };
        self.candidates.clear();
        let kept = self.weights.iter().zip(row).enumerate().filter(|(_, (weight, _))| **weight >= least && **weight > 0.0);
        self.candidates.extend(kept.map(|(id, (&weight, &logit))| Candidate { logit, id: id as u32, weight }));
        self.draw(total, best as u32, config, draw)
    }

    /// The same where only the `top_k` largest logits are known, the largest first.
    pub(super) fn choose_of_top(&mut self, top: &[(u32, f32)], config: &SamplerConfig, draw: f64) -> u32 {
        self.candidates.clear();
        self.candidates.extend(top.iter().map(|&(id, logit)| Candidate { logit, id, weight: 0.0 }));
        self.choose_of_ranked(config, draw)
    }

    /// The id among the candidates, which are ranked and have no weights yet.
    fn choose_of_ranked(&mut self, config: &SamplerConfig, draw: f64) -> u32 {
        let Some(&Candidate { logit: largest, id: best, .. }) = self.candidates.first() else { return 0 };
        let weight_of = weights(largest, config);
        for candidate in &mut self.candidates {
            candidate.weight = weight_of(candidate.logit);
        }
        let total = self.candidates.iter().map(|candidate| candidate.weight).sum();
        self.draw(total, best, config, draw)
    }

    /// The id that `draw` falls on among the candidates, after top-p and min-p; `total` is the weight of all that they were chosen from.
    fn draw(&mut self, total: f64, best: u32, config: &SamplerConfig, draw: f64) -> u32 {
        let (top_p, min_p) = (f64::from(config.top_p), f64::from(config.min_p));
        if top_p < 1.0 {
            let kept = smallest_prefix_reaching(&mut self.candidates, top_p * total);
            self.candidates.truncate(kept);
        }
        if min_p > 0.0 {
            self.candidates.retain(|candidate| candidate.weight >= min_p);
        }

        let mut remaining = draw * self.candidates.iter().map(|candidate| candidate.weight).sum::<f64>();
        for candidate in &self.candidates {
            remaining -= candidate.weight;
            if remaining < 0.0 {
                return candidate.id;
            }
        }
        // Only rounding leads here: the draw fell on the very end.
        self.candidates.iter().rev().find(|candidate| candidate.weight > 0.0).map_or(best, |candidate| candidate.id)
    }
}

/// How probable logits are in relation to the largest.
fn weights(largest: f32, config: &SamplerConfig) -> impl Fn(f32) -> f64 + use<> {
    let sharpness = 1.0 / f64::from(config.temperature);
    move |logit| exp_of_negative((f64::from(logit) - f64::from(largest)) * sharpness)
}

/// Larger logits first, lower ids first among equals.
fn by_rank(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Fills `kept` with the `k` largest of the row, ranked. One pass: the buffer holds up to 2k, and its k-th largest is the bar that later
/// entries must pass (strictly: an equal one with a higher id ranks behind).
fn largest_k(row: &[f32], k: usize, kept: &mut Vec<Candidate>) {
    kept.clear();
    let room = k.saturating_mul(2).max(64);
    let mut bar = f32::NEG_INFINITY;
    for (id, &logit) in row.iter().enumerate() {
        if logit > bar {
            kept.push(Candidate { logit, id: id as u32, weight: 0.0 });
            if kept.len() == room {
                kept.select_nth_unstable_by(k - 1, by_rank);
                kept.truncate(k);
                bar = kept[k - 1].logit;
            }
        }
    }
    if kept.len() > k {
        kept.select_nth_unstable_by(k - 1, by_rank);
        kept.truncate(k);
    }
    kept.sort_unstable_by(by_rank);
}

/// Ranks as many candidates as needed at the front and returns how many reach `goal` together.
fn smallest_prefix_reaching(candidates: &mut [Candidate], goal: f64) -> usize {
    let mut ranked = 0;
    let mut sum = 0.0;
    let mut block = 64;
    while ranked < candidates.len() {
        let rest = &mut candidates[ranked..];
        let length = block.min(rest.len());
        if length < rest.len() {
            rest.select_nth_unstable_by(length - 1, by_rank);
        }
        rest[..length].sort_unstable_by(by_rank);
        for (place, candidate) in rest[..length].iter().enumerate() {
            sum += candidate.weight;
            if sum >= goal {
                return ranked + place + 1;
            }
        }
        ranked += length;
        block *= 4;
    }
    candidates.len()
}
