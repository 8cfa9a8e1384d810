//! Attention of many rows over cached keys, by products of small matrices.

use super::matrices::are_many;
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
    teams: u32,
    /// Numbers of a value that a workgroup takes.
    values: usize,
}

/// The most numbers of a value whose sums fit into the registers of a subgroup.
const MOST_VALUES: usize = 256;

impl MatrixAttention {
    /// For heads of a call, where it has rows enough.
    pub(super) fn new(r: &Recorder<'_>, t: &Tiles, rows: usize) -> Option<Self> {
        let matrices = r.adapter().cooperative_matrix.filter(|_| are_many(rows) && t.kind == 2)?;
        let [size, depth] = [matrices.size, matrices.half_depth].map(|n| n as usize);
        let lanes = r.adapter().subgroup_size as usize;
        let values = if t.dim > MOST_VALUES { t.dim / 2 } else { t.dim };
        let whole = t.dim % depth == 0 && t.dim % size == 0 && values % size == 0 && values <= MOST_VALUES;
        let fits = whole && lanes % size == 0 && PAGE_ROWS / 2 % (lanes / size).max(1) == 0 && rows.div_ceil(r.segments.max(1)) >= size;
        let bytes = size * (4 * (t.dim + 8) + 4 * (PAGE_ROWS + 4) + 4) + 2 * depth * size;
        let teams = [2, 1].into_iter().find(|teams| teams * bytes <= r.adapter().shared_memory as usize)?;
        (fits && TILE_ROWS.contains(&size)).then_some(Self { matrices, teams: teams as u32, values })
    }

    /// Adds the dispatch.
    pub(super) fn attend(self, r: &mut Recorder<'_>, t: &Tiles, rows: usize) -> Result<(), DeviceError> {
        let SmallMatrices { size, half_depth, .. } = self.matrices;
        let table = TILE_ROWS.iter().position(|&rows| rows == size as usize).unwrap_or(0) as u32;
        let group = self.teams * r.adapter().subgroup_size;
        let constants = [t.kind, t.masked, t.dim as u32, group, size, half_depth, self.teams, self.values as u32, table];
        let addresses = [r.call(), r.address(t.from), r.address(t.to), t.offset];
        let numbers = [t.heads as u32, t.kv_heads as u32, t.window as u32, t.scale.to_bits(), t.cap.to_bits()];
        let tiles = most_tiles(size as usize, rows, r.segments);
        let groups = [tiles.div_ceil(self.teams as usize), t.heads, t.dim / self.values];
        r.dispatch(kernels::ATTEND_MATRIX, &constants, groups, &addresses, &numbers)
    }
}
