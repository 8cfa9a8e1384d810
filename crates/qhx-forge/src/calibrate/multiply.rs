//! Matrix products for calibration, computed by the device that runs the stages: its kernels are fast, use every thread, and give the same result for any number of threads.

use crate::ForgeError;
use qhx_ir::{
    Activation, ActivationForm, Bindings, Call, Checked, DType, Device, DeviceError, Dim, Generator, Input, InputData, LoadOptions, Matrix,
    Name, Op, OpKind, Output, Outputs, PROGRAM_VERSION, Program, Segment, Stage, Symbol, Weight, WeightTensor, Weights,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Numbers of a result that a program computes at a time.
const NUMBERS_AT_ONCE: usize = 4 << 20;

/// Multiplies matrices on a device.
pub(crate) struct Multiplier<'a> {
    pub(crate) device: &'a Arc<dyn Device>,
    pub(crate) cancel: &'a AtomicBool,
    /// Threads for work on rows beside products.
    pub(crate) threads: usize,
}

impl Multiplier<'_> {
    /// Adds `left · rightᵀ` to a matrix whose rows are `stride` numbers apart.
    pub(crate) fn add_product(&self, left: Matrix<'_>, right: Matrix<'_>, sum: &mut [f32], stride: usize) -> Result<(), ForgeError> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(qhx_runtime::Error::Cancelled.into());
        }
        self.device.open().map_err(failed)?.add_product(left, right, sum, stride);
        Ok(())
    }

    /// `left · rightᵀ`.
    pub(crate) fn product(&self, left: Matrix<'_>, right: Matrix<'_>) -> Result<Vec<f32>, ForgeError> {
        let mut product = vec![0.0; left.rows * right.rows];
        self.add_product(left, right, &mut product, right.rows.max(1))?;
        Ok(product)
    }

    /// `act(left · gateᵀ) · (left · upᵀ)`, number by number, with weights in any encoding, and with biases of gate and up if there are any.
    pub(crate) fn gated(
        &self,
        left: &[f32],
        [gate, up]: [WeightTensor; 2],
        bias: Option<&[WeightTensor; 2]>,
        activation: Activation,
    ) -> Result<Vec<f32>, ForgeError> {
        let (columns, widest) = (gate.columns(), gate.columns().max(gate.rows()));
        let rows = (NUMBERS_AT_ONCE / widest).clamp(1, (left.len() / columns).max(1));
        let mut product = self.load([gate, up], bias, activation, columns, rows)?;
        let mut made = Vec::new();
        for part in left.chunks(rows * columns) {
            made.extend_from_slice(product.of(part, self.cancel)?);
        }
        Ok(made)
    }

    fn load(
        &self,
        [gate, up]: [WeightTensor; 2],
        bias: Option<&[WeightTensor; 2]>,
        activation: Activation,
        columns: usize,
        max_rows: usize,
    ) -> Result<Product, ForgeError> {
        let act = OpKind::GateAct { gate: "multiply.gate".into(), up: "multiply.up".into(), activation };
        let linear = |path: &str, weight: &str| linear(path, weight, bias.map(|_| format!("{weight}.bias").into()));
        let ops = vec![linear("multiply.gate", "gate"), linear("multiply.up", "up"), Op { path: RESULT.into(), op: act }];
        let biases = bias.into_iter().flat_map(|[gate, up]| [("gate.bias", gate.clone()), ("up.bias", up.clone())]);
        let weights: Vec<(&str, WeightTensor)> = [("gate", gate), ("up", up)].into_iter().chain(biases).collect();
        let shape = vec![Dim::Symbol(Symbol::T), Dim::Fixed(columns)];
        let declared = |(name, tensor): &(&str, WeightTensor)| {
            (Name::from(*name), Weight { encoding: tensor.encoding(), shape: tensor.shape().to_vec() })
        };
        let program = Checked::new(Program {
            program_version: PROGRAM_VERSION,
            name: "product".into(),
            inputs: vec![Input { name: "x".into(), dtype: DType::F32, shape, generator: Generator::Carried }],
            outputs: vec![Output { name: "product".into(), value: RESULT.into() }],
            slots: BTreeMap::new(),
            epochs: Vec::new(),
            rotaries: BTreeMap::new(),
            stages: vec![Stage { name: "multiply".into(), tap: None, rotated: false, centred: false }],
            weights: weights.iter().map(declared).collect(),
            ops,
        })?;
        let weights: HashMap<String, WeightTensor> = weights.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
        let weights: Arc<dyn Weights> = Arc::new(weights);
        let options = LoadOptions { max_rows, ..LoadOptions::default() };
        let executable = self.device.load(&program, &weights, &options).map_err(failed)?;
        Ok(Product { executable, columns, outputs: Outputs::new() })
    }
}

/// The op whose result is wanted.
const RESULT: &str = "multiply.product";

fn linear(path: &str, weight: &str, bias: Option<Name>) -> Op {
    let op = OpKind::Linear { x: "x".into(), weight: weight.into(), bias, activation: ActivationForm::F32, clip: None };
    Op { path: path.into(), op }
}

/// A program that rows are given to.
struct Product {
    executable: Box<dyn qhx_ir::Executable>,
    columns: usize,
    outputs: Outputs,
}

impl Product {
    fn of(&mut self, rows: &[f32], cancel: &AtomicBool) -> Result<&[f32], ForgeError> {
        let count = rows.len() / self.columns;
        let inputs = [InputData::F32(rows)];
        let mut segments = [Segment::new(None, 0, count)];
        let bindings = Bindings { rows: count, soft_rows: 0, wanted: 0 };
        let mut call = Call::new(bindings, &inputs, &mut segments, &mut self.outputs);
        call.cancel = Some(cancel);
        self.executable.run(&mut call).map_err(failed)?;
        Ok(self.outputs.value("product").unwrap_or_default())
    }
}

fn failed(error: DeviceError) -> ForgeError {
    qhx_runtime::Error::from(error).into()
}
