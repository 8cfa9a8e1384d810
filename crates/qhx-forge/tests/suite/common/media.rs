//! The media cases of a fixture: towers and prompts with images and sounds.

use super::{Fixture, Overlay};
use qhx_bundle::media::{ImageFrontEnd, Media, PatchOrder};
use qhx_forge::{
    Precision,
    read::{TensorSource, safetensors},
};
use qhx_ir::{
    Bindings, Call, Checked, Device, Executable, Generator, InputData, LoadOptions, Outputs, Program, Segment, Weights,
    reference::ReferenceDevice,
};
use serde_json::Value;
use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::Arc,
};

/// What transformers made of images, sounds and prompts with them.
pub(crate) struct MediaCases {
    pub(crate) fixture: Fixture,
    pub(crate) prompts: Vec<MediaPrompt>,
    /// `image.0`, `sound.2` …: the program that encodes it, and its number of soft rows.
    pub(crate) media: BTreeMap<String, (&'static str, usize)>,
    front_ends: Media,
    tensors: TensorSource,
}

/// A prompt with media.
pub(crate) struct MediaPrompt {
    pub(crate) name: String,
    pub(crate) ids: Vec<i32>,
    pub(crate) greedy: Vec<i32>,
    /// In the order of their placeholders.
    pub(crate) media: Vec<String>,
    positions: Option<Vec<Vec<i32>>>,
}

/// What a call of a program gave.
pub(crate) struct Outcome {
    /// By name: `soft_rows`, `deepstack.0`, `logits`.
    pub(crate) outputs: BTreeMap<String, Vec<f32>>,
    pub(crate) taps: HashMap<String, Vec<f32>>,
}

enum Numbers {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

impl MediaCases {
    /// The cases of a fixture that has some.
    pub(crate) fn forge(folder: &Path) -> Option<Self> {
        Self::forge_at(folder, Precision::F32)
    }

    pub(crate) fn forge_at(folder: &Path, precision: Precision) -> Option<Self> {
        let described = std::fs::read_to_string(folder.join("media.json")).ok()?;
        let described: Value = serde_json::from_str(&described).unwrap();
        let fixture = Fixture::forge_at(folder, precision);
        let mut media = BTreeMap::new();
        for (kind, program) in [("image", "vision"), ("sound", "audio")] {
            for (n, entry) in described[format!("{kind}s")].as_array().unwrap().iter().enumerate() {
                media.insert(format!("{kind}.{n}"), (program, entry["soft_rows"].as_u64().unwrap() as usize));
            }
        }
        let config: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap();
        let prompts = described["prompts"].as_array().unwrap().iter().map(|prompt| MediaPrompt::read(prompt, &config)).collect();
        let tensors = safetensors::open_file(&folder.join("media.safetensors")).unwrap();
        let front_ends = fixture.bundle().manifest().media.clone();
        Some(Self { fixture, prompts, media, front_ends, tensors })
    }

    /// A tensor of the oracle.
    pub(crate) fn oracle(&self, name: &str) -> Option<Vec<f32>> {
        let info = self.tensors.find(name)?;
        let mut out = vec![0.0; info.shape.iter().product()];
        self.tensors.read_f32(name, 0..info.rows(), &mut out).unwrap();
        Some(out)
    }

    /// Runs a tower over media in one call, each a segment of its own.
    pub(crate) fn encode(&self, device: &dyn Device, program: Program, weights: &Overlay, media: &[&str]) -> Outcome {
        let program = Checked::new(program).unwrap();
        let rows: Vec<usize> = media.iter().map(|name| self.rows(&program, name)).collect();
        let inputs = program.inputs.iter().map(|input| {
            let parts = media.iter().map(|name| self.input(&input.generator, name)).collect();
            join(parts, input.generator == Generator::PatchGrid, &rows)
        });
        let inputs: Vec<Numbers> = inputs.collect();
        self.run(device, program, weights, &inputs, Bindings { rows: rows.iter().sum(), soft_rows: 0, wanted: 0 }, &rows)
    }

