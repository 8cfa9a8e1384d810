//! Counts what a call moves and reads.

use qhx_ir::{Traffic, WeightTensor, WeightsRead};

/// What the calls of parts and experts add up to.
#[derive(Default)]
pub(super) struct Meter {
    traffic: Traffic,
    weight_bytes: u64,
    /// For each op with experts that was run, how many rows each expert got.
    pub(super) expert_rows: Vec<Vec<usize>>,
}

impl Meter {
    /// A graph was executed with inputs of so many bytes, each lent or copied, and outputs of so many.
    pub(super) fn executed(&mut self, inputs: impl Iterator<Item = (usize, bool)>, outputs: impl Iterator<Item = usize>) {
        let traffic = &mut self.traffic;
        traffic.executions += 1;
        for (bytes, is_lent) in inputs {
            *(if is_lent { &mut traffic.bytes_lent } else { &mut traffic.bytes_in }) += bytes as u64;
        }
        traffic.bytes_out += outputs.map(|bytes| bytes as u64).sum::<u64>();
    }

    /// Rows of a table were looked up.
    pub(super) fn read_rows(&mut self, table: &WeightTensor, rows: usize) {
        let row = table.row_bytes();
        self.read_bytes((rows * (row.data + row.scale + row.min)) as u64);
    }

    /// So many bytes of weights were read.
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
