//! Which stages need more than the least: the search for a mixture of precisions and activation forms that is through its gate.
//!
//! Each stage has levels, cheapest first. One f32 pass over a few prompts measures for every stage and level the error of the stage's result on the f32 program's
//! inputs. Then stages are raised, always the one whose error is the largest, which gives a ladder of mixtures from the cheapest to the dearest; the
//! first rung that is through the gate is found by halving, and of raised stages those are lowered again that the gate can do without.

use super::{
    Gate, all_passes,
    judge::{Measurement, Played},
    teacher::{Audience, Pass, Teacher, Variant},
};
use crate::{
    ForgeError, ForgeOptions,
    families::Programs,
    plan::{Level, Plan, form_of, owners},
    precision::Precision,
};
use qhx_bundle::{
    Staged,
    parity::{Choices, StageChoice, Tried},
};
use qhx_ir::{Checked, Name};
use qhx_runtime::memory::tensor_bytes;
use std::collections::BTreeMap;

/// Rows that the errors of levels are measured on.
const PROBE_ROWS: usize = 256;
/// Tokens of each answer among them.
const PROBE_TOKENS: usize = 8;
/// Attempts to lower a raised stage again.
const LOWERINGS: usize = 8;

/// What a search ends with: through the gate or not, as the measurement says.
pub(super) struct Outcome {
    pub(super) staged: Staged,
    pub(super) programs: Programs,
    pub(super) measurement: Measurement,
    pub(super) choices: Option<Choices>,
}

/// A bundle at the precision asked for. Where it is not through its gate, stages whose integer activations hurt most take f32 ones; weights stay.
pub(super) fn fixed(gate: &mut Gate<'_, '_>, options: &mut ForgeOptions<'_>) -> Result<Outcome, ForgeError> {
    let base = options.precision;
    let plan = Plan::from(base);
    let programs = gate.material.programs(&plan)?;
    let mut staged = gate.material.stage(&plan, &programs, options)?;
    let measurement = gate.measure(&staged)?;
    let levels = [Level { precision: base, integer: true }, Level { precision: base, integer: false }];
    let mut ladder = Ladder::new(gate, plan, &levels)?;
    if measurement.gate.passed || ladder.stages.is_empty() || gate.is_late(1.0) {
        return Ok(Outcome { staged, programs, measurement, choices: None });
    }
    ladder.measure_errors(gate, &levels)?;
    let mut tried = vec![ladder.tried(&format!("{base}"), &programs, &measurement)];
    let steps = ladder.steps();
    let mut best = (programs, measurement);
    // All of them first: if that does not help, nothing will.
    let (mut low, mut high) = (0, steps.len());
    let mut next = steps.len();
    while low < high {
        let programs = gate.material.programs(&ladder.plan(&steps[..next]))?;
        for written in &programs.programs {
            staged.set_program(&written.program)?;
        }
        let measurement = if next == steps.len() { gate.measure(&staged)? } else { gate.try_out(&staged)? };
        tried.push(ladder.tried(&format!("{base}, f32 activations in {next} of {} stages", steps.len()), &programs, &measurement));
        let passed = measurement.gate.passed;
        if passed {
            high = next;
            best = (programs, measurement);
        } else if next == steps.len() {
            best = (programs, measurement);
            break;
        } else {
            low = next;
        }
        next = (low + high) / 2;
        if next == low || gate.is_late(1.0) {
            break;
        }
    }
    let (programs, measurement) = best;
    for written in &programs.programs {
        staged.set_program(&written.program)?;
    }
    let raised = if measurement.gate.passed { high } else { steps.len() };
    let note = match measurement.gate.passed {
        true => format!("integer activations everywhere were not enough; {raised} of {} stages take f32 ones", steps.len()),
        false => "not through the gate even with f32 activations everywhere: use a higher precision, or `auto`".into(),
    };
    let choices = ladder.choices(&steps[..raised], tried, note);
    Ok(Outcome { staged, programs, measurement, choices: Some(choices) })
}

