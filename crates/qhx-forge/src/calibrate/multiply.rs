//! Matrix products for calibration, computed by the device that runs the stages: its kernels are fast, use every thread, and give the same result for any number of threads.

use crate::ForgeError;
use qhx_ir::{
    Activation, ActivationForm, AlignedBytes, Bindings, Call, Checked, DType, Device, DeviceError, Dim, Encoding, Generator, Input,
    InputData, LoadOptions, Name, Op, OpKind, Output, Outputs, PROGRAM_VERSION, Program, Segment, Stage, Symbol, Weight, WeightTensor,
    Weights,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, atomic::AtomicBool},
};

/// Numbers of the right-hand matrix that are copied at a time, and of the result that are computed at a time.
const NUMBERS_AT_ONCE: usize = 4 << 20;

/// Multiplies matrices on a device.
pub(crate) struct Multiplier<'a> {
    pub(crate) device: &'a Arc<dyn Device>,
    pub(crate) cancel: &'a AtomicBool,
}

/// A matrix in memory, row after row, `stride` numbers from one row to the next.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) numbers: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl<'a> Matrix<'a> {
    /// Rows of `columns` without gaps.
    pub(crate) fn dense(numbers: &'a [f32], columns: usize) -> Self {
        Self { numbers, stride: columns, rows: numbers.len() / columns, columns }
    }

    fn row(&self, row: usize) -> &'a [f32] {
        &self.numbers[row * self.stride..][..self.columns]
    }

    /// The numbers without gaps, copied where there are any.
    fn rows_without_gaps(&self, first: usize, count: usize) -> std::borrow::Cow<'a, [f32]> {
        match self.stride == self.columns {
            true => (&self.numbers[first * self.columns..][..count * self.columns]).into(),
            false => (first..first + count).flat_map(|row| self.row(row)).copied().collect::<Vec<_>>().into(),
        }
    }
}

impl Multiplier<'_> {
    /// Adds `factor · left · rightᵀ` to a matrix whose rows are `stride` numbers apart.
    pub(crate) fn add_product(
        &self,
        left: Matrix<'_>,
        right: Matrix<'_>,
        factor: f32,
        sum: &mut [f32],
        stride: usize,
    ) -> Result<(), ForgeError> {
        if left.rows == 0 || right.rows == 0 {
            return Ok(());
        }
        let columns = (NUMBERS_AT_ONCE / right.columns).clamp(1, right.rows);
        let rows = (NUMBERS_AT_ONCE / left.columns.max(columns)).clamp(1, left.rows);
        for column in (0..right.rows).step_by(columns) {
            let count = columns.min(right.rows - column);
            let weight = float_tensor(count, right.columns, |row| right.row(column + row))?;
            let mut product = self.load(weight, rows)?;
            for row in (0..left.rows).step_by(rows) {
                let part = left.rows_without_gaps(row, rows.min(left.rows - row));
                let made = product.of(&part, self.cancel)?;
                for (i, made) in made.chunks_exact(count).enumerate() {
                    let sum = &mut sum[(row + i) * stride + column..][..count];
                    sum.iter_mut().zip(made).for_each(|(sum, made)| *sum += factor * made);
                }
            }
        }
        Ok(())
    }

    /// `left · weightᵀ` for rows without gaps and a weight in any encoding.
    pub(crate) fn product(&self, left: &[f32], weight: WeightTensor) -> Result<Vec<f32>, ForgeError> {
        let (columns, widest) = (weight.columns(), weight.columns().max(weight.rows()));
        self.in_pieces(left, columns, widest, |rows| self.load(weight, rows))
    }

    /// `act(left · gateᵀ) · (left · upᵀ)`, number by number.
    pub(crate) fn gated(&self, left: &[f32], gate: WeightTensor, up: WeightTensor, activation: Activation) -> Result<Vec<f32>, ForgeError> {
        let (columns, widest) = (gate.columns(), gate.columns().max(gate.rows()));
        self.in_pieces(left, columns, widest, |rows| {
            let act = OpKind::GateAct { gate: "multiply.gate".into(), up: "multiply.up".into(), activation };
            let ops = vec![linear("multiply.gate", "gate"), linear("multiply.up", "up"), Op { path: RESULT.into(), op: act }];
            self.load_ops(ops, [("gate", gate), ("up", up)], columns, rows)
        })
    }

    /// Runs what `load` gives for some rows at a time over all of them.
    fn in_pieces(
        &self,
        left: &[f32],
        columns: usize,
        widest: usize,
        load: impl FnOnce(usize) -> Result<Product, ForgeError>,
    ) -> Result<Vec<f32>, ForgeError> {
        let rows = (NUMBERS_AT_ONCE / widest).clamp(1, (left.len() / columns).max(1));
        let mut product = load(rows)?;
        let mut made = Vec::new();
        for part in left.chunks(rows * columns) {
            made.extend_from_slice(product.of(part, self.cancel)?);
        }
        Ok(made)
    }

    fn load(&self, weight: WeightTensor, max_rows: usize) -> Result<Product, ForgeError> {
        let columns = weight.columns();
        self.load_ops(vec![linear(RESULT, "weight")], [("weight", weight)], columns, max_rows)
    }

    fn load_ops<const N: usize>(
        &self,
        ops: Vec<Op>,
        weights: [(&str, WeightTensor); N],
        columns: usize,
        max_rows: usize,
    ) -> Result<Product, ForgeError> {
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
            stages: vec![Stage { name: "multiply".into(), tap: None, rotated: false }],
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

fn linear(path: &str, weight: &str) -> Op {
    let op = OpKind::Linear { x: "x".into(), weight: weight.into(), bias: None, activation: ActivationForm::F32, clip: None };
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

/// An f32 tensor of rows that are somewhere.
pub(crate) fn float_tensor<'a>(rows: usize, columns: usize, row: impl Fn(usize) -> &'a [f32]) -> Result<WeightTensor, ForgeError> {
    let too_large = || ForgeError::Calibration("a matrix is too large".into());
    let row_bytes = Encoding::F32.row_bytes(columns).ok_or_else(too_large)?.data;
    let mut data = AlignedBytes::zeroed(rows * row_bytes);
    for (i, bytes) in data.as_mut().chunks_exact_mut(row_bytes).enumerate() {
        bytes[..columns * 4].copy_from_slice(bytemuck::cast_slice(row(i)));
    }
    WeightTensor::new(Encoding::F32, vec![rows, columns], data.into(), None, None).map_err(ForgeError::Calibration)
}

fn failed(error: DeviceError) -> ForgeError {
    qhx_runtime::Error::from(error).into()
}
