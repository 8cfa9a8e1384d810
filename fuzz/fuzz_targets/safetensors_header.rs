//! Any bytes as a safetensors file, for the forge's reader and for the bundle's.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| {
    if let Ok(tensors) = qhx_forge::read::safetensors::parse_header(file) {
        let mut covered = 0;
        for tensor in &tensors {
            covered += file[tensor.range.clone()].len();
            assert_eq!(tensor.info.rows() * tensor.info.columns() * tensor.info.source_type.block().1, tensor.range.len());
        }
        assert!(covered < file.len(), "tensors cannot cover the header");
    }
    let _ = qhx_bundle::safetensors::read_header(file);
});