/// The mixture of precisions with the least bytes that is through the gate, as far as the search finds it.
pub(super) fn auto(gate: &mut Gate<'_, '_>, options: &mut ForgeOptions<'_>) -> Result<Outcome, ForgeError> {
    use Precision::{F16, F32, W4, W8};
    let level = |precision, integer| Level { precision, integer };
    let levels = [level(W4, true), level(W4, false), level(W8, true), level(W8, false), level(F16, true), level(F32, true)];
    let base = Plan { label: Some("auto".into()), ..Plan::from(W8) };
    let mut ladder = Ladder::new(gate, base, &levels)?;
    let mut tried = Vec::new();
    let mut attempt = |gate: &mut Gate<'_, '_>, plan: Plan, name: String| -> Result<(u64, Mixture), ForgeError> {
        let programs = gate.material.programs(&plan)?;
        // The one before is dropped by now: two writers to one place would be one too many.
        let staged = gate.material.stage(&plan, &programs, options)?;
        let measurement = gate.try_out(&staged)?;
        let bytes = stored_bytes(&programs);
        let result = measurement.gate.result.clone();
        tried.push(Tried { mixture: name, bytes, passed: measurement.gate.passed, result });
        Ok((bytes, Mixture { plan, measurement }))
    };
    let (bytes, lowest) = attempt(gate, ladder.plan(&[]), "w4".into())?;
    ladder.measure_errors(gate, &levels)?;
    let steps = ladder.steps();
    let rung = |count: usize| format!("w4, {count} of {} steps up", steps.len());
    // The ladder, by halving: rung `high` is through (the last is f32 throughout, so that is all but certain), rung `low − 1` is not.
    let (mut low, mut high) = (1, steps.len());
    let mut best = lowest.measurement.gate.passed.then(|| (bytes, Vec::new(), lowest));
    while low < high && !best.as_ref().is_some_and(|(_, chosen, _)| chosen.is_empty()) {
        let next = (low + high) / 2;
        let (bytes, mixture) = attempt(gate, ladder.plan(&steps[..next]), rung(next))?;
        if mixture.measurement.gate.passed {
            best = Some((bytes, steps[..next].to_vec(), mixture));
            high = next;
        } else {
            low = next + 1;
        }
        if gate.is_late(0.7) && best.is_some() {
            break;
        }
    }
    let (mut bytes, mut chosen, mut mixture) = match best {
        Some(best) => best,
        None => {
            let (bytes, mixture) = attempt(gate, ladder.plan(&steps), rung(steps.len()))?;
            (bytes, steps.clone(), mixture)
        }
    };
    if mixture.measurement.gate.passed {
        // What was raised early may not need it now that others are raised too: the largest gains are tried first.
        for place in ladder.lowerings(&chosen).into_iter().take(LOWERINGS) {
            if gate.is_late(1.0) {
                break;
            }
            let fewer: Vec<_> = chosen.iter().copied().filter(|step| *step != place).collect();
            let name = format!("{} one level lower", ladder.stages[place.0].stage);
            let (fewer_bytes, lowered) = attempt(gate, ladder.plan(&fewer), name)?;
            if lowered.measurement.gate.passed {
                (bytes, chosen, mixture) = (fewer_bytes, fewer, lowered);
            }
        }
    }
    let w8 = Plan { label: Some("auto".into()), ..Plan::from(W8) };
    let w8_bytes = stored_bytes(&gate.material.programs(&w8)?);
    let mut note = format!("{bytes} bytes of weights; w8 has {w8_bytes}");
    let mut is_w8 = false;
    if w8_bytes < bytes {
        let (_, plain) = attempt(gate, w8, "w8".into())?;
        if plain.measurement.gate.passed || !mixture.measurement.gate.passed {
            (mixture, is_w8) = (plain, true);
            note = format!(
                "plain w8: no mixture with less than its {w8_bytes} bytes is through the gate (the best has {bytes}: int4 gains little where rows are short, since scales and rows are padded to 64 bytes)"
            );
        } else {
            note += ", but is not through the gate";
        }
    }
    let Mixture { plan, measurement } = mixture;
    let programs = gate.material.programs(&plan)?;
    let staged = gate.material.stage(&plan, &programs, options)?;
    let mut choices = ladder.choices(&chosen, tried, note);
    if is_w8 {
        for (stage, choice) in ladder.stages.iter().zip(&mut choices.stages) {
            choice.chosen = Level::from(W8).to_string();
            choice.bytes = stage.bytes_at(Level::from(W8)).unwrap_or(choice.bytes);
        }
    }
    Ok(Outcome { staged, programs, measurement, choices: Some(choices) })
}

/// A plan with what the gate said of it.
struct Mixture {
    plan: Plan,
    measurement: Measurement,
}

/// The stages that have a choice, with their levels.
struct Ladder {
    plan: Plan,
    stages: Vec<Rungs>,
}

/// A stage's levels that differ from each other, cheapest first.
struct Rungs {
    stage: Name,
    levels: Vec<Level>,
    bytes: Vec<u64>,
    errors: Vec<f64>,
}

impl Rungs {
    fn bytes_at(&self, level: Level) -> Option<u64> {
        self.levels.iter().position(|l| *l == level).map(|i| self.bytes[i])
    }
}

