//! The values of one call on the host: inputs, intermediate values between parts, outputs.

use qhx_ir::{Bindings, Checked, DType, DeviceError, InputData, Name, dim::bind_shape};
use std::{collections::HashMap, ops::Range};

/// A value's data, row-major.
pub(crate) enum Data {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

/// A value with its shape in this call.
pub(crate) struct Value {
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Data,
}

/// All values on the host during a call.
pub(crate) struct Values<'a> {
    program: &'a Checked,
    pub(crate) bindings: Bindings,
    values: HashMap<Name, Value>,
}

impl<'a> Values<'a> {
    pub(crate) fn new(program: &'a Checked, bindings: Bindings, inputs: &[InputData<'_>]) -> Result<Self, DeviceError> {
        let mut all = Self { program, bindings, values: HashMap::new() };
        for (input, data) in program.inputs.iter().zip(inputs) {
            let data = match data {
                InputData::F32(x) => Data::F32(x.to_vec()),
                InputData::I32(x) => Data::I32(x.to_vec()),
            };
            all.insert(&input.name, data)?;
        }
        Ok(all)
    }

    pub(crate) fn insert(&mut self, name: &Name, data: Data) -> Result<(), DeviceError> {
        let shape = self.shape_of(name)?;
        self.values.insert(name.clone(), Value { shape, data });
        Ok(())
    }

    fn shape_of(&self, name: &Name) -> Result<Vec<usize>, DeviceError> {
        bind_shape(&self.program.value_type(name).shape, &self.bindings).map_err(DeviceError::Call)
    }

    pub(crate) fn has(&self, name: &Name) -> bool {
        self.values.contains_key(name)
    }

    pub(crate) fn get(&self, name: &Name) -> &Value {
        &self.values[name]
    }

    /// The data of an f32 value, created as zeros if it does not exist yet.
    pub(crate) fn entry(&mut self, name: &Name) -> Result<&mut Vec<f32>, DeviceError> {
        if !self.values.contains_key(name) {
            let shape = self.shape_of(name)?;
            let data = match self.program.value_type(name).dtype {
                DType::F32 => Data::F32(vec![0.0; shape.iter().product()]),
                DType::I32 => unreachable!("graphs produce no integers"),
            };
            self.values.insert(name.clone(), Value { shape, data });
        }
        match self.values.get_mut(name).map(|value| &mut value.data) {
            Some(Data::F32(numbers)) => Ok(numbers),
            _ => unreachable!("the checked program has `{name}` as f32"),
        }
    }

    pub(crate) fn f32s(&self, name: &Name) -> &[f32] {
        match &self.get(name).data {
            Data::F32(x) => x,
            Data::I32(_) => unreachable!("the checked program reads `{name}` as f32"),
        }
    }

    pub(crate) fn i32s(&self, name: &Name) -> &[i32] {
        match &self.get(name).data {
            Data::I32(x) => x,
            Data::F32(_) => unreachable!("the checked program reads `{name}` as i32"),
        }
    }

    /// Elements per row.
    pub(crate) fn width(&self, name: &Name) -> usize {
        self.get(name).shape[1..].iter().product()
    }

    /// The rows of a value that correspond to `valid` rows of the call from `first` on.
    pub(crate) fn rows(&self, name: &Name, first: usize, valid: usize) -> Range<usize> {
        let per_row = self.program.value_type(name).shape[0].rows_per_row().unwrap_or(1);
        let start = first / per_row;
        start..start + valid.div_ceil(per_row)
    }

    /// The data as callers get it: integers become floats.
    pub(crate) fn to_f32(&self, name: &Name) -> Vec<f32> {
        match &self.get(name).data {
            Data::F32(x) => x.clone(),
            Data::I32(x) => x.iter().map(|&i| i as f32).collect(),
        }
    }
}
