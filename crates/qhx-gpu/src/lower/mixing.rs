//! Ops that mix rows: attention, recurrent ops, convolution, pooling.

use super::{
    Lowering, buffers,
    fusion::FormedHeads,
    heads::{MatrixAttention, Tiles},
    simple::function,
    single::Turned,
};
use crate::{
    kernels,
    parameters::{TILE_ROWS, most_tiles},
    recorder::{MOST_ALIKE, Recorder, Resource, Step, bind, fold},
    state::Held,
    stream::{Instruction, Needs, Operation},
};
use qhx_ir::{DeviceError, Dim, KvType, Mask, Name, OpKind, Symbol};

/// So many splits are enough for all keys: see `blocks_of_split` in `attend_tiles.comp`.
const MOST_SPLITS: usize = 32;
/// Keys of a block, which one workgroup takes at once.
const BLOCK_KEYS: usize = 128;
/// Rows of a tile, at most.
const MOST_TILE: usize = 8;
/// Workgroups that keep a large GPU busy.
const SPLIT_GROUPS: usize = 264;

/// Attention of one row: queries and keys are turned, and keys and values kept, by its instruction.
struct SingleHeads {
    kind: usize,
    q: Option<Turned>,
    /// Keys, how they are turned, and values.
    kv: Option<(usize, Option<Turned>, usize)>,
}

/// Columns of a state that a workgroup takes in `step_recurrent.glsl`.
const DELTA_COLUMNS: usize = 16;
/// Numbers of keys that a workgroup takes at least, where others could help.
const SPLIT_NUMBERS: usize = 1 << 13;
/// Workgroups that share the keys of one row.
const SINGLE_GROUPS: usize = 128;

impl SingleHeads {
    fn reads(&self) -> Vec<Resource> {
        let (k, k_turned, v) = self.kv.map_or((None, None, None), |(k, turned, v)| (Some(k), turned, Some(v)));
        let turned = [self.q, k_turned].into_iter().flatten().flat_map(|turned| [turned.from, turned.turns]);
        turned.chain([k, v].into_iter().flatten()).map(Resource::Buffer).collect()
    }

    fn instruct(&self, r: &mut Recorder<'_>, t: &Tiles, parts: usize) {
        let keys = if t.window > 0 { r.keys.min(t.window) } else { r.keys };
        // A workgroup takes as many keys as its lanes do at once, or twice.
        let split_keys = (SPLIT_NUMBERS / t.dim).max(1);
        let splits = match keys <= 4 * split_keys {
            true => 1,
            false => keys.div_ceil(split_keys).min(SINGLE_GROUPS / t.kv_heads).clamp(1, MOST_SPLITS),
        };
        // Where the numbers are, the norm's weight, turns, roles; flags and the number under the root.
        let turned = |turned: Option<Turned>, own: usize| match turned {
            None => ([r.address(own), 0, 0, 0], [0, 0]),
            Some(Turned { from, norm, turns, roles, .. }) => {
                let (weight, eps) = norm.unwrap_or((0, 0.0));
                ([r.address(from), weight, r.address(turns), roles], [2 | norm.is_some() as u32, eps.to_bits()])
            }
        };
        let (q, [q_flags, q_eps]) = turned(self.q, t.from);
        let (k, [k_flags, k_eps]) = self.kv.map_or(([0; 4], [0; 2]), |(own, how, _)| turned(how, own));
        let v = self.kv.map_or(0, |(_, _, v)| r.address(v));
        let out = r.address(if splits == 1 { t.to } else { parts });
        let addresses = [q[0], k[0], v, q[1], k[1], q[2], q[3], k[2], k[3], out, t.offset];
        let numbers = [t.heads, t.kv_heads, t.window, splits].map(|n| n as u32);
        let numbers = [&numbers[..], &[t.scale.to_bits(), t.cap.to_bits(), q_flags, k_flags, q_eps, k_eps]].concat();
        r.instruct(Instruction::new(Operation::Attend(self.kind), t.kv_heads * splits, &addresses, &numbers));
        if splits > 1 {
            r.inner_barrier();
            let addresses = [r.address(parts), r.address(t.to)];
            r.instruct(Instruction::new(Operation::Merge, t.heads, &addresses, &[t.dim as u32, splits as u32]));
        }
    }
}

