//! What a model loses by plain rounding, whatever the forge does: the measure of a bundle where the limits of its class say too little about the model.
//!
//! Those limits come from trained models. One whose weights nobody trained, or whose router is undecided everywhere, may lose more by the best int8 there is. So a bundle that exceeds its class's limits is
//! compared with the checkpoint's weights in encodings like its own, each number rounded to the nearest, and everything computed in f32. No kernel, no calibration and no rotation of the
//! bundle takes part in that, so that none of their faults can excuse itself.

use super::{
    judge::{Judge, Played, Standard},
    teacher::{Audience, Pass, Teacher},
    whole,
};
use crate::{ForgeError, families::Programs, pen::Recipe};
use qhx_bundle::{Manifest, parity::PlainRounding};
use qhx_ir::{BlockEncoding, Checked, Encoding, Name, Quants};
use std::collections::{BTreeMap, BTreeSet};

/// Puts weights rounded plainly in the place of a model's own, each to what `encodings` has for it.
pub(super) fn round(f32: &mut Programs, encodings: &BTreeMap<Name, Encoding>) {
    for (name, recipe) in f32.programs.iter_mut().flat_map(|written| &mut written.recipes) {
        if let Some(&encoding) = encodings.get(name) {
            *recipe = Recipe::Rounded(Box::new(recipe.clone()), encoding);
        }
    }
}

/// The plain encodings of a bundle's weights, but for those that lose nothing of the checkpoint.
pub(super) fn encodings<'a>(
    bundle: impl IntoIterator<Item = &'a Checked>,
    lossless: &BTreeMap<Name, Encoding>,
) -> BTreeMap<Name, Encoding> {
    let weights = bundle.into_iter().flat_map(|program| &program.weights).map(|(name, weight)| (name, weight.encoding));
    let rounded = weights.filter(|(name, encoding)| *encoding != Encoding::F32 && lossless.get(*name) != Some(encoding));
    rounded.map(|(name, encoding)| (name.clone(), plainest(encoding))).collect()
}

/// The usual encoding of as many bits: integers in blocks of 32.
fn plainest(encoding: Encoding) -> Encoding {
    match encoding {
        Encoding::I8Row | Encoding::Block(BlockEncoding { quants: Quants::I8, .. }) => Encoding::I8_BLOCK32,
        Encoding::Block(BlockEncoding { quants: Quants::I6, .. }) => Encoding::I6_BLOCK32,
        Encoding::Block(BlockEncoding { quants: Quants::I4, .. }) => Encoding::I4_BLOCK32,
        Encoding::F32 | Encoding::F16 | Encoding::Bf16 => encoding,
    }
}

/// What a `rounded` model loses on the tokens that the bundle was compared on. `progress` is told of steps done, and of how many.
pub(super) fn losses(
    teacher: &Teacher<'_>,
    [f32, rounded]: [&Programs; 2],
    manifest: &Manifest,
    (played, vocabulary): (&[Played], usize),
    standard: &Standard,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<PlainRounding, ForgeError> {
    let mut reader = Reader { played: played.iter().map(Played::for_another).collect(), vocabulary, progress };
    whole::run(teacher, rounded, manifest, played, &[], &mut reader)?;
    let Reader { played, progress, .. } = reader;
    let mut tell = |done, all| progress(all + done, 2 * all);
    let mut judge = Judge::new(&played, vocabulary, &[], BTreeSet::new(), &mut tell);
    whole::run(teacher, f32, manifest, &played, &[], &mut judge)?;
    Ok(judge.plain(standard))
}

/// Takes the logits of a pass in the place of the bundle's.
struct Reader<'a> {
    played: Vec<Played>,
    vocabulary: usize,
    progress: &'a mut dyn FnMut(usize, usize),
}

impl Audience for Reader<'_> {
    fn logits(&mut self, pass: &Pass, first_id: usize, width: usize, logits: &[f32]) {
        let rows = self.played[pass.case].logits.chunks_exact_mut(self.vocabulary).skip(pass.first_step);
        rows.zip(logits.chunks_exact(width)).for_each(|(row, logits)| row[first_id..][..width].copy_from_slice(logits));
    }

    fn stage(&mut self, _: &str, _: &Pass, _: &[f32]) {}

    fn output(&mut self, _: &Pass, _: &str, _: &[f32]) {}

    fn progress(&mut self, done: usize, all: usize) {
        (self.progress)(done, 2 * all);
    }
}
