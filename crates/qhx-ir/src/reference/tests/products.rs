//! Products with weights, norms, functions, experts.

use super::{Bench, assert_close, bench::i8_row};
use crate::{
    Activation, ActivationForm, AlignedBytes, BlockEncoding, Clip, DType, Dim, Encoding,
    InputData::{F32, I32},
    OpKind, Quants, Routing, ScaleType, WeightTensor,
    reference::{elementwise::erf, moe::sparse_mixer},
};
use half::f16;

fn linear(activation: ActivationForm, clip: Option<Clip>, bias: bool) -> OpKind {
    OpKind::Linear { x: "x".into(), weight: "w".into(), bias: bias.then(|| "b".into()), activation, clip }
}

#[test]
fn linear_with_bias_and_clips() {
    let bench = || Bench::new().rows("x", &[3]).weight("w", &[2, 3], &[1.0, 10.0, 100.0, -1.0, 0.5, 0.0]);
    let x = [1.0, 2.0, 3.0, -4.0, 0.0, 1.0];
    assert_close(&bench().op("y", linear(ActivationForm::F32, None, false)).once(2, &[F32(&x)]), &[321.0, 0.0, 96.0, 4.0]);
    let biased = bench().weight("b", &[2], &[0.25, -1.0]).op("y", linear(ActivationForm::F32, None, true));
    assert_close(&biased.once(2, &[F32(&x)]), &[321.25, -1.0, 96.25, 3.0]);
    // Inputs become (1, 2, 2) and (-1, 0, 1); the bias counts before the output is clipped.
    let clip = Some(Clip { input: [-1.0, 2.0], output: [-0.5, 200.0] });
    let clipped = bench().weight("b", &[2], &[0.25, -1.0]).op("y", linear(ActivationForm::F32, clip, true));
    assert_close(&clipped.once(2, &[F32(&x)]), &[200.0, -0.5, 99.25, 0.0]);
}

#[test]
fn integer_rows_round_half_to_even() {
    // The largest magnitude is 127, so a step is 1: 0.5 → 0, 1.5 → 2, 2.5 → 2, -2.5 → -2.
    let x = [127.0, 0.5, 1.5, 2.5, -0.5, -2.5];
    let y = |quants: &[i8]| {
        Bench::new()
            .rows("x", &[6])
            .tensor("w", i8_row(quants, 0.5))
            .op("y", linear(ActivationForm::I8Row, None, false))
            .once(1, &[F32(&x)])
    };
    assert_close(&y(&[1, 1, 1, 1, 1, 1]), &[129.0 / 2.0]);
    assert_close(&y(&[0, 1, 3, 5, 7, -128]), &[(6.0 + 10.0 + 256.0) / 2.0]);
    // A row of zeros, or of next to nothing, has no scale and gives nothing.
    let zeros = Bench::new().rows("x", &[6]).tensor("w", i8_row(&[1; 6], 0.5)).op("y", linear(ActivationForm::I8Row, None, false));
    assert_close(&zeros.once(2, &[F32(&[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1e-40, 0.0, 0.0, 0.0, 0.0, 0.0])]), &[0.0, 0.0]);
}

#[test]
fn integer_blocks_have_their_own_scales() {
    // 34 numbers: 32 of 1.0 and two (254, 1.0). By row 1.0 is half a step of 2 and rounds to 0; by block it is exact in the first block.
    let mut x = [1.0f32; 34];
    x[32] = 254.0;
    let y = |form| Bench::new().rows("x", &[34]).tensor("w", i8_row(&[1; 34], 1.0)).op("y", linear(form, None, false)).once(1, &[F32(&x)]);
    assert_close(&y(ActivationForm::I8Row), &[254.0]);
    assert_close(&y(ActivationForm::I8Block32), &[32.0 + 254.0]);
}

/// An int4 row with minima: the value is `q · scale + min`, and the surplus of the last block has no meaning.
#[test]
fn minima_count_once_for_every_number() {
    let encoding = Encoding::Block(BlockEncoding { quants: Quants::I4, block: 32, min: true, scale: ScaleType::F16 });
    let part = |numbers: &[f32]| {
        let mut bytes = AlignedBytes::zeroed(32);
        numbers.iter().enumerate().for_each(|(i, &x)| bytes.as_mut()[2 * i..][..2].copy_from_slice(&f16::from_f32(x).to_le_bytes()));
        Some(bytes.into())
    };
    let mut data = AlignedBytes::copy_of(&[0xff; 64]);
    data.as_mut()[..16].fill(0x32); // numbers 0..16 are 2, numbers 16..32 are 3
    data.as_mut()[16] = 0xf5; // number 32 is 5; number 33 and further do not exist
    let tensor = WeightTensor::new(encoding, vec![1, 33], data.into(), part(&[0.5, 2.0]), part(&[-1.0, 0.25])).unwrap();
    let x = [1.0f32; 33];
    let expected = 16.0 * (2.0 * 0.5 - 1.0) + 16.0 * (3.0 * 0.5 - 1.0) + (5.0 * 2.0 + 0.25);
    for form in [ActivationForm::F32, ActivationForm::F16, ActivationForm::I8Row, ActivationForm::I8Block32] {
        let y = Bench::new().rows("x", &[33]).tensor("w", tensor.clone()).op("y", linear(form, None, false)).once(1, &[F32(&x)]);
        assert_close(&y, &[expected]);
    }
}

