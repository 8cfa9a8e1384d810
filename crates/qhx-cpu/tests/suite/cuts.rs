//! The results of a session are the same to the last bit, however its rows are cut into calls and whoever else is in them: every op, encoding and activation form, and
//! whole tiny models, for every instruction set that this CPU has.
//!
//! `QHX_CONFORMANCE_ONLY=attend/3` runs one case again. With `QHX_EMULATED` set, the best instruction set alone is tested: an emulated CPU is slow.

use crate::{
    decoder::{self, Sizes, decoder},
    extended,
};
use qhx_cpu::{CpuDevice, CpuOptions, InstructionSet};
use qhx_ir::{
    conformance::{CaseResult, Options, Outcome, Summary, same_bits_for_any_cut, same_bits_in_company},
    *,
};
use std::sync::Arc;

fn emulated() -> bool {
    std::env::var_os("QHX_EMULATED").is_some()
}

fn devices() -> Vec<CpuDevice> {
    let mut sets = InstructionSet::available();
    if emulated() {
        sets.drain(..sets.len() - 1);
    }
    let device = |instructions| CpuDevice::new(CpuOptions { threads: Some(2), instructions: Some(instructions), ..Default::default() });
    sets.into_iter().map(|set| device(set).unwrap()).collect()
}

#[test]
fn every_op() {
    let best = *InstructionSet::available().last().unwrap();
    type Suite = fn(&dyn Device, &Options, &mut dyn FnMut(&CaseResult)) -> Summary;
    for device in devices() {
        let every = match device.instructions() {
            _ if extended() => 1,
            _ if emulated() => 24,
            set if set == best => 2,
            _ => 6,
        };
        let options = Options { strict: true, cases: 1, every, ..Options::from_environment() };
        // An emulated CPU is slow.
        let suites = [same_bits_for_any_cut as Suite, same_bits_in_company];
        for suite in suites.into_iter().take(if emulated() && !extended() { 1 } else { 2 }) {
            let summary = suite(&device, &options, &mut |case| {
                if !matches!(case.outcome, Outcome::Passed { .. }) {
                    println!("{case}");
                }
            });
            println!("{}:\n{summary}", device.instructions());
            assert!(summary.failed.is_empty(), "{}: {} cases failed", device.instructions(), summary.failed.len());
        }
    }
}

/// The logits of all rows, cut into calls of `size` rows.
fn logits(device: &CpuDevice, program: &Checked, weights: &Arc<dyn Weights>, rows: usize, size: usize) -> Vec<u32> {
    let limits = LoadOptions {
        max_rows: size,
        max_soft_rows: 0,
        max_wanted: size,
        max_segments: 1,
        max_state_bytes: None,
        replaceable: Vec::new(),
        pauses: Vec::new(),
        scratch_group: None,
        history: None,
        artifacts: None,
        progress: None,
        timeline: None,
    };
    let mut executable = device.load(program, weights, &limits).unwrap();
    let mut state = executable.new_state(rows).unwrap();
    let mut bits = Vec::new();
    for first in (0..rows).step_by(size) {
        let n = (rows - first).min(size);
        let ids: Vec<i32> = (first..first + n).map(|row| (row * 7919 % 300) as i32).collect();
        let positions: Vec<i32> = (first..first + n).map(|row| row as i32).collect();
        let (wanted, mut outputs) = ((0..n as i32).collect::<Vec<i32>>(), Outputs::new());
        let all = [("ids", &ids), ("positions", &positions), ("wanted", &wanted)];
        let inputs: Vec<_> = all.iter().filter(|(name, _)| program.inputs.iter().any(|input| &*input.name == *name)).collect();
        let inputs: Vec<_> = inputs.iter().map(|(_, numbers)| InputData::I32(numbers)).collect();
        let (bindings, mut segments) = (Bindings { rows: n, soft_rows: 0, wanted: n }, [Segment::new(Some(&mut *state), 0, n)]);
        executable.run(&mut Call::new(bindings, &inputs, &mut segments, &mut outputs)).unwrap();
        state.commit(n).unwrap();
        bits.extend(outputs.value("logits").unwrap().iter().map(|x| x.to_bits()));
    }
    bits
}

