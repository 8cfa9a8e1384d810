use super::*;
use crate::read::SourceType;
use crate::read::testing::{safetensors, tiny_gguf};
use std::fs;

/// A folder with these files.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let weights = safetensors(&[("model.norm.weight", "F32", &[2], &[0; 8])]);
    fs::write(folder.path().join("model.safetensors"), weights).unwrap();
    for (name, content) in files {
        fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

fn refused(path: &Path) -> String {
    Checkpoint::open(path).expect_err("this should be refused").to_string()
}

#[test]
fn a_hugging_face_folder() {
    let folder = folder(&[
        ("config.json", r#"{"model_type":"qwen3","eos_token_id":7}"#),
        ("generation_config.json", r#"{"eos_token_id":[3,5]}"#),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", r#"{"chat_template":"old"}"#),
        ("preprocessor_config.json", r#"{"size":1}"#),
    ]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.config["model_type"], "qwen3");
    assert_eq!(checkpoint.eos_ids, [3, 5]);
    assert_eq!(checkpoint.tokenizer_json.as_deref(), Some(&b"{}"[..]));
    assert_eq!(checkpoint.chat_template.as_deref(), Some("old"));
    assert_eq!(checkpoint.tensors.tensors().len(), 1);
    assert_eq!(checkpoint.json_file("preprocessor_config.json").unwrap().unwrap()["size"], 1);
    assert!(checkpoint.json_file("video_preprocessor_config.json").unwrap().is_none());
    let error = checkpoint.tensors.tensor("lm_head.weight").unwrap_err().to_string();
    assert!(error.starts_with("the checkpoint has no tensor `lm_head.weight`"), "{error}");
}

#[test]
fn where_the_chat_template_stands() {
    let template = |files: &[(&str, &str)]| {
        let folder = folder(&[&[("config.json", "{}")], files].concat());
        Checkpoint::open(folder.path()).unwrap().chat_template
    };
    assert_eq!(template(&[]), None);
    assert_eq!(template(&[("tokenizer_config.json", r#"{"chat_template":null}"#)]), None);
    let several = r#"{"chat_template":[{"name":"tool_use","template":"t"},{"name":"default","template":"d"}]}"#;
    assert_eq!(template(&[("tokenizer_config.json", several)]).as_deref(), Some("d"));
    assert_eq!(template(&[("chat_template.json", r#"{"chat_template":"p"}"#)]).as_deref(), Some("p"));
    assert_eq!(template(&[("tokenizer_config.json", several), ("chat_template.jinja", "new")]).as_deref(), Some("new"));
}

#[test]
fn where_the_end_tokens_stand() {
    let ids = |files: &[(&str, &str)]| Checkpoint::open(folder(files).path()).map(|c| c.eos_ids).map_err(|e| e.to_string());
    assert_eq!(ids(&[("config.json", r#"{"eos_token_id":[1,106]}"#)]), Ok(vec![1, 106]));
    assert_eq!(ids(&[("config.json", r#"{"text_config":{"eos_token_id":9}}"#)]), Ok(vec![9]));
    assert_eq!(ids(&[("config.json", r#"{"eos_token_id":4}"#), ("generation_config.json", r#"{"eos_token_id":null}"#)]), Ok(vec![4]));
    assert_eq!(ids(&[("config.json", "{}")]), Ok(vec![]));
    let error = ids(&[("config.json", r#"{"eos_token_id":"</s>"}"#)]).unwrap_err();
    assert!(error.contains("`eos_token_id` should be a token id or a list of them, but is"), "{error}");
}

#[test]
fn what_is_not_a_checkpoint() {
    let folder = folder(&[]);
    assert!(refused(folder.path()).contains("this folder has no config.json, so it is not a Hugging Face checkpoint"));
    fs::write(folder.path().join("tiny.gguf"), tiny_gguf().bytes()).unwrap();
    assert!(refused(folder.path()).contains("tiny.gguf` itself"));
    assert!(refused(&folder.path().join("model.safetensors")).contains("give the folder that it is in"));
    assert!(refused(&folder.path().join("none")).starts_with("cannot read "));
    fs::write(folder.path().join("config.json"), "{").unwrap();
    assert!(refused(folder.path()).contains("config.json is not a valid JSON file: EOF while parsing"));
    fs::write(folder.path().join("config.json"), "[]").unwrap();
    assert!(refused(folder.path()).contains("it should be an object"));
    fs::write(folder.path().join("note.txt"), "hello, this is text").unwrap();
    assert!(refused(&folder.path().join("note.txt")).contains("is not a valid GGUF file: it begins with [68, 65, 6c, 6c]"));
}

#[test]
fn files_have_a_limit() {
    let folder = folder(&[("config.json", "{}")]);
    assert_eq!(read_limited(&folder.path().join("config.json"), 2).unwrap(), b"{}");
    let error = read_limited(&folder.path().join("config.json"), 1).unwrap_err().to_string();
    assert!(error.contains("the limit is 1 bytes"), "{error}");
    fs::create_dir(folder.path().join("tokenizer.json")).unwrap();
    assert!(refused(folder.path()).contains("not a regular file"));
}

#[test]
fn a_gguf_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let file = tiny_gguf();
    fs::write(&path, file.bytes()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let expected = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 8,
        "max_position_embeddings": 64, "rope_theta": 100000.0, "rope_scaling": null, "attention_bias": false, "mlp_bias": false,
        "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2, "_name_or_path": "tiny",
    });
    assert_eq!(checkpoint.config, expected);
    assert_eq!(checkpoint.eos_ids, [2, 0]);
    assert_eq!(checkpoint.chat_template.as_deref(), Some("{{ messages[0].content }}"));
    assert_eq!(checkpoint.tokenizer_config.as_ref().unwrap()["eos_token"], "<|im_end|>");
    assert_eq!(checkpoint.generation_config.as_ref().unwrap()["eos_token_id"], json!([2, 0]));
    assert!(checkpoint.json_file("preprocessor_config.json").unwrap().is_none());

    // Rows of q: the file has each head of 4 as 0 2 1 3; here they are back in order.
    let mut rows = vec![0.0; 64];
    checkpoint.tensors.read_f32("model.layers.0.self_attn.q_proj.weight", 0..8, &mut rows).unwrap();
    let first_of_row: Vec<f32> = rows.chunks(8).map(|row| row[0] / 8.0).collect();
    assert_eq!(first_of_row, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    // v is as stored, blocks too.
    checkpoint.tensors.read_f32("model.layers.0.self_attn.v_proj.weight", 3..4, &mut rows[..8]).unwrap();
    assert_eq!(rows[..2], [24.0, 25.0]);
    let down = checkpoint.tensors.tensor("model.layers.0.mlp.down_proj.weight").unwrap();
    assert_eq!((down.info().source_type, down.row(7).unwrap()), (SourceType::Q8_0, &file.tensors[10].3[7 * 34..]));
    let (mut quants, mut scales) = ([0; 32], [0.0]);
    down.split_row(7, &mut quants, &mut scales, &mut []).unwrap();
    assert_eq!(quants, file.tensors[10].3[7 * 34 + 2..]);
    assert!(
        down.split_row(7, &mut quants[..31], &mut scales, &mut []).unwrap_err().to_string().contains("(32, 1, 0) places, not (31, 1, 0)")
    );
}
