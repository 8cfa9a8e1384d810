//! What each precision stores: at full size by arithmetic over the programs that the published configurations give, and int8 numbers by what transformers computes with them.

use crate::{
    common::{self, Fixture, Overlay, relative_difference},
    extended,
};
use qhx_bundle::Bundle;
use qhx_forge::{Calibration, Config, ForgeOptions, Material, MeanBits, Precision, families, forge_checkpoint};
use qhx_ir::{ActivationForm, Checked, Encoding, KvType, OpKind, Slot, reference::ReferenceDevice};
use qhx_runtime::memory::tensor_bytes;
use std::{collections::BTreeSet, path::Path};

const CONFIGS: [&str; 4] = ["phi-tiny-moe", "qwen3.5-0.8b", "gemma-4-e4b", "qwen3-vl-2b"];

fn program(name: &str, precision: Precision) -> Checked {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../configs/{name}.json"));
    let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let config = Config::new(&config);
    (families::of(config).unwrap().write)(config, precision, &()).unwrap().programs[0].program.clone()
}

/// Matrices of linear layers and experts; `tables` also those that rows are looked up in (a tied head is one).
fn matrices(program: &Checked, tables: bool) -> BTreeSet<&qhx_ir::Name> {
    let looked_up: BTreeSet<_> =
        program.ops.iter().filter(|op| matches!(op.op, OpKind::Embed { .. })).flat_map(|op| op.op.weights()).collect();
    let head = program.ops.iter().rev().find(|op| matches!(op.op, OpKind::Linear { .. })).unwrap().op.weights()[0];
    let products = program.ops.iter().filter(|op| matches!(op.op, OpKind::Linear { .. } | OpKind::Experts { .. }));
    let all = products.flat_map(|op| op.op.weights()).chain(looked_up.iter().copied());
    all.filter(|name| program.weights[*name].shape.len() > 1 && (tables || **name != *head && !looked_up.contains(name))).collect()
}

fn bytes(program: &Checked, names: &BTreeSet<&qhx_ir::Name>) -> u64 {
    names.iter().map(|name| &program.weights[*name]).map(|w| tensor_bytes(w.encoding, &w.shape)).sum()
}

#[test]
fn w8_stores_every_matrix_in_int8() {
    for name in CONFIGS {
        let program = program(name, Precision::W8);
        let layers = matrices(&program, false);
        for matrix in matrices(&program, true) {
            let weight = &program.weights[matrix];
            // A router stays f32: it is small and decides much.
            let small = weight.shape.iter().product::<usize>() < 1 << 20;
            let int8 = if layers.contains(matrix) { Encoding::I8Row } else { Encoding::I8_BLOCK32 };
            assert!(weight.encoding == int8 || small && weight.encoding == Encoding::F32, "{name}: {matrix} is {}", weight.encoding);
        }
        for (vector, weight) in program.weights.iter().filter(|(_, w)| w.shape.len() == 1) {
            assert_eq!(weight.encoding, Encoding::F32, "{name}: {vector}");
        }
    }
    let gemma = program("gemma-4-e4b", Precision::W8);
    for table in ["embed_tokens.weight", "embed_tokens_per_layer.weight"] {
        assert_eq!(gemma.weights[table].encoding, Encoding::I8_BLOCK32, "{table}");
    }
}

#[test]
fn other_recipes() {
    let encoding = |program: &Checked, weight: &str| program.weights[weight].encoding;
    let phi = program("phi-tiny-moe", Precision::MoeI8);
    let experts = phi.ops.iter().find(|op| matches!(op.op, OpKind::Experts { .. })).unwrap();
    assert!(experts.op.weights().iter().all(|w| phi.weights[*w].encoding == Encoding::I8Row));
    assert_eq!(encoding(&phi, "lm_head.weight"), Encoding::F16);
    let phi = program("phi-tiny-moe", Precision::W8F16Head);
    assert_eq!((encoding(&phi, "lm_head.weight"), encoding(&phi, "embed_tokens.weight")), (Encoding::F16, Encoding::I8_BLOCK32));
    let phi = program("phi-tiny-moe", Precision::W4);
    assert_eq!(
        (encoding(&phi, "lm_head.weight"), encoding(&phi, "layers.0.self_attn.q_proj.weight")),
        (Encoding::I6_BLOCK32, Encoding::I4_BLOCK32)
    );
}

