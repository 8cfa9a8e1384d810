//! Fixtures: checkpoints that transformers made, with what it computed for them.

pub(crate) mod drafted;
pub(crate) mod drafts;
pub(crate) mod media;
pub(crate) mod mistakes;
pub(crate) mod simulated;

use qhx_bundle::Bundle;
use qhx_forge::{
    Calibration, ForgeOptions, Material, Precision,
    read::{TensorSource, safetensors},
};
use qhx_ir::{
    Bindings, Call, Checked, Device, Executable, Generator, InputData, LoadOptions, Outputs, Program, Segment, State, Tap, WeightTensor,
    Weights, reference::ReferenceDevice,
};
use qhx_runtime::{DeviceChoice, registry};
use serde_json::Value;
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The folder of fixtures: `QHX_FIXTURES`, or the committed ones.
pub(crate) fn fixtures() -> PathBuf {
    std::env::var_os("QHX_FIXTURES").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures"), PathBuf::from)
}

/// The processor as a device.
pub(crate) fn cpu() -> Arc<dyn Device> {
    registry::candidates(DeviceChoice::Cpu, None).unwrap().swap_remove(0)
}

/// A forged fixture with its oracle.
pub(crate) struct Fixture {
    pub(crate) name: String,
    pub(crate) prompts: Vec<Prompt>,
    bundle: Bundle,
    tensors: TensorSource,
    _folder: tempfile::TempDir,
}

/// A prompt and what transformers made of it.
pub(crate) struct Prompt {
    pub(crate) name: String,
    pub(crate) ids: Vec<i32>,
    pub(crate) greedy: Vec<i32>,
}

impl Fixture {
    pub(crate) fn forge(folder: &Path) -> Self {
        Self::forge_at(folder, Precision::F32)
    }

    pub(crate) fn forge_at(folder: &Path, precision: Precision) -> Self {
        Self::forge_for(folder, precision, None, "oracle")
    }

    /// Calibrated, and rotated where that pays.
    pub(crate) fn forge_calibrated(folder: &Path, precision: Precision) -> Self {
        Self::forge_for(folder, precision, Some(Calibration::default()), "oracle")
    }

    /// At w8, with what transformers computes of prompts that int8 weights do not change: `step_logits` of the checkpoint, `int8_logits` of its rounded weights.
    pub(crate) fn forge_int8(folder: &Path) -> Self {
        Self::forge_for(folder, Precision::W8, None, "int8")
    }

    /// With what the formula of multi-token prediction gives: a prompt is the rows' ids and the one behind them, and its answer what is predicted by chaining.
    pub(crate) fn forge_mtp(folder: &Path) -> Self {
        Self::forge_for(folder, Precision::F32, None, "mtp")
    }

    /// With the drafter beside the checkpoint, and what it guesses in transformers: a prompt is the rows' ids and the one behind them, and its answer what is guessed, each from the one before.
    pub(crate) fn forge_drafter(folder: &Path, precision: Precision) -> Self {
        Self::forge_for(folder, precision, None, "drafter")
    }

