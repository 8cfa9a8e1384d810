//! The gate of an arch folder: what its device computes, compared with the f32 program.
//!
//! The device runs the bundle's own program and weights, compiled for the sizes of the folder: compiling is deterministic, so these are the numbers of its context
//! binaries. A model that is small enough answers prompts (`whole`). Of a larger one each kind of stage is compiled alone and runs on the f32
//! program's inputs (`stages`); the bundle's answers on the processor then are the oracle, and `verify` on the device completes the proof.

use super::{
    Gate, GateProgress, Scope, Stored,
    judge::{Judge, Measurement, Played, Standard},
    language,
    limits::{Class, raised},
    suite,
    teacher::{Silent, Teacher},
    verdict, whole,
};
use crate::{ForgeError, ForgeOptions, families::Programs, target::TargetOrder};
use qhx_bundle::{
    Bundle, Manifest, Staged,
    manifest::TEXT_PROGRAM,
    parity::{Case, Covered, GateKind, GateResult, Level, Parity, StageResult},
};
use qhx_ir::{Checked, DeviceError, Encoding, Name};
use qhx_runtime::{
    LoadOptions, Model, ModelParts,
    memory::weight_bytes,
    verify::{Notes, centred_stages, row_stages},
};
use std::{collections::BTreeSet, time::Duration};
use suite::{Suite, SuitePrompt};

/// Tokens of each answer: emulators are slow.
const TOKENS: usize = 16;
/// Bytes of weights up to which a model is asked to answer.
const WHOLE_BYTES: u64 = 512 << 20;
/// About how long answering may take, unless somebody says otherwise.
const BUDGET: Duration = Duration::from_secs(120);
/// Rows of the prompt on which stages are compared.
const STAGE_ROWS: usize = 40;
/// The lowest cosine of a stage with float weights, and with integer ones.
const LEAST_COSINE: [f64; 2] = [0.999, 0.99];

impl Gate<'_, '_> {
    /// Holds the device of an arch folder to the gate. `root` is what was measured of the bundle itself.
    pub(super) fn measure_target(
        &mut self,
        staged: &Staged,
        programs: &Programs,
        order: &TargetOrder,
        forge: &ForgeOptions<'_>,
        root: &Parity,
    ) -> Result<Parity, ForgeError> {
        let bundle = staged.open()?;
        let all: Vec<&Checked> = bundle.programs().values().collect();
        let order = &order.placed(&all)?;
        let mut manifest = order.manifest(bundle.manifest(), &all)?;
        // Sessions of rings may be longer. As far as their attention sees, the f32 program sees the same, and no further.
        if let Some(plan) = &manifest.plan {
            manifest.model.context_length = plan.context;
        }
        let change = |own: &mut Manifest| {
            own.media = manifest.media.clone();
            own.model.context_length = manifest.model.context_length;
        };
        let (paper, _) = language::language_with(self.material, &self.f32, forge, &change)?;
        let suite = suite::fitting(&paper, self.options.prompts.as_deref())?;
        let text = bundle.program(TEXT_PROGRAM).ok_or_else(|| ForgeError::Gate("the bundle has no text program".into()))?;
        let is_small = weight_bytes(text) <= WHOLE_BYTES;
        let answered = if is_small { self.answers_of_target(&bundle, &manifest, order, &suite) } else { Ok(None) };
        let of_root = || root.cases.iter().filter_map(|case| shortened(case, manifest.model.context_length)).collect();
        let (level, gate, stages, cases) = match answered {
            Ok(Some(Measurement { gate, cosines, cases })) => (Level::Whole, gate, Stored::of(programs).results(&cosines), cases),
            Ok(None) => match self.stages_of_target(programs, &manifest, order, &suite) {
                Ok((stages, covered)) => (Level::Stages, GateResult { covered, ..stages_verdict(&stages, order) }, stages, of_root()),
                Err(error) => (Level::Stages, broken(error, order)?, Vec::new(), of_root()),
            },
            Err(error) => (Level::Whole, broken(error, order)?, Vec::new(), of_root()),
        };
        let host: BTreeSet<Name> = bundle.programs().values().flat_map(|program| order.device.host_weights(program)).collect();
        let device = order.device.open().map_err(qhx_runtime::Error::from)?.describe();
        let fact = |name: &str| device.text(name).unwrap_or_default();
        Ok(Parity {
            numerics: format!("{}, {}, {}", device.description, fact("arch"), fact("library")),
            level,
            gate,
            stages,
            choices: None,
            cases,
            files: root.files.iter().filter(|(file, _)| file.as_str().starts_with("programs/")).map(|(f, sum)| (f.clone(), *sum)).collect(),
            weights: root.weights.iter().filter(|sum| host.contains(&*sum.weight)).cloned().collect(),
            ..root.clone()
        })
    }

