//! What a GGUF file says about its model, in the Hugging Face spelling: configuration and tensor names.
//!
//! GGUF renames tensors and keys, and for the `llama` architecture it also interleaves the rows of the query and key projections, so that
//! rotary pairs stand next to each other. All of that is undone here; rows are moved whole, so quantised rows stay as they are.

use super::gguf::{Gguf, GgufTensor};
use super::gguf_metadata::{Array, Metadata, Value as Meta};
use super::gguf_tokenizer::GgufTokenizer;
use super::source::{Entry, RowOrder};
use super::{Mapping, Problem, TensorInfo, TensorSource, malformed, shown, unsupported};
use serde_json::{Value, json};

/// The architectures that can be read from GGUF, with their Hugging Face class.
const ARCHITECTURES: [(&str, &str); 2] = [("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM")];

/// Keys that change what a model computes and that these architectures do not have, with the largest value that means "off".
const FOREIGN: [(&str, f64); 10] = [
    ("expert_count", 0.0),
    ("attention.scale", 0.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("attention.sliding_window", 0.0),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("logit_scale", 1.0), // factors: 0 is "not set" and 1 changes nothing
    ("embedding_scale", 1.0),
    ("residual_scale", 1.0),
];

/// Reads the configuration and the tensors of a parsed file.
pub(super) fn read(gguf: &Gguf, tokenizer: &GgufTokenizer, file: Mapping) -> Result<(Value, TensorSource), Problem> {
    let model = GgufModel::read(gguf)?;
    let mut config = model.config(gguf, tokenizer)?;
    if let Some(table) = gguf.tensors.iter().find(|t| t.name == "rope_freqs.weight") {
        model.apply_rotary_table(table, file.bytes(), &mut config)?;
    }
    let tensors = model.tensors(gguf, file)?;
    Ok((config, tensors))
}

struct GgufModel<'a> {
    architecture: &'static str,
    class: &'static str,
    metadata: &'a Metadata,
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
}

impl<'a> GgufModel<'a> {
    fn read(gguf: &'a Gguf) -> Result<Self, Problem> {
        let metadata = &gguf.metadata;
        if let Some(parts) = metadata.unsigned("split.count")?.filter(|&n| n > 1) {
            unsupported!("this is one of {parts} parts of a split model; join them with `llama-gguf-split --merge`");
        }
        let name = metadata.text("general.architecture")?.unwrap_or_default();
        let Some(&(architecture, class)) = ARCHITECTURES.iter().find(|(known, _)| *known == name) else {
            let known = ARCHITECTURES.map(|(known, _)| known).join(" and ");
            unsupported!(
                "the architecture is `{}`; from GGUF files qhx reads {known}. Forge from the Hugging Face folder instead",
                shown(name)
            );
        };
        let mut model = Self { architecture, class, metadata, layers: 0, hidden: 0, heads: 0, kv_heads: 0, head_dim: 0 };
        model.refuse_foreign()?;
        model.layers = model.required("block_count")?;
        model.hidden = model.required("embedding_length")?;
        model.heads = model.required("attention.head_count")?;
        model.kv_heads = model.uniform("attention.head_count_kv")?.unwrap_or(model.heads);
        model.head_dim = match model.uniform("attention.key_length")? {
            Some(length) => length,
            None if model.heads > 0 && model.hidden % model.heads == 0 => model.hidden / model.heads,
            None => malformed!("{} numbers cannot be shared by {} heads, and the file gives no `key_length`", model.hidden, model.heads),
        };
        if model.heads == 0 || model.kv_heads == 0 || model.heads % model.kv_heads != 0 {
            malformed!("{} attention heads cannot share {} key/value heads", model.heads, model.kv_heads);
        }
        if model.head_dim == 0 || model.head_dim % 2 != 0 {
            malformed!("a head of {} numbers has no rotary pairs", model.head_dim);
        }
        for other in ["attention.value_length", "rope.dimension_count"] {
            match model.uniform(other)? {
                Some(length) if length != model.head_dim => {
                    let (key, head_dim) = (model.key(other), model.head_dim);
                    unsupported!("`{key}` is {length} but a head has {head_dim} numbers; only equal sizes are supported here");
                }
                _ => {}
            }
        }
        Ok(model)
    }