    /// Runs the text program over a prompt and its answer in one call; `rows` are the soft rows, then the deepstack rows, of all its media.
    pub(crate) fn read(
        &self,
        device: &dyn Device,
        program: Program,
        weights: &Overlay,
        prompt: &MediaPrompt,
        rows: &[Vec<f32>],
    ) -> Outcome {
        let program = Checked::new(program).unwrap();
        let ids: Vec<i32> = [&prompt.ids[..], &prompt.greedy[..prompt.greedy.len() - 1]].concat();
        let placeholders = [self.front_ends.image.as_ref().map(|i| &i.placeholder), self.front_ends.audio.as_ref().map(|a| &a.placeholder)];
        let placeholder = |id: i32| placeholders.iter().flatten().any(|p| p.token as i32 == id);
        let at: Vec<i32> = (0..ids.len() as i32).filter(|&row| placeholder(ids[row as usize])).collect();
        let pad = self.fixture.bundle().manifest().tokens.pad.unwrap_or(0) as i32;
        let inputs: Vec<Numbers> = program
            .inputs
            .iter()
            .map(|input| match input.generator {
                Generator::Ids => Numbers::I32(ids.clone()),
                Generator::IdsMediaAsPad => Numbers::I32(ids.iter().map(|&id| if placeholder(id) { pad } else { id }).collect()),
                Generator::PositionsSequence => Numbers::I32((0..ids.len() as i32).collect()),
                Generator::PositionsMrope => Numbers::I32(prompt.positions(ids.len())),
                Generator::WantedRows => Numbers::I32((prompt.ids.len() as i32 - 1..ids.len() as i32).collect()),
                Generator::SoftRows => Numbers::F32(rows[0].clone()),
                Generator::DeepstackRows(n) => Numbers::F32(rows[1 + n].clone()),
                Generator::SoftRowsAt => Numbers::I32(at.clone()),
                ref other => panic!("no {other:?} in a prompt"),
            })
            .collect();
        let bindings = Bindings { rows: ids.len(), soft_rows: at.len(), wanted: prompt.greedy.len() };
        self.run(device, program, weights, &inputs, bindings, &[ids.len()])
    }

    /// The largest difference that a tower, or the text over the oracle's soft rows, shows in any recorded number, relative to the size of its tensor.
    pub(crate) fn difference(&self, program: Program, weights: &Overlay) -> f32 {
        let mut worst = 0f32;
        let mut hold = |found: &[f32], expected: Option<Vec<f32>>| {
            if let Some(expected) = expected {
                let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
                let differences = found.iter().zip(&expected).map(|(a, b)| (a - b).abs() / largest);
                worst = differences.fold(worst, |m, d| if d.is_nan() { f32::INFINITY } else { m.max(d) });
            }
        };
        for (medium, _) in self.media.iter().filter(|(_, (name, _))| **name == *program.name) {
            let outcome = self.encode(&ReferenceDevice, program.clone(), weights, &[medium]);
            outcome.outputs.iter().for_each(|(name, values)| hold(values, self.oracle(&format!("{medium}.{name}"))));
            outcome.taps.iter().for_each(|(stage, values)| hold(values, self.oracle(&format!("{medium}.tap.{stage}"))));
        }
        for prompt in self.prompts.iter().filter(|_| *program.name == *"text") {
            let Some(logits) = self.oracle(&format!("{}.step_logits", prompt.name)) else { continue };
            let all =
                |output: &str| prompt.media.iter().filter_map(|m| self.oracle(&format!("{m}.{output}"))).flatten().collect::<Vec<_>>();
            let outputs = std::iter::once("soft_rows".into()).chain((0..4).map(|n| format!("deepstack.{n}")));
            let rows: Vec<Vec<f32>> = outputs.map(|output: String| all(&output)).collect();
            let outcome = self.read(&ReferenceDevice, program.clone(), weights, prompt, &rows);
            hold(&outcome.outputs["logits"], Some(logits));
            outcome.taps.iter().for_each(|(stage, values)| hold(values, self.oracle(&format!("{}.tap.{stage}", prompt.name))));
        }
        worst
    }

    fn run(
        &self,
        device: &dyn Device,
        program: Checked,
        weights: &Overlay,
        inputs: &[Numbers],
        bindings: Bindings,
        segments: &[usize],
    ) -> Outcome {
        let weights: Arc<dyn Weights> = Arc::new(weights.over(self.fixture.bundle().weights()));
        let options = LoadOptions {
            max_rows: bindings.rows,
            max_soft_rows: bindings.rows,
            max_wanted: bindings.rows,
            max_segments: segments.len(),
            max_state_bytes: None,
            replaceable: Vec::new(),
            pauses: Vec::new(),
            scratch_group: None,
            history: None,
            artifacts: None,
            progress: None,
            timeline: None,
        };
        let mut executable: Box<dyn Executable> = device.load(&program, &weights, &options).unwrap();
        let inputs: Vec<InputData<'_>> = inputs
            .iter()
            .map(|numbers| match numbers {
                Numbers::F32(numbers) => InputData::F32(numbers),
                Numbers::I32(numbers) => InputData::I32(numbers),
            })
            .collect();
        let mut states: Vec<_> = segments.iter().map(|&rows| executable.new_state(rows).unwrap()).collect();
        let mut first_row = 0;
        let mut spans = Vec::new();
        for (state, &valid_rows) in states.iter_mut().zip(segments) {
            spans.push(Segment::new((!program.slots.is_empty()).then_some(&mut **state), first_row, valid_rows));
            first_row += valid_rows;
        }
        let mut taps = HashMap::new();
        let mut keep = |tap: qhx_ir::Tap<'_>| _ = taps.insert(tap.stage.to_string(), tap.values.to_vec());
        let mut outputs = Outputs::new();
        let mut call = Call::new(bindings, &inputs, &mut spans, &mut outputs);
        call.taps = Some(&mut keep);
        executable.run(&mut call).unwrap();
        let outputs = program.outputs.iter().map(|o| (o.name.to_string(), outputs.value(&o.name).unwrap().to_vec())).collect();
        Outcome { outputs, taps }
    }

