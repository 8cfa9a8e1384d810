//! Any bytes as a sound file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(qhx_attack::probes::sound(bytes)));
