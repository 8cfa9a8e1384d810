//! The search for a mixture of precisions and activation forms that passes its gate.
//!
//! Each stage has levels, cheapest first. One f32 pass over a few prompts measures for every stage and level the error of the stage's result on the f32 program's
//! inputs. Then stages are raised, always the one whose error is the largest, which gives a ladder of mixtures from the cheapest to the dearest; the
//! first rung that passes the gate is found by bisection, and raised stages are lowered again if the gate passes without them.

use super::{
    Gate,
    judge::{Measurement, Played},
    suite::SuitePrompt,
    teacher::{Audience, Pass},
    whole,
};
use crate::{
    ForgeError, ForgeOptions,
    families::Programs,
    plan::{Level, Owners, PrecisionPlan, form_of},
    precision::Precision,
};
use qhx_bundle::{
    Staged,
    parity::{Choices, StageChoice, Tried},
};
use qhx_ir::{Checked, Name};
use qhx_runtime::{Prompt, memory::tensor_bytes};

/// Rows that the errors of levels are measured on.
const PROBE_ROWS: usize = 256;
/// Tokens of each answer among them.
const PROBE_TOKENS: usize = 8;
/// Attempts to lower a raised stage again.
const LOWERINGS: usize = 12;

/// What a search ends with, whether it passed the gate or not.
pub(super) struct Outcome {
    pub(super) staged: Staged,
    pub(super) programs: Programs,
    pub(super) measurement: Measurement,
    pub(super) choices: Option<Choices>,
}

