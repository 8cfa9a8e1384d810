//! The GGUF files of the fixtures against the Hugging Face folders that they were made from: the same configuration, weights, texts and ids.

use qhx_forge::read::Checkpoint;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

fn both(name: &str) -> (Checkpoint, Checkpoint) {
    let gguf = fixture(&format!("{name}-gguf/model.gguf"));
    (Checkpoint::open(&fixture(name)).unwrap(), Checkpoint::open(&gguf).unwrap())
}

const NAMES: [&str; 2] = ["llama", "qwen3"];

#[test]
fn the_same_configuration() {
    for name in NAMES {
        let (folder, gguf) = both(name);
        for key in [
            "architectures",
            "model_type",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "hidden_act",
            "rms_norm_eps",
            "vocab_size",
            "max_position_embeddings",
            "attention_bias",
            "tie_word_embeddings",
            "eos_token_id",
        ] {
            assert_eq!(gguf.config[key], folder.config[key], "{name}: {key}");
        }
        let theta = |config: &Value| config["rope_theta"].as_f64().or(config["rope_parameters"]["rope_theta"].as_f64());
        assert_eq!(theta(&gguf.config), theta(&folder.config), "{name}");
        assert_eq!(gguf.config["rope_scaling"], Value::Null, "{name}");
        let head_dim = |config: &Value| {
            let number = |key: &str| config[key].as_u64();
            number("head_dim").unwrap_or_else(|| number("hidden_size").unwrap() / number("num_attention_heads").unwrap())
        };
        assert_eq!(head_dim(&gguf.config), head_dim(&folder.config), "{name}");
        assert_eq!(gguf.chat_template, folder.chat_template, "{name}");
        assert_eq!(gguf.eos_ids.first(), folder.eos_ids.first(), "{name}");
    }
}

#[test]
fn the_same_weights() {
    for name in NAMES {
        let (folder, gguf) = both(name);
        assert_eq!(gguf.tensors.tensors().len(), folder.tensors.tensors().len(), "{name}");
        for info in folder.tensors.tensors() {
            let read = |checkpoint: &Checkpoint| {
                let mut numbers = vec![0.0; info.rows() * info.columns()];
                checkpoint.tensors.read_f32(&info.name, 0..info.rows(), &mut numbers).unwrap();
                numbers
            };
            assert_eq!(gguf.tensors.find(&info.name).map(|i| &i.shape), Some(&info.shape), "{name}: {}", info.name);
            assert!(read(&gguf) == read(&folder), "{name}: the numbers of {} differ", info.name);
        }
    }
}

#[test]
fn the_same_ids_and_texts() {
    for name in NAMES {
        let (_, gguf) = both(name);
        let tokenizer = Tokenizer::from_bytes(gguf.tokenizer_json.unwrap()).unwrap();
        let cases: Value = serde_json::from_slice(&std::fs::read(fixture(name).join("tokenizer_cases.json")).unwrap()).unwrap();
        let texts = cases["texts"].as_array().unwrap();
        assert!(texts.len() > 50);
        for case in texts {
            let text = case["text"].as_str().unwrap();
            for (special, expected) in [(false, &case["ids"]), (true, &case["ids_with_special"])] {
                let found = tokenizer.encode(text, special).unwrap();
                assert_eq!(json!(found.get_ids()), *expected, "{name}: {text:?}, special tokens {special}");
            }
        }
        for case in cases["decodes"].as_array().unwrap() {
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(json!(tokenizer.decode(&ids, false).unwrap()), case["decoded"], "{name}: {ids:?}");
        }
        for case in cases["chats"].as_array().unwrap() {
            if let (Some(text), Some(_)) = (case["text"].as_str(), case["ids"].as_array()) {
                assert_eq!(json!(tokenizer.encode(text, false).unwrap().get_ids()), case["ids"], "{name}: {text:?}");
            }
        }
    }
}
