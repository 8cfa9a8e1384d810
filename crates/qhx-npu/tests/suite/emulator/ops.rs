//! Every operation that a graph may hold, alone, on both processors, against plain arithmetic.

use crate::emulator::support::*;
use half::f16;
use qhx_npu::{
    Arch, Device,
    graph::{self, DataType, Graph, Parameter, Quantization, Role},
};
use std::collections::BTreeSet;

/// A tensor with its numbers.
#[derive(Clone)]
struct Value {
    dims: Vec<u32>,
    numbers: Vec<f32>,
    dtype: DataType,
    constant: bool,
}

/// One operation, what it reads and what it must make.
struct Case {
    kind: &'static str,
    parameters: Vec<(&'static str, Parameter)>,
    inputs: Vec<Value>,
    outputs: Vec<Value>,
    tolerance: f32,
}

const SCALE: f32 = 1.0 / 64.0;

impl Value {
    fn of(dims: &[u32], dtype: DataType, numbers: Vec<f32>) -> Self {
        assert_eq!(dims.iter().product::<u32>() as usize, numbers.len());
        Self { dims: dims.into(), numbers, dtype, constant: false }
    }

    fn constant(self) -> Self {
        Self { constant: true, ..self }
    }

    fn quantization(&self) -> Quantization {
        if self.dtype == DataType::Fixed8 { Quantization::Tensor(SCALE) } else { Quantization::None }
    }

    fn bytes(&self) -> Vec<u8> {
        let bytes = |n: f32| match self.dtype {
            DataType::F16 => f16::from_f32(n).to_le_bytes().to_vec(),
            DataType::F32 => n.to_le_bytes().to_vec(),
            DataType::I32 | DataType::U32 => (n as i32).to_le_bytes().to_vec(),
            DataType::Bool => vec![u8::from(n != 0.0)],
            DataType::Fixed8 => vec![((n / SCALE).round() as i8).cast_unsigned()],
        };
        self.numbers.iter().flat_map(|&n| bytes(n)).collect()
    }

    fn read(&self, bytes: &[u8]) -> Vec<f32> {
        let four = |bytes: &[u8]| [bytes[0], bytes[1], bytes[2], bytes[3]];
        match self.dtype {
            DataType::F16 => f16_numbers(bytes),
            DataType::F32 => bytes.chunks(4).map(|b| f32::from_le_bytes(four(b))).collect(),
            DataType::I32 | DataType::U32 => bytes.chunks(4).map(|b| i32::from_le_bytes(four(b)) as f32).collect(),
            DataType::Bool => bytes.iter().map(|&b| f32::from(u8::from(b != 0))).collect(),
            DataType::Fixed8 => bytes.iter().map(|b| f32::from(b.cast_signed()) * SCALE).collect(),
        }
    }
}

/// F16 numbers of a shape, the same every time.
fn floats(dims: &[u32], seed: u64) -> Value {
    Value::of(dims, DataType::F16, noise(dims.iter().product::<u32>() as usize, seed))
}

fn made(dims: &[u32], numbers: Vec<f32>) -> Value {
    Value::of(dims, DataType::F16, numbers)
}

fn rows(dims: &[u32], numbers: &[i32]) -> Value {
    Value::of(dims, DataType::I32, numbers.iter().map(|&n| n as f32).collect())
}

fn u32s(dims: &[u32], values: &[u32]) -> Parameter {
    Parameter::U32s { dims: dims.into(), values: values.into() }
}

fn axis(axis: u32) -> Vec<(&'static str, Parameter)> {
    vec![("axis", Parameter::U32(axis))]
}

fn case(kind: &'static str, parameters: Vec<(&'static str, Parameter)>, inputs: Vec<Value>, outputs: Vec<Value>) -> Case {
    Case { kind, parameters, inputs, outputs, tolerance: 2e-3 }
}

