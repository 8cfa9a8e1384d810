//! The type of each op's result, from the types of what it reads.

use super::{Checker, Reason, ValueType};
use crate::{ActivationForm, DType, Dim, Mask, Name, Op, OpKind, Routing, Shape, Slot, dim, dim::show_shape, hadamard};

impl<'a> Checker<'a> {
    pub(super) fn infer(&mut self, op: &'a Op) -> Reason<Vec<ValueType>> {
        let f32s = |shape: Shape| Ok(vec![ValueType { dtype: DType::F32, shape }]);
        match &op.op {
            OpKind::Embed { ids, table, scale } => {
                finite("scale", *scale)?;
                let mut shape = self.integers(ids, 1)?.clone();
                if shape.len() != 1 {
                    return Err(format!("`{ids}` must have rank 1"));
                }
                shape.push(Dim::Fixed(self.matrix(table, 2, None)?[1]));
                f32s(shape)
            }
            OpKind::Interpolate { index, factor, table } => {
                let (index_shape, factor_shape) = (self.integers(index, 2)?, self.floats(factor, 2)?);
                if index_shape != factor_shape || index_shape.len() != 2 {
                    return Err("index and factor must both be [rows, taps]".into());
                }
                let [rows, width] = self.matrix(table, 2, None)?[..] else { return Err("the table must have rank 2".into()) };
                self.chosen_from(index, rows)?;
                f32s(vec![index_shape[0], Dim::Fixed(width)])
            }
            OpKind::Linear { x, weight, bias, activation, clip } => {
                let out = self.matrix(weight, 2, Some(self.last(x)?))?[0];
                self.product(weight, *activation)?;
                bias.iter().try_for_each(|bias| self.plain_weight(bias, &[out]))?;
                if clip.is_some_and(|c| [c.input, c.output].iter().any(|[low, high]| low.is_nan() || high.is_nan() || low > high)) {
                    return Err(format!("clip bounds {clip:?} must be low ≤ high"));
                }
                let mut shape = self.floats(x, 2)?.clone();
                shape.pop();
                shape.push(Dim::Fixed(out));
                f32s(shape)
            }
            OpKind::RmsNorm { x, weight, eps } => {
                positive("eps", *eps)?;
                let n = self.last(x)?;
                weight.iter().try_for_each(|w| self.plain_weight(w, &[n]))?;
                f32s(self.floats(x, 2)?.clone())
            }
            OpKind::LayerNorm { x, weight, bias, eps } => {
                positive("eps", *eps)?;
                let n = self.last(x)?;
                self.plain_weight(weight, &[n])?;
                bias.iter().try_for_each(|b| self.plain_weight(b, &[n]))?;
                f32s(self.floats(x, 2)?.clone())
            }
            OpKind::Rope { x, positions, rotary } => {
                let (rows, heads, dim) = self.heads(x)?;
                let streams = match self.integers(positions, 2)?[..] {
                    [Dim::Fixed(streams), r] if r == rows => streams,
                    ref other => return Err(format!("`{positions}` must be [streams, {rows}], found {}", show_shape(other))),
                };
                let rotary_data =
                    self.program.rotaries.get(rotary).ok_or_else(|| format!("names the rotary `{rotary}`, which is not declared"))?;
                if rotary_data.streams.iter().any(|&s| s >= streams) {
                    return Err(format!("rotary `{rotary}` uses streams {:?}, `{positions}` has {streams}", rotary_data.streams));
                }
                match rotary_data.blocks.last() {
                    Some(&(start, length)) if start + length > dim => Err(format!("rotary `{rotary}` reaches beyond head size {dim}")),
                    _ => f32s(vec![rows, Dim::Fixed(heads), Dim::Fixed(dim)]),
                }
            }
            OpKind::Attend { .. } => f32s(self.infer_attend(op)?),
            OpKind::ShortConv { x, weight, bias, slot, .. } => {
                let shape = self.floats(x, 2)?.clone();
                let channels = self.last(x)?;
                let kernel = self.matrix(weight, 2, None)?[1];
                self.plain_weight(weight, &[channels, kernel])?;
                bias.iter().try_for_each(|b| self.plain_weight(b, &[channels]))?;
                if shape.len() != 2 || rows_of(&shape).is_none() {
                    return Err(format!("`{x}` must be [rows, channels], found {}", show_shape(&shape)));
                }
                if let Some(name) = slot {
                    let expected = Slot::Fifo { rows: kernel - 1, channels };
                    self.slot(name, |s| *s == expected, &format!("{expected:?}"))?;
                    self.written_once(name)?;
                }
                f32s(shape)
            }
            OpKind::GatedDelta { q, k, v, a, b, a_log, dt_bias, slot, scale, eps } => {
                finite("scale", *scale)?;
                positive("eps", *eps)?;
                let (rows, key_heads, key_dim) = self.heads(q)?;
                let (value_rows, heads, value_dim) = self.heads(v)?;
                if self.heads(k)? != (rows, key_heads, key_dim)
                    || value_rows != rows
                    || heads % key_heads != 0
                    || rows_of(&[rows]).is_none()
                {
                    return Err(format!("`{q}`, `{k}`, `{v}` do not fit: value heads must be a multiple of key heads, rows equal"));
                }
                for x in [a, b] {
                    if *self.floats(x, 2)? != [rows, Dim::Fixed(heads)] {
                        return Err(format!("`{x}` must be [{rows}, {heads}], found {}", show_shape(self.floats(x, 2)?)));
                    }
                }
                self.plain_weight(a_log, &[heads])?;
                self.plain_weight(dt_bias, &[heads])?;
                let expected = Slot::Delta { heads, key_dim, value_dim };
                self.slot(slot, |s| *s == expected, &format!("{expected:?}"))?;
                self.written_once(slot)?;
                f32s(vec![rows, Dim::Fixed(heads), Dim::Fixed(value_dim)])
            }
            OpKind::Route { scores, method } => {
                let experts = self.last(scores)?;
                let k = method.experts_per_row();
                if k == 0 || k > experts {
                    return Err(format!("cannot choose {k} of {experts} experts"));
                }
                if let Routing::SparseMixer { jitter } = method {
                    finite("jitter", *jitter)?;
                }
                let [rows, _] = self.floats(scores, 2)?[..] else { return Err(format!("`{scores}` must be [rows, experts]")) };
                let shape = vec![rows, Dim::Fixed(k)];
                self.routed.extend(op.outputs().into_iter().map(|name| (name, experts)));
                Ok([DType::I32, DType::F32].into_iter().map(|dtype| ValueType { dtype, shape: shape.clone() }).collect())
            }
            OpKind::Experts { x, experts, weights, gate, up, down, form, bias, held, .. } => {
                let hidden = self.last(x)?;
                let shape = self.floats(x, 2)?.clone();
                let up_shape = self.matrix(up, 3, Some(hidden))?;
                self.weight(gate, &up_shape)?;
                self.weight(down, &[up_shape[0], hidden, up_shape[1]])?;
                [gate, up, down].into_iter().try_for_each(|w| self.product(w, *form))?;
                bias.iter().flat_map(|bias| [&bias.gate, &bias.up]).try_for_each(|bias| self.plain_weight(bias, &up_shape[..2]))?;
                let experts_there = match held {
                    None => up_shape[0],
                    Some(held) => self.held(held)?,
                };
                self.chosen_from(experts, experts_there)?;
                let chosen = self.integers(experts, 2)?;
                if shape.len() != 2 || chosen.len() != 2 || chosen[0] != shape[0] || chosen != self.floats(weights, 2)? {
                    return Err(format!("`{experts}` and `{weights}` must be [{}, k]", shape[0]));
                }
                f32s(shape)
            }
            OpKind::GateAct { gate, up, .. } => f32s(self.same(gate, up)?),
            OpKind::Add { a, b } | OpKind::Mul { a, b } => f32s(self.same(a, b)?),
            OpKind::Activate { x, .. } => f32s(self.floats(x, 1)?.clone()),
            OpKind::Scale { x, factor, weight } => {
                finite("factor", *factor)?;
                let n = self.last(x)?;
                if let Some(weight) = weight {
                    self.plain_weight(weight, &[1]).or_else(|_| self.plain_weight(weight, &[n]))?;
                }
                f32s(self.floats(x, 1)?.clone())
            }
            OpKind::Hadamard { x } => {
                let width = self.last(x)?;
                match hadamard::exists(width) {
                    true => f32s(self.floats(x, 1)?.clone()),
                    false => {
                        let (odd, most) = (hadamard::factors(width).1, hadamard::LARGEST_ODD);
                        Err(format!("`{x}` has {width} numbers a row, whose odd factor {odd} is larger than {most}"))
                    }
                }
            }
            OpKind::Softcap { x, cap } => {
                positive("cap", *cap)?;
                f32s(self.floats(x, 1)?.clone())
            }
            OpKind::Clamp { x, low, high } => match low <= high {
                true => f32s(self.floats(x, 1)?.clone()),
                false => Err(format!("bounds {low}, {high} must be low ≤ high")),
            },
            OpKind::Concat { xs } => {
                let first = self.floats(xs.first().ok_or("needs at least one value")?, 2)?;
                let mut width = 0usize;
                for x in xs {
                    let shape = self.floats(x, 2)?;
                    if shape[..shape.len() - 1] != first[..first.len() - 1] {
                        return Err(format!("`{x}` {} does not fit {}", show_shape(shape), show_shape(first)));
                    }
                    width = width.checked_add(self.last(x)?).ok_or("result too large")?;
                }
                let mut shape = first.clone();
                shape.pop();
                shape.push(Dim::Fixed(width));
                f32s(shape)
            }
            OpKind::Slice { x, axis, start, length } => {
                let mut shape = self.floats(x, 2)?.clone();
                match shape.get(*axis) {
                    Some(&Dim::Fixed(n)) if *axis > 0 && *length > 0 && start.checked_add(*length).is_some_and(|end| end <= n) => {
                        shape[*axis] = Dim::Fixed(*length);
                        f32s(shape)
                    }
                    _ => Err(format!("cannot take {length} from {start} of dimension {axis} of {}", show_shape(&shape))),
                }
            }
            OpKind::Reshape { x, shape } => {
                let from = self.floats(x, 1)?;
                match dim::volume(from) == dim::volume(shape) && dim::volume(shape).is_some() {
                    true => f32s(shape.clone()),
                    false => Err(format!("{} cannot become {}", show_shape(from), show_shape(shape))),
                }
            }
            OpKind::Gather { x, rows } => {
                let mut shape = self.floats(x, 2)?.clone();
                match self.integers(rows, 1)?[..] {
                    [n] => shape[0] = n,
                    _ => return Err(format!("`{rows}` must have rank 1")),
                }
                f32s(shape)
            }
            OpKind::ScatterRows { x, rows, at } | OpKind::ScatterAddRows { x, rows, at } => {
                let (shape, new) = (self.floats(x, 2)?, self.floats(rows, 2)?);
                if shape[1..] != new[1..] || *self.integers(at, 1)? != [new[0]] {
                    return Err(format!("`{rows}` {} at `{at}` does not fit `{x}` {}", show_shape(new), show_shape(shape)));
                }
                f32s(shape.clone())
            }
            OpKind::Conv2d { x, weight, bias, stride } => {
                let kernel = self.matrix(weight, 4, None)?;
                self.plain_weight(weight, &kernel)?;
                bias.iter().try_for_each(|b| self.plain_weight(b, &kernel[..1]))?;
                if kernel[1] % 2 == 0 || kernel[1] != kernel[2] {
                    return Err(format!("kernel {}x{} must be square and odd", kernel[1], kernel[2]));
                }
                let shape = self.floats(x, 3)?;
                let (rows, width) = (rows_of(shape).and_then(|r| r.divide(*stride, true)), shape[1].divide(*stride, true));
                match (rows, width) {
                    (Some(rows), Some(width)) if shape[2..] == [Dim::Fixed(kernel[3])] => f32s(vec![rows, width, Dim::Fixed(kernel[0])]),
                    _ => Err(format!("`{x}` must be [rows, width, {}] for stride {stride}, found {}", kernel[3], show_shape(shape))),
                }
            }
            OpKind::Pool { x, size } => {
                let mut shape = self.floats(x, 2)?.clone();
                match rows_of(&shape).and_then(|rows| rows.divide(*size, false)) {
                    Some(rows) => shape[0] = rows,
                    None => return Err(format!("{} cannot be pooled by {size}", show_shape(&shape))),
                }
                f32s(shape)
            }
        }
    }

