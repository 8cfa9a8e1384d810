//! Pen families: from a configuration to programs. One file each; none knows a device.

mod gemma4;
mod gemma4_audio;
mod gemma4_drafter;
mod gemma4_vision;
mod llama;
mod phimoe;
mod qwen3;
mod qwen3_5;
mod qwen_vision;

use crate::{
    Config, ForgeError,
    media::MediaFiles,
    pen::Written,
    precision::{Precision, StoredTensors},
    read::checkpoint::DRAFTER,
    rotate::Rotations,
};
use qhx_bundle::{manifest::DraftEntry, media::Media};

/// What a family makes of a configuration.
pub struct Family {
    /// Its name, for people.
    pub name: &'static str,
    /// The `model_type`s of `config.json` that it reads.
    pub model_types: &'static [&'static str],
    /// The `model_type`s of drafters that were published beside its models, as checkpoints of their own: see [`crate::read::Checkpoint::with_drafter`].
    pub drafters: &'static [&'static str],
    /// Writes the programs. Everything wrong in the configuration is found here, before any weight is read.
    pub write: fn(Config<'_>, Precision, &dyn StoredTensors) -> Result<Programs, ForgeError>,
    /// The front ends of the towers that were written.
    pub media: fn(Config<'_>, &MediaFiles, &Programs) -> Result<Media, ForgeError>,
}

/// The programs of a model and what the manifest says of it.
pub struct Programs {
    /// `text` first.
    pub programs: Vec<Written>,
    /// The one among them that drafts, and what feeds it.
    pub draft: Option<DraftEntry>,
    /// Rows of the logits.
    pub vocabulary: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// The longest text the model was made for.
    pub context: usize,
    /// What was asked to be rotated: families rotate nothing.
    pub rotations: Rotations,
    /// Tensors that are left out on purpose where no program uses them (other towers, draft heads, the head of a tied model).
    pub ignored: Box<dyn Fn(&str) -> bool>,
}

impl Programs {
    /// Whether there is a program of this name.
    pub fn has(&self, name: &str) -> bool {
        self.programs.iter().any(|written| *written.program.name == *name)
    }
}

/// For families that take only text.
fn no_media(_: Config<'_>, _: &MediaFiles, _: &Programs) -> Result<Media, ForgeError> {
    Ok(Media::default())
}

/// All families.
pub const FAMILIES: &[Family] = &[llama::FAMILY, qwen3::FAMILY, qwen3::VL_FAMILY, phimoe::FAMILY, qwen3_5::FAMILY, gemma4::FAMILY];

/// The family that reads this configuration.
pub fn of(config: Config<'_>) -> Result<&'static Family, ForgeError> {
    let model_type = config.text_if_any("model_type")?.ok_or_else(|| config.error("model_type", "is missing"))?;
    if let Some(family) = FAMILIES.iter().find(|f| f.drafters.contains(&model_type)) {
        let reason = format!(
            "is `{model_type}`, a drafter for models of the family {}: forge such a model with this folder as its drafter",
            family.name
        );
        return Err(config.error("model_type", reason));
    }
    let family = FAMILIES.iter().find(|f| f.model_types.contains(&model_type)).ok_or_else(|| {
        let known: Vec<_> = FAMILIES.iter().flat_map(|f| f.model_types).copied().collect();
        config.error("model_type", format!("is `{model_type}`; known are {}", known.join(", ")))
    })?;
    if let Some(drafter) = config.section(DRAFTER) {
        let found = drafter.text_if_any("model_type")?.unwrap_or_default();
        if !family.drafters.contains(&found) {
            let known = if family.drafters.is_empty() { "none".into() } else { family.drafters.join(", ") };
            return Err(drafter.error("model_type", format!("is `{found}`; the family {} takes as its drafter: {known}", family.name)));
        }
    }
    Ok(family)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::path::Path;

    fn fixture(name: &str) -> Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name).join("config.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn write(config: &Value) -> Result<Programs, ForgeError> {
        let config = Config::new(config);
        (of(config)?.write)(config, Precision::F32, &())
    }

    #[test]
    fn every_precision_type_checks() {
        for name in ["llama", "qwen3", "qwen3_vl", "phimoe", "qwen3_5", "gemma4"] {
            let config = fixture(name);
            for (precision, label) in Precision::ALL {
                let config = Config::new(&config);
                let programs = (of(config).unwrap().write)(config, precision, &());
                let programs = programs.unwrap_or_else(|e| panic!("{name} at {label}: {e}"));
                for Written { program, .. } in &programs.programs {
                    let again = qhx_ir::Program::from_json(&program.to_json()).unwrap();
                    assert_eq!(**program, again, "{name}: a program survives its JSON form");
                }
            }
        }
    }

    #[test]
    fn full_size_configurations_have_the_published_sizes() {
        // Parameters of the text side, in millions, by arithmetic over the published dimensions.
        for (name, millions) in [("phi-tiny-moe", 3755), ("qwen3.5-0.8b", 752), ("gemma-4-e4b", 7463), ("qwen3-vl-2b", 1720)] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../configs/{name}.json"));
            let programs = write(&serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()).unwrap();
            let weights = programs.programs[0].program.weights.values();
            assert_eq!(weights.map(|w| w.shape.iter().map(|&d| d as u64).product::<u64>()).sum::<u64>() / 1_000_000, millions, "{name}");
        }
    }

    #[test]
    fn full_size_towers_have_the_published_sizes() {
        // In millions, by arithmetic over the published dimensions; of each projection of relative keys, the 13 keys.
        let towers: &[(&str, &[(&str, u64)])] = &[
            ("qwen3.5-0.8b", &[("vision", 100)]),
            ("gemma-4-e4b", &[("vision", 169), ("audio", 296)]),
            ("qwen3-vl-2b", &[("vision", 406)]),
        ];
        for (name, expected) in towers {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../configs/{name}.json"));
            let config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
            let programs = write(&config).unwrap();
            let count = |written: &Written| {
                written.program.weights.values().map(|w| w.shape.iter().map(|&d| d as u64).product::<u64>()).sum::<u64>() / 1_000_000
            };
            let found: Vec<_> = programs.programs[1..].iter().map(|w| (w.program.name.to_string(), count(w))).collect();
            let expected: Vec<_> = expected.iter().map(|(name, millions)| (name.to_string(), *millions)).collect();
            assert_eq!(found, expected, "{name}");
            let media = (of(Config::new(&config)).unwrap().media)(Config::new(&config), &MediaFiles::default(), &programs).unwrap();
            assert_eq!(media.audio.is_some(), *name == "gemma-4-e4b");
            assert!(media.image.is_some());
        }
    }

    /// The tensors of a checkpoint, by name only.
    struct Names(Vec<&'static str>);

    impl StoredTensors for Names {
        fn encoding(&self, tensor: &str) -> Option<qhx_ir::Encoding> {
            self.has(tensor).then_some(qhx_ir::Encoding::F32)
        }

        fn has(&self, tensor: &str) -> bool {
            self.0.contains(&tensor)
        }

        fn numbers(&self, tensor: &str, _most: usize) -> Result<Option<Vec<f32>>, ForgeError> {
            Err(ForgeError::Tensor { tensor: tensor.into(), reason: "is missing".into() })
        }
    }

    #[test]
    fn a_checkpoint_without_a_towers_tensors_has_no_tower() {
        for name in ["qwen3_vl", "qwen3_5", "gemma4"] {
            let config = fixture(name);
            let config = Config::new(&config);
            let programs = (of(config).unwrap().write)(config, Precision::F32, &Names(Vec::new())).unwrap();
            assert_eq!(programs.programs.len(), 1, "{name}");
            let generators = programs.programs[0].program.inputs.iter().map(|input| &input.generator);
            assert!(!generators.clone().any(|g| matches!(g, qhx_ir::Generator::SoftRows)), "{name}");
            let media = (of(config).unwrap().media)(config, &MediaFiles::default(), &programs).unwrap();
            assert!(media.is_empty(), "{name}");
        }
        // A tower of which only a part is there is an error that names what is missing.
        let config = fixture("gemma4");
        let names = Names(vec!["model.vision_tower.patch_embedder.input_proj.weight"]);
        let error = (of(Config::new(&config)).unwrap().write)(Config::new(&config), Precision::F32, &names).err().unwrap().to_string();
        assert!(error.contains("vision_tower.encoder.layers.0.self_attn.q_proj.input_min"), "{error}");
    }

    /// Where transformers writes 0, or nothing, for what a model does not have.
    #[test]
    fn what_a_model_does_not_have_may_be_0() {
        let written = |config: &Value| write(config).unwrap_or_else(|e| panic!("{e}")).programs;
        let head = |layers: Value| {
            let mut config = fixture("qwen3_5");
            config["text_config"]["mtp_num_hidden_layers"] = layers;
            written(&config).iter().any(|written| *written.program.name == *"mtp")
        };
        assert_eq!([json!(0), Value::Null, json!(1), json!(2)].map(head), [false, false, true, false]);
        let mut config = fixture("qwen3_5");
        config["text_config"].as_object_mut().unwrap().remove("mtp_num_hidden_layers");
        assert_eq!(written(&config).iter().filter(|written| *written.program.name == *"mtp").count(), 0);

        let mut config = fixture("gemma4");
        config["text_config"]["hidden_size_per_layer_input"] = json!(0);
        config["text_config"]["num_kv_shared_layers"] = json!(0);
        let program = &written(&config)[0].program;
        assert!(program.weights.keys().all(|name| !name.contains("per_layer")) && program.stages.len() > 3);
        // transformers refuses null there.
        config["text_config"]["hidden_size_per_layer_input"] = Value::Null;
        let refused = write(&config).map(drop).unwrap_err().to_string();
        assert!(refused.contains("hidden_size_per_layer_input` must be an integer, found null"), "{refused}");
    }

    #[test]
    fn wrong_towers_name_the_field() {
        let cases: &[(&str, &str, Value, &str)] = &[
            ("qwen3_vl", "vision_config.out_hidden_size", json!(7), "`vision_config.out_hidden_size` is 7, but the text's rows have 72"),
            ("qwen3_vl", "vision_config.deepstack_visual_indexes", json!([0, 9]), "must be rising numbers of the 4 blocks"),
            ("qwen3_vl", "vision_config.deepstack_visual_indexes", json!([0, 1, 2, 3]), "has 4 entries for 3 text layers"),
            ("qwen3_vl", "vision_config.num_position_embeddings", json!(35), "which is no square"),
            ("qwen3_vl", "vision_config.hidden_act", json!("relu"), "`vision_config.hidden_act` is \"relu\""),
            ("qwen3_5", "vision_config.deepstack_visual_indexes", json!([1]), "this family has no deepstack"),
            ("gemma4", "vision_config.head_dim", json!(6), "`vision_config.head_dim` is 6; it must be a multiple of 4"),
            ("gemma4", "audio_config.attention_context_right", json!(3), "`audio_config.attention_context_right` is 3, a variant"),
            ("gemma4", "audio_config.attention_context_left", json!(12), "`audio_config.attention_context_left` is 12, a variant"),
            ("gemma4", "audio_config.subsampling_conv_channels", json!([128]), "must be two numbers"),
        ];
        for (name, field, value, expected) in cases {
            let mut config = fixture(name);
            let (section, field) = field.split_once('.').unwrap();
            config[section][field] = value.clone();
            let error = write(&config).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains(expected), "{name}: {error}");
        }
    }

    #[test]
    fn sizes_beyond_all_models_are_refused() {
        let (size, kernel) = ("must be a positive integer of at most 1048576", "must be a positive integer of at most 1024");
        let list = "must be a list of integers from 0 to 1048576";
        let rope = json!({"rope_theta": 1e7, "mrope_section": [2, 1u64 << 63, 1]});
        let cases: &[(&str, &str, &str, Value, &str)] = &[
            ("gemma4", "audio_config", "subsampling_conv_channels", json!([1u64 << 63, 2]), list),
            ("gemma4", "audio_config", "subsampling_conv_channels", json!([128, 1u64 << 63]), list),
            ("gemma4", "audio_config", "hidden_size", json!(1u64 << 31), size),
            ("gemma4", "audio_config", "hidden_size", json!(1 << 20), "times hidden_size (1048576) it must be at most 131072"),
            ("gemma4", "audio_config", "conv_kernel_size", json!(1 << 20), kernel),
            ("gemma4", "vision_config", "head_dim", json!(1u64 << 31), size),
            ("gemma4", "text_config", "head_dim", json!(1u64 << 31), size),
            ("gemma4", "text_config", "global_head_dim", json!(1u64 << 31), size),
            ("gemma4", "text_config", "per_layer_config", json!({"2": {"head_dim": 1u64 << 31}}), size),
            ("qwen3_vl", "vision_config", "patch_size", json!(1u64 << 31), kernel),
            ("qwen3_vl", "vision_config", "spatial_merge_size", json!(1u64 << 31), kernel),
            ("qwen3_5", "text_config", "linear_conv_kernel_dim", json!(65537), kernel),
            ("qwen3_5", "text_config", "rope_parameters", rope, list),
        ];
        for (name, section, field, value, expected) in cases {
            let mut config = fixture(name);
            config[*section][*field] = value.clone();
            let error = write(&config).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains(expected), "{name}, {section}.{field}: {error}");
        }
    }

    #[test]
    fn wrong_configurations_name_the_field() {
        let cases: &[(&str, &str, Value, &str)] = &[
            ("llama", "hidden_size", Value::Null, "`hidden_size` is missing"),
            ("llama", "num_key_value_heads", json!(5), "`num_key_value_heads` (5) must divide"),
            ("llama", "hidden_act", json!("relu"), "`hidden_act` is \"relu\", a variant that is not supported"),
            ("qwen3", "attention_bias", json!(true), "`attention_bias` is true, a variant that is not supported"),
            ("phimoe", "num_experts_per_tok", json!(3), "`num_experts_per_tok` is 3"),
            (
                "llama",
                "num_hidden_layers",
                json!(1u64 << 40),
                "`num_hidden_layers` must be a positive integer of at most 4096, found 1099511627776",
            ),
            (
                "phimoe",
                "num_local_experts",
                json!(1 << 30),
                "`num_local_experts` must be a positive integer of at most 4096, found 1073741824",
            ),
            (
                "phimoe",
                "num_local_experts",
                json!("many"),
                "`num_local_experts` must be a positive integer of at most 4096, found \"many\"",
            ),
            ("phimoe", "head_dim", json!(1u64 << 31), "`head_dim` must be a positive integer of at most 1048576, found 2147483648"),
            ("llama", "vocab_size", json!(1u64 << 31), "`vocab_size` must be a positive integer of at most 16777216"),
        ];
        for (name, field, value, expected) in cases {
            let mut config = fixture(name);
            config[*field] = value.clone();
            let error = write(&config).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains(expected), "{name}: {error}");
        }
        for (field, value, expected) in [
            ("attention_k_eq_v", json!(true), "attention_k_eq_v` is true, a variant that is not supported"),
            ("enable_moe_block", json!(true), "enable_moe_block` is true"),
            ("use_bidirectional_attention", json!("vision"), "use_bidirectional_attention` is \"vision\""),
            ("num_kv_shared_layers", json!(1000), "num_kv_shared_layers` leaves no layer"),
            ("layer_types", json!(["full_attention"]), "layer_types` has 1 entries"),
        ] {
            let mut config = fixture("gemma4");
            let section = if config.get("text_config").is_some() { &mut config["text_config"] } else { &mut config };
            section[field] = value;
            let error = write(&config).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains(expected), "{error}");
        }
        let error = write(&json!({"model_type": "bert"})).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("`model_type` is `bert`; known are llama"), "{error}");
    }
}
