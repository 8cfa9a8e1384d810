//! Attention of many rows over cached keys, by products of small matrices.

use crate::{
    kernels,
    parameters::{TILE_ROWS, most_tiles},
    recorder::Recorder,
    state::PAGE_ROWS,
    vulkan::SmallMatrices,
};
use qhx_ir::DeviceError;

/// Attention whose rows have whole octets of numbers.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    pub(super) from: usize,
    pub(super) to: usize,
    /// Keys and values of the call, where there is no slot.
    pub(super) free: Option<(usize, usize)>,
    pub(super) offset: u64,
    pub(super) kind: u32,
    pub(super) masked: u32,
    pub(super) window: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
    pub(super) scale: f32,
    pub(super) cap: f32,
}

/// Attention of many rows over cached keys in f16.
#[derive(Clone, Copy)]
pub(super) struct MatrixAttention {
    matrices: SmallMatrices,
    /// Subgroups of a workgroup.
    teams: usize,
    /// Numbers of a value that a workgroup takes.
    values: usize,
    /// Numbers of keys or values that are in shared memory at once.
    chunk: usize,
}

/// The most numbers of a value whose sums fit into the registers of a subgroup.
const MOST_VALUES: usize = 256;

impl MatrixAttention {
    /// For heads of a call, where it has rows enough.
    pub(super) fn new(r: &Recorder<'_>, t: &Tiles, rows: usize) -> Option<Self> {
        let matrices = r.adapter().cooperative_matrix.filter(|matrices| rows >= matrices.from_rows && t.kind == 2 && !r.is_alike())?;
        let [size, depth] = [matrices.size, matrices.half_depth].map(|n| n as usize);
        let lanes = r.adapter().subgroup_size as usize;
        let values = if t.dim > MOST_VALUES { t.dim / 2 } else { t.dim };
        let whole = t.dim % size == 0 && values % size == 0 && values <= MOST_VALUES && 32 % depth.max(size) == 0;
        // The lanes of a row share a page's scores.
        let shared = lanes % size == 0 && PAGE_ROWS / 2 % (lanes / size).max(1) == 0;
        if !whole || !shared || rows.div_ceil(r.segments.max(1)) < size.min(matrices.from_rows) {
            return None;
        }
        let shapes = [(2, 4 * size), (2, 32), (1, 4 * size), (1, 32)];
        let bytes = |&(teams, chunk): &(usize, usize)| {
            let queries = 2 * 4 * (t.dim.next_multiple_of(chunk) / 2 + 4);
            teams * size * (queries + 4 * (PAGE_ROWS + 4) + 4) + 16 * PAGE_ROWS * (chunk / 8 + 1)
        };
        let (teams, chunk) = shapes.into_iter().find(|shape| bytes(shape) <= r.adapter().shared_memory as usize)?;
        Some(Self { matrices, teams, values, chunk })
    }

    /// Adds the dispatch.
    pub(super) fn attend(self, r: &mut Recorder<'_>, t: &Tiles, rows: usize) -> Result<(), DeviceError> {
        let SmallMatrices { size, half_depth, .. } = self.matrices;
        let [teams, values, chunk] = [self.teams, self.values, self.chunk].map(|n| n as u32);
        let tile = self.teams * size as usize;
        let table = TILE_ROWS.iter().position(|&rows| rows == tile);
        let table = table.unwrap_or_else(|| unreachable!("{tile} rows are listed")) as u32;
        let group = teams * r.adapter().subgroup_size;
        let constants = [t.kind, t.masked, t.dim as u32, group, size, half_depth, teams, values, chunk, table];
        let addresses = [r.call(), r.address(t.from), r.address(t.to), t.offset];
        let numbers = [t.heads as u32, t.kv_heads as u32, t.window as u32, t.scale.to_bits(), t.cap.to_bits()];
        let groups = [most_tiles(tile, rows, r.segments), t.heads, t.dim / self.values];
        r.dispatch(kernels::ATTEND_MATRIX, &constants, groups, &addresses, &numbers)
    }
}