/// A bundle at the requested precision. If it fails its gate, the stages that lose most with integer activations take f32 ones; weights stay.
pub(super) fn fixed(gate: &mut Gate<'_, '_>, options: &mut ForgeOptions<'_>) -> Result<Outcome, ForgeError> {
    let base = options.precision;
    let plan = PrecisionPlan::from(base);
    let programs = gate.material.programs(&plan)?;
    let mut staged = gate.material.stage(&plan, &programs, options)?;
    let measurement = gate.measure(&staged)?;
    if measurement.gate.passed {
        return Ok(Outcome { staged, programs, measurement, choices: None });
    }
    let levels = [Level { precision: base, integer: true }, Level { precision: base, integer: false }];
    let mut ladder = Ladder::new(gate, plan, &levels)?;
    if ladder.stages.is_empty() {
        return Ok(Outcome { staged, programs, measurement, choices: None });
    }
    // Without time to find out which stages need it, all of them get f32 activations.
    let in_haste = gate.options.quick || gate.is_late(1.0);
    match in_haste {
        true => ladder.leave_errors_unknown(),
        false => ladder.measure_errors(gate, &levels)?,
    }
    let mut tried = vec![ladder.tried(&format!("{base}"), &programs, &measurement)];
    let steps = ladder.steps();
    let mut best = (programs, measurement);
    // All of them first: if that does not help, nothing will.
    let (mut low, mut high) = (0, steps.len());
    let mut next = steps.len();
    while low < high {
        let programs = gate.material.programs(&ladder.plan(&ladder.levels(&steps[..next])))?;
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
        if next == low || in_haste || gate.is_late(1.0) {
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
        false => "it fails even with f32 activations everywhere: use a higher precision, or `auto`".into(),
    };
    let choices = ladder.choices(&ladder.levels(&steps[..raised]), tried, note);
    Ok(Outcome { staged, programs, measurement, choices: Some(choices) })
}

/// The smallest mixture of precisions that the search finds to pass the gate.
pub(super) fn auto(gate: &mut Gate<'_, '_>, options: &mut ForgeOptions<'_>) -> Result<Outcome, ForgeError> {
    use Precision::{F16, F32, W4, W8};
    let level = |precision, integer| Level { precision, integer };
    let levels = [level(W4, true), level(W4, false), level(W8, true), level(W8, false), level(F16, true), level(F32, true)];
    let base = PrecisionPlan { label: Some("auto".into()), ..PrecisionPlan::from(W8) };
    let mut ladder = Ladder::new(gate, base, &levels)?;
    let mut tried = Vec::new();
    let mut attempt = |gate: &mut Gate<'_, '_>, plan: PrecisionPlan, name: String| -> Result<(u64, Mixture), ForgeError> {
        let programs = gate.material.programs(&plan)?;
        // The one before is dropped by now: two writers to one place would be one too many.
        let staged = gate.material.stage(&plan, &programs, options)?;
        let measurement = gate.try_out(&staged)?;
        let bytes = stored_bytes(&programs);
        let result = measurement.gate.result.clone();
        tried.push(Tried { mixture: name, bytes, passed: measurement.gate.passed, result });
        Ok((bytes, Mixture { plan, measurement }))
    };
    let (bytes, lowest) = attempt(gate, ladder.plan(&ladder.levels(&[])), "w4".into())?;
    ladder.measure_errors(gate, &levels)?;
    let steps = ladder.steps();
    let rung = |count: usize| format!("w4, {count} of {} steps up", steps.len());
    // The ladder, by bisection: rung `high` passes (the last is f32 throughout, so that is all but certain), rung `low − 1` fails.
    let (mut low, mut high) = (1, steps.len());
    let mut best = lowest.measurement.gate.passed.then(|| (bytes, ladder.levels(&[]), lowest));
    let at_once = best.is_some();
    while low < high && !at_once {
        let next = (low + high) / 2;
        let levels = ladder.levels(&steps[..next]);
        let (bytes, mixture) = attempt(gate, ladder.plan(&levels), rung(next))?;
        if mixture.measurement.gate.passed {
            best = Some((bytes, levels, mixture));
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
            let levels = ladder.levels(&steps);
            let (bytes, mixture) = attempt(gate, ladder.plan(&levels), rung(steps.len()))?;
            (bytes, levels, mixture)
        }
    };
    // The ladder raises some stages far while others are still at the bottom. The plain middle may do with less.
    let middle = ladder.uniform(Level { precision: W8, integer: false });
    if ladder.bytes(&middle) < ladder.bytes(&chosen) && !gate.is_late(0.7) {
        let (middle_bytes, plain) = attempt(gate, ladder.plan(&middle), "w8 with f32 activations".into())?;
        if plain.measurement.gate.passed {
            (bytes, chosen, mixture) = (middle_bytes, middle, plain);
        }
    }
    if mixture.measurement.gate.passed {
        // What was raised early may not need it now that others are raised too: what gains most for the least error is tried first.
        for (stage, level) in ladder.lowerings(&chosen).into_iter().take(LOWERINGS) {
            if gate.is_late(1.0) {
                break;
            }
            let mut fewer = chosen.clone();
            fewer[stage] = level;
            let rungs = &ladder.stages[stage];
            let (fewer_bytes, lowered) = attempt(gate, ladder.plan(&fewer), format!("{} down to {}", rungs.stage, rungs.levels[level]))?;
            if lowered.measurement.gate.passed {
                (bytes, chosen, mixture) = (fewer_bytes, fewer, lowered);
            }
        }
    }
    let w8 = PrecisionPlan { label: Some("auto".into()), ..PrecisionPlan::from(W8) };
    let w8_bytes = stored_bytes(&gate.material.programs(&w8)?);
    let share = 100.0 * bytes as f64 / w8_bytes as f64;
    let mut note = match bytes < w8_bytes {
        true => format!("{bytes} bytes of weights, {share:.1} % of the {w8_bytes} that w8 has"),
        false => {
            format!("{bytes} bytes of weights, not fewer than the {w8_bytes} of w8: every smaller mixture that was tried failed the gate")
        }
    };
    let mut is_w8 = false;
    if w8_bytes < bytes {
        let (_, plain) = attempt(gate, w8, "w8".into())?;
        if plain.measurement.gate.passed || !mixture.measurement.gate.passed {
            (mixture, is_w8) = (plain, true);
            note = format!("plain w8: every mixture below its {w8_bytes} bytes that was tried failed the gate (the best has {bytes})");
        } else {
            note += &format!(", and w8 itself is not ({})", plain.measurement.gate.result);
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
    plan: PrecisionPlan,
    measurement: Measurement,
}

/// The stages that have a choice, with their levels.
struct Ladder {
    plan: PrecisionPlan,
    stages: Vec<Rungs>,
}

/// A stage's levels that differ from each other, cheapest first.
struct Rungs {
    /// The program's number.
    program: usize,
    stage: Name,
    levels: Vec<Level>,
    bytes: Vec<u64>,
    errors: Vec<f64>,
    /// The place in `levels` of each level that was asked for: those that come to the same are one.
    places: Vec<(Level, usize)>,
}

impl Rungs {
    fn bytes_at(&self, level: Level) -> Option<u64> {
        self.place(level).map(|place| self.bytes[place])
    }

    fn place(&self, level: Level) -> Option<usize> {
        self.places.iter().find(|(asked, _)| *asked == level).map(|(_, place)| *place)
    }
}

impl Ladder {
    /// The stages that own weights which `levels` treat differently: of the text, and of towers that the suite has something for.
    fn new(gate: &Gate<'_, '_>, plan: PrecisionPlan, levels: &[Level]) -> Result<Self, ForgeError> {
        let programs = uniform(gate, &plan, levels)?;
        let mut stages = Vec::new();
        let measured = (0..programs[0].programs.len()).filter(|&number| number == 0 || gate.has_media_for(number));
        let all =
            measured.flat_map(|number| programs[0].programs[number].program.stages.iter().enumerate().map(move |stage| (number, stage)));
        let owners: Vec<Owners> = programs[0].programs.iter().map(|written| Owners::of(&written.program)).collect();
        for (number, (place, stage)) in all {
            let form = |programs: &Programs| stored_form(&programs.programs[number].program, &owners[number], place);
            let forms: Vec<_> = programs.iter().map(form).collect();
            let mut rungs = Rungs {
                program: number,
                stage: stage.name.clone(),
                levels: Vec::new(),
                bytes: Vec::new(),
                errors: Vec::new(),
                places: Vec::new(),
            };
            for (i, form) in forms.iter().enumerate().filter(|(_, form)| !form.0.is_empty()) {
                // A level that is as another one before it is no choice.
                let place = match forms[..i].iter().position(|earlier| earlier == form) {
                    Some(earlier) => rungs.places[earlier].1,
                    None => {
                        rungs.levels.push(levels[i]);
                        rungs.bytes.push(form.2);
                        rungs.levels.len() - 1
                    }
                };
                rungs.places.push((levels[i], place));
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
        let probes = gate.probes();
        let teacher = super::teacher(gate.material, gate.precision, &gate.device, &gate.options.cancel);
        let progress = &mut *gate.options.progress;
        let mut silent = Silent(&mut |done, total| progress(super::GateProgress::new("measuring stages", done, total)));
        let errors = whole::run(&teacher, &gate.f32, &gate.manifest, &probes, &programs, &mut silent)?;
        let owners: Vec<Owners> = programs[0].programs.iter().map(|written| Owners::of(&written.program)).collect();
        for rungs in &mut self.stages {
            let program = &programs[0].programs[rungs.program].program;
            // A stage answers for all stages that use its weights: the head for a tied table.
            let users = program.stage_place(&rungs.stage).map_or(&[][..], |place| owners[rungs.program].users(place));
            let users: Vec<&Name> = users.iter().map(|&op| &program.stages[program.stage_of_op(op)].name).collect();
            for level in &rungs.levels {
                let errors = levels.iter().position(|l| l == level).map(|i| &errors[i]);
                let error = |stage: &&Name| {
                    errors.and_then(|errors| errors.get(*stage)).map_or(0.0, |(difference, all)| (difference / all.max(1e-30)).sqrt())
                };
                rungs.errors.push(users.iter().map(error).fold(0.0, f64::max));
            }
        }
        Ok(())
    }

    fn leave_errors_unknown(&mut self) {
        self.stages.iter_mut().for_each(|rungs| rungs.errors = vec![0.0; rungs.levels.len()]);
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

    /// Each stage's level after some steps.
    fn levels(&self, steps: &[(usize, usize)]) -> Vec<usize> {
        let mut at = vec![0; self.stages.len()];
        steps.iter().for_each(|(stage, _)| at[*stage] += 1);
        at
    }

    fn plan(&self, levels: &[usize]) -> PrecisionPlan {
        let mut plan = self.plan.clone();
        for (rungs, &at) in self.stages.iter().zip(levels) {
            plan.stages.insert(rungs.stage.clone(), rungs.levels[at]);
        }
        plan
    }

    /// Each stage at this level.
    fn uniform(&self, level: Level) -> Vec<usize> {
        self.stages.iter().map(|rungs| rungs.place(level).unwrap_or(rungs.levels.len() - 1)).collect()
    }

    fn bytes(&self, levels: &[usize]) -> u64 {
        self.stages.iter().zip(levels).map(|(rungs, &at)| rungs.bytes[at]).sum()
    }

    /// Stages that could be lowered, each to its highest level with fewer bytes; those that save most for the least error first.
    fn lowerings(&self, at: &[usize]) -> Vec<(usize, usize)> {
        let lower = |(stage, (rungs, &level)): (usize, (&Rungs, &usize))| {
            let next = (0..level).rev().find(|&next| rungs.bytes[next] < rungs.bytes[level])?;
            Some((rungs.errors[next] / (rungs.bytes[level] - rungs.bytes[next]) as f64, stage, next))
        };
        let mut lowerings: Vec<_> = self.stages.iter().zip(at).enumerate().filter_map(lower).collect();
        lowerings.sort_by(|a, b| a.0.total_cmp(&b.0));
        lowerings.into_iter().map(|(_, stage, next)| (stage, next)).collect()
    }

    fn tried(&self, mixture: &str, programs: &Programs, measurement: &Measurement) -> Tried {
        let (passed, result) = (measurement.gate.passed, measurement.gate.result.clone());
        Tried { mixture: mixture.into(), bytes: stored_bytes(programs), passed, result }
    }

    fn choices(&self, levels: &[usize], tried: Vec<Tried>, note: String) -> Choices {
        let stages = self.stages.iter().zip(levels).map(|(rungs, &at)| StageChoice {
            stage: rungs.stage.to_string(),
            chosen: rungs.levels[at].to_string(),
            bytes: rungs.bytes[at],
            errors: rungs.levels.iter().zip(&rungs.errors).map(|(level, error)| (level.to_string(), significant(*error))).collect(),
        });
        Choices { stages: stages.collect(), tried, note }
    }
}

impl Gate<'_, '_> {
    /// Whether the suite has media for the tower of this number.
    fn has_media_for(&self, number: usize) -> bool {
        let name = &self.f32.programs[number].program.name;
        self.suite.prompts.iter().flat_map(|prompt| &prompt.media).any(|drawn| drawn.medium.program() == &**name)
    }

    /// A few short readings on which levels are measured: the beginnings of the suite's prompts, with their own ids for answers, and a case for each kind of
    /// media.
    fn probes(&self) -> Vec<Played> {
        let mut rows = PROBE_ROWS;
        let mut probes = Vec::new();
        for prompt in self.suite.prompts.iter().filter(|prompt| prompt.media.is_empty()) {
            let ids = prompt.prompt.ids();
            let length = ids.len().min(rows).min(64);
            if length > PROBE_TOKENS {
                rows -= length;
                let (prompt, answer) = ids[..length].split_at(length - PROBE_TOKENS);
                probes.push(probe(Prompt::from_ids(prompt.to_vec()), answer));
            }
        }
        if probes.is_empty() {
            // Only prompts of a few ids: their ids one after the other.
            let ids: Vec<u32> = self.suite.prompts.iter().flat_map(|prompt| prompt.prompt.ids().iter().copied()).collect();
            let ids = if ids.len() > 1 { ids } else { vec![ids.first().copied().unwrap_or(0); 2] };
            probes.push(probe(Prompt::from_ids(ids[..1].to_vec()), &ids[1..]));
        }
        let mut seen: Vec<&str> = Vec::new();
        for SuitePrompt { prompt, media, .. } in &self.suite.prompts {
            if media.iter().any(|drawn| !seen.contains(&drawn.medium.program())) {
                seen.extend(media.iter().map(|drawn| drawn.medium.program()));
                let last = &prompt.ids()[prompt.ids().len().saturating_sub(PROBE_TOKENS)..];
                let media = media.iter().map(|drawn| (drawn.clone(), Default::default())).collect();
                probes.push(Played { media, ..probe(prompt.clone(), last) });
            }
        }
        probes
    }
}

fn probe(prompt: Prompt, answer: &[u32]) -> Played {
    Played { name: String::new(), prompt, media: Vec::new(), ids: answer.to_vec(), shown: 0, logits: Vec::new(), notes: Default::default() }
}

/// A program's weights of a stage (encodings), the forms of its products, and its bytes.
fn stored_form(program: &Checked, owners: &Owners, stage: usize) -> (Vec<String>, Vec<String>, u64) {
    let own: Vec<_> = owners.weights(stage).iter().filter_map(|name| program.weights.get(name)).collect();
    let bytes = own.iter().map(|w| tensor_bytes(w.encoding, &w.shape)).sum();
    let users = owners.users(stage).iter().map(|&op| &program.ops[op].op);
    let ops = users.filter(|op| op.weights().first().is_some_and(|weight| owners.stage(weight) == Some(stage)));
    (own.iter().map(|w| w.encoding.to_string()).collect(), ops.map(|op| format!("{:?}", form_of(op))).collect(), bytes)
}

/// The programs with all stages at one level, for each level.
fn uniform(gate: &Gate<'_, '_>, plan: &PrecisionPlan, levels: &[Level]) -> Result<Vec<Programs>, ForgeError> {
    let all = gate.f32.programs.iter().flat_map(|written| &written.program.stages);
    let names: Vec<Name> = all.map(|stage| stage.name.clone()).collect();
    let at = |level: &Level| PrecisionPlan { stages: names.iter().map(|name| (name.clone(), *level)).collect(), ..plan.clone() };
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
    fn output(&mut self, _: &Pass, _: &str, _: &[f32]) {}
    fn logits(&mut self, _: &Pass, _: usize, _: usize, _: &[f32]) {}
    fn progress(&mut self, done: usize, all: usize) {
        (self.0)(done, all);
    }
}
