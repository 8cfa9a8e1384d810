//! What a call gives: values that are copied to the host, or only the largest numbers of wanted rows.

use super::{Ending, GpuExecutable, volume};
use crate::{
    kernels,
    lower::View,
    recorder::Recorder,
    vulkan::{Buffer, Command},
};
use qhx_ir::{Bindings, Call, DType, DeviceError, InputData, LoadOptions, RowResult, Want};

/// Parts of a row whose largest numbers are found side by side.
pub(super) const PARTS: usize = 64;
/// The most that are found of a row, and the rows of which that many are found in one call.
const MOST_TOP: usize = 64;
const TOP_ROWS: usize = 16;

impl GpuExecutable {
    pub(super) fn record_copy(&self, recorder: &mut Recorder<'_>, view: &View, place: usize) {
        let bytes = 4 * volume(view, &recorder.bindings) as u64;
        if let (Some(from_offset), true) = (self.lowered.offset(view), bytes > 0) {
            let (from, to, to_offset) = (self.arena.clone(), self.download.clone(), self.output_offsets[place]);
            recorder.add(Command::Copy { from, from_offset, to, to_offset, bytes });
        }
    }

    /// The largest numbers of each wanted row and their places, into the end of the download buffer.
    pub(super) fn record_top(&self, recorder: &mut Recorder<'_>, view: &View, width: usize, count: usize) -> Result<(), DeviceError> {
        let rows = recorder.bindings.wanted;
        let (from, partial, results) = (recorder.address(view.buffer), self.partial.address(), self.download.address() + self.top_offset);
        let parts = width.div_ceil(1024).min(PARTS);
        recorder.dispatch(kernels::LARGEST, &[0], [parts, rows, 1], &[from, partial], &[width as u32, parts as u32, count as u32])?;
        recorder.inner_barrier();
        recorder.dispatch(kernels::LARGEST, &[1], [1, rows, 1], &[partial, results], &[(parts * count) as u32, 1, count as u32])
    }

    /// How a call ends, by what is wanted of its rows.
    pub(super) fn ending(&self, call: &Call<'_>) -> Ending {
        let most = call.wants.iter().try_fold(0, |most, want| match want {
            Want::Largest => Some(most.max(1)),
            Want::Top(count) => Some(most.max(*count)),
            _ => None,
        });
        // Few different counts: each is recorded by itself.
        match most.map(usize::next_power_of_two) {
            Some(count @ 1..=MOST_TOP)
                if !call.wants.is_empty()
                    && call.taps.is_none()
                    && count * call.wants.len().min(self.limits.max_wanted) <= top_pairs(&self.limits) =>
            {
                Ending::Top(count)
            }
            _ => Ending::Values,
        }
    }

    /// Gives the caller what it wants of rows that were computed.
    pub(super) fn give(&self, call: &mut Call<'_>, bindings: &Bindings, wants: &[Want<'_>], ending: Ending) -> Result<(), DeviceError> {
        let wanted = self.program.wanted_output().filter(|_| !wants.is_empty());
        for place in 0..self.lowered.outputs.len() {
            let own = wanted.filter(|&(own, _)| own == place);
            if let (Some(_), Ending::Top(count)) = (own, ending) {
                let mut bytes = vec![0; 8 * count * wants.len()];
                self.download.read(self.top_offset, &mut bytes);
                let word = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                let pair = |b: &[u8]| (word(b), f32::from_bits(word(&b[4..])));
                let answers = wants.iter().zip(bytes.chunks_exact(8 * count)).map(|(want, row)| {
                    Some(Ok(match want {
                        Want::Top(count) => RowResult::Top(row.chunks_exact(8).take(*count).map(pair).collect()),
                        _ => {
                            let (id, value) = pair(row);
                            RowResult::Largest { id, value }
                        }
                    }))
                });
                call.outputs.answer_all(place, wants, answers, &vec![0.0; wants.len()])?;
                continue;
            }
            match own {
                Some((_, width)) => {
                    let mut values = Vec::new();
                    self.read_output(call.inputs, bindings, place, &mut values);
                    let answers: Vec<_> = wants.iter().zip(values.chunks(width.max(1))).map(|(want, row)| want.of(row)).collect();
                    call.outputs.answer_all(place, wants, answers, &values)?;
                }
                // Outputs that have nothing to do with wanted rows are there once.
                None if call.outputs.put(place).is_empty() => self.read_output(call.inputs, bindings, place, call.outputs.put(place)),
                None => {}
            }
        }
        Ok(())
    }

    /// An output of a call that has ended, into memory that is there from the call before.
    fn read_output(&self, inputs: &[InputData<'_>], bindings: &Bindings, place: usize, values: &mut Vec<f32>) {
        let view = &self.lowered.outputs[place];
        if let Some(input) = self.lowered.input(view) {
            *values = input_numbers(&inputs[input]);
            return;
        }
        values.resize(volume(view, bindings), 0.0);
        read_numbers(&self.download, self.output_offsets[place], view.dtype, values);
    }
}

/// How many of the largest numbers of all wanted rows there is room for.
fn top_pairs(limits: &LoadOptions) -> usize {
    limits.max_wanted.max(MOST_TOP * limits.max_wanted.min(TOP_ROWS))
}

/// Bytes for them, with their places.
pub(super) fn top_bytes(limits: &LoadOptions) -> u64 {
    8 * top_pairs(limits) as u64
}

pub(super) fn input_numbers(data: &InputData<'_>) -> Vec<f32> {
    match data {
        InputData::F32(numbers) => numbers.to_vec(),
        InputData::I32(numbers) => numbers.iter().map(|&n| n as f32).collect(),
    }
}

pub(super) fn read_numbers(from: &Buffer, offset: u64, dtype: DType, numbers: &mut [f32]) {
    from.read(offset, bytemuck::cast_slice_mut(numbers));
    if dtype == DType::I32 {
        numbers.iter_mut().for_each(|number| *number = number.to_bits() as i32 as f32);
    }
}