impl Ladder {
    /// The stages of the text program that own weights which `levels` treat differently.
    fn new(gate: &Gate<'_, '_>, plan: Plan, levels: &[Level]) -> Result<Self, ForgeError> {
        let programs = uniform(gate, &plan, levels)?;
        let mut stages = Vec::new();
        for stage in &programs[0].programs[0].program.stages {
            let forms: Vec<_> = programs.iter().map(|programs| stored_form(&programs.programs[0].program, &stage.name)).collect();
            let mut rungs = Rungs { stage: stage.name.clone(), levels: Vec::new(), bytes: Vec::new(), errors: Vec::new() };
            for (i, form) in forms.iter().enumerate() {
                // A level that is as another one before it is no choice.
                if !forms[..i].contains(form) && !form.0.is_empty() {
                    rungs.levels.push(levels[i]);
                    rungs.bytes.push(form.2);
                }
            }
            if rungs.levels.len() > 1 {
                stages.push(rungs);
            }
        }
        Ok(Self { plan, stages })
    }

    /// Measures every stage at every level on the f32 program's inputs.
    fn measure_errors(&mut self, gate: &mut Gate<'_, '_>, levels: &[Level]) -> Result<(), ForgeError> {
        let programs = uniform(gate, &self.plan, levels)?;
        let passes = gate.probe_passes()?;
        let mut variants: Vec<Variant<'_>> =
            programs.iter().map(|p| Variant { written: &p.programs[0], errors: BTreeMap::new() }).collect();
        let teacher = Teacher { device: &gate.device, numbers: gate.material.numbers(), cancel: &gate.options.cancel };
        let progress = &mut *gate.options.progress;
        let mut silent = Silent(&mut |done, total| progress(super::GateProgress { what: "measuring stages", done, total }));
        teacher.run(&gate.f32.programs[0], &passes, &mut variants, &mut silent)?;
        let program = &programs[0].programs[0].program;
        let owners = owners(program);
        for rungs in &mut self.stages {
            // A stage answers for all stages that use its weights: the head for a tied table.
            let users: Vec<&Name> = program
                .ops
                .iter()
                .filter(|op| op.op.weights().iter().any(|w| owners.get(*w) == Some(&rungs.stage)))
                .filter_map(|op| program.stage_of(&op.path).map(|s| &s.name))
                .collect();
            for level in &rungs.levels {
                let variant = levels.iter().position(|l| l == level).map(|i| &variants[i]);
                let error = |stage: &&Name| {
                    variant.and_then(|v| v.errors.get(*stage)).map_or(0.0, |(difference, all)| (difference / all.max(1e-30)).sqrt())
                };
                rungs.errors.push(users.iter().map(error).fold(0.0, f64::max));
            }
        }
        Ok(())
    }

    /// The ladder: each step raises the stage whose error is the largest to its next level, until all are at their last.
    fn steps(&self) -> Vec<(usize, usize)> {
        let mut at = vec![0; self.stages.len()];
        let mut steps = Vec::new();
        loop {
            let open = (0..at.len()).filter(|&s| at[s] + 1 < self.stages[s].levels.len());
            let Some(worst) = open.max_by(|&a, &b| self.stages[a].errors[at[a]].total_cmp(&self.stages[b].errors[at[b]])) else {
                return steps;
            };
            at[worst] += 1;
            steps.push((worst, at[worst]));
        }
    }

    /// The levels after some steps.
    fn levels(&self, steps: &[(usize, usize)]) -> Vec<usize> {
        // Steps may have been taken out: a stage's level is the number of its steps.
        let mut at = vec![0; self.stages.len()];
        steps.iter().for_each(|(stage, _)| at[*stage] += 1);
        at
    }

    fn plan(&self, steps: &[(usize, usize)]) -> Plan {
        let mut plan = self.plan.clone();
        for (rungs, at) in self.stages.iter().zip(self.levels(steps)) {
            plan.stages.insert(rungs.stage.clone(), rungs.levels[at]);
        }
        plan
    }

    /// Steps that could be taken back, those that save most first: of each stage the last one.
    fn lowerings(&self, steps: &[(usize, usize)]) -> Vec<(usize, usize)> {
        let at = self.levels(steps);
        let mut lowerings: Vec<_> = (0..at.len()).filter(|&s| at[s] > 0).map(|s| (s, at[s])).collect();
        // Less than a percent of all bytes is not worth a gate.
        let all: u64 = self.stages.iter().zip(&at).map(|(rungs, &level)| rungs.bytes[level]).sum();
        let gain = |s: usize, level: usize| self.stages[s].bytes[level].saturating_sub(self.stages[s].bytes[level - 1]);
        lowerings.retain(|&(s, level)| gain(s, level) * 100 >= all);
        lowerings.sort_by_key(|&(s, level)| std::cmp::Reverse(gain(s, level)));
        lowerings
    }

