use super::*;
use crate::read::gguf_metadata::Value as Meta;
use crate::read::gguf_writer::GgufWriter;
use crate::read::testing::tiny_gguf;
use crate::read::{Checkpoint, SourceType};

fn open(file: &GgufWriter) -> Result<Checkpoint, String> {
    Checkpoint::from_gguf(Mapping::from_bytes("test.gguf", file.bytes())).map_err(|e| e.to_string())
}

/// The tiny model with some keys set, or replaced.
fn with(keys: &[(&str, Meta)]) -> GgufWriter {
    let mut file = tiny_gguf();
    for (key, value) in keys {
        file.metadata.retain(|(k, _)| k != key);
        file.set(key, value.clone());
    }
    file
}

fn refused(keys: &[(&str, Meta)]) -> String {
    open(&with(keys)).expect_err("this should be refused")
}

fn text(text: &str) -> Meta {
    Meta::Text(text.to_string())
}

#[test]
fn what_is_not_supported_is_named() {
    let error = refused(&[("general.architecture", text("mamba"))]);
    assert_eq!(
        error,
        "test.gguf: the architecture is `mamba`; from GGUF files qhx reads llama and qwen3. Forge from the Hugging Face folder instead"
    );
    assert!(refused(&[("split.count", Meta::U16(3))]).contains("one of 3 parts"));
    assert!(refused(&[("llama.expert_count", Meta::U32(8))]).contains("`llama.expert_count` is set"));
    assert!(refused(&[("llama.attention.scale", Meta::F32(1.0))]).contains("`llama.attention.scale` is set"));
    assert!(refused(&[("llama.logit_scale", Meta::F32(0.5))]).contains("`llama.logit_scale` is set"));
    assert!(open(&with(&[("llama.logit_scale", Meta::F32(1.0)), ("llama.expert_count", Meta::U32(0))])).is_ok());
    assert!(refused(&[("llama.rope.dimension_count", Meta::U32(2))]).contains("is 2 but a head has 4 numbers"));
    let per_layer = |numbers: &[u32]| Meta::Array(Array::U32(numbers.to_vec()));
    assert!(refused(&[("llama.attention.head_count", per_layer(&[2, 4]))]).contains("differs between layers"));
    assert!(open(&with(&[("llama.attention.head_count", per_layer(&[2]))])).is_ok());
    assert!(refused(&[("llama.attention.key_length", Meta::U32(3))]).contains("a head of 3 numbers has no rotary pairs"));
    assert!(refused(&[("llama.attention.head_count", Meta::U32(0))]).contains("shared by 0 heads"));
    assert!(refused(&[("llama.attention.head_count_kv", Meta::U32(3))]).contains("2 attention heads cannot share 3"));
    assert!(refused(&[("llama.context_length", text("many"))]).contains("should be a whole number"));
    let mut short = tiny_gguf();
    short.metadata.retain(|(key, _)| key != "llama.feed_forward_length");
    assert!(open(&short).unwrap_err().contains("the metadata key `llama.feed_forward_length` is missing"));
}

#[test]
fn tensors_that_do_not_belong() {
    let add = |name: &str, shape: &[usize]| {
        let mut file = tiny_gguf();
        file.tensor_f32(name, shape, &vec![0.0; shape.iter().product()]);
        open(&file).unwrap_err()
    };
    assert!(add("blk.0.attn_q_norm.weight", &[4]).contains("tensor `blk.0.attn_q_norm.weight` is not known for the architecture `llama`"));
    assert!(add("blk.1.attn_q.weight", &[8, 8]).contains("it has only 1 layers"));
    assert!(add("blk.x.attn_q.weight", &[8, 8]).contains("is not known"));
    assert!(add("weird", &[1]).contains("is not known"));
    let rename = |from: &str, to: &str, shape: &[usize]| {
        let mut file = tiny_gguf();
        file.tensors.retain(|(name, ..)| name != from);
        file.tensor_f32(to, shape, &vec![0.0; shape.iter().product()]);
        open(&file).unwrap_err()
    };
    assert!(rename("token_embd.weight", "output.weight", &[8, 8]).contains("it has no tensor `token_embd.weight`"));
    assert!(
        rename("token_embd.weight", "token_embd.weight", &[7, 8]).contains("there are 8 tokens but `token_embd.weight` has only 7 rows")
    );
    assert!(rename("token_embd.weight", "token_embd.weight", &[8]).contains("expected two dimensions"));
    assert!(rename("blk.0.attn_q.weight", "blk.0.attn_q.weight", &[6, 8]).contains("expected whole heads of 4 rows"));
}

