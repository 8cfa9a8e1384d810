//! The graph of experts whose weights are inputs: one graph serves all experts of all layers, and only the chosen ones are read.

use super::{Lowering, Sizes, builder::Builder};
use crate::graph::{DataType, Graph, Quantization, TensorId};
use qhx_ir::{Activation, Bindings, Checked, Dim, Encoding, Op, OpKind};
use std::collections::HashMap;

/// The parameters of an expert graph. Ops with equal parameters share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertSizes {
    /// Rows per execution.
    pub rows: usize,
    /// Experts computed side by side; their weighted results are added.
    pub experts: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Intermediate size of an expert.
    pub ffn: usize,
    /// The gate's activation function.
    pub activation: Activation,
    /// Whether weights are int8 with a scale per row; otherwise f16.
    pub int8: bool,
    /// Whether gate and up have biases.
    pub biased: bool,
}

/// The expert graphs that an op needs: for one row all its experts at once, for `batch` rows one expert. None for other ops.
pub fn expert_sizes(program: &Checked, op: &Op, batch: usize) -> Vec<ExpertSizes> {
    let OpKind::Experts { experts, gate, up, down, activation, bias, .. } = &op.op else { return vec![] };
    let [_, ffn, hidden] = program.weights[gate].shape[..] else { unreachable!("checked: rank 3") };
    let Some(&Dim::Fixed(chosen)) = program.value_type(experts).shape.last() else { unreachable!("checked: [rows, k]") };
    let int8 = [gate, up, down].iter().all(|name| program.weights[*name].encoding == Encoding::I8Row);
    let single = ExpertSizes { rows: 1, experts: chosen, hidden, ffn, activation: *activation, int8, biased: bias.is_some() };
    let many = ExpertSizes { rows: batch, experts: 1, ..single };
    if batch > 1 { vec![single, many] } else { vec![single] }
}

/// The single scale of an int8 input; each row's own scale, times 128, is a further input that multiplies the product. Products thus keep the magnitude of the
/// rows that enter them, whatever the scales are.
pub const INT8_SCALE: f32 = 1.0 / 128.0;

/// The graph. Its inputs, in order: `x [rows, hidden]`; then for each expert its weight in every row `[rows, 1]`, gate `[ffn, hidden]`, up
/// `[ffn, hidden]`, down `[hidden, ffn]`, for int8 their scales `[1, ffn]`, `[1, ffn]`, `[1, hidden]`, and if biased the biases of gate and up `[1, ffn]`. Its output: `[rows, hidden]`.
pub fn lower_experts(program: &Checked, sizes: ExpertSizes, name: String) -> Graph {
    let mut lowering = Lowering {
        program,
        weights: None,
        builder: Builder::new(name),
        bindings: Bindings::default(),
        sizes: Sizes { rows: sizes.rows, context: 0, ring: None, taps: false },
        values: HashMap::new(),
        fed: HashMap::new(),
        fresh: HashMap::new(),
        feeds: vec![],
        drains: vec![],
    };
    let x = lowering.builder.input("x", DataType::F16, &[sizes.rows, sizes.hidden], Quantization::None);
    let mut sum = None;
    for expert in 0..sizes.experts {
        let y = lowering.expert(x, expert, sizes);
        sum = Some(sum.map_or(y, |sum| lowering.builder.add("sum", sum, y)));
    }
    if let Some(sum) = sum {
        lowering.builder.output(sum);
    }
    lowering.builder.finish()
}

impl Lowering<'_> {
    fn expert(&mut self, x: TensorId, number: usize, s: ExpertSizes) -> TensorId {
        self.builder.set_path(&format!("expert.{number}"));
        let input = |lowering: &mut Self, what: &str, dims: &[usize]| {
            lowering.builder.input(&format!("expert.{number}.{what}"), DataType::F16, dims, Quantization::None)
        };
        let share = input(self, "weight", &[s.rows, 1]);
        let shapes = [("gate", [s.ffn, s.hidden]), ("up", [s.ffn, s.hidden]), ("down", [s.hidden, s.ffn])];
        let weights = shapes.map(|(what, dims)| match s.int8 {
            false => input(self, what, &dims),
            true => {
                let name = format!("expert.{number}.{what}");
                self.builder.input(&name, DataType::Fixed8, &dims, Quantization::Tensor(INT8_SCALE))
            }
        });
        let scales = shapes.map(|(what, dims)| s.int8.then(|| input(self, &format!("{what}_scale"), &[1, dims[0]])));
        let biases = ["gate_bias", "up_bias"].map(|what| s.biased.then(|| input(self, what, &[1, s.ffn])));
        let product = |lowering: &mut Self, x: TensorId, which: usize| {
            let weight = match s.int8 {
                true => lowering.builder.unary("Dequantize", "numbers", weights[which]),
                false => weights[which],
            };
            let y = lowering.builder.matmul("product", x, weight, true);
            let y = scales[which].map_or(y, |scale| lowering.builder.multiply("scaled", y, scale));
            biases.get(which).copied().flatten().map_or(y, |bias| lowering.builder.add("biased", y, bias))
        };
        let gate = product(self, x, 0);
        let gate = self.activation(gate, s.activation);
        let up = product(self, x, 1);
        let inner = self.builder.multiply("gated", gate, up);
        let y = product(self, inner, 2);
        self.builder.multiply("weighed", y, share)
    }
}
