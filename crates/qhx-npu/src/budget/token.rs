//! What decoding one token takes: executions, bytes that the host copies, bytes of weights that are read. Derived from the one-row graphs, without compiling.

use super::{graph_bytes, row_bytes};
use crate::lower::{Feed, Part, Sizes, Work, experts::expert_sizes, lower, parts};
use qhx_ir::{Checked, DeviceError, Encoding, Name, Op, OpKind, Symbol, Traffic};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, ops::Add};

/// What decoding one token takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PerToken {
    /// Executions, and what is copied for them.
    #[serde(flatten)]
    pub traffic: Traffic,
    /// Bytes of weights that are read: graph constants, chosen experts, table rows.
    pub weight_bytes: u64,
}

impl Add for PerToken {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self { traffic: self.traffic + other.traffic, weight_bytes: self.weight_bytes + other.weight_bytes }
    }
}

impl PerToken {
    /// The cost of a text program that is split into parts of `part_bytes` and whose slots have these sizes.
    pub(super) fn of(program: &Checked, part_bytes: u64, sizes: Sizes) -> Result<Self, DeviceError> {
        let mut all = Self::default();
        for part in parts(program, part_bytes) {
            match part.work {
                Work::Host => part.ops.iter().for_each(|&op| all.add_host(program, &program.ops[op])),
                // Decoding has no soft rows.
                Work::Graph(Symbol::R) => {}
                Work::Graph(_) => all.add_graph(program, &part, sizes)?,
            }
        }
        Ok(all)
    }

    fn add_graph(&mut self, program: &Checked, part: &Part, sizes: Sizes) -> Result<(), DeviceError> {
        let sizes = Sizes { rows: part.multiple, ..part.sizes(sizes) };
        let lowered = lower(program, part, None, sizes, String::new())?;
        let bytes = |tensor: usize| {
            let tensor = &lowered.graph.tensors[tensor];
            tensor.dtype.byte_len(&tensor.dims).unwrap_or(usize::MAX) as u64
        };
        for (tensor, feed) in &lowered.feeds {
            match feed {
                Feed::PastKeys(_) | Feed::PastValues(_) => self.traffic.bytes_lent += bytes(tensor.0),
                _ => self.traffic.bytes_in += bytes(tensor.0),
            }
        }
        self.traffic.bytes_out += lowered.drains.iter().map(|(tensor, _)| bytes(tensor.0)).sum::<u64>();
        self.traffic.executions += 1;
        self.weight_bytes += constant_bytes(program, part);
        Ok(())
    }

    /// Adds the host's work: table rows, and experts, whose weights are inputs of a graph.
    fn add_host(&mut self, program: &Checked, op: &Op) {
        let row = |name: &Name| row_bytes(&program.weights[name]);
        match &op.op {
            OpKind::Embed { table, .. } => self.weight_bytes += row(table),
            OpKind::Experts { gate, up, down, .. } => {
                let Some(sizes) = expert_sizes(program, op, 1).first().copied() else { return };
                let f16 = |numbers: usize| 2 * numbers as u64;
                self.traffic.executions += 1;
                self.traffic.bytes_in += f16(sizes.hidden + sizes.experts);
                self.traffic.bytes_out += f16(sizes.hidden);
                for name in [gate, up, down] {
                    let weight = &program.weights[name];
                    let [_, rows, columns] = weight.shape[..] else { continue };
                    let width = if sizes.int8 { 1 } else { 2 };
                    let bytes = (sizes.experts * rows * columns * width) as u64;
                    // Rows without padding are lent.
                    let plain = sizes.int8 || weight.encoding == Encoding::F16;
                    let stride = weight.encoding.row_bytes(columns).map(|row| row.data);
                    let lent = plain && stride == Some(columns * width);
                    *(if lent { &mut self.traffic.bytes_lent } else { &mut self.traffic.bytes_in }) += bytes;
                    let scales = if sizes.int8 { f16(sizes.experts * rows) } else { 0 };
                    self.traffic.bytes_in += scales;
                    self.weight_bytes += bytes + scales;
                }
                let biases = if sizes.biased { f16(2 * sizes.experts * sizes.ffn) } else { 0 };
                self.traffic.bytes_in += biases;
                self.weight_bytes += biases;
            }
            _ => {}
        }
    }
}

/// Bytes of a part's weights as constants of its graph.
pub(crate) fn constant_bytes(program: &Checked, part: &Part) -> u64 {
    let names: BTreeSet<&Name> = part.ops.iter().flat_map(|&op| program.ops[op].op.weights()).collect();
    names.iter().map(|&name| graph_bytes(&program.weights[name])).sum()
}
