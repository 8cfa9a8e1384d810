//! What must hold of a graph before the library sees it.
//!
//! The library takes wrong shapes, short constants and wrong axes without a word, computes garbage from some and dies of others.

use crate::{
    error::{Error, Result},
    graph::{DataType, Graph, Quantization, Role, Tensor},
};
use std::collections::HashSet;

/// Axes of a tensor.
const MOST_AXES: usize = 5;

impl Graph {
    /// Whether the library may see it.
    pub fn check(&self) -> Result<()> {
        self.check_names()?;
        for tensor in &self.tensors {
            tensor.check().map_err(|reason| self.wrong(format!("tensor `{}`", tensor.name), reason))?;
        }
        self.check_order()
    }

    pub(crate) fn wrong(&self, place: String, reason: String) -> Error {
        Error::Graph { graph: self.name.clone(), place, reason }
    }

    fn check_names(&self) -> Result<()> {
        let (mut tensors, mut nodes) = (HashSet::new(), HashSet::new());
        for tensor in &self.tensors {
            if tensor.name.is_empty() || !tensors.insert(tensor.name.clone()) {
                return Err(self.wrong(format!("tensor `{}`", tensor.name), "the name is empty or taken".into()));
            }
        }
        for node in &self.nodes {
            let place = format!("node `{}`", node.name);
            if node.name.is_empty() || !nodes.insert(&node.name) {
                return Err(self.wrong(place, "the name is empty or taken".into()));
            }
        }
        Ok(())
    }

    /// Every tensor is made before it is read, and made once.
    fn check_order(&self) -> Result<()> {
        let mut made: Vec<bool> = self.tensors.iter().map(|tensor| !matches!(tensor.role, Role::Inner | Role::Output)).collect();
        for node in &self.nodes {
            let wrong = |reason: String| Err(self.wrong(format!("{} `{}`", node.kind, node.name), reason));
            for id in node.inputs.iter().chain(&node.outputs) {
                if id.0 >= made.len() {
                    return wrong(format!("tensor {} does not exist, there are {}", id.0, made.len()));
                }
            }
            if let Some(id) = node.inputs.iter().find(|id| !made[id.0]) {
                return wrong(format!("reads `{}` before it is made", self.tensors[id.0].name));
            }
            for id in &node.outputs {
                if std::mem::replace(&mut made[id.0], true) {
                    return wrong(format!("writes `{}`, which has its value already", self.tensors[id.0].name));
                }
            }
        }
        match self.tensors.iter().zip(made).find(|(_, made)| !made) {
            Some((tensor, _)) => Err(self.wrong(format!("tensor `{}`", tensor.name), "no node makes it".into())),
            None => Ok(()),
        }
    }
}

impl Tensor {
    fn check(&self) -> std::result::Result<(), String> {
        if self.dims.is_empty() || self.dims.len() > MOST_AXES || self.dims.contains(&0) {
            return Err(format!("has shape {:?}; one to {MOST_AXES} axes without zeros are possible", self.dims));
        }
        let bytes = self.dtype.byte_len(&self.dims).filter(|&bytes| u32::try_from(bytes).is_ok());
        bytes.ok_or_else(|| format!("{:?} has more bytes than QNN can count in 32 bits", self.dims))?;
        if (self.dtype == DataType::Fixed8) == (self.quantization == Quantization::None) {
            return Err(format!(
                "{:?} with quantisation {:?}: whole numbers need one, others must not have one",
                self.dtype, self.quantization
            ));
        }
        match &self.role {
            Role::Constant(bytes) => self.check_constant(bytes),
            _ => Ok(()),
        }
    }

    /// Whether the bytes are those of this tensor.
    pub(crate) fn check_constant(&self, bytes: &[u8]) -> std::result::Result<(), String> {
        match self.dtype.byte_len(&self.dims) {
            Some(expected) if expected == bytes.len() => Ok(()),
            expected => Err(format!("{:?} {:?} has {expected:?} bytes, {} are given", self.dtype, self.dims, bytes.len())),
        }
    }
}
