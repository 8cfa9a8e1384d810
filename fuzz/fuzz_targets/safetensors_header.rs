//! Any bytes as a safetensors file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(qhx_attack::probes::safetensors_header(bytes)));
