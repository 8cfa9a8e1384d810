//! Recurrent ops with more sessions in a call than are shared out at once: each session's results are those that it has alone, to the last bit.

use crate::decoder;
use qhx_cpu::{CpuDevice, CpuOptions};
use qhx_ir::*;
use std::{collections::HashMap, sync::Arc};

const SESSIONS: usize = 37;
/// Channels of the convolution; also the numbers of a row's queries, keys and values: two heads of 16.
const WIDTH: usize = 32;

/// A convolution whose results are queries, keys and values of a delta rule.
fn program() -> (Checked, Arc<dyn Weights>) {
    let numbers = |shape: &[usize], noise: &mut u64| decoder::random(Encoding::F32, shape, noise);
    let mut noise = 0x1234_5678_9abc_def1;
    let weights: HashMap<String, WeightTensor> = [("taps", vec![WIDTH, 4]), ("a_log", vec![2]), ("dt_bias", vec![2])]
        .map(|(name, shape)| (name.to_owned(), numbers(&shape, &mut noise)))
        .into();
    let fixed = |sizes: &[usize]| std::iter::once(Dim::T).chain(sizes.iter().map(|&n| Dim::Fixed(n))).collect::<Vec<_>>();
    let input = |name: &str, shape| Input { name: name.into(), dtype: DType::F32, shape, generator: Generator::Carried };
    let op = |path: &str, op| Op { path: path.into(), op };
    let convolution = OpKind::ShortConv { x: "x".into(), weight: "taps".into(), bias: None, slot: Some("fifo".into()), activation: None };
    let delta = OpKind::GatedDelta {
        q: "all.heads".into(),
        k: "all.heads".into(),
        v: "all.heads".into(),
        a: "gates".into(),
        b: "gates".into(),
        a_log: "a_log".into(),
        dt_bias: "dt_bias".into(),
        slot: "delta".into(),
        scale: 0.25,
        eps: 1e-6,
    };
    let program = Program {
        program_version: PROGRAM_VERSION,
        name: "text".into(),
        inputs: vec![input("x", fixed(&[WIDTH])), input("gates", fixed(&[2]))],
        outputs: vec![Output { name: "y".into(), value: "all.delta".into() }],
        slots: [
            ("fifo".into(), Slot::Fifo { rows: 3, channels: WIDTH }),
            ("delta".into(), Slot::Delta { heads: 2, key_dim: 16, value_dim: 16 }),
        ]
        .into(),
        epochs: vec![],
        rotaries: Default::default(),
        stages: vec![Stage { name: "all".into(), tap: None, rotated: false, centred: false }],
        weights: weights
            .iter()
            .map(|(name, w)| (name.as_str().into(), Weight { shape: w.shape().to_vec(), encoding: w.encoding() }))
            .collect(),
        ops: vec![
            op("all.convolution", convolution),
            op("all.heads", OpKind::Reshape { x: "all.convolution".into(), shape: fixed(&[2, 16]) }),
            op("all.delta", delta),
        ],
    };
    (Checked::new(program).unwrap(), Arc::new(weights))
}

/// The numbers of a session's rows.
fn numbers(session: usize, rows: std::ops::Range<usize>, width: usize) -> Vec<f32> {
    let number = |row: usize, i: usize| ((session * 7919 + row * 523 + i * 31) % 997) as f32 / 498.0 - 1.0;
    rows.flat_map(|row| (0..width).map(move |i| number(row, i))).collect()
}

/// One call with some rows of each session, which are committed; the bits of the results of each.
fn call(executable: &mut dyn Executable, sessions: &mut [(usize, Box<dyn State>)], rows: impl Fn(usize) -> usize) -> Vec<Vec<u32>> {
    let (mut x, mut gates, mut segments, mut first) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for (session, state) in sessions.iter_mut() {
        let (len, count) = (state.len(), rows(*session));
        x.extend(numbers(*session, len..len + count, WIDTH));
        gates.extend(numbers(*session, len..len + count, 2));
        segments.push(Segment::new(Some(&mut **state), first, count));
        first += count;
    }
    let mut outputs = Outputs::new();
    let bindings = Bindings { rows: first, soft_rows: 0, wanted: 0 };
    executable.run(&mut Call::new(bindings, &[InputData::F32(&x), InputData::F32(&gates)], &mut segments, &mut outputs)).unwrap();
    let mut results = outputs.value("y").unwrap().iter().map(|x| x.to_bits());
    sessions.iter_mut().for_each(|(session, state)| state.commit(rows(*session)).unwrap());
    sessions.iter().map(|(session, _)| results.by_ref().take(rows(*session) * WIDTH).collect()).collect()
}

#[test]
fn more_sessions_than_are_shared_out_at_once() {
    let (program, weights) = program();
    let device = CpuDevice::new(CpuOptions { threads: Some(2), ..Default::default() }).unwrap();
    let limits = LoadOptions { max_rows: 256, max_segments: SESSIONS, ..Default::default() };
    let mut executable = device.load_here(&program, &weights, &limits).unwrap();
    let sessions = |numbers: std::ops::Range<usize>, executable: &dyn Executable| {
        numbers.map(|number| (number, executable.new_state(64).unwrap())).collect::<Vec<_>>()
    };
    let mut together = sessions(0..SESSIONS, &executable);
    // The second call goes on from the states of the first.
    let rounds = [|session: usize| session % 5 + 1, |session: usize| session % 3 + 1];
    let found = rounds.map(|rows| call(&mut executable, &mut together, rows));
    for session in 0..SESSIONS {
        let mut alone = sessions(session..session + 1, &executable);
        for (rows, found) in rounds.iter().zip(&found) {
            assert_eq!(call(&mut executable, &mut alone, rows)[0], found[session], "session {session}");
        }
    }
}
