//! Any bytes as a `tokenizer.json`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(qhx_attack::probes::tokenizer(bytes)));
