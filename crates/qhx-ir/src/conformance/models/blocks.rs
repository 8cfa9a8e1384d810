//! The building blocks of models.

use crate::{
    Activation, ActivationForm, Dim, Encoding, KvType, Name, OpKind, Rotary, RotaryVariant,
    conformance::{
        build::{Builder, Case},
        compare::tolerance,
        rng::Rng,
    },
};

/// A builder that knows the model's precision.
pub(super) struct Blocks {
    pub(super) b: Builder,
    pub(super) encoding: Encoding,
    pub(super) form: ActivationForm,
    pub(super) kv: KvType,
}

impl Blocks {
    /// `number` chooses the precision; 0 is f32 throughout.
    pub(super) fn new(rng: Rng, name: &str, number: usize) -> Self {
        use ActivationForm::{F16, F32, I8Block32, I8Row};
        let precisions = [
            (Encoding::F32, F32, KvType::F32),
            (Encoding::Bf16, F32, KvType::F32),
            (Encoding::F16, F16, KvType::F16),
            (Encoding::I8Row, I8Row, KvType::F16),
            (Encoding::I4_BLOCK32, I8Block32, KvType::F16),
            (Encoding::I4_BLOCK32_MIN, I8Block32, KvType::F16),
            (Encoding::I8_BLOCK32, F32, KvType::F16),
            (Encoding::I6_BLOCK32, I8Block32, KvType::F16),
        ];
        let (encoding, form, kv) = precisions[number % precisions.len()];
        let tolerance = match (form, kv) {
            (I8Row | I8Block32, _) => tolerance::INTEGER_MODEL,
            (F32, KvType::F32) => tolerance::MODEL,
            _ => tolerance::HALF_MODEL,
        };
        let mut b = Builder::new(rng, name, tolerance);
        b.case.rows.most = 24;
        b.case.rows.calls = 6;
        b.note(format!("{encoding}, {form:?}, KV {kv:?}"));
        Self { b, encoding, form, kv }
    }

    /// The model in plain f32 up to here: for parts whose decisions must not depend on rounding.
    pub(super) fn exact(&mut self) {
        (self.encoding, self.form, self.kv) = (Encoding::F32, ActivationForm::F32, KvType::F32);
    }

    pub(super) fn linear(&mut self, path: &str, x: &Name, inputs: usize, outputs: usize) -> Name {
        let weight = self.b.weight(&format!("{path}.weight"), &[outputs, inputs], self.encoding, 1.0 / (inputs as f32).sqrt());
        let activation = self.form;
        self.b.op(path, OpKind::Linear { x: x.clone(), weight, bias: None, activation, clip: None })
    }

    pub(super) fn linear_bias(&mut self, path: &str, x: &Name, inputs: usize, outputs: usize) -> Name {
        let y = self.linear(path, x, inputs, outputs);
        let new = self.b.plain(&format!("{path}.bias"), &[outputs], 0.2);
        if let Some(OpKind::Linear { bias, .. }) = self.b.case.program.ops.last_mut().map(|op| &mut op.op) {
            *bias = Some(new);
        }
        y
    }

    pub(super) fn rms_norm(&mut self, path: &str, x: &Name, n: usize) -> Name {
        let weight = Some(self.b.around(&format!("{path}.weight"), n, 1.0, 0.2));
        self.b.op(path, OpKind::RmsNorm { x: x.clone(), weight, eps: 1e-6 })
    }

    pub(super) fn layer_norm(&mut self, path: &str, x: &Name, n: usize) -> Name {
        let weight = self.b.around(&format!("{path}.weight"), n, 1.0, 0.2);
        let bias = Some(self.b.around(&format!("{path}.bias"), n, 0.0, 0.2));
        self.b.op(path, OpKind::LayerNorm { x: x.clone(), weight, bias, eps: 1e-5 })
    }

    pub(super) fn reshape(&mut self, path: &str, x: &Name, rows: Dim, tail: &[usize]) -> Name {
        let shape = std::iter::once(rows).chain(tail.iter().map(|&n| Dim::Fixed(n))).collect();
        self.b.op(path, OpKind::Reshape { x: x.clone(), shape })
    }

    pub(super) fn slice(&mut self, path: &str, x: &Name, axis: usize, start: usize, length: usize) -> Name {
        self.b.op(path, OpKind::Slice { x: x.clone(), axis, start, length })
    }

    pub(super) fn add(&mut self, path: &str, a: &Name, b: &Name) -> Name {
        self.b.op(path, OpKind::Add { a: a.clone(), b: b.clone() })
    }

    pub(super) fn rope(&mut self, path: &str, x: &Name, positions: &Name, rotary: &Name) -> Name {
        self.b.op(path, OpKind::Rope { x: x.clone(), positions: positions.clone(), rotary: rotary.clone() })
    }

    /// Gated feed-forward under `STAGE.ffn`, added to `x`.
    pub(super) fn feed_forward(&mut self, stage: &str, x: &Name, hidden: usize, ffn: usize, activation: Activation) -> Name {
        let h = self.rms_norm(&format!("{stage}.norm"), x, hidden);
        let gate = self.linear(&format!("{stage}.gate_proj"), &h, hidden, ffn);
        let up = self.linear(&format!("{stage}.up_proj"), &h, hidden, ffn);
        let h = self.b.op(&format!("{stage}.act"), OpKind::GateAct { gate, up, activation });
        let h = self.linear(&format!("{stage}.down_proj"), &h, ffn, hidden);
        let x = self.add(&format!("{stage}.residual"), x, &h);
        self.b.stage(stage, &x);
        x
    }

    /// The wanted rows through norm and head, capped.
    pub(super) fn head(mut self, x: &Name, hidden: usize, vocabulary: usize, table: Option<Name>) -> Case {
        let rows = self.b.wanted();
        let x = self.b.op("lm_head.rows", OpKind::Gather { x: x.clone(), rows });
        let x = self.rms_norm("lm_head.norm", &x, hidden);
        let x = match table {
            Some(weight) => {
                let activation = self.form;
                self.b.op("lm_head.head", OpKind::Linear { x, weight, bias: None, activation, clip: None })
            }
            None => self.linear_bias("lm_head.head", &x, hidden, vocabulary),
        };
        let x = self.b.op("lm_head.cap", OpKind::Softcap { x, cap: 30.0 });
        self.b.stage("lm_head", &x);
        self.b.output("logits", &x);
        self.b.case
    }
}

/// A plain rotary of `length` numbers from `start`.
pub(super) fn rotary(theta: f32, blocks: Vec<(usize, usize)>, streams: Vec<usize>) -> Rotary {
    let frequencies = blocks.iter().flat_map(|&(_, length)| (0..length / 2).map(move |i| theta.powf(-2.0 * i as f32 / length as f32)));
    Rotary { variants: vec![RotaryVariant { inv_freq: frequencies.collect(), amplitude: 1.0 }], blocks, streams }
}
