//! Results do not depend on the number of threads, bit for bit, on whole models.
//!
//! With `QHX_EMULATED` set, the best instruction set alone is tested, with fewer models and shorter calls: an emulated CPU is slow, and how work is cut does not depend on the set.

use crate::{
    decoder::{Sizes, decoder},
    extended,
};
use qhx_cpu::{CpuDevice, CpuOptions, InstructionSet};
use qhx_ir::{conformance::models, *};
use std::sync::Arc;

/// All bits that a session of calls gives: outputs, taps and slots.
fn bits(device: &CpuDevice, program: &Checked, weights: &Arc<dyn Weights>, calls: &[usize]) -> Vec<u32> {
    let limits = LoadOptions {
        max_rows: 300,
        max_soft_rows: 2,
        max_wanted: 2,
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
    let mut state = executable.new_state(1024).unwrap();
    let mut bits = Vec::new();
    for &rows in calls {
        let start = state.len();
        let bindings = Bindings { rows, soft_rows: 2.min(rows), wanted: 2.min(rows) };
        let inputs: Vec<Vec<f32>> = program.inputs.iter().map(|input| numbers(program, input, &bindings, start)).collect();
        let integers: Vec<Vec<i32>> = inputs.iter().map(|input| input.iter().map(|&x| x as i32).collect()).collect();
        let data = program.inputs.iter().zip(&inputs).zip(&integers).map(|((input, floats), integers)| match input.dtype {
            DType::F32 => InputData::F32(floats),
            DType::I32 => InputData::I32(integers),
        });
        let data: Vec<_> = data.collect();
        let mut tapped = Vec::new();
        let mut taps = |tap: Tap<'_>| tapped.extend(tap.values.iter().map(|x| x.to_bits()));
        let mut outputs = Outputs::new();
        let mut segments = [Segment::new(Some(&mut *state), 0, rows)];
        let mut call = Call::new(bindings, &data, &mut segments, &mut outputs);
        call.taps = Some(&mut taps);
        executable.run(&mut call).unwrap();
        state.commit(rows).unwrap();
        bits.extend(tapped);
        for output in &program.outputs {
            bits.extend(outputs.value(&output.name).unwrap().iter().map(|x| x.to_bits()));
        }
    }
    for slot in program.slots.keys() {
        match state.export(slot).unwrap() {
            SlotData::Recurrent(numbers) => bits.extend(numbers.iter().map(|x| x.to_bits())),
            SlotData::Kv { keys, values, .. } => bits.extend(keys.iter().chain(&values).map(|&byte| byte as u32)),
        }
    }
    bits
}

/// Numbers that an input accepts.
fn numbers(program: &Checked, input: &Input, bindings: &Bindings, start: usize) -> Vec<f32> {
    let shape: Vec<usize> = input.shape.iter().map(|dim| dim.bind(bindings).unwrap()).collect();
    let count: usize = shape.iter().product();
    let limits = program.ops.iter().filter_map(|op| match &op.op {
        OpKind::Embed { ids: index, table, .. } | OpKind::Interpolate { index, table, .. } if *index == input.name => {
            Some(program.weights[table].shape[0])
        }
        OpKind::Gather { rows: index, .. } | OpKind::ScatterRows { at: index, .. } | OpKind::ScatterAddRows { at: index, .. }
            if *index == input.name =>
        {
            Some(bindings.rows)
        }
        _ => None,
    });
    let limit = limits.min();
    let number = |i: usize| match (input.dtype, limit) {
        (DType::I32, Some(limit)) if count <= 2 => (limit - 1 - i) as f32,
        (DType::I32, Some(limit)) => ((start + i) * 7919 % limit) as f32,
        (DType::I32, None) => (start + i % shape[shape.len() - 1]) as f32,
        (DType::F32, _) => (((start + i) * 2654435761 % 1000) as f32 - 500.0) / 400.0,
    };
    (0..count).map(number).collect()
}

fn emulated() -> bool {
    std::env::var_os("QHX_EMULATED").is_some()
}

fn same_for_all_thread_counts(name: &str, program: &Checked, weights: &Arc<dyn Weights>, calls: &[usize]) {
    let sets = InstructionSet::available();
    let (sets, counts) =
        if emulated() { (&sets[sets.len() - 1..], &[3][..]) } else { (&sets[..], if extended() { &[2, 3, 5][..] } else { &[3] }) };
    for &instructions in sets {
        let with = |threads| {
            let device =
                CpuDevice::new(CpuOptions { threads: Some(threads), instructions: Some(instructions), ..Default::default() }).unwrap();
            bits(&device, program, weights, calls)
        };
        let one = with(1);
        assert!(!one.is_empty() && one.iter().any(|&bits| bits != 0));
        for &threads in counts {
            assert!(with(threads) == one, "{name}, {instructions}: {threads} threads give other bits than one");
        }
    }
}

#[test]
fn decoders() {
    let sizes = Sizes { layers: 2, hidden: 192, ffn: 320, heads: 6, kv_heads: 2, head_dim: 32, vocab: 700, experts: 0 };
    let calls: &[usize] = if emulated() { &[40, 2, 9] } else { &[300, 2, 70, 5] };
    for (encoding, form, experts) in [
        (Encoding::F32, ActivationForm::F32, 0),
        (Encoding::Bf16, ActivationForm::F16, 0),
        (Encoding::I4_BLOCK32_MIN, ActivationForm::I8Block32, 0),
        (Encoding::I8Row, ActivationForm::I8Row, 0),
        (Encoding::I8_BLOCK32, ActivationForm::F32, 5),
        (Encoding::I4_BLOCK32, ActivationForm::I8Block32, 5),
        (Encoding::I6_BLOCK32, ActivationForm::I8Block32, 5),
    ] {
        let (program, weights) = decoder(&Sizes { experts, ..sizes }, encoding, form).unwrap();
        let weights: Arc<dyn Weights> = Arc::new(weights);
        same_for_all_thread_counts(&format!("{encoding} {form:?} {experts}"), &program, &weights, calls);
    }
}

#[test]
fn pinned_threads() {
    let sizes = Sizes { layers: 1, hidden: 192, ffn: 320, heads: 6, kv_heads: 2, head_dim: 32, vocab: 300, experts: 0 };
    let (program, weights) = decoder(&sizes, Encoding::I4_BLOCK32, ActivationForm::I8Block32).unwrap();
    let weights: Arc<dyn Weights> = Arc::new(weights);
    let cores = std::thread::available_parallelism().unwrap().get();
    let pinned = CpuDevice::new(CpuOptions { threads: Some(cores.min(3)), pin: true, ..Default::default() }).unwrap();
    let free = CpuDevice::new(CpuOptions { threads: Some(2), ..Default::default() }).unwrap();
    assert_eq!(bits(&pinned, &program, &weights, &[40, 2, 9]), bits(&free, &program, &weights, &[40, 2, 9]));
    // The calling thread is as free as before.
    assert_eq!(std::thread::available_parallelism().unwrap().get(), cores);
    if qhx_cpu::CAN_PIN {
        let info = pinned.open().unwrap().describe();
        assert!(matches!(&info.facts["pinned_to_cores"], Fact::Cores(shown) if shown.len() == cores.min(3)), "{info:?}");
        let Err(error) = CpuDevice::new(CpuOptions { threads: Some(1000), pin: true, ..Default::default() }) else { panic!("1000 cores") };
        assert!(error.to_string().contains("1000 threads cannot be kept"), "{error}");
    }
}

#[test]
fn every_tiny_model() {
    for number in 0..if extended() { 4 } else { 1 } {
        for model in models::tiny(number) {
            same_for_all_thread_counts(model.name, &model.program, &model.weights, &[96, 16, 48, 4]);
        }
    }
}
