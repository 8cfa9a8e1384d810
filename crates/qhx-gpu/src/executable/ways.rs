//! Whether steps of one row may be done in one dispatch is found out while a program is loaded: such steps add up in an order of their own, so that drafts, which are computed by dispatches, can be
//! made only where they are never taken.

use super::GpuExecutable;
use crate::vulkan::Kind;
use qhx_ir::{Bindings, Call, DType, DeviceError, Executable, InputData, Outputs, Phase, Segment, dim};

/// Dispatches are kept for good where they win so often in a row: a GPU raises its clocks slowly, and compiles at its first steps.
const WINS: usize = 3;
/// Steps after which a trial has ended.
const MOST_STEPS: usize = 32;

impl GpuExecutable {
    /// Tries both ways on a step that means nothing. Where dispatches are faster, steps in one dispatch are given up; else every length of a session goes on to be tried by itself.
    pub(super) fn choose_way(&mut self) -> Result<(), DeviceError> {
        // Software has such steps only where its test wants them.
        let is_software = self.gpu.adapter.kind == Kind::Software;
        if is_software || self.lowered.stream.is_none() || !self.pauses.is_empty() || self.program.slots.is_empty() {
            return Ok(());
        }
        for _ in 0..WINS {
            match self.is_whole_faster() {
                Ok(false) => {}
                Err(lost) if lost.left_device().is_some() => return Err(lost),
                // Programs without such steps, too.
                Ok(true) | Err(_) => return Ok(()),
            }
        }
        self.recordings.clear();
        self.lowered.stream = None;
        Ok(())
    }

    fn is_whole_faster(&mut self) -> Result<bool, DeviceError> {
        let bindings = Bindings { rows: 1, soft_rows: 0, wanted: 1 };
        let count = |shape: &[_]| dim::bind_shape(shape, &bindings).map(|dims| dims.iter().product::<usize>());
        let counts = self.program.inputs.iter().map(|input| count(&input.shape)).collect::<Result<Vec<_>, _>>();
        let counts = counts.map_err(DeviceError::Call)?;
        let most = counts.iter().copied().max().unwrap_or(0);
        let (floats, integers) = (vec![0.0; most], vec![0; most]);
        let inputs = self.program.inputs.iter().zip(&counts).map(|(input, &count)| match input.dtype {
            DType::F32 => InputData::F32(&floats[..count]),
            DType::I32 => InputData::I32(&integers[..count]),
        });
        let inputs: Vec<InputData<'_>> = inputs.collect();
        let (mut state, mut outputs) = (self.new_state(1)?, Outputs::new());
        for _ in 0..MOST_STEPS {
            let mut segments = [Segment::new(Some(&mut *state), 0, 1)];
            let mut call = Call::new(bindings, &inputs, &mut segments, &mut outputs);
            call.phase = Phase::Decode;
            self.run(&mut call)?;
            let recorded = self.last.and_then(|shape| self.recordings.get_mut(&shape));
            let Some(whole) = recorded.and_then(|recorded| recorded.whole.as_mut()) else { return Ok(false) };
            if let Some(decided) = whole.trial.decided() {
                // What is tried again begins anew.
                if !decided {
                    whole.trial.begin();
                }
                return Ok(decided);
            }
        }
        Ok(true)
    }
}
