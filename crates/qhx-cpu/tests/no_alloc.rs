//! Decoding allocates nothing once it is warm: counted for all threads of the process.
#![allow(unsafe_code)] // A global allocator that counts.

#[path = "suite/decoder.rs"]
mod decoder;

use decoder::{Sizes, decoder};
use qhx_cpu::{CpuDevice, CpuOptions};
use qhx_ir::*;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn decoding_allocates_nothing() {
    let sizes = Sizes { layers: 3, hidden: 256, ffn: 512, heads: 4, kv_heads: 2, head_dim: 64, vocab: 5000, experts: 0 };
    for (encoding, form, experts) in [
        (Encoding::I4_BLOCK32_MIN, ActivationForm::I8Block32, 0),
        (Encoding::F16, ActivationForm::F32, 0),
        (Encoding::I8_BLOCK32, ActivationForm::I8Row, 4),
        (Encoding::I6_BLOCK32, ActivationForm::I8Block32, 0),
    ] {
        let (program, weights) = decoder(&Sizes { experts, ..sizes }, encoding, form).unwrap();
        let weights: Arc<dyn Weights> = Arc::new(weights);
        let device = CpuDevice::new(CpuOptions { threads: Some(3), ..Default::default() }).unwrap();
        let mut executable = device.load(&program, &weights, &LoadOptions { max_rows: 64, ..Default::default() }).unwrap();
        let mut outputs = Outputs::new();
        let mut states = [(); 3].map(|()| executable.new_state(1024).unwrap());
        let mut step = |state: &mut dyn State, rows: usize| {
            let start = state.len() as i32;
            // On the stack: the caller's own inputs are not the device's.
            let (mut ids, mut positions) = ([0i32; 64], [0i32; 64]);
            for i in 0..rows {
                (ids[i], positions[i]) = ((start + i as i32) * 31 % 5000, start + i as i32);
            }
            let inputs = [InputData::I32(&ids[..rows]), InputData::I32(&positions[..rows]), InputData::I32(&[0])];
            let mut segments = [Segment::new(Some(&mut *state), 0, rows)];
            let mut call = Call::new(Bindings { rows, soft_rows: 0, wanted: 1 }, &inputs, &mut segments, &mut outputs);
            executable.run(&mut call).unwrap();
            state.commit(rows).unwrap();
            assert!(outputs.value("logits").unwrap().iter().all(|x| x.is_finite()));
        };
        // A worker's own start allocates, and on a busy machine that may be late: what counts is that it ends.
        let allocated = states.each_mut().map(|state| {
            step(&mut **state, 64);
            step(&mut **state, 1);
            let before = ALLOCATIONS.load(Ordering::SeqCst);
            // Far enough that attention cuts the keys into several runs.
            (0..400).for_each(|_| step(&mut **state, 1));
            step(&mut **state, 64);
            ALLOCATIONS.load(Ordering::SeqCst) - before
        });
        // A page of keys and values for each of three layers every 64 rows: its memory, and its count of owners.
        let pages = 3 * ((65 + 464usize).div_ceil(64) - 2);
        assert!(allocated.iter().any(|&count| count <= 2 * pages), "{encoding} {form:?}: {allocated:?} allocations for {pages} pages");
    }
}
