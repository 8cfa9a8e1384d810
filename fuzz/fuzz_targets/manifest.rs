//! Any bytes as a bundle's manifest.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(qhx_attack::probes::manifest(bytes)));