    /// Lets the device answer; none where that takes too long.
    fn answers_of_target(
        &mut self,
        bundle: &Bundle,
        manifest: &Manifest,
        order: &TargetOrder,
        suite: &Suite,
    ) -> Result<Option<Measurement>, ForgeError> {
        let model = target_model(bundle, manifest, order)?;
        let (budget, started) = (self.options.budget.unwrap_or(BUDGET), (self.clock)());
        let tokens = TOKENS.min(suite::new_tokens(model.context_limit()));
        let stages = row_stages(model.program());
        let mut session = [model.session()?];
        let mut played: Vec<Played> = Vec::new();
        // The shortest first: it tells how long the others will take. One of every kind comes before all others, and is asked in any case.
        let suite = suite.clone().shortest_first();
        let (all, required) = (suite.prompts.len(), suite.required());
        for prompt in &suite.prompts {
            if played.len() >= required && (self.clock)() - started > budget.mul_f64(super::ANSWERING_SHARE) {
                break;
            }
            let done = GateProgress::new("answering prompts in the emulator", played.len() * tokens, all * tokens);
            played.extend(self.answer_prompts(&model, &mut session, &[(prompt, 0)], &stages, tokens, done)?.0);
            if played.len() == 1 && (self.clock)() - started > budget {
                return Ok(None);
            }
        }
        let asked = if played.len() < all { format!(", {} of {all} prompts", played.len()) } else { String::new() };
        let emulator = format!("what an emulator can do: {tokens} tokens of each answer{asked}");
        let scope = Scope {
            limited: std::iter::once(emulator).chain(suite.left_out.iter().cloned()).collect(),
            covered: verdict::coverage(&suite, suite.prompts.iter().take(played.len())),
        };
        let names = self.all_stages(&played);
        let standard = self.standard_of_target(bundle, self.options.kind.unwrap_or(GateKind::Tolerant));
        let progress = &mut *self.options.progress;
        let mut tell = |done, total| progress(GateProgress::new("comparing with the f32 model", done, total));
        let mut judge = Judge::new(&played, model.vocabulary().logits, &names, centred_stages(bundle.programs().values()), &mut tell);
        let teacher = super::teacher(self.material, self.precision, &self.device, &self.options.cancel);
        whole::run(&teacher, &self.f32, manifest, &played, &[], &mut judge)?;
        Ok(Some(judge.verdict(&standard, &stages, scope)))
    }

    /// What the device of an arch folder is held to: the limits of the bundle's class, or of f16 arithmetic where the bundle itself comes closer.
    fn standard_of_target(&self, bundle: &Bundle, kind: GateKind) -> Standard {
        let own = self.standard(bundle, kind);
        let is_closer = [Class::F32, Class::F16].iter().any(|class| own.class == class.name());
        let class = Class::F16Arithmetic;
        match is_closer && !own.own_limits {
            true => {
                let limits = class.limits(self.has_router());
                let limits = own.plain.map_or(limits, |plain| raised(limits, &plain));
                Standard { class: class.name().into(), limits, tie: class.tie(), ..own }
            }
            false => own,
        }
    }

    /// Runs every kind of stage alone, on the f32 program's inputs.
    fn stages_of_target(
        &mut self,
        programs: &Programs,
        manifest: &Manifest,
        order: &TargetOrder,
        suite: &Suite,
    ) -> Result<(Vec<StageResult>, Vec<Covered>), ForgeError> {
        let prompts = &suite.prompts;
        let fits = |prompt: &&SuitePrompt| prompt.media.is_empty() && prompt.prompt.ids().len() <= STAGE_ROWS;
        let text = prompts.iter().filter(fits).max_by_key(|prompt| prompt.prompt.ids().len()).or(prompts.first());
        let towers = self.f32.programs.iter().skip(1).filter_map(|tower| {
            prompts.iter().find(|prompt| prompt.media.first().is_some_and(|drawn| drawn.medium.program() == &*tower.program.name))
        });
        let read: Vec<&SuitePrompt> = text.into_iter().chain(towers).collect();
        let covered = verdict::coverage(suite, read.iter().copied());
        let played: Vec<Played> = read.into_iter().map(read_only).collect();
        let f32 = self.material.f32_programs_like(programs)?;
        let progress = &mut *self.options.progress;
        let mut tell = |done, total| progress(GateProgress::new("running each stage alone", done, total));
        let teacher = Teacher {
            others_on: &order.device,
            distinct: true,
            ..super::teacher(self.material, self.precision, &self.device, &self.options.cancel)
        };
        let errors = whole::run(&teacher, &f32, manifest, &played, std::slice::from_ref(programs), &mut Silent(&mut tell))?.remove(0);
        let stored = Stored::of(programs);
        let result = |(stage, (difference, expected)): (Name, (f64, f64))| {
            let error = if expected > 0.0 { difference / expected } else { 0.0 };
            // The lowest that a cosine can be with so much of a difference.
            let cosine = (1.0 - error).max(0.0).sqrt();
            stored.result(&stage, cosine, cosine)
        };
        Ok((errors.into_iter().filter(|(_, (_, expected))| *expected > 0.0).map(result).collect(), covered))
    }
}

