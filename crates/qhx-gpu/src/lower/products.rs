//! Look-ups and products with weights.

use super::{Lowering, Prepared, View, buffers, simple::function};
use crate::{
    kernels,
    recorder::{Recorder, Resource},
};
use qhx_ir::{ActivationForm, Clip, DeviceError, Dim, Name, OpKind};

/// Weight rows of a workgroup of `linear.comp`.
const TEAM_OUTPUTS: usize = 16;

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

    /// Rows as they enter a product: as they are where that will do, else made once for all products that read them so.
    fn prepared(&mut self, x: &View, form: ActivationForm, clip: Option<[f32; 2]>) -> Prepared {
        let width = x.width();
        let [low, high] = clip.unwrap_or([f32::NEG_INFINITY, f32::INFINITY]);
        if form == ActivationForm::F32 && width % 32 == 0 && low == f32::NEG_INFINITY && high == f32::INFINITY {
            return Prepared { numbers: x.buffer, scales: None, stride: width };
        }
        let key = (x.buffer, width, form, [low, high].map(f32::to_bits));
        if let Some(&prepared) = self.prepared.get(&key) {
            return prepared;
        }
        let (blocks, outer) = (width.div_ceil(32), x.outer().to_vec());
        let rows = self.bytes(&outer) / 4;
        let (number_bytes, scales) = match form {
            ActivationForm::F32 | ActivationForm::F16 => (4, 0),
            ActivationForm::I8Row => (1, 1),
            ActivationForm::I8Block32 => (1, blocks),
        };
        let constant = match form {
            ActivationForm::F32 => 0,
            ActivationForm::F16 => 1,
            ActivationForm::I8Row => 2,
            ActivationForm::I8Block32 => 3,
        };
        let numbers = self.buffer(rows * 32 * (blocks * number_bytes) as u64);
        let scales = (scales > 0).then(|| self.buffer(4 * rows * scales as u64));
        let from = x.buffer;
        let writes = [numbers].into_iter().chain(scales).map(Resource::Buffer).collect();
        self.step(buffers([from]), writes, move |r| {
            let rows = r.volume(&outer);
            let addresses = [r.address(from), r.address(numbers), scales.map_or(0, |s| r.address(s))];
            r.flat(kernels::PREPARE, &[constant], rows, 1, &addresses, &[rows as u32, width as u32, low.to_bits(), high.to_bits()])
        });
        let prepared = Prepared { numbers, scales, stride: blocks * 32 };
        self.prepared.insert(key, prepared);
        prepared
    }

    pub(super) fn linear(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        let OpKind::Linear { x, weight, bias, activation, clip } = op else { unreachable!("a linear") };
        let (x, m, bias) = (self.view(x), self.matrix(weight), self.plain(bias.as_ref()));
        let p = self.prepared(&x, *activation, clip.as_ref().map(|Clip { input, .. }| *input));
        let y = self.result(path);
        let [low, high] = clip.map_or([f32::NEG_INFINITY, f32::INFINITY], |clip| clip.output);
        let (to, outer, form) = (y.buffer, x.outer().to_vec(), form_constant(*activation));
        let reads = [p.numbers].into_iter().chain(p.scales).map(Resource::Buffer).collect();
        self.step(reads, buffers([to]), move |r: &mut Recorder<'_>| {
            let rows = r.volume(&outer);
            let together = [1, 2, 4, 8].into_iter().find(|&n| n >= rows).unwrap_or(8);
            let constants = [&m.constants()[..], &[form, together as u32, 1, TEAM_OUTPUTS as u32]].concat();
            let addresses =
                [r.address(p.numbers), p.scales.map_or(0, |s| r.address(s)), m.data, m.scales, m.minima, bias, 0, r.address(to)];
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
            let groups = [m.rows.div_ceil(TEAM_OUTPUTS), rows.div_ceil(together), 1];
            r.dispatch(kernels::LINEAR, &constants, groups, &addresses, &numbers)
        });
        self.define(path, y);
        Ok(())
    }

    pub(super) fn experts(&mut self, path: &Name, op: &OpKind) -> Result<(), DeviceError> {
        let OpKind::Experts { x, experts, weights, gate, up, down, activation, form } = op else { unreachable!("experts") };
        let (x, chosen, factors) = (self.view(x), self.view(experts), self.view(weights));
        let [gate, up, down] = [gate, up, down].map(|name| self.matrix(name));
        let (hidden, ffn, choices) = (gate.columns, down.columns, chosen.width());
        let count = down.rows / hidden;
        let rows = x.shape[0];
        let form_number = form_constant(*form);
        let p = self.prepared(&x, *form, None);
        let inner_bytes = self.bytes(&[rows, choices.into(), ffn.into()]);
        let inner = View { buffer: self.buffer(inner_bytes), shape: vec![rows, choices.into(), ffn.into()], dtype: x.dtype };
        let (at, to) = (chosen.buffer, inner.buffer);
        let constants = [&gate.constants()[..], &[form_number, 1, 1, 0, function(*activation)]].concat();
        let reads = [p.numbers, at].into_iter().chain(p.scales).map(Resource::Buffer).collect();
        self.step(reads, buffers([to]), move |r| {
            let pairs = r.bind(rows) * choices;
            let addresses = [
                r.address(p.numbers),
                p.scales.map_or(0, |s| r.address(s)),
                gate.data,
                up.data,
                gate.scales,
                up.scales,
                gate.minima,
                up.minima,
                r.address(at),
                0,
                r.address(to),
            ];
            let numbers = [hidden, p.stride, ffn, count, choices].map(|n| n as u32);
            let numbers = [&numbers[..], &[gate.data_bytes, gate.scale_bytes, gate.min_bytes]].concat();
            let [b, c] = crate::recorder::fold(pairs);
            r.dispatch(kernels::EXPERTS, &constants, [ffn.div_ceil(16), b, c], &addresses, &numbers)
        });
        let p = self.prepared(&inner, *form, None);
        let y = self.result(path);
        let (by, to) = (factors.buffer, y.buffer);
        let constants = [&down.constants()[..], &[form_number, 1, 1, 1, 0]].concat();
        let reads = [p.numbers, at, by].into_iter().chain(p.scales).map(Resource::Buffer).collect();
        self.step(reads, buffers([to]), move |r| {
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
                r.address(to),
            ];
            let numbers = [ffn, p.stride, hidden, count, choices].map(|n| n as u32);
            let numbers = [&numbers[..], &[down.data_bytes, down.scale_bytes, down.min_bytes]].concat();
            let [b, c] = crate::recorder::fold(r.bind(rows));
            r.dispatch(kernels::EXPERTS, &constants, [hidden.div_ceil(16), b, c], &addresses, &numbers)
        });
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

/// The form of rows as `product.glsl` names it.
fn form_constant(form: ActivationForm) -> u32 {
    match form {
        ActivationForm::F32 | ActivationForm::F16 => 0,
        ActivationForm::I8Row => 1,
        ActivationForm::I8Block32 => 2,
    }
}
