//! Moving rows, rotating them, joining neighbours.

use super::{Bench, assert_close, bench::Loaded};
use crate::{
    Activation, DType, Dim,
    InputData::{F32, I32},
    OpKind, Rotary, RotaryVariant, Segment, Symbol,
};

#[test]
fn elementwise() {
    let pair = || Bench::new().rows("a", &[2]).rows("b", &[2]);
    let inputs = [F32(&[1.0, -2.0]), F32(&[0.5, 3.0])];
    let (a, b): (crate::Name, crate::Name) = ("a".into(), "b".into());
    assert_close(&pair().op("y", OpKind::Add { a: a.clone(), b: b.clone() }).once(1, &inputs), &[1.5, 1.0]);
    assert_close(&pair().op("y", OpKind::Mul { a: a.clone(), b: b.clone() }).once(1, &inputs), &[0.5, -6.0]);
    let gated = OpKind::GateAct { gate: a.clone(), up: b, activation: Activation::Relu };
    assert_close(&pair().op("y", gated).once(1, &inputs), &[0.5, 0.0]);
    let x = || Bench::new().rows("a", &[2]);
    let inputs = [F32(&[1.0, -2.0])];
    assert_close(&x().op("y", OpKind::Clamp { x: a.clone(), low: -0.5, high: 0.75 }).once(1, &inputs), &[0.75, -0.5]);
    assert_close(&x().op("y", OpKind::Softcap { x: a.clone(), cap: 2.0 }).once(1, &inputs), &[2.0 * 0.5f64.tanh(), -2.0 * 1.0f64.tanh()]);
    let both = OpKind::Hadamard { x: a.clone() };
    assert_close(&x().op("y", both).once(1, &inputs), &[-1.0 / 2f64.sqrt(), 3.0 / 2f64.sqrt()]);
    let scaled = |weight: &[f32]| {
        let op = OpKind::Scale { x: "a".into(), factor: 3.0, weight: Some("w".into()) };
        x().weight("w", &[weight.len()], weight).op("y", op).once(1, &inputs)
    };
    assert_close(&scaled(&[0.5]), &[1.5, -3.0]);
    assert_close(&scaled(&[0.5, 2.0]), &[1.5, -12.0]);
}

#[test]
fn concat_and_slice() {
    let bench = Bench::new().rows("a", &[2, 1]).rows("b", &[2, 2]);
    let joined = bench.op("joined", OpKind::Concat { xs: vec!["a".into(), "b".into()] });
    let middle = joined.op("y", OpKind::Slice { x: "op.joined".into(), axis: 1, start: 1, length: 1 });
    let mut loaded = middle.op("z", OpKind::Slice { x: "op.joined".into(), axis: 2, start: 1, length: 2 }).load();
    let inputs = [F32(&[1.0, 2.0, 3.0, 4.0]), F32(&[10.0, 11.0, 20.0, 21.0, 30.0, 31.0, 40.0, 41.0])];
    loaded.run(2, &inputs, &mut [Segment::new(None, 0, 2)]).unwrap();
    assert_close(&loaded.output("joined"), &[1., 10., 11., 2., 20., 21., 3., 30., 31., 4., 40., 41.]);
    assert_close(&loaded.output("y"), &[2., 20., 21., 4., 40., 41.]);
    assert_close(&loaded.output("z"), &[10., 11., 20., 21., 30., 31., 40., 41.]);
}

#[test]
fn gather_and_scatter() {
    let mut loaded = Bench::new()
        .rows("x", &[2])
        .input("rows", DType::F32, &[Dim::R, Dim::Fixed(2)])
        .input("at", DType::I32, &[Dim::R])
        .input("wanted", DType::I32, &[Dim::L])
        .op("set", OpKind::ScatterRows { x: "x".into(), rows: "rows".into(), at: "at".into() })
        .op("sum", OpKind::ScatterAddRows { x: "op.set".into(), rows: "rows".into(), at: "at".into() })
        .op("picked", OpKind::Gather { x: "op.sum".into(), rows: "wanted".into() })
        .load();
    let x = F32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    (loaded.soft_rows, loaded.wanted) = (2, 2);
    let segment = || [Segment::new(None, 0, 3)];
    let inputs = [x, F32(&[10.0, 20.0, 30.0, 40.0]), I32(&[2, 0]), I32(&[2, 1])];
    loaded.run(3, &inputs, &mut segment()).unwrap();
    assert_close(&loaded.output("set"), &[30., 40., 3., 4., 10., 20.]);
    assert_close(&loaded.output("sum"), &[60., 80., 3., 4., 20., 40.]);
    assert_close(&loaded.output("picked"), &[20., 40., 3., 4.]);
    (loaded.soft_rows, loaded.wanted) = (0, 1);
    loaded.run(3, &[x, F32(&[]), I32(&[]), I32(&[0])], &mut segment()).unwrap();
    assert_close(&loaded.output("picked"), &[1., 2.]);
    assert!(loaded.run(3, &[x, F32(&[]), I32(&[]), I32(&[3])], &mut segment()).unwrap_err().to_string().contains("`wanted` has 3"));
}

fn rope(rotary: Rotary, dim: usize, streams: usize) -> Loaded {
    let bench = Bench::new().rows("x", &[1, dim]).input("positions", DType::I32, &[Dim::Fixed(streams), Dim::T]);
    let mut bench = bench.rotary("r", rotary);
    bench.program.epochs = vec![100];
    bench.op("y", OpKind::Rope { x: "x".into(), positions: "positions".into(), rotary: "r".into() }).load()
}

