//! Look-ups and products with weights.

use super::{
    Lowering, View, buffers,
    fusion::reads_of,
    matrices::{Mixture, Operands, Small},
    simple::{GATED, function},
    single::{Experts, Product},
};
use crate::{
    kernels,
    recorder::{MOST_GROUPS, Recorder, Resource},
    vulkan::Kind,
    weights::Matrix,
};
use qhx_ir::{ActivationForm, DeviceError, Dim, Name, OpKind};

impl Lowering<'_> {
    pub(super) fn embed(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        let (ids, factor, table, scale, taps) = match op {
            OpKind::Embed { ids, table, scale } => (ids, None, table, *scale, 0),
            OpKind::Interpolate { index, factor, table } => (index, Some(factor), table, 1.0, self.view(index).width()),
            _ => unreachable!("a look-up"),
        };
        let (ids, factor, m, y) = (self.view(ids), factor.map(|f| self.view(f).buffer), self.matrix(table), self.result(path));
        let constants = [&m.constants()[..], &[taps as u32]].concat();
        let (from, to, rows) = (ids.buffer, y.buffer, ids.shape[0]);
        let reads = [from].into_iter().chain(factor).map(Resource::Buffer).collect();
        self.step(reads, buffers([to]), move |r| {
            let rows = r.bind(rows);
            let addresses = [r.address(from), factor.map_or(0, |f| r.address(f)), m.data, m.scales, m.minima, r.address(to)];
            let numbers = [rows as u32, m.columns as u32, m.data_bytes, m.scale_bytes, m.min_bytes, scale.to_bits()];
            r.flat(kernels::EMBED, &constants, rows * m.columns, 256, &addresses, &numbers)
        });
        self.define(path, y);
        Ok(())
    }

    pub(super) fn linear(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        let OpKind::Linear { x, weight, bias, activation, clip } = op else { unreachable!("a linear") };
        let (x, m, bias) = (self.view(x), self.matrix(weight), self.plain(bias.as_ref()));
        let steps = self.steps.len();
        let p = self.prepared(&x, *activation, clip.as_ref());
        let made = steps..self.steps.len();
        let added = self.added(path);
        let path = added.as_ref().map_or(path, |(sum, _)| sum);
        let y = self.result(path);
        let added = added.as_ref().map(|(_, view)| view.buffer);
        let [low, high] = clip.map_or([f32::NEG_INFINITY, f32::INFINITY], |clip| clip.output);
        let (to, outer, form) = (y.buffer, x.outer().to_vec(), form_constant(*activation));
        let small = Small::new(self.matrices, &m, *activation).filter(|small| small.takes_up_to(self.bytes(&outer) as usize / 4));
        let split = small.filter(|small| small.is_split()).map(|small| self.split(p, &outer, small));
        let mut reads = reads_of(p);
        reads.extend(split.into_iter().flat_map(reads_of));
        reads.extend(added.map(Resource::Buffer));
        let bounds = clip.map_or([f32::NEG_INFINITY, f32::INFINITY], |clip| clip.input);
        let single = self.single_product(&x, m, *activation, bounds, 1, to);
        let single = single.map(|product| Product { biases: [bias, 0], added, clip: [low, high], ..product });
        if let Some(product) = &single {
            reads.extend(product.reads());
            // The product itself brings the row into its form.
            self.steps[made].iter_mut().for_each(|step| step.left_out = true);
            self.note_product(product);
        }
        self.step(reads, buffers([to]), move |r: &mut Recorder<'_>| {
            if let (Some(product), true) = (single, r.is_single()) {
                r.instruct(product.instruction(r));
                return Ok(());
            }
            let rows = r.volume(&outer);
            let together = [1, 2, 4, 8].into_iter().find(|&n| n >= rows).unwrap_or(8);
            let (ahead, team) = shape_of_work(r, together, m.rows, rows.div_ceil(together));
            // Rows that were loaded meet several weight rows.
            let slots = together.div_ceil(2).min(team / 4);
            let place = |buffer: Option<usize>| buffer.map_or(0, |buffer| r.address(buffer));
            let addresses = [r.address(p.numbers), place(p.scales), m.data, m.scales, m.minima, bias, place(added), r.address(to)];
            if let Some(small) = small.filter(|small| small.is_taken(r, rows)) {
                let operands = Operands {
                    x: split.unwrap_or(p),
                    call_rows: rows,
                    rows,
                    outputs: m.rows,
                    bias,
                    added,
                    clip: [low, high],
                    y: to,
                    groups: None,
                };
                return small.product(r, m, operands);
            }
            let constants = [&m.constants()[..], &[form, together as u32, slots as u32, team as u32, 0, ahead]].concat();
            let numbers = [
                rows as u32,
                m.columns as u32,
                p.stride as u32,
                m.rows as u32,
                m.data_bytes,
                m.scale_bytes,
                m.min_bytes,
                low.to_bits(),
                high.to_bits(),
            ];
            let groups = [m.rows.div_ceil(team), rows.div_ceil(together), 1];
            r.dispatch(kernels::LINEAR, &constants, groups, &addresses, &numbers)
        });
        self.define(path, y);
        Ok(())
    }

    pub(super) fn experts(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        let OpKind::Experts { x, experts, weights, gate, up, down, activation, form, bias, held } = op else { unreachable!("experts") };
        let (x, chosen, factors) = (self.view(x), self.view(experts), self.view(weights));
        let places = held.as_ref().map(|held| self.view(held).buffer);
        let [gate, up, down] = [gate, up, down].map(|name| self.matrix(name));
        let biases = bias.as_ref().map_or([0; 2], |bias| [&bias.gate, &bias.up].map(|name| self.plain(Some(name))));
        let (hidden, ffn, choices) = (gate.columns, down.columns, chosen.width());
        let count = down.rows / hidden;
        let rows = x.shape[0];
        let form_number = form_constant(*form);
        let steps = self.steps.len();
        let p = self.prepared(&x, *form, None);
        let made = steps..self.steps.len();
        let inner_bytes = self.bytes(&[rows, choices.into(), ffn.into()]);
        let inner = View { buffer: self.buffer(inner_bytes), shape: vec![rows, choices.into(), ffn.into()], dtype: x.dtype };
        let (at, to) = (chosen.buffer, inner.buffer);
        let act = function(*activation);
        let free = [f32::NEG_INFINITY, f32::INFINITY];
        let mut chosen_experts = Experts { count, choices, chosen: at, places, factors: None };
        let alike = gate.encoding == up.encoding;
        let single = alike.then(|| self.single_product(&x, gate, *form, free, 1, to)).flatten().map(|product| Product {
            matrices: [gate, up],
            outputs: ffn,
            pair: Some(act),
            biases,
            experts: Some(chosen_experts),
            ..product
        });
        if single.is_some() {
            self.steps[made].iter_mut().for_each(|step| step.left_out = true);
        }
        let mixture = Mixture { gate, up, down, biases, form: *form, function: act, rows, choices, count, chosen: at, places };
        let grouped = self.group(mixture, p, to);
        let is_grouped = move |r: &Recorder<'_>| grouped.is_some_and(|grouped| grouped.takes(r));
        // Gate and up together, or one of them.
        let products = |own: &mut Self, [first, second]: [Matrix; 2], biases: [u64; 2], kind: u32, to: usize| {
            let mut reads: Vec<Resource> = [p.numbers, at].into_iter().chain(p.scales).chain(places).map(Resource::Buffer).collect();
            reads.extend(single.iter().flat_map(|product| product.reads()));
            own.step(reads, buffers([to]), move |r| {
                if let (Some(product), true) = (single, r.is_single()) {
                    r.instruct(product.instruction(r));
                    return Ok(());
                }
                if is_grouped(r) {
                    return Ok(());
                }
                let pairs = r.bind(rows) * choices;
                let addresses = [
                    r.address(p.numbers),
                    p.scales.map_or(0, |s| r.address(s)),
                    first.data,
                    second.data,
                    first.scales,
                    second.scales,
                    first.minima,
                    second.minima,
                    r.address(at),
                    biases[0],
                    biases[1],
                    places.map_or(0, |places| r.address(places)),
                    r.address(to),
                ];
                let (ahead, team) = shape_of_work(r, 1, ffn, pairs);
                let [team_rows, choices, count] = [team, choices, count].map(|n| n as u32);
                let constants = [&first.constants()[..], &[form_number, 1, 1, kind, act, ahead, team_rows, choices, count]].concat();
                let numbers = [hidden, p.stride, ffn].map(|n| n as u32);
                let numbers = [&numbers[..], &[first.data_bytes, first.scale_bytes, first.min_bytes]].concat();
                let [b, c] = crate::recorder::fold(pairs);
                r.dispatch(kernels::EXPERTS, &constants, [ffn.div_ceil(team), b, c], &addresses, &numbers)
            });
        };
        if alike {
            products(self, [gate, up], biases, 0, to);
        } else {
            let [gates, ups] = [self.buffer(inner_bytes), self.buffer(inner_bytes)];
            products(self, [gate, gate], [biases[0]; 2], 2, gates);
            products(self, [up, up], [biases[1]; 2], 2, ups);
            self.step(buffers([gates, ups]), buffers([to]), move |r| {
                if is_grouped(r) {
                    return Ok(());
                }
                let count = r.bind(rows) * choices * ffn;
                let arguments = [count as u32, 1, 0, 0];
                r.flat(kernels::MAP, &[GATED, act], count, 256, &[r.address(gates), r.address(ups), r.address(to)], &arguments)
            });
        }
        let steps = self.steps.len();
        let p = self.prepared(&inner, *form, None);
        let added = self.added(path);
        let path = added.as_ref().map_or(path, |(sum, _)| sum);
        let y = self.result(path);
        let added = added.as_ref().map(|(_, view)| view.buffer);
        let (by, to) = (factors.buffer, y.buffer);
        chosen_experts.factors = Some(by);
        let single = single.and_then(|_| self.single_product(&inner, down, *form, free, choices, to));
        let single = single.map(|product| Product { outputs: hidden, experts: Some(chosen_experts), added, ..product });
        let reads = [p.numbers, at, by].into_iter().chain(p.scales).chain(added).chain(places);
        let mut reads: Vec<Resource> = reads.map(Resource::Buffer).collect();
        if let Some(product) = &single {
            reads.extend(product.reads());
            self.steps[steps..].iter_mut().for_each(|step| step.left_out = true);
        }
        self.step(reads, buffers([to]), move |r| {
            if let (Some(product), true) = (single, r.is_single()) {
                r.instruct(product.instruction(r));
                return Ok(());
            }
            if is_grouped(r) {
                return Ok(());
            }
            let addresses = [
                r.address(p.numbers),
                p.scales.map_or(0, |s| r.address(s)),
                down.data,
                0,
                down.scales,
                0,
                down.minima,
                0,
                r.address(at),
                r.address(by),
                added.map_or(0, |added| r.address(added)),
                places.map_or(0, |places| r.address(places)),
                r.address(to),
            ];
            let (ahead, team) = shape_of_work(r, 1, hidden, r.bind(rows));
            let [team_rows, choices, count] = [team, choices, count].map(|n| n as u32);
            let constants = [&down.constants()[..], &[form_number, 1, 1, 1, 0, ahead, team_rows, choices, count]].concat();
            let numbers = [ffn, p.stride, hidden].map(|n| n as u32);
            let numbers = [&numbers[..], &[down.data_bytes, down.scale_bytes, down.min_bytes]].concat();
            let [b, c] = crate::recorder::fold(r.bind(rows));
            r.dispatch(kernels::EXPERTS, &constants, [hidden.div_ceil(team), b, c], &addresses, &numbers)
        });
        if let Some(grouped) = grouped {
            self.ungroup(grouped, p, by, added, to);
        }
        self.define(path, y);
        Ok(())
    }

    /// A dimension that is a number.
    pub(super) fn fixed(dim: Dim) -> usize {
        match dim {
            Dim::Fixed(n) => n,
            _ => unreachable!("checked: a number"),
        }
    }
}