/// An operation on each number.
fn unary(kind: &'static str, x: Value, f: impl Fn(f32) -> f32) -> Case {
    let y = made(&x.dims, x.numbers.iter().map(|&n| f(n)).collect());
    case(kind, vec![], vec![x], vec![y])
}

/// An operation on pairs: a matrix and a row.
fn binary(kind: &'static str, f: impl Fn(f32, f32) -> f32) -> Case {
    let (a, b) = (floats(&[3, 32], 1), floats(&[32], 2));
    let y = a.numbers.iter().zip(b.numbers.iter().cycle()).map(|(&a, &b)| f(a, b)).collect();
    case(kind, vec![], vec![a, b], vec![made(&[3, 32], y)])
}

fn compare(kind: &'static str, f: impl Fn(f32, f32) -> bool) -> Case {
    let mut case = binary(kind, |_, _| 0.0);
    // Every third pair is equal.
    for at in (0..96).step_by(3) {
        case.inputs[0].numbers[at] = case.inputs[1].numbers[at % 32];
    }
    let pairs = case.inputs[0].numbers.iter().zip(case.inputs[1].numbers.iter().cycle());
    let y = pairs.map(|(&a, &b)| f32::from(u8::from(f(a, b)))).collect();
    case.outputs = vec![Value::of(&[3, 32], DataType::Bool, y)];
    case
}

/// Positive numbers away from zero.
fn positive(dims: &[u32], seed: u64) -> Value {
    let mut value = floats(dims, seed);
    value.numbers.iter_mut().for_each(|n| *n = f16::from_f32(n.abs() + 0.25).to_f32());
    value
}

fn elementwise() -> Vec<Case> {
    let x = || floats(&[3, 40], 5);
    let wide = || {
        let mut x = x();
        x.numbers.iter_mut().for_each(|n| *n = f16::from_f32(*n * 4.0).to_f32());
        x
    };
    let gelu = |n: f32| 0.5 * n * (1.0 + erf(n / std::f32::consts::SQRT_2));
    let neuron = Case {
        parameters: vec![("operation", Parameter::U32(7)), ("beta", Parameter::F32(1.0)), ("threshold", Parameter::F32(20.0))],
        tolerance: 5e-3,
        ..unary("ElementWiseNeuron", wide(), |n| n.exp().ln_1p())
    };
    let condition = Value::of(&[3, 40], DataType::Bool, (0..120).map(|n| (n % 3) as f32).collect());
    let (a, b) = (floats(&[3, 40], 6), floats(&[3, 40], 7));
    let chosen = (0..120).map(|n| if n % 3 != 0 { a.numbers[n] } else { b.numbers[n] }).collect();
    let mut power = binary("ElementWisePower", |_, _| 0.0);
    power.inputs = vec![positive(&[3, 32], 8), Value::of(&[1], DataType::F16, vec![2.0]).constant()];
    power.outputs = vec![made(&[3, 32], power.inputs[0].numbers.iter().map(|n| n * n).collect())];
    let mut divide = binary("ElementWiseDivide", |_, _| 0.0);
    divide.inputs[1] = positive(&[32], 9);
    let pairs = divide.inputs[0].numbers.iter().zip(divide.inputs[1].numbers.iter().cycle());
    divide.outputs = vec![made(&[3, 32], pairs.map(|(a, b)| a / b).collect())];
    vec![
        binary("ElementWiseAdd", |a, b| a + b),
        binary("ElementWiseSubtract", |a, b| a - b),
        binary("ElementWiseMultiply", |a, b| a * b),
        divide,
        binary("ElementWiseMaximum", f32::max),
        binary("ElementWiseMinimum", f32::min),
        power,
        unary("ElementWiseExp", x(), f32::exp),
        unary("ElementWiseLog", positive(&[3, 40], 10), f32::ln),
        unary("ElementWiseAbs", x(), f32::abs),
        unary("ElementWiseNeg", x(), |n| -n),
        unary("ElementWiseSin", x(), f32::sin),
        unary("ElementWiseCos", x(), f32::cos),
        unary("ElementWiseFloor", wide(), f32::floor),
        unary("ElementWiseRound", wide(), f32::round_ties_even),
        unary("ElementWiseRsqrt", positive(&[3, 40], 11), |n| 1.0 / n.sqrt()),
        unary("ElementWiseSquareRoot", positive(&[3, 40], 12), f32::sqrt),
        neuron,
        unary("Sigmoid", wide(), |n| 1.0 / (1.0 + (-n).exp())),
        unary("Tanh", wide(), f32::tanh),
        unary("Relu", x(), |n| n.max(0.0)),
        unary("Gelu", wide(), gelu),
        unary("HardSwish", wide(), |n| n * ((n + 3.0).clamp(0.0, 6.0) / 6.0)),
        compare("ElementWiseGreater", |a, b| a > b),
        compare("ElementWiseGreaterEqual", |a, b| a >= b),
        compare("ElementWiseLess", |a, b| a < b),
        compare("ElementWiseLessEqual", |a, b| a <= b),
        compare("ElementWiseEqual", |a, b| a == b),
        case("ElementWiseSelect", vec![], vec![condition, a, b], vec![made(&[3, 40], chosen)]),
    ]
}