#[test]
fn rotary_pairs_streams_and_epochs() {
    // One block of four from number 1: frequency 0 pairs numbers 1 and 3, frequency 1 pairs 2 and 4; number 0 and 5 pass.
    let variant = |factor: f32, amplitude| RotaryVariant { inv_freq: vec![factor, 0.5], amplitude };
    let rotary = Rotary { blocks: vec![(1, 4)], streams: vec![0, 1], variants: vec![variant(1.0, 1.0), variant(0.25, 2.0)] };
    let mut loaded = rope(rotary, 6, 2);
    let x = F32(&[9.0, 1.0, 2.0, 3.0, 4.0, 8.0]);
    let positions = I32(&[2, 6]);
    let segment = || [Segment::new(None, 0, 1)];
    loaded.run(1, &[x, positions], &mut segment()).unwrap();
    let turned = |angle: f64, a: f64, b: f64| (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin());
    let ((a, c), (b, d)) = (turned(2.0, 1.0, 3.0), turned(3.0, 2.0, 4.0));
    assert_close(&loaded.last(), &[9.0, a, b, c, d, 8.0]);
    loaded.epoch = 1;
    loaded.run(1, &[x, positions], &mut segment()).unwrap();
    let (a, c) = turned(0.5, 1.0, 3.0);
    assert_close(&loaded.last(), &[9.0, 2.0 * a, 2.0 * b, 2.0 * c, 2.0 * d, 8.0]);
    loaded.epoch = 2;
    assert!(loaded.run(1, &[x, positions], &mut segment()).unwrap_err().to_string().contains("epoch is 2, but there are only 2"));
}

#[test]
fn far_angles_are_rounded_to_f32() {
    let rotary = Rotary { blocks: vec![(0, 2)], streams: vec![], variants: vec![RotaryVariant { inv_freq: vec![0.1], amplitude: 1.0 }] };
    let mut loaded = rope(rotary, 2, 1);
    loaded.run(1, &[F32(&[1.0, 0.0]), I32(&[1_000_003])], &mut [Segment::new(None, 0, 1)]).unwrap();
    let angle = (1_000_003.0f32 * 0.1f32) as f64; // 100000.3 has no f32: a step here is 1/128
    assert!((angle - 100_000.3).abs() > 1e-3);
    assert_close(&loaded.last(), &[angle.cos(), angle.sin()]);
}

fn conv(bench: Bench, stride: usize) -> Bench {
    bench.op("y", OpKind::Conv2d { x: "x".into(), weight: "w".into(), bias: None, stride })
}

#[test]
fn convolution_borders() {
    let ones = || Bench::new().rows("x", &[3, 1]).weight("w", &[1, 3, 3, 1], &[1.0; 9]);
    let x = [1.0; 9];
    assert_close(&conv(ones(), 1).once(3, &[F32(&x)]), &[4., 6., 4., 6., 9., 6., 4., 6., 4.]);
    assert_close(&conv(ones(), 2).once(3, &[F32(&x)]), &[4., 4., 4., 4.]);
    // A kernel of one tap: above by one (rows), left by none; input channels 1 and 10.
    let mut taps = [0.0; 18];
    (taps[2], taps[3]) = (1.0, 10.0);
    let shifted = Bench::new().rows("x", &[2, 2]).weight("w", &[1, 3, 3, 2], &taps);
    let y = conv(shifted, 1).once(2, &[F32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])]);
    assert_close(&y, &[0.0, 0.0, 21.0, 43.0]);
}

#[test]
fn convolution_ends_with_its_segment() {
    // Rows 0..3 are one segment, row 3 is padding, rows 4..6 are another. With stride 2 they have rows 0..2 and 2..3 of the result.
    let mut loaded = conv(Bench::new().rows("x", &[1, 1]).weight("w", &[1, 3, 3, 1], &[1.0; 9]), 2).load();
    let x = [1.0, 2.0, 4.0, 1000.0, 8.0, 16.0];
    let segment = |first_row, valid_rows| Segment::new(None, first_row, valid_rows);
    loaded.run(6, &[F32(&x)], &mut [segment(0, 3), segment(4, 2)]).unwrap();
    assert_close(&loaded.last(), &[3.0, 6.0, 24.0]);
    let odd = loaded.run(6, &[F32(&x)], &mut [segment(0, 3), segment(3, 3)]);
    assert!(odd.unwrap_err().to_string().contains("segment 3..6"));
}

#[test]
fn pooling() {
    let mut loaded = Bench::new().rows("x", &[1]).op("y", OpKind::Pool { x: "x".into(), size: 2 }).load();
    let segment = |first_row, valid_rows| Segment::new(None, first_row, valid_rows);
    // The last group of the first segment has one valid row.
    loaded.run(6, &[F32(&[1.0, 3.0, 5.0, 99.0, 7.0, 9.0])], &mut [segment(0, 3), segment(4, 2)]).unwrap();
    assert_close(&loaded.last(), &[2.0, 5.0, 8.0]);
    let odd = loaded.run(5, &[F32(&[0.0; 5])], &mut [segment(0, 5)]);
    assert!(odd.unwrap_err().to_string().contains("T = 5 rows must be a multiple of 2"));
}

#[test]
fn merged_rows() {
    let shape = vec![Dim::Exact(Symbol::T, 2), Dim::Fixed(4)];
    let bench =
        Bench::new().rows("x", &[2]).op("merged", OpKind::Reshape { x: "x".into(), shape }).weight("w", &[1, 4], &[1., 10., 100., 1000.]);
    let sum = OpKind::Linear { x: "op.merged".into(), weight: "w".into(), bias: None, activation: Default::default(), clip: None };
    assert_close(&bench.op("y", sum).once(2, &[F32(&[1.0, 2.0, 3.0, 4.0])]), &[4321.0]);
}
