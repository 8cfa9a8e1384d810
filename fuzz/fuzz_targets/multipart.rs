//! Any bytes as a form, after a line with its content type.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(qhx_attack::probes::multipart(bytes)));
