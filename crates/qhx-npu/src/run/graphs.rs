//! Graphs that are ready to run: compiled, or loaded from what was prepared, when they are first needed.

use super::plan::Plan;
use crate::{
    CompileOptions, Context, Device, ExecGraph, Expected, ExpectedGraph, ExpectedTensor,
    graph::{Graph, Role},
    lower::{Drain, Feed, Lowered, Sizes, experts::ExpertSizes},
};
use half::f16;
use qhx_ir::DeviceError;
use std::{collections::HashMap, path::PathBuf, sync::Arc};

/// Where graphs come from.
pub(super) enum Source {
    /// They are compiled here, in this way.
    Compile(CompileOptions),
    /// They were prepared.
    Stored {
        /// The folder.
        folder: PathBuf,
        /// What is in it.
        plan: Box<Plan>,
        /// So many contexts are held at once; beyond it the one that was used least recently is released.
        most_contexts: usize,
    },
}

/// A graph with its buffers.
pub(super) struct Ready {
    pub(super) graph: Arc<ExecGraph>,
    pub(super) inputs: Vec<Port<Feed>>,
    pub(super) outputs: Vec<Port<Drain>>,
    /// The place of its context among the stored ones.
    context: Option<usize>,
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
    pub(super) source: Source,
    ready: HashMap<(usize, Sizes), Ready>,
    experts: HashMap<ExpertSizes, (Arc<ExecGraph>, Option<usize>)>,
    /// Stored contexts that are loaded, and when they were last used.
    loaded: HashMap<usize, (Context, u64)>,
    clock: u64,
}

impl Graphs {
    pub(super) fn new(device: Arc<Device>, source: Source) -> Self {
        Self { device, source, ready: HashMap::new(), experts: HashMap::new(), loaded: HashMap::new(), clock: 0 }
    }

    /// The graph of a part, lowered by `lower` under a name; it is told whether weights are needed.
    pub(super) fn part(
        &mut self,
        part: usize,
        sizes: Sizes,
        lower: impl FnOnce(String, bool) -> Result<Lowered, DeviceError>,
    ) -> Result<&mut Ready, DeviceError> {
        let key = (part, sizes);
        let context = match self.ready.get(&key) {
            Some(ready) => ready.context,
            None => {
                let Lowered { graph, feeds, drains } = lower(part_name(part, sizes), matches!(self.source, Source::Compile(_)))?;
                let borrowed = |feed: &Feed| matches!(feed, Feed::PastKeys(_) | Feed::PastValues(_));
                let mut inputs: HashMap<&str, Port<Feed>> =
                    feeds.into_iter().map(|(tensor, feed)| named_port(&graph, tensor.0, borrowed(&feed), feed)).collect();
                let mut outputs: HashMap<&str, Port<Drain>> =
                    drains.into_iter().map(|(tensor, drain)| named_port(&graph, tensor.0, false, drain)).collect();
                let (found, context) = self.obtain(&graph)?;
                let missing = |name: &str| DeviceError::Resources(format!("npu: graph `{}` has an unexpected tensor `{name}`", graph.name));
                let inputs = found.inputs().iter().map(|p| inputs.remove(&*p.name).ok_or_else(|| missing(&p.name)));
                let outputs = found.outputs().iter().map(|p| outputs.remove(&*p.name).ok_or_else(|| missing(&p.name)));
                let (inputs, outputs) = (inputs.collect::<Result<_, _>>()?, outputs.collect::<Result<_, _>>()?);
                self.ready.insert(key, Ready { graph: found, inputs, outputs, context });
                context
            }
        };
        self.touch(context);
        self.ready.get_mut(&key).ok_or_else(|| unreachable!("just made"))
    }

    /// The graph of experts.
    pub(super) fn experts(&mut self, sizes: ExpertSizes, lower: impl FnOnce(String) -> Graph) -> Result<Arc<ExecGraph>, DeviceError> {
        if let Some((graph, context)) = self.experts.get(&sizes).cloned() {
            self.touch(context);
            return Ok(graph);
        }
        let (graph, context) = self.obtain(&lower(experts_name(sizes)))?;
        self.experts.insert(sizes, (graph.clone(), context));
        Ok(graph)
    }

