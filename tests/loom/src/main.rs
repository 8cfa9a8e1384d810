//! Models of the CPU's thread pool: the pool itself, in every order in which a few threads can run and see each other's writes.
//!
//! A model fails if a thread sleeps for ever, if memory is read while another thread may write it, or if a unit of a job does not run exactly once.

mod affinity;
#[path = "../../../crates/qhx-cpu/src/pool.rs"]
#[allow(dead_code)]
mod pool;
mod sync;

use loom::{cell::UnsafeCell, model::Builder, sync::Arc, thread};
use pool::Pool;
use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    process::ExitCode,
    sync::{
        Arc as Counter,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

/// A model: its name, how many times a thread may be interrupted, and what the threads do.
struct Model {
    name: &'static str,
    preemptions: usize,
    run: fn(),
}

const MODELS: [Model; 7] = [
    Model { name: "a pool ends that never had a job", preemptions: 3, run: nothing },
    Model { name: "jobs follow one another", preemptions: 3, run: jobs },
    Model { name: "three threads take each other's units", preemptions: 2, run: three },
    Model { name: "a panic reaches the caller, and the next job runs", preemptions: 3, run: panics },
    Model { name: "two callers take turns", preemptions: 2, run: callers },
    Model { name: "a panic is the caller's whose unit it was", preemptions: 2, run: panics_of_one },
    Model { name: "a watched job", preemptions: 2, run: watched },
];

fn main() -> ExitCode {
    let mut failed = false;
    for Model { name, preemptions, run } in MODELS {
        let (began, orders) = (Instant::now(), Counter::new(AtomicUsize::new(0)));
        let mut builder = Builder::new();
        builder.preemption_bound = Some(preemptions);
        let counted = orders.clone();
        let found = catch_unwind(AssertUnwindSafe(|| {
            builder.check(move || {
                counted.fetch_add(1, Ordering::Relaxed);
                run();
            });
        }));
        let (orders, seconds) = (orders.load(Ordering::Relaxed), began.elapsed().as_secs_f64());
        println!("{name}: {} after {orders} orders, {seconds:.1} s", if found.is_ok() { "ok" } else { "FAILED" });
        failed |= found.is_err();
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs a job whose units each write a number, and reads them all.
fn job(pool: &Pool, units: usize) {
    let written: Vec<UnsafeCell<usize>> = (0..units).map(|_| UnsafeCell::new(0)).collect();
    let written = AllThreads(written);
    // SAFETY: no other thread has this unit, which the checker makes sure of; the same holds below.
    pool.run(units, &|unit, _| written.cells()[unit].with_mut(|number| unsafe { *number += unit + 1 }));
    for (unit, cell) in written.cells().iter().enumerate() {
        assert_eq!(cell.with(|number| unsafe { *number }), unit + 1);
    }
}

/// Cells that several threads use: the checker sees whether they do so at once.
struct AllThreads(Vec<UnsafeCell<usize>>);

// SAFETY: see above.
unsafe impl Sync for AllThreads {}

impl AllThreads {
    fn cells(&self) -> &[UnsafeCell<usize>] {
        &self.0
    }
}

fn pool(threads: usize) -> Pool {
    Pool::new(threads).expect("threads of a model can be started")
}

fn nothing() {
    pool(3);
}

fn jobs() {
    let pool = pool(2);
    job(&pool, 2);
    job(&pool, 3);
}

fn three() {
    job(&pool(3), 3);
}

/// A job whose last unit panics, without the hook that prints each panic.
fn failing_job(pool: &Pool) {
    let fails = || {
        pool.run(2, &|unit, _| {
            if unit == 1 {
                resume_unwind(Box::new("one"))
            }
        })
    };
    let panic = catch_unwind(AssertUnwindSafe(fails)).expect_err("a panic in a unit is one in `run`");
    assert_eq!(panic.downcast_ref(), Some(&"one"));
}

fn panics() {
    let pool = pool(2);
    failing_job(&pool);
    job(&pool, 2);
}

fn panics_of_one() {
    let pool = Arc::new(pool(2));
    let other = {
        let pool = pool.clone();
        thread::spawn(move || job(&pool, 2))
    };
    failing_job(&pool);
    other.join().expect("the other caller ends well");
}

fn callers() {
    let pool = Arc::new(pool(2));
    let other = {
        let pool = pool.clone();
        thread::spawn(move || job(&pool, 2))
    };
    job(&pool, 2);
    other.join().expect("the other caller ends well");
}

fn watched() {
    let pool = pool(2);
    pool.watch(true);
    job(&pool, 2);
    assert_eq!(pool.take_tally().jobs, 1);
}