    fn tried(&self, mixture: &str, programs: &Programs, measurement: &Measurement) -> Tried {
        let (passed, result) = (measurement.gate.passed, measurement.gate.result.clone());
        Tried { mixture: mixture.into(), bytes: stored_bytes(programs), passed, result }
    }

    fn choices(&self, steps: &[(usize, usize)], tried: Vec<Tried>, note: String) -> Choices {
        let stages = self.stages.iter().zip(self.levels(steps)).map(|(rungs, at)| StageChoice {
            stage: rungs.stage.to_string(),
            chosen: rungs.levels[at].to_string(),
            bytes: rungs.bytes[at],
            errors: rungs.levels.iter().zip(&rungs.errors).map(|(level, error)| (level.to_string(), significant(*error))).collect(),
        });
        Choices { stages: stages.collect(), tried, note }
    }
}

impl Gate<'_, '_> {
    /// A few short readings on which levels are measured: the beginnings of the suite's prompts, with ids of other prompts for answers.
    fn probe_passes(&mut self) -> Result<Vec<Pass>, ForgeError> {
        let suite = self.suite.take().unwrap_or_default();
        let mut rows = PROBE_ROWS;
        let mut played = Vec::new();
        for prompt in &suite {
            let length = prompt.ids.len().min(rows).min(64);
            if length <= PROBE_TOKENS {
                continue;
            }
            rows -= length;
            let (prompt, answer) = prompt.ids[..length].split_at(length - PROBE_TOKENS);
            let notes = Default::default();
            played.push(Played { name: String::new(), prompt: prompt.to_vec(), ids: answer.to_vec(), logits: Vec::new(), notes });
        }
        if played.is_empty() {
            // Only prompts of a few ids: their ids one after the other.
            let ids: Vec<u32> = suite.iter().flat_map(|prompt| prompt.ids.iter().copied()).collect();
            let ids = if ids.len() > 1 { ids } else { vec![ids.first().copied().unwrap_or(0); 2] };
            played.push(Played {
                name: String::new(),
                prompt: ids[..1].to_vec(),
                ids: ids[1..].to_vec(),
                logits: Vec::new(),
                notes: Default::default(),
            });
        }
        self.suite = Some(suite);
        Ok(all_passes(&self.f32.programs[0].program, &played))
    }
}

/// The text program's weights of a stage (encodings), the forms of its products, and its bytes.
fn stored_form(program: &Checked, stage: &Name) -> (Vec<String>, Vec<String>, u64) {
    let owners = owners(program);
    let own: Vec<_> = program.weights.iter().filter(|(name, _)| owners.get(*name) == Some(stage)).collect();
    let bytes = own.iter().map(|(_, w)| tensor_bytes(w.encoding, &w.shape)).sum();
    let ops = program.ops.iter().filter(|op| op.op.weights().first().is_some_and(|w| owners.get(*w) == Some(stage)));
    (own.iter().map(|(_, w)| w.encoding.to_string()).collect(), ops.map(|op| format!("{:?}", form_of(&op.op))).collect(), bytes)
}

/// The programs with all stages at one level, for each level.
fn uniform(gate: &Gate<'_, '_>, plan: &Plan, levels: &[Level]) -> Result<Vec<Programs>, ForgeError> {
    let names: Vec<Name> = gate.f32.programs[0].program.stages.iter().map(|stage| stage.name.clone()).collect();
    let at = |level: &Level| Plan { stages: names.iter().map(|name| (name.clone(), *level)).collect(), ..plan.clone() };
    levels.iter().map(|level| gate.material.programs(&at(level))).collect()
}

fn stored_bytes(programs: &Programs) -> u64 {
    crate::forge::weights(programs).map(|(_, w, _)| tensor_bytes(w.encoding, &w.shape)).sum()
}

/// Four digits are enough for a table.
fn significant(x: f64) -> f64 {
    if x.is_finite() { format!("{x:.3e}").parse().unwrap_or(x) } else { f64::MAX }
}

/// Nobody listens.
struct Silent<'a>(&'a mut dyn FnMut(usize, usize));

impl Audience for Silent<'_> {
    fn stage(&mut self, _: &str, _: &Pass, _: &[f32]) {}
    fn logits(&mut self, _: &Pass, _: usize, _: usize, _: &[f32]) {}
    fn progress(&mut self, done: usize, all: usize) {
        (self.0)(done, all);
    }
}
