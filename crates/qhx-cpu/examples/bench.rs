//! Times prefill and decode of a synthetic decoder with random weights.
//!
//! `cargo run --release -p qhx-cpu --example bench -- [threads] [instruction set] [small|wide|large|experts] [encoding] [form] [context] [decode rows]`

#[path = "../tests/suite/decoder.rs"]
mod decoder;

use decoder::{Sizes, decoder};
use qhx_cpu::{CpuDevice, CpuOptions, measure_bandwidth};
use qhx_ir::*;
use std::{sync::Arc, time::Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |i: usize| arguments.get(i).map(String::as_str).filter(|a| *a != "-");
    let threads: usize = argument(0).unwrap_or("2").parse()?;
    let instructions = argument(1).map(str::parse).transpose()?;
    let sizes = match argument(2).unwrap_or("small") {
        "wide" => Sizes { layers: 4, hidden: 2048, ffn: 6144, heads: 16, kv_heads: 8, head_dim: 128, vocab: 32000, experts: 0 },
        // More than any cache holds.
        "large" => Sizes { layers: 16, hidden: 2048, ffn: 6144, heads: 16, kv_heads: 8, head_dim: 128, vocab: 32000, experts: 0 },
        "experts" => Sizes { layers: 4, hidden: 2048, ffn: 448, heads: 16, kv_heads: 4, head_dim: 128, vocab: 32000, experts: 16 },
        _ => Sizes { layers: 30, hidden: 576, ffn: 1536, heads: 9, kv_heads: 3, head_dim: 64, vocab: 49152, experts: 0 },
    };
    let encoding: Encoding = argument(3).unwrap_or("i4_block32_min").parse()?;
    let form: ActivationForm = serde_json::from_value(argument(4).unwrap_or("i8_block32").into())?;
    let context: usize = argument(5).unwrap_or("0").parse()?;
    let decoded: usize = argument(6).unwrap_or("64").parse()?;

    let (program, weights) = decoder(&sizes, encoding, form)?;
    let weights: Arc<dyn Weights> = Arc::new(weights);
    let device = CpuDevice::new(CpuOptions { threads: Some(threads), instructions, ..Default::default() })?;
    let info = device.open()?.describe();
    let begin = Instant::now();
    let mut executable = device.load_here(&program, &weights, &LoadOptions { max_rows: 512, max_soft_rows: 0, ..Default::default() })?;
    let load = begin.elapsed();
    println!("{}, {threads} threads, {}: loaded in {load:.1?}", info.description, device.instructions());

    let mut pass = |state: &mut dyn State, rows: usize| -> Result<(), DeviceError> {
        let start = state.len();
        let ids: Vec<i32> = (0..rows).map(|i| ((start + i) * 7919 % sizes.vocab) as i32).collect();
        let positions: Vec<i32> = (start..start + rows).map(|i| i as i32).collect();
        let (last, mut outputs) = ([rows as i32 - 1], Outputs::new());
        executable.run(&mut Call::new(
            Bindings { rows, soft_rows: 0, wanted: 1 },
            &[InputData::I32(&ids), InputData::I32(&positions), InputData::I32(&last)],
            &mut [Segment::new(Some(state), 0, rows)],
            &mut outputs,
        ))?;
        state_commit(rows, executable.weights_read().map_or(0, |read| read.bytes));
        Ok(())
    };
    let mut state = CpuDevice::new(CpuOptions { threads: Some(1), instructions, ..Default::default() })?
        .load_here(&program, &weights, &LoadOptions::default())?
        .new_state(4096)?;
    for repeat in 0..3 {
        state.truncate(0)?;
        let (begin, busy) = (Instant::now(), busy_seconds());
        pass(&mut *state, 512)?;
        let (prefill, prefill_busy) = (begin.elapsed(), busy_seconds() - busy);
        state.commit(512)?;
        state.truncate(0)?;
        while state.len() < context {
            let rows = (context - state.len()).min(512);
            pass(&mut *state, rows)?;
            state.commit(rows)?;
        }
        let (begin, busy) = (Instant::now(), busy_seconds());
        for _ in 0..decoded {
            pass(&mut *state, 1)?;
            state.commit(1)?;
        }
        let (decode, decode_busy) = (begin.elapsed(), busy_seconds() - busy);
        if threads == 1 {
            // What the rates would be if nobody else used the core.
            println!("alone: prefill {:.1} rows/s, decode {:.1} rows/s", 512.0 / prefill_busy, decoded as f64 / decode_busy);
        }
        println!(
            "run {repeat}: prefill {:.1} rows/s, decode {:.1} rows/s ({:.1} MB each, {:.1} GB/s)",
            512.0 / prefill.as_secs_f64(),
            decoded as f64 / decode.as_secs_f64(),
            BYTES.load(std::sync::atomic::Ordering::Relaxed) as f64 / 1e6,
            BYTES.load(std::sync::atomic::Ordering::Relaxed) as f64 * decoded as f64 / decode.as_secs_f64() / 1e9,
        );
    }
    if let Some(bandwidth) = measure_bandwidth(threads) {
        println!("memory: {:.1} GB/s", bandwidth / 1e9);
    }
    Ok(())
}

/// Seconds that this thread was on a core, where the system tells.
fn busy_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|n| n.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1e9
}

static BYTES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

fn state_commit(rows: usize, bytes: u64) {
    if rows == 1 {
        BYTES.store(bytes, std::sync::atomic::Ordering::Relaxed);
    }
}