    fn obtain(&mut self, graph: &Graph) -> Result<(Arc<ExecGraph>, Option<usize>), DeviceError> {
        let (folder, plan, most_contexts) = match &self.source {
            Source::Stored { folder, plan, most_contexts } => (folder, plan, most_contexts),
            Source::Compile(options) => {
                let context = self.device.compile(std::slice::from_ref(graph), options).map_err(failed)?;
                return Ok((context.graph(&graph.name).map_err(failed)?.clone(), None));
            }
        };
        let Some(number) = plan.contexts.iter().position(|c| c.graphs.contains(&graph.name)) else {
            let reason = format!("graph `{}` was not prepared (rows {:?}, context {})", graph.name, plan.rows, plan.context);
            return Err(DeviceError::Resources(format!("{}: {reason}: forge the bundle for it", folder.display())));
        };
        if !self.loaded.contains_key(&number) {
            let stored = &plan.contexts[number];
            let expected = Expected {
                name: stored.file.clone(),
                bytes: Some(stored.bytes),
                sha256: Some(stored.sum()?),
                graphs: vec![expected_graph(graph)],
            };
            let (file, most) = (folder.join(&stored.file), *most_contexts);
            self.release_beyond(most.saturating_sub(1));
            let context = self.device.load_file(&file, &expected).map_err(failed)?;
            self.loaded.insert(number, (context, self.clock));
        }
        let context = &self.loaded[&number].0;
        Ok((context.graph(&graph.name).map_err(failed)?.clone(), Some(number)))
    }

    fn touch(&mut self, context: Option<usize>) {
        self.clock += 1;
        if let Some((_, used)) = context.and_then(|number| self.loaded.get_mut(&number)) {
            *used = self.clock;
        }
    }

    /// Releases contexts, least recently used first, until no more than `most` are left.
    fn release_beyond(&mut self, most: usize) {
        while self.loaded.len() > most {
            let Some(oldest) = self.loaded.iter().min_by_key(|(_, (_, used))| *used).map(|(&number, _)| number) else { return };
            self.ready.retain(|_, ready| ready.context != Some(oldest));
            self.experts.retain(|_, (_, context)| *context != Some(oldest));
            self.loaded.remove(&oldest);
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        let ports = |ready: &Ready| {
            let inputs = ready.inputs.iter().map(|p| p.buffer.len());
            inputs.chain(ready.outputs.iter().map(|p| p.buffer.len())).sum::<usize>() as u64 * 2
        };
        self.ready.values().map(ports).sum()
    }
}

/// The name of a part's graph.
pub(super) fn part_name(part: usize, sizes: Sizes) -> String {
    let ring = sizes.ring.map_or(String::new(), |rows| format!("r{rows}"));
    format!("part{part}_t{}_c{}{ring}", sizes.rows, sizes.context)
}

/// The name of an expert graph.
pub(super) fn experts_name(sizes: ExpertSizes) -> String {
    let kind = if sizes.int8 { "i8" } else { "f16" };
    format!("experts{}_t{}_{}x{}_{:?}_{kind}", sizes.experts, sizes.rows, sizes.hidden, sizes.ffn, sizes.activation).to_lowercase()
}

fn named_port<What>(graph: &Graph, tensor: usize, borrowed: bool, what: What) -> (&str, Port<What>) {
    let tensor = &graph.tensors[tensor];
    let dims: Vec<usize> = tensor.dims.iter().map(|&d| d as usize).collect();
    let numbers = if borrowed { 0 } else { dims.iter().product() };
    (&tensor.name, Port { what, buffer: vec![f16::ZERO; numbers], dims })
}

fn expected_graph(graph: &Graph) -> ExpectedGraph {
    let of = |is: fn(&Role) -> bool| {
        let tensors = graph.tensors.iter().filter(|t| is(&t.role));
        tensors.map(|t| ExpectedTensor { name: t.name.clone(), dtype: t.dtype, dims: t.dims.clone() }).collect()
    };
    let (inputs, outputs) = (of(|role| matches!(role, Role::Input)), of(|role| matches!(role, Role::Output)));
    ExpectedGraph { name: graph.name.clone(), inputs, outputs }
}

/// What the library could not do.
pub(super) fn failed(error: crate::Error) -> DeviceError {
    DeviceError::Resources(format!("npu: {error}"))
}