/// Abramowitz and Stegun 7.1.26.
fn erf(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let sum = ((((1.061_405_4 * t - 1.453_152) * t + 1.421_413_7) * t - 0.284_496_74) * t + 0.254_829_6) * t;
    (1.0 - sum * (-x * x).exp()).copysign(x)
}

fn products() -> Vec<Case> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    // Three heads of queries on one head of keys.
    let (q, k) = (floats(&[3, 5, 16], 1), floats(&[1, 7, 16], 2));
    let scores = q.numbers.chunks(16).flat_map(|q| k.numbers.chunks(16).map(move |k| dot(q, k))).collect();
    let batched = case("MatMul", vec![("transpose_in1", Parameter::Bool(true))], vec![q, k], vec![made(&[3, 5, 7], scores)]);
    let (x, w, bias) = (floats(&[2, 64], 3), floats(&[24, 64], 4).constant(), floats(&[24], 5).constant());
    let y = x.numbers.chunks(64).flat_map(|x| w.numbers.chunks(64).zip(&bias.numbers).map(move |(w, b)| dot(x, w) + b)).collect();
    let linear = case("FullyConnected", vec![], vec![x, w, bias], vec![made(&[2, 24], y)]);
    // Rows 1 to 4 of a picture with a border, in steps of 2.
    let (x, w) = (floats(&[1, 6, 5, 3], 6), floats(&[3, 3, 3, 4], 7).constant());
    let strided = vec![("stride", u32s(&[2], &[2, 2])), ("pad_amount", u32s(&[2, 2], &[1, 1, 1, 1])), ("dilation", u32s(&[2], &[1, 1]))];
    let at = |h: i32, v: i32, c: usize| match (0..6).contains(&h) && (0..5).contains(&v) {
        true => x.numbers[((h * 5 + v) * 3) as usize + c],
        false => 0.0,
    };
    let mut y = Vec::new();
    for (h, v, out) in (0..3).flat_map(|h| (0..3).flat_map(move |v| (0..4).map(move |out| (h, v, out)))) {
        let taps = (0..3).flat_map(|i| (0..3).flat_map(move |j| (0..3).map(move |c| (i, j, c))));
        let tap = |(i, j, c): (i32, i32, usize)| at(2 * h - 1 + i, 2 * v - 1 + j, c) * w.numbers[((i * 3 + j) as usize * 3 + c) * 4 + out];
        y.push(taps.map(tap).sum());
    }
    let convolution = case("Conv2d", strided, vec![x.clone(), w], vec![made(&[1, 3, 3, 4], y)]);
    // A causal convolution over rows, as it is used for state.
    let (x, w) = (floats(&[1, 1, 9, 8], 8), floats(&[1, 4, 1, 8], 9).constant());
    let plain = vec![("stride", u32s(&[2], &[1, 1])), ("pad_amount", u32s(&[2, 2], &[0; 4])), ("dilation", u32s(&[2], &[1, 1]))];
    let tap = |t: usize, c: usize| (0..4).map(|j| x.numbers[(t + j) * 8 + c] * w.numbers[j * 8 + c]).sum();
    let y = (0..6).flat_map(|t| (0..8).map(move |c| tap(t, c))).collect();
    let depth_wise = case("DepthWiseConv2d", plain, vec![x.clone(), w.clone()], vec![made(&[1, 1, 6, 8], y)]);
    vec![batched, linear, convolution, depth_wise]
}

