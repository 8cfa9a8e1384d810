//! What the readers' tests share: random numbers, and small valid files to break.

use super::gguf_metadata::{Array, Value};
use super::gguf_writer::GgufWriter;
use super::{Checkpoint, Mapping, SourceType};

/// SplitMix64: enough for tests, the same everywhere.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

/// The bytes of a safetensors file with these tensors (name, type, shape, data), one after the other.
pub(crate) fn safetensors(tensors: &[(&str, &str, &[u64], &[u8])]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.to_string(), serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
        data.extend_from_slice(bytes);
    }
    with_header(&serde_json::to_string(&header).unwrap(), &data)
}

/// A safetensors file with a matrix, a vector, a tensor without elements and a scalar.
pub(crate) fn good_safetensors() -> Vec<u8> {
    safetensors(&[
        ("a", "F32", &[2, 2], &[1; 16]),
        ("b", "BF16", &[3], &[2; 6]),
        ("empty", "I64", &[0, 5], &[]),
        ("scalar", "F64", &[], &[0; 8]),
    ])
}

/// The bytes of a safetensors file with this header as it stands.
pub(crate) fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A tiny model of the `llama` architecture: 1 layer, 2 heads of 4, 1 key/value head, a byte-level tokenizer.
pub(crate) fn tiny_gguf() -> GgufWriter {
    let mut file = GgufWriter::default();
    file.set_text("general.architecture", "llama")
        .set_text("general.name", "tiny")
        .set_u32("llama.block_count", 1)
        .set_u32("llama.context_length", 64)
        .set_u32("llama.embedding_length", 8)
        .set_u32("llama.feed_forward_length", 32)
        .set_u32("llama.attention.head_count", 2)
        .set_u32("llama.attention.head_count_kv", 1)
        .set_f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .set_f32("llama.rope.freq_base", 100000.0)
        .set_text("tokenizer.ggml.model", "gpt2")
        .set_text("tokenizer.ggml.pre", "smollm")
        .set_texts("tokenizer.ggml.tokens", &["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "c"])
        .set("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![3, 3, 3, 1, 1, 1, 1, 1])))
        .set_texts("tokenizer.ggml.merges", &["a b"])
        .set_u32("tokenizer.ggml.bos_token_id", 1)
        .set_u32("tokenizer.ggml.eos_token_id", 2)
        .set_text("tokenizer.chat_template", "{{ messages[0].content }}");
    let numbers = |count: usize| (0..count).map(|i| i as f32).collect::<Vec<_>>();
    for (name, shape) in [
        ("token_embd.weight", vec![8, 8]),
        ("output_norm.weight", vec![8]),
        ("blk.0.attn_norm.weight", vec![8]),
        ("blk.0.ffn_norm.weight", vec![8]),
        ("blk.0.attn_q.weight", vec![8, 8]),
        ("blk.0.attn_k.weight", vec![4, 8]),
        ("blk.0.attn_v.weight", vec![4, 8]),
        ("blk.0.attn_output.weight", vec![8, 8]),
        ("blk.0.ffn_gate.weight", vec![32, 8]),
        ("blk.0.ffn_up.weight", vec![32, 8]),
    ] {
        file.tensor_f32(name, &shape, &numbers(shape.iter().product()));
    }
    file.tensor("blk.0.ffn_down.weight", SourceType::Q8_0, &[8, 32], Random(1).bytes(8 * 34));
    file
}

/// The tiny model with a SentencePiece tokenizer.
pub(crate) fn tiny_sentence_piece_gguf() -> GgufWriter {
    let mut file = tiny_gguf();
    file.metadata.retain(|(key, _)| !key.starts_with("tokenizer."));
    file.set_text("tokenizer.ggml.model", "llama")
        .set_texts("tokenizer.ggml.tokens", &["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "▁ab"])
        .set("tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0, 0.0, 0.0, 0.0, -4.0, -5.0, -6.0, -1.0])))
        .set("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![2, 3, 3, 6, 1, 1, 1, 1])));
    file
}

/// The fuzz targets start from these files.
#[test]
fn seeds_of_the_fuzz_targets() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds");
    for (name, bytes) in [
        ("safetensors_header/good.safetensors", good_safetensors()),
        ("gguf/byte_level.gguf", tiny_gguf().bytes()),
        ("gguf/sentence_piece.gguf", tiny_sentence_piece_gguf().bytes()),
    ] {
        let path = folder.join(name);
        if std::env::var_os("QHX_WRITE_SEEDS").is_some() {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        assert!(std::fs::read(&path).unwrap() == bytes, "{name} is old; run this test with QHX_WRITE_SEEDS=1");
        if name.starts_with("gguf") {
            Checkpoint::from_gguf(Mapping::from_bytes(name, bytes)).unwrap();
        }
    }
}
