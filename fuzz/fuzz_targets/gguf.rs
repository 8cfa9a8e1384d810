//! Any bytes as a GGUF file: container, tokenizer, configuration, and every number of every tensor.
#![no_main]

use libfuzzer_sys::fuzz_target;
use qhx_forge::read::{Checkpoint, Mapping, gguf, gguf_tokenizer};

fuzz_target!(|file: &[u8]| {
    let Ok(parsed) = gguf::parse(file) else { return };
    let _ = gguf_tokenizer::build(&parsed.metadata);
    let Ok(checkpoint) = Checkpoint::from_gguf(Mapping::from_bytes("fuzz.gguf", file.to_vec())) else { return };
    for info in checkpoint.tensors.tensors() {
        let tensor = checkpoint.tensors.tensor(&info.name).expect("it is in the list");
        let mut numbers = vec![0.0; info.rows() * info.columns()];
        tensor.read_f32(0..info.rows(), &mut numbers).expect("all rows can be read");
    }
});