fn norms() -> Vec<Case> {
    let (x, gamma) = (floats(&[4, 96], 6), floats(&[96], 7).constant());
    let zeros = Value::of(&[96], DataType::F16, vec![0.0; 96]).constant();
    let last = || vec![("epsilon", Parameter::F32(1e-6)), ("axes", u32s(&[1], &[1]))];
    let by_row = |f: &dyn Fn(&[f32]) -> Vec<f32>| made(&[4, 96], x.numbers.chunks(96).flat_map(f).collect());
    let mean = |row: &[f32]| row.iter().sum::<f32>() / row.len() as f32;
    let squares = |row: &[f32]| row.iter().map(|n| n * n).sum::<f32>();
    let scaled = |row: &[f32], by: f32| row.iter().zip(&gamma.numbers).map(|(n, g)| n * by * g).collect::<Vec<_>>();
    let root = by_row(&|row| scaled(row, 1.0 / (squares(row) / 96.0 + 1e-6).sqrt()));
    let layer = by_row(&|row| {
        let centred: Vec<f32> = row.iter().map(|n| n - mean(row)).collect();
        scaled(&centred, 1.0 / (squares(&centred) / 96.0 + 1e-6).sqrt())
    });
    let unit = by_row(&|row| row.iter().map(|n| n / squares(row).sqrt()).collect());
    let softmax = by_row(&|row| {
        let sum: f32 = row.iter().map(|n| n.exp()).sum();
        row.iter().map(|n| n.exp() / sum).collect()
    });
    let soft = Case { tolerance: 5e-3, ..case("Softmax", axis(1), vec![x.clone()], vec![softmax]) };
    let layer = Case { tolerance: 4e-3, ..case("LayerNorm", last(), vec![x.clone(), gamma.clone()], vec![layer]) };
    // A mask of the smallest number leaves nothing of a column.
    let mut masked = x.clone();
    masked.numbers.iter_mut().enumerate().filter(|(at, _)| at % 96 >= 48).for_each(|(_, n)| *n = f32::from(f16::MIN));
    let open = |row: &[f32]| {
        let sum: f32 = row[..48].iter().map(|n| n.exp()).sum();
        row.iter().enumerate().map(|(at, n)| if at < 48 { n.exp() / sum } else { 0.0 }).collect::<Vec<_>>()
    };
    let open = made(&[4, 96], masked.numbers.chunks(96).flat_map(open).collect());
    let masked = Case { tolerance: 5e-3, ..case("Softmax", axis(1), vec![masked], vec![open]) };
    // Squares of such rows are beyond f16 by far: the library sums them in more.
    let largest = x.numbers.iter().map(|n| n.abs()).fold(0.0, f32::max);
    let large = made(&[4, 96], x.numbers.iter().map(|n| n / largest * 30_000.0).collect());
    let [large_root, large_layer] = [false, true].map(|centre| {
        let row = |row: &[f32]| {
            let mean = if centre { mean(row) } else { 0.0 };
            let centred: Vec<f32> = row.iter().map(|n| n - mean).collect();
            scaled(&centred, 1.0 / (squares(&centred) / 96.0).sqrt())
        };
        made(&[4, 96], large.numbers.chunks(96).flat_map(row).collect())
    });
    let large_layer = Case { tolerance: 4e-3, ..case("LayerNorm", last(), vec![large.clone(), gamma.clone()], vec![large_layer]) };
    vec![
        case("RmsNorm", last(), vec![x.clone(), gamma.clone(), zeros.clone()], vec![root]),
        case("RmsNorm", last(), vec![large, gamma.clone(), zeros], vec![large_root]),
        layer,
        large_layer,
        case("L2Norm", last(), vec![x.clone()], vec![unit]),
        soft,
        masked,
    ]
}

