//! The sampler over a large vocabulary: it allocates nothing once warm, and is much faster than sorting the row.
// A counting allocator cannot be written without `unsafe`; this file is the only place of these tests that has it.
#![allow(unsafe_code)]

use qhx_runtime::sample::{Sampler, SamplerConfig, random};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system allocator unchanged; the counter is a plain thread-local cell without a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
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

const VOCABULARY: usize = 262_144;

fn settings() -> Vec<(&'static str, SamplerConfig)> {
    let base = SamplerConfig { temperature: 0.8, repetition_penalty: 1.1, ..SamplerConfig::default() };
    vec![
        ("greedy", SamplerConfig { temperature: 0.0, ..base.clone() }),
        ("temperature", base.clone()),
        ("top-k 40", SamplerConfig { top_k: 40, ..base.clone() }),
        ("top-p 0.95", SamplerConfig { top_p: 0.95, ..base.clone() }),
        ("min-p 0.05", SamplerConfig { min_p: 0.05, ..base.clone() }),
        ("top-k 20, top-p 0.8, min-p 0.01", SamplerConfig { top_k: 20, top_p: 0.8, min_p: 0.01, ..base }),
    ]
}

/// Rows shaped like a model's: mostly low, a few high, different each step.
fn rows() -> Vec<Vec<f32>> {
    let row = |seed| {
        let value = |n| {
            let u = random::uniform(seed, n);
            (u * 8.0 - 10.0 + 14.0 * u.powi(1 << 14)) as f32
        };
        (0..VOCABULARY as u64).map(value).collect()
    };
    (0..4).map(row).collect()
}

/// The shortest of a few runs, so that a busy machine does not decide the comparison.
fn shortest(mut work: impl FnMut()) -> Duration {
    let timed = |_| {
        let started = Instant::now();
        work();
        started.elapsed()
    };
    (0..8).map(timed).min().unwrap_or_default()
}

#[test]
fn a_warm_sampler_allocates_nothing_and_is_faster_than_a_sort() {
    let rows = rows();
    let sort = shortest(|| {
        let mut ranked: Vec<usize> = (0..VOCABULARY).collect();
        ranked.sort_unstable_by(|&a, &b| rows[0][b].total_cmp(&rows[0][a]));
        assert!(rows[0][ranked[0]] >= rows[0][ranked[1]]);
    });
    println!("sorting the row: {sort:?}");
    let history: Vec<u32> = (0..2000).map(|n| (n * 7919) % VOCABULARY as u32).collect();
    for (name, config) in settings() {
        let mut sampler = Sampler::new(config).expect("settings are valid");
        // The widest row decides how much room the candidates need, so each is seen once.
        for row in &rows {
            sampler.sample(row, &history, 0).expect("rows are finite");
        }
        let before = ALLOCATIONS.with(Cell::get);
        let mut step = 0;
        let token = shortest(|| {
            sampler.sample(&rows[step % rows.len()], &history, step).expect("rows are finite");
            step += 1;
        });
        assert_eq!(ALLOCATIONS.with(Cell::get), before, "{name} allocated");
        println!("{name}: {token:?} per token of {VOCABULARY}");
        // The others spend their time on exponentials, too close to a sort's on a busy machine to be asserted.
        if name.starts_with("top-k") || name == "greedy" {
            assert!(token < sort, "{name} took {token:?}, sorting the row {sort:?}");
        }
    }
}
