//! The choice: bits go where they save most.

use super::sensitivity;
use crate::{
    ForgeError, ForgeOptions, Material,
    families::Programs,
    plan::{PrecisionPlan, tables},
};
use qhx_ir::{Encoding, Name, Weight};
use qhx_runtime::memory::stored_bits;
use std::collections::{BTreeMap, BTreeSet};

/// What a matrix can be stored as, fewest bits first, and the square of its rounding errors, as a share of what int4 has. A block's step is its largest number over 8, 32 and 127. The largest of a row is
/// about 1.6 times that of a block of 32.
const LADDER: [(Encoding, f64); 4] =
    [(Encoding::I4_BLOCK32, 1.0), (Encoding::I6_BLOCK32, 1.0 / 16.0), (Encoding::I8Row, 1.0 / 97.0), (Encoding::F16, 1e-5)];
/// The same for tables and heads, in which a few numbers of a row are much larger than the others.
const TABLE_LADDER: [(Encoding, f64); 4] =
    [(Encoding::I4_BLOCK32, 1.0), (Encoding::I6_BLOCK32, 1.0 / 16.0), (Encoding::I8_BLOCK32, 1.0 / 252.0), (Encoding::F16, 1e-5)];

/// Of towers nothing is measured: their matrices count as so many times as sensitive as the text's are on average.
const TOWER_CARE: f64 = 4.0;

/// The weights of a model that have a choice, with what the model loses by each.
pub(crate) struct Mixer {
    weights: Vec<Candidate>,
    /// Bits of everything that has no choice.
    fixed_bits: f64,
    /// Numbers of all weights.
    numbers: f64,
}

struct Candidate {
    name: Name,
    is_table: bool,
    numbers: f64,
    /// The levels that it can have, fewest bits first.
    levels: Vec<Rung>,
}

#[derive(Clone, Copy)]
struct Rung {
    encoding: Encoding,
    bits: f64,
    /// The divergence that the whole model has by it.
    loss: f64,
}

/// A weight's way from where it is to another level.
struct Step {
    weight: usize,
    rung: usize,
    bits: f64,
    saved: f64,
}

/// What was chosen.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    pub(crate) weights: Vec<Chosen>,
    /// Bits per weight.
    pub(crate) bits: f64,
    /// The divergence that is expected of it.
    pub(crate) loss: f64,
}

/// What was chosen for a weight.
#[derive(Clone, Debug)]
pub(crate) struct Chosen {
    pub(crate) name: Name,
    pub(crate) encoding: Encoding,
    /// The divergence that is expected of it, and what it would be at its lowest.
    pub(crate) loss: f64,
    pub(crate) loss_at_lowest: f64,
}

/// How many numbers a weight has.
fn numbers(weight: &Weight) -> f64 {
    weight.shape.iter().product::<usize>() as f64
}

/// The levels of a weight by which the model loses so much at int4. One that takes no fewer bits than a better one is left out: in rows of a few numbers scales weigh more than numbers do.
fn levels(is_table: bool, shape: &[usize], loss: f64) -> Vec<Rung> {
    let mut levels: Vec<Rung> = Vec::new();
    for (encoding, share) in if is_table { TABLE_LADDER } else { LADDER } {
        let rung = Rung { encoding, bits: stored_bits(encoding, shape), loss: share * loss };
        levels.retain(|lower| lower.bits < rung.bits);
        levels.push(rung);
    }
    levels
}

impl Choice {
    pub(crate) fn encodings(&self) -> BTreeMap<Name, Encoding> {
        self.weights.iter().map(|weight| (weight.name.clone(), weight.encoding)).collect()
    }
}

impl Mixer {
    /// Measures what a model loses by each of its matrices.
    pub(crate) fn measure(material: &Material, plan: &PrecisionPlan, options: &mut ForgeOptions<'_>) -> Result<Self, ForgeError> {
        let programs = material.programs(plan)?;
        let losses = sensitivity::measure(material, &programs, options)?;
        Ok(Self::new(&programs, &losses))
    }

    /// Assumes that a model loses equally much by every number: nobody trained its weights.
    pub(crate) fn even(material: &Material, plan: &PrecisionPlan) -> Result<Self, ForgeError> {
        let programs = material.programs(plan)?;
        let losses = crate::forge::weights(&programs).map(|(name, weight, _)| (name.clone(), numbers(weight))).collect();
        Ok(Self::new(&programs, &losses))
    }

