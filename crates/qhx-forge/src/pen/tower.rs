//! The pen's methods for towers, and for text programs that take what towers give.

use super::{Formula, Pen, Recipe, Value};
use crate::{ForgeError, precision::Role};
use qhx_ir::{Activation, Clip, DType, Dim, Generator, KeyValue, Mask, OpKind};

/// Attention with a relative part.
pub struct RelativeAttention {
    /// Keys that a query sees, itself included.
    pub window: usize,
    /// Factor on queries times keys.
    pub scale: f64,
    /// Bound on the scores.
    pub softcap: f64,
    /// What `NAME.weight [heads · dim, in]` projects to the relative keys: a row for each distance, one after the other.
    pub distances: Vec<f32>,
}

impl Pen<'_> {
    /// Soft rows put in place of rows of `x`; gives the rows' places too.
    pub fn soft_rows(&self, x: &Value) -> (Value, Value) {
        let rows = self.input("soft_rows", DType::F32, vec![Dim::R, Dim::Fixed(x.width())], Generator::SoftRows);
        let at = self.input("soft_rows_at", DType::I32, vec![Dim::R], Generator::SoftRowsAt);
        let op = OpKind::ScatterRows { x: x.name.clone(), rows: rows.name, at: at.name.clone() };
        (self.op("soft_rows_put", x.shape.clone(), op), at)
    }

    /// Output number `number` of a tower's early layers added to the rows at `at`.
    pub fn deepstack_rows(&self, x: &Value, at: &Value, number: usize) -> Value {
        let name = format!("deepstack_rows.{number}");
        let rows = self.input(&name, DType::F32, vec![Dim::R, Dim::Fixed(x.width())], Generator::DeepstackRows(number));
        self.op("deepstack", x.shape.clone(), OpKind::ScatterAddRows { x: x.name.clone(), rows: rows.name, at: at.name.clone() })
    }

    /// Patches of `numbers` numbers.
    pub fn patches(&self, numbers: usize) -> Value {
        self.input("patches", DType::F32, vec![Dim::T, Dim::Fixed(numbers)], Generator::Patches)
    }

    /// Row and column of each patch, as two position streams.
    pub fn patch_grid(&self) -> Value {
        self.input("patch_grid", DType::I32, vec![Dim::Fixed(2), Dim::T], Generator::PatchGrid)
    }

    /// Column and row of each patch, as rows of tables.
    pub fn patch_columns_and_rows(&self) -> (Value, Value) {
        let columns = self.input("patch_columns", DType::I32, vec![Dim::T], Generator::PatchColumns);
        (columns, self.input("patch_rows", DType::I32, vec![Dim::T], Generator::PatchRows))
    }

    /// Frames of `bins` numbers.
    pub fn frames(&self, bins: usize) -> Value {
        self.input("frames", DType::F32, vec![Dim::T, Dim::Fixed(bins)], Generator::Frames)
    }

    /// The square position table `TABLE.weight` of `rows` rows in all, interpolated to each patch.
    pub fn interpolated_positions(&self, table: &str, rows: usize, width: usize) -> Value {
        let taps = vec![Dim::T, Dim::Fixed(4)];
        let index = self.input("interpolation_taps.index", DType::I32, taps.clone(), Generator::InterpolationIndex);
        let factor = self.input("interpolation_taps.factor", DType::F32, taps, Generator::InterpolationFactor);
        let table_weight = self.weight(&format!("{table}.weight"), &[rows, width], Role::Embedding);
        let op = OpKind::Interpolate { index: index.name, factor: factor.name, table: table_weight };
        self.op(table, vec![Dim::T, Dim::Fixed(width)], op)
    }

    /// Rows of table `part` of the tensor `TABLE`, which holds `parts` tables of `rows` rows.
    pub fn embed_part(&self, label: &str, table: &str, ids: &Value, [part, parts, rows, width]: [usize; 4]) -> Value {
        let tensor = self.tensor_name(&self.weight_name(table));
        let recipe = Recipe::Part { tensor, shape: vec![parts, rows, width], first: part * rows * width };
        let weight = self.declare(self.weight_name(&format!("{table}.{part}")), &[rows, width], Role::Embedding, recipe);
        let op = OpKind::Embed { ids: ids.name.clone(), table: weight, scale: 1.0 };
        self.op(label, vec![ids.shape[0], Dim::Fixed(width)], op)
    }

    /// A convolution whose kernels do not overlap, over rows that hold one kernel's inputs each: a product with `NAME.weight [out, kernel..]`, plus `NAME.bias`.
    pub fn patch_linear(&self, name: &str, x: &Value, out: usize, kernel: &[usize]) -> Value {
        let local = self.weight_name(&format!("{name}.weight"));
        let recipe = Recipe::Part { tensor: self.tensor_name(&local), shape: [&[out], kernel].concat(), first: 0 };
        let weight = self.declare(local, &[out, x.width()], Role::Matrix, recipe);
        let bias = self.weight(&format!("{name}.bias"), &[out], Role::Small);
        self.product(name, x, weight, Some(bias), out)
    }

    /// `x · NAME.linear.weightᵀ`, input and output clipped by the one-number tensors beside it if `clipped`.
    pub fn clipped_linear(&self, name: &str, x: &Value, out: usize, clipped: bool) -> Value {
        let weight = self.weight(&format!("{name}.linear.weight"), &[out, x.width()], Role::Matrix);
        let bound = |part: &str, none: f32| self.number(&format!("{name}.{part}"), none);
        let clip = clipped.then(|| Clip {
            input: [bound("input_min", f32::MIN), bound("input_max", f32::MAX)],
            output: [bound("output_min", f32::MIN), bound("output_max", f32::MAX)],
        });
        let y = self.product(name, x, weight, None, out);
        if let Some(OpKind::Linear { clip: place, .. }) = self.program.borrow_mut().ops.last_mut().map(|op| &mut op.op) {
            *place = clip;
        }
        y
    }

    /// The number in a one-number tensor; `none` without a checkpoint. Infinite ones become the largest finite ones, which bound as little.
    fn number(&self, local: &str, none: f32) -> f32 {
        let tensor = self.tensor_name(&self.weight_name(local));
        let found = self.tensors.numbers(&tensor, 1).and_then(|numbers| match numbers.as_deref() {
            None => Ok(none),
            Some([x]) if !x.is_nan() => Ok(x.clamp(f32::MIN, f32::MAX)),
            Some(other) => Err(ForgeError::Tensor { tensor: tensor.clone(), reason: format!("must hold one number, found {other:?}") }),
        });
        let number = found.unwrap_or_else(|problem| {
            self.problem.borrow_mut().get_or_insert(problem);
            none
        });
        self.constants.borrow_mut().push((tensor, number));
        number
    }

    /// `act(x)`.
    pub fn activate(&self, x: &Value, activation: Activation) -> Value {
        self.op("activated", x.shape.clone(), OpKind::Activate { x: x.name.clone(), activation })
    }

    /// Each `rows` consecutive rows made one.
    pub fn merge_rows(&self, x: &Value, rows: usize) -> Value {
        let merged = x.shape[0].divide(rows, false);
        let shape = vec![merged.unwrap_or_else(|| unreachable!("rows of a tower are symbols")), Dim::Fixed(rows * x.width())];
        self.reshape("merged", x, shape)
    }

    /// The mean of each `rows` consecutive rows.
    pub fn pool(&self, x: &Value, rows: usize) -> Value {
        let pooled = x.shape[0].divide(rows, false).unwrap_or_else(|| unreachable!("rows of a tower are symbols"));
        self.op("pool", vec![pooled, Dim::Fixed(x.width())], OpKind::Pool { x: x.name.clone(), size: rows })
    }

    /// 3×3 convolution of `[rows, width, in]` in steps of 2, with `NAME.weight`, stored `[out, in, along rows, along width]`.
    pub fn conv2d(&self, name: &str, x: &Value, out: usize) -> Value {
        let (inputs, kernel, stride) = (x.width(), 3, 2);
        let local = self.weight_name(&format!("{name}.weight"));
        let recipe = Recipe::Computed {
            tensors: vec![self.tensor_name(&local)],
            shapes: vec![vec![out, inputs, kernel, kernel]],
            formula: Formula::Permute(vec![0, 2, 3, 1]),
        };
        let weight = self.declare(local, &[out, kernel, kernel, inputs], Role::Small, recipe);
        let halved = |dim: Dim| dim.divide(stride, true).unwrap_or_else(|| unreachable!("rows and widths can be halved"));
        let shape = vec![halved(x.shape[0]), halved(x.shape[1]), Dim::Fixed(out)];
        self.op(name, shape, OpKind::Conv2d { x: x.name.clone(), weight, bias: None, stride })
    }

    /// Causal depthwise convolution with `NAME.weight` (stored `[channels, 1, kernel]`) that remembers nothing between calls.
    pub fn stateless_conv(&self, name: &str, x: &Value, kernel: usize) -> Value {
        let weight = self.weight(&format!("{name}.weight"), &[x.width(), kernel], Role::Small);
        self.op(name, x.shape.clone(), OpKind::ShortConv { x: x.name.clone(), weight, bias: None, slot: None, activation: None })
    }

    /// `(x − BIAS) · SCALE`, number by number along the width: a depthwise convolution over one row.
    pub fn standardize(&self, bias: &str, scale: &str, x: &Value) -> Value {
        let width = x.width();
        let [bias_tensor, scale_tensor] = [bias, scale].map(|name| self.tensor_name(&self.weight_name(name)));
        let factor = Recipe::Part { tensor: scale_tensor.clone(), shape: vec![width], first: 0 };
        let weight = self.declare(self.weight_name(scale), &[width, 1], Role::Small, factor);
        let (tensors, shapes) = (vec![bias_tensor, scale_tensor], vec![vec![width]; 2]);
        let shift = Recipe::Computed { tensors, shapes, formula: Formula::NegatedProduct };
        let bias = Some(self.declare(self.weight_name(bias), &[width], Role::Small, shift));
        self.op("standardize", x.shape.clone(), OpKind::ShortConv { x: x.name.clone(), weight, bias, slot: None, activation: None })
    }

    /// `x · factor · softplus(NAME)` along the last dimension.
    pub fn scale_by_softplus(&self, name: &str, x: &Value, factor: f64) -> Value {
        let local = self.weight_name(name);
        let (tensors, shapes) = (vec![self.tensor_name(&local)], vec![vec![x.width()]]);
        let weight = self.declare(local, &[x.width()], Role::Small, Recipe::Computed { tensors, shapes, formula: Formula::Softplus });
        self.op(name, x.shape.clone(), OpKind::Scale { x: x.name.clone(), factor: factor as f32, weight: Some(weight) })
    }

    /// Attention over one segment, causal in a window, with relative keys made by `NAME.weight`.
    pub fn attend_relative(&self, name: &str, q: &Value, k: &Value, v: &Value, how: RelativeAttention) -> Value {
        let [_, Dim::Fixed(heads), Dim::Fixed(dim)] = q.shape[..] else { unreachable!("queries are [rows, heads, dim]") };
        let local = self.weight_name(&format!("{name}.weight"));
        let inputs = heads * dim;
        let distances = how.distances.len() / inputs;
        let recipe = Recipe::Computed {
            tensors: vec![self.tensor_name(&local)],
            shapes: vec![vec![heads * dim, inputs]],
            formula: Formula::Project { rows: how.distances },
        };
        let relative_keys = Some(self.declare(self.weight_name(&format!("{name}.keys")), &[distances, heads, dim], Role::Small, recipe));
        let op = OpKind::Attend {
            q: q.name.clone(),
            kv: Some(KeyValue { k: k.name.clone(), v: v.name.clone() }),
            slot: None,
            mask: Mask::Window(how.window),
            scale: how.scale as f32,
            softcap: Some(how.softcap as f32),
            relative_keys,
        };
        self.op("attend", q.shape.clone(), op)
    }
}

/// Whether a checkpoint has the tensor `probe` under one of `roots`; without a checkpoint it does.
pub fn has_tower(tensors: &dyn crate::precision::StoredTensors, roots: &[&str], probe: &str) -> bool {
    roots.iter().any(|root| tensors.has(&format!("{root}{probe}")))
}
