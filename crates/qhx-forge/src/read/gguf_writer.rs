//! Writes GGUF files (version 3), for round trips in tests and for seeds of the fuzz targets. It keeps everything in memory and checks nothing:
//! a test may well want a file that is wrong.

use super::SourceType;
use super::gguf::type_number;
use super::gguf_metadata::{Array, Value};

/// A GGUF file in the making.
#[derive(Clone, Debug, Default)]
pub struct GgufWriter {
    /// Keys and values, in order.
    pub metadata: Vec<(String, Value)>,
    /// Name, type, row-major shape and data of each tensor.
    pub tensors: Vec<(String, SourceType, Vec<usize>, Vec<u8>)>,
}

impl GgufWriter {
    /// Adds a metadata value.
    pub fn set(&mut self, key: &str, value: Value) -> &mut Self {
        self.metadata.push((key.to_string(), value));
        self
    }

    /// Adds a text.
    pub fn set_text(&mut self, key: &str, text: &str) -> &mut Self {
        self.set(key, Value::Text(text.to_string()))
    }

    /// Adds a list of texts.
    pub fn set_texts(&mut self, key: &str, texts: &[&str]) -> &mut Self {
        self.set(key, Value::Array(Array::Text(texts.iter().map(|t| t.to_string()).collect())))
    }

    /// Adds a 32-bit whole number.
    pub fn set_u32(&mut self, key: &str, number: u32) -> &mut Self {
        self.set(key, Value::U32(number))
    }

    /// Adds a 32-bit float.
    pub fn set_f32(&mut self, key: &str, number: f32) -> &mut Self {
        self.set(key, Value::F32(number))
    }

    /// Adds a tensor with its stored bytes.
    pub fn tensor(&mut self, name: &str, source_type: SourceType, shape: &[usize], data: Vec<u8>) -> &mut Self {
        self.tensors.push((name.to_string(), source_type, shape.to_vec(), data));
        self
    }

    /// Adds an f32 tensor.
    pub fn tensor_f32(&mut self, name: &str, shape: &[usize], numbers: &[f32]) -> &mut Self {
        self.tensor(name, SourceType::F32, shape, numbers.iter().flat_map(|n| n.to_le_bytes()).collect())
    }

    /// The file's bytes. Types that GGUF does not have get an invalid number.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_text(&mut out, key);
            put_value(&mut out, value);
        }
        let mut offset = 0u64;
        for (name, source_type, shape, data) in &self.tensors {
            put_text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|&d| out.extend((d as u64).to_le_bytes()));
            out.extend(type_number(*source_type).unwrap_or(u32::MAX).to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (data.len() as u64).next_multiple_of(32);
        }
        for (.., data) in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(data);
        }
        out
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    let mut put = |kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::U8(x) => put(0, &x.to_le_bytes()),
        Value::I8(x) => put(1, &x.to_le_bytes()),
        Value::U16(x) => put(2, &x.to_le_bytes()),
        Value::I16(x) => put(3, &x.to_le_bytes()),
        Value::U32(x) => put(4, &x.to_le_bytes()),
        Value::I32(x) => put(5, &x.to_le_bytes()),
        Value::F32(x) => put(6, &x.to_le_bytes()),
        Value::Bool(x) => put(7, &[*x as u8]),
        Value::U64(x) => put(10, &x.to_le_bytes()),
        Value::I64(x) => put(11, &x.to_le_bytes()),
        Value::F64(x) => put(12, &x.to_le_bytes()),
        Value::Text(text) => {
            put(8, &[]);
            put_text(out, text);
        }
        Value::Array(array) => {
            put(9, &[]);
            put_array(out, array);
        }
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    let mut put = |kind: u32, count: usize, bytes: Vec<u8>| {
        out.extend(kind.to_le_bytes());
        out.extend((count as u64).to_le_bytes());
        out.extend(bytes);
    };
    match array {
        Array::U8(xs) => put(0, xs.len(), xs.clone()),
        Array::I8(xs) => put(1, xs.len(), xs.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::U16(xs) => put(2, xs.len(), xs.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::I16(xs) => put(3, xs.len(), xs.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::U32(xs) => put(4, xs.len(), xs.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::I32(xs) => put(5, xs.len(), xs.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::F32(xs) => put(6, xs.len(), xs.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::Bool(xs) => put(7, xs.len(), xs.iter().map(|&x| x as u8).collect()),
        Array::U64(xs) => put(10, xs.len(), xs.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::I64(xs) => put(11, xs.len(), xs.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::F64(xs) => put(12, xs.len(), xs.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::Text(texts) => {
            put(8, texts.len(), Vec::new());
            texts.iter().for_each(|text| put_text(out, text));
        }
        Array::Array(arrays) => {
            put(9, arrays.len(), Vec::new());
            arrays.iter().for_each(|array| put_array(out, array));
        }
    }
}