/// Workgroups that keep a large GPU busy.
const BUSY_GROUPS: usize = 264;

/// How many chunks of a weight row are loaded ahead, and how many weight rows a workgroup takes, where so many rows of the call meet them at once, in so many turns.
fn shape_of_work(r: &Recorder<'_>, together: usize, outputs: usize, turns: usize) -> (u32, usize) {
    // Software compiles what is unrolled for long, and has nothing to wait for. Few weight rows in a workgroup keep all processors busy; with many rows of the
    // call there are enough workgroups.
    let few = together <= 2 && r.adapter().kind != Kind::Software;
    // A grid has at most 65535 workgroups in a row.
    let team = 16.max(outputs.div_ceil(MOST_GROUPS).next_power_of_two());
    let idle = outputs.div_ceil(team) * turns < BUSY_GROUPS && r.adapter().kind != Kind::Software;
    let team = if (few && outputs <= 1 << 17) || idle { 4 } else { team };
    (if few { 4 } else { 1 }, team)
}

/// The form of rows as `product.glsl` names it.
pub(super) fn form_constant(form: ActivationForm) -> u32 {
    match form {
        ActivationForm::F32 | ActivationForm::F16 => 0,
        ActivationForm::I8Row => 1,
        ActivationForm::I8Block32 => 2,
    }
}
