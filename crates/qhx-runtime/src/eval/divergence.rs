//! A row of logits beside a reference's, and what many such rows say together.

use serde::Serialize;

/// A row of logits beside the reference's, taken in pieces: nothing of the row is kept but a few sums.
#[derive(Clone, Debug)]
pub struct RowDivergence {
    /// The token that comes next in the text, with its logits on both sides.
    target: u32,
    target_logits: (f32, f32),
    /// The reference's best id and its logit, and its second logit.
    best: (u32, f32),
    second: f32,
    /// The largest difference of two logits.
    error: f32,
    /// `Σ exp(a − max a)`, and `Σ exp(a − max a)·(a − b)`.
    expected_sum: f64,
    weighted: f64,
    /// The best id of the row itself and its logit, and `Σ exp(b − max b)`.
    found_best: (u32, f32),
    found_sum: f64,
    /// `Σ ab`, `Σ aa`, `Σ bb`.
    products: [f64; 3],
}

/// What a row says about one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenDivergence {
    /// `Σ p ln(p/q)`, where p is the reference's distribution and q the model's.
    pub kl: f64,
    /// Whether the most probable token is not the reference's.
    pub is_flip: bool,
    /// How far the reference's best logit is above its second.
    pub margin: f32,
    /// The natural logarithm of the probability that the reference gives to the token that comes next …
    pub expected_log_probability: f64,
    /// … and that which the model gives to it.
    pub found_log_probability: f64,
}

impl RowDivergence {
    /// Before its first piece; `target` is the token that comes next in the text.
    pub fn new(target: u32) -> Self {
        let low = f32::NEG_INFINITY;
        Self {
            target,
            target_logits: (low, low),
            best: (0, low),
            second: low,
            error: 0.0,
            expected_sum: 0.0,
            weighted: 0.0,
            found_best: (0, low),
            found_sum: 0.0,
            products: [0.0; 3],
        }
    }

    /// Adds a piece of both rows, from `first_id` on.
    pub fn add(&mut self, first_id: usize, expected: &[f32], found: &[f32]) {
        let (expected_before, found_before) = (self.best.1, self.found_best.1);
        for (i, (&a, &b)) in expected.iter().zip(found).enumerate() {
            let id = (first_id + i) as u32;
            if a > self.best.1 {
                self.second = self.best.1;
                self.best = (id, a);
            } else {
                self.second = self.second.max(a);
            }
            if b > self.found_best.1 {
                self.found_best = (id, b);
            }
            let difference = (a - b).abs();
            self.error = if difference.is_nan() { f32::INFINITY } else { self.error.max(difference) };
        }
        if let Some(at) = (self.target as usize).checked_sub(first_id).filter(|&at| at < expected.len()) {
            self.target_logits = (expected[at], found[at]);
        }
        let scale = |from: f32, to: f32| if from == f32::NEG_INFINITY { 0.0 } else { (f64::from(from) - f64::from(to)).exp() };
        let shrink = scale(expected_before, self.best.1);
        (self.expected_sum, self.weighted) = (self.expected_sum * shrink, self.weighted * shrink);
        self.found_sum *= scale(found_before, self.found_best.1);
        for (&a, &b) in expected.iter().zip(found) {
            let e = (f64::from(a) - f64::from(self.best.1)).exp();
            self.expected_sum += e;
            self.weighted += e * (f64::from(a) - f64::from(b));
            self.found_sum += (f64::from(b) - f64::from(self.found_best.1)).exp();
            let (a, b) = (f64::from(a), f64::from(b));
            self.products = [self.products[0] + a * b, self.products[1] + a * a, self.products[2] + b * b];
        }
    }

    /// The reference's most probable token.
    pub fn best(&self) -> u32 {
        self.best.0
    }

    /// How far the reference's best logit is above its second.
    pub fn margin(&self) -> f32 {
        self.best.1 - self.second
    }

    /// The largest difference of two logits; infinite where one is no number.
    pub fn error(&self) -> f32 {
        self.error
    }

    /// The cosine of the angle between the two rows.
    pub fn cosine(&self) -> f64 {
        let [ab, aa, bb] = self.products;
        if aa * bb > 0.0 { ab / (aa.sqrt() * bb.sqrt()) } else { 0.0 }
    }

    /// `Σ p ln(p/q)`, where p is the reference's distribution and q the row's own.
    pub fn kl(&self) -> f64 {
        let (log_p, log_q) = self.normalisers();
        let kl = self.weighted / self.expected_sum - log_p + log_q;
        if kl.is_finite() { kl.max(0.0) } else { f64::MAX }
    }

    /// What the row says about its token.
    pub fn token(&self) -> TokenDivergence {
        let (log_p, log_q) = self.normalisers();
        TokenDivergence {
            kl: self.kl(),
            is_flip: self.best.0 != self.found_best.0,
            margin: self.margin(),
            expected_log_probability: f64::from(self.target_logits.0) - log_p,
            found_log_probability: f64::from(self.target_logits.1) - log_q,
        }
    }

    /// `ln Σ exp a` and `ln Σ exp b`.
    fn normalisers(&self) -> (f64, f64) {
        (f64::from(self.best.1) + self.expected_sum.ln(), f64::from(self.found_best.1) + self.found_sum.ln())
    }
}