    fn config(&self, gguf: &Gguf, tokenizer: &GgufTokenizer) -> Result<Value, Problem> {
        let tensor = |name: &str| gguf.tensors.iter().find(|t| t.name == name);
        let Some(embedding) = tensor("token_embd.weight") else {
            malformed!("it has no tensor `token_embd.weight`");
        };
        let vocab_size = match *embedding.shape {
            [vocab_size, _] => vocab_size,
            ref shape => malformed!("tensor `token_embd.weight` has shape {shape:?}; expected two dimensions"),
        };
        if vocab_size < tokenizer.vocab_size {
            malformed!("there are {} tokens but `token_embd.weight` has only {vocab_size} rows", tokenizer.vocab_size);
        }
        let Some(epsilon) = self.metadata.float(&self.key("attention.layer_norm_rms_epsilon"))? else {
            malformed!("the metadata key `{}` is missing", self.key("attention.layer_norm_rms_epsilon"));
        };
        let mut config = json!({
            "architectures": [self.class],
            "model_type": self.architecture,
            "hidden_size": self.hidden,
            "intermediate_size": self.required("feed_forward_length")?,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": epsilon,
            "vocab_size": vocab_size,
            "max_position_embeddings": self.required("context_length")?,
            "rope_theta": self.metadata.float(&self.key("rope.freq_base"))?.unwrap_or(10000.0),
            "rope_scaling": self.rope_scaling()?,
            "attention_bias": tensor("blk.0.attn_q.bias").is_some(),
            "mlp_bias": tensor("blk.0.ffn_up.bias").is_some(),
            "tie_word_embeddings": tensor("output.weight").is_none(),
            "bos_token_id": tokenizer.bos,
            "eos_token_id": tokenizer.eos.first(),
        });
        if let Some(name) = self.metadata.text("general.name")? {
            config["_name_or_path"] = json!(name);
        }
        Ok(config)
    }

    /// The scaling that the metadata names. The one of Llama 3 is not named but given as a tensor of factors: see [`Self::apply_rotary_table`].
    fn rope_scaling(&self) -> Result<Value, Problem> {
        let float = |key: &str| self.metadata.float(&self.key(key));
        let kind = self.metadata.text(&self.key("rope.scaling.type"))?;
        let factor = float("rope.scaling.factor")?.or(float("rope.scale_linear")?);
        for foreign in ["rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_attn_factor"] {
            match float(foreign)? {
                Some(x) if x != 1.0 && x != 0.0 => unsupported!("`{}` is {x}, which qhx does not support", self.key(foreign)),
                _ => {}
            }
        }
        match (kind, factor) {
            (None | Some("none"), None) => Ok(Value::Null),
            // As in llama.cpp, 0 stands for no scaling.
            (None | Some("none" | "linear"), Some(0.0 | 1.0)) => Ok(Value::Null),
            (None | Some("linear"), Some(factor)) => Ok(json!({ "rope_type": "linear", "factor": factor })),
            (Some("none"), Some(_)) => Ok(Value::Null),
            (Some("yarn"), Some(factor)) => {
                let mut scaling = json!({ "rope_type": "yarn", "factor": factor });
                if let Some(length) = self.metadata.unsigned(&self.key("rope.scaling.original_context_length"))? {
                    scaling["original_max_position_embeddings"] = json!(length);
                }
                for name in ["beta_fast", "beta_slow"] {
                    if let Some(beta) = float(&format!("rope.scaling.yarn_{name}"))? {
                        scaling[name] = json!(beta);
                    }
                }
                Ok(scaling)
            }
            (Some("linear" | "yarn"), None) => malformed!("the metadata key `{}` is missing", self.key("rope.scaling.factor")),
            (Some(other), _) => {
                unsupported!("the rotary scaling `{}` is not supported from GGUF files; forge from the Hugging Face folder", shown(other))
            }
        }
    }

    /// Llama 3 stretches its rotary frequencies unevenly. GGUF files do not say by which rule but have the resulting divisor of each frequency.
    fn apply_rotary_table(&self, table: &GgufTensor, file: &[u8], config: &mut Value) -> Result<(), Problem> {
        let pairs = self.head_dim as usize / 2;
        if table.shape != [pairs] {
            malformed!("tensor `rope_freqs.weight` has shape {:?}; expected [{pairs}]", table.shape);
        }
        let mut divisors = vec![0.0; pairs];
        table.source_type.decode(&file[table.range.clone()], &mut divisors);
        if let Some(wrong) = divisors.iter().find(|divisor| !divisor.is_finite() || **divisor <= 0.0) {
            malformed!("tensor `rope_freqs.weight` holds {wrong}; expected divisors above 0");
        }
        if !config["rope_scaling"].is_null() {
            unsupported!("it has both `rope_freqs.weight` and a rotary scaling; forge from the Hugging Face folder");
        }
        if divisors.iter().any(|&divisor| divisor != 1.0) {
            config["rope_scaling"] = json!({"rope_type": "divisors", "divisors": divisors});
        }
        Ok(())
    }

    fn tensors(&self, gguf: &Gguf, file: Mapping) -> Result<TensorSource, Problem> {
        let mut entries = Vec::with_capacity(gguf.tensors.len());
        let mut gathered = Vec::new(); // biases, put in order here: a second file
        for tensor in gguf.tensors.iter().filter(|t| !is_rotary_table(&t.name)) {
            let name = self.hugging_face_name(&tensor.name)?;
            let info = TensorInfo { name, source_type: tensor.source_type, shape: tensor.shape.clone() };
            let interleaved = self.architecture == "llama" && (tensor.name.contains(".attn_q.") || tensor.name.contains(".attn_k."));
            let mut entry = Entry { info, file: 0, range: tensor.range.clone(), order: RowOrder::Stored };
            if interleaved {
                let head = self.head_dim as usize;
                if tensor.shape.first().is_none_or(|rows| rows % head != 0) {
                    malformed!("tensor `{}` has shape {:?}; expected whole heads of {head} rows", shown(&tensor.name), tensor.shape);
                }
                let order = RowOrder::InterleavedHalves { head };
                if tensor.shape.len() > 1 {
                    entry.order = order;
                } else {
                    entry.file = 1;
                    entry.range = gather(tensor, file.bytes(), order, &mut gathered)?;
                }
            }
            entries.push(entry);
        }
        let path = file.path().to_path_buf();
        Ok(TensorSource::new(vec![file, Mapping::from_bytes(path, gathered)], entries))
    }

