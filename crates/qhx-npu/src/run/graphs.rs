//! Executable graphs: compiled, or loaded from prepared contexts, on first use.

use super::{
    contexts::Contexts,
    plan::{ContextFile, GraphPlan},
};
use crate::{
    CompileOptions, ExecGraph, Expected, ExpectedGraph, ExpectedTensor,
    graph::{Graph, Role, Tensor, TensorId},
    lower::{Drain, Feed, Lowered, Sizes, experts::ExpertSizes},
};
use half::f16;
use qhx_ir::{DeviceError, Name};
use std::{collections::HashMap, path::PathBuf, sync::Arc};

/// Where graphs come from.
pub(super) enum Source {
    /// Compiled at load, with these options.
    Compile(CompileOptions),
    /// Prepared ahead of time.
    Stored {
        /// The folder.
        folder: PathBuf,
        /// The plan of its contents.
        plan: Box<GraphPlan>,
    },
}

/// Where a graph is.
enum Home {
    /// Compiled at load; stays in memory.
    Compiled(Arc<ExecGraph>),
    /// In a context binary, which may have been released before the graph is used again.
    Stored { file: PathBuf, expected: Expected },
}

/// The buffers of a graph.
pub(super) struct Ports {
    home: Home,
    pub(super) inputs: Vec<Port<Feed>>,
    pub(super) outputs: Vec<Port<Drain>>,
}

/// An input or output: its content, and its buffer (empty where the state's own memory is used).
pub(super) struct Port<What> {
    pub(super) what: What,
    pub(super) dims: Vec<usize>,
    pub(super) buffer: Vec<f16>,
}

impl Ports {
    fn new(home: Home, graph: &ExecGraph, lowered: Lowered) -> Result<Self, DeviceError> {
        let Lowered { graph: wanted, feeds, drains } = lowered;
        let is_borrowed = |feed: &Feed| matches!(feed, Feed::PastKeys(_) | Feed::PastValues(_));
        let inputs = ports(&wanted, graph.inputs(), feeds, is_borrowed)?;
        let outputs = ports(&wanted, graph.outputs(), drains, |_| false)?;
        Ok(Self { home, inputs, outputs })
    }
}

/// The content of each tensor of a graph, in order. A graph from a file may have other tensors than expected, so buffers are allocated last.
fn ports<What>(
    wanted: &Graph,
    found: &[crate::Port],
    whats: Vec<(TensorId, What)>,
    is_borrowed: impl Fn(&What) -> bool,
) -> Result<Vec<Port<What>>, DeviceError> {
    let other = |which: &str| {
        let reason = format!("graph `{}` of the context binary has unexpected tensors ({which}): forge the bundle again", wanted.name);
        Err(DeviceError::Resources(reason))
    };
    if found.len() != whats.len() {
        return other(&format!("{} instead of {}", found.len(), whats.len()));
    }
    let mut by_name: HashMap<&str, (&Tensor, What)> = HashMap::new();
    for (tensor, what) in whats {
        let tensor = &wanted.tensors[tensor.0];
        by_name.insert(&tensor.name, (tensor, what));
    }
    let mut ports = Vec::with_capacity(found.len());
    for port in found {
        match by_name.remove(&*port.name) {
            Some((tensor, what)) if (&tensor.dims, tensor.dtype) == (&port.dims, port.dtype) => {
                let dims: Vec<usize> = tensor.dims.iter().map(|&d| d as usize).collect();
                let numbers = if is_borrowed(&what) { 0 } else { dims.iter().product() };
                ports.push(Port { what, buffer: vec![f16::ZERO; numbers], dims });
            }
            _ => return other(&format!("`{}` {:?}", port.name, port.dims)),
        }
    }
    Ok(ports)
}

/// All graphs of an executable.
pub(super) struct Graphs {
    /// The program's name; contexts may have graphs of several programs.
    program: Name,
    contexts: Arc<Contexts>,
    pub(super) source: Source,
    parts: HashMap<(usize, Sizes), Ports>,
    experts: HashMap<ExpertSizes, Home>,
}

impl Graphs {
    pub(super) fn new(program: Name, contexts: Arc<Contexts>, source: Source) -> Self {
        Self { program, contexts, source, parts: HashMap::new(), experts: HashMap::new() }
    }

    /// The graph of a part with its buffers. `lower` gets the graph's name and whether weights are needed.
    pub(super) fn part(
        &mut self,
        part: usize,
        sizes: Sizes,
        lower: impl FnOnce(String, bool) -> Result<Lowered, DeviceError>,
    ) -> Result<(Arc<ExecGraph>, &mut Ports), DeviceError> {
        let (key, name) = ((part, sizes), part_name(&self.program, part, sizes));
        let graph = match self.parts.get(&key) {
            Some(known) => self.graph(&known.home, &name)?,
            None => {
                let stored = self.stored(&name)?;
                let lowered = lower(name.clone(), stored.is_none())?;
                let home = self.home(stored, &lowered.graph)?;
                let graph = self.graph(&home, &name)?;
                self.parts.insert(key, Ports::new(home, &graph, lowered)?);
                graph
            }
        };
        match self.parts.get_mut(&key) {
            Some(ports) => Ok((graph, ports)),
            None => unreachable!("just made"),
        }
    }

