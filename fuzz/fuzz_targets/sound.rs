//! Any bytes as a sound file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| _ = qhx_attack::probes::sound(bytes));
