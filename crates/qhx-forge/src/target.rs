//! Arch folders: what a processor with graphs of fixed sizes needs of a bundle, prepared ahead of time and complete in itself.
//!
//! Knows sizes, files and manifests. Which weights stay with the host and what is compiled is the device's business.

use crate::{ForgeError, ForgeOptions, Forged, GateProgress, Material, families::Programs, mixture, plan::PrecisionPlan};
use qhx_bundle::{
    Bundle, BundlePath, Manifest, Staged,
    manifest::TEXT_PROGRAM,
    media::{ImageFrontEnd, Media, Resize},
    parity::{Drawing, GateResult, Level, PARITY_FILE, Parity, REJECTED},
    target::{Finalize, KvForm, MadeFor, PreparedProgram, TargetPlan},
};
use qhx_ir::{
    Artifact, Checked, Device, DeviceError, DeviceInfo, Encoding, Executable, LoadOptions, Machine, Name, Op, OpKind, Piece, Planned,
    Target, Weights,
};
use qhx_runtime::{
    DeviceChoice,
    placement::{Rules, place},
    verify::draw,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::AtomicBool},
};

/// The longest session of an arch folder, unless somebody asks for another.
pub const DEFAULT_CONTEXT: usize = 1024;
/// Rows that the prefill graph takes, likewise.
pub const DEFAULT_PREFILL: usize = 128;
/// Fewer rows than this are read one by one.
pub const PREFILL_MIN_TOKENS: usize = 4;
/// Why an image size is refused for a model without vision.
pub const NO_IMAGES: &str = "an image size is given, and the model takes no images";
/// Why an audio length is refused for a model without audio.
pub const NO_SOUND: &str = "a length of sounds is given, and the model takes no sound";
/// The sides of pictures, where the model's own rule leaves a choice.
const DEFAULT_IMAGE_SIDE: usize = 512;
/// Data bytes per weight file.
const WEIGHT_FILE_BYTES: u64 = 4 << 30;

/// An arch folder that is to be made.
#[derive(Clone)]
pub struct TargetOrder {
    /// Compiles, and in an emulator runs.
    pub device: Arc<dyn Device>,
    /// Where the context binaries are to load.
    pub made_for: MadeFor,
    /// Longest session; absent: the model's own, at most [`DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// Rows of prefill graphs, rising; none: prompts go row by row.
    pub prefill: Vec<usize>,
    /// How rows are kept.
    pub kv: KvForm,
    /// Height and width to which pictures are scaled; absent: those of the model's training where the checkpoint says them, else as its rule allows.
    pub image_size: Option<[usize; 2]>,
    /// The longest sound in seconds; absent: the model's own.
    pub audio_seconds: Option<f64>,
    /// What runs elsewhere; absent: nothing.
    pub placement: Option<TargetPlacement>,
}

/// What of an arch folder runs elsewhere than on its processor.
#[derive(Clone)]
pub struct TargetPlacement {
    /// Which stage runs where.
    pub rules: Rules,
    /// The devices that the rules name, the order's own among them; the one for everything else first.
    pub devices: Vec<Arc<dyn Device>>,
}

/// Each program on the devices on which it was placed.
#[derive(Clone)]
struct Placed {
    own: Arc<dyn Device>,
    programs: BTreeMap<String, Arc<dyn Device>>,
}

impl Placed {
    fn of(&self, program: &Checked) -> &Arc<dyn Device> {
        self.named(&program.name)
    }

    fn named(&self, program: &str) -> &Arc<dyn Device> {
        self.programs.get(program).unwrap_or(&self.own)
    }
}

impl Device for Placed {
    fn name(&self) -> &str {
        self.own.name()
    }

    fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
        self.of(program).accepts(program, op)
    }

    fn on_host(&self, program: &Checked, op: &Op) -> bool {
        self.of(program).on_host(program, op)
    }

    fn plan(&self, pieces: &[Piece<'_>], target: &Target) -> Result<Planned, DeviceError> {
        self.named(&target.program).plan(pieces, target)
    }

    fn host_weights(&self, program: &Checked) -> Vec<Name> {
        self.of(program).host_weights(program)
    }

    fn open(&self) -> Result<Arc<dyn Machine>, DeviceError> {
        Ok(Arc::new(self.clone()))
    }
}

