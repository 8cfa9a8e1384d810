//! What must hold of a graph before the library sees it.
//!
//! The library takes wrong shapes, short constants and wrong axes without a word, computes garbage from some and dies of others. Here a graph is
//! held to what has been seen to work; what is refused here was refused, wrong or deadly there.

pub(crate) mod operation;
mod quantized;
mod shapes;
mod tensor;

use crate::{
    error::{Error, Result},
    graph::{Graph, Node, Parameter, Role, Tensor, TensorId},
};
use std::collections::HashSet;

/// Why something is refused.
type Checked<T = ()> = std::result::Result<T, String>;

impl Graph {
    /// Whether the library may see it.
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
            return Err(self.wrong("all of it".into(), "a graph needs a name and a node".into()));
        }
        let (mut tensors, mut nodes) = (HashSet::new(), HashSet::new());
        // Parameters of several numbers become tensors, named after their node.
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

    /// Every tensor is made before it is read, and made once.
    fn check_order(&self) -> Result<()> {
        let mut made: Vec<bool> = self.tensors.iter().map(|tensor| !matches!(tensor.role, Role::Inner | Role::Output)).collect();
        for node in &self.nodes {
            let wrong = |reason: String| Err(self.wrong(format!("{} `{}`", node.kind, node.name), reason));
            if let Some(id) = node.inputs.iter().chain(&node.outputs).find(|id| id.0 >= made.len()) {
                return wrong(format!("tensor {} does not exist, there are {}", id.0, made.len()));
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

impl Node {
    /// The names of its parameters of several numbers.
    fn lists(&self) -> impl Iterator<Item = &'static str> {
        let is_list = |value: &Parameter| matches!(value, Parameter::U32s { .. } | Parameter::I32s { .. });
        self.parameters.iter().filter(move |(_, value)| is_list(value)).map(|(name, _)| *name)
    }

    /// The name of the tensor that holds a parameter of several numbers.
    pub(crate) fn parameter_tensor(&self, parameter: &str) -> String {
        format!("{}:{parameter}", self.name)
    }
}

fn check_name(name: String, taken: &mut HashSet<String>) -> Checked {
    match () {
        () if name.is_empty() => Err("it has no name".into()),
        () if name.contains('\0') => Err("its name holds a zero byte".into()),
        () if !taken.insert(name) => Err("the name is taken".into()),
        () => Ok(()),
    }
}

/// A node with its tensors in sight.
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