#[test]
fn f16_activations_are_rounded_first() {
    let y = |form| {
        let bench = Bench::new().rows("x", &[2]).weight("w", &[1, 2], &[1.0, 1.0]);
        bench.op("y", linear(form, None, false)).once(1, &[F32(&[2049.0, 1.0 + 1.0 / 4096.0])])
    };
    assert_close(&y(ActivationForm::F16), &[2049.0]); // 2048 + 1
    assert_close(&y(ActivationForm::F32), &[2050.0 + 1.0 / 4096.0]);
}

#[test]
fn tables() {
    let table = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let ids = Bench::new().input("ids", DType::I32, &[Dim::T]).weight("table", &[3, 2], &table);
    let y = ids.op("y", OpKind::Embed { ids: "ids".into(), table: "table".into(), scale: 0.5 }).once(2, &[I32(&[2, 0])]);
    assert_close(&y, &[2.5, 3.0, 0.5, 1.0]);
    let taps = Bench::new().input("index", DType::I32, &[Dim::T, Dim::Fixed(3)]).rows("factor", &[3]).weight("table", &[3, 2], &table);
    let y = taps
        .op("y", OpKind::Interpolate { index: "index".into(), factor: "factor".into(), table: "table".into() })
        .once(1, &[I32(&[0, 2, 2]), F32(&[0.5, 0.25, -1.0])]);
    assert_close(&y, &[0.5 + 1.25 - 5.0, 1.0 + 1.5 - 6.0]);
}

#[test]
fn norms() {
    let rms = Bench::new().rows("x", &[2]).weight("w", &[2], &[2.0, -1.0]);
    let y = rms.op("y", OpKind::RmsNorm { x: "x".into(), weight: Some("w".into()), eps: 0.5 }).once(1, &[F32(&[3.0, 4.0])]);
    let root = 13.0f64.sqrt(); // (9 + 16) / 2 + 0.5
    assert_close(&y, &[6.0 / root, -4.0 / root]);
    let layer = Bench::new().rows("x", &[2]).weight("w", &[2], &[2.0, 1.0]).weight("b", &[2], &[10.0, 20.0]);
    let op = OpKind::LayerNorm { x: "x".into(), weight: "w".into(), bias: Some("b".into()), eps: 3.0 };
    // Mean 2, variance 1, root of 1 + 3.
    assert_close(&layer.op("y", op).once(1, &[F32(&[1.0, 3.0])]), &[10.0 - 1.0, 20.0 + 0.5]);
}

#[test]
fn functions() {
    let table = [(0.0, 0.0), (0.5, 0.520_499_877_813_046_5), (1.0, 0.842_700_792_949_714_9), (2.0, 0.995_322_265_018_952_7)];
    for (x, y) in table {
        assert!((erf(x) - y).abs() < 1e-14 && (erf(-x) + y).abs() < 1e-14, "erf({x})");
    }
    assert!((erf(3.0) - 0.999_977_909_503_001_4).abs() < 1e-14 && erf(9.0) == 1.0 && erf(-9.0) == -1.0);
    let y = |activation, x: f32| Bench::new().rows("x", &[1]).op("y", OpKind::Activate { x: "x".into(), activation }).once(1, &[F32(&[x])]);
    assert_close(&y(Activation::Silu, 1.0), &[0.731_058_578_630_004_9]);
    assert_close(&y(Activation::Silu, -200.0), &[0.0]);
    assert_close(&y(Activation::GeluTanh, 1.0), &[0.841_191_990_608_276_8]);
    assert_close(&y(Activation::GeluErf, 1.0), &[0.841_344_746_068_542_9]);
    assert_close(&y(Activation::GeluErf, -1.0), &[0.841_344_746_068_542_9 - 1.0]);
    assert_close(&y(Activation::Sigmoid, -2.0), &[0.119_202_922_022_117_55]);
    assert_close(&y(Activation::Relu, -2.0), &[0.0]);
}

