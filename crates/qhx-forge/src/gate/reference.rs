//! A checkpoint in f32 as the reference of an evaluation: read stage by stage over many windows, so that memory is one stage's weights plus activations, and its output head some rows
//! at a time.

use super::{
    language::language,
    teacher::{Course, Pass, text_pass},
};
use crate::{ForgeError, ForgeOptions, Material, families::Programs, plan::PrecisionPlan, precision::Precision};
use qhx_bundle::Manifest;
use qhx_ir::Device;
use qhx_runtime::{
    Cancel, DeviceChoice, Language, WholeInputs,
    eval::{Reference, ShowPiece},
    registry,
};
use std::{ops::Range, path::Path, sync::Arc};

/// The f32 program of a checkpoint, for [`qhx_runtime::eval::compare`].
pub struct F32Reference<'a> {
    material: &'a Material,
    programs: Programs,
    manifest: Manifest,
    language: Language,
    device: Arc<dyn Device>,
    cancel: Cancel,
    /// Told how many of a batch's stages are done, of how many.
    progress: Box<dyn FnMut(usize, usize) + 'a>,
    /// The windows that are read next, and what is known of them before the output head.
    passes: Vec<Pass>,
    course: Option<Course>,
}

impl<'a> F32Reference<'a> {
    /// On the processor, with so many threads (absent: one for each core).
    pub fn new(
        material: &'a Material,
        threads: Option<usize>,
        cancel: &Cancel,
        progress: impl FnMut(usize, usize) + 'a,
    ) -> Result<Self, ForgeError> {
        let programs = material.programs(&PrecisionPlan::from(Precision::F32))?;
        let options = ForgeOptions { cancel: cancel.shared(), ..ForgeOptions::new(Path::new("the checkpoint"), Precision::F32) };
        let (language, manifest) = language(material, &programs, &options)?;
        let device = registry::candidates(DeviceChoice::Cpu, threads)?.remove(0);
        let (cancel, progress) = (cancel.clone(), Box::new(progress));
        Ok(Self { material, programs, manifest, language, device, cancel, progress, passes: Vec::new(), course: None })
    }
}

impl Reference for F32Reference<'_> {
    type Error = ForgeError;

    fn language(&self) -> &Language {
        &self.language
    }

    fn begin(&mut self, windows: &[Vec<u32>]) -> Result<(), ForgeError> {
        let text = &self.programs.programs[0];
        let Manifest { media, tokens, .. } = &self.manifest;
        let pass = |(number, window): (usize, &Vec<u32>)| {
            // The last token of a window is predicted, never put in.
            let ids = &window[..window.len() - 1];
            text_pass(&text.program, number, ids.len(), WholeInputs::new(&text.program, media, tokens.pad, ids, &[]))
        };
        self.passes = windows.iter().enumerate().map(pass).collect();
        let teacher = super::teacher(self.material, Precision::F32, &self.device, &self.cancel);
        self.course = Some(teacher.read(text, &self.passes, &mut *self.progress)?);
        Ok(())
    }

    fn rows(&mut self, window: usize, rows: Range<usize>, show: &mut ShowPiece<'_>) -> Result<(), ForgeError> {
        let Some(course) = &self.course else { return Ok(()) };
        let pass = (window, &self.passes[window]);
        let teacher = super::teacher(self.material, Precision::F32, &self.device, &self.cancel);
        teacher.logits(&self.programs.programs[0], course, pass, rows, &mut |first_id, width, logits| {
            logits.chunks_exact(width).enumerate().for_each(|(row, piece)| show(row, first_id, piece));
        })
    }
}
