//! Shapes: the result of an operation must have the shapes of its outputs.

use super::{Checked, Operation};
use crate::graph::Role;

impl Operation<'_> {
    pub(super) fn check_shapes(&self) -> Checked {
        let made = self.made_shapes()?;
        for (shape, tensor) in made.iter().zip(&self.outputs) {
            let found: Vec<u64> = tensor.dims.iter().map(|&dim| u64::from(dim)).collect();
            if *shape != found {
                let inputs: Vec<&[u32]> = self.inputs.iter().map(|tensor| &tensor.dims[..]).collect();
                return Err(format!("computes {shape:?} from {inputs:?}, but `{}` is {found:?}", tensor.name));
            }
        }
        Ok(())
    }

    /// The outputs' shapes.
    fn made_shapes(&self) -> Checked<Vec<Vec<u64>>> {
        let x = self.shape(0);
        let one = |shape| Ok(vec![shape]);
        match self.node.kind {
            "FullyConnected" => one(self.fully_connected()?),
            "MatMul" => one(self.mat_mul()?),
            "Conv2d" | "DepthWiseConv2d" => one(self.convolution()?),
            "RmsNorm" | "LayerNorm" | "L2Norm" => self.norm().map(|()| vec![x]),
            "Softmax" | "CumulativeSum" => self.axis("axis", x.len()).map(|_| vec![x]),
            "ElementWiseSelect" => one(broadcast(&self.shape(0), &broadcast(&self.shape(1), &self.shape(2))?)?),
            _ if self.inputs.len() == 2 && self.node.kind.starts_with("ElementWise") => one(broadcast(&x, &self.shape(1))?),
            "Reshape" => self.reshape(&x).map(|shape| vec![shape]),
            "Transpose" => one(self.transpose(&x)?),
            "Concat" => one(self.concat()?),
            "Split" => self.split(&x),
            "StridedSlice" => one(self.slice(&x)?),
            "Gather" => one(self.gather(&x)?),
            "ScatterNd" => self.scatter_nd(&x).map(|()| vec![x]),
            "ScatterElements" => self.scatter_elements(&x).map(|()| vec![x]),
            "Tile" => one(self.tile(&x)?),
            "ExpandDims" => one(self.with_axis(&x, 1)?),
            "Pack" => one(self.pack(&x)?),
            "Pad" => one(self.pad(&x)?),
            "ReduceMean" | "ReduceSum" | "ReduceMax" => one(self.reduce(&x, self.list("axes").map_or(&[], |(_, axes)| axes))?),
            "Argmax" => one(self.reduce(&x, &[self.number("axis")])?),
            "TopK" => self.top_k(&x),
            "RotaryEmbedding" => self.rotary(&x).map(|()| vec![x]),
            // Elementwise functions and changes of type.
            _ => one(x),
        }
    }

    fn shape(&self, input: usize) -> Vec<u64> {
        self.inputs[input].dims.iter().map(|&dim| u64::from(dim)).collect()
    }

    /// A parameter that names one of the axes.
    fn axis(&self, name: &str, axes: usize) -> Checked<usize> {
        let axis = self.number(name) as usize;
        if axis < axes { Ok(axis) } else { Err(format!("`{name}` is {axis}, but there are {axes} axes")) }
    }

    fn need(fits: bool, what: impl FnOnce() -> String) -> Checked {
        if fits { Ok(()) } else { Err(what()) }
    }

    /// The optional third input: one value per output channel.
    fn bias(&self, channels: u64) -> Checked {
        match self.inputs.get(2) {
            Some(bias) => {
                Self::need(self.shape(2) == [channels], || format!("bias `{}` is {:?}, but must be [{channels}]", bias.name, bias.dims))
            }
            None => Ok(()),
        }
    }

    fn fully_connected(&self) -> Checked<Vec<u64>> {
        let (x, w) = (self.shape(0), self.shape(1));
        Self::need(!self.flag("keep_dims"), || "`keep_dims` does not work: the result has two axes".into())?;
        let [out, depth] = w[..] else { return Err(format!("weights must be [out, in], not {w:?}")) };
        Self::need((2..=4).contains(&x.len()) && x.last() == Some(&depth), || format!("{x:?} does not match weights {w:?}"))?;
        self.bias(out)?;
        let constant = matches!(self.inputs[1].role, Role::Constant(_) | Role::Lazy(_));
        Self::need(constant, || "weights must be constant".into())?;
        Ok(vec![x[..x.len() - 1].iter().product(), out])
    }

    fn mat_mul(&self) -> Checked<Vec<u64>> {
        let (mut a, mut b) = (self.shape(0), self.shape(1));
        let wrong = format!("{a:?} and {b:?} cannot be multiplied");
        for (shape, flag) in [(&mut a, "transpose_in0"), (&mut b, "transpose_in1")] {
            let axes = shape.len();
            Self::need(axes >= 2, || format!("{shape:?} is not a matrix"))?;
            if self.flag(flag) {
                shape.swap(axes - 2, axes - 1);
            }
        }
        let (a_rest, b_rest) = (&a[..a.len() - 2], &b[..b.len() - 2]);
        let (rows, columns) = (a[a.len() - 2], b[b.len() - 1]);
        Self::need(a[a.len() - 1] == b[b.len() - 2], || wrong)?;
        self.bias(columns)?;
        let mut shape = broadcast(a_rest, b_rest)?;
        shape.extend([rows, columns]);
        Ok(shape)
    }

    fn convolution(&self) -> Checked<Vec<u64>> {
        let (x, w) = (self.shape(0), self.shape(1));
        let ([batch, height, width, channels], [down, across, depth, out]) = (&x[..], &w[..]) else {
            return Err(format!("needs [batch, height, width, channels] and [height, width, in, out], not {x:?} and {w:?}"));
        };
        let group = match self.node.kind {
            "DepthWiseConv2d" => *channels,
            _ => u64::from(self.number("group").max(1)),
        };
        let grouped = depth.checked_mul(group) == Some(*channels) && out % group == 0;
        Self::need(grouped, || format!("weights {w:?} do not match {channels} channels in {group} groups"))?;
        self.bias(*out)?;
        let pair = |name: &str, default: u32| match self.list(name) {
            Some((_, &[a, b])) => Ok([u64::from(a), u64::from(b)]),
            Some((_, values)) => Err(format!("`{name}` is {values:?}, but must be two numbers")),
            None => Ok([u64::from(default); 2]),
        };
        let (stride, dilation) = (pair("stride", 1)?, pair("dilation", 1)?);
        let pads = match self.list("pad_amount") {
            Some(([2, 2], &[top, bottom, left, right])) => [u64::from(top) + u64::from(bottom), u64::from(left) + u64::from(right)],
            other => return Err(format!("`pad_amount` is {other:?}, but must be [[top, bottom], [left, right]]")),
        };
        let steps = |axis: usize, size: u64, kernel: u64| {
            let reach = dilation[axis].checked_mul(kernel - 1).and_then(|reach| reach.checked_add(1));
            let free = reach.and_then(|reach| (size + pads[axis]).checked_sub(reach));
            let free =
                free.ok_or_else(|| format!("a kernel of {kernel} is larger than the input of {size} with padding {}", pads[axis]))?;
            free.checked_div(stride[axis]).map(|steps| steps + 1).ok_or_else(|| "`stride` is 0".to_owned())
        };
        Ok(vec![*batch, steps(0, *height, *down)?, steps(1, *width, *across)?, *out])
    }

    fn norm(&self) -> Checked {
        let x = self.shape(0);
        let last = x.len() - 1;
        let axes = self.list("axes").map_or(&[][..], |(_, axes)| axes);
        Self::need(axes == [last as u32], || format!("`axes` is {axes:?}, but must be the last one ({last})"))?;
        for input in 1..self.inputs.len() {
            let found = self.shape(input);
            Self::need(found == [x[last]], || format!("`{}` is {found:?}, but must be [{}]", self.inputs[input].name, x[last]))?;
        }
        Ok(())
    }

    fn reshape(&self, x: &[u64]) -> Checked<Vec<u64>> {
        let shape: Vec<u64> = self.outputs[0].dims.iter().map(|&dim| u64::from(dim)).collect();
        let equal = shape.iter().product::<u64>() == x.iter().product::<u64>();
        Self::need(equal, || format!("{x:?} and {shape:?} have different numbers of elements"))?;
        Ok(shape)
    }

    fn transpose(&self, x: &[u64]) -> Checked<Vec<u64>> {
        let perm = self.list("perm").map_or(&[][..], |(_, perm)| perm);
        let mut sorted = perm.to_vec();
        sorted.sort_unstable();
        let whole = sorted.len() == x.len() && sorted.iter().enumerate().all(|(at, &axis)| at == axis as usize);
        Self::need(whole, || format!("`perm` {perm:?} is not a permutation of {} axes", x.len()))?;
        Ok(perm.iter().map(|&axis| x[axis as usize]).collect())
    }

    fn concat(&self) -> Checked<Vec<u64>> {
        let mut shape = self.shape(0);
        let axis = self.axis("axis", shape.len())?;
        for input in 1..self.inputs.len() {
            let next = self.shape(input);
            let fits = next.len() == shape.len() && next.iter().zip(&shape).enumerate().all(|(at, (a, b))| at == axis || a == b);
            Self::need(fits, || format!("{next:?} cannot be appended to {shape:?} along axis {axis}"))?;
            shape[axis] += next[axis];
        }
        Ok(shape)
    }

    fn split(&self, x: &[u64]) -> Checked<Vec<Vec<u64>>> {
        let axis = self.axis("axis", x.len())?;
        let cuts = self.list("split_index").map_or(&[][..], |(_, cuts)| cuts);
        let edges: Vec<u64> = [0].into_iter().chain(cuts.iter().map(|&cut| u64::from(cut))).chain([x[axis]]).collect();
        let rising = edges.windows(2).all(|pair| pair[0] < pair[1]);
        Self::need(rising && edges.len() == self.outputs.len() + 1, || {
            format!("`split_index` {cuts:?} does not split {} into {} parts", x[axis], self.outputs.len())
        })?;
        let part = |pair: &[u64]| {
            let mut shape = x.to_vec();
            shape[axis] = pair[1] - pair[0];
            shape
        };
        Ok(edges.windows(2).map(part).collect())
    }

    fn slice(&self, x: &[u64]) -> Checked<Vec<u64>> {
        let (dims, values) = self.signed_list("ranges").unwrap_or_default();
        Self::need(dims == [x.len() as u32, 3], || format!("`ranges` is {dims:?}, but must be [{}, 3]", x.len()))?;
        let length = |(range, &size): (&[i32], &u64)| match *range {
            [begin, end, step] if begin >= 0 && begin < end && u64::from(end.unsigned_abs()) <= size && step > 0 => {
                Ok(u64::from(begin.abs_diff(end).div_ceil(step.unsigned_abs())))
            }
            _ => Err(format!("the range {range:?} (begin, end, step) is not within {size}")),
        };
        values.chunks(3).zip(x).map(length).collect()
    }

    fn gather(&self, x: &[u64]) -> Checked<Vec<u64>> {
        let axis = usize::try_from(self.signed("axis")).ok().filter(|&axis| axis < x.len());
        let axis = axis.ok_or_else(|| format!("`axis` is {}, but there are {} axes", self.signed("axis"), x.len()))?;
        Ok([&x[..axis], &self.shape(1), &x[axis + 1..]].concat())
    }

    fn scatter_nd(&self, data: &[u64]) -> Checked {
        let (at, updates) = (self.shape(1), self.shape(2));
        let depth = usize::try_from(at[at.len() - 1]).unwrap_or(usize::MAX);
        Self::need(depth <= data.len(), || format!("indexes {at:?} have more components than {data:?} has axes"))?;
        let expected = [&at[..at.len() - 1], &data[depth..]].concat();
        Self::need(updates == expected, || format!("updates are {updates:?}, but must be {expected:?}"))
    }

    fn scatter_elements(&self, data: &[u64]) -> Checked {
        let axis = self.axis("axis", data.len())?;
        let (at, updates) = (self.shape(1), self.shape(2));
        let fits = at.len() == data.len() && at.iter().zip(data).enumerate().all(|(n, (at, size))| n == axis || at <= size);
        Self::need(fits && at == updates, || format!("{at:?} and {updates:?} do not match {data:?}"))
    }

    fn tile(&self, x: &[u64]) -> Checked<Vec<u64>> {
        let times = self.list("multiples").map_or(&[][..], |(_, times)| times);
        Self::need(times.len() == x.len(), || format!("`multiples` {times:?} does not match {x:?}"))?;
        Ok(x.iter().zip(times).map(|(size, &times)| size * u64::from(times)).collect())
    }

    fn with_axis(&self, x: &[u64], size: u64) -> Checked<Vec<u64>> {
        let axis = self.axis("axis", x.len() + 1)?;
        let mut shape = x.to_vec();
        shape.insert(axis, size);
        Ok(shape)
    }

    fn pack(&self, x: &[u64]) -> Checked<Vec<u64>> {
        let equal = (0..self.inputs.len()).all(|input| self.shape(input) == x);
        Self::need(equal, || "the inputs have different shapes".into())?;
        self.with_axis(x, self.inputs.len() as u64)
    }

    fn pad(&self, x: &[u64]) -> Checked<Vec<u64>> {
        let (dims, amounts) = self.list("pad_amount").unwrap_or_default();
        Self::need(dims == [x.len() as u32, 2], || format!("`pad_amount` is {dims:?}, but must be [{}, 2]", x.len()))?;
        Self::need(self.number("scheme") == 0, || "only padding with a constant (scheme 0) has been seen to work".into())?;
        Ok(x.iter().zip(amounts.chunks(2)).map(|(size, pad)| size + u64::from(pad[0]) + u64::from(pad[1])).collect())
    }

    fn reduce(&self, x: &[u64], axes: &[u32]) -> Checked<Vec<u64>> {
        let known = axes.iter().enumerate().all(|(at, axis)| (*axis as usize) < x.len() && !axes[..at].contains(axis));
        Self::need(known, || format!("axes {axes:?} are out of range for {x:?}, or repeated"))?;
        let keep = self.flag("keep_dims");
        let kept = |(axis, size): (usize, &u64)| match axes.contains(&(axis as u32)) {
            true => keep.then_some(1),
            false => Some(*size),
        };
        let shape: Vec<u64> = x.iter().enumerate().filter_map(kept).collect();
        // There are no tensors without axes.
        Ok(if shape.is_empty() { vec![1] } else { shape })
    }

    fn top_k(&self, x: &[u64]) -> Checked<Vec<Vec<u64>>> {
        let (k, last) = (u64::from(self.number("k")), x.len() - 1);
        Self::need(k > 0 && k <= x[last], || format!("the {k} largest of {} values are requested", x[last]))?;
        let mut shape = x.to_vec();
        shape[last] = k;
        Ok(vec![shape; 2])
    }

    fn rotary(&self, x: &[u64]) -> Checked {
        let (cos, sin, positions) = (self.shape(1), self.shape(2), self.shape(3));
        let dim = u64::from(self.number("rotary_embedding_dim"));
        let [batch, _, rows, width] = x[..] else { return Err(format!("needs [batch, heads, rows, dim], not {x:?}")) };
        Self::need(dim == width && dim > 1 && dim % 2 == 0, || format!("`rotary_embedding_dim` is {dim}, but must be {width}"))?;
        let fits = cos.len() == 2 && cos == sin && cos[1] == dim / 2 && positions == [batch, rows];
        Self::need(fits, || format!("cosines {cos:?}, sines {sin:?} and positions {positions:?} do not match {x:?}"))
    }
}

/// The shape of an operation on two tensors, broadcast along axes of 1.
fn broadcast(a: &[u64], b: &[u64]) -> Checked<Vec<u64>> {
    let axes = a.len().max(b.len());
    let from_end = |shape: &[u64], at: usize| shape.len().checked_sub(axes - at).map_or(1, |at| shape[at]);
    let join = |at: usize| match (from_end(a, at), from_end(b, at)) {
        (a, b) if a == b || b == 1 => Ok(a),
        (1, b) => Ok(b),
        _ => Err(format!("{a:?} and {b:?} cannot be broadcast together")),
    };
    (0..axes).map(join).collect()
}
