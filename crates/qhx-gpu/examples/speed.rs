//! How fast a program runs on the first GPU, with weights that are made up: `speed PROGRAM.json [ROWS] [SESSIONS]`. The file is a bundle's `programs/text.json`, or
//! that of a tower, which is run for so many rows. With `sessions` behind the numbers, only the step of several sessions is measured.

use qhx_gpu::{Features, GpuDevice, GpuOptions};
use qhx_ir::{
    AlignedBytes, Bindings, Call, Checked, Device, Encoding, Generator, InputData, LoadOptions, Outputs, Program, ScaleType, Segment,
    State, Want, WeightTensor, Weights,
};
use std::{
    cell::RefCell,
    collections::HashMap,
    error::Error,
    sync::{Arc, Mutex},
    time::Instant,
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: usize| arguments.get(at).and_then(|text| text.parse().ok()).unwrap_or(default);
    let text = std::fs::read_to_string(arguments.first().ok_or("usage: speed PROGRAM.json [ROWS] [SESSIONS]")?)?;
    let (rows, most) = (number(1, 512), number(2, 16));
    let program = Checked::new(Program::from_json(&text)?)?;
    let weights: Arc<dyn Weights> = Arc::new(MadeUp { program: program.clone(), made: Mutex::default() });
    let profile = std::env::var_os("QHX_GPU_PROFILE").is_some();
    let cache = Some(std::env::temp_dir().join("qhx-gpu-speed"));
    // To compare: with `QHX_GPU_STREAMS=no` no step is done in one dispatch.
    let streams = std::env::var("QHX_GPU_STREAMS").ok().map(|text| text != "no");
    let mut features = Features { streams, ..Default::default() };
    // With `QHX_GPU_FEW=no` products of few rows do without small matrices.
    if std::env::var("QHX_GPU_FEW").is_ok_and(|text| text == "no") {
        features.few_rows = [1, 0];
    }
    let device = GpuDevice::new(GpuOptions { cache, profile, features, ..Default::default() });
    let machine = device.machine()?;
    let show = |what: &str, steps: usize| {
        for (name, (count, time)) in machine.profile() {
            println!("  {what} {name:14} {:7.1} dispatches {:9.1} µs", count as f64 / steps as f64, time / 1e3 / steps as f64);
        }
    };
    println!("{}", device.open()?.describe().description);
    let began = Instant::now();
    let options = LoadOptions { max_rows: rows.max(most), max_wanted: most, max_segments: most, ..Default::default() };
    let mut executable = device.load(&program, &weights, &options)?;
    let (scratch, alike) = (executable.scratch_bytes() >> 20, executable.invariant_rows());
    println!("load {:.2} s, scratch {scratch} MB, rows that come out as alone: {alike}", began.elapsed().as_secs_f64());
    let median = |mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    if program.slots.is_empty() {
        // A tower: rows in, soft rows out.
        let bindings = Bindings { rows, soft_rows: 0, wanted: 0 };
        let inputs: Vec<(Vec<i32>, Vec<f32>)> = program.inputs.iter().map(|input| made_up_input(input, &bindings, &[], rows)).collect();
        let data = input_data(&program, &inputs);
        let mut run = || -> Result<f64, Box<dyn Error>> {
            let (mut segments, mut outputs) = ([Segment::new(None, 0, rows)], Outputs::new());
            let began = Instant::now();
            executable.run(&mut Call::new(bindings, &data, &mut segments, &mut outputs))?;
            Ok(began.elapsed().as_secs_f64())
        };
        let began = Instant::now();
        while began.elapsed().as_secs_f64() < 3.0 {
            run()?;
        }
        machine.profile();
        let seconds = (0..16).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
        show("tower", 16);
        println!("{rows} rows: {:.2} ms", median(seconds) * 1e3);
        return Ok(());
    }
    let mut states: Vec<Box<dyn State>> = (0..most).map(|_| executable.new_state(4096)).collect::<Result<_, _>>()?;
    let answer = RefCell::new(None);
    // With drafts all rows are wanted, and any number of them may be committed.
    let mut steps = |states: &mut [Box<dyn State>], rows: usize, drafts: bool| -> Result<f64, Box<dyn Error>> {
        let count = states.len();
        let bindings = Bindings { rows: rows * count, soft_rows: 0, wanted: if drafts { rows * count } else { count } };
        let inputs: Vec<(Vec<i32>, Vec<f32>)> = program.inputs.iter().map(|input| made_up_input(input, &bindings, states, rows)).collect();
        let data = input_data(&program, &inputs);
        let segment = |(n, state): (usize, _)| Segment { partial: drafts, ..Segment::new(Some(state), n * rows, rows) };
        let mut segments: Vec<Segment<'_>> =
            states.iter_mut().map(|state| &mut **state as &mut dyn State).enumerate().map(segment).collect();
        let (wants, mut outputs) = (vec![Want::Largest; bindings.wanted], Outputs::new());
        let mut call = Call::new(bindings, &data, &mut segments, &mut outputs);
        call.wants = &wants;
        let began = Instant::now();
        executable.run(&mut call)?;
        let seconds = began.elapsed().as_secs_f64();
        *answer.borrow_mut() = outputs.rows().last().cloned();
        states.iter_mut().try_for_each(|state| state.commit(rows))?;
        Ok(seconds)
    };
    let mut step = |states: &mut [Box<dyn State>], rows: usize| steps(states, rows, false);
    // The first runs compile shaders and wake the GPU, whose clocks rise slowly.
    let began = Instant::now();
    while began.elapsed().as_secs_f64() < 1.0 {
        states[0].truncate(0)?;
        step(&mut states[..1], rows)?;
    }
    machine.profile();
    let mut prefill = Vec::new();
    let sessions_only = arguments.get(3).is_some_and(|text| text == "sessions");
    for _ in 0..if sessions_only { 1 } else { 5 } {
        states[0].truncate(0)?;
        prefill.push(step(&mut states[..1], rows)?);
    }
    show("prefill", 5);
    println!("pp{rows}: {:.0} tok/s", rows as f64 / median(prefill));
    for length in if sessions_only { vec![] } else { vec![0, 2000] } {
        while states[0].len() < length {
            let more = rows.min(length - states[0].len());
            step(&mut states[..1], more)?;
        }
        // The GPU's clocks rise slowly, and fall while a pipeline is compiled.
        let began = Instant::now();
        let mut untimed = 0;
        while began.elapsed().as_secs_f64() < 1.5 {
            step(&mut states[..1], 1)?;
            untimed += 1;
            if states[0].len() > length + 64 {
                states[0].truncate(length.max(1))?;
            }
        }
        println!("  untimed: {:.1} tok/s", f64::from(untimed) / began.elapsed().as_secs_f64());
        states[0].truncate(length.max(1))?;
        machine.profile();
        let seconds = (0..72).map(|_| step(&mut states[..1], 1)).collect::<Result<Vec<_>, _>>()?;
        let seconds = median(seconds[8..].to_vec());
        show("decode", 72);
        // The answer is the same with and without streams, but for the last digits.
        println!("tg64 at {length}: {:.1} tok/s, {:.0} µs a step; {:?}", 1.0 / seconds, seconds * 1e6, answer.borrow());
    }
    for rows in if sessions_only { vec![] } else { vec![1, 2, 3, 4, 6, 8] } {
        states[0].truncate(1)?;
        let seconds = (0..40).map(|_| steps(&mut states[..1], rows, true)).collect::<Result<Vec<_>, _>>()?;
        println!("{rows} rows with drafts: {:.0} µs", median(seconds[8..].to_vec()) * 1e6);
    }
    let mut step = |states: &mut [Box<dyn State>], rows: usize| steps(states, rows, false);
    if most > 1 {
        states[0].truncate(0)?;
        for _ in 0..8 {
            step(&mut states, 1)?;
        }
        machine.profile();
        let seconds = (0..32).map(|_| step(&mut states, 1)).collect::<Result<Vec<_>, _>>()?;
        let seconds = median(seconds);
        show("sessions", 32);
        println!("tg32x{most}: {:.1} tok/s, {:.0} µs a step; {:?}", most as f64 / seconds, seconds * 1e6, answer.borrow());
    }
    Ok(())
}

