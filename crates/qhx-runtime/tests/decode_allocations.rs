//! A decode step allocates nothing, neither in the session nor in the device, once it is warm.
#![cfg(feature = "cpu")]
// A counting allocator cannot be written without `unsafe`; this file is the only one of these tests that has it.
#![allow(unsafe_code)]

#[path = "suite/common/mod.rs"]
#[allow(dead_code, reason = "the suite uses the rest")]
mod common;

use common::{
    KINDS, ids,
    media::{IMAGE, image, seeing_model},
    model,
};
use qhx_runtime::{Cancel, DeviceChoice, Model, Prompt};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

struct Counting;

/// Of all threads together: the device's own count too.
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system allocator unchanged; the counter is an atomic number.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_warm_decode_step_allocates_nothing() {
    for kind in KINDS {
        // Beyond the last change of constants, which reads everything again.
        let text = Prompt::from_ids(ids(1, 21));
        quiet(&model(kind, DeviceChoice::Cpu, 8, 64), &text, &format!("{kind:?}"));
        let seeing = seeing_model(kind, DeviceChoice::Cpu, 8, 64);
        let mixed = [vec![1; 12], vec![IMAGE; 6], vec![2; 3]].concat();
        let mixed = Prompt::from_ids_with_media(&seeing, mixed, &[image(1, 2, 3)]).unwrap();
        quiet(&seeing, &mixed, &format!("{kind:?} with an image"));
    }
}

fn quiet(model: &Model, prompt: &Prompt, what: &str) {
    let mut session = model.session().unwrap();
    let cancel = Cancel::new();
    session.append_prompt(prompt, &cancel).unwrap();
    for id in ids(2, 2) {
        session.append(&[id], &cancel).unwrap();
    }
    // A thread of the device that the machine lets run only now may still be setting itself up: one quiet stretch of several is proof enough.
    let stretches = [3, 4, 5, 6].map(|seed| {
        let steps = ids(seed, 8);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for id in &steps {
            session.append(std::slice::from_ref(id), &cancel).unwrap();
        }
        ALLOCATIONS.load(Ordering::Relaxed) - before
    });
    assert_eq!(stretches.iter().min(), Some(&0), "{what}: {stretches:?} allocations in 8 steps each");
}
