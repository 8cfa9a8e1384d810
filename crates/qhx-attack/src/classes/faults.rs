//! Cases that fail in every way that the harness must notice: what it is tested with.

use super::{Bench, Case, Outcome};
use crate::{random::Random, seeds::Seeds};
use std::{
    hint::black_box,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

const FILE: &str = "fault";
const FAULTS: [&str; 6] = ["panic", "stack", "memory", "hang", "sleep", "chance"];

pub(super) fn make(_: &Seeds, random: &mut Random) -> Case {
    let fault = if random.one_in(4) { *random.pick(&FAULTS) } else { "none" };
    Case::of(FILE, fault.into()).command("devices --json")
}

pub(super) fn attempt(case: &Case, _: &Bench) -> Outcome {
    static ATTEMPTS: AtomicU64 = AtomicU64::new(0);
    match case.file(FILE) {
        b"panic" => panic!("a panic\nof two lines"),
        b"stack" => Ok(depth(&[1; 64]).to_string()),
        b"memory" => Ok(black_box(vec![1u8; 1 << 36]).len().to_string()),
        b"hang" => loop {
            black_box(());
        },
        b"sleep" => {
            thread::sleep(Duration::from_secs(3600));
            Ok(String::new())
        }
        b"chance" => Ok(ATTEMPTS.fetch_add(1, Ordering::Relaxed).to_string()),
        _ => Err("refused".to_owned()),
    }
}

/// Goes deeper than any stack.
#[allow(unconditional_recursion)]
fn depth(frame: &[u64; 64]) -> u64 {
    let inner = black_box(*frame);
    depth(&inner) + inner[0]
}
