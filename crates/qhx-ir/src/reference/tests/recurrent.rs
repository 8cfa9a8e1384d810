//! The short convolution and the gated delta rule.

use super::{Bench, assert_close, bench::Loaded};
use crate::{Activation, InputData::F32, OpKind, Segment, Slot, SlotData};

fn conv(slot: bool) -> Loaded {
    let bench = Bench::new().rows("x", &[1]).weight("w", &[1, 3], &[1.0, 10.0, 100.0]).weight("b", &[1], &[-0.5]);
    let bench = if slot { bench.slot("fifo", Slot::Fifo { rows: 2, channels: 1 }) } else { bench };
    let op = OpKind::ShortConv {
        x: "x".into(),
        weight: "w".into(),
        bias: Some("b".into()),
        slot: slot.then(|| "fifo".into()),
        activation: Some(Activation::Relu),
    };
    bench.op("y", op).load()
}

#[test]
fn convolution_remembers_its_last_inputs() {
    let mut loaded = conv(true);
    let mut state = loaded.state();
    assert_close(&loaded.step(&mut *state, 3, &[F32(&[1.0, 2.0, 3.0])]), &[99.5, 209.5, 320.5]);
    assert_eq!(state.export("fifo").unwrap(), SlotData::Recurrent(vec![2.0, 3.0]));
    assert_close(&loaded.step(&mut *state, 1, &[F32(&[-4.0])]), &[0.0]); // 2 + 30 − 400 − 0.5
    assert_eq!(state.export("fifo").unwrap(), SlotData::Recurrent(vec![3.0, -4.0]));
    // Without slot every segment starts with zeros.
    let mut free = conv(false);
    let segment = |first_row, valid_rows| Segment::new(None, first_row, valid_rows);
    free.run(3, &[F32(&[1.0, 2.0, 3.0])], &mut [segment(0, 1), segment(1, 2)]).unwrap();
    assert_close(&free.last(), &[99.5, 199.5, 319.5]);
}

#[test]
fn padding_does_not_enter_the_fifo() {
    let mut loaded = conv(true);
    let mut state = loaded.state();
    let mut segments = [Segment::new(Some(&mut *state), 1, 1)];
    loaded.run(4, &[F32(&[7.0, 1.0, 8.0, 9.0])], &mut segments).unwrap();
    state.commit(1).unwrap();
    assert_eq!(state.export("fifo").unwrap(), SlotData::Recurrent(vec![0.0, 1.0]));
}

fn delta(key_heads: usize, heads: usize, scale: f32) -> Loaded {
    let zeros = vec![0.0; heads];
    let [q, k, v, a, b, a_log, dt_bias] = ["q", "k", "v", "a", "b", "a_log", "dt_bias"].map(Into::into);
    Bench::new()
        .rows("q", &[key_heads, 2])
        .rows("k", &[key_heads, 2])
        .rows("v", &[heads, 1])
        .rows("a", &[heads])
        .rows("b", &[heads])
        .weight("a_log", &[heads], &zeros)
        .weight("dt_bias", &[heads], &zeros)
        .slot("s", Slot::Delta { heads, key_dim: 2, value_dim: 1 })
        .op("y", OpKind::GatedDelta { q, k, v, a, b, a_log, dt_bias, slot: "s".into(), scale, eps: 1e-12 })
        .load()
}

/// With a = b = 0 the state is halved (softplus 0 = ln 2) and half the error is written.
#[test]
fn delta_rule_by_hand() {
    let mut loaded = delta(1, 1, 0.5);
    let mut state = loaded.state();
    let zero = F32(&[0.0, 0.0]);
    // Row 0: k = (1, 0), v = 4: S = (2, 0); q = (1, 0). Row 1: S → (1, 0), k = (0, 1), v = 6: S = (1, 3); q = (1, 1)/√2.
    let y = loaded.step(&mut *state, 2, &[F32(&[3.0, 0.0, 5.0, 5.0]), F32(&[2.0, 0.0, 0.0, 9.0]), F32(&[4.0, 6.0]), zero, zero]);
    assert_close(&y, &[1.0, 0.5 * 4.0 / 2.0f64.sqrt()]);
    // Row 2: S → (0.5, 1.5), k = (1, 0) reads 0.5, v = 2: writes half of 1.5.
    let zero = F32(&[0.0]);
    let y = loaded.step(&mut *state, 1, &[F32(&[1.0, 0.0]), F32(&[1.0, 0.0]), F32(&[2.0]), zero, zero]);
    assert_close(&y, &[0.5 * 1.25]);
    let SlotData::Recurrent(s) = state.export("s").unwrap() else { panic!("a recurrent slot") };
    assert_close(&s, &[1.25, 1.5]);
}

#[test]
fn value_heads_use_their_group_of_key_heads() {
    let mut loaded = delta(2, 4, 1.0);
    let mut state = loaded.state();
    // Key heads (1, 0) and (0, 1); queries (1, 0) and (0, 1); each value head writes half its value under its key head.
    let (q, v, zero) = ([1.0, 0.0, 0.0, 1.0], [2.0, 4.0, 6.0, 8.0], F32(&[0.0; 4]));
    assert_close(&loaded.step(&mut *state, 1, &[F32(&q), F32(&q), F32(&v), zero, zero]), &[1.0, 2.0, 3.0, 4.0]);
    let SlotData::Recurrent(s) = state.export("s").unwrap() else { panic!("a recurrent slot") };
    assert_close(&s, &[1.0, 0.0, 2.0, 0.0, 0.0, 3.0, 0.0, 4.0]);
}

#[test]
fn decay_and_step_by_hand() {
    let [q, k, v, a, b, a_log, dt_bias] = ["q", "k", "v", "a", "b", "a_log", "dt_bias"].map(Into::into);
    let mut loaded = Bench::new()
        .rows("q", &[1, 1])
        .rows("k", &[1, 1])
        .rows("v", &[1, 1])
        .rows("a", &[1])
        .rows("b", &[1])
        .weight("a_log", &[1], &[2.0f32.ln()])
        .weight("dt_bias", &[1], &[0.5])
        .slot("s", Slot::Delta { heads: 1, key_dim: 1, value_dim: 1 })
        .op("y", OpKind::GatedDelta { q, k, v, a, b, a_log, dt_bias, slot: "s".into(), scale: 1.0, eps: 3.0 })
        .load();
    let mut state = loaded.state();
    state.import("s", &SlotData::Recurrent(vec![8.0])).unwrap();
    let y = loaded.step(&mut *state, 1, &[F32(&[1.0]), F32(&[1.0]), F32(&[0.0]), F32(&[0.5]), F32(&[-1.0])]);
    // eps is added to the sum of squares: 1 / sqrt(1 + 3); decay exp(−2 · softplus(1)); step sigmoid(−1).
    let decay = (-2.0 * (1.0 + 1.0f64.exp()).ln()).exp();
    let step = 1.0 / (1.0 + 1.0f64.exp());
    let s = 8.0 * decay;
    let s = s + 0.5 * step * (0.0 - 0.5 * s);
    assert_close(&y, &[0.5 * s]);
}