    /// Of weights by which a model loses so much at int4.
    fn new(programs: &Programs, losses: &BTreeMap<Name, f64>) -> Self {
        let tables: BTreeSet<Name> = programs.programs.iter().flat_map(|written| tables(&written.program)).map(|(name, _)| name).collect();
        let measured: f64 =
            crate::forge::weights(programs).filter(|(name, ..)| losses.contains_key(*name)).map(|(_, weight, _)| numbers(weight)).sum();
        let loss_of_towers = TOWER_CARE * losses.values().sum::<f64>() / measured.max(1.0);
        let mut mixer = Self { weights: Vec::new(), fixed_bits: 0.0, numbers: 0.0 };
        for (name, weight, _) in crate::forge::weights(programs) {
            let numbers = numbers(weight);
            mixer.numbers += numbers;
            if weight.encoding.is_float() {
                mixer.fixed_bits += stored_bits(weight.encoding, &weight.shape);
                continue;
            }
            let loss = losses.get(name).copied().unwrap_or(loss_of_towers * numbers);
            let is_table = tables.contains(name);
            mixer.weights.push(Candidate { name: name.clone(), is_table, numbers, levels: levels(is_table, &weight.shape, loss) });
        }
        mixer
    }

    /// Leaves tables and heads in int6.
    pub(crate) fn keep_tables(&mut self) {
        for table in self.weights.iter_mut().filter(|weight| weight.is_table) {
            let kept = table.levels.iter().position(|rung| rung.encoding == Encoding::I6_BLOCK32).unwrap_or(0);
            table.levels = vec![table.levels[kept]];
        }
    }

    /// The share of a model's numbers that have a choice.
    pub(crate) fn share(&self) -> f64 {
        self.weights.iter().filter(|weight| weight.levels.len() > 1).map(|weight| weight.numbers).sum::<f64>() / self.numbers
    }

    /// Bits per weight with everything at its lowest.
    pub(crate) fn least_bits(&self) -> f64 {
        self.choice(&vec![0; self.weights.len()]).bits
    }

    /// The mixture that loses least within so many bits per weight.
    pub(crate) fn within(&self, bits: f64) -> Result<Choice, ForgeError> {
        let least = self.least_bits();
        if bits < least {
            let least = (100.0 * least).ceil() / 100.0;
            return Err(ForgeError::Precision(format!("{bits} bits per weight are too few for this model: the least is {least}")));
        }
        Ok(self.climb(|bits_then, _| bits_then <= bits))
    }

    /// The smallest mixture that is expected to lose no more than this.
    pub(crate) fn losing(&self, loss: f64) -> Choice {
        self.climb(|_, loss_now| loss_now > loss)
    }

    /// Everything in int8, as `w8` stores it; f16 where a row is too short for int8 to take less.
    pub(crate) fn int8(&self) -> Choice {
        let is_int8 = |rung: &Rung| matches!(rung.encoding, Encoding::I8Row | Encoding::I8_BLOCK32);
        let place = |weight: &Candidate| weight.levels.iter().position(is_int8).unwrap_or(weight.levels.len() - 1);
        self.choice(&self.weights.iter().map(place).collect::<Vec<_>>())
    }

    /// Takes the steps that save most for their bits, one after the other, as long as one is allowed by the bits per weight after it and the loss before it. A step that needs too many bits is left out:
    /// smaller ones may still fit.
    fn climb(&self, is_allowed: impl Fn(f64, f64) -> bool) -> Choice {
        let mut at = vec![0; self.weights.len()];
        let Choice { mut bits, mut loss, .. } = self.choice(&at);
        loop {
            let next = self.steps(&at).into_iter().find(|step| is_allowed(bits + step.bits / self.numbers, loss));
            let Some(step) = next else { return self.choice(&at) };
            (bits, loss) = (bits + step.bits / self.numbers, loss - step.saved);
            at[step.weight] = step.rung;
        }
    }

    /// Every step up from where weights are, those that save most for their bits first.
    fn steps(&self, at: &[usize]) -> Vec<Step> {
        let mut steps = Vec::new();
        for (weight, (candidate, &now)) in self.weights.iter().zip(at).enumerate() {
            let from = candidate.levels[now];
            let up = candidate.levels.iter().enumerate().skip(now + 1);
            steps.extend(up.map(|(rung, to)| Step { weight, rung, bits: to.bits - from.bits, saved: from.loss - to.loss }));
        }
        steps.sort_by(|a, b| (b.saved / b.bits).total_cmp(&(a.saved / a.bits)));
        steps
    }

