//! Times one row through an expert now and then, as in a split where a GPU computes the rest of each layer: with how many threads, and how long after the call before.
//!
//! `cargo run --release -p qhx-cpu --example experts -- [threads,threads…] [microseconds between calls,…] [layers] [encoding] [form]`

use qhx_cpu::{CpuDevice, CpuOptions};
use qhx_ir::{
    Activation, ActivationForm, AlignedBytes, Bindings, Call, Checked, DType, Dim, Encoding, Executable, Generator, Input, InputData,
    LoadOptions, Name, Op, OpKind, Output, Outputs, PROGRAM_VERSION, Program, Segment, Stage, Weight, WeightTensor, Weights,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

const EXPERTS: usize = 16;
const HIDDEN: usize = 4096;
const FFN: usize = 448;
const CALLS: usize = 400;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |i: usize| arguments.get(i).map(String::as_str).filter(|a| *a != "-");
    let list = |text: &str| text.split(',').map(str::parse).collect::<Result<Vec<u64>, _>>();
    let threads = list(argument(0).unwrap_or("1,2"))?;
    let gaps = list(argument(1).unwrap_or("0,100"))?;
    let layers: usize = argument(2).unwrap_or("8").parse()?;
    let encoding: Encoding = argument(3).unwrap_or("i8_row").parse()?;
    let form: ActivationForm = serde_json::from_value(argument(4).unwrap_or("i8_block32").into())?;
    let programs: Vec<Checked> = (0..layers).map(|layer| program(layer, encoding, form)).collect::<Result<_, _>>()?;
    let mut tensors: HashMap<String, WeightTensor> = HashMap::new();
    for (name, weight) in programs.iter().flat_map(|program| &program.weights) {
        tensors.insert(name.to_string(), tensor(weight)?);
    }
    let bytes: usize = tensors.values().map(WeightTensor::stored_bytes).sum::<usize>() / (layers * EXPERTS);
    let weights: Arc<dyn Weights> = Arc::new(tensors);
    println!("{layers} layers of {EXPERTS} experts of {:.1} MB", bytes as f64 / 1e6);
    for threads in threads {
        let device = CpuDevice::new(CpuOptions { threads: Some(threads as usize), ..Default::default() })?;
        let load = |program: &Checked| device.load_here(program, &weights, &LoadOptions { max_rows: 1, ..Default::default() });
        let mut executables = programs.iter().map(load).collect::<Result<Vec<_>, _>>()?;
        for &gap in &gaps {
            let mut times: Vec<f64> = Vec::new();
            executables.iter_mut().for_each(|executable| executable.begin_profile());
            for call in 0..CALLS {
                let executable = &mut executables[call % layers];
                let (x, chosen, factors) = ([0.25; HIDDEN], [(call * 7 / layers % EXPERTS) as i32], [0.5]);
                let inputs = [InputData::F32(&x), InputData::I32(&chosen), InputData::F32(&factors)];
                let (mut outputs, mut segments) = (Outputs::new(), [Segment::new(None, 0, 1)]);
                let until = Instant::now() + Duration::from_micros(gap);
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
                let began = Instant::now();
                executable.run(&mut Call::new(Bindings { rows: 1, soft_rows: 0, wanted: 0 }, &inputs, &mut segments, &mut outputs))?;
                times.push(began.elapsed().as_secs_f64());
            }
            times.sort_by(f64::total_cmp);
            let median = times[CALLS / 2];
            let steps = executables.iter_mut().filter_map(|executable| executable.take_profile()).flat_map(|profile| profile.steps);
            let [late, busy, whole] = steps
                .fold([0.0; 3], |[late, busy, whole], step| [late + step.late_seconds, busy + step.busy_seconds, whole + step.seconds]);
            let micros = |seconds: f64| 1e6 * seconds / CALLS as f64;
            println!(
                "{threads} threads, {gap} us apart: median {:.1} us, {:.1} GB/s; a tenth faster than {:.1}; on average {:.1} in steps, of which threads come {:.1} late and work {:.1}",
                1e6 * median,
                bytes as f64 / median / 1e9,
                1e6 * times[CALLS / 10],
                micros(whole),
                micros(late),
                micros(busy),
            );
        }
    }
    Ok(())
}

fn program(layer: usize, encoding: Encoding, form: ActivationForm) -> Result<Checked, Box<dyn std::error::Error>> {
    let input = |name: &str, dtype, width: usize| Input {
        name: name.into(),
        dtype,
        shape: vec![Dim::T, width.into()],
        generator: Generator::Carried,
    };
    let name = |what: &str| Name::from(format!("{layer}.{what}"));
    let [gate, up, down] = ["gate", "up", "down"].map(name);
    let weight = |rows: usize, columns: usize| Weight { shape: vec![EXPERTS, rows, columns], encoding };
    let weights = [(gate.clone(), weight(FFN, HIDDEN)), (up.clone(), weight(FFN, HIDDEN)), (down.clone(), weight(HIDDEN, FFN))];
    let [x, experts, factors] = ["x", "experts", "factors"].map(Name::from);
    let activation = Activation::Silu;
    let op = OpKind::Experts { x, experts, weights: factors, gate, up, down, activation, form, bias: None, held: None };
    Ok(Checked::new(Program {
        program_version: PROGRAM_VERSION,
        name: "experts".into(),
        inputs: vec![input("x", DType::F32, HIDDEN), input("experts", DType::I32, 1), input("factors", DType::F32, 1)],
        outputs: vec![Output { name: "y".into(), value: "moe.experts".into() }],
        slots: BTreeMap::new(),
        epochs: vec![],
        rotaries: BTreeMap::new(),
        stages: vec![Stage { name: "moe".into(), tap: None, rotated: false, centred: false }],
        weights: BTreeMap::from(weights),
        ops: vec![Op { path: "moe.experts".into(), op }],
    })?)
}

/// Content does not matter, but memory that was never written is one page for all.
fn tensor(weight: &Weight) -> Result<WeightTensor, String> {
    let rows: usize = weight.shape[..2].iter().product();
    let row = weight.encoding.row_bytes(weight.shape[2]).ok_or("too large")?;
    let part = |bytes: usize| {
        (bytes > 0).then(|| {
            let mut all = AlignedBytes::zeroed(rows * bytes);
            all.as_mut().iter_mut().step_by(64).enumerate().for_each(|(n, byte)| *byte = n as u8 & 31);
            all.into()
        })
    };
    let data = part(row.data).ok_or("no data")?;
    WeightTensor::new(weight.encoding, weight.shape.clone(), data, part(row.scale), part(row.min))
}