impl Machine for Placed {
    fn describe(&self) -> DeviceInfo {
        match self.own.open() {
            Ok(machine) => machine.describe(),
            Err(absent) => DeviceInfo {
                name: self.own.name().to_owned(),
                description: absent.to_string(),
                memory_bytes: None,
                threads: 0,
                facts: BTreeMap::new(),
            },
        }
    }

    fn prepare(&self, pieces: &[Piece<'_>], weights: &Arc<dyn Weights>, target: &Target) -> Result<Vec<Artifact>, DeviceError> {
        self.named(&target.program).open()?.prepare(pieces, weights, target)
    }

    fn load(&self, program: &Checked, weights: &Arc<dyn Weights>, options: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        self.of(program).load(program, weights, options)
    }
}

/// An arch folder that was made.
#[derive(Clone, Debug)]
pub struct MadeTarget {
    /// Its name in the bundle's folder; with `.rejected` appended if it failed its gate.
    pub folder: String,
    /// Its manifests.
    pub manifests: Vec<String>,
    /// Context binaries.
    pub contexts: usize,
    /// Bytes of all its files.
    pub bytes: u64,
    /// Why it is not all that was asked for, and what is dangerous about it.
    pub notes: Vec<String>,
    /// What its gate said, and how much of the model was run.
    pub gate: Option<(Level, GateResult)>,
}

/// Makes a bundle with arch folders. No gate is applied.
pub fn forge_with_targets(
    material: &Material,
    options: &mut ForgeOptions<'_>,
    targets: &[TargetOrder],
    progress: &mut dyn FnMut(GateProgress<'_>),
) -> Result<(Forged, Vec<MadeTarget>), ForgeError> {
    options.row_tables |= !targets.is_empty();
    let plan = mixture::plan(material, options)?;
    let programs = material.programs(&plan)?;
    check_targets(material, &plan, &programs, options, targets)?;
    let staged = material.stage(&plan, &programs, options)?;
    let cancel = options.cancel.clone();
    let made = targets.iter().map(|order| order.add(&staged, None, &cancel, progress)).collect::<Result<Vec<_>, _>>()?;
    let manifest = staged.manifest().clone();
    Ok((Forged { path: staged.publish()?, manifest }, made))
}

/// Whether all arch folders can be made, found before anything is written.
pub(crate) fn check_targets(
    material: &Material,
    plan: &PrecisionPlan,
    programs: &Programs,
    options: &ForgeOptions<'_>,
    targets: &[TargetOrder],
) -> Result<(), ForgeError> {
    if targets.is_empty() {
        return Ok(());
    }
    let (root, _) = material.describe(plan, programs, options)?;
    let programs: Vec<&Checked> = programs.programs.iter().map(|written| &written.program).collect();
    targets.iter().try_for_each(|order| order.placed(&programs)?.manifest(&root, &programs).map(drop))
}

/// The longest session of an arch folder: as asked for, of a model that was made for `most` tokens.
pub fn session_length(asked: Option<usize>, most: usize) -> Result<usize, ForgeError> {
    match asked {
        Some(context) if context > most => {
            Err(ForgeError::Target(format!("a context of {context} is longer than the {most} tokens that the model was made for")))
        }
        Some(context) => Ok(context),
        None => Ok(most.min(DEFAULT_CONTEXT)),
    }
}

impl TargetOrder {
    /// The order with the device that runs each program where it is placed.
    pub(crate) fn placed(&self, programs: &[&Checked]) -> Result<Self, ForgeError> {
        let Some(TargetPlacement { rules, devices }) = &self.placement else { return Ok(self.clone()) };
        rules.check(programs.iter().copied())?;
        let device = |program: &&Checked| {
            let (device, placement) = place(program, DeviceChoice::Npu, Some(rules), devices)?;
            // From one phase to the other a session takes all its rows along.
            let moves = !program.slots.is_empty() && placement.stages.iter().any(|stage| stage.phase.is_some());
            if moves && self.kv == KvForm::Ring {
                let reason = "a ring of keys and values keeps the latest rows only, and the placement writes elsewhere than it reads, which takes all of them";
                return Err(ForgeError::Target(format!("{reason}: keep all rows, or use one device for both")));
            }
            Ok((program.name.to_string(), device))
        };
        let programs = programs.iter().map(device).collect::<Result<_, ForgeError>>()?;
        Ok(Self { device: Arc::new(Placed { own: self.device.clone(), programs }), ..self.clone() })
    }

    /// Writes the arch folder into a staged bundle. One that failed its gate, by its parity record, is named so.
    pub(crate) fn add(
        &self,
        staged: &Staged,
        parity: Option<&Parity>,
        cancel: &Arc<AtomicBool>,
        progress: &mut dyn FnMut(GateProgress<'_>),
    ) -> Result<MadeTarget, ForgeError> {
        let bundle = staged.open()?;
        let programs: Vec<&Checked> = bundle.programs().values().collect();
        self.placed(&programs)?.write(staged, &bundle, parity, cancel, progress)
    }

    fn write(
        &self,
        staged: &Staged,
        bundle: &Bundle,
        parity: Option<&Parity>,
        cancel: &Arc<AtomicBool>,
        progress: &mut dyn FnMut(GateProgress<'_>),
    ) -> Result<MadeTarget, ForgeError> {
        let programs: Vec<&Checked> = bundle.programs().values().collect();
        let mut base = self.manifest(bundle.manifest(), &programs)?;
        let arch = base.model.dsp_arch.clone().unwrap_or_default();
        let mut name = arch.clone() + &suffix(bundle);
        let mut writer = staged.target(&name, Some(cancel.clone()))?;
        let mut prepared = BTreeMap::new();
        let (mut groups, mut known) = (Vec::new(), BTreeSet::new());
        // As it was asked for: the device leaves out what it cannot hold, and says so in its own plan too.
        let sizes = self.rows(&self.wished(bundle.manifest())?)?;
        for (done, (program, rows)) in sizes.iter().enumerate() {
            let what = format!("compiling `{program}` for {arch}");
            progress(GateProgress::new(&what, done, sizes.len()));
            let checked = bundle.program(program).ok_or_else(|| no_program(program))?;
            prepared.extend(self.prepare(checked, bundle, rows, &mut writer, cancel)?.map(|files| (program.clone(), files)));
            writer.add_program(checked)?;
            let host = self.device.host_weights(checked).into_iter().filter(|weight| known.insert(weight.clone()));
            let tensors = host.map(|weight| {
                let tensor = bundle.weights().declared(checked, &weight).map_err(failed)?;
                Ok((weight.to_string(), tensor))
            });
            groups.push((program.clone(), tensors.collect::<Result<Vec<_>, ForgeError>>()?));
        }
        let contexts = prepared.values().map(|program: &PreparedProgram| program.contexts.len()).sum();
        writer.add_weights(groups, WEIGHT_FILE_BYTES)?;
        for file in base.tokenizer.iter().chain(&base.chat.template) {
            writer.add_file(file, &bundle.read(file)?)?;
        }
        if let Some(parity) = parity {
            let file = path(PARITY_FILE)?;
            writer.add_file(&file, parity.to_json().map_err(ForgeError::Gate)?.as_bytes())?;
            base.parity = Some(file);
        }
        if prepared.is_empty() {
            return Err(ForgeError::Target(format!("the placement leaves nothing to {arch}: name `npu` for something")));
        }
        let rules = self.placement.as_ref().map(|placement| &placement.rules);
        let uses = uses(&base, &prepared, rules, &programs)?;
        let manifests = uses.iter().map(|(file, ..)| file.to_string()).collect();
        let place = writer.path().to_path_buf();
        writer.finish(uses)?;
        let bytes = folder_bytes(&place);
        if parity.is_some_and(|parity| !parity.gate.passed) {
            staged.reject_target(&name)?;
            name += REJECTED;
        }
        let gate = parity.map(|parity| (parity.level, parity.gate.clone()));
        let notes = base.plan.map(|plan| plan.notes).unwrap_or_default();
        Ok(MadeTarget { folder: name, manifests, contexts, bytes, notes, gate })
    }

    /// What the folder's manifests have in common, but for files. `root` is the bundle's own. What the device cannot hold is left out or refused.
    pub(crate) fn manifest(&self, root: &Manifest, programs: &[&Checked]) -> Result<Manifest, ForgeError> {
        let mut manifest = self.wished(root)?;
        let mut notes = Vec::new();
        for (name, rows) in self.rows(&manifest)? {
            let checked = programs.iter().find(|program| *program.name == *name).ok_or_else(|| no_program(&name))?;
            let whole = Piece { program: checked, rows: &rows };
            let planned = self.device.plan(&[whole], &self.target(checked, root)).map_err(failed)?;
            if let (TEXT_PROGRAM, Some(plan)) = (&*name, &mut manifest.plan) {
                plan.prefill.retain(|rows| planned.rows.contains(rows));
            }
            notes.extend(planned.notes);
        }
        if let Some(plan) = &mut manifest.plan {
            plan.notes = notes;
        }
        Ok(manifest)
    }

    /// The same as it was asked for.
    fn wished(&self, root: &Manifest) -> Result<Manifest, ForgeError> {
        let device = self.device.open().map_err(failed)?.describe();
        let missing = |fact: &str| ForgeError::Target(format!("the device does not tell its `{fact}`"));
        let fact = |name: &str| device.text(name).map(str::to_owned).ok_or_else(|| missing(name));
        let number = |name: &str| device.number(name).and_then(|number| u32::try_from(number).ok()).ok_or_else(|| missing(name));
        let context = session_length(self.context, root.model.context_length)?;
        let mut manifest = root.clone();
        manifest.model.dsp_arch = Some(fact("arch")?);
        manifest.model.soc_model = Some(number("soc_model")?);
        if self.kv == KvForm::Full {
            manifest.model.context_length = context;
        }
        manifest.media = self.media(&root.media, context)?;
        // Nothing is drafted where a row is not the same in any company.
        (manifest.parity, manifest.ignored_tensors, manifest.draft) = (None, None, None);
        manifest.plan = Some(TargetPlan {
            made_for: self.made_for,
            toolchain: format!("{} ({})", fact("library")?, fact("build")?),
            oldest_qairt: fact("oldest_library")?,
            context,
            // A graph for more rows than a session has would never be used.
            prefill: self
                .prefill
                .iter()
                .map(|&rows| rows.min(context))
                .filter(|&rows| rows > 1)
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect(),
            prefill_min_tokens: PREFILL_MIN_TOKENS,
            kv: self.kv,
            finalize: Finalize {
                optimization: number("optimization")?,
                vtcm_mb: number("vtcm_mb")?,
                hvx_threads: number("hvx_threads")?,
                dlbc: number("dlbc")? == 1,
            },
            notes: Vec::new(),
            programs: BTreeMap::new(),
        });
        Ok(manifest)
    }

    /// Front ends with one size: all pictures are scaled to it, and sounds are no longer than it.
    fn media(&self, root: &Media, context: usize) -> Result<Media, ForgeError> {
        let mut media = root.clone();
        match (&mut media.image, self.image_size) {
            (Some(front_end), asked) => {
                let [height, width] = image_size(front_end, asked, context)?;
                front_end.resize = Resize::Fixed { height, width };
            }
            (None, Some(_)) => return Err(ForgeError::Target(NO_IMAGES.into())),
            (None, None) => {}
        }
        match (&mut media.audio, self.audio_seconds) {
            (Some(front_end), Some(seconds)) => {
                let samples = (seconds * f64::from(front_end.sampling_rate)) as usize;
                if !(front_end.frame_length..=front_end.max_samples).contains(&samples) {
                    let most = front_end.max_samples as f64 / f64::from(front_end.sampling_rate);
                    return Err(ForgeError::Target(format!("sounds of {seconds} s: the model takes sounds of up to {most} s")));
                }
                front_end.max_samples = samples;
            }
            (None, Some(_)) => return Err(ForgeError::Target(NO_SOUND.into())),
            (_, None) => {}
        }
        Ok(media)
    }

    /// The programs with the rows at which each is compiled, the text first.
    fn rows(&self, manifest: &Manifest) -> Result<Vec<(String, Vec<usize>)>, ForgeError> {
        let Manifest { model, media, .. } = manifest;
        let prefill = manifest.plan.iter().flat_map(|plan| plan.prefill.iter().copied());
        let mut all = vec![(TEXT_PROGRAM.to_owned(), std::iter::once(1).chain(prefill).collect())];
        let rows = |drawing: Drawing| Ok::<_, ForgeError>(draw(drawing, &model.name, media)?.0.rows());
        if let Some(image) = &media.image {
            all.push((image.program.clone(), vec![rows(Drawing::Image { width: 64, height: 64, seed: 0 })?]));
        }
        if let Some(audio) = &media.audio {
            let (rate, samples) = (audio.sampling_rate, audio.max_samples);
            all.push((audio.program.clone(), vec![rows(Drawing::Audio { rate, samples, seed: 0 })?]));
        }
        Ok(all)
    }

    /// What the device compiles for. `root` is the bundle's own manifest.
    fn target(&self, program: &Checked, root: &Manifest) -> Target {
        let context = root.model.context_length.min(self.context.unwrap_or(DEFAULT_CONTEXT));
        Target { program: program.name.to_string(), context, ..Target::default() }
    }

    fn prepare(
        &self,
        program: &Checked,
        bundle: &Bundle,
        rows: &[usize],
        writer: &mut qhx_bundle::TargetWriter,
        cancel: &Arc<AtomicBool>,
    ) -> Result<Option<PreparedProgram>, ForgeError> {
        let folder = Some(writer.path().to_path_buf());
        let target = Target { folder, cancel: Some(cancel.clone()), ..self.target(program, bundle.manifest()) };
        let (mut graphs, mut contexts) = (Vec::new(), Vec::new());
        for artifact in
            self.device.open().map_err(failed)?.prepare(&[Piece { program, rows }], &bundle.weights(), &target).map_err(failed)?
        {
            let file = path(&artifact.name)?;
            writer.adopt(&file)?;
            if artifact.name.ends_with(".json") {
                graphs.push(file);
            } else {
                contexts.push(file);
            }
        }
        match graphs.is_empty() {
            false => Ok(Some(PreparedProgram { graphs, contexts })),
            // It runs elsewhere.
            true if self.placement.is_some() => Ok(None),
            true => Err(ForgeError::Target(format!("the device prepared nothing for program `{}`", program.name))),
        }
    }
}

/// The manifests: `NAME.json` for text, `NAME-vlm.json` and `NAME-audio.json` for those with vision or audio, `NAME-omni.json` for those with both.
fn uses(
    base: &Manifest,
    prepared: &BTreeMap<String, PreparedProgram>,
    rules: Option<&Rules>,
    all: &[&Checked],
) -> Result<Vec<(BundlePath, Manifest, BTreeSet<String>)>, ForgeError> {
    let Media { image, audio } = &base.media;
    let none = Media::default();
    let mut uses = vec![("", none.clone())];
    uses.extend(image.iter().map(|image| ("-vlm", Media { image: Some(image.clone()), ..none.clone() })));
    uses.extend(audio.iter().map(|audio| ("-audio", Media { audio: Some(audio.clone()), ..none.clone() })));
    if image.is_some() && audio.is_some() {
        uses.push(("-omni", base.media.clone()));
    }
    // Names that stand for other things.
    let taken = ["tokenizer", "tokenizer_config", "config", "generation_config", "preprocessor_config", "parity", "qhx"];
    let is_taken = taken.contains(&&*base.model.name) || base.model.name.ends_with(".npu");
    let name = if is_taken { format!("{}-model", base.model.name) } else { base.model.name.clone() };
    let manifest = |(suffix, media): (&str, Media)| {
        let towers = media.image.iter().map(|i| i.program.clone()).chain(media.audio.iter().map(|a| a.program.clone()));
        let programs: BTreeSet<String> = towers.chain([TEXT_PROGRAM.to_owned()]).collect();
        // The text alone has no stages of towers.
        let used = all.iter().copied().filter(|program| programs.contains(&*program.name));
        let placement = rules.map(|rules| rules.of_programs(used).into());
        let mut manifest = Manifest { media, placement, ..base.clone() };
        if let Some(plan) = &mut manifest.plan {
            plan.programs = prepared.iter().filter(|(name, _)| programs.contains(*name)).map(|(n, p)| (n.clone(), p.clone())).collect();
        }
        Ok((path(&format!("{name}{suffix}.json"))?, manifest, programs))
    };
    uses.into_iter().map(manifest).collect()
}

/// What stands behind the arch in the folder's name: nothing where the processor computes in its own f16, else how the weights are stored.
fn suffix(bundle: &Bundle) -> String {
    let of = |checked: &Checked| {
        checked.ops.iter().any(|op| {
            matches!(op.op, OpKind::Linear { .. } | OpKind::Experts { .. })
                && op
                    .op
                    .weights()
                    .iter()
                    .any(|name| !matches!(checked.weights[*name].encoding, Encoding::F32 | Encoding::F16 | Encoding::Bf16))
        })
    };
    if bundle.programs().values().any(of) { format!("-{}", bundle.manifest().precision) } else { String::new() }
}

/// The size of pictures: what was asked for; else that of the model's training, where the checkpoint says one and the context has room for it; else the
/// largest square that the model's rule and the context have room for.
fn image_size(front_end: &ImageFrontEnd, asked: Option<[usize; 2]>, context: usize) -> Result<[usize; 2], ForgeError> {
    let unit = front_end.patches.size * front_end.patches.block;
    let soft_rows = |[height, width]: [usize; 2]| (height / unit).saturating_mul(width / unit);
    if let Some([height, width]) = asked.filter(|size| size.iter().any(|side| *side == 0 || side % unit != 0)) {
        return Err(ForgeError::Target(format!("images of {height}x{width}: the model takes sides that are multiples of {unit}")));
    }
    let most = (context / 2).max(1);
    let square = |side: usize| (1..=(side / unit).max(1)).rev().find(|n| n * n <= most).map(|n| [n * unit; 2]).unwrap_or([unit; 2]);
    // Sides are whole units, as the model's own rule has it.
    let trained = front_end.trained_size.map(|size| size.map(|side| (side / unit).max(1) * unit));
    let trained = trained.filter(|&size| soft_rows(size) <= most);
    let size = asked.or(trained).unwrap_or_else(|| match front_end.resize {
        Resize::Fixed { height, width } => [height, width],
        Resize::Area { min_pixels, max_pixels, .. } => {
            let pixels = ((DEFAULT_IMAGE_SIDE * DEFAULT_IMAGE_SIDE) as u64).min(max_pixels).max(min_pixels);
            square((pixels as f64).sqrt() as usize)
        }
        Resize::Budget { max_soft_rows } => square((max_soft_rows as f64).sqrt() as usize * unit),
    });
    match soft_rows(size) {
        rows if rows >= context => {
            let [height, width] = size;
            Err(ForgeError::Target(format!(
                "a picture of {height}x{width} becomes {rows} rows, a session has {context}: use smaller images or a longer context"
            )))
        }
        _ => Ok(size),
    }
}

fn folder_bytes(folder: &std::path::Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| if entry.path().is_dir() { folder_bytes(&entry.path()) } else { entry.metadata().map_or(0, |m| m.len()) }).sum()
}

fn no_program(name: &str) -> ForgeError {
    ForgeError::Gate(format!("the bundle has no program `{name}`"))
}

fn path(name: &str) -> Result<BundlePath, ForgeError> {
    BundlePath::new(name).map_err(|e| ForgeError::Target(e.to_string()))
}

fn failed(error: DeviceError) -> ForgeError {
    ForgeError::from(qhx_runtime::Error::from(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_bundle::media::{PatchOrder, Patches, Placeholder};

    #[test]
    fn pictures_have_the_size_of_the_training_where_the_checkpoint_says_one() {
        let front_end = |trained_size| ImageFrontEnd {
            program: "vision".into(),
            placeholder: Placeholder::default(),
            resize: Resize::Area { min_pixels: 1 << 12, max_pixels: 1 << 24, max_aspect: 200.0 },
            rescale: 1.0,
            mean: [0.0; 3],
            std: [1.0; 3],
            patches: Patches { size: 16, block: 2, temporal: 1, order: PatchOrder::ChannelFirst },
            position_side: None,
            trained_size,
        };
        let size = |trained, asked, context| image_size(&front_end(trained), asked, context).unwrap();
        assert_eq!(size(None, None, 1024), [512, 512]);
        assert_eq!(size(Some([128, 192]), None, 1024), [128, 192]);
        assert_eq!(size(Some([140, 20]), None, 1024), [128, 32], "whole units");
        assert_eq!(size(Some([128, 192]), Some([64, 64]), 1024), [64, 64], "what is asked for goes first");
        assert_eq!(size(Some([768, 768]), None, 512), [512, 512], "more than half a session is too large");
    }
}