    fn hugging_face_name(&self, name: &str) -> Result<String, Problem> {
        let unknown = || format!("tensor `{}` is not known for the architecture `{}`", shown(name), self.architecture);
        match name {
            "token_embd.weight" => return Ok("model.embed_tokens.weight".to_string()),
            "output_norm.weight" => return Ok("model.norm.weight".to_string()),
            "output.weight" => return Ok("lm_head.weight".to_string()),
            _ => {}
        }
        let parts = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let parts = parts.and_then(|(layer, rest)| Some((layer.parse::<u64>().ok()?, rest.rsplit_once('.')?)));
        let Some((layer, (module, kind))) = parts else { unsupported!("{}", unknown()) };
        if layer >= self.layers {
            unsupported!("{}: it has only {} layers", unknown(), self.layers);
        }
        let module = match (module, kind) {
            ("attn_norm", "weight") => "input_layernorm",
            ("ffn_norm", "weight") => "post_attention_layernorm",
            ("attn_q_norm", "weight") if self.architecture == "qwen3" => "self_attn.q_norm",
            ("attn_k_norm", "weight") if self.architecture == "qwen3" => "self_attn.k_norm",
            ("attn_q", "weight" | "bias") => "self_attn.q_proj",
            ("attn_k", "weight" | "bias") => "self_attn.k_proj",
            ("attn_v", "weight" | "bias") => "self_attn.v_proj",
            ("attn_output", "weight" | "bias") => "self_attn.o_proj",
            ("ffn_gate", "weight" | "bias") => "mlp.gate_proj",
            ("ffn_up", "weight" | "bias") => "mlp.up_proj",
            ("ffn_down", "weight" | "bias") => "mlp.down_proj",
            _ => unsupported!("{}", unknown()),
        };
        Ok(format!("model.layers.{layer}.{module}.{kind}"))
    }

    fn refuse_foreign(&self) -> Result<(), Problem> {
        for (key, neutral) in FOREIGN {
            let key = self.key(key);
            let value = match self.metadata.get(&key) {
                None => continue,
                Some(Meta::F32(_) | Meta::F64(_)) => self.metadata.float(&key)?,
                Some(_) => self.metadata.unsigned(&key)?.map(|n| n as f64),
            };
            if value.is_some_and(|value| value != 0.0 && value != neutral) {
                unsupported!("`{key}` is set, which qhx does not support for the architecture `{}`", self.architecture);
            }
        }
        Ok(())
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn required(&self, key: &str) -> Result<u64, Problem> {
        match self.uniform(key)? {
            Some(number) => Ok(number),
            None => malformed!("the metadata key `{}` is missing", self.key(key)),
        }
    }

    /// A number, which may be given once or for each layer; the same for all layers.
    fn uniform(&self, key: &str) -> Result<Option<u64>, Problem> {
        let key = self.key(key);
        let per_layer: Vec<i64> = match self.metadata.get(&key) {
            Some(Meta::Array(Array::U32(numbers))) => numbers.iter().map(|&n| n.into()).collect(),
            Some(Meta::Array(Array::I32(numbers))) => numbers.iter().map(|&n| n.into()).collect(),
            _ => return self.metadata.unsigned(&key),
        };
        match per_layer.first() {
            Some(&first) if first >= 0 && per_layer.iter().all(|&n| n == first) => Ok(Some(first as u64)),
            _ => unsupported!("`{key}` differs between layers, which qhx does not support for the architecture `{}`", self.architecture),
        }
    }
}

/// Tables that follow from the configuration and are not weights.
fn is_rotary_table(name: &str) -> bool {
    name == "rope_freqs.weight" || name.ends_with(".attn_rot_embd.weight")
}

/// Copies a vector of heads in its natural order.
fn gather(tensor: &GgufTensor, file: &[u8], order: RowOrder, gathered: &mut Vec<u8>) -> Result<std::ops::Range<usize>, Problem> {
    let (numbers, size) = tensor.source_type.block();
    if numbers != 1 {
        unsupported!("tensor `{}` is a bias of type {}; only plain numbers are supported there", shown(&tensor.name), tensor.source_type);
    }
    let stored = &file[tensor.range.clone()];
    let start = gathered.len();
    for i in 0..stored.len() / size {
        gathered.extend_from_slice(&stored[order.stored_row(i) * size..][..size]);
    }
    Ok(start..gathered.len())
}

#[cfg(test)]
mod tests;