/// The model as the device of an arch folder runs it: the bundle's programs and weights, the folder's sizes.
fn target_model(bundle: &Bundle, manifest: &Manifest, order: &TargetOrder) -> Result<Model, ForgeError> {
    let context = manifest.model.context_length;
    let parts = ModelParts { media: manifest.media.clone(), context_limit: context, ..ModelParts::of(bundle)? };
    let chunk = manifest.plan.as_ref().and_then(|plan| plan.prefill.last().copied()).unwrap_or(1);
    let options = LoadOptions { context: Some(context), chunk, overcommit: true, ..LoadOptions::default() };
    Ok(Model::on_device(parts, order.device.clone(), &options)?)
}

/// A case of the bundle's own oracle as far as a session has room for it; none with media, which the folder's front ends make otherwise.
fn shortened(case: &Case, context: usize) -> Option<Case> {
    let tokens = context.checked_sub(case.prompt_ids.len())?.min(case.ids.len());
    if tokens == 0 || !case.media.is_empty() {
        return None;
    }
    let mut case = case.clone();
    case.ids.truncate(tokens);
    case.top_ids.truncate(tokens);
    case.top_logits.truncate(tokens);
    case.f32_margins.truncate(tokens);
    case.logit_errors.truncate(tokens);
    case.flips.retain(|flip| flip.step < tokens);
    let end = case.prompt_ids.len() + tokens - 1;
    let kept = case.rows.partition_point(|&row| row < end);
    case.rows.truncate(kept);
    case.stages.iter_mut().for_each(|stage| stage.numbers.truncate(3 * kept));
    Some(case)
}

/// A prompt that is read and not answered.
fn read_only(prompt: &SuitePrompt) -> Played {
    let SuitePrompt { name, prompt, media, .. } = prompt;
    let media = media.iter().map(|drawn| (drawn.clone(), Notes::default())).collect();
    Played { name: name.clone(), prompt: prompt.clone(), media, ids: vec![0], shown: 0, logits: Vec::new(), notes: Notes::default() }
}

fn stages_verdict(stages: &[StageResult], order: &TargetOrder) -> GateResult {
    let is_float = |stage: &StageResult| {
        let floats = [Encoding::F32, Encoding::F16, Encoding::Bf16].map(|encoding| encoding.to_string());
        stage.encodings.iter().all(|encoding| floats.contains(encoding))
    };
    let below = |stage: &&StageResult| stage.cosine.is_nan() || stage.cosine < LEAST_COSINE[usize::from(!is_float(stage))];
    let failed = stages.iter().filter(below).count();
    let worst = stages.iter().min_by(|a, b| a.cosine.total_cmp(&b.cosine));
    let (worst_stage, worst_cosine) = worst.map_or((String::new(), 1.0), |stage| (stage.stage.clone(), stage.cosine));
    let arch = arch(order);
    let result = match failed {
        0 => format!("{} stages alone on {arch}, lowest cosine {worst_cosine:.6} ({worst_stage})", stages.len()),
        n => format!("{n} of {} stages alone on {arch} are too far off, worst {worst_stage} with cosine {worst_cosine:.6}", stages.len()),
    };
    let passed = failed == 0 && !stages.is_empty();
    let limited = Some("what an emulator can do: each kind of stage alone, on the f32 program's inputs".into());
    GateResult { worst_stage, worst_cosine, limited, ..bare(passed, result) }
}

/// What is said of a device that computes something else than numbers: that is its numerics' failure, and the folder's. Other errors are the command's.
fn broken(error: ForgeError, order: &TargetOrder) -> Result<GateResult, ForgeError> {
    use qhx_runtime::{Error, verify::VerifyError};
    match error {
        ForgeError::Run(Error::Device(DeviceError::Call(reason)))
        | ForgeError::Verify(VerifyError::Run(Error::Device(DeviceError::Call(reason)))) => {
            Ok(GateResult { worst_cosine: 0.0, ..bare(false, format!("it does not run on {}: {reason}", arch(order))) })
        }
        other => Err(other),
    }
}

fn bare(passed: bool, result: String) -> GateResult {
    GateResult {
        kind: GateKind::Tolerant,
        passed,
        result,
        prompts: 0,
        exact_prompts: 0,
        tokens: 0,
        flips: 0,
        worst_accepted_margin: None,
        max_logit_error: 0.0,
        mean_kl: 0.0,
        max_kl: 0.0,
        worst_stage: String::new(),
        worst_cosine: 1.0,
        closeness: None,
        limited: None,
        covered: Vec::new(),
    }
}

