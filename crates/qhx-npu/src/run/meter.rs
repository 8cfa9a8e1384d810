//! Counts what a call moves and reads.

use qhx_ir::{Traffic, WeightTensor, WeightsRead};

/// Totals over the executions of a call.
#[derive(Default)]
pub(super) struct Meter {
    traffic: Traffic,
    weight_bytes: u64,
    /// For each op with experts that ran: the number of rows per expert.
    pub(super) expert_rows: Vec<Vec<usize>>,
}

impl Meter {
    /// Counts an execution: the bytes of each input, lent or copied, and of the outputs.
    pub(super) fn executed(&mut self, inputs: impl Iterator<Item = (usize, bool)>, outputs: impl Iterator<Item = usize>) {
        let traffic = &mut self.traffic;
        traffic.executions += 1;
        for (bytes, is_lent) in inputs {
            *(if is_lent { &mut traffic.bytes_lent } else { &mut traffic.bytes_in }) += bytes as u64;
        }
        traffic.bytes_out += outputs.map(|bytes| bytes as u64).sum::<u64>();
    }

    /// Counts rows looked up in a table.
    pub(super) fn read_rows(&mut self, table: &WeightTensor, rows: usize) {
        let row = table.row_bytes();
        self.read_bytes((rows * (row.data + row.scale + row.min)) as u64);
    }

    /// Counts bytes of weights that were read.
    pub(super) fn read_bytes(&mut self, bytes: u64) {
        self.weight_bytes += bytes;
    }

    pub(super) fn traffic(&self) -> Traffic {
        self.traffic
    }

    pub(super) fn weights_read(&self) -> WeightsRead<'_> {
        WeightsRead { bytes: self.weight_bytes, expert_rows: &self.expert_rows }
    }
}
