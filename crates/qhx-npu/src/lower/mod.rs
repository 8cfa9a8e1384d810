//! Lowering: from parts of a program to QNN graphs with static shapes.
//!
//! A graph computes in f16. Its inputs ([`Feed`]) are what is not known when it is built (rows, masks, rotary tables, the slots of the
//! session); its outputs ([`Drain`]) are what the host keeps: values for other parts, new KV rows, updates of recurrent slots.
//! Nothing here depends on the library; all of it is tested against the reference interpreter in the emulator.

mod attend;
mod builder;
mod conv;
mod delta;
pub mod experts;
mod feed;
mod hadamard;
mod linear;
pub mod parts;
mod refuse;
mod rope;
mod simple;
mod weights;

#[cfg(test)]
mod tests;

pub use feed::{Drain, Feed, Keys, MASKED, Turn};
pub use parts::{Part, Work, parts};
pub use refuse::refusal;

use crate::graph::{DataType, Graph, Quantization, TensorId};
use builder::Builder;
use qhx_ir::{Bindings, Checked, DeviceError, Name, OpKind, Slot, Symbol, Weights, dim::bind_shape};
use std::{collections::HashMap, sync::Arc};

/// A graph with the meaning of its inputs and outputs.
#[derive(Clone, Debug)]
pub struct Lowered {
    /// The graph.
    pub graph: Graph,
    /// Its inputs, in the order of the graph's tensors.
    pub feeds: Vec<(TensorId, Feed)>,
    /// Its outputs, in the order of the graph's tensors.
    pub drains: Vec<(TensorId, Drain)>,
}

/// The shapes of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// Rows of the part's kind in one execution.
    pub rows: usize,
    /// Rows of KV slots: all rows of a session, or for ring buffers the most that attention sees.
    pub context: usize,
    /// For ring buffers: the most rows of a call. A ring has room for them in addition to those that attention sees, so that an uncommitted call overwrites nothing.
    pub ring: Option<usize>,
    /// Whether stages have taps.
    pub taps: bool,
}

/// KV buffers have a multiple of this many rows.
pub const CONTEXT_STEP: usize = 32;

impl Sizes {
    /// Rows of a KV slot's buffer.
    pub fn slot_rows(&self, slot: &Slot) -> usize {
        let Some(call) = self.ring else { return self.context };
        let seen = match slot {
            Slot::Kv { window: Some(window), .. } => self.context.min(*window),
            _ => self.context,
        };
        seen.saturating_add(call).next_multiple_of(CONTEXT_STEP)
    }

    /// The most rows that attention over a slot sees.
    pub fn window(&self) -> usize {
        if self.ring.is_some() { self.context } else { usize::MAX }
    }
}

/// Lowers a part of `program`. Without `weights`, constants are empty, which is enough to know inputs and outputs.
pub fn lower(
    program: &Checked,
    part: &Part,
    weights: Option<&Arc<dyn Weights>>,
    sizes: Sizes,
    name: String,
) -> Result<Lowered, DeviceError> {
    let Work::Graph(symbol) = part.work else { unreachable!("only graph parts are lowered") };
    let mut bindings = Bindings::default();
    match symbol {
        Symbol::T => bindings.rows = sizes.rows,
        Symbol::R => bindings.soft_rows = sizes.rows,
        Symbol::L => bindings.wanted = sizes.rows,
    }
    let builder = Builder::new(name);
    let (values, fed, fresh) = (HashMap::new(), HashMap::new(), HashMap::new());
    let mut lowering = Lowering { program, weights, builder, bindings, sizes, values, fed, fresh, feeds: vec![], drains: vec![] };
    for &number in &part.ops {
        let op = &program.ops[number];
        lowering.builder.set_path(&op.path);
        let made = lowering.op(&op.op)?;
        lowering.values.insert(op.path.clone(), made);
    }
    let taps = part.taps.iter().filter(|_| sizes.taps);
    for name in part.makes.iter().chain(taps) {
        lowering.builder.set_path(name);
        let value = lowering.values[name];
        lowering.drain(value, Drain::Value(name.clone()));
    }
    let Lowering { builder, feeds, mut drains, .. } = lowering;
    drains.sort_by_key(|d| d.0);
    Ok(Lowered { graph: builder.finish(), feeds, drains })
}

/// A part that is being lowered.
struct Lowering<'a> {
    program: &'a Checked,
    weights: Option<&'a Arc<dyn Weights>>,
    builder: Builder,
    bindings: Bindings,
    sizes: Sizes,
    values: HashMap<Name, TensorId>,
    fed: HashMap<Feed, TensorId>,
    /// Keys and values that this graph adds to slots: `[kv_heads, rows, dim]`.
    fresh: HashMap<Name, (TensorId, TensorId)>,
    feeds: Vec<(TensorId, Feed)>,
    drains: Vec<(TensorId, Drain)>,
}

