//! Tiny models made by hand, with every kind of state, and devices that misbehave on request.

use qhx_bundle::media::Media;
use qhx_ir::{
    Activation, Checked, DType, Dim, Encoding, Generator, Input, KeyValue, KvType, Mask, Name, Op, OpKind, Output, PROGRAM_VERSION,
    Program, Rotary, RotaryVariant, Slot, Stage, Weight, WeightTensor, Weights,
};
use qhx_runtime::{DeviceChoice, LoadOptions, Model, ModelParts, sample::random::uniform};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

pub(crate) mod devices;
pub(crate) mod media;
pub(crate) mod predicting;

pub(crate) const VOCABULARY: usize = 23;
const HIDDEN: usize = 8;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 4;
const FFN: usize = 12;
/// The last id ends an answer.
pub(crate) const EOS: u32 = VOCABULARY as u32 - 1;

/// What a tiny model is made of. All have two layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Attention over all rows.
    Dense,
    /// Attention over a window of 5 rows.
    Windowed,
    /// A short convolution and a gated delta rule in the first layer, attention in the second.
    Recurrent,
    /// Rotary constants that change beyond 12 and beyond 20 rows.
    Epochs,
    /// The same, with recurrent slots.
    RecurrentEpochs,
}

pub(crate) const KINDS: [Kind; 5] = [Kind::Dense, Kind::Windowed, Kind::Recurrent, Kind::Epochs, Kind::RecurrentEpochs];

impl Kind {
    pub(crate) fn is_recurrent(self) -> bool {
        matches!(self, Self::Recurrent | Self::RecurrentEpochs)
    }

    /// Both types of rows are among the kinds.
    fn kv_type(self) -> KvType {
        if self == Self::Windowed { KvType::F16 } else { KvType::F32 }
    }

    /// How far two ways to the same logits may differ on a device. The interpreter does not differ at all. A fast device may take another
    /// kernel for another number of rows, which rounds differently; where rows are kept in f16, that may turn a rounding of theirs.
    pub(crate) fn tolerance(self, device: DeviceChoice) -> f32 {
        match (device, self.kv_type()) {
            (DeviceChoice::Reference, _) => 0.0,
            (_, KvType::F32) => 2e-4,
            (_, KvType::F16) => 3e-2,
        }
    }

    fn epochs(self) -> Vec<usize> {
        if matches!(self, Self::Epochs | Self::RecurrentEpochs) { vec![12, 20] } else { vec![] }
    }
}

/// Waits until something is so, for which there is no event.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "it is never so: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The devices that the tests run on: the interpreter, and whatever this build has.
pub(crate) fn device_choices() -> Vec<DeviceChoice> {
    let mut choices = vec![DeviceChoice::Reference];
    if cfg!(feature = "cpu") {
        choices.push(DeviceChoice::Cpu);
    }
    choices
}

/// A tiny model on a device.
pub(crate) fn model(kind: Kind, device: DeviceChoice, chunk: usize, context: usize) -> Model {
    Model::from_parts(parts(kind), &options(device, chunk, context)).unwrap()
}

pub(crate) fn options(device: DeviceChoice, chunk: usize, context: usize) -> LoadOptions {
    LoadOptions { device, threads: Some(2), context: Some(context), chunk, ..LoadOptions::default() }
}

pub(crate) fn parts(kind: Kind) -> ModelParts {
    let mut builder = Builder::new(kind, false);
    let program = builder.program();
    builder.parts(program)
}

impl Builder {
    fn new(kind: Kind, sees: bool) -> Self {
        Self { kind, sees, weights: BTreeMap::new(), tensors: HashMap::new(), slots: BTreeMap::new(), ops: vec![], seed: 1 }
    }

    fn parts(self, program: Program) -> ModelParts {
        let kind = self.kind;
        ModelParts {
            name: format!("{kind:?}"),
            program: Checked::new(program).unwrap(),
            weights: Arc::new(self.tensors) as Arc<dyn Weights>,
            context_limit: 64,
            eos: vec![EOS],
            tokenizer: None,
            template: None,
            fingerprint: format!("tiny {kind:?}"),
            media: Media::default(),
            towers: BTreeMap::new(),
            draft: None,
            pad: None,
            prepared: None,
        }
    }
}

/// `count` ids that are no end of an answer.
pub(crate) fn ids(seed: u64, count: usize) -> Vec<u32> {
    (0..count as u64).map(|n| (uniform(seed, n) * f64::from(EOS)) as u32).collect()
}

struct Builder {
    kind: Kind,
    /// Whether it takes soft rows, adds rows after its first layer and turns by three streams of positions.
    sees: bool,
    weights: BTreeMap<Name, Weight>,
    tensors: HashMap<String, WeightTensor>,
    slots: BTreeMap<Name, Slot>,
    ops: Vec<Op>,
    seed: u64,
}

