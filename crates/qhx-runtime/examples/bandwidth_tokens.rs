//! Two memory-bound stages on two groups of the processor's threads, which share a bus: at the same time, and one after the other by bandwidth tokens.
//!
//! `cargo run --release -p qhx-runtime --example bandwidth_tokens -- [THREADS OF A GROUP] [ROUNDS]`

use qhx_ir::{
    AlignedBytes, Bindings, Call, Checked, DType, Dim, Encoding, Executable, Generator, Input, InputData, LoadOptions, Op, OpKind, Output,
    Outputs, PROGRAM_VERSION, Program, Segment, Stage, Weight, WeightTensor, Weights,
};
use qhx_runtime::{DeviceChoice, registry, split::BandwidthTokens};
use std::{
    collections::{BTreeMap, HashMap},
    error::Error,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

const WIDTH: usize = 2048;
/// Matrices of a stage: 100 MiB in int8.
const MATRICES: usize = 25;
/// Stages that each group runs in a round.
const STAGES: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<usize>());
    let threads = numbers.next().transpose()?.unwrap_or(thread::available_parallelism()?.get().div_ceil(2));
    let rounds = numbers.next().transpose()?.unwrap_or(9);
    let mut groups = [stage(threads)?, stage(threads)?];
    groups.iter_mut().for_each(|group| run(&mut **group));
    // A weight of 2 lets nobody else run.
    let ways = [("at the same time", 0.0), ("one after the other", 2.0)];
    let (mut times, mut alone) = (vec![Vec::new(); ways.len()], Vec::new());
    for _ in 0..rounds {
        alone.push(timed(|| (0..STAGES).for_each(|_| run(&mut *groups[0]))));
        for ((_, weight), times) in ways.iter().zip(&mut times) {
            let tokens = BandwidthTokens::new();
            let work = |group: &mut dyn Executable| {
                for _ in 0..STAGES {
                    let _permit = tokens.take(*weight);
                    run(group);
                }
            };
            let [first, second] = &mut groups;
            times.push(timed(|| {
                thread::scope(|scope| {
                    scope.spawn(|| work(&mut **first));
                    work(&mut **second);
                });
            }));
        }
    }
    let gib = |time: Duration, stages: usize| (stages * MATRICES * WIDTH * WIDTH) as f64 / time.as_secs_f64() / f64::from(1 << 30);
    let one = median(&mut alone);
    println!("one group of {threads} threads alone: {:.1} GiB/s", gib(one, STAGES));
    for ((name, _), times) in ways.iter().zip(&mut times) {
        let time = median(times);
        println!(
            "two groups {name}: {:.1} GiB/s, {:.2} times as long as one alone",
            gib(time, 2 * STAGES),
            time.as_secs_f64() / one.as_secs_f64()
        );
    }
    Ok(())
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn timed(work: impl FnOnce()) -> Duration {
    let started = Instant::now();
    work();
    started.elapsed()
}

/// One row through all matrices.
fn run(stage: &mut dyn Executable) {
    let (row, mut outputs) = (vec![0.5; WIDTH], Outputs::new());
    let (inputs, mut segments) = ([InputData::F32(&row)], [Segment::new(None, 0, 1)]);
    let bindings = Bindings { rows: 1, soft_rows: 0, wanted: 0 };
    stage.run(&mut Call::new(bindings, &inputs, &mut segments, &mut outputs)).expect("the processor takes it");
}

/// A stage on threads of its own.
fn stage(threads: usize) -> Result<Box<dyn Executable>, Box<dyn Error>> {
    let row = Encoding::I8Row.row_bytes(WIDTH).ok_or("too large")?;
    let name = |number: usize| format!("matrix.{number}");
    let mut weights: HashMap<String, WeightTensor> = HashMap::new();
    for number in 0..MATRICES {
        // Written, so that every page is one of its own.
        let mut data = AlignedBytes::zeroed(WIDTH * row.data);
        data.as_mut().fill(number as u8 + 1);
        let scale = AlignedBytes::zeroed(WIDTH * row.scale);
        weights.insert(name(number), WeightTensor::new(Encoding::I8Row, vec![WIDTH, WIDTH], data.into(), Some(scale.into()), None)?);
    }
    let op = |number: usize| Op {
        path: format!("stage.{number}").into(),
        op: OpKind::Linear {
            x: if number == 0 { "x".into() } else { format!("stage.{}", number - 1).into() },
            weight: name(number).into(),
            bias: None,
            activation: qhx_ir::ActivationForm::I8Row,
            clip: None,
        },
    };
    let last = format!("stage.{}", MATRICES - 1);
    let program = Checked::new(Program {
        program_version: PROGRAM_VERSION,
        name: "stage".into(),
        inputs: vec![Input { name: "x".into(), dtype: DType::F32, shape: vec![Dim::T, WIDTH.into()], generator: Generator::Carried }],
        outputs: vec![Output { name: last.as_str().into(), value: last.as_str().into() }],
        slots: BTreeMap::new(),
        epochs: Vec::new(),
        rotaries: BTreeMap::new(),
        stages: vec![Stage { name: "stage".into(), tap: None, rotated: false, centred: false }],
        weights: (0..MATRICES).map(|n| (name(n).into(), Weight { encoding: Encoding::I8Row, shape: vec![WIDTH, WIDTH] })).collect(),
        ops: (0..MATRICES).map(op).collect(),
    })?;
    let weights: Arc<dyn Weights> = Arc::new(weights);
    let device = registry::candidates(DeviceChoice::Cpu, Some(threads))?.swap_remove(0);
    Ok(device.load(&program, &weights, &LoadOptions { max_rows: 1, ..LoadOptions::default() })?)
}