    fn infer_attend(&mut self, op: &'a Op) -> Reason<Shape> {
        let OpKind::Attend { q, kv, slot, mask, scale, softcap, relative_keys } = &op.op else { unreachable!("called for attend") };
        finite("scale", *scale)?;
        softcap.iter().try_for_each(|cap| positive("softcap", *cap))?;
        let (rows, heads, dim) = self.heads(q)?;
        if rows_of(&[rows]).is_none() {
            return Err(format!("the first dimension of `{q}` must be rows of the call (T or a quotient of it), found {rows}"));
        }
        let kv_heads = match kv {
            Some(kv) => {
                let (key_rows, kv_heads, key_dim) = self.heads(&kv.k)?;
                if self.heads(&kv.v)? != (key_rows, kv_heads, key_dim) || key_rows != rows || key_dim != dim {
                    return Err(format!("keys and values must be [{rows}, kv_heads, {dim}]"));
                }
                kv_heads
            }
            None => match slot.as_ref().and_then(|name| self.program.slots.get(name)) {
                Some(Slot::Kv { kv_heads, .. }) => *kv_heads,
                _ => return Err("without keys and values it needs a KV slot to read".into()),
            },
        };
        if heads % kv_heads != 0 {
            return Err(format!("{heads} query heads are no multiple of {kv_heads} key heads"));
        }
        if let Some(name) = slot {
            if rows != Dim::T {
                return Err(format!("an op with a slot must have T rows, found {rows}"));
            }
            let fits = |s: &Slot| matches!(s, Slot::Kv { kv_heads: k, head_dim: d, .. } if *k == kv_heads && *d == dim);
            let Slot::Kv { window, .. } = self.slot(name, fits, &format!("a KV slot of {kv_heads} x {dim}"))? else {
                return Err(format!("slot `{name}` must be a KV slot"));
            };
            match (mask, window) {
                (Mask::Full, _) => return Err("a full mask cannot have a slot".into()),
                (Mask::Causal, Some(_)) => return Err(format!("reads all rows of slot `{name}`, which keeps a window only")),
                (Mask::Window(wanted), Some(kept)) if wanted > kept => {
                    return Err(format!("window {wanted} is larger than slot `{name}` keeps ({kept})"));
                }
                _ => {}
            }
            match kv {
                Some(_) => self.written_once(name)?,
                None if !self.written.contains(name) => return Err(format!("reads slot `{name}` before any op writes it")),
                None => {}
            }
        }
        if *mask == Mask::Window(0) {
            return Err("a window of 0 sees nothing".into());
        }
        if let Some(table) = relative_keys {
            let shape = self.matrix(table, 3, Some(dim))?;
            self.plain_weight(table, &[shape[0], heads, dim])?;
        }
        Ok(vec![rows, Dim::Fixed(heads), Dim::Fixed(dim)])
    }

