//! The pen with which a family writes its program.
//!
//! A family calls methods named like the ops; each adds an op to the program, declares the weights it needs with the checkpoint tensors they are
//! made of, and gives back the new value. How weights are stored is decided by a [`Precision`], never by the family.
//!
//! Names follow from where the pen stands: within [`Pen::stage`] `layers.3.attn` over the tensors `layers.3`, `linear("self_attn.q_proj", …)` has the path
//! `layers.3.attn.q_proj` and the weight `layers.3.self_attn.q_proj.weight`.

mod draft;
mod recipe;
mod tower;

pub use recipe::{Folded, Formula, Recipe, Rotated, Side};
pub use tower::{RelativeAttention, has_tower};

use crate::{
    ForgeError,
    precision::{Precision, Role, StoredTensors, activation_of},
};
use qhx_ir::{
    Activation, Checked, DType, Dim, Encoding, Generator, Input, KeyValue, KvType, Mask, Name, Op, OpKind, Output, PROGRAM_VERSION,
    Program, Rotary, Routing, Shape, Slot, Stage, Weight,
};
use std::{cell::RefCell, collections::BTreeMap};

/// A value of the program being written.
#[derive(Clone, Debug)]
pub struct Value {
    name: Name,
    shape: Shape,
}

impl Value {
    /// The last dimension, which families keep fixed.
    fn width(&self) -> usize {
        match self.shape.last() {
            Some(Dim::Fixed(n)) => *n,
            other => unreachable!("`{}` ends in {other:?}: a family's widths are numbers", self.name),
        }
    }
}

/// A finished program with the recipes of its weights.
#[derive(Clone, Debug)]
pub struct Written {
    /// The program, checked.
    pub program: Checked,
    /// How each weight is made.
    pub recipes: BTreeMap<Name, Recipe>,
    /// One-number tensors that stand in the program itself, with what stands there.
    pub constants: Vec<(String, f32)>,
}

/// A program being written.
pub struct Pen<'a> {
    precision: Precision,
    tensors: &'a dyn StoredTensors,
    /// What checkpoint names have before ours: `model.`, `model.language_model.` …
    root: String,
    /// Names that begin like this have no root before them.
    beside: Option<&'static str>,
    program: RefCell<Program>,
    recipes: RefCell<BTreeMap<Name, Recipe>>,
    constants: RefCell<Vec<(String, f32)>>,
    /// The first thing that was wrong with a tensor read while writing.
    problem: RefCell<Option<ForgeError>>,
    /// The stage that is open, and the prefix of weight names in it.
    scope: RefCell<(String, String)>,
}

