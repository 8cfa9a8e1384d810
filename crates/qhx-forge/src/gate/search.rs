//! What is tried until a bundle passes its gate: finer activations.

use super::{
    Gate,
    judge::{Measurement, Played},
    suite::SuitePrompt,
    teacher::Silent,
    whole,
};
use crate::{
    ForgeError, ForgeOptions,
    families::Programs,
    plan::{Owners, PrecisionPlan, form_of},
    precision::Precision,
};
use qhx_bundle::{
    Staged,
    parity::{Choices, StageChoice, Tried},
};
use qhx_ir::{ActivationForm, Checked, Name};
use qhx_runtime::{Prompt, memory::tensor_bytes};
use std::collections::BTreeMap;

/// Rows that the errors of stages are measured on.
const PROBE_ROWS: usize = 256;
/// Tokens of each answer among them.
const PROBE_TOKENS: usize = 8;

/// What a search ends with, whether it passed the gate or not.
pub(super) struct Outcome {
    pub(super) staged: Staged,
    pub(super) programs: Programs,
    pub(super) measurement: Measurement,
    pub(super) choices: Option<Choices>,
}

/// A bundle as planned. If it fails its gate, the stages that lose most by their activations take finer ones; weights stay.
///
/// Not where a checkpoint's own types decide (`native`), and not within a budget: what is computed must not depend on how busy the machine is.
pub(super) fn fixed(gate: &mut Gate<'_, '_>, plan: PrecisionPlan, options: &mut ForgeOptions<'_>) -> Result<Outcome, ForgeError> {
    let label = plan.label();
    let programs = gate.material.programs(&plan)?;
    let mut staged = gate.material.stage(&plan, &programs, options)?;
    let measurement = gate.measure(&staged)?;
    let is_given = gate.precision == Precision::Native || gate.options.budget.is_some() || gate.options.quick;
    if measurement.gate.passed || is_given {
        return Ok(Outcome { staged, programs, measurement, choices: None });
    }
    let mut ladder = Ladder::new(gate, plan, &programs);
    if ladder.stages.is_empty() {
        return Ok(Outcome { staged, programs, measurement, choices: None });
    }
    ladder.measure_errors(gate)?;
    let mut tried = vec![tried(label.clone(), &programs, &measurement)];
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
        tried.push(self::tried(format!("{label}, {next} of {} steps to f32 activations", steps.len()), &programs, &measurement));
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
        if next == low {
            break;
        }
    }
    let (programs, measurement) = best;
    for written in &programs.programs {
        staged.set_program(&written.program)?;
    }
    let raised = if measurement.gate.passed { high } else { steps.len() };
    let note = match measurement.gate.passed {
        true => format!("the activations of {label} were not enough; it takes {raised} of {} steps to f32 activations", steps.len()),
        false => "it fails even with f32 activations everywhere: use a higher precision, or `auto`".into(),
    };
    let choices = ladder.choices(&ladder.levels(&steps[..raised]), tried, note);
    Ok(Outcome { staged, programs, measurement, choices: Some(choices) })
}

/// How fine a stage's activations are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activations {
    /// As planned.
    Planned,
    /// With a scale for every 32 where they had one for a row.
    Blocks,
    /// f32.
    Floats,
}

impl Activations {
    const ALL: [Self; 3] = [Self::Planned, Self::Blocks, Self::Floats];

    fn form(self, planned: ActivationForm) -> ActivationForm {
        match (self, planned) {
            (Self::Blocks, ActivationForm::I8Row) => ActivationForm::I8Block32,
            (Self::Floats, _) => ActivationForm::F32,
            _ => planned,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Planned => "as planned",
            Self::Blocks => "activations in blocks of 32",
            Self::Floats => "f32 activations",
        }
    }
}

/// The stages that have a choice of activations.
struct Ladder {
    plan: PrecisionPlan,
    stages: Vec<Rungs>,
}

/// A stage's activations, coarsest first, those that come to the same once.
struct Rungs {
    /// The program's number.
    program: usize,
    stage: Name,
    /// Of each level: the form in which rows meet each weight.
    levels: Vec<(Activations, BTreeMap<Name, ActivationForm>)>,
    bytes: u64,
    errors: Vec<f64>,
}

impl Ladder {
    /// Stages of the text, and of towers that the suite has something for.
    fn new(gate: &Gate<'_, '_>, plan: PrecisionPlan, programs: &Programs) -> Self {
        let mut stages = Vec::new();
        for (number, written) in programs.programs.iter().enumerate().filter(|&(number, _)| number == 0 || gate.has_media_for(number)) {
            let program = &written.program;
            let owners = Owners::of(program);
            for (place, stage) in program.stages.iter().enumerate() {
                let mut levels: Vec<(Activations, BTreeMap<Name, ActivationForm>)> = Vec::new();
                for activations in Activations::ALL {
                    let forms = forms(program, &owners, place, activations);
                    if !forms.is_empty() && !levels.iter().any(|(_, earlier)| *earlier == forms) {
                        levels.push((activations, forms));
                    }
                }
                if levels.len() > 1 {
                    let bytes = owners.weights(place).iter().map(|name| &program.weights[name]).map(|w| tensor_bytes(w.encoding, &w.shape));
                    let errors = vec![0.0; levels.len()];
                    stages.push(Rungs { program: number, stage: stage.name.clone(), bytes: bytes.sum(), levels, errors });
                }
            }
        }
        Self { plan, stages }
    }

