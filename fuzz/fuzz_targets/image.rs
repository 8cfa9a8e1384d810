//! Any bytes as an image file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(qhx_attack::probes::image(bytes)));
