//! Checks on a graph before it is passed to the library.
//!
//! The library silently accepts wrong shapes, short constants and wrong axes, computes garbage from some and crashes on others. These checks allow
//! only what has been seen to work; what they reject was rejected, computed wrongly or fatal there.

pub(crate) mod operation;
mod quantized;
mod shapes;
mod tensor;

use crate::{
    error::{Error, Result},
    graph::{Graph, Node, Parameter, Role, Tensor, TensorId},
};
use std::collections::HashSet;

/// The error says why something is rejected.
type Checked<T = ()> = std::result::Result<T, String>;

impl Graph {
    /// Checks that the graph may be passed to the library.
    pub fn check(&self) -> Result<()> {
        self.check_names()?;
        for tensor in &self.tensors {
            tensor.check().map_err(|reason| self.wrong(format!("tensor `{}`", tensor.name), reason))?;
        }
        self.check_order()?;
        for node in &self.nodes {
            let checked = Operation::new(self, node).check();
            checked.map_err(|reason| self.wrong(format!("{} `{}`", node.kind, node.name), reason))?;
        }
        Ok(())
    }

    pub(crate) fn wrong(&self, place: String, reason: String) -> Error {
        Error::Graph { graph: self.name.clone(), place, reason }
    }

    fn check_names(&self) -> Result<()> {
        if self.name.is_empty() || self.nodes.is_empty() {
            return Err(self.wrong("whole graph".into(), "a graph needs a name and at least one node".into()));
        }
        let (mut tensors, mut nodes) = (HashSet::new(), HashSet::new());
        // Array parameters become tensors, named after their node.
        let own = self.tensors.iter().map(|tensor| tensor.name.clone());
        let lists = self.nodes.iter().flat_map(|node| node.lists().map(|name| node.parameter_tensor(name)));
        let nodes_of = self.nodes.iter().map(|node| node.name.clone());
        let names = own.chain(lists).map(|name| ("tensor", name)).chain(nodes_of.map(|name| ("node", name)));
        for (what, name) in names {
            let place = format!("{what} `{}`", name.escape_debug());
            let taken = if what == "tensor" { &mut tensors } else { &mut nodes };
            check_name(name, taken).map_err(|reason| self.wrong(place, reason))?;
        }
        Ok(())
    }

    /// Checks that every tensor is written exactly once, before it is read.
    fn check_order(&self) -> Result<()> {
        let mut made: Vec<bool> = self.tensors.iter().map(|tensor| !matches!(tensor.role, Role::Inner | Role::Output)).collect();
        for node in &self.nodes {
            let wrong = |reason: String| Err(self.wrong(format!("{} `{}`", node.kind, node.name), reason));
            if let Some(id) = node.inputs.iter().chain(&node.outputs).find(|id| id.0 >= made.len()) {
                return wrong(format!("tensor {} does not exist; there are {}", id.0, made.len()));
            }
            if let Some(id) = node.inputs.iter().find(|id| !made[id.0]) {
                return wrong(format!("reads `{}` before it is written", self.tensors[id.0].name));
            }
            for id in &node.outputs {
                if std::mem::replace(&mut made[id.0], true) {
                    return wrong(format!("writes `{}`, which already has a value", self.tensors[id.0].name));
                }
            }
        }
        match self.tensors.iter().zip(made).find(|(_, made)| !made) {
            Some((tensor, _)) => Err(self.wrong(format!("tensor `{}`", tensor.name), "no node writes it".into())),
            None => Ok(()),
        }
    }
}

impl Node {
    /// The names of its array parameters.
    fn lists(&self) -> impl Iterator<Item = &'static str> {
        let is_list = |value: &Parameter| matches!(value, Parameter::U32s { .. } | Parameter::I32s { .. });
        self.parameters.iter().filter(move |(_, value)| is_list(value)).map(|(name, _)| *name)
    }

    /// The name of the tensor that holds an array parameter.
    pub(crate) fn parameter_tensor(&self, parameter: &str) -> String {
        format!("{}:{parameter}", self.name)
    }
}

fn check_name(name: String, taken: &mut HashSet<String>) -> Checked {
    match () {
        () if name.is_empty() => Err("it has no name".into()),
        () if name.contains('\0') => Err("its name contains a zero byte".into()),
        () if !taken.insert(name) => Err("the name is already in use".into()),
        () => Ok(()),
    }
}

/// A node with its tensors.
struct Operation<'a> {
    node: &'a Node,
    inputs: Vec<&'a Tensor>,
    outputs: Vec<&'a Tensor>,
}

impl<'a> Operation<'a> {
    fn new(graph: &'a Graph, node: &'a Node) -> Self {
        let tensors = |ids: &[TensorId]| ids.iter().map(|id| &graph.tensors[id.0]).collect();
        Self { node, inputs: tensors(&node.inputs), outputs: tensors(&node.outputs) }
    }
}

#[cfg(test)]
mod tests;

pub(crate) use quantized::QUANTISED_STEP;
