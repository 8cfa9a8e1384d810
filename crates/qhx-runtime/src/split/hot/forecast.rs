//! Which experts the next layer is likely to choose: its router, applied to what this layer's experts are given. The residual stream changes little from layer to layer.

use qhx_ir::{Bindings, Call, Checked, Device, DeviceError, Dim, Executable, InputData, LoadOptions, OpKind, Outputs, Segment, Weights};
use std::sync::Arc;

/// The router of a layer, on the processor.
pub(super) struct Forecast {
    executable: Box<dyn Executable>,
    /// The value with the chosen experts.
    chosen: String,
    outputs: Outputs,
}

impl Forecast {
    /// The router of the op with experts at a place; none where it is not a product whose scores are chosen from, of rows of so many numbers.
    pub(super) fn new(
        device: &dyn Device,
        program: &Checked,
        place: usize,
        width: usize,
        weights: &Arc<dyn Weights>,
        options: &LoadOptions,
    ) -> Result<Option<Self>, DeviceError> {
        let OpKind::Experts { experts, .. } = &program.ops[place].op else { return Ok(None) };
        let Some(router) = router(program, experts) else { return Ok(None) };
        let part = program.cut(router)?;
        let takes_rows = matches!(&part.inputs[..], [input] if input.shape == [Dim::T, Dim::Fixed(width)]);
        if !takes_rows || part.outputs.iter().all(|output| output.name != *experts) {
            return Ok(None);
        }
        let part = part.renamed(format!("{}-router-{place}", program.name));
        let options = LoadOptions {
            max_soft_rows: 0,
            max_wanted: 1,
            max_segments: 1,
            artifacts: None,
            scratch_group: None,
            timeline: None,
            ..options.clone()
        };
        let executable = device.load(&part, weights, &options)?;
        Ok(Some(Self { executable, chosen: experts.to_string(), outputs: Outputs::new() }))
    }

    /// How many of some rows are likely to choose each of so many experts.
    pub(super) fn rows(&mut self, x: &[f32], rows: usize, experts: usize) -> Result<Vec<usize>, DeviceError> {
        let inputs = [InputData::F32(x)];
        let mut segments = [Segment::new(None, 0, rows)];
        self.executable.run(&mut Call::new(Bindings { rows, soft_rows: 0, wanted: 0 }, &inputs, &mut segments, &mut self.outputs))?;
        let mut counts = vec![0; experts];
        for &expert in self.outputs.value(&self.chosen).unwrap_or_default() {
            // Whole numbers come back as floats.
            if let Some(count) = counts.get_mut(expert as usize) {
                *count += 1;
            }
        }
        Ok(counts)
    }
}

/// The places of the ops from a product to the value that says which experts are chosen.
fn router(program: &Checked, chosen: &str) -> Option<Vec<usize>> {
    let route = program.maker(chosen)?;
    let OpKind::Route { scores, .. } = &program.ops[route].op else { return None };
    let (mut places, mut value) = (vec![route], scores);
    loop {
        let place = program.maker(value)?;
        places.push(place);
        match &program.ops[place].op {
            OpKind::Linear { .. } => return Some(places),
            OpKind::Activate { x, .. } | OpKind::Scale { x, .. } | OpKind::Softcap { x, .. } | OpKind::Clamp { x, .. } => value = x,
            _ => return None,
        }
    }
}