    fn value(&self, name: &Name) -> Reason<&ValueType> {
        self.types.get(name).ok_or_else(|| format!("reads `{name}`, which no input and no earlier op makes"))
    }

    /// The shape of an f32 value of at least `rank` dimensions.
    fn floats(&self, name: &Name, rank: usize) -> Reason<&Shape> {
        self.typed(name, DType::F32, rank)
    }

    fn integers(&self, name: &Name, rank: usize) -> Reason<&Shape> {
        self.typed(name, DType::I32, rank)
    }

    fn typed(&self, name: &Name, dtype: DType, rank: usize) -> Reason<&Shape> {
        let value = self.value(name)?;
        if value.dtype != dtype || value.shape.len() < rank {
            let found = show_shape(&value.shape);
            return Err(format!("`{name}` must be {dtype:?} of rank {rank} or more, found {:?} {found}", value.dtype));
        }
        Ok(&value.shape)
    }

    /// `[rows, heads, dim]` with fixed heads and dim.
    fn heads(&self, name: &Name) -> Reason<(Dim, usize, usize)> {
        match self.floats(name, 3)?[..] {
            [rows, Dim::Fixed(heads), Dim::Fixed(dim)] if heads > 0 && dim > 0 => Ok((rows, heads, dim)),
            ref other => Err(format!("`{name}` must be [rows, heads, dim], found {}", show_shape(other))),
        }
    }

