//! Times decode calls of a bundle's text program with one row for each of several sessions, next to calls of one row.
//!
//! `cargo run --release -p qhx-cpu --example sessions -- BUNDLE [threads] [instruction set] [context rows] [greedy|logits] [rounds]`
//!
//! Calls of all sizes take turns, so that whatever else the machine does meets all of them. Nothing is committed: every call stands at the same place.

use qhx_bundle::Bundle;
use qhx_cpu::{CpuDevice, CpuExecutable, CpuOptions};
use qhx_ir::*;
use std::time::Instant;

/// Numbers of sessions.
const SIZES: [usize; 9] = [1, 2, 3, 4, 6, 8, 10, 12, 16];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |i: usize| arguments.get(i).map(String::as_str).filter(|a| *a != "-");
    let bundle = Bundle::open(argument(0).ok_or("give the folder of a bundle")?)?;
    let threads: usize = argument(1).unwrap_or("2").parse()?;
    let instructions = argument(2).map(str::parse).transpose()?;
    let context: usize = argument(3).unwrap_or("64").parse()?;
    let greedy = argument(4).unwrap_or("greedy") == "greedy";
    let rounds: usize = argument(5).unwrap_or("30").parse()?;

    let program = bundle.program("text").ok_or("the bundle has no text program")?;
    let device = CpuDevice::new(CpuOptions { threads: Some(threads), instructions, ..Default::default() })?;
    let most = SIZES[SIZES.len() - 1];
    let limits = LoadOptions { max_rows: most.max(context), max_soft_rows: 0, max_wanted: most, max_segments: most, ..Default::default() };
    let mut executable = device.load_here(program, &bundle.weights(), &limits)?;
    println!("{}, {threads} threads, {}, {context} rows of context", bundle.place(), device.instructions());

    let mut states = (0..most).map(|_| executable.new_state(context + 1)).collect::<Result<Vec<_>, _>>()?;
    for number in 0..most {
        run(&mut executable, &mut states[number..number + 1], context, number, greedy)?;
        states[number].commit(context)?;
    }
    let mut times = SIZES.map(|_| Vec::new());
    for round in 0..rounds + 1 {
        for (size, times) in SIZES.into_iter().zip(&mut times) {
            let begin = Instant::now();
            run(&mut executable, &mut states[..size], 1, round, greedy)?;
            // The first round wakes caches and what is made on first use.
            if round > 0 {
                times.push(begin.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    let [least, middle] = [0, rounds / 2].map(|place| times.each_ref().map(|times| times[place]));
    println!("sessions  least ms  median ms  times one call  tokens/s  throughput");
    for (i, size) in SIZES.into_iter().enumerate() {
        let rate = size as f64 / least[i] * 1e3;
        let (calls, throughput) = (least[i] / least[0], rate * least[0] / 1e3);
        println!("{size:8}  {:8.2}  {:9.2}  {calls:14.2}  {rate:8.1}  {throughput:9.2}x", least[i], middle[i]);
    }
    Ok(())
}

/// One call with so many rows of each session.
fn run(executable: &mut CpuExecutable, states: &mut [Box<dyn State>], rows: usize, seed: usize, greedy: bool) -> Result<(), DeviceError> {
    let (mut ids, mut positions, mut wanted): (Vec<i32>, Vec<i32>, Vec<i32>) = Default::default();
    for (number, state) in states.iter().enumerate() {
        let places = state.len()..state.len() + rows;
        ids.extend(places.clone().map(|place| ((place * 7919 + number * 523 + seed * 31) % 10000) as i32));
        positions.extend(places.map(|place| place as i32));
        wanted.push(ids.len() as i32 - 1);
    }
    let bindings = Bindings { rows: ids.len(), soft_rows: 0, wanted: wanted.len() };
    let positions = positions.repeat(3);
    let program = executable.program().clone();
    let inputs = program.inputs.iter().map(|input| match input.generator {
        Generator::Ids | Generator::IdsMediaAsPad => InputData::I32(&ids),
        Generator::PositionsSequence => InputData::I32(&positions[..ids.len()]),
        Generator::PositionsMrope => InputData::I32(&positions),
        Generator::WantedRows => InputData::I32(&wanted),
        _ if input.dtype == DType::I32 => InputData::I32(&[]),
        _ => InputData::F32(&[]),
    });
    let inputs: Vec<_> = inputs.collect();
    let states = states.iter_mut().map(|state| &mut **state as &mut dyn State);
    let mut segments: Vec<_> = states.enumerate().map(|(number, state)| Segment::new(Some(state), number * rows, rows)).collect();
    let (want, mut outputs) = (if greedy { Want::Largest } else { Want::Logits }, Outputs::new());
    let wants = vec![want; wanted.len()];
    executable.run(&mut Call {
        phase: if rows > 1 { Phase::Prefill } else { Phase::Decode },
        wants: &wants,
        ..Call::new(bindings, &inputs, &mut segments, &mut outputs)
    })
}