#[test]
fn qwen3_keeps_its_rows_and_has_head_norms() {
    let mut file = tiny_gguf();
    for (key, value) in &mut file.metadata {
        *key = key.replace("llama.", "qwen3.");
        if key == "general.architecture" {
            *value = text("qwen3");
        }
    }
    file.tensor_f32("blk.0.attn_q_norm.weight", &[4], &[1.0; 4]).tensor_f32("blk.0.attn_k_norm.weight", &[4], &[1.0; 4]);
    file.tensor_f32("output.weight", &[8, 8], &[1.0; 64]);
    let checkpoint = open(&file).unwrap();
    assert_eq!((&checkpoint.config["model_type"], &checkpoint.config["tie_word_embeddings"]), (&json!("qwen3"), &json!(false)));
    assert!(checkpoint.tensors.tensor("model.layers.0.self_attn.q_proj.weight").unwrap().bytes().is_some());
    assert!(checkpoint.tensors.find("model.layers.0.self_attn.k_norm.weight").is_some());
    assert!(checkpoint.tensors.find("lm_head.weight").is_some());
}

#[test]
fn biases_of_heads_are_put_in_order() {
    let mut file = tiny_gguf();
    file.tensor_f32("blk.0.attn_q.bias", &[8], &[0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    file.tensor_f32("blk.0.attn_k.bias", &[4], &[0.0, 2.0, 1.0, 3.0]);
    let checkpoint = open(&file).unwrap();
    assert_eq!(checkpoint.config["attention_bias"], true);
    let mut bias = [0.0; 8];
    checkpoint.tensors.read_f32("model.layers.0.self_attn.q_proj.bias", 0..1, &mut bias).unwrap();
    assert_eq!(bias, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    checkpoint.tensors.read_f32("model.layers.0.self_attn.k_proj.bias", 0..1, &mut bias[..4]).unwrap();
    assert_eq!(bias[..4], [0.0, 1.0, 2.0, 3.0]);
    let mut file = tiny_gguf();
    file.tensor("blk.0.attn_q.bias", SourceType::Q8_0, &[32], vec![0; 34]);
    assert!(open(&file).unwrap_err().contains("is a bias of type Q8_0"));
}

#[test]
fn rotary_scaling_by_name() {
    let scaling = |keys: &[(&str, Meta)]| open(&with(keys)).map(|c| c.config["rope_scaling"].clone());
    let kind = |name: &str| ("llama.rope.scaling.type", text(name));
    let factor = ("llama.rope.scaling.factor", Meta::F32(4.0));
    assert_eq!(scaling(&[kind("none")]), Ok(Value::Null));
    assert_eq!(scaling(&[kind("linear"), factor.clone()]), Ok(json!({ "rope_type": "linear", "factor": 4.0 })));
    for none in [0.0, 1.0] {
        let factor = ("llama.rope.scaling.factor", Meta::F32(none));
        assert_eq!(scaling(&[kind("linear"), factor.clone()]), Ok(Value::Null), "{none}");
        assert_eq!(scaling(&[factor]), Ok(Value::Null), "{none}");
        assert_eq!(scaling(&[("llama.rope.scale_linear", Meta::F32(none))]), Ok(Value::Null), "{none}");
    }
    assert_eq!(scaling(&[("llama.rope.scale_linear", Meta::F32(2.0))]), Ok(json!({ "rope_type": "linear", "factor": 2.0 })));
    let yarn = [kind("yarn"), factor, ("llama.rope.scaling.original_context_length", Meta::U32(32))];
    assert_eq!(scaling(&yarn), Ok(json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32 })));
    assert!(scaling(&[kind("yarn")]).unwrap_err().contains("`llama.rope.scaling.factor` is missing"));
    assert!(scaling(&[kind("longrope")]).unwrap_err().contains("the rotary scaling `longrope` is not supported"));
    assert!(scaling(&[("llama.rope.scaling.attn_factor", Meta::F32(1.2))]).unwrap_err().contains("attn_factor` is 1.2"));
}

#[test]
fn the_rotary_table_of_llama_3() {
    let table: Vec<f32> = (0..32).map(|i| 1.0 + i as f32 / 8.0).collect();
    let file = |table: &[f32]| {
        let mut file = with(&[("llama.attention.key_length", Meta::U32(64)), ("llama.rope.freq_base", Meta::F32(500000.0))]);
        file.tensors.retain(|(name, ..)| !name.contains("attn"));
        file.tensor_f32("rope_freqs.weight", &[table.len()], table);
        file
    };
    let checkpoint = open(&file(&table)).unwrap();
    assert_eq!(checkpoint.config["rope_scaling"], json!({"rope_type": "divisors", "divisors": table}));
    assert!(checkpoint.tensors.find("rope_freqs.weight").is_none());
    assert_eq!(open(&file(&[1.0; 32])).unwrap().config["rope_scaling"], Value::Null);
    for wrong in [0.0, -1.0, f32::NAN] {
        let mut table = table.clone();
        table[15] = wrong;
        assert!(open(&file(&table)).unwrap_err().contains("expected divisors above 0"));
    }
    assert!(open(&file(&table[..31])).unwrap_err().contains("expected [32]"));
}
