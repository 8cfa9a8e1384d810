//! Any bytes as a chat template.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(qhx_attack::probes::template(bytes)));
