//! Times an output head of random int8 weights, read whole and with a shortlist: `cargo run --release -p qhx-cpu --example head -- [threads] [rows] [columns]`

#[path = "../tests/suite/decoder.rs"]
mod decoder;

use qhx_cpu::{CpuDevice, CpuOptions};
use qhx_ir::*;
use std::{collections::HashMap, sync::Arc, time::Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let number = |i: usize, default: usize| numbers.get(i).copied().unwrap_or(default);
    let (threads, rows, columns) = (number(0, 1), number(1, 49152), number(2, 576));
    let weight = decoder::random(Encoding::I8_BLOCK32, &[rows, columns], &mut 0x1234_5678_9abc_def1);
    let linear = OpKind::Linear { x: "x".into(), weight: "weight".into(), bias: None, activation: ActivationForm::I8Block32, clip: None };
    let program = Checked::new(Program {
        program_version: PROGRAM_VERSION,
        name: "head".into(),
        inputs: vec![Input {
            name: "x".into(),
            dtype: DType::F32,
            shape: vec![Dim::L, Dim::Fixed(columns)],
            generator: Generator::Carried,
        }],
        outputs: vec![Output { name: "y".into(), value: "head.product".into() }],
        slots: Default::default(),
        epochs: vec![],
        rotaries: Default::default(),
        stages: vec![Stage { name: "head".into(), tap: None, rotated: false, centred: false }],
        weights: [("weight".into(), Weight { shape: weight.shape().to_vec(), encoding: weight.encoding() })].into(),
        ops: vec![Op { path: "head.product".into(), op: linear }],
    })?;
    let weights: Arc<dyn Weights> = Arc::new(HashMap::from([("weight".to_owned(), weight)]));
    let device = CpuDevice::new(CpuOptions { threads: Some(threads), ..Default::default() })?;
    let mut executable = device.load_here(&program, &weights, &LoadOptions::default())?;
    for round in 0..3 {
        for largest_only in [false, true] {
            let mut times = Vec::new();
            for call in 0..60 {
                // Some columns are far larger than others.
                let x: Vec<f32> = (0..columns)
                    .map(|i| (((i * 2654435761 + call * 40503) % 1000) as f32 - 500.0) / 400.0 * if i % 61 == 7 { 20.0 } else { 1.0 })
                    .collect();
                let start = Instant::now();
                let mut outputs = Outputs::new();
                let (inputs, mut segments) = ([InputData::F32(&x)], []);
                let mut call = Call::new(Bindings { rows: 1, soft_rows: 0, wanted: 1 }, &inputs, &mut segments, &mut outputs);
                call.wants = if largest_only { &[Want::Largest] } else { &[Want::Logits] };
                executable.run(&mut call)?;
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
            times.sort_by(f64::total_cmp);
            let bytes = executable.weights_read().map_or(0, |read| read.bytes);
            println!(
                "round {round}, {}: {:.3} ms (least {:.3}), {:.1} MB",
                if largest_only { "shortlist" } else { "whole" },
                times[30],
                times[0],
                bytes as f64 / 1e6
            );
        }
    }
    Ok(())
}
