//! Graphs that are ready to run, made when they are first needed.

use crate::{
    CompileOptions, Context, Device, ExecGraph,
    graph::Graph,
    lower::{Drain, Feed, Lowered, Sizes, experts::ExpertSizes},
};
use half::f16;
use qhx_ir::DeviceError;
use std::{collections::HashMap, sync::Arc};

/// A graph with its buffers.
pub(super) struct Ready {
    pub(super) graph: Arc<ExecGraph>,
    pub(super) inputs: Vec<Port<Feed>>,
    pub(super) outputs: Vec<Port<Drain>>,
    /// Keeps the graph alive.
    _context: Context,
}

/// An input or output: what it holds, and its buffer (empty where the state's own memory is used).
pub(super) struct Port<What> {
    pub(super) what: What,
    pub(super) dims: Vec<usize>,
    pub(super) buffer: Vec<f16>,
}

/// All graphs of an executable.
pub(super) struct Graphs {
    device: Arc<Device>,
    ready: HashMap<(usize, Sizes), Ready>,
    experts: HashMap<ExpertSizes, (Arc<ExecGraph>, Context)>,
}

impl Graphs {
    pub(super) fn new(device: Arc<Device>) -> Self {
        Self { device, ready: HashMap::new(), experts: HashMap::new() }
    }

    /// The graph of a part, lowered by `lower` under a name and compiled when it is first asked for.
    pub(super) fn part(
        &mut self,
        part: usize,
        sizes: Sizes,
        lower: impl FnOnce(String) -> Result<Lowered, DeviceError>,
    ) -> Result<&mut Ready, DeviceError> {
        let key = (part, sizes);
        if !self.ready.contains_key(&key) {
            let lowered = lower(format!("part{part}_t{}_c{}", sizes.rows, sizes.context))?;
            let (graph, context) = self.compile(lowered.graph.clone())?;
            let inputs = lowered.feeds.iter().map(|(tensor, feed)| {
                let borrowed = matches!(feed, Feed::PastKeys(_) | Feed::PastValues(_));
                port(&lowered.graph, tensor.0, feed.clone(), borrowed)
            });
            let outputs = lowered.drains.iter().map(|(tensor, drain)| port(&lowered.graph, tensor.0, drain.clone(), false));
            let ready = Ready { graph, inputs: inputs.collect(), outputs: outputs.collect(), _context: context };
            self.ready.insert(key, ready);
        }
        self.ready.get_mut(&key).ok_or_else(|| unreachable!("just made"))
    }

    /// The graph of experts.
    pub(super) fn experts(&mut self, sizes: ExpertSizes, lower: impl FnOnce(String) -> Graph) -> Result<Arc<ExecGraph>, DeviceError> {
        if let Some((graph, _)) = self.experts.get(&sizes) {
            return Ok(graph.clone());
        }
        let (graph, context) = self.compile(lower(format!("experts{}_t{}", sizes.experts, sizes.rows)))?;
        self.experts.insert(sizes, (graph.clone(), context));
        Ok(graph)
    }

    fn compile(&self, graph: Graph) -> Result<(Arc<ExecGraph>, Context), DeviceError> {
        let name = graph.name.clone();
        let context = self.device.compile(&[graph], &CompileOptions::default()).map_err(failed)?;
        let graph = context.graph(&name).map_err(failed)?.clone();
        Ok((graph, context))
    }

    pub(super) fn bytes(&self) -> u64 {
        let ports = |ready: &Ready| {
            let inputs = ready.inputs.iter().map(|p| p.buffer.len());
            inputs.chain(ready.outputs.iter().map(|p| p.buffer.len())).sum::<usize>() as u64 * 2
        };
        self.ready.values().map(ports).sum()
    }
}

fn port<What>(graph: &Graph, tensor: usize, what: What, borrowed: bool) -> Port<What> {
    let dims: Vec<usize> = graph.tensors[tensor].dims.iter().map(|&d| d as usize).collect();
    let numbers = if borrowed { 0 } else { dims.iter().product() };
    Port { what, buffer: vec![f16::ZERO; numbers], dims }
}

/// What the library could not do.
pub(super) fn failed(error: crate::Error) -> DeviceError {
    DeviceError::Resources(format!("npu: {error}"))
}