impl Builder {
    fn program(&mut self) -> Program {
        let table = self.weight("table", &[VOCABULARY, HIDDEN], 1.0);
        let mut x = self.op("embed.rows", OpKind::Embed { ids: "ids".into(), table, scale: 1.0 });
        if self.sees {
            x = self.op("embed.soft", OpKind::ScatterRows { x, rows: "soft_rows".into(), at: "soft_rows_at".into() });
        }
        let mut stages = vec![Stage { name: "embed".into(), tap: Some(x.clone()), rotated: false, centred: false }];
        for layer in 0..2 {
            let mixed = if layer == 0 && self.kind.is_recurrent() { self.delta(layer, &x) } else { self.attention(layer, &x) };
            x = self.op(&format!("layers.{layer}.attn.residual"), OpKind::Add { a: x, b: mixed });
            stages.push(Stage { name: format!("layers.{layer}.attn").into(), tap: Some(x.clone()), rotated: false, centred: false });
            let h = self.norm(&format!("layers.{layer}.ffn"), &x);
            let gate = self.linear(&format!("layers.{layer}.ffn.gate"), &h, FFN, HIDDEN);
            let up = self.linear(&format!("layers.{layer}.ffn.up"), &h, FFN, HIDDEN);
            let h = self.op(&format!("layers.{layer}.ffn.act"), OpKind::GateAct { gate, up, activation: Activation::Silu });
            let h = self.linear(&format!("layers.{layer}.ffn.down"), &h, HIDDEN, FFN);
            x = self.op(&format!("layers.{layer}.ffn.residual"), OpKind::Add { a: x, b: h });
            if self.sees && layer == 0 {
                x = self.op("layers.0.ffn.deepstack", OpKind::ScatterAddRows { x, rows: "deepstack".into(), at: "soft_rows_at".into() });
            }
            stages.push(Stage { name: format!("layers.{layer}.ffn").into(), tap: Some(x.clone()), rotated: false, centred: false });
        }
        let x = self.op("lm_head.rows", OpKind::Gather { x, rows: "wanted".into() });
        let x = self.norm("lm_head", &x);
        let logits = self.linear("lm_head.logits", &x, VOCABULARY, HIDDEN);
        stages.push(Stage { name: "lm_head".into(), tap: Some(logits.clone()), rotated: false, centred: false });

        let input = |name: &str, shape: Vec<Dim>, generator| Input { name: name.into(), dtype: DType::I32, shape, generator };
        let epochs = self.kind.epochs();
        let variant = |factor: f32| RotaryVariant { inv_freq: vec![1.0 / factor, 0.05 / factor], amplitude: 1.0 };
        let rotary = Rotary {
            blocks: vec![(0, HEAD_DIM)],
            streams: if self.sees { vec![1, 2] } else { vec![] },
            variants: (0..=epochs.len()).map(|e| variant(1.0 + e as f32)).collect(),
        };
        let mut inputs = vec![
            input("ids", vec![Dim::T], Generator::Ids),
            input("positions", vec![Dim::Fixed(1), Dim::T], Generator::PositionsSequence),
            input("wanted", vec![Dim::L], Generator::WantedRows),
        ];
        if self.sees {
            let soft =
                |name: &str, generator| Input { name: name.into(), dtype: DType::F32, shape: vec![Dim::R, Dim::Fixed(HIDDEN)], generator };
            inputs[0].generator = Generator::IdsMediaAsPad;
            inputs[1] = input("positions", vec![Dim::Fixed(3), Dim::T], Generator::PositionsMrope);
            inputs.extend([soft("soft_rows", Generator::SoftRows), soft("deepstack", Generator::DeepstackRows(0))]);
            inputs.push(input("soft_rows_at", vec![Dim::R], Generator::SoftRowsAt));
        }
        Program {
            program_version: PROGRAM_VERSION,
            name: "text".into(),
            inputs,
            outputs: vec![Output { name: "logits".into(), value: logits }],
            slots: std::mem::take(&mut self.slots),
            epochs,
            rotaries: [("rotary".into(), rotary)].into(),
            stages,
            weights: std::mem::take(&mut self.weights),
            ops: std::mem::take(&mut self.ops),
        }
    }