/// The keys and values that an attention op uses.
pub enum Kv<'v> {
    /// New ones, kept in a slot of this name.
    Own(&'v str, &'v Value, &'v Value),
    /// Those that another op of this call put into the slot.
    Shared(&'v str),
    /// New ones, not kept.
    Segment(&'v Value, &'v Value),
}

impl<'a> Pen<'a> {
    /// An empty program. Checkpoint names start with the first of `roots` under which `probe` is found (the first of all without a checkpoint).
    pub fn new(name: &str, precision: Precision, tensors: &'a dyn StoredTensors, roots: &[&str], probe: &str) -> Self {
        let found = roots.iter().find(|root| tensors.encoding(&format!("{root}{probe}")).is_some());
        let root = found.or(roots.first()).copied().unwrap_or_default().to_string();
        let program = Program {
            program_version: PROGRAM_VERSION,
            name: name.into(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            slots: BTreeMap::new(),
            epochs: Vec::new(),
            rotaries: BTreeMap::new(),
            stages: Vec::new(),
            weights: BTreeMap::new(),
            ops: Vec::new(),
        };
        Self {
            precision,
            tensors,
            root,
            beside: None,
            program: program.into(),
            recipes: Default::default(),
            constants: Default::default(),
            problem: Default::default(),
            scope: Default::default(),
        }
    }

    /// The same, with tensors whose names begin with `prefix` beside the root.
    pub fn beside(self, prefix: &'static str) -> Self {
        Self { beside: Some(prefix), ..self }
    }

    /// The program so far, checked.
    pub fn finish(self) -> Result<Written, ForgeError> {
        if let Some(problem) = self.problem.into_inner() {
            return Err(problem);
        }
        let program = Checked::new(self.program.into_inner())?;
        Ok(Written { program, recipes: self.recipes.into_inner(), constants: self.constants.into_inner() })
    }

    /// Writes a stage: the ops of `body`, with weight names under `weights`. What `body` gives back is the stage's tap.
    pub fn stage(&self, name: impl Into<String>, weights: impl Into<String>, body: impl FnOnce() -> Value) -> Value {
        let name = name.into();
        self.scope.replace((name.clone(), weights.into()));
        let value = body();
        self.program.borrow_mut().stages.push(Stage { name: name.into(), tap: Some(value.name.clone()), rotated: false, centred: false });
        value
    }

    /// Declares an input of the call.
    pub fn input(&self, name: &str, dtype: DType, shape: Shape, generator: Generator) -> Value {
        self.program.borrow_mut().inputs.push(Input { name: name.into(), dtype, shape: shape.clone(), generator });
        Value { name: name.into(), shape }
    }

    /// Token ids.
    pub fn ids(&self) -> Value {
        self.input("ids", DType::I32, vec![Dim::T], Generator::Ids)
    }

    /// Token ids, with the padding id where media stand.
    pub fn ids_media_as_pad(&self) -> Value {
        self.input("ids", DType::I32, vec![Dim::T], Generator::IdsMediaAsPad)
    }

    /// Positions counted through the session.
    pub fn positions(&self) -> Value {
        self.input("positions", DType::I32, vec![Dim::Fixed(1), Dim::T], Generator::PositionsSequence)
    }

    /// Time, height and width positions.
    pub fn mrope_positions(&self) -> Value {
        self.input("positions", DType::I32, vec![Dim::Fixed(3), Dim::T], Generator::PositionsMrope)
    }

    /// The rows of `x` whose logits the caller wants.
    pub fn wanted_rows(&self, x: &Value) -> Value {
        let rows = self.input("wanted_rows", DType::I32, vec![Dim::L], Generator::WantedRows);
        let shape = [&[Dim::L], &x.shape[1..]].concat();
        self.op("wanted_rows", shape, OpKind::Gather { x: x.name.clone(), rows: rows.name })
    }

    /// Declares what a call gives back.
    pub fn output(&self, name: &str, value: &Value) {
        self.program.borrow_mut().outputs.push(Output { name: name.into(), value: value.name.clone() });
    }

    /// Declares a rotary table.
    pub fn rotary(&self, name: &str, rotary: Rotary) {
        self.program.borrow_mut().rotaries.insert(name.into(), rotary);
    }

    /// Declares the total lengths beyond which constants change.
    pub fn epochs(&self, limits: &[usize]) {
        self.program.borrow_mut().epochs = limits.to_vec();
    }

    /// Rows of the table `TABLE.weight`, times `scale`.
    pub fn embed(&self, table: &str, ids: &Value, rows: usize, width: usize, scale: f32) -> Value {
        let weight = self.weight(&format!("{table}.weight"), &[rows, width], Role::Embedding);
        self.op(table, vec![ids.shape[0], Dim::Fixed(width)], OpKind::Embed { ids: ids.name.clone(), table: weight, scale })
    }

    /// `x · NAME.weightᵀ`.
    pub fn linear(&self, name: &str, x: &Value, out: usize) -> Value {
        let weight = self.weight(&format!("{name}.weight"), &[out, x.width()], Role::Matrix);
        self.product(name, x, weight, None, out)
    }

    /// `x · NAME.weightᵀ`, plus `NAME.bias` if `bias`.
    pub fn linear_bias(&self, name: &str, x: &Value, out: usize, bias: bool) -> Value {
        let weight = self.weight(&format!("{name}.weight"), &[out, x.width()], Role::Matrix);
        let bias = bias.then(|| self.weight(&format!("{name}.bias"), &[out], Role::Small));
        self.product(name, x, weight, bias, out)
    }

    /// The router of a mixture of experts: a small linear that is never quantised.
    pub fn router(&self, name: &str, x: &Value, experts: usize) -> Value {
        let weight = self.weight(&format!("{name}.weight"), &[experts, x.width()], Role::Small);
        self.product(name, x, weight, None, experts)
    }

    /// The output head `NAME.weight`, a tensor beside the root; plus `NAME.bias` if `bias`.
    pub fn head(&self, name: &str, x: &Value, vocabulary: usize, bias: bool) -> Value {
        let own = |part: &str, shape: &[usize], role| {
            let name = format!("{name}.{part}");
            self.declare(name.as_str().into(), shape, role, Recipe::Copy(name.clone()))
        };
        let weight = own("weight", &[vocabulary, x.width()], Role::Head);
        let bias = bias.then(|| own("bias", &[vocabulary], Role::Small));
        self.product("logits", x, weight, bias, vocabulary)
    }

    /// The output head that is the look-up table `TABLE.weight`.
    pub fn tied_head(&self, table: &str, x: &Value, vocabulary: usize) -> Value {
        let weight = self.weight(&format!("{table}.weight"), &[vocabulary, x.width()], Role::Head);
        self.product("logits", x, weight, None, vocabulary)
    }

    fn product(&self, label: &str, x: &Value, weight: Name, bias: Option<Name>, out: usize) -> Value {
        let activation = activation_of(self.encoding(&weight));
        let shape = [&x.shape[..x.shape.len() - 1], &[Dim::Fixed(out)]].concat();
        self.op(label, shape, OpKind::Linear { x: x.name.clone(), weight, bias, activation, clip: None })
    }

    /// `[rows, heads · dim] → [rows, heads, dim]`.
    pub fn heads(&self, x: &Value, heads: usize) -> Value {
        let shape = vec![x.shape[0], Dim::Fixed(heads), Dim::Fixed(x.width() / heads)];
        self.reshape(&format!("{}.heads", self.label_of(x)), x, shape)
    }

    /// All dimensions but the rows made one.
    pub fn flatten(&self, x: &Value) -> Value {
        let width = x.shape[1..].iter().map(|d| if let Dim::Fixed(n) = d { *n } else { 1 }).product();
        self.reshape(&format!("{}.flat", self.label_of(x)), x, vec![x.shape[0], Dim::Fixed(width)])
    }

    /// The same numbers in another shape.
    pub fn reshape(&self, label: &str, x: &Value, shape: Shape) -> Value {
        self.op(label, shape.clone(), OpKind::Reshape { x: x.name.clone(), shape })
    }

    /// `length` entries of dimension `axis` from `start`.
    pub fn slice(&self, label: &str, x: &Value, axis: usize, start: usize, length: usize) -> Value {
        let mut shape = x.shape.clone();
        shape[axis] = Dim::Fixed(length);
        self.op(label, shape, OpKind::Slice { x: x.name.clone(), axis, start, length })
    }

    /// RMS norm over the last dimension with weight `NAME.weight`.
    pub fn rms_norm(&self, name: &str, x: &Value, eps: f64) -> Value {
        self.rms_norm_by(name, x, eps, Recipe::Copy)
    }

    /// RMS norm with a zero-centred weight: multiplies by `1 + NAME.weight`.
    pub fn rms_norm_zero_centred(&self, name: &str, x: &Value, eps: f64) -> Value {
        self.rms_norm_by(name, x, eps, Recipe::PlusOne)
    }

    fn rms_norm_by(&self, name: &str, x: &Value, eps: f64, recipe: fn(String) -> Recipe) -> Value {
        let weight = self.weight_name(&format!("{name}.weight"));
        let recipe = recipe(self.tensor_name(&weight));
        let weight = Some(self.declare(weight, &[x.width()], Role::Small, recipe));
        self.op(name, x.shape.clone(), OpKind::RmsNorm { x: x.name.clone(), weight, eps: eps as f32 })
    }

    /// RMS norm without weight.
    pub fn rms_norm_plain(&self, label: &str, x: &Value, eps: f64) -> Value {
        self.op(label, x.shape.clone(), OpKind::RmsNorm { x: x.name.clone(), weight: None, eps: eps as f32 })
    }

    /// Layer norm with `NAME.weight` and, if `bias`, `NAME.bias`.
    pub fn layer_norm(&self, name: &str, x: &Value, eps: f64, bias: bool) -> Value {
        let weight = self.weight(&format!("{name}.weight"), &[x.width()], Role::Small);
        let bias = bias.then(|| self.weight(&format!("{name}.bias"), &[x.width()], Role::Small));
        self.op(name, x.shape.clone(), OpKind::LayerNorm { x: x.name.clone(), weight, bias, eps: eps as f32 })
    }

    /// Rotary embedding by the declared table `rotary`.
    pub fn rope(&self, x: &Value, positions: &Value, rotary: &str) -> Value {
        let label = format!("{}.rope", self.label_of(x));
        self.op(&label, x.shape.clone(), OpKind::Rope { x: x.name.clone(), positions: positions.name.clone(), rotary: rotary.into() })
    }

    /// Softmax attention; gives `[rows, heads, dim]`.
    pub fn attend(&self, q: &Value, kv: Kv<'_>, mask: Mask, scale: f32) -> Value {
        let pair = |k: &Value, v: &Value| Some(KeyValue { k: k.name.clone(), v: v.name.clone() });
        let (kv, slot) = match kv {
            Kv::Own(slot, k, v) => {
                let [_, Dim::Fixed(kv_heads), Dim::Fixed(head_dim)] = k.shape[..] else { unreachable!("keys are [rows, heads, dim]") };
                let window = if let Mask::Window(window) = mask { Some(window) } else { None };
                let declared = Slot::Kv { kv_heads, head_dim, window, dtype: self.kv_type() };
                self.program.borrow_mut().slots.insert(slot.into(), declared);
                (pair(k, v), Some(slot.into()))
            }
            Kv::Shared(slot) => (None, Some(slot.into())),
            Kv::Segment(k, v) => (pair(k, v), None),
        };
        let op = OpKind::Attend { q: q.name.clone(), kv, slot, mask, scale, softcap: None, relative_keys: None };
        self.op("attend", q.shape.clone(), op)
    }

    /// Causal depthwise convolution with `NAME.weight` (stored `[channels, 1, kernel]` or `[channels, kernel]`), its past in the slot `slot`.
    pub fn short_conv(&self, name: &str, x: &Value, kernel: usize, slot: &str, activation: Activation) -> Value {
        let channels = x.width();
        let weight = self.weight(&format!("{name}.weight"), &[channels, kernel], Role::Small);
        self.program.borrow_mut().slots.insert(slot.into(), Slot::Fifo { rows: kernel - 1, channels });
        let op = OpKind::ShortConv { x: x.name.clone(), weight, bias: None, slot: Some(slot.into()), activation: Some(activation) };
        self.op(name, x.shape.clone(), op)
    }

    /// Gated delta rule with the weights `A_log` and `dt_bias`, its state in the slot `slot`; gives `[rows, value heads, value dim]`.
    #[allow(clippy::too_many_arguments)] // the rule has that many parts
    pub fn gated_delta(&self, q: &Value, k: &Value, v: &Value, a: &Value, b: &Value, slot: &str, prefix: &str, eps: f64) -> Value {
        let [_, Dim::Fixed(heads), Dim::Fixed(value_dim)] = v.shape[..] else { unreachable!("values are [rows, heads, dim]") };
        let key_dim = k.width();
        let a_log = self.weight(&format!("{prefix}.A_log"), &[heads], Role::Small);
        let dt_bias = self.weight(&format!("{prefix}.dt_bias"), &[heads], Role::Small);
        self.program.borrow_mut().slots.insert(slot.into(), Slot::Delta { heads, key_dim, value_dim });
        let op = OpKind::GatedDelta {
            q: q.name.clone(),
            k: k.name.clone(),
            v: v.name.clone(),
            a: a.name.clone(),
            b: b.name.clone(),
            a_log,
            dt_bias,
            slot: slot.into(),
            scale: (key_dim as f64).powf(-0.5) as f32,
            eps: eps as f32,
        };
        self.op("gated_delta", v.shape.clone(), op)
    }

    /// Chooses experts from router scores: (chosen, weights).
    pub fn route(&self, label: &str, scores: &Value, method: Routing) -> (Value, Value) {
        let shape = vec![scores.shape[0], Dim::Fixed(method.experts_per_row())];
        let route = self.op(label, shape.clone(), OpKind::Route { scores: scores.name.clone(), method });
        let part = |part: &str| Value { name: format!("{}.{part}", route.name).into(), shape: shape.clone() };
        (part("experts"), part("weights"))
    }

    /// Mixture of gated experts. `names` gives the checkpoint names of expert `e`'s gate, up and down matrices.
    #[allow(clippy::too_many_arguments)] // three matrices and their sizes
    pub fn experts(
        &self,
        x: &Value,
        chosen: &(Value, Value),
        count: usize,
        ffn: usize,
        activation: Activation,
        prefix: &str,
        names: [&str; 3],
    ) -> Value {
        let hidden = x.width();
        let stack = |local: &str, out: usize, columns: usize| {
            let tensor = |e| self.tensor_name(&self.weight_name(&format!("{prefix}.{e}.{local}.weight")));
            let name = self.weight_name(&format!("{prefix}.{local}.weight"));
            self.declare(name, &[count, out, columns], Role::Expert, Recipe::Stack((0..count).map(tensor).collect()))
        };
        let [gate, up, down] = names;
        let (gate, up, down) = (stack(gate, ffn, hidden), stack(up, ffn, hidden), stack(down, hidden, ffn));
        let form = activation_of(self.encoding(&gate));
        let (experts, weights) = (chosen.0.name.clone(), chosen.1.name.clone());
        let op = OpKind::Experts { x: x.name.clone(), experts, weights, gate, up, down, activation, form, bias: None, held: None };
        self.op("experts", x.shape.clone(), op)
    }

    /// `act(gate) · up`.
    pub fn gate(&self, gate: &Value, up: &Value, activation: Activation) -> Value {
        self.op("gated", gate.shape.clone(), OpKind::GateAct { gate: gate.name.clone(), up: up.name.clone(), activation })
    }

    /// `a + b`.
    pub fn add(&self, a: &Value, b: &Value) -> Value {
        self.op("add", a.shape.clone(), OpKind::Add { a: a.name.clone(), b: b.name.clone() })
    }

    /// Rows of two values side by side.
    pub fn concat(&self, a: &Value, b: &Value) -> Value {
        let shape = vec![a.shape[0], Dim::Fixed(a.width() + b.width())];
        self.op("concat", shape, OpKind::Concat { xs: vec![a.name.clone(), b.name.clone()] })
    }

    /// `x · factor`.
    pub fn scale(&self, label: &str, x: &Value, factor: f32) -> Value {
        self.op(label, x.shape.clone(), OpKind::Scale { x: x.name.clone(), factor, weight: None })
    }

    /// `x` times the one-number tensor `NAME`.
    pub fn scale_by(&self, name: &str, x: &Value) -> Value {
        let weight = Some(self.weight(name, &[1], Role::Small));
        self.op(name, x.shape.clone(), OpKind::Scale { x: x.name.clone(), factor: 1.0, weight })
    }

    /// `cap · tanh(x / cap)`.
    pub fn softcap(&self, x: &Value, cap: f64) -> Value {
        self.op("softcap", x.shape.clone(), OpKind::Softcap { x: x.name.clone(), cap: cap as f32 })
    }

    /// Declares a weight that is the checkpoint tensor of the same name.
    fn weight(&self, local: &str, shape: &[usize], role: Role) -> Name {
        let name = self.weight_name(local);
        let recipe = Recipe::Copy(self.tensor_name(&name));
        self.declare(name, shape, role, recipe)
    }

    fn declare(&self, name: Name, shape: &[usize], role: Role, recipe: Recipe) -> Name {
        let encoding = self.precision.encoding(role, &recipe, self.tensors);
        self.program.borrow_mut().weights.insert(name.clone(), Weight { shape: shape.to_vec(), encoding });
        self.recipes.borrow_mut().insert(name.clone(), recipe);
        name
    }

    fn weight_name(&self, local: &str) -> Name {
        match &self.scope.borrow().1 {
            prefix if prefix.is_empty() => local.into(),
            prefix => format!("{prefix}.{local}").into(),
        }
    }

    fn tensor_name(&self, weight: &str) -> String {
        match self.beside {
            Some(prefix) if weight.starts_with(prefix) => weight.to_owned(),
            _ => format!("{}{weight}", self.root),
        }
    }

    /// KV rows follow the first matrix that was declared.
    fn kv_type(&self) -> KvType {
        let program = self.program.borrow();
        let first = program.ops.iter().find_map(|op| match &op.op {
            OpKind::Linear { weight, .. } => Some(program.weights[weight].encoding),
            _ => None,
        });
        self.precision.kv(first.unwrap_or(Encoding::F32))
    }

    fn encoding(&self, weight: &Name) -> Encoding {
        self.program.borrow().weights[weight].encoding
    }

    /// The last part of a value's path within its stage: what names derived from it start with.
    fn label_of(&self, x: &Value) -> String {
        let scope = self.scope.borrow();
        let local = x.name.strip_prefix(&*scope.0).map_or(&*x.name, |rest| rest.trim_start_matches('.'));
        local.split('.').next().unwrap_or("value").to_string()
    }

    /// Adds an op. Its path is the stage and the last part of `label` (`self_attn.q_proj` → `q_proj`), numbered if that is taken.
    fn op(&self, label: &str, shape: Shape, op: OpKind) -> Value {
        let stage = self.scope.borrow().0.clone();
        let label = match label.rsplit_once('.') {
            // Derived labels (`q_proj.heads`) keep both parts; weight names keep the last.
            Some((_, "heads" | "flat" | "rope")) => label,
            Some((_, last)) => last,
            None => label,
        };
        let mut program = self.program.borrow_mut();
        let taken = |path: &str| program.ops.iter().rev().take_while(|op| op.path.starts_with(&stage)).any(|op| *op.path == *path);
        let base = format!("{stage}.{label}");
        let path = match taken(&base) {
            false => base,
            true => (2..).map(|n| format!("{base}_{n}")).find(|path| !taken(path)).unwrap_or(base),
        };
        let path = Name::from(path);
        program.ops.push(Op { path: path.clone(), op });
        Value { name: path, shape }
    }
}