    /// Measures every stage with all its activations on the f32 program's inputs.
    fn measure_errors(&mut self, gate: &mut Gate<'_, '_>) -> Result<(), ForgeError> {
        let uniform = |activations: Activations| {
            let place = |rungs: &Rungs| rungs.levels.iter().rposition(|(level, _)| *level as usize <= activations as usize).unwrap_or(0);
            gate.material.programs(&self.plan(&self.stages.iter().map(place).collect::<Vec<_>>()))
        };
        let programs = Activations::ALL.map(uniform).into_iter().collect::<Result<Vec<_>, _>>()?;
        let f32 = gate.material.f32_programs_like(&programs[0])?;
        let probes = gate.probes();
        let teacher = super::teacher(gate.material, gate.precision, &gate.device, &gate.options.cancel);
        let progress = &mut *gate.options.progress;
        let mut silent = Silent(&mut |done, total| progress(super::GateProgress::new("measuring stages", done, total)));
        let errors = whole::run(&teacher, &f32, &gate.manifest, &probes, &programs, &mut silent)?;
        let owners: Vec<Owners> = programs[0].programs.iter().map(|written| Owners::of(&written.program)).collect();
        for rungs in &mut self.stages {
            let program = &programs[0].programs[rungs.program].program;
            // A stage answers for all stages that use its weights: the head for a tied table.
            let users = program.stage_place(&rungs.stage).map_or(&[][..], |place| owners[rungs.program].users(place));
            let users: Vec<&Name> = users.iter().map(|&op| &program.stages[program.stage_of_op(op)].name).collect();
            for ((level, _), error) in rungs.levels.iter().zip(&mut rungs.errors) {
                let errors = &errors[*level as usize];
                let of = |stage: &&Name| errors.get(*stage).map_or(0.0, |(difference, all)| (difference / all.max(1e-30)).sqrt());
                *error = users.iter().map(of).fold(0.0, f64::max);
            }
        }
        Ok(())
    }

    /// Each step raises the stage whose error is the largest to its next level, until all are at their last.
    fn steps(&self) -> Vec<usize> {
        let mut at = vec![0; self.stages.len()];
        let mut steps = Vec::new();
        loop {
            let open = (0..at.len()).filter(|&s| at[s] + 1 < self.stages[s].levels.len());
            let Some(worst) = open.max_by(|&a, &b| self.stages[a].errors[at[a]].total_cmp(&self.stages[b].errors[at[b]])) else {
                return steps;
            };
            at[worst] += 1;
            steps.push(worst);
        }
    }

    /// Each stage's level after some steps.
    fn levels(&self, steps: &[usize]) -> Vec<usize> {
        let mut at = vec![0; self.stages.len()];
        steps.iter().for_each(|&stage| at[stage] += 1);
        at
    }

    fn plan(&self, levels: &[usize]) -> PrecisionPlan {
        let mut plan = self.plan.clone();
        for (rungs, &at) in self.stages.iter().zip(levels) {
            plan.activations.extend(rungs.levels[at].1.iter().map(|(weight, form)| (weight.clone(), *form)));
        }
        plan
    }

    fn choices(&self, levels: &[usize], tried: Vec<Tried>, note: String) -> Choices {
        let stages = self.stages.iter().zip(levels).map(|(rungs, &at)| StageChoice {
            stage: rungs.stage.to_string(),
            chosen: rungs.levels[at].0.name().into(),
            bytes: rungs.bytes,
            errors: rungs.levels.iter().zip(&rungs.errors).map(|((level, _), error)| (level.name().into(), significant(*error))).collect(),
        });
        Choices { stages: stages.collect(), tried, note }
    }
}

/// By weight that a stage decides on: the form in which rows meet it, where it is an integer one or was.
fn forms(program: &Checked, owners: &Owners, stage: usize, activations: Activations) -> BTreeMap<Name, ActivationForm> {
    let mut forms = BTreeMap::new();
    for &place in owners.users(stage) {
        let op = &program.ops[place].op;
        let planned = form_of(op);
        if let Some(weight) = op.weights().first().filter(|weight| planned.is_integer() && owners.stage(weight) == Some(stage)) {
            forms.insert((*weight).clone(), activations.form(planned));
        }
    }
    forms
}

impl Gate<'_, '_> {
    /// Whether the suite has media for the tower of this number.
    fn has_media_for(&self, number: usize) -> bool {
        let name = &self.f32.programs[number].program.name;
        self.suite.prompts.iter().flat_map(|prompt| &prompt.media).any(|drawn| drawn.medium.program() == &**name)
    }

    /// A few short readings on which stages are measured: the beginnings of the suite's prompts, with their own ids for answers, and a case for each kind of
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

pub(super) fn tried(mixture: String, programs: &Programs, measurement: &Measurement) -> Tried {
    let (passed, result) = (measurement.gate.passed, measurement.gate.result.clone());
    Tried { mixture, bytes: stored_bytes(programs), passed, result }
}

pub(super) fn stored_bytes(programs: &Programs) -> u64 {
    crate::forge::weights(programs).map(|(_, w, _)| tensor_bytes(w.encoding, &w.shape)).sum()
}

/// Four digits are enough for a table.
pub(super) fn significant(x: f64) -> f64 {
    if x.is_finite() { format!("{x:.3e}").parse().unwrap_or(x) } else { f64::MAX }
}

/// For tests: the error of each stage of a plan with f32 activations, as a ladder measures it.
#[cfg(test)]
pub(super) fn stage_errors(gate: &mut Gate<'_, '_>, plan: &PrecisionPlan) -> Result<Vec<(Name, f64)>, ForgeError> {
    let programs = gate.material.programs(plan)?;
    let mut ladder = Ladder::new(gate, plan.clone(), &programs);
    ladder.measure_errors(gate)?;
    Ok(ladder.stages.into_iter().map(|rungs| (rungs.stage, *rungs.errors.last().unwrap_or(&0.0))).collect())
}