impl Lowering<'_> {
    /// The value that an op produces.
    fn op(&mut self, op: &OpKind) -> Result<TensorId, DeviceError> {
        match op {
            OpKind::Linear { x, weight, bias, clip, .. } => self.linear(x, weight, bias.as_ref(), clip.as_ref()),
            OpKind::RmsNorm { x, weight, eps } => self.rms_norm(x, weight.as_ref(), *eps),
            OpKind::LayerNorm { x, weight, bias, eps } => self.layer_norm(x, weight, bias.as_ref(), *eps),
            OpKind::Rope { x, positions, rotary } => self.rope(x, positions, rotary),
            OpKind::Attend { .. } => self.attend(op),
            OpKind::ShortConv { x, weight, bias, slot, activation } => {
                self.short_conv(x, weight, bias.as_ref(), slot.as_ref(), *activation)
            }
            OpKind::GatedDelta { .. } => self.gated_delta(op),
            OpKind::GateAct { gate, up, activation } => {
                let (gate, up) = (self.value(gate)?, self.value(up)?);
                let gate = self.activation(gate, *activation);
                Ok(self.builder.multiply("gated", gate, up))
            }
            OpKind::Activate { x, activation } => {
                let x = self.value(x)?;
                Ok(self.activation(x, *activation))
            }
            OpKind::Add { a, b } => {
                let (a, b) = (self.value(a)?, self.value(b)?);
                Ok(self.builder.add("sum", a, b))
            }
            OpKind::Mul { a, b } => {
                let (a, b) = (self.value(a)?, self.value(b)?);
                Ok(self.builder.multiply("product", a, b))
            }
            OpKind::Scale { x, factor, weight } => self.scale(x, *factor, weight.as_ref()),
            OpKind::Hadamard { x } => self.hadamard(x),
            OpKind::Softcap { x, cap } => {
                let x = self.value(x)?;
                Ok(self.softcap(x, *cap))
            }
            OpKind::Clamp { x, low, high } => {
                let x = self.value(x)?;
                Ok(self.builder.clamp(x, *low, *high))
            }
            OpKind::Concat { xs } => {
                let xs = xs.iter().map(|x| self.value(x)).collect::<Result<Vec<_>, _>>()?;
                let axis = self.builder.dims(xs[0]).len() - 1;
                Ok(self.builder.concat("joined", &xs, axis))
            }
            OpKind::Slice { x, axis, start, length } => {
                let x = self.value(x)?;
                Ok(self.builder.slice("cut", x, *axis, *start, *length))
            }
            OpKind::Reshape { x, shape } => {
                let (x, dims) = (self.value(x)?, self.bound(shape)?);
                Ok(self.builder.reshape("shaped", x, &dims))
            }
            OpKind::ScatterAddRows { x, rows, at } => {
                let x = self.value(x)?;
                let dims = self.builder.dims(x);
                let added = self.feed(Feed::Scattered { rows: rows.clone(), at: at.clone() }, &dims);
                Ok(self.builder.add("sum", x, added))
            }
            OpKind::Conv2d { x, weight, bias, stride } => self.conv2d(x, weight, bias.as_ref(), *stride),
            OpKind::Pool { x, size } => self.pool(x, *size),
            OpKind::Embed { .. }
            | OpKind::Interpolate { .. }
            | OpKind::Gather { .. }
            | OpKind::ScatterRows { .. }
            | OpKind::Route { .. }
            | OpKind::Experts { .. } => unreachable!("graphs contain none of the host's work"),
        }
    }

    /// A value that this graph produces, or an input from the host.
    fn value(&mut self, name: &Name) -> Result<TensorId, DeviceError> {
        match self.values.get(name) {
            Some(&value) => Ok(value),
            None => {
                let dims = self.bound(&self.program.value_type(name).shape)?;
                Ok(self.feed(Feed::Value(name.clone()), &dims))
            }
        }
    }

    fn bound(&self, shape: &[qhx_ir::Dim]) -> Result<Vec<usize>, DeviceError> {
        bind_shape(shape, &self.bindings).map_err(DeviceError::Call)
    }

    /// How many rows of the call correspond to one row of a value.
    fn per_row(&self, name: &Name) -> usize {
        self.program.value_type(name).shape[0].rows_per_row().unwrap_or(1)
    }

    /// The graph input for a feed, created once.
    fn feed(&mut self, feed: Feed, dims: &[usize]) -> TensorId {
        if let Some(&known) = self.fed.get(&feed) {
            return known;
        }
        let input = self.builder.input(&feed_name(&feed), DataType::F16, dims, Quantization::None);
        self.fed.insert(feed.clone(), input);
        self.feeds.push((input, feed));
        input
    }

    fn drain(&mut self, tensor: TensorId, drain: Drain) {
        let output = self.builder.output(tensor);
        self.drains.push((output, drain));
    }
}

/// The name of a graph input, after its content.
fn feed_name(feed: &Feed) -> String {
    match feed {
        Feed::Value(name) => format!("{name}"),
        Feed::Scattered { rows, .. } => format!("{rows}.scattered"),
        Feed::Mask { mask, keys, past: 0 } => format!("mask.{mask:?}.{keys:?}"),
        Feed::Mask { mask, keys, past } => format!("mask.{mask:?}.{keys:?}.{past}"),
        Feed::Cosine(turn) => format!("{}.{}.{}.cos", turn.rotary, turn.positions, turn.dim),
        Feed::Sine(turn) => format!("{}.{}.{}.sin", turn.rotary, turn.positions, turn.dim),
        Feed::PastKeys(slot) => format!("{slot}.past_keys"),
        Feed::PastValues(slot) => format!("{slot}.past_values"),
        Feed::Fifo(slot) => format!("{slot}.fifo"),
        Feed::Delta(slot) => format!("{slot}.delta"),
        Feed::Valid(per_row) => format!("valid.{per_row}"),
        Feed::Pooled { per_row, size } => format!("pooled.{per_row}.{size}"),
    }
}