/// How far a model's predictions are from a reference's, over many tokens. Quantiles are by nearest rank: at least so many tokens have this value or a lower one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Divergence {
    /// The reference's perplexity on the same tokens.
    pub reference_perplexity: f64,
    /// Kullback-Leibler divergence of the model's next-token distribution from the reference's, in nats: the mean over tokens …
    pub kl_mean: f64,
    /// … its standard error, with tokens taken as independent …
    pub kl_mean_error: f64,
    /// … the median …
    pub kl_median: f64,
    /// … the value that 99 % of tokens do not exceed …
    pub kl_p99: f64,
    /// … that 99.9 % do not exceed …
    pub kl_p999: f64,
    /// … and the largest.
    pub kl_max: f64,
    /// The share of tokens at which the most probable token is another one.
    pub flips: f64,
    /// The share of tokens at which it is the same.
    pub same_top: f64,
    /// How much more probable the model finds the text's own next token than the reference does, in percentage points: the mean …
    pub delta_p_mean: f64,
    /// … and the root mean square.
    pub delta_p_rms: f64,
}

impl Divergence {
    /// What tokens say together.
    pub fn of(tokens: Vec<TokenDivergence>) -> Self {
        let count = (tokens.len() as f64).max(1.0);
        let mean = |value: &dyn Fn(&TokenDivergence) -> f64| tokens.iter().map(value).sum::<f64>() / count;
        let flips = mean(&|token| f64::from(u8::from(token.is_flip)));
        let delta = |token: &TokenDivergence| 100.0 * (token.found_log_probability.exp() - token.expected_log_probability.exp());
        let kl_mean = mean(&|token| token.kl);
        let variance = mean(&|token| (token.kl - kl_mean).powi(2));
        let (reference_perplexity, delta_p_mean) = (mean(&|token| -token.expected_log_probability).exp(), mean(&delta));
        let delta_p_rms = mean(&|token| delta(token).powi(2)).sqrt();
        let mut sorted: Vec<f64> = tokens.into_iter().map(|token| token.kl).collect();
        sorted.sort_by(f64::total_cmp);
        let quantile = |share: f64| sorted.get(((share * count).ceil() as usize).max(1) - 1).copied().unwrap_or(0.0);
        Self {
            reference_perplexity,
            kl_mean,
            kl_mean_error: (variance / count).sqrt(),
            kl_median: quantile(0.5),
            kl_p99: quantile(0.99),
            kl_p999: quantile(0.999),
            kl_max: quantile(1.0),
            flips,
            same_top: 1.0 - flips,
            delta_p_mean,
            delta_p_rms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::golden::cosine;

    fn rows() -> (Vec<f32>, Vec<f32>) {
        let a: Vec<f32> = (0..50).map(|i| ((i * 37 % 50) as f32 / 5.0).sin() * 4.0).collect();
        let b: Vec<f32> = a.iter().enumerate().map(|(i, x)| x + if i % 3 == 0 { 0.125 } else { -0.0625 }).collect();
        (a, b)
    }

    fn softmax(logits: &[f32]) -> Vec<f64> {
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        logits.iter().map(|&x| f64::from(x).exp() / sum).collect()
    }

    fn row(a: &[f32], b: &[f32], target: u32, piece: usize) -> RowDivergence {
        let mut row = RowDivergence::new(target);
        for first in (0..a.len()).step_by(piece) {
            let end = a.len().min(first + piece);
            row.add(first, &a[first..end], &b[first..end]);
        }
        row
    }

    #[test]
    fn pieces_of_a_row_add_up() {
        let (a, b) = rows();
        let (whole, cut) = (row(&a, &b, 31, 50), row(&a, &b, 31, 7));
        assert_eq!((cut.best, cut.second, cut.error, cut.found_best), (whole.best, whole.second, whole.error, whole.found_best));
        let (p, q) = (softmax(&a), softmax(&b));
        let expected: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
        assert!((whole.kl() - expected).abs() < 1e-9 && (cut.kl() - expected).abs() < 1e-9, "{} {} {expected}", whole.kl(), cut.kl());
        for token in [whole.token(), cut.token()] {
            assert!((token.expected_log_probability - p[31].ln()).abs() < 1e-9 && (token.found_log_probability - q[31].ln()).abs() < 1e-9);
        }
        let mut sorted = a.clone();
        sorted.sort_by(|x, y| y.total_cmp(x));
        assert_eq!(whole.margin(), sorted[0] - sorted[1]);
        assert!((whole.cosine() - cosine(&a, &b)).abs() < 1e-12);
    }

    #[test]
    fn a_row_beside_itself_is_exactly_the_same() {
        let (a, _) = rows();
        for piece in [3, 50] {
            let token = row(&a, &a, 4, piece).token();
            assert!(token.kl == 0.0 && !token.is_flip && token.expected_log_probability == token.found_log_probability, "{token:?}");
        }
        let mut broken = a.clone();
        broken[7] = f32::NAN;
        let row = row(&a, &broken, 4, 50);
        assert!(row.kl() == f64::MAX && row.error() == f32::INFINITY, "{row:?}");
    }

    #[test]
    fn tokens_together() {
        let token = |kl: f64, is_flip, expected: f64, found: f64| TokenDivergence {
            kl,
            is_flip,
            margin: 1.0,
            expected_log_probability: expected.ln(),
            found_log_probability: found.ln(),
        };
        let mut tokens: Vec<_> = (1..=998).rev().map(|n| token(f64::from(n) / 1000.0, false, 0.5, 0.5)).collect();
        tokens.extend([token(2.0, true, 0.5, 0.25), token(3.0, true, 0.5, 0.75)]);
        let all = Divergence::of(tokens);
        assert_eq!((all.kl_median, all.kl_p99, all.kl_p999, all.kl_max), (0.5, 0.99, 2.0, 3.0));
        assert_eq!((all.flips, all.same_top), (0.002, 0.998));
        assert!((all.reference_perplexity - 2.0).abs() < 1e-12 && all.delta_p_mean.abs() < 1e-12);
        assert!((all.delta_p_rms - (2.0 * 25f64.powi(2) / 1000.0).sqrt()).abs() < 1e-9, "{all:?}");
    }
}
