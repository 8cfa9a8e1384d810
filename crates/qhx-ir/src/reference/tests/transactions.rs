//! States: what counts, what does not, and what is refused.

use super::{Bench, assert_close, bench::Loaded};
use crate::{
    DeviceError,
    InputData::{F32, I32},
    KeyValue, KvType, Mask, OpKind, Segment, Slot, SlotData, Stage,
};
use std::sync::atomic::{AtomicBool, Ordering};

/// Means of all values so far, and with `fifo` the sum of each with the one before.
fn bench(fifo: bool) -> Bench {
    let bench = ["q", "k", "v"].into_iter().fold(Bench::new(), |bench, name| bench.rows(name, &[1, 1]));
    let bench = bench.slot("kv", Slot::Kv { kv_heads: 1, head_dim: 1, window: None, dtype: KvType::F32 });
    let bench = if fifo {
        let op = OpKind::ShortConv { x: "x".into(), weight: "w".into(), bias: None, slot: Some("fifo".into()), activation: None };
        bench.rows("x", &[1]).weight("w", &[1, 2], &[1.0, 1.0]).slot("fifo", Slot::Fifo { rows: 1, channels: 1 }).op("sums", op)
    } else {
        bench
    };
    let (kv, slot) = (Some(KeyValue { k: "k".into(), v: "v".into() }), Some("kv".into()));
    let op = OpKind::Attend { q: "q".into(), kv, slot, mask: Mask::Causal, scale: 1.0, softcap: None, relative_keys: None };
    bench.op("means", op)
}

fn run(loaded: &mut Loaded, state: &mut dyn crate::State, values: &[f32]) -> Vec<f32> {
    let zeros = vec![0.0; values.len()];
    let inputs = [F32(&zeros), F32(&zeros), F32(values), F32(values)];
    let inputs = &inputs[..loaded.executable.program().inputs.len()];
    loaded.run(values.len(), inputs, &mut [Segment::new(Some(state), 0, values.len())]).unwrap();
    loaded.last()
}

fn refused<T>(result: Result<T, DeviceError>, reason: &str) {
    match result {
        Err(DeviceError::Call(text)) => assert!(text.contains(reason), "`{text}` does not say `{reason}`"),
        Err(other) => panic!("expected a refused call with `{reason}`, found {other}"),
        Ok(_) => panic!("expected a refused call with `{reason}`"),
    }
}

#[test]
fn only_committed_rows_count() {
    let mut loaded = bench(false).load();
    let mut state = loaded.state();
    assert_close(&run(&mut loaded, &mut *state, &[4.0, 8.0]), &[4.0, 6.0]);
    assert_eq!(state.len(), 0);
    run(&mut loaded, &mut *state, &[1.0, 3.0, 99.0]);
    state.commit(2).unwrap();
    assert_close(&run(&mut loaded, &mut *state, &[5.0]), &[3.0]);
    refused(state.commit(2), "commit of 2 rows after a call of 1");
    refused(state.fork().unwrap().commit(1), "no call to commit");
    state.commit(1).unwrap();
    refused(state.commit(1), "no call to commit");
    state.truncate(1).unwrap();
    assert_close(&run(&mut loaded, &mut *state, &[7.0]), &[4.0]);
    refused(state.truncate(2), "cannot truncate 1 rows to 2");
    let fresh = loaded.executable.new_state(2).unwrap();
    let mut small = fresh;
    run(&mut loaded, &mut *small, &[1.0]);
    small.commit(1).unwrap();
    let inputs = [F32(&[0.0; 2]), F32(&[0.0; 2]), F32(&[0.0; 2])];
    let segment = Segment::new(Some(&mut *small), 0, 2);
    refused(loaded.run(2, &inputs, &mut [segment]), "exceed the context of 2 rows");
}

#[test]
fn recurrent_states_commit_whole_calls() {
    let mut loaded = bench(true).load();
    let mut state = loaded.state();
    run(&mut loaded, &mut *state, &[1.0, 2.0]);
    refused(state.commit(1), "all or none");
    assert_eq!((state.len(), state.export("fifo").unwrap()), (0, SlotData::Recurrent(vec![0.0])));
    state.commit(2).unwrap();
    state.truncate(1).unwrap();
    assert_eq!(state.export("fifo").unwrap(), SlotData::Recurrent(vec![2.0]));
    let copy = state.fork().unwrap();
    run(&mut loaded, &mut *state, &[5.0]);
    state.commit(1).unwrap();
    assert_eq!((copy.len(), copy.export("fifo").unwrap()), (1, SlotData::Recurrent(vec![2.0])));
    assert_close(&loaded.output("sums"), &[7.0]);
}