#[test]
fn stored_bytes_of_linear_weights() {
    for name in CONFIGS {
        let of = |precision, tables| {
            let program = program(name, precision);
            bytes(&program, &matrices(&program, tables)) as f64
        };
        let (w8, w8_layers) = (of(Precision::W8, true) / of(Precision::F16, true), of(Precision::W8, false) / of(Precision::F16, false));
        let w4_layers = of(Precision::W4, false) / of(Precision::F16, false);
        let w4 = of(Precision::W4, true) / of(Precision::F16, true);
        println!(
            "{name}: of f16, w8 {w8:.4} (layers alone {w8_layers:.4}), w4 {w4_layers:.4} in the layers, {w4:.4} with int6 tables and head"
        );
        assert!(w8 <= 0.54 && w8_layers <= 0.52, "{name}: w8 {w8} {w8_layers}");
        assert!(w4_layers <= 0.30, "{name}: w4 {w4_layers}");
    }
}

/// w8 weights are the checkpoint's rounded to int8, and nothing else: with rows and states in f32 they give what transformers computes with such weights.
#[test]
fn w8_weights_are_those_of_transformers_rounded() {
    for name in ["phimoe", "qwen3_5", "gemma4", "qwen3_vl"] {
        let fixture = Fixture::forge_int8(&common::fixtures().join(name));
        let mut program = fixture.program().clone();
        for op in &mut program.ops {
            if let OpKind::Linear { activation: form, .. } | OpKind::Experts { form, .. } = &mut op.op {
                *form = ActivationForm::F32;
            }
        }
        for slot in program.slots.values_mut() {
            if let Slot::Kv { dtype, .. } = slot {
                *dtype = KvType::F32;
            }
        }
        for prompt in &fixture.prompts {
            let expected = fixture.oracle(&format!("{}.int8_logits", prompt.name)).unwrap();
            let mut running = fixture.load(&ReferenceDevice, program.clone(), &Overlay::default(), prompt);
            let ids = [&prompt.ids[..], &prompt.greedy[..prompt.greedy.len() - 1]].concat();
            let logits = running.step(&ids, program.epoch(ids.len()), true, &mut |_| {});
            let difference = relative_difference(&logits[logits.len() - expected.len()..], &expected);
            assert!(difference < 1e-3, "{name}: {}: {difference}", prompt.name);
        }
    }
}

/// `--plan` prints what a bundle for NPU targets has: the same programs, mixtures and rotations included.
#[test]
fn the_plan_is_what_is_forged() {
    let bits = |bits| Precision::Bits(MeanBits::new(bits).unwrap());
    // Calibration takes a second: by default each family at one precision that it changes.
    let families = [
        ("llama", Precision::W8),
        ("qwen3", bits(4.8)),
        ("qwen3_vl", bits(6.5)),
        ("qwen3_5", Precision::W4),
        ("gemma4", Precision::W4Row),
        ("phimoe", Precision::W8F16Head),
    ];
    let precisions = [
        Precision::Native,
        Precision::F32,
        Precision::F16,
        Precision::W8,
        Precision::W8F16Head,
        Precision::MoeI8,
        Precision::W4,
        Precision::W4Row,
        bits(4.8),
        bits(6.5),
    ];
    // Rows of a few dozen numbers need more bits with their scales. Nothing else may be refused.
    let is_refused = |family, precision| precision == bits(4.8) && ["qwen3_vl", "qwen3_5", "gemma4", "phimoe"].contains(&family);
    let folder = tempfile::tempdir().unwrap();
    for (family, calibrated) in families {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(family);
        let material = Material::open(&source).unwrap();
        for precision in precisions {
            let is_calibrated = extended() || precision == calibrated;
            let out = folder.path().join(format!("{family}-{precision}"));
            let options = || ForgeOptions {
                calibration: is_calibrated.then(Calibration::default),
                row_tables: true,
                ..ForgeOptions::new(&out, precision)
            };
            let (planned, forged) = (material.programs_for_targets(&mut options()), forge_checkpoint(&source, &mut options()));
            if is_refused(family, precision) {
                let errors = [planned.map(drop), forged.map(drop)].map(|refused| refused.unwrap_err().to_string());
                assert_eq!(errors[0], errors[1], "{family} at {precision}");
                continue;
            }
            forged.unwrap();
            let (planned, _) = planned.unwrap_or_else(|e| panic!("{family} at {precision}: {e}"));
            let made = Bundle::open(&out).unwrap();
            // A program that drafts is not for NPUs.
            let drafting = made.manifest().draft.iter().count();
            assert_eq!(planned.len(), made.programs().len() - drafting, "{family} at {precision}");
            for program in &planned {
                assert!(**program == **made.program(&program.name).unwrap(), "{family} at {precision}: {}", program.name);
            }
        }
    }
}
