//! Any bytes as a GGUF file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(qhx_attack::probes::gguf(bytes)));
