//! Answers with drafts are answers without, token for token, on the CPU: every family at every precision. 224 prompts.

mod common;

use common::drafts::{Counts, FAMILIES, PRECISIONS, Source, check};
use qhx_runtime::{DeviceChoice, LoadOptions};

#[test]
fn drafts_change_no_answer() {
    let load = LoadOptions { device: DeviceChoice::Cpu, ..LoadOptions::default() };
    let mut counts = Counts::default();
    for family in FAMILIES {
        PRECISIONS.into_iter().for_each(|precision| counts += check(family, precision, &load, &Source::ALL));
    }
    let Counts { drafted, accepted, stopped } = counts;
    println!("{accepted} of {drafted} drafts right, {stopped} answers ended by a stop string");
    assert!(accepted > 1000 && drafted > accepted && stopped > 10, "{accepted} of {drafted}, {stopped}");
}
