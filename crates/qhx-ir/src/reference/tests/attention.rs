//! Attention: masks, groups, slots, scores.

use super::{Bench, assert_close, bench::Loaded};
use crate::{InputData::F32, KeyValue, KvType, Mask, OpKind, Segment, Slot, SlotData};

fn attend(mask: Mask, kv: bool, slot: bool) -> OpKind {
    OpKind::Attend {
        q: "q".into(),
        kv: kv.then(|| KeyValue { k: "k".into(), v: "v".into() }),
        slot: slot.then(|| "kv".into()),
        mask,
        scale: 1.0,
        softcap: None,
        relative_keys: None,
    }
}

fn slot(dtype: KvType, window: Option<usize>) -> Slot {
    Slot::Kv { kv_heads: 1, head_dim: 1, window, dtype }
}

/// One head of one number; queries of zero make every visible value count alike.
fn one_head() -> Bench {
    ["q", "k", "v"].into_iter().fold(Bench::new(), |bench, name| bench.rows(name, &[1, 1]))
}

fn means(loaded: &mut Loaded, state: &mut dyn crate::State, values: &[f32]) -> Vec<f32> {
    let zeros = vec![0.0; values.len()];
    loaded.step(state, values.len(), &[F32(&zeros), F32(&zeros), F32(values)])
}

#[test]
fn windows_end_where_they_should() {
    for (mask, expected) in [(Mask::Window(3), [1.0, 1.5, 2.0, 3.0, 4.0, 5.0]), (Mask::Causal, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5])] {
        let window = if let Mask::Window(w) = mask { Some(w) } else { None };
        let mut loaded = one_head().slot("kv", slot(KvType::F32, window)).op("y", attend(mask, true, true)).load();
        let mut state = loaded.state();
        assert_close(&means(&mut loaded, &mut *state, &[1.0, 2.0, 3.0, 4.0, 5.0]), &expected[..5]);
        assert_close(&means(&mut loaded, &mut *state, &[6.0]), &expected[5..]);
        let free = one_head().op("y", attend(mask, true, false));
        assert_close(&free.once(6, &[F32(&[0.0; 6]), F32(&[0.0; 6]), F32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])]), &expected);
    }
    let full = one_head().op("y", attend(Mask::Full, true, false));
    assert_close(&full.once(3, &[F32(&[0.0; 3]), F32(&[0.0; 3]), F32(&[1.0, 2.0, 6.0])]), &[3.0; 3]);
}

#[test]
fn softmax_by_hand() {
    // Scores 0 and ln 3 for the last query: a quarter and three quarters.
    let y = one_head().op("y", attend(Mask::Full, true, false)).once(2, &[F32(&[0.0, 1.0]), F32(&[0.0, 3.0f32.ln()]), F32(&[8.0, 4.0])]);
    assert_close(&y, &[6.0, 5.0]);
}

#[test]
fn query_heads_use_their_group_of_keys() {
    let bench = Bench::new().rows("q", &[4, 1]).rows("k", &[2, 1]).rows("v", &[2, 1]).op("y", attend(Mask::Full, true, false));
    assert_close(&bench.once(1, &[F32(&[0.0; 4]), F32(&[0.0; 2]), F32(&[5.0, 7.0])]), &[5.0, 5.0, 7.0, 7.0]);
}

#[test]
fn slots_round_to_their_type() {
    for (dtype, expected) in [(KvType::F16, 2048.0), (KvType::F32, 2049.0)] {
        let mut loaded = one_head().slot("kv", slot(dtype, None)).op("y", attend(Mask::Causal, true, true)).load();
        let mut state = loaded.state();
        assert_close(&means(&mut loaded, &mut *state, &[2049.0]), &[expected]);
        let SlotData::Kv { dtype: found, rows, values, .. } = state.export("kv").unwrap() else { panic!("a KV slot") };
        assert_eq!((found, rows, values.len()), (dtype, 1, dtype.bytes()));
    }
}

#[test]
fn shared_slots_show_what_this_call_wrote() {
    let bench = one_head().rows("q2", &[1, 1]).slot("kv", slot(KvType::F32, Some(3))).op("writer", attend(Mask::Window(3), true, true));
    let mut reader = attend(Mask::Window(2), false, true);
    if let OpKind::Attend { q, .. } = &mut reader {
        *q = "q2".into();
    }
    let mut loaded = bench.op("reader", reader).load();
    let mut state = loaded.state();
    let zeros = F32(&[0.0, 0.0, 0.0]);
    assert_close(&loaded.step(&mut *state, 3, &[zeros, zeros, F32(&[1.0, 2.0, 3.0]), zeros]), &[1.0, 1.5, 2.5]);
    let zero = F32(&[0.0]);
    assert_close(&loaded.step(&mut *state, 1, &[zero, zero, F32(&[4.0]), zero]), &[3.5]);
    assert_close(&loaded.output("writer"), &[3.0]);
}

#[test]
fn scale_then_relative_keys_then_cap() {
    let op = OpKind::Attend {
        q: "q".into(),
        kv: Some(KeyValue { k: "k".into(), v: "v".into() }),
        slot: None,
        mask: Mask::Causal,
        scale: 0.5,
        softcap: Some(2.0),
        relative_keys: Some("rel".into()),
    };
    let bench = one_head().weight("rel", &[2, 1, 1], &[0.25, -1.0]).op("y", op);
    let y = bench.once(3, &[F32(&[1.0, 2.0, 2.0]), F32(&[1.0, 3.0, -1.0]), F32(&[0.0, 1.0, 3.0])]);
    let cap = |s: f64| (2.0 * (s / 2.0).tanh()).exp();
    // Query 1: key 0 at distance 1 scores 1 − 2, key 1 at distance 0 scores 3 + 0.5.
    let second = cap(3.5) / (cap(-1.0) + cap(3.5));
    // Query 2: key 0 is at distance 2, beyond the table.
    let [a, b, c] = [cap(1.0), cap(3.0 - 2.0), cap(-1.0 + 0.5)];
    assert_close(&y, &[0.0, second, (b + 3.0 * c) / (a + b + c)]);
}

#[test]
fn segments_never_meet_and_padding_never_counts() {
    let mut loaded = one_head().slot("kv", slot(KvType::F32, None)).op("y", attend(Mask::Causal, true, true)).load();
    let (mut a, mut b) = (loaded.state(), loaded.state());
    means(&mut loaded, &mut *a, &[10.0]);
    // Row 0 is padding, rows 1..3 are a's, row 3 is padding, row 4 is b's, row 5 is padding.
    let v = [1e9, 20.0, 30.0, 1e9, 7.0, 1e9];
    let inputs = [F32(&[0.0; 6]), F32(&[0.0; 6]), F32(&v)];
    let mut segments = [Segment::new(Some(&mut *a), 1, 2), Segment::new(Some(&mut *b), 4, 1)];
    loaded.run(6, &inputs, &mut segments).unwrap();
    let y = loaded.last();
    assert_close(&[y[1], y[2], y[4]], &[15.0, 20.0, 7.0]);
    a.commit(2).unwrap();
    b.commit(1).unwrap();
    assert_eq!((a.len(), b.len()), (3, 1));
    assert_close(&means(&mut loaded, &mut *a, &[40.0]), &[25.0]);
    assert_close(&means(&mut loaded, &mut *b, &[9.0]), &[8.0]);
}