    fn last(&self, name: &Name) -> Reason<usize> {
        match self.floats(name, 1)?.last() {
            Some(&Dim::Fixed(n)) if n > 0 => Ok(n),
            _ => Err(format!("the last dimension of `{name}` must be a number")),
        }
    }

    fn weight(&self, name: &Name, expected: &[usize]) -> Reason<()> {
        let weight = self.program.weights.get(name).ok_or_else(|| format!("names the weight `{name}`, which is not declared"))?;
        match weight.shape == expected {
            true => Ok(()),
            false => Err(format!("weight `{name}` must have shape {expected:?}, found {:?}", weight.shape)),
        }
    }

    /// A weight that is only ever read as plain numbers (norms, biases, convolutions).
    fn plain_weight(&self, name: &Name, expected: &[usize]) -> Reason<()> {
        self.weight(name, expected)?;
        match self.program.weights[name].encoding {
            encoding if encoding.is_float() => Ok(()),
            encoding => Err(format!("weight `{name}` must be f32, f16 or bf16 here, found {encoding}")),
        }
    }

    /// A weight of which only the last dimension is known; gives its other dimensions.
    fn matrix(&self, name: &Name, rank: usize, columns: Option<usize>) -> Reason<Vec<usize>> {
        let weight = self.program.weights.get(name).ok_or_else(|| format!("names the weight `{name}`, which is not declared"))?;
        if weight.shape.len() != rank || columns.is_some_and(|c| weight.shape[rank - 1] != c) {
            let wanted = columns.map_or("_".into(), |c| c.to_string());
            return Err(format!("weight `{name}` must have rank {rank} and last dimension {wanted}, found {:?}", weight.shape));
        }
        Ok(weight.shape.clone())
    }