fn arch(order: &TargetOrder) -> String {
    let machine = order.device.open().map(|machine| machine.describe());
    machine.ok().and_then(|info| Some(info.text("arch")?.to_owned())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GateOptions, Material, Precision, plan::PrecisionPlan};
    use qhx_bundle::target::{KvForm, MadeFor};
    use qhx_ir::{Call, Device, DeviceInfo, Executable, Fact, LoadOptions as DeviceOptions, Machine, Op, State, Ticket, Weights};
    use std::{
        path::Path,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
    };

    /// The processor under the name of an NPU, with its calls counted.
    struct Counted {
        device: Arc<dyn Device>,
        calls: Arc<AtomicUsize>,
    }

    struct CountedExecutable(Box<dyn Executable>, Arc<AtomicUsize>);

    impl Device for Counted {
        fn name(&self) -> &str {
            "npu"
        }

        fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
            self.device.accepts(program, op)
        }

        fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
            Ok(Arc::new(CountedMachine(self.device.open()?, self.calls.clone())))
        }
    }

    struct CountedMachine(Arc<dyn Machine>, Arc<AtomicUsize>);

    impl Machine for CountedMachine {
        fn describe(&self) -> DeviceInfo {
            let mut info = self.0.describe();
            let texts = ["library", "build", "oldest_library"].map(|fact| (fact.to_owned(), Fact::from("1")));
            let numbers = ["soc_model", "optimization", "vtcm_mb", "hvx_threads", "dlbc"].map(|fact| (fact.to_owned(), Fact::Number(1)));
            info.facts = texts.into_iter().chain(numbers).chain([("arch".to_owned(), Fact::from("v81"))]).collect();
            info
        }

        fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &DeviceOptions) -> Result<Box<dyn Executable>, DeviceError> {
            Ok(Box::new(CountedExecutable(self.0.load(program, weights, options)?, self.1.clone())))
        }
    }

    impl Executable for CountedExecutable {
        fn program(&self) -> &Checked {
            self.0.program()
        }

        fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
            self.0.new_state(context)
        }

        fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.submit(call)
        }

        fn wait(&mut self, ticket: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
            self.0.wait(ticket, call)
        }

        fn scratch_bytes(&self) -> u64 {
            self.0.scratch_bytes()
        }
    }

    /// The first answer takes more than the share of the budget that answers have: what follows is one prompt of every other kind, and no more.
    #[test]
    fn a_spent_budget_leaves_no_tower_out() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gemma4");
        let folder = tempfile::tempdir().unwrap();
        let material = Material::open(&fixture).unwrap();
        let out = folder.path().join("model");
        let mut options = ForgeOptions::new(&out, Precision::F32);
        let mut silent = |_: GateProgress<'_>| {};
        let budget = Some(Duration::from_secs(TOKENS as u64 * 9 / 4));
        let mut gate = Gate::new(&material, &options, GateOptions { budget, ..GateOptions::new(&mut silent) }).unwrap();
        let plan = PrecisionPlan::from(Precision::F32);
        let programs = material.programs(&plan).unwrap();
        let staged = material.stage(&plan, &programs, &mut options).unwrap();
        let measured = gate.measure(&staged).unwrap();
        let root = gate.parity(&staged, &programs, measured, None).unwrap();
        // The first calls take a second each.
        let calls = Arc::new(AtomicUsize::new(0));
        gate.clock = Box::new({
            let calls = calls.clone();
            move || Duration::from_secs(calls.load(Ordering::Relaxed).min(TOKENS) as u64)
        });
        let order = TargetOrder {
            device: Arc::new(Counted { device: gate.device.clone(), calls }),
            made_for: MadeFor::Emulator,
            context: Some(512),
            prefill: vec![128],
            kv: KvForm::Full,
            image_size: None,
            audio_seconds: None,
            placement: None,
        };
        let parity = gate.measure_target(&staged, &programs, &order, &options, &root).unwrap();
        assert!(parity.gate.passed && parity.level == Level::Whole, "{:?}", parity.gate);
        let covered: Vec<_> = parity.gate.covered.iter().map(|c| (&*c.kind, c.prompts)).collect();
        assert_eq!(covered, [("text", 1), ("image", 1), ("sound", 1), ("image and sound", 1)], "{:?}", parity.gate);
        assert_eq!(parity.cases.iter().filter(|case| !case.media.is_empty()).count(), 3);
        let towers: BTreeSet<_> = parity.stages.iter().filter_map(|stage| stage.stage.split('.').next()).collect();
        assert!(towers.contains("vision") && towers.contains("audio"), "{towers:?}");
    }
}