/// "No slot" in `short_conv.comp`.
const NONE: u32 = u32::MAX;

impl Lowering<'_> {
    pub(super) fn attend(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        let OpKind::Attend { q, kv, slot, mask, scale, softcap, relative_keys } = op else { unreachable!("attention") };
        let names = (q, kv.as_ref().map(|kv| &kv.k));
        let (q, y) = (self.view(q), self.result(path));
        let (heads, dim) = (Self::fixed(q.shape[1]), q.width());
        let kv = kv.as_ref().map(|kv| [&kv.k, &kv.v].map(|name| self.view(name)));
        let slot = slot.as_ref().map(|name| {
            let place = self.slots.place(name);
            match self.slots.held[place] {
                Held::Kv { offset, kv_heads, dtype, .. } => (place, offset, kv_heads, if dtype == KvType::F32 { 1 } else { 2 }),
                Held::Recurrent { .. } => unreachable!("checked: a KV slot"),
            }
        });
        let kv_heads = match (&slot, &kv) {
            (Some((_, _, kv_heads, _)), _) => *kv_heads,
            (None, Some([k, _])) => Self::fixed(k.shape[1]),
            _ => unreachable!("checked: keys come from the op or from a slot"),
        };
        let (offset, kind) = slot.map_or((0, 0), |(_, offset, _, kind)| (offset, kind));
        let (rows, per_row) = (q.shape[0], q.rows_per_row());
        let slot_resource = slot.map(|(place, ..)| Resource::Slot(place));
        let mut kept = None;
        if let (Some([k, v]), Some(resource)) = (&kv, slot_resource) {
            let (k, v) = (k.buffer, v.buffer);
            let turning = names.1.filter(|name| self.is_read_once(name)).and_then(|name| self.turnings.remove(name));
            if let Some(turning) = turning {
                // Keys are turned on their way to their page.
                self.steps[turning.step] = Step::nothing();
                kept = Some((self.steps.len(), k, v));
                self.step(buffers([turning.from, turning.turns, v]), vec![resource], move |r| {
                    turning.dispatch(r, kind, 0, [r.call(), r.address(v), offset])
                });
            } else {
                kept = Some((self.steps.len(), k, v));
                let words = if kind == 2 { dim.div_ceil(2) } else { dim };
                self.step(buffers([k, v]), vec![resource], move |r| {
                    let rows = r.bind(rows);
                    let addresses = [r.call(), r.address(k), r.address(v), offset];
                    r.flat(kernels::KEEP, &[kind], rows * kv_heads * words, 256, &addresses, &[rows, kv_heads, dim].map(|n| n as u32))
                });
            }
        }
        let (masked, window) = match *mask {
            Mask::Full => (0, 0),
            Mask::Causal => (1, 0),
            Mask::Window(window) => (2, window),
        };
        let relative = self.plain(relative_keys.as_ref());
        let distances = relative_keys.as_ref().map_or(0, |name| self.program.weights[name].shape[0]);
        let (from, to, scale, cap) = (q.buffer, y.buffer, *scale, softcap.unwrap_or(0.0));
        let free = kv.filter(|_| slot.is_none()).map(|[k, v]| (k.buffer, v.buffer));
        let reads = [from].into_iter().chain(free.into_iter().flat_map(|(k, v)| [k, v])).map(Resource::Buffer).chain(slot_resource);
        let reads: Vec<Resource> = reads.collect();
        let share = heads / kv_heads;
        if per_row == 1 && dim % 8 == 0 && dim <= 512 && relative == 0 && share <= self.most_queries {
            let tiles = Tiles { from, to, free, offset, kind, masked, window, heads, kv_heads, dim, scale, cap };
            let single = (kind != 0 && masked != 0 && rows == Dim::Symbol(Symbol::T)).then(|| {
                let (q, k) = (self.take_turned(names.0), names.1.and_then(|k| self.take_turned(k)));
                if let Some((step, ..)) = kept {
                    self.steps[step].left_out = true;
                }
                SingleHeads { kind: self.single.attention(kind, dim, share), q, kv: kept.map(|(_, own, v)| (own, k, v)) }
            });
            let formed = self.formed_heads(path, &y);
            self.attend_tiles(rows, reads, slot_resource, tiles, single, formed);
            self.define(path, y);
            return Ok(());
        }
        self.step(reads, buffers([to]), move |r| {
            let rows = r.bind(rows);
            let (k, v) = free.map_or((0, 0), |(k, v)| (r.address(k), r.address(v)));
            let addresses = [r.call(), r.address(from), k, v, relative, r.address(to), offset];
            let numbers = [rows, heads, kv_heads, window, distances].map(|n| n as u32);
            let numbers = [&numbers[..], &[per_row, scale.to_bits(), cap.to_bits()]].concat();
            let [x, z] = fold(rows);
            r.dispatch(kernels::ATTEND, &[kind, masked, dim as u32], [x, heads, z], &addresses, &numbers)
        });
        self.define(path, y);
        Ok(())
    }

    /// Whether one op reads a value, and nobody else.
    fn is_read_once(&self, name: &Name) -> bool {
        self.program.readers(name).len() == 1 && !self.is_kept(name) && self.program.stages_shown_by(name).is_empty()
    }

    /// Attention by tiles of queries; where there are few, their keys are split among workgroups.
    fn attend_tiles(
        &mut self,
        rows: Dim,
        mut reads: Vec<Resource>,
        slot: Option<Resource>,
        t: Tiles,
        single: Option<SingleHeads>,
        formed: Option<FormedHeads>,
    ) {
        let Tiles { from, to, free, offset, kind, masked, window, heads, kv_heads, dim, scale, cap } = t;
        let share = heads / kv_heads;
        let most_queries = self.most_queries;
        let split_rows = bind(rows, &self.max).min(MOST_ALIKE);
        let parts = self.buffer(4 * (split_rows * heads * MOST_SPLITS * (dim + 2)) as u64);
        let plan = move |r: &Recorder<'_>| {
            let rows = r.bind(rows);
            // Queries that meet a key at once: as many as registers and shared memory hold.
            let fits = |tile: usize| {
                let queries = tile * share;
                queries <= most_queries
                    && queries * (dim * 4 + 512) + 4096 + 1024 + 512 + 4 * dim <= (r.adapter().shared_memory as usize).min(48 << 10)
            };
            let each = rows.div_ceil(r.segments.max(1)).next_power_of_two();
            let tile = TILE_ROWS.into_iter().rev().find(|&tile| tile <= each.min(MOST_TILE) && fits(tile)).unwrap_or(1);
            let tiles = most_tiles(tile, rows, r.segments);
            let is_split = rows <= MOST_ALIKE && masked != 0;
            let alike = is_split && r.is_alike();
            let blocks = r.keys.div_ceil(BLOCK_KEYS).clamp(1, MOST_SPLITS);
            // A window may begin and end in the middle of a block.
            let seen = if window > 0 { (window + tile).div_ceil(BLOCK_KEYS) + 1 } else { MOST_SPLITS };
            let splits = match is_split {
                true if alike => blocks.min(seen),
                true => (SPLIT_GROUPS / (tiles * kv_heads).max(1)).clamp(1, blocks),
                false => 1,
            };
            (tile, tiles, splits, alike)
        };
        let mut writes = buffers([to, parts]);
        writes.extend(FormedHeads::writes(formed));
        if let Some(single) = &single {
            reads.extend(single.reads());
            writes.extend(slot);
        }
        self.step(reads, writes, move |r| {
            if let (Some(single), true) = (&single, r.is_single()) {
                single.instruct(r, &t, parts);
                return Ok(());
            }
            if let Some(attention) = MatrixAttention::new(r, &t, r.bind(rows)) {
                attention.attend(r, &t, r.bind(rows))?;
                return formed.map_or(Ok(()), |formed| formed.dispatch(r));
            }
            let (tile, tiles, splits, alike) = plan(r);
            let table = TILE_ROWS.iter().position(|&rows| rows == tile).unwrap_or(0) as u32;
            let (k, v) = free.map_or((0, 0), |(k, v)| (r.address(k), r.address(v)));
            let out = if splits == 1 { to } else { parts };
            let (is_formed, [form_numbers, form_scales]) = FormedHeads::arguments(formed, r);
            let addresses = [r.call(), r.address(from), k, v, r.address(out), offset, form_numbers, form_scales];
            let numbers = [heads, kv_heads, window, splits, usize::from(alike)].map(|n| n as u32);
            let numbers = [&numbers[..], &[scale.to_bits(), cap.to_bits()]].concat();
            let constants = [kind, masked, dim as u32, tile as u32, share as u32, table, is_formed];
            r.dispatch(kernels::ATTEND_TILES, &constants, [tiles, kv_heads, splits], &addresses, &numbers)?;
            if splits > 1 {
                r.inner_barrier();
                let rows = r.bind(rows);
                let numbers = [rows, heads, splits].map(|n| n as u32);
                let addresses = [r.call(), r.address(parts), r.address(to), form_numbers, form_scales];
                r.dispatch(kernels::ATTEND_MERGE, &[dim as u32, is_formed], [rows, heads, 1], &addresses, &numbers)?;
            }
            Ok(())
        });
    }

    pub(super) fn short_conv(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        let OpKind::ShortConv { x, weight, bias, slot, activation } = op else { unreachable!("a short convolution") };
        let (x, y) = (self.view(x), self.result(path));
        let (channels, kernel) = (x.width(), self.program.weights[weight].shape[1]);
        let (weight, bias) = (self.plain(Some(weight)), self.plain(bias.as_ref()));
        let function = activation.map_or(99, function);
        let slot = slot.as_ref().map(|name| self.slots.place(name));
        let number = slot.map_or(NONE, |place| self.slots.recurrent_number(place) as u32);
        let (from, to, rows, per_row) = (x.buffer, y.buffer, x.shape[0], x.rows_per_row());
        let mut writes = buffers([to]);
        writes.extend(slot.map(Resource::Slot));
        let group = self.single.group();
        self.step(buffers([from]), writes, move |r| {
            let rows = r.bind(rows);
            if r.is_single() && rows == 1 && per_row == 1 && number != NONE {
                let addresses = [r.address(from), weight, bias, r.address(to)];
                let numbers = [channels as u32, kernel as u32, number, function];
                let instruction = Instruction::new(Operation::ShortConv, channels.div_ceil(group), &addresses, &numbers);
                r.instruct(instruction.needing(Needs::function(function)));
                return Ok(());
            }
            let addresses = [r.call(), r.address(from), weight, bias, r.address(to), 0];
            let numbers = [rows as u32, channels as u32, kernel as u32, number, per_row];
            r.flat(kernels::SHORT_CONV, &[0, function], rows * channels, 256, &addresses, &numbers)?;
            if number != NONE && kernel > 1 {
                let count = r.segments * (kernel - 1) * channels;
                r.flat(kernels::SHORT_CONV, &[1, 99], count, 256, &addresses, &numbers)?;
            }
            Ok(())
        });
        self.define(path, y);
        Ok(())
    }

    pub(super) fn gated_delta(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        let OpKind::GatedDelta { q, k, v, a, b, a_log, dt_bias, slot, scale, eps } = op else { unreachable!("a delta rule") };
        let [q, k, v, a, b] = [q, k, v, a, b].map(|name| self.view(name));
        let (key_heads, key_dim) = (Self::fixed(q.shape[1]), q.width());
        let (heads, value_dim) = (Self::fixed(v.shape[1]), v.width());
        let [a_log, dt_bias] = [a_log, dt_bias].map(|name| self.plain(Some(name)));
        let place = self.slots.place(slot);
        let number = self.slots.recurrent_number(place) as u32;
        let (y, rows, scale, eps) = (self.result(path), v.shape[0], *scale, *eps);
        let width = 2 * key_dim + value_dim + 2;
        let bytes = self.bytes(&[rows, heads.into(), width.into()]);
        let (made, to) = (self.buffer(bytes), y.buffer);
        let inputs = [&q, &k, &v, &a, &b].map(|view| view.buffer);
        let (first, single) = (self.steps.len(), rows == Dim::Symbol(Symbol::T));
        self.step(buffers(inputs), vec![Resource::Buffer(made), Resource::Slot(place)], move |r| {
            let rows = r.bind(rows);
            let [q, k, v, a, b] = inputs.map(|buffer| r.address(buffer));
            let addresses = [r.call(), q, k, v, a, b, a_log, dt_bias, r.address(made)];
            let numbers = [rows, heads, key_heads, key_dim, value_dim].map(|n| n as u32);
            let numbers = [&numbers[..], &[number, scale.to_bits(), eps.to_bits()]].concat();
            let [b, c] = fold(rows);
            r.dispatch(kernels::DELTA_ROWS, &[], [heads, b, c], &addresses, &numbers)
        });
        self.steps[first].left_out = single;
        let reads = [made].into_iter().chain(inputs).map(Resource::Buffer).collect();
        self.step(reads, vec![Resource::Buffer(to), Resource::Slot(place)], move |r| {
            if r.is_single() && single {
                let [q, k, v, a, b] = inputs.map(|buffer| r.address(buffer));
                let numbers = [heads, key_heads, key_dim, value_dim].map(|n| n as u32);
                let numbers = [&numbers[..], &[number, scale.to_bits(), eps.to_bits()]].concat();
                let groups = heads * value_dim.div_ceil(DELTA_COLUMNS);
                r.instruct(Instruction::new(Operation::Delta, groups, &[q, k, v, a, b, a_log, dt_bias, r.address(to)], &numbers));
                return Ok(());
            }
            let addresses = [r.call(), r.address(made), r.address(to), 0, 0];
            let numbers = [0, heads as u32, value_dim as u32, number];
            let (share, columns) = kernels::delta_share(r.adapter(), key_dim);
            let groups = [heads, value_dim.div_ceil(columns), r.segments];
            r.dispatch(kernels::DELTA, &[key_dim as u32, 0, share], groups, &addresses, &numbers)
        });
        self.define(path, y);
        Ok(())
    }

    pub(super) fn conv2d(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        let OpKind::Conv2d { x, weight, bias, stride } = op else { unreachable!("a convolution") };
        let (x, y) = (self.view(x), self.result(path));
        let shape = &self.program.weights[weight].shape;
        let (outputs, kernel, inputs) = (shape[0], shape[1], shape[3]);
        let (weight, bias, stride) = (self.plain(Some(weight)), self.plain(bias.as_ref()), *stride);
        let (from, to, width, out) = (x.buffer, y.buffer, x.shape[1], y.shape.clone());
        let per_row = x.rows_per_row();
        self.step(buffers([from]), buffers([to]), move |r| {
            let (out_rows, out_width) = (r.bind(out[0]), r.bind(out[1]));
            let addresses = [r.call(), r.address(from), weight, bias, r.address(to)];
            let numbers = [out_rows, r.bind(width), inputs, out_width, outputs, kernel, stride].map(|n| n as u32);
            let numbers = [&numbers[..], &[per_row]].concat();
            r.flat(kernels::CONV2D, &[], out_rows * out_width * outputs, 256, &addresses, &numbers)
        });
        self.define(path, y);
        Ok(())
    }

    pub(super) fn pool(&mut self, path: &Name, x: &Name, size: usize) -> Result<(), DeviceError> {
        let (x, y) = (self.view(x), self.result(path));
        let (from, to, rows, inner, per_row) = (x.buffer, y.buffer, y.shape[0], y.shape[1..].to_vec(), x.rows_per_row());
        self.step(buffers([from]), buffers([to]), move |r| {
            let (rows, width) = (r.bind(rows), r.volume(&inner));
            let numbers = [rows as u32, width as u32, size as u32, per_row];
            r.flat(kernels::POOL, &[], rows * width, 256, &[r.call(), r.address(from), r.address(to)], &numbers)
        });
        self.define(path, y);
        Ok(())
    }
}
