//! Loading and calling tiny models.

use qhx_ir::{
    Artifact, Bindings, Call, Checked, DType, Device, DeviceError, Executable, Generator, InputData, LoadOptions, Outputs, Piece, Segment,
    State, Target, Weights, conformance::models::TinyModel,
};
use qhx_npu::{Library, NpuDevice, NpuOptions};
use std::{path::Path, sync::Arc};

/// Rows of the larger graphs.
pub(crate) const ROWS: usize = 8;
/// Rows of a session.
pub(crate) const CONTEXT: usize = 32;

/// QNN, which drives the emulator.
pub(crate) fn library() -> Library {
    let folder = std::env::var_os("QHX_QNN_DIR").expect("QHX_QNN_DIR names the folder with libQnnHtp.so; `cargo xtask test` fetches it");
    Library::open(Some(folder.as_ref())).unwrap()
}

/// The emulator.
pub(crate) fn device(options: NpuOptions) -> NpuDevice {
    NpuDevice::new(&library(), NpuOptions { prefill_rows: ROWS, share_weights: false, ..options }).unwrap()
}

/// Input numbers for a call: small, all different, and within every table.
pub(crate) fn call(executable: &mut dyn Executable, state: &mut dyn State, rows: usize) -> Result<Vec<f32>, DeviceError> {
    let program: Checked = executable.program().clone();
    let first = state.len();
    let bindings = Bindings { rows, soft_rows: 0, wanted: 1 };
    let mut owned: Vec<(Vec<f32>, Vec<i32>)> = Vec::new();
    for input in &program.inputs {
        let count: usize = input.shape.iter().map(|d| d.bind(&bindings).unwrap()).product();
        let whole = |i: usize| match input.generator {
            Generator::WantedRows => rows as i32 - 1,
            Generator::PositionsSequence | Generator::PositionsMrope => (first + i % rows) as i32,
            _ => ((first + i) % 3) as i32,
        };
        owned.push(((0..count).map(|i| ((i * 37 + first) % 101) as f32 / 50.0 - 1.0).collect(), (0..count).map(whole).collect()));
    }
    let inputs: Vec<InputData<'_>> = program
        .inputs
        .iter()
        .zip(&owned)
        .map(|(input, (floats, whole))| if input.dtype == DType::F32 { InputData::F32(floats) } else { InputData::I32(whole) })
        .collect();
    let segment_state: Option<&mut dyn State> = if program.slots.is_empty() { None } else { Some(&mut *state) };
    let mut segments = [Segment::new(segment_state, 0, rows)];
    let mut outputs = Outputs::new();
    let mut call = Call::new(bindings, &inputs, &mut segments, &mut outputs);
    executable.run(&mut call)?;
    if !program.slots.is_empty() {
        state.commit(rows)?;
    }
    Ok(program.outputs.iter().flat_map(|o| outputs.value(&o.name).unwrap().to_vec()).collect())
}

/// Compiles a model ahead of time, into a folder of its own.
pub(crate) fn prepare(device: &NpuDevice, model: &TinyModel, rows: &[usize], context: usize) -> Result<Vec<Artifact>, DeviceError> {
    let target = Target { program: model.program.name.to_string(), context, ..Default::default() };
    device.open()?.prepare(&[Piece { program: &model.program, rows }], &model.weights, &target)
}

pub(crate) fn load(
    device: &NpuDevice,
    model: &TinyModel,
    weights: &Arc<dyn Weights>,
    folder: Option<&Path>,
) -> Result<Box<dyn Executable>, DeviceError> {
    let options = LoadOptions { artifacts: folder.map(Into::into), max_rows: 24, max_wanted: 24, ..Default::default() };
    device.load(&model.program, weights, &options)
}
