//! A device that has nothing to do takes no CPU time. Alone in its process, so that nobody else's time is counted.
#![cfg(target_os = "linux")]

#[path = "suite/decoder.rs"]
mod decoder;

use decoder::{Sizes, decoder};
use qhx_cpu::{CpuDevice, CpuOptions};
use qhx_ir::*;
use std::{fs, sync::Arc, thread, time::Duration};

/// Time that all threads of this process were on a core.
fn busy() -> Duration {
    let threads = fs::read_dir("/proc/self/task").unwrap();
    let time = |task: fs::DirEntry| {
        let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        text.split(' ').next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0)
    };
    Duration::from_nanos(threads.flatten().map(time).sum())
}

#[test]
fn idle_threads_sleep() {
    let sizes = Sizes { layers: 1, hidden: 64, ffn: 128, heads: 2, kv_heads: 1, head_dim: 32, vocab: 3000, experts: 0 };
    let (program, weights) = decoder(&sizes, Encoding::I8_BLOCK32, ActivationForm::I8Block32).unwrap();
    let weights: Arc<dyn Weights> = Arc::new(weights);
    let device = CpuDevice::new(CpuOptions { threads: Some(4), ..Default::default() }).unwrap();
    let mut executable = device.load(&program, &weights, &LoadOptions::default()).unwrap();
    let mut state = executable.new_state(64).unwrap();
    let mut step = || {
        let rows = 16;
        let (ids, mut outputs) = ([1i32; 16], Outputs::new());
        let inputs = [InputData::I32(&ids), InputData::I32(&ids), InputData::I32(&[0])];
        let (bindings, mut segments) = (Bindings { rows, soft_rows: 0, wanted: 1 }, [Segment::new(Some(&mut *state), 0, rows)]);
        executable.run(&mut Call::new(bindings, &inputs, &mut segments, &mut outputs)).unwrap();
    };
    step();
    // Threads fall asleep after a moment, which is longer on a busy machine.
    let mut used = (0..10).map(|_| {
        let before = busy();
        thread::sleep(Duration::from_millis(400));
        busy() - before
    });
    assert!(used.any(|used| used < Duration::from_millis(20)), "4 s of idleness with more than 20 ms of CPU time in each 400");
    step();
}
