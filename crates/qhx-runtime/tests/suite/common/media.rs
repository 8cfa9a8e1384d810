//! A tiny model with eyes and ears: two towers before the text program, and pictures and sounds made of nothing.

use super::{Builder, EOS, HIDDEN, Kind, VOCABULARY, options};
use qhx_bundle::media::{AudioFrontEnd, ImageFrontEnd, Media, PatchOrder, Patches, Placeholder, Resize};
use qhx_ir::{
    Activation, Checked, DType, Dim, Generator, Input, KeyValue, Mask, Name, OpKind, Output, PROGRAM_VERSION, Program, Stage, Symbol,
};
use qhx_runtime::{
    DeviceChoice, Medium, Model, ModelParts,
    media::{Image, Picture, Sound},
    sample::random::uniform,
};
use std::collections::BTreeMap;

/// Ids that stand for a soft row of an image and of a sound, and those around a sound.
pub(crate) const IMAGE: u32 = 18;
pub(crate) const AUDIO: u32 = 19;
pub(crate) const BEGIN: u32 = 20;
pub(crate) const END: u32 = 21;
const BINS: usize = 4;
const PATCH: usize = 2;

/// Ids that stand for themselves.
pub(crate) fn words(seed: u64, count: usize) -> Vec<u32> {
    (0..count as u64).map(|n| (uniform(seed, n) * f64::from(IMAGE)) as u32).collect()
}

/// A model of this kind that sees and hears.
pub(crate) fn seeing(kind: Kind) -> ModelParts {
    let mut builder = Builder::new(kind, true);
    let program = builder.program();
    let towers = [vision(&mut builder), audio(&mut builder)].map(|tower| (tower.name.to_string(), Checked::new(tower).unwrap()));
    let name = format!("seeing {kind:?}");
    ModelParts {
        media: media(),
        towers: towers.into(),
        pad: Some(0),
        prepared: None,
        context_limit: 200,
        fingerprint: name.clone(),
        name,
        eos: vec![EOS],
        ..builder.parts(program)
    }
}

pub(crate) fn seeing_model(kind: Kind, device: DeviceChoice, chunk: usize, context: usize) -> Model {
    Model::from_parts(seeing(kind), &options(device, chunk, context)).unwrap()
}

pub(crate) fn media() -> Media {
    assert!((END as usize) < VOCABULARY);
    Media {
        image: Some(ImageFrontEnd {
            program: "vision".into(),
            placeholder: Placeholder { token: IMAGE, begin: None, end: None },
            resize: Resize::Area { min_pixels: 16, max_pixels: 4096, max_aspect: 100.0 },
            rescale: 1.0 / 255.0,
            mean: [0.5; 3],
            std: [0.5; 3],
            patches: Patches { size: PATCH, block: 2, temporal: 1, order: PatchOrder::ChannelLast },
            position_side: Some(3),
            trained_size: None,
        }),
        audio: Some(AudioFrontEnd {
            program: "audio".into(),
            placeholder: Placeholder { token: AUDIO, begin: Some(BEGIN), end: Some(END) },
            sampling_rate: 1000,
            max_samples: 1000,
            frame_length: 20,
            hop_length: 10,
            fft_length: 32,
            bins: BINS,
            min_frequency: 0.0,
            max_frequency: 500.0,
            mel_floor: 0.001,
            input_scale: 1.0,
            bin_mean: vec![],
            bin_std: vec![],
        }),
    }
}

/// An image of noise that becomes `rows` x `columns` soft rows.
pub(crate) fn image(seed: u64, rows: usize, columns: usize) -> Medium {
    let (height, width) = (rows * 2 * PATCH, columns * 2 * PATCH);
    let rgb = (0..(height * width * 3) as u64).map(|n| (uniform(seed, n) * 256.0) as u8).collect();
    let front_end = media().image.unwrap();
    let picture = Picture::from_rgb("noise", width, height, rgb).unwrap();
    let medium = Medium::image(format!("noise {seed}"), Image::from_picture("noise", &picture, &front_end).unwrap(), &front_end);
    assert_eq!(medium.rows(), rows * columns * 4);
    medium
}

/// Noise of a length.
pub(crate) fn sound(seed: u64, samples: usize) -> Medium {
    let front_end = media().audio.unwrap();
    let samples = (0..samples as u64).map(|n| uniform(seed, n) as f32 - 0.5).collect();
    let sound = Sound::from_samples("noise", 1000, samples, &front_end).unwrap();
    Medium::sound(format!("noise {seed}"), &sound, &front_end).unwrap()
}