#[test]
fn sparse_mixer_by_hand() {
    let close = |found: [(usize, f64); 2], expected: [(usize, f64); 2]| {
        for (f, e) in found.iter().zip(expected) {
            assert!(f.0 == e.0 && (f.1 - e.1).abs() < 1e-7, "found {found:?}, expected {expected:?}");
        }
    };
    let pair = 1.0 / (1.0 + (-0.01f64).exp());
    // 1.99 lies in the band of 2.0 (0.005 of it); alone, it is the only one in its own.
    close(sparse_mixer(&[2.0, 1.99, 1.0, -3.0], 0.01), [(0, pair), (1, 1.0)]);
    // Negative scores: the gap is measured against |r|, since the largest score is no floor.
    close(sparse_mixer(&[-2.0, -1.01, -1.0], 0.01), [(2, pair), (1, 1.0)]);
    // Second place has company too: 1.98 is 0.005 below 1.99, and 0.01 below 2.0.
    let three = 1.0 / (1.0 + (-0.01f64).exp() + (-0.02f64).exp());
    close(sparse_mixer(&[1.98, 1.99, 2.0], 0.01), [(2, three), (1, pair)]);
    // The winner of the first round takes no part in the second, though it would lie in the band.
    close(sparse_mixer(&[1.0, 1.0, 0.0], 0.01), [(0, 0.5), (1, 1.0)]);
    // A positive winner is the floor of the denominator: 0.1 / 5 is within 2.02 %, though 0.1 / 4.9 is not.
    close(sparse_mixer(&[5.0, 4.9, -9.0], 0.0101), [(0, 1.0 / (1.0 + (-0.1f64).exp())), (1, 1.0)]);
    // 0/0 drops nothing.
    close(sparse_mixer(&[0.0, 0.0, 0.0], 0.01), [(0, 1.0 / 3.0), (1, 0.5)]);
    close(sparse_mixer(&[-1.0, 0.0], 0.01), [(1, 1.0), (0, 1.0)]);
}

#[test]
fn softmax_routing() {
    let bench = |renormalise| {
        let method = Routing::Softmax { top_k: 2, renormalise };
        let bench = Bench::new().rows("scores", &[3]).op("route", OpKind::Route { scores: "scores".into(), method });
        let mut loaded = bench.load();
        let scores = [0.0, 2.0f32.ln(), 0.0];
        loaded.run(1, &[F32(&scores)], &mut [crate::Segment::new(None, 0, 1)]).unwrap();
        (loaded.output("route.experts"), loaded.output("route.weights"))
    };
    let (experts, weights) = bench(false);
    assert_eq!(experts, [1.0, 0.0]); // of two equal ones the lower index
    assert_close(&weights, &[0.5, 0.25]);
    assert_close(&bench(true).1, &[2.0 / 3.0, 1.0 / 3.0]);
}

#[test]
fn experts_by_hand() {
    let bench = || {
        Bench::new()
            .rows("x", &[2])
            .input("experts", DType::I32, &[Dim::T, Dim::Fixed(2)])
            .rows("weights", &[2])
            .weight("gate", &[2, 1, 2], &[1.0, 0.0, -1.0, 1.0])
            .weight("up", &[2, 1, 2], &[0.0, 1.0, 1.0, 1.0])
            .weight("down", &[2, 2, 1], &[1.0, 2.0, 10.0, 20.0])
    };
    let [x, experts, weights, gate, up, down] = ["x", "experts", "weights", "gate", "up", "down"].map(Into::into);
    let (activation, form) = (Activation::Relu, ActivationForm::F32);
    let mut op = OpKind::Experts { x, experts, weights, gate, up, down, activation, form, bias: None, held: None };
    let inputs = [F32(&[2.0, 3.0, 1.0, -1.0]), I32(&[1, 0, 0, 1]), F32(&[0.5, 2.0, 1.0, 1.0])];
    // Row 0, x = (2, 3): expert 0 gives 2 · 3 = 6, expert 1 gives 1 · 5 = 5. Row 1, x = (1, -1): expert 0 gives 1 · -1, expert 1 nothing.
    let y = bench().op("y", op.clone()).once(2, &inputs);
    assert_close(&y, &[0.5 * 50.0 + 2.0 * 6.0, 0.5 * 100.0 + 2.0 * 12.0, -1.0, -2.0]);
    // With biases, row 0: expert 0 gives (2 + 1) · (3 - 1) = 6, expert 1 gives (1 + 3) · (5 + 2) = 28. Row 1: expert 0 gives 2 · -2, expert 1 (-2 + 3) · (0 + 2).
    let OpKind::Experts { bias, .. } = &mut op else { unreachable!("just made") };
    *bias = Some(crate::ExpertBias { gate: "gate_bias".into(), up: "up_bias".into() });
    let y = bench().weight("gate_bias", &[2, 1], &[1.0, 3.0]).weight("up_bias", &[2, 1], &[-1.0, 2.0]).op("y", op.clone()).once(2, &inputs);
    assert_close(&y, &[0.5 * 280.0 + 2.0 * 6.0, 0.5 * 560.0 + 2.0 * 12.0, -4.0 + 20.0, -8.0 + 40.0]);
    // Of three experts only the first is there, where the second matrices are: what the others are chosen for counts nothing.
    let OpKind::Experts { bias, held, .. } = &mut op else { unreachable!("just made") };
    (*bias, *held) = (None, Some("held".into()));
    let inputs = [inputs[0], I32(&[1, 0, 0, 2]), inputs[2], I32(&[1, -1, -1])];
    let y = bench().input("held", DType::I32, &[Dim::Fixed(3)]).op("y", op).once(2, &inputs);
    assert_close(&y, &[2.0 * 50.0, 2.0 * 100.0, 0.0, 0.0]);
}