fn movers() -> Vec<Case> {
    let x = floats(&[2, 3, 8], 1);
    let at = |i: usize, j: usize, k: usize| x.numbers[(i * 3 + j) * 8 + k];
    let turned = (0..8).flat_map(|k| (0..2).flat_map(move |i| (0..3).map(move |j| at(i, j, k)))).collect();
    let (a, b) = (floats(&[2, 8], 2), floats(&[2, 4], 3));
    let joined: Vec<f32> = a.numbers.chunks(8).zip(b.numbers.chunks(4)).flat_map(|(a, b)| [a, b].concat()).collect();
    let joined = made(&[2, 12], joined);
    let every_third = joined.numbers.chunks(12).flat_map(|row| [row[1], row[4], row[7]]).collect();
    let ranges = Parameter::I32s { dims: vec![2, 3], values: vec![0, 2, 1, 1, 9, 3] };
    let split = vec![("axis", Parameter::U32(1)), ("split_index", u32s(&[1], &[8]))];
    let table = floats(&[6, 16], 4);
    let row = |n: usize| table.numbers[n * 16..(n + 1) * 16].to_vec();
    let updates = floats(&[2, 16], 5);
    let mut written = table.numbers.clone();
    written[64..80].copy_from_slice(&updates.numbers[..16]);
    written[16..32].copy_from_slice(&updates.numbers[16..]);
    let written = made(&[6, 16], written);
    let mut elements = table.numbers.clone();
    (0..16).for_each(|c| elements[3 * 16 + c] = updates.numbers[c]);
    let twice: Vec<f32> = a.numbers.iter().chain(&a.numbers).copied().collect();
    let padded: Vec<f32> = a.numbers.chunks(8).flat_map(|row| [&[0.5][..], row, &[0.5, 0.5]].concat()).collect();
    let padding =
        vec![("scheme", Parameter::U32(0)), ("pad_amount", u32s(&[2, 2], &[0, 0, 1, 2])), ("pad_constant_value", Parameter::F32(0.5))];
    let gather = |axis: i32| vec![("axis", Parameter::I32(axis))];
    vec![
        case("Reshape", vec![], vec![x.clone()], vec![made(&[6, 2, 4], x.numbers.clone())]),
        case("Transpose", vec![("perm", u32s(&[3], &[2, 0, 1]))], vec![x.clone()], vec![made(&[8, 2, 3], turned)]),
        case("Concat", axis(1), vec![a.clone(), b.clone()], vec![joined.clone()]),
        case("Split", split, vec![joined.clone()], vec![a.clone(), b]),
        case("StridedSlice", vec![("ranges", ranges)], vec![joined], vec![made(&[2, 3], every_third)]),
        case("Gather", gather(0), vec![table.clone().constant(), rows(&[2], &[4, 1])], vec![made(&[2, 16], [row(4), row(1)].concat())]),
        case("ScatterNd", vec![], vec![table.clone(), rows(&[2, 1], &[4, 1]), updates.clone()], vec![written]),
        case(
            "ScatterElements",
            axis(0),
            vec![table, rows(&[1, 16], &[3; 16]), made(&[1, 16], updates.numbers[..16].to_vec())],
            vec![made(&[6, 16], elements)],
        ),
        case("Tile", vec![("multiples", u32s(&[2], &[2, 1]))], vec![a.clone()], vec![made(&[4, 8], twice.clone())]),
        case("ExpandDims", axis(1), vec![a.clone()], vec![made(&[2, 1, 8], a.numbers.clone())]),
        case("Pack", axis(0), vec![a.clone(), a.clone()], vec![made(&[2, 2, 8], twice)]),
        case("Pad", padding, vec![a], vec![made(&[2, 11], padded)]),
    ]
}

