//! The smallest mixture that passes its gate.

use super::{
    Gate,
    judge::Measurement,
    search::{Outcome, significant, stored_bytes, tried},
};
use crate::{
    ForgeError, ForgeOptions,
    families::Programs,
    mixture::{self, Choice, Mixer},
    plan::{Owners, PrecisionPlan},
    precision::Precision,
    rotate::Rotations,
};
use qhx_bundle::{
    Staged,
    parity::{Choices, GateResult, StageChoice, Tried},
};
use qhx_ir::Name;
use qhx_runtime::memory::tensor_bytes;
use std::collections::BTreeSet;

/// Mixtures whose gate is measured at most, before everything becomes f16.
const ATTEMPTS: usize = 4;
/// The share of what may be lost that a mixture is chosen for: not all of it comes from weights.
const AIM: f64 = 0.7;
/// A mixture that loses less than this share of what it may is larger than need be.
const CAREFUL: f64 = 0.5;

/// The smallest mixture of encodings that is found to pass the gate, by the bytes that are stored. Mixtures are chosen by their bits, without the padding of rows; with short rows int8
/// throughout may take less room, and is tried as well.
pub(super) fn auto(gate: &mut Gate<'_, '_>, options: &mut ForgeOptions<'_>) -> Result<Outcome, ForgeError> {
    let is_calibrated = options.calibration.is_some() && gate.material.has_tokenizer();
    let rotations = Rotations::for_precision(Precision::W4, is_calibrated);
    let base = PrecisionPlan { label: Some("auto".into()), rotations, ..PrecisionPlan::from(Precision::W4) };
    let mixer = Mixer::measure(gate.material, &base, options)?;
    let mut trials = Trials { gate, base, options, attempts: Vec::new(), made: None };
    let limit = trials.gate.limits_of_search().mean_kl;
    let mut aim = AIM * limit;
    loop {
        let is_last = trials.attempts.len() >= ATTEMPTS;
        // Nothing may be lost the last time: everything becomes f16.
        let choice = mixer.losing(if is_last { 0.0 } else { aim });
        if trials.smallest().is_some() && (is_last || trials.attempts.iter().any(|other| other.choice.bits <= choice.bits)) {
            break;
        }
        let name = format!("{:.2} bits per weight", choice.bits);
        let GateResult { passed, mean_kl, closeness, .. } = trials.attempt(name, choice)?;
        let (passed, found) = (*passed, closeness.as_ref().map_or(*mean_kl, |closeness| closeness.mean_kl).max(1e-9));
        if is_last || passed && found > CAREFUL * limit {
            break;
        }
        // What is lost is about proportional to what was expected.
        aim *= if passed { (AIM * limit / found).clamp(1.2, 8.0) } else { (AIM * limit / found).clamp(0.05, 0.6) };
    }
    let int8 = mixer.int8();
    let int8_bytes = stored_bytes(&trials.programs(&int8)?.1);
    if trials.smallest().is_some_and(|best| trials.attempts[best].tried.bytes > int8_bytes) {
        trials.attempt("w8".into(), int8)?;
    }
    trials.finish(int8_bytes)
}

/// Mixtures that are measured one after the other.
struct Trials<'t, 'm, 'g, 'o> {
    gate: &'t mut Gate<'m, 'g>,
    /// What is common to all of them.
    base: PrecisionPlan,
    options: &'t mut ForgeOptions<'o>,
    attempts: Vec<Attempt>,
    /// The last one.
    made: Option<(Staged, Programs)>,
}

struct Attempt {
    choice: Choice,
    measurement: Measurement,
    tried: Tried,
}

impl Trials<'_, '_, '_, '_> {
    fn programs(&self, choice: &Choice) -> Result<(PrecisionPlan, Programs), ForgeError> {
        let mut plan = PrecisionPlan { encodings: choice.encodings(), ..self.base.clone() };
        if self.options.row_tables {
            mixture::with_row_tables(self.gate.material, &mut plan)?;
        }
        let programs = self.gate.material.programs(&plan)?;
        Ok((plan, programs))
    }

    fn stage(&mut self, choice: &Choice) -> Result<(Staged, Programs), ForgeError> {
        // What was made before goes first: two writers to one place would be one too many.
        drop(self.made.take());
        let (plan, programs) = self.programs(choice)?;
        Ok((self.gate.material.stage(&plan, &programs, self.options)?, programs))
    }

    /// Makes a mixture and holds it to the gate.
    fn attempt(&mut self, name: String, choice: Choice) -> Result<&GateResult, ForgeError> {
        let (staged, programs) = self.stage(&choice)?;
        let measurement = self.gate.try_out(&staged)?;
        let tried = tried(name, &programs, &measurement);
        self.made = Some((staged, programs));
        self.attempts.push(Attempt { choice, measurement, tried });
        Ok(&self.attempts[self.attempts.len() - 1].measurement.gate)
    }

    /// Of those that passed the one with the fewest bytes.
    fn smallest(&self) -> Option<usize> {
        let passed = (0..self.attempts.len()).filter(|&i| self.attempts[i].tried.passed);
        passed.min_by_key(|&i| self.attempts[i].tried.bytes)
    }

    /// The smallest, made anew where others were made after it; the last where none passed.
    fn finish(mut self, int8_bytes: u64) -> Result<Outcome, ForgeError> {
        let last = self.attempts.len() - 1;
        let best = self.smallest().unwrap_or(last);
        let choice = self.attempts[best].choice.clone();
        let (staged, programs) = match self.made.take().filter(|_| best == last) {
            Some(made) => made,
            None => self.stage(&choice)?,
        };
        let (bytes, bits) = (stored_bytes(&programs), choice.bits);
        let share = 100.0 * bytes as f64 / int8_bytes as f64;
        let mut note = format!("{bytes} bytes of weights, {share:.1} % of the {int8_bytes} that w8 has; {bits:.2} bits per weight");
        if bytes > int8_bytes {
            note += "; w8 takes less room, but fails the gate";
        }
        let tried = self.attempts.iter().map(|attempt| attempt.tried.clone()).collect();
        let choices = Choices { stages: chosen_stages(&programs, &choice), tried, note };
        let measurement = self.attempts.swap_remove(best).measurement;
        Ok(Outcome { staged, programs, measurement, choices: Some(choices) })
    }
}

/// By stage: the encodings that its matrices got, and what they are expected to cost.
fn chosen_stages(programs: &Programs, choice: &Choice) -> Vec<StageChoice> {
    let mut stages = Vec::new();
    for written in &programs.programs {
        let owners = Owners::of(&written.program);
        for (place, stage) in written.program.stages.iter().enumerate() {
            let own = |name: &Name| owners.weights(place).contains(name);
            let chosen: Vec<_> = choice.weights.iter().filter(|weight| own(&weight.name)).collect();
            if chosen.is_empty() {
                continue;
            }
            let encodings: BTreeSet<String> = chosen.iter().map(|weight| weight.encoding.to_string()).collect();
            let sum = |loss: fn(&mixture::Chosen) -> f64| significant(chosen.iter().map(|weight| loss(weight)).sum());
            stages.push(StageChoice {
                stage: stage.name.to_string(),
                chosen: encodings.into_iter().collect::<Vec<_>>().join(", "),
                bytes: owners
                    .weights(place)
                    .iter()
                    .map(|name| &written.program.weights[name])
                    .map(|w| tensor_bytes(w.encoding, &w.shape))
                    .sum(),
                errors: [("at its lowest".into(), sum(|w| w.loss_at_lowest)), ("as chosen".into(), sum(|w| w.loss))].into(),
            });
        }
    }
    stages
}