    /// The graph of experts.
    pub(super) fn experts(&mut self, sizes: ExpertSizes, lower: impl FnOnce(String) -> Graph) -> Result<Arc<ExecGraph>, DeviceError> {
        let name = experts_name(sizes);
        if let Some(home) = self.experts.get(&sizes) {
            return self.graph(home, &name);
        }
        let home = self.home(self.stored(&name)?, &lower(name.clone()))?;
        let graph = self.graph(&home, &name)?;
        self.experts.insert(sizes, home);
        Ok(graph)
    }

    /// The stored context with a graph; `None` where graphs are compiled at load. It is found by name alone, so that nothing is built for a graph that was not prepared.
    fn stored(&self, name: &str) -> Result<Option<(PathBuf, &ContextFile)>, DeviceError> {
        let Source::Stored { folder, plan } = &self.source else { return Ok(None) };
        match plan.contexts.iter().find(|context| context.graphs.iter().any(|graph| graph == name)) {
            Some(context) => Ok(Some((folder.join(&context.file), context))),
            None => {
                let reason = format!("graph `{name}` was not prepared (the plan is for rows {:?} and context {})", plan.rows, plan.context);
                Err(DeviceError::Resources(format!("{}: {reason}: forge the bundle for these sizes", folder.display())))
            }
        }
    }

    /// The graph's location from now on: compiled, or in a stored context.
    fn home(&self, stored: Option<(PathBuf, &ContextFile)>, graph: &Graph) -> Result<Home, DeviceError> {
        match (&self.source, stored) {
            (_, Some((file, stored))) => {
                let (name, bytes, sha256) = (stored.file.clone(), Some(stored.bytes), Some(stored.sum()?));
                Ok(Home::Stored { file, expected: Expected { name, bytes, sha256, graphs: vec![expected_graph(graph)] } })
            }
            (Source::Compile(options), None) => {
                let context = self.contexts.device.compile(std::slice::from_ref(graph), options).map_err(failed)?;
                Ok(Home::Compiled(context.graph(&graph.name).map_err(failed)?.clone()))
            }
            (Source::Stored { .. }, None) => unreachable!("stored graphs are in stored contexts"),
        }
    }

    /// The executable graph.
    fn graph(&self, home: &Home, name: &str) -> Result<Arc<ExecGraph>, DeviceError> {
        match home {
            Home::Compiled(graph) => Ok(graph.clone()),
            Home::Stored { file, expected } => self.contexts.graph(file, name, expected),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        let numbers = |ports: &Ports| {
            let inputs = ports.inputs.iter().map(|p| p.buffer.len());
            inputs.chain(ports.outputs.iter().map(|p| p.buffer.len())).sum::<usize>() as u64 * 2
        };
        self.parts.values().map(numbers).sum()
    }
}

impl Drop for Graphs {
    fn drop(&mut self) {
        let homes = self.parts.values().map(|ports| &ports.home).chain(self.experts.values());
        for home in homes {
            if let Home::Stored { file, .. } = home {
                self.contexts.release(file);
            }
        }
    }
}

/// The name of a part's graph.
pub(super) fn part_name(program: &str, part: usize, sizes: Sizes) -> String {
    let ring = sizes.ring.map_or(String::new(), |rows| format!("r{rows}"));
    format!("{program}_part{part}_t{}_c{}{ring}", sizes.rows, sizes.context)
}

/// The name of an expert graph.
pub(super) fn experts_name(sizes: ExpertSizes) -> String {
    let kind = if sizes.int8 { "i8" } else { "f16" };
    let bias = if sizes.biased { "_bias" } else { "" };
    format!("experts{}_t{}_{}x{}_{:?}_{kind}{bias}", sizes.experts, sizes.rows, sizes.hidden, sizes.ffn, sizes.activation).to_lowercase()
}

fn expected_graph(graph: &Graph) -> ExpectedGraph {
    let of = |is: fn(&Role) -> bool| {
        let tensors = graph.tensors.iter().filter(|t| is(&t.role));
        tensors.map(|t| ExpectedTensor { name: t.name.clone(), dtype: t.dtype, dims: t.dims.clone() }).collect()
    };
    let (inputs, outputs) = (of(|role| matches!(role, Role::Input)), of(|role| matches!(role, Role::Output)));
    ExpectedGraph { name: graph.name.clone(), inputs, outputs }
}

/// The device error for a failure of the library.
pub(super) fn failed(error: crate::Error) -> DeviceError {
    DeviceError::Resources(format!("npu: {error}"))
}