    fn choice(&self, at: &[usize]) -> Choice {
        let rungs = || self.weights.iter().zip(at).map(|(weight, &at)| (weight, weight.levels[at]));
        let chosen = |(weight, rung): (&Candidate, Rung)| Chosen {
            name: weight.name.clone(),
            encoding: rung.encoding,
            loss: rung.loss,
            loss_at_lowest: weight.levels[0].loss,
        };
        Choice {
            weights: rungs().map(chosen).collect(),
            bits: (self.fixed_bits + rungs().map(|(_, rung)| rung.bits).sum::<f64>()) / self.numbers,
            loss: rungs().map(|(_, rung)| rung.loss).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table and matrices of equal size by which a model loses so much at int4.
    fn mixer(losses: &[f64]) -> Mixer {
        let candidate = |(i, loss): (usize, &f64)| Candidate {
            name: format!("{i}").into(),
            is_table: i == 0,
            numbers: 64.0 * 512.0,
            levels: levels(i == 0, &[64, 512], *loss),
        };
        let weights: Vec<Candidate> = losses.iter().enumerate().map(candidate).collect();
        Mixer { fixed_bits: 32.0 * 512.0, numbers: 64.0 * 512.0 * weights.len() as f64 + 512.0, weights }
    }

    fn encodings(choice: &Choice) -> Vec<Encoding> {
        choice.weights.iter().map(|weight| weight.encoding).collect()
    }

    #[test]
    fn bits_go_where_they_save_most() {
        let [int4, int8] = [Encoding::I4_BLOCK32, Encoding::I8Row];
        let mixer = mixer(&[0.01, 0.4, 0.001, 0.05]);
        assert_eq!(encodings(&mixer.within(mixer.least_bits()).unwrap()), [int4; 4]);
        let five = mixer.within(5.6).unwrap();
        assert_eq!(encodings(&five), [int4, int8, int4, int4]);
        assert!(five.bits <= 5.6 && five.bits > 5.3, "{}", five.bits);
        assert_eq!(encodings(&mixer.within(17.0).unwrap()), [Encoding::F16; 4]);
        let all: Vec<f64> = (47..160).map(|bits| mixer.within(f64::from(bits) / 10.0).unwrap().loss).collect();
        assert!(all.is_sorted_by(|a, b| a >= b), "more bits never lose more: {all:?}");
        // What loses little enough is as good as anything of its size.
        let enough = mixer.losing(0.01);
        assert!(enough.loss <= 0.01 && mixer.within(enough.bits + 1e-9).unwrap().loss >= enough.loss - 1e-12, "{enough:?}");
        assert_eq!(encodings(&mixer.losing(1.0)), [int4; 4]);
        assert_eq!(encodings(&mixer.int8()), [Encoding::I8_BLOCK32, int8, int8, int8]);
        let error = mixer.within(4.1).unwrap_err().to_string();
        assert!(error.contains("4.1 bits per weight are too few") && error.contains("4.61"), "{error}");
    }

    #[test]
    fn rows_of_a_few_numbers_have_fewer_levels() {
        let encodings = |shape: &[usize]| levels(false, shape, 1.0).iter().map(|rung| rung.encoding).collect::<Vec<_>>();
        assert_eq!(encodings(&[64, 512]).len(), 4);
        assert_eq!(
            encodings(&[64, 4]),
            [Encoding::I4_BLOCK32, Encoding::I6_BLOCK32, Encoding::F16],
            "a scale of a row takes as much as f16"
        );
        assert!(levels(false, &[64, 2], 1.0).is_sorted_by(|a, b| a.bits < b.bits && a.loss > b.loss));
    }

    #[test]
    fn kept_tables_are_int6() {
        let mut mixer = mixer(&[0.4, 0.1, 0.1]);
        mixer.keep_tables();
        assert_eq!(encodings(&mixer.within(16.0).unwrap())[0], Encoding::I6_BLOCK32);
        assert!((mixer.share() - 2.0 / 3.0).abs() < 0.01);
    }
}