#[test]
fn states_move() {
    let mut loaded = bench(true).load();
    let (mut state, mut other) = (loaded.state(), loaded.state());
    run(&mut loaded, &mut *state, &[1.0, 2.0, 3.0]);
    state.commit(3).unwrap();
    let (kv, fifo) = (state.export("kv").unwrap(), state.export("fifo").unwrap());
    refused(other.set_len(3), "does not hold 3 rows");
    other.import("kv", &kv).unwrap();
    other.import("fifo", &fifo).unwrap();
    other.set_len(3).unwrap();
    assert_eq!((other.export("kv").unwrap(), other.export("fifo").unwrap()), (kv.clone(), fifo.clone()));
    assert_close(&run(&mut loaded, &mut *other, &[6.0]), &[3.0]);
    assert_close(&loaded.output("sums"), &[9.0]);
    refused(state.import("kv", &fifo), "wrong kind");
    refused(state.import("fifo", &SlotData::Recurrent(vec![0.0; 2])), "needs 1 numbers, found 2");
    refused(state.import("none", &fifo), "no slot `none`");
    refused(state.export("none"), "no slot `none`");
    let rows = |dtype, rows, bytes| SlotData::Kv { dtype, rows, keys: vec![0; bytes], values: vec![0; bytes] };
    refused(state.import("kv", &rows(KvType::F32, 2, 8)), "2 rows from row 0 on do not match 3 committed");
    refused(state.import("kv", &rows(KvType::F32, 3, 8)), "need 12 bytes");
    refused(state.import("kv", &rows(KvType::F16, 3, 6)), "needs F32 rows");
    refused(loaded.state().set_len(65), "exceed the context of 64");
    assert!(state.bytes() >= 4 * (3 + 3 + 1));
}

#[test]
fn foreign_states_are_refused() {
    let mut loaded = bench(false).load();
    let mut other = bench(true).load().state();
    let inputs = [F32(&[0.0]), F32(&[0.0]), F32(&[0.0])];
    let segment = Segment::new(Some(&mut *other), 0, 1);
    refused(loaded.run(1, &inputs, &mut [segment]), "another program");
    refused(loaded.run(1, &inputs, &mut [Segment::new(None, 0, 1)]), "has no state");
}

#[test]
fn a_cancelled_call_changes_nothing_and_taps_come_in_order() {
    let mut bench = bench(true);
    bench.program.stages =
        ["op.sums", "op.means"].map(|name| Stage { name: name.into(), tap: Some(name.into()), rotated: false, centred: false }).into();
    let mut loaded = bench.load();
    let mut state = loaded.state();
    run(&mut loaded, &mut *state, &[1.0]);
    state.commit(1).unwrap();
    let inputs = [F32(&[0.0]), F32(&[0.0]), F32(&[9.0]), F32(&[9.0])];
    let flag = AtomicBool::new(false);
    let mut seen = vec![];
    let mut taps = |tap: crate::Tap<'_>| {
        seen.push((tap.stage.to_string(), tap.shape.to_vec(), tap.values.to_vec()));
        flag.store(true, Ordering::Relaxed);
    };
    let mut segments = [Segment::new(Some(&mut *state), 0, 1)];
    let result = loaded.run_with(1, &inputs, &mut segments, Some(&flag), Some(&mut taps));
    assert!(matches!(result, Err(DeviceError::Cancelled)));
    assert_eq!(seen, [("op.sums".to_string(), vec![1, 1], vec![10.0])]);
    refused(state.commit(1), "no call to commit");
    assert_close(&run(&mut loaded, &mut *state, &[3.0]), &[2.0]);
    assert_close(&loaded.output("sums"), &[4.0]);
}

#[test]
fn taps_of_rotated_stages_are_turned_back() {
    let mut bench = Bench::new().rows("x", &[6]).op("y", OpKind::Hadamard { x: "x".into() });
    bench.program.stages[0] = Stage { name: "op".into(), tap: Some("op.y".into()), rotated: true, centred: false };
    assert!(crate::Checked::new(bench.program.clone()).unwrap().cut([0]).unwrap().stages[0].rotated);
    let mut loaded = bench.load();
    let mut state = loaded.state();
    let x: [f32; 12] = std::array::from_fn(|i| i as f32);
    let mut seen = vec![];
    let mut taps = |tap: crate::Tap<'_>| seen.extend_from_slice(tap.values);
    loaded.run_with(2, &[F32(&x)], &mut [Segment::new(Some(&mut *state), 0, 2)], None, Some(&mut taps)).unwrap();
    assert!(seen.len() == 12 && seen.iter().zip(x).all(|(seen, x)| (seen - x).abs() < 1e-5), "{seen:?}");
    assert!((loaded.output("y")[0] - 15.0 / 6f32.sqrt()).abs() < 1e-5, "what the op makes stays rotated");
}

#[test]
fn calls_that_do_not_fit() {
    let mut loaded = bench(false).load();
    let mut state = loaded.state();
    let numbers = [0.0; 65];
    let mut call = |rows: usize, inputs: &[crate::InputData<'_>], first_row: usize, valid_rows: usize| {
        loaded.run(rows, inputs, &mut [Segment::new(Some(&mut *state), first_row, valid_rows)])
    };
    let x = |n: usize| F32(&numbers[..n]);
    refused(call(2, &[x(2), x(2)], 0, 2), "2 inputs");
    refused(call(2, &[x(2), x(2), x(1)], 0, 2), "`v` needs 2 values of F32, found 1");
    refused(call(2, &[x(2), x(2), I32(&[0, 0])], 0, 2), "found 2 of I32");
    refused(call(0, &[x(0), x(0), x(0)], 0, 0), "at least one row");
    refused(call(2, &[x(2), x(2), x(2)], 1, 2), "segment 1..3");
    refused(call(2, &[x(2), x(2), x(2)], 0, 0), "segment 0..0");
    refused(call(65, &[x(65), x(65), x(65)], 0, 1), "was loaded for");
    assert!(loaded.outputs.value("nothing").is_none());
}