    fn attention(&mut self, layer: usize, x: &Name) -> Name {
        let at = |name: &str| format!("layers.{layer}.attn.{name}");
        let h = self.norm(&format!("layers.{layer}.attn"), x);
        let q = self.heads(&at("q"), &h, HEADS);
        let k = self.heads(&at("k"), &h, KV_HEADS);
        let v = self.heads(&at("v"), &h, KV_HEADS);
        let rope = |x| OpKind::Rope { x, positions: "positions".into(), rotary: "rotary".into() };
        let q = self.op(&at("q_rope"), rope(q));
        let k = self.op(&at("k_rope"), rope(k));
        let window = (self.kind == Kind::Windowed).then_some(5);
        let slot: Name = format!("kv.{layer}").into();
        let dtype = self.kind.kv_type();
        self.slots.insert(slot.clone(), Slot::Kv { kv_heads: KV_HEADS, head_dim: HEAD_DIM, window, dtype });
        let attend = OpKind::Attend {
            q,
            kv: Some(KeyValue { k, v }),
            slot: Some(slot),
            mask: window.map_or(Mask::Causal, Mask::Window),
            scale: 0.5,
            softcap: None,
            relative_keys: None,
        };
        let y = self.op(&at("attend"), attend);
        let y = self.op(&at("flat"), OpKind::Reshape { x: y, shape: vec![Dim::T, Dim::Fixed(HEADS * HEAD_DIM)] });
        self.linear(&at("o"), &y, HIDDEN, HEADS * HEAD_DIM)
    }

    fn delta(&mut self, layer: usize, x: &Name) -> Name {
        let at = |name: &str| format!("layers.{layer}.attn.{name}");
        let h = self.norm(&format!("layers.{layer}.attn"), x);
        let slot: Name = format!("fifo.{layer}").into();
        self.slots.insert(slot.clone(), Slot::Fifo { rows: 3, channels: HIDDEN });
        let conv = OpKind::ShortConv {
            x: h,
            weight: self.weight(&at("conv.weight"), &[HIDDEN, 4], 0.7),
            bias: None,
            slot: Some(slot),
            activation: Some(Activation::Silu),
        };
        let h = self.op(&at("conv"), conv);
        let q = self.heads(&at("q"), &h, 1);
        let k = self.heads(&at("k"), &h, 1);
        let v = self.heads(&at("v"), &h, 2);
        let a = self.linear(&at("a"), &h, 2, HIDDEN);
        let b = self.linear(&at("b"), &h, 2, HIDDEN);
        let slot: Name = format!("delta.{layer}").into();
        self.slots.insert(slot.clone(), Slot::Delta { heads: 2, key_dim: HEAD_DIM, value_dim: HEAD_DIM });
        let delta = OpKind::GatedDelta {
            q,
            k,
            v,
            a,
            b,
            a_log: self.weight(&at("a_log"), &[2], 0.5),
            dt_bias: self.weight(&at("dt_bias"), &[2], 0.5),
            slot,
            scale: 0.5,
            eps: 1e-6,
        };
        let y = self.op(&at("delta"), delta);
        let y = self.op(&at("flat"), OpKind::Reshape { x: y, shape: vec![Dim::T, Dim::Fixed(2 * HEAD_DIM)] });
        self.linear(&at("o"), &y, HIDDEN, 2 * HEAD_DIM)
    }

    fn op(&mut self, path: &str, op: OpKind) -> Name {
        self.ops.push(Op { path: path.into(), op });
        path.into()
    }

    fn norm(&mut self, stage: &str, x: &Name) -> Name {
        let weight = Some(self.weight(&format!("{stage}.norm.weight"), &[HIDDEN], 1.0));
        self.op(&format!("{stage}.norm"), OpKind::RmsNorm { x: x.clone(), weight, eps: 1e-5 })
    }

    fn linear(&mut self, path: &str, x: &Name, out: usize, input: usize) -> Name {
        let weight = self.weight(&format!("{path}.weight"), &[out, input], 0.8);
        self.op(path, OpKind::Linear { x: x.clone(), weight, bias: None, activation: Default::default(), clip: None })
    }

    fn heads(&mut self, path: &str, x: &Name, heads: usize) -> Name {
        let x = self.linear(path, x, heads * HEAD_DIM, HIDDEN);
        let shape = vec![Dim::T, Dim::Fixed(heads), Dim::Fixed(HEAD_DIM)];
        self.op(&format!("{path}_heads"), OpKind::Reshape { x, shape })
    }

    fn weight(&mut self, name: &str, shape: &[usize], size: f64) -> Name {
        self.seed += 1;
        let values: Vec<f32> =
            (0..shape.iter().product::<usize>() as u64).map(|n| ((uniform(self.seed, n) * 2.0 - 1.0) * 2.0 * size) as f32).collect();
        self.tensors.insert(name.into(), WeightTensor::from_f32(shape, &values).unwrap());
        self.weights.insert(name.into(), Weight { shape: shape.to_vec(), encoding: Encoding::F32 });
        name.into()
    }
}