fn input_data<'a>(program: &Checked, inputs: &'a [(Vec<i32>, Vec<f32>)]) -> Vec<InputData<'a>> {
    let data = program.inputs.iter().zip(inputs).map(|(input, (integers, floats))| match input.dtype {
        qhx_ir::DType::I32 => InputData::I32(integers),
        qhx_ir::DType::F32 => InputData::F32(floats),
    });
    data.collect()
}

fn made_up_input(input: &qhx_ir::Input, bindings: &Bindings, states: &[Box<dyn State>], rows: usize) -> (Vec<i32>, Vec<f32>) {
    let count: usize = input.shape.iter().map(|dim| dim.bind(bindings).unwrap_or(0)).product();
    let integers = (0..count).map(|i| {
        let row = i % bindings.rows.max(1);
        match input.generator {
            Generator::WantedRows if bindings.wanted == bindings.rows => i as i32,
            Generator::WantedRows => (i * rows + rows - 1) as i32,
            Generator::PositionsSequence | Generator::PositionsMrope => (states[row / rows].len() + row % rows) as i32,
            _ => (i * 7 % 1000) as i32,
        }
    });
    (integers.collect(), vec![0.1; count])
}

/// Weights of a program, random but of a sensible size.
struct MadeUp {
    program: Checked,
    made: Mutex<HashMap<String, WeightTensor>>,
}