    fn product(&self, weight: &Name, form: ActivationForm) -> Reason<()> {
        let encoding = self.program.weights[weight].encoding;
        match form.is_integer() && encoding.is_float() {
            true => Err(format!("activation form {form:?} needs an integer weight, `{weight}` is {encoding}")),
            false => Ok(()),
        }
    }

    /// Row numbers that a `route` makes are below its number of experts, which must not be beyond `rows`. (Those of inputs are checked at the call.)
    fn chosen_from(&self, index: &Name, rows: usize) -> Reason<()> {
        match self.routed.get(index) {
            Some(&experts) if experts > rows => Err(format!("`{index}` chooses among {experts} rows, there are {rows}")),
            _ => Ok(()),
        }
    }

    /// Of how many experts an input says where they are.
    fn held(&self, name: &Name) -> Reason<usize> {
        let shape = self.integers(name, 1)?;
        match shape[..] {
            [Dim::Fixed(experts)] if self.program.inputs.iter().any(|input| input.name == *name) => Ok(experts),
            _ => Err(format!("`{name}` must be an input [experts], found {}", show_shape(shape))),
        }
    }

    fn slot(&self, name: &Name, expected: impl Fn(&Slot) -> bool, what: &str) -> Reason<&'a Slot> {
        let slot = self.program.slots.get(name).ok_or_else(|| format!("names the slot `{name}`, which is not declared"))?;
        match expected(slot) {
            true => Ok(slot),
            false => Err(format!("slot `{name}` must be {what}, found {slot:?}")),
        }
    }

    fn same(&self, a: &Name, b: &Name) -> Reason<Shape> {
        let (left, right) = (self.floats(a, 1)?, self.floats(b, 1)?);
        match left == right {
            true => Ok(left.clone()),
            false => Err(format!("`{a}` {} and `{b}` {} must have one shape", show_shape(left), show_shape(right))),
        }
    }

    fn written_once(&mut self, slot: &'a Name) -> Reason<()> {
        match self.written.insert(slot) {
            true => Ok(()),
            false => Err(format!("slot `{slot}` has another writer already")),
        }
    }
}

/// The first dimension where it stands for rows of the call.
fn rows_of(shape: &[Dim]) -> Option<Dim> {
    shape.first().copied().filter(|d| d.rows_per_row().is_some())
}

fn finite(what: &str, x: f32) -> Reason<()> {
    if x.is_finite() { Ok(()) } else { Err(format!("{what} must be finite, found {x}")) }
}

fn positive(what: &str, x: f32) -> Reason<()> {
    if x.is_finite() && x > 0.0 { Ok(()) } else { Err(format!("{what} must be positive, found {x}")) }
}
