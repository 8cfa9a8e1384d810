//! Graphs that are ready to run: compiled, or loaded from what was prepared, when they are first needed.

use super::plan::Plan;
use crate::{
    CompileOptions, Context, Device, ExecGraph, Expected, ExpectedGraph, ExpectedTensor,
    graph::{Graph, Role, Tensor, TensorId},
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

impl Ready {
    fn new(graph: Arc<ExecGraph>, lowered: Lowered, context: Option<usize>) -> Result<Self, DeviceError> {
        let Lowered { graph: wanted, feeds, drains } = lowered;
        let is_borrowed = |feed: &Feed| matches!(feed, Feed::PastKeys(_) | Feed::PastValues(_));
        let inputs = ports(&wanted, graph.inputs(), feeds, is_borrowed)?;
        let outputs = ports(&wanted, graph.outputs(), drains, |_| false)?;
        Ok(Self { graph, inputs, outputs, context })
    }
}

/// What each tensor of a graph holds, in its order. A graph from a file may have other tensors than it should, so buffers are made last.
fn ports<What>(
    wanted: &Graph,
    found: &[crate::Port],
    whats: Vec<(TensorId, What)>,
    is_borrowed: impl Fn(&What) -> bool,
) -> Result<Vec<Port<What>>, DeviceError> {
    let other = |which: &str| {
        let reason = format!("npu: graph `{}` has other tensors than it should ({which}): forge the bundle again", wanted.name);
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
                let name = part_name(part, sizes);
                let context = self.stored(&name)?;
                let lowered = lower(name, context.is_none())?;
                let graph = self.obtain(&lowered.graph, context)?;
                self.ready.insert(key, Ready::new(graph, lowered, context)?);
                context
            }
        };
        self.touch(context);
        self.ready.get_mut(&key).ok_or_else(|| unreachable!("just made"))
    }

    /// The graph of experts.
    pub(super) fn experts(&mut self, sizes: ExpertSizes, lower: impl FnOnce(String) -> Graph) -> Result<Arc<ExecGraph>, DeviceError> {
        let (graph, context) = match self.experts.get(&sizes) {
            Some(known) => known.clone(),
            None => {
                let name = experts_name(sizes);
                let context = self.stored(&name)?;
                let graph = self.obtain(&lower(name), context)?;
                self.experts.insert(sizes, (graph.clone(), context));
                (graph, context)
            }
        };
        self.touch(context);
        Ok(graph)
    }

    /// The place of the stored context that has a graph; none where graphs are compiled here. Found by the name alone: of a graph that was not prepared
    /// nothing is made.
    fn stored(&self, name: &str) -> Result<Option<usize>, DeviceError> {
        let Source::Stored { folder, plan, .. } = &self.source else { return Ok(None) };
        match plan.contexts.iter().position(|context| context.graphs.iter().any(|graph| graph == name)) {
            Some(place) => Ok(Some(place)),
            None => {
                let reason = format!("graph `{name}` was not prepared (rows {:?}, context {})", plan.rows, plan.context);
                Err(DeviceError::Resources(format!("{}: {reason}: forge the bundle for it", folder.display())))
            }
        }
    }

    /// Compiles a graph, or finds it in the stored context that has it.
    fn obtain(&mut self, graph: &Graph, context: Option<usize>) -> Result<Arc<ExecGraph>, DeviceError> {
        match (&self.source, context) {
            (Source::Stored { .. }, Some(place)) => Ok(self.load(place, graph)?.graph(&graph.name).map_err(failed)?.clone()),
            (Source::Compile(options), _) => {
                let context = self.device.compile(std::slice::from_ref(graph), options).map_err(failed)?;
                Ok(context.graph(&graph.name).map_err(failed)?.clone())
            }
            (Source::Stored { .. }, None) => unreachable!("stored graphs are in stored contexts"),
        }
    }

    /// The stored context at a place, loaded; where it was not, one that has been used least recently may be released for it.
    fn load(&mut self, place: usize, graph: &Graph) -> Result<&Context, DeviceError> {
        let Source::Stored { folder, plan, most_contexts } = &self.source else { unreachable!("called for stored graphs") };
        if !self.loaded.contains_key(&place) {
            let stored = &plan.contexts[place];
            let expected = Expected {
                name: stored.file.clone(),
                bytes: Some(stored.bytes),
                sha256: Some(stored.sum()?),
                graphs: vec![expected_graph(graph)],
            };
            let (file, most) = (folder.join(&stored.file), *most_contexts);
            self.release_beyond(most.saturating_sub(1));
            let context = self.device.load_file(&file, &expected).map_err(failed)?;
            self.loaded.insert(place, (context, self.clock));
        }
        Ok(&self.loaded[&place].0)
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