fn reductions() -> Vec<Case> {
    let x = floats(&[3, 16], 1);
    let by_row = |f: &dyn Fn(&[f32]) -> f32| x.numbers.chunks(16).map(f).collect::<Vec<_>>();
    let last = |keep: bool| vec![("axes", u32s(&[1], &[1])), ("keep_dims", Parameter::Bool(keep))];
    let largest = |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0);
    let order = |row: &[f32]| {
        let mut order: Vec<usize> = (0..16).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        order.truncate(4);
        order
    };
    let (mut values, mut places) = (Vec::new(), Vec::new());
    for row in x.numbers.chunks(16) {
        values.extend(order(row).iter().map(|&at| row[at]));
        places.extend(order(row).iter().map(|&at| at as i32));
    }
    let sums = x.numbers.chunks(16).flat_map(|row| {
        row.iter().scan(0.0, |sum, n| {
            *sum += n;
            Some(*sum)
        })
    });
    let running = vec![("axis", Parameter::U32(1)), ("exclusive", Parameter::Bool(false)), ("reverse", Parameter::Bool(false))];
    vec![
        case("ReduceMean", last(true), vec![x.clone()], vec![made(&[3, 1], by_row(&|row| row.iter().sum::<f32>() / 16.0))]),
        case("ReduceSum", last(false), vec![x.clone()], vec![made(&[3], by_row(&|row| row.iter().sum()))]),
        case("ReduceMax", last(false), vec![x.clone()], vec![made(&[3], by_row(&|row| row[largest(row)]))]),
        case("Argmax", axis(1), vec![x.clone()], vec![rows(&[3], &x.numbers.chunks(16).map(|r| largest(r) as i32).collect::<Vec<_>>())]),
        case(
            "TopK",
            vec![("k", Parameter::U32(4)), ("largest", Parameter::Bool(true))],
            vec![x.clone()],
            vec![made(&[3, 4], values), rows(&[3, 4], &places)],
        ),
        Case { tolerance: 5e-3, ..case("CumulativeSum", running, vec![x.clone()], vec![made(&[3, 16], sums.collect())]) },
    ]
}

