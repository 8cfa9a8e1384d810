//! The f32 programs one after the other: towers over the media of all cases, then the text on what they made.

use super::{
    judge::Played,
    teacher::{Audience, Pass, Teacher, Variant, medium_pass, passes},
};
use crate::{ForgeError, families::Programs};
use qhx_bundle::Manifest;
use qhx_ir::Name;
use qhx_runtime::{Encoded, WholeInputs};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// By stage: sums of squares of the difference from the f32 stage, and of the f32 stage itself.
pub(super) type StageErrors = BTreeMap<Name, (f64, f64)>;

/// Runs the f32 programs over all cases. `levels` are other forms of the same model, whose stages are run on the f32 programs' inputs; gives their errors.
pub(super) fn run(
    teacher: &Teacher<'_>,
    f32: &Programs,
    manifest: &Manifest,
    played: &[Played],
    levels: &[Programs],
    audience: &mut dyn Audience,
) -> Result<Vec<StageErrors>, ForgeError> {
    let mut errors = vec![StageErrors::new(); levels.len()];
    let mut run = |number: usize, passes: &[Pass], audience: &mut dyn Audience| {
        let mut variants: Vec<Variant<'_>> =
            levels.iter().map(|level| Variant { written: &level.programs[number], errors: StageErrors::new() }).collect();
        teacher.run(&f32.programs[number], passes, &mut variants, audience)?;
        errors.iter_mut().zip(variants).for_each(|(all, variant)| all.extend(variant.errors));
        Ok::<_, ForgeError>(())
    };
    let mut listener = Listener { audience, outputs: HashMap::new() };
    for (number, tower) in f32.programs.iter().enumerate().skip(1) {
        let media = played.iter().enumerate().flat_map(|(case, played)| played.media.iter().enumerate().map(move |(i, m)| (case, i, &m.0)));
        let read = media.filter(|(_, _, drawn)| drawn.medium.program() == &*tower.program.name);
        let passes: Vec<Pass> = read.map(|(case, i, drawn)| medium_pass(case, i, &drawn.medium)).collect();
        if !passes.is_empty() {
            run(number, &passes, &mut listener)?;
        }
    }
    let text = &f32.programs[0].program;
    let mut all = Vec::new();
    for (case, played) in played.iter().enumerate() {
        let mut encoded = Vec::new();
        for placed in played.prompt.media() {
            // Two that are the same are one to a tower.
            let number = played.media.iter().position(|(drawn, _)| drawn.medium == *placed.medium());
            let outputs = number.and_then(|number| listener.outputs.get(&(case, number)));
            let output = |name: &str| outputs.and_then(|outputs| outputs.get(name).cloned());
            let made = Encoded::from_outputs(placed.medium(), text, output).map_err(ForgeError::Gate)?;
            encoded.push((placed.first(), Arc::new(made)));
        }
        let inputs = |ids: &[u32]| WholeInputs::new(text, &manifest.media, manifest.tokens.pad, ids, &encoded);
        all.extend(passes(text, case, played.prompt.ids(), played.shown, &played.ids, inputs));
    }
    run(0, &all, listener.audience)?;
    Ok(errors)
}

/// Keeps what towers gave and tells the rest.
struct Listener<'a> {
    audience: &'a mut dyn Audience,
    /// By case and medium, then by name.
    outputs: HashMap<(usize, usize), HashMap<String, Vec<f32>>>,
}

impl Audience for Listener<'_> {
    fn stage(&mut self, stage: &str, pass: &Pass, values: &[f32]) {
        self.audience.stage(stage, pass, values);
    }

    fn logits(&mut self, pass: &Pass, first_id: usize, width: usize, logits: &[f32]) {
        self.audience.logits(pass, first_id, width, logits);
    }

    fn output(&mut self, pass: &Pass, name: &str, values: &[f32]) {
        if let Some(medium) = pass.medium {
            self.outputs.entry((pass.case, medium)).or_default().insert(name.to_owned(), values.to_vec());
        }
    }

    fn progress(&mut self, done: usize, all: usize) {
        self.audience.progress(done, all);
    }
}