/// Patches with positions, one layer of attention over all of them, blocks of four merged, and a second output of the same form.
fn vision(builder: &mut Builder) -> Program {
    let numbers = 3 * PATCH * PATCH;
    let patches = builder.linear("vision.embed.patches", &"patches".into(), HIDDEN, numbers);
    let table = builder.weight("vision.embed.table", &[9, HIDDEN], 0.3);
    let places = builder.op("vision.embed.places", OpKind::Interpolate { index: "index".into(), factor: "factor".into(), table });
    let x = builder.op("vision.embed.sum", OpKind::Add { a: patches, b: places });
    let stages = vec![Stage { name: "vision.embed".into(), tap: Some(x.clone()), rotated: false, centred: false }];
    let heads = |builder: &mut Builder, name: &str| builder.heads(&format!("vision.0.{name}"), &x, 2);
    let [q, k, v] = ["q", "k", "v"].map(|name| heads(builder, name));
    let kv = Some(KeyValue { k, v });
    let y = builder
        .op("vision.0.attend", OpKind::Attend { q, kv, slot: None, mask: Mask::Full, scale: 0.5, softcap: None, relative_keys: None });
    let y = builder.op("vision.0.flat", OpKind::Reshape { x: y, shape: vec![Dim::T, Dim::Fixed(HIDDEN)] });
    let x = builder.op("vision.0.residual", OpKind::Add { a: x.clone(), b: y });
    let merged = vec![Dim::Exact(Symbol::T, 4), Dim::Fixed(4 * HIDDEN)];
    let blocks = builder.op("merger.blocks", OpKind::Reshape { x: x.clone(), shape: merged });
    let soft = builder.linear("merger.soft", &blocks, HIDDEN, 4 * HIDDEN);
    let deep = builder.linear("merger.deep", &blocks, HIDDEN, 4 * HIDDEN);
    let input = |name: &str, dtype, shape: &[usize], generator| {
        let shape = std::iter::once(Dim::T).chain(shape.iter().map(|&n| Dim::Fixed(n))).collect();
        Input { name: name.into(), dtype, shape, generator }
    };
    let inputs = vec![
        input("patches", DType::F32, &[numbers], Generator::Patches),
        input("index", DType::I32, &[4], Generator::InterpolationIndex),
        input("factor", DType::F32, &[4], Generator::InterpolationFactor),
    ];
    let stages = [stages, vec![stage("vision.0", &x), stage("merger", &soft)]].concat();
    tower(builder, "vision", inputs, stages, [("soft_rows", soft), ("deepstack.0", deep)].into())
}

/// Frames through two strided convolutions.
fn audio(builder: &mut Builder) -> Program {
    let mut x =
        builder.op("subsample.frames", OpKind::Reshape { x: "frames".into(), shape: vec![Dim::T, Dim::Fixed(BINS), Dim::Fixed(1)] });
    for (n, (inputs, outputs)) in [(1, 3), (3, 5)].into_iter().enumerate() {
        let weight = builder.weight(&format!("subsample.conv{n}.weight"), &[outputs, 3, 3, inputs], 0.4);
        x = builder.op(&format!("subsample.conv{n}"), OpKind::Conv2d { x, weight, bias: None, stride: 2 });
        x = builder.op(&format!("subsample.relu{n}"), OpKind::Activate { x, activation: Activation::Relu });
    }
    let x = builder.op("subsample.flat", OpKind::Reshape { x, shape: vec![Dim::Ceil(Symbol::T, 4), Dim::Fixed(5)] });
    let soft = builder.linear("audio.0.project", &x, HIDDEN, 5);
    let frames = Input { name: "frames".into(), dtype: DType::F32, shape: vec![Dim::T, Dim::Fixed(BINS)], generator: Generator::Frames };
    let stages = vec![stage("subsample", &x), stage("audio.0", &soft)];
    tower(builder, "audio", vec![frames], stages, [("soft_rows", soft)].into())
}

fn stage(name: &str, tap: &Name) -> Stage {
    Stage { name: name.into(), tap: Some(tap.clone()), rotated: false, centred: false }
}

fn tower(builder: &mut Builder, name: &str, inputs: Vec<Input>, stages: Vec<Stage>, outputs: Vec<(&str, Name)>) -> Program {
    Program {
        program_version: PROGRAM_VERSION,
        name: name.into(),
        inputs,
        outputs: outputs.into_iter().map(|(name, value)| Output { name: name.into(), value }).collect(),
        slots: BTreeMap::new(),
        epochs: vec![],
        rotaries: BTreeMap::new(),
        stages,
        weights: std::mem::take(&mut builder.weights),
        ops: std::mem::take(&mut builder.ops),
    }
}