fn conversions() -> Vec<Case> {
    let x = floats(&[3, 16], 1);
    let retyped = |x: &Value, dtype| Value { dtype, ..x.clone() };
    let whole = Value::of(&[3, 16], DataType::I32, (0..48).map(|n| (n * 7 - 100) as f32).collect());
    let eight = Value { dtype: DataType::Fixed8, numbers: x.numbers.iter().map(|n| (n / SCALE).round() * SCALE).collect(), ..x.clone() };
    // Ties and their neighbours may fall to either side.
    let quantised = Case { tolerance: 1.1 * SCALE, ..case("Quantize", vec![], vec![x.clone()], vec![eight.clone()]) };
    // Half-split rotation of two heads, three rows.
    let (q, table) = (floats(&[1, 2, 3, 8], 2), floats(&[5, 4], 3));
    let cos = Value { numbers: table.numbers.iter().map(|n| f16::from_f32(n.cos()).to_f32()).collect(), ..table.clone() };
    let sin = Value { numbers: table.numbers.iter().map(|n| f16::from_f32(n.sin()).to_f32()).collect(), ..table };
    let at = [4, 0, 2];
    let turn = |(n, x): (usize, &[f32])| {
        let p = at[n % 3] as usize;
        let pair = |i: usize| (x[i], x[i + 4], cos.numbers[p * 4 + i], sin.numbers[p * 4 + i]);
        let low = (0..4).map(pair).map(|(a, b, c, s)| a * c - b * s);
        low.chain((0..4).map(pair).map(|(a, b, c, s)| b * c + a * s)).collect::<Vec<_>>()
    };
    let turned = q.numbers.chunks(8).enumerate().flat_map(turn).collect();
    let rotary = vec![("interleaved", Parameter::Bool(false)), ("rotary_embedding_dim", Parameter::U32(8))];
    vec![
        case("Cast", vec![], vec![x.clone()], vec![retyped(&x, DataType::F32)]),
        case("Cast", vec![], vec![retyped(&x, DataType::F32)], vec![x.clone()]),
        case("Cast", vec![], vec![whole.clone()], vec![retyped(&whole, DataType::F16)]),
        case("Cast", vec![], vec![retyped(&whole, DataType::F16)], vec![whole.clone()]),
        case("Cast", vec![], vec![whole.clone()], vec![retyped(&whole, DataType::F32)]),
        quantised,
        case("Dequantize", vec![], vec![eight.clone()], vec![retyped(&eight, DataType::F16)]),
        // Rows of a table of whole numbers keep their scale.
        case(
            "Gather",
            vec![("axis", Parameter::I32(0))],
            vec![eight.clone().constant(), rows(&[1], &[2])],
            vec![Value::of(&[1, 16], DataType::Fixed8, eight.numbers[32..].to_vec())],
        ),
        case("RotaryEmbedding", rotary, vec![q, cos.clone(), sin.clone(), rows(&[1, 3], &at)], vec![made(&[1, 2, 3, 8], turned)]),
    ]
}

impl Case {
    fn graph(&self) -> Graph {
        let mut pen = Pen::new("single");
        let mut tensor = |name: String, role, value: &Value| pen.tensor(&name, role, value.dtype, &value.dims, value.quantization());
        let role = |value: &Value| if value.constant { Role::Constant(value.bytes().into()) } else { Role::Input };
        let inputs: Vec<_> = self.inputs.iter().enumerate().map(|(n, value)| tensor(format!("in{n}"), role(value), value)).collect();
        let outputs: Vec<_> = self.outputs.iter().enumerate().map(|(n, value)| tensor(format!("out{n}"), Role::Output, value)).collect();
        pen.node(self.kind, &self.parameters, &inputs, &outputs);
        pen.0
    }

    fn run(&self, device: &Device) {
        let context = compile(device, &self.graph());
        let inputs: Vec<(String, Vec<u8>)> =
            self.inputs.iter().enumerate().filter(|(_, v)| !v.constant).map(|(n, v)| (format!("in{n}"), v.bytes())).collect();
        let inputs: Vec<(&str, &[u8])> = inputs.iter().map(|(name, bytes)| (&**name, &**bytes)).collect();
        let found = execute(&context, &inputs);
        for (n, (found, expected)) in found.iter().zip(&self.outputs).enumerate() {
            close(&expected.read(found), &expected.numbers, self.tolerance, &format!("{} on {device:?}, output {n}", self.kind));
        }
    }
}

fn cases() -> Vec<Case> {
    [elementwise(), products(), norms(), movers(), reductions(), conversions()].into_iter().flatten().collect()
}

#[test]
fn every_operation_has_a_case_that_its_rule_takes() {
    let mut missing: BTreeSet<&str> = graph::operations().collect();
    for case in cases() {
        case.graph().check().unwrap_or_else(|e| panic!("{e}"));
        missing.remove(case.kind);
    }
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn operations_on_v79() {
    let device = device(Arch::V79);
    cases().iter().for_each(|case| case.run(&device));
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn operations_on_v81() {
    let device = device(Arch::V81);
    cases().iter().for_each(|case| case.run(&device));
}
