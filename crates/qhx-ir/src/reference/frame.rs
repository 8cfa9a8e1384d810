//! The working set of one call: the values computed so far, the segments, and their new states.

use super::state::{Pending, ReferenceState};
use crate::{Bindings, Checked, DeviceError, InputData, Name, Segment, WeightTensor, dim};
use std::{collections::HashMap, ops::Range};

/// A value's data, row-major.
pub(super) enum Data {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

impl From<InputData<'_>> for Data {
    fn from(data: InputData<'_>) -> Self {
        match data {
            InputData::F32(x) => Self::F32(x.to_vec()),
            InputData::I32(x) => Self::I32(x.to_vec()),
        }
    }
}

/// A value with its shape in this call.
pub(super) struct Value {
    pub(super) shape: Vec<usize>,
    pub(super) data: Data,
}

impl Value {
    /// The data as callers get it: integers (chosen experts that cross a cut) become floats, which is exact for any number of experts.
    pub(super) fn to_f32(&self) -> Vec<f32> {
        match &self.data {
            Data::F32(x) => x.clone(),
            Data::I32(x) => x.iter().map(|&i| i as f32).collect(),
        }
    }
}

/// The rows of one segment, with its state.
pub(super) struct Span<'a> {
    first_row: usize,
    valid_rows: usize,
    pub(super) state: Option<&'a ReferenceState>,
    pub(super) epoch: usize,
    /// Whether recurrent slots keep what they are after every row.
    pub(super) partial: bool,
    pub(super) pending: Pending,
}

impl Span<'_> {
    /// The segment's valid rows in a value with one row per `n` rows of the call.
    pub(super) fn rows(&self, n: usize) -> Range<usize> {
        let start = self.first_row / n;
        start..start + self.valid_rows.div_ceil(n)
    }
}

pub(super) struct Frame<'a> {
    pub(super) program: &'a Checked,
    pub(super) spans: Vec<Span<'a>>,
    bindings: Bindings,
    weights: &'a mut HashMap<Name, WeightTensor>,
    values: HashMap<Name, Value>,
}

impl<'a> Frame<'a> {
    pub(super) fn new(
        program: &'a Checked,
        weights: &'a mut HashMap<Name, WeightTensor>,
        bindings: Bindings,
        segments: &'a [Segment<'_>],
    ) -> Result<Self, DeviceError> {
        let spans = segments.iter().map(|segment| {
            let state = segment.state.as_deref().map(|state| ReferenceState::of(state, program)).transpose()?;
            let pending = Pending::new(segment.valid_rows);
            let Segment { first_row, valid_rows, epoch, partial, .. } = *segment;
            Ok(Span { first_row, valid_rows, state, epoch, partial, pending })
        });
        let spans = spans.collect::<Result<_, DeviceError>>()?;
        Ok(Self { program, weights, bindings, spans, values: HashMap::new() })
    }

    pub(super) fn insert(&mut self, name: &Name, data: Data) -> Result<(), DeviceError> {
        let shape = dim::bind_shape(&self.program.value_type(name).shape, &self.bindings).map_err(DeviceError::Call)?;
        let length = match &data {
            Data::F32(x) => x.len(),
            Data::I32(x) => x.len(),
        };
        assert_eq!(shape.iter().product::<usize>(), length, "`{name}` must have shape {shape:?}");
        self.values.insert(name.clone(), Value { shape, data });
        Ok(())
    }

    pub(super) fn value(&self, name: &Name) -> &Value {
        &self.values[name]
    }

    pub(super) fn shape(&self, name: &Name) -> &[usize] {
        &self.value(name).shape
    }

    /// The last dimension.
    pub(super) fn width(&self, name: &Name) -> usize {
        *self.shape(name).last().expect("a checked value has dimensions")
    }

    pub(super) fn f32s(&self, name: &Name) -> &[f32] {
        match &self.value(name).data {
            Data::F32(x) => x,
            Data::I32(_) => unreachable!("the checked program reads `{name}` as f32"),
        }
    }

    pub(super) fn i32s(&self, name: &Name) -> &[i32] {
        match &self.value(name).data {
            Data::I32(x) => x,
            Data::F32(_) => unreachable!("the checked program reads `{name}` as i32"),
        }
    }

    /// The epoch of a row of the call; of padding, the first.
    pub(super) fn epoch(&self, row: usize) -> usize {
        self.spans.iter().find(|span| span.rows(1).contains(&row)).map_or(0, |span| span.epoch)
    }

    /// The number of rows of the call per row of a value.
    pub(super) fn rows_per_row(&self, name: &Name) -> usize {
        self.program.value_type(name).shape[0].rows_per_row().expect("the checked program has rows of the call here")
    }

    pub(super) fn weight(&self, name: &Name) -> &WeightTensor {
        &self.weights[name]
    }

    /// Replaces one of the parts of a weight.
    pub(super) fn replace_part(&mut self, weight: &str, number: usize, part: &WeightTensor) -> Result<(), DeviceError> {
        replace_part(self.weights, weight, number, part)
    }

    /// All values of a weight, without padding.
    pub(super) fn plain_weight(&self, name: &Name) -> Vec<f32> {
        let weight = self.weight(name);
        let mut numbers = vec![0.0; weight.rows() * weight.columns()];
        numbers.chunks_exact_mut(weight.columns()).enumerate().for_each(|(row, out)| weight.decode_row(row, out));
        numbers
    }

    pub(super) fn bytes(&self) -> u64 {
        self.values.values().map(|v| 4 * v.shape.iter().product::<usize>() as u64).sum()
    }

    pub(super) fn into_pending(self) -> Vec<Pending> {
        self.spans.into_iter().map(|span| span.pending).collect()
    }
}

/// Replaces one of the parts of one of some weights.
pub(super) fn replace_part(
    weights: &mut HashMap<Name, WeightTensor>,
    weight: &str,
    number: usize,
    part: &WeightTensor,
) -> Result<(), DeviceError> {
    let wrong = |reason: String| DeviceError::Weight { name: weight.into(), reason };
    let tensor = weights.get_mut(weight).ok_or_else(|| wrong("cannot be replaced".into()))?;
    let mut parts: Vec<WeightTensor> = (0..).map_while(|number| tensor.part(number)).collect();
    *parts.get_mut(number).ok_or_else(|| wrong(format!("has no part {number}")))? = part.clone();
    *tensor = WeightTensor::stacked(&parts).map_err(wrong)?;
    Ok(())
}

/// Σ a·b in f64.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| a as f64 * b as f64).sum()
}
