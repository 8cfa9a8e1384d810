//! Answers with drafts are answers without, token for token, on the CPU: every family, extended at every precision (224 prompts).

use crate::common::drafts::{Counts, FAMILIES, PRECISIONS, Source, check};
use qhx_runtime::{DeviceChoice, LoadOptions};

#[test]
fn drafts_change_no_answer() {
    let load = LoadOptions { device: DeviceChoice::Cpu, ..LoadOptions::default() };
    let mut counts = Counts::default();
    let mut models = 0;
    for (number, family) in FAMILIES.into_iter().enumerate() {
        let wanted = if crate::extended() { &PRECISIONS[..] } else { &PRECISIONS[number % PRECISIONS.len()..][..1] };
        wanted.iter().for_each(|precision| counts += check(family, *precision, &load, &Source::ALL));
        models += wanted.len();
    }
    let Counts { drafted, accepted, stopped } = counts;
    println!("{accepted} of {drafted} drafts right, {stopped} answers ended by a stop string");
    assert!(accepted > 36 * models && drafted > accepted && stopped > models / 3, "{accepted} of {drafted}, {stopped}");
}