    /// `T` of a medium.
    fn rows(&self, program: &Program, name: &str) -> usize {
        let tensor = if *program.name == *"vision" { "levels" } else { "frames" };
        self.tensors.find(&format!("{name}.{tensor}")).unwrap().shape[0]
    }

    fn input(&self, generator: &Generator, name: &str) -> Numbers {
        let floats = |tensor: &str| self.oracle(&format!("{name}.{tensor}")).unwrap_or_else(|| panic!("no {name}.{tensor}"));
        let integers = |tensor: &str| floats(tensor).iter().map(|&x| x as i32).collect::<Vec<_>>();
        let half = |number: usize| {
            let grid = integers("patch_grid");
            grid[number * grid.len() / 2..][..grid.len() / 2].to_vec()
        };
        match generator {
            Generator::Patches => Numbers::F32(scaled(self.front_ends.image.as_ref().unwrap(), &floats("levels"))),
            Generator::PatchGrid => Numbers::I32(integers("patch_grid")),
            Generator::PatchRows => Numbers::I32(half(0)),
            Generator::PatchColumns => Numbers::I32(half(1)),
            Generator::InterpolationIndex => Numbers::I32(integers("interpolation_taps.index")),
            Generator::InterpolationFactor => Numbers::F32(floats("interpolation_taps.factor")),
            Generator::Frames => Numbers::F32(floats("frames")),
            other => panic!("no {other:?} in a tower"),
        }
    }
}

/// Levels of patches as the tower takes them.
fn scaled(front_end: &ImageFrontEnd, levels: &[f32]) -> Vec<f32> {
    let plane = front_end.patches.size * front_end.patches.size * front_end.patches.temporal;
    let number = |(i, &level): (usize, &f32)| {
        let channel = match front_end.patches.order {
            PatchOrder::ChannelFirst => i / plane % 3,
            PatchOrder::ChannelLast => i % 3,
        };
        ((f64::from(level) * front_end.rescale - front_end.mean[channel]) / front_end.std[channel]) as f32
    };
    levels.iter().enumerate().map(number).collect()
}

/// The inputs of several media as those of one call; position streams are joined stream by stream.
fn join(parts: Vec<Numbers>, two_streams: bool, rows: &[usize]) -> Numbers {
    let (mut floats, mut integers) = (Vec::new(), Vec::new());
    for stream in 0..if two_streams { 2 } else { 1 } {
        for (part, &rows) in parts.iter().zip(rows) {
            match part {
                Numbers::F32(numbers) => floats.extend_from_slice(numbers),
                Numbers::I32(numbers) if two_streams => integers.extend_from_slice(&numbers[stream * rows..][..rows]),
                Numbers::I32(numbers) => integers.extend_from_slice(numbers),
            }
        }
    }
    if integers.is_empty() { Numbers::F32(floats) } else { Numbers::I32(integers) }
}

impl MediaPrompt {
    fn read(prompt: &Value, config: &Value) -> Self {
        let numbers = |value: &Value| value.as_array().unwrap().iter().map(|n| n.as_i64().unwrap() as i32).collect::<Vec<_>>();
        let ids = numbers(&prompt["ids"]);
        // Which kind each run of placeholders is of, in order.
        let (mut media, mut last) = (Vec::new(), None);
        let (mut images, mut sounds) = (numbers(&prompt["images"]).into_iter(), numbers(&prompt["sounds"]).into_iter());
        for &id in &ids {
            let kind = ["image", "audio"].into_iter().find(|kind| config[format!("{kind}_token_id")].as_i64() == Some(i64::from(id)));
            match kind {
                Some("image") if last != kind => media.push(format!("image.{}", images.next().unwrap())),
                Some("audio") if last != kind => media.push(format!("sound.{}", sounds.next().unwrap())),
                _ => {}
            }
            last = kind;
        }
        let positions = prompt.get("positions").map(|streams| streams.as_array().unwrap().iter().map(numbers).collect());
        Self { name: prompt["name"].as_str().unwrap().into(), greedy: numbers(&prompt["greedy"]), ids, media, positions }
    }

    /// Three streams over `rows` rows: what follows the prompt counts on from its largest position.
    fn positions(&self, rows: usize) -> Vec<i32> {
        let streams = self.positions.as_ref().expect("positions of the prompt");
        let next = 1 + streams.iter().flatten().max().unwrap();
        let stream = |stream: &Vec<i32>| [&stream[..], &(next..).take(rows - stream.len()).collect::<Vec<_>>()].concat();
        streams.iter().flat_map(stream).collect()
    }
}