    fn forge_for(folder: &Path, precision: Precision, calibration: Option<Calibration>, oracle: &str) -> Self {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let temporary = tempfile::tempdir().unwrap();
        let out = temporary.path().join(&name);
        // The oracle rounded tables as it did matrices.
        let mut options = ForgeOptions { row_tables: true, calibration, ..ForgeOptions::new(&out, precision) };
        let material = match oracle {
            "drafter" => Material::open_with_drafter(folder, &folder.join(oracle)),
            _ => Material::open(folder),
        };
        material.and_then(|material| material.forge(&mut options)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let bundle = Bundle::open(&out).unwrap_or_else(|e| panic!("{name}: {e}"));
        let record: Value = serde_json::from_str(&std::fs::read_to_string(folder.join(format!("{oracle}.json"))).unwrap()).unwrap();
        let ids = |prompt: &Value, field: &str| prompt[field].as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect();
        let prompts = record["prompts"].as_array().unwrap().iter();
        let prompts = prompts.map(|p| Prompt { name: p["name"].as_str().unwrap().into(), ids: ids(p, "ids"), greedy: ids(p, "greedy") });
        let tensors = safetensors::open_file(&folder.join(format!("{oracle}.safetensors"))).unwrap();
        Self { prompts: prompts.collect(), name, bundle, tensors, _folder: temporary }
    }

    pub(crate) fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// The text program.
    pub(crate) fn program(&self) -> &Program {
        self.bundle.program("text").unwrap()
    }

    /// The weights, to be spoiled.
    pub(crate) fn overlay(&self) -> Overlay {
        Overlay { below: Some(self.bundle.weights()), replaced: HashMap::new() }
    }

    /// A tensor of the oracle.
    pub(crate) fn oracle(&self, tensor: &str) -> Option<Vec<f32>> {
        let info = self.tensors.find(tensor)?;
        let mut out = vec![0.0; info.shape.iter().product()];
        self.tensors.read_f32(tensor, 0..info.rows(), &mut out).unwrap();
        Some(out)
    }

    /// A loaded program and a fresh session for a prompt and its answer.
    pub(crate) fn load(&self, device: &dyn Device, program: Program, weights: &Overlay, prompt: &Prompt) -> Running {
        let weights: Arc<dyn Weights> = Arc::new(weights.over(self.bundle.weights()));
        let rows = prompt.ids.len() + prompt.greedy.len();
        let options = LoadOptions { max_rows: rows, max_wanted: rows, ..Default::default() };
        let executable = device.load(&Checked::new(program).unwrap(), &weights, &options).unwrap();
        let state = executable.new_state(rows).unwrap();
        Running { executable, state, rows }
    }

    /// The largest difference that any recorded number of the prompts shows, relative to the size of its tensor.
    /// Prompts with recorded logits only, and of their answers only the first token.
    pub(crate) fn difference(&self, program: Program, weights: &Overlay) -> f32 {
        let mut worst = 0f32;
        for prompt in self.prompts.iter().filter(|p| p.ids.len() <= 130) {
            let Some(steps) = self.oracle(&format!("{}.step_logits", prompt.name)) else { continue };
            let mut running = self.load(&ReferenceDevice, program.clone(), weights, prompt);
            let mut taps = HashMap::new();
            let epoch = program.epoch(prompt.ids.len());
            let logits = running.step(&prompt.ids, epoch, false, &mut |tap| {
                taps.insert(tap.stage.to_string(), tap.values.to_vec());
            });
            worst = worst.max(relative_difference(&logits, &steps[..logits.len()]));
            for (stage, values) in taps {
                if let Some(expected) = self.oracle(&format!("{}.tap.{stage}", prompt.name)) {
                    worst = worst.max(relative_difference(&values, &expected));
                }
            }
        }
        worst
    }
}

/// Weights of which some are replaced.
#[derive(Default)]
pub(crate) struct Overlay {
    below: Option<Arc<dyn Weights>>,
    replaced: HashMap<String, WeightTensor>,
}

impl Overlay {
    /// Shape and numbers of a weight as it is now.
    pub(crate) fn numbers(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let tensor = self.tensor(name).unwrap();
        let mut values = vec![0.0; tensor.rows() * tensor.columns()];
        values.chunks_mut(tensor.columns()).enumerate().for_each(|(row, out)| tensor.decode_row(row, out));
        (tensor.shape().to_vec(), values)
    }

    /// The same replacements over other weights.
    pub(crate) fn over(&self, below: Arc<dyn Weights>) -> Self {
        Self { below: Some(below), replaced: self.replaced.clone() }
    }

    pub(crate) fn replace(&mut self, name: &str, tensor: WeightTensor) {
        self.replaced.insert(name.into(), tensor);
    }
}

impl Weights for Overlay {
    fn tensor(&self, name: &str) -> Option<WeightTensor> {
        self.replaced.get(name).cloned().or_else(|| self.below.as_ref()?.tensor(name))
    }
}

/// A loaded program with a session.
pub(crate) struct Running {
    executable: Box<dyn Executable>,
    pub(crate) state: Box<dyn State>,
    rows: usize,
}

impl Running {
    /// Forgets everything.
    pub(crate) fn restart(&mut self) {
        self.state = self.executable.new_state(self.rows).unwrap();
    }

    /// Appends rows; gives the logits of all of them or of the last.
    pub(crate) fn step(&mut self, ids: &[i32], epoch: usize, all: bool, taps: &mut dyn FnMut(Tap<'_>)) -> Vec<f32> {
        let program: Checked = self.executable.program().clone();
        let (rows, first) = (ids.len(), self.state.len() as i32);
        let positions: Vec<i32> = (0..rows as i32).map(|i| first + i).collect();
        let three = positions.repeat(3);
        let wanted: Vec<i32> = if all { (0..rows as i32).collect() } else { vec![rows as i32 - 1] };
        let inputs: Vec<InputData<'_>> = program
            .inputs
            .iter()
            .map(|input| match input.generator {
                Generator::Ids | Generator::IdsMediaAsPad => InputData::I32(ids),
                Generator::PositionsSequence => InputData::I32(&positions),
                Generator::PositionsMrope => InputData::I32(&three),
                Generator::WantedRows => InputData::I32(&wanted),
                Generator::SoftRows | Generator::DeepstackRows(_) => InputData::F32(&[]),
                Generator::SoftRowsAt => InputData::I32(&[]),
                ref other => panic!("no {other:?} in a text prompt"),
            })
            .collect();
        let bindings = Bindings { rows, soft_rows: 0, wanted: wanted.len() };
        let mut outputs = Outputs::new();
        let mut segments = [Segment { epoch, ..Segment::new(Some(&mut *self.state), 0, rows) }];
        let mut call = Call::new(bindings, &inputs, &mut segments, &mut outputs);
        call.taps = Some(taps);
        self.executable.run(&mut call).unwrap();
        self.state.commit(rows).unwrap();
        outputs.value("logits").unwrap().to_vec()
    }
}

/// The largest difference as a share of the larger of 1 and the largest magnitude; infinite where a number is none.
pub(crate) fn relative_difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(1f32, |m, x| m.max(x.abs()));
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs() / scale);
    differences.fold(0.0, |m, d| if d.is_nan() { f32::INFINITY } else { m.max(d) })
}