/// Wider than the suite's programs: rows of several pieces, panels and tiles, and keys of several runs.
#[test]
fn wide_decoders() {
    let sizes = Sizes { layers: 1, hidden: 560, ffn: 1056, heads: 6, kv_heads: 2, head_dim: 32, vocab: 300, experts: 0 };
    let (rows, cuts) = match emulated() {
        true => (70, &[1, 9][..]),
        false if extended() => (270, &[1, 9, 64][..]),
        false => (270, &[9, 64][..]),
    };
    let models = [
        (Encoding::F32, ActivationForm::F32, 0),
        (Encoding::F16, ActivationForm::F16, 0),
        (Encoding::I8Row, ActivationForm::I8Row, 0),
        (Encoding::I4_BLOCK32, ActivationForm::I8Block32, 0),
        (Encoding::I4_BLOCK32_MIN, ActivationForm::I8Row, 3),
        (Encoding::I8_BLOCK32, ActivationForm::F32, 3),
        (Encoding::I6_BLOCK32, ActivationForm::I8Block32, 0),
    ];
    for (encoding, form, experts) in models.into_iter().step_by(if emulated() && !extended() { 3 } else { 1 }) {
        let ffn = if experts > 0 { 96 } else { sizes.ffn };
        let (program, weights) = decoder(&Sizes { ffn, experts, ..sizes }, encoding, form).unwrap();
        let weights: Arc<dyn Weights> = Arc::new(weights);
        for device in devices() {
            let whole = logits(&device, &program, &weights, rows, rows);
            for &size in cuts {
                let same = logits(&device, &program, &weights, rows, size) == whole;
                assert!(same, "{encoding} {form:?}, {}: calls of {size} rows give other logits than one call", device.instructions());
            }
        }
    }
}

/// Attention over caches that end around blocks and runs of keys, with few and many queries that share a key head, and heads of whole and of partial vectors.
#[test]
fn attention_around_the_edges_of_units() {
    let rows = if emulated() { 67 } else { 515 };
    for (heads, kv_heads, head_dim) in [(2, 2, 128), (4, 2, 128), (3, 1, 64), (8, 2, 72), (20, 1, 16)] {
        let sizes = Sizes { layers: 1, hidden: 64, ffn: 64, heads, kv_heads, head_dim, vocab: 300, experts: 0 };
        let (program, weights) = decoder(&sizes, Encoding::I8Row, ActivationForm::I8Row).unwrap();
        let weights: Arc<dyn Weights> = Arc::new(weights);
        for device in devices() {
            let whole = logits(&device, &program, &weights, rows, rows);
            for size in if extended() { &[1, 3, 7][..] } else { &[7] } {
                let same = logits(&device, &program, &weights, rows, *size) == whole;
                assert!(same, "{heads} heads, {kv_heads} of keys, {head_dim} wide, {}: calls of {size} rows", device.instructions());
            }
        }
    }
}

/// More channels than one unit has: against the sums as they are written, and with the rows cut into calls.
#[test]
fn short_convolution_of_many_channels() {
    const CHANNELS: usize = 1100;
    const TAPS: usize = 4;
    let sizes = Sizes { layers: 0, hidden: CHANNELS, ffn: 1, heads: 1, kv_heads: 1, head_dim: 2, vocab: 300, experts: 0 };
    let (plain, mut weights) = decoder(&sizes, Encoding::F32, ActivationForm::F32).unwrap();
    let mut program = Program::clone(&plain);
    let taps = decoder::random(Encoding::F32, &[CHANNELS, TAPS], &mut 77);
    program.weights.retain(|name, _| &**name == "table");
    program.weights.insert("taps".into(), Weight { shape: vec![CHANNELS, TAPS], encoding: Encoding::F32 });
    program.slots.insert("rows".into(), Slot::Fifo { rows: TAPS - 1, channels: CHANNELS });
    program.rotaries.clear();
    program.ops.truncate(1);
    let mixed = OpKind::ShortConv {
        x: "embed.rows".into(),
        weight: "taps".into(),
        bias: None,
        slot: Some("rows".into()),
        activation: Some(Activation::Relu),
    };
    program.ops.push(Op { path: "embed.mixed".into(), op: mixed });
    program.ops.push(Op { path: "lm_head.wanted".into(), op: OpKind::Gather { x: "embed.mixed".into(), rows: "wanted".into() } });
    program.inputs.retain(|input| &*input.name != "positions");
    program.outputs[0].value = "lm_head.wanted".into();
    let program = Checked::new(program).unwrap();
    let number = |weight: &WeightTensor, row: usize, column: usize| {
        bytemuck::cast_slice::<u8, f32>(&weight.data()[row * weight.row_bytes().data..])[column]
    };
    let (rows, table) = (9, weights["table"].clone());
    let x = |row: usize, channel: usize| number(&table, row * 7919 % 300, channel);
    let sum = |row: usize, channel: usize| -> f32 {
        let terms = (0..TAPS).filter_map(|tap| Some(number(&taps, channel, tap) * x((row + tap).checked_sub(TAPS - 1)?, channel)));
        terms.sum()
    };
    let wanted: Vec<f32> = (0..rows * CHANNELS).map(|place| sum(place / CHANNELS, place % CHANNELS).max(0.0)).collect();
    weights.retain(|name, _| name == "table");
    weights.insert("taps".into(), taps.clone());
    let weights: Arc<dyn Weights> = Arc::new(weights);
    for device in devices() {
        for size in [1, 2, 5, 9] {
            let found = logits(&device, &program, &weights, rows, size);
            let close = found.iter().zip(&wanted).all(|(found, wanted)| (f32::from_bits(*found) - wanted).abs() < 1e-6);
            assert!(found.len() == wanted.len() && close, "{}: calls of {size} rows", device.instructions());
        }
    }
}