impl Weights for MadeUp {
    fn tensor(&self, name: &str) -> Option<WeightTensor> {
        let declared = self.program.weights.get(name)?;
        let mut made = self.made.lock().ok()?;
        if let Some(tensor) = made.get(name) {
            return Some(tensor.clone());
        }
        let columns = *declared.shape.last()?;
        let rows: usize = declared.shape[..declared.shape.len() - 1].iter().product();
        let bytes = declared.encoding.row_bytes(columns)?;
        let noise = |length: usize| {
            let mut all = AlignedBytes::zeroed(length);
            let mut state = length as u64 | 1;
            for eight in all.as_mut().chunks_exact_mut(8) {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                eight.copy_from_slice(&(state ^ state >> 33).to_le_bytes());
            }
            all
        };
        let floats = |length: usize, value: f32| {
            let mut all = AlignedBytes::zeroed(length);
            all.as_mut().chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&value.to_le_bytes()));
            all
        };
        let size = 0.02 / (columns as f32).sqrt();
        let tensor = match declared.encoding {
            Encoding::F32 => WeightTensor::new(Encoding::F32, declared.shape.clone(), floats(rows * bytes.data, 0.05).into(), None, None),
            Encoding::I8Row => {
                let scales = floats(rows * bytes.scale, size);
                WeightTensor::new(declared.encoding, declared.shape.clone(), noise(rows * bytes.data).into(), Some(scales.into()), None)
            }
            Encoding::Block(block) => {
                let mut scales = AlignedBytes::zeroed(rows * bytes.scale);
                match block.scale {
                    ScaleType::F32 => scales = floats(rows * bytes.scale, size),
                    // 0.001 in f16.
                    ScaleType::F16 => scales.as_mut().chunks_exact_mut(2).for_each(|two| two.copy_from_slice(&0x1419u16.to_le_bytes())),
                }
                let minima = (bytes.min > 0).then(|| AlignedBytes::zeroed(rows * bytes.min).into());
                WeightTensor::new(declared.encoding, declared.shape.clone(), noise(rows * bytes.data).into(), Some(scales.into()), minima)
            }
            _ => WeightTensor::new(declared.encoding, declared.shape.clone(), AlignedBytes::zeroed(rows * bytes.data).into(), None, None),
        };
        let tensor = tensor.ok()?;
        made.insert(name.to_owned(), tensor.clone());
        Some(tensor)
    }
}
