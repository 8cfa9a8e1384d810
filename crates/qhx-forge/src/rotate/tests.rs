use super::*;
use crate::{
    Config,
    encode::Scales,
    families,
    numbers::{Numbers, Origin},
    plan::PrecisionPlan,
};
use qhx_ir::{Encoding, Weight, hadamard_row};
use std::path::Path;

fn write(name: &str, rotations: Rotations) -> Programs {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name).join("config.json");
    let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let config = Config::new(&config);
    PrecisionPlan { rotations, ..PrecisionPlan::from(Precision::F32) }.write(families::of(config).unwrap(), config, &()).unwrap()
}

fn transforms(written: &Written) -> usize {
    written.program.ops.iter().filter(|op| matches!(op.op, OpKind::Hadamard { .. })).count()
}

fn rotated_weights(written: &Written) -> usize {
    written.recipes.values().filter(|recipe| matches!(recipe, Recipe::Rotated(_))).count()
}

/// What each rotation finds in each family: rotated weights and transforms at run time, of the text and of its towers.
#[test]
fn each_family_gets_what_it_allows() {
    let none = Rotations::default();
    let kinds = [
        Rotations { residual: true, centred: true, ..none },
        Rotations { values: true, ..none },
        Rotations { gated: true, ..none },
        Rotations { residual: true, centred: true, normed: true, ..none },
    ];
    // Three layers of seven matrices and the table; two of them around the values, one behind the gate.
    let dense = [&[(22, 2)][..], &[(6, 0)], &[(3, 3)], &[(22, 2)]];
    let expected = [
        ("llama", dense),
        // Its output head is no table: it takes the weight of the final norm, and nothing is transformed at run time.
        ("qwen3", [&[(23, 0)], &[(6, 0)], &[(3, 3)], &[(23, 0)]]),
        // The tower's three last matrices and their biases, for soft rows and two deepstack outputs.
        ("qwen3_vl", [&[(22, 2), (6, 0)], &[(6, 0), (0, 0)], &[(3, 3), (0, 0)], &[(22, 2), (6, 0)]]),
        // Layer norms and fused experts; values with biases. In each layer four matrices of attention and a bias, the router, three of the experts; the table and the output head.
        ("phimoe", [&[(29, 0)], &[(9, 0)], &[(0, 0)], &[(29, 0)]]),
        ("phimoe_longrope", [&[(20, 0)], &[(6, 0)], &[(0, 0)], &[(20, 0)]]),
        // Four delta rules of five matrices and one gated attention of four; both end in a gate, as perceptrons do.
        // Last what predicts: the shared table, turned back behind the look-up and before the head.
        ("qwen3_5", [&[(40, 2), (2, 0), (1, 2)], &[(0, 0), (0, 0), (0, 0)], &[(10, 10), (0, 0), (0, 0)], &[(40, 2), (2, 0), (1, 2)]]),
        // Norms between products and the stream. Three of eight layers share values of others; each has two gates.
        ("gemma4", [&[(0, 0), (0, 0), (0, 0)], &[(13, 0), (0, 0), (0, 0)], &[(16, 16), (0, 0), (0, 0)], &[(34, 16), (0, 0), (0, 0)]]),
    ];
    for (name, expected) in expected {
        for (rotations, expected) in kinds.into_iter().zip(expected) {
            let programs = write(name, rotations);
            let found: Vec<_> = programs.programs.iter().map(|written| (rotated_weights(written), transforms(written))).collect();
            assert_eq!(found, expected, "{name}: {rotations:?}");
            let program = &programs.programs[0].program;
            let has = |is: fn(&qhx_ir::Stage) -> bool| program.stages.iter().any(is);
            assert_eq!(has(|stage| stage.rotated), rotations.residual && name != "gemma4", "{name}");
            assert_eq!(has(|stage| stage.centred), rotations.residual && name.starts_with("phimoe"), "{name}");
            assert!(!has(|stage| stage.centred && !stage.rotated), "{name}");
            let has_layer_norms = program.ops.iter().any(|op| matches!(op.op, OpKind::LayerNorm { .. }));
            assert_eq!(has_layer_norms, name.starts_with("phimoe") && !rotations.residual, "{name}");
        }
    }
}

/// Rotated numbers are those of the product with the transform's matrix, whatever rows are asked for.
#[test]
fn rotated_numbers_are_products_with_the_transform() {
    let (experts, out, columns) = (3, 12, 20);
    let weight = Weight { shape: vec![experts, out, columns], encoding: Encoding::F32 };
    let numbers = Numbers { origin: Origin::Seeded(7), scales: Scales::Block };
    let plain = Recipe::Stack((0..experts).map(|e| format!("expert.{e}")).collect());
    let gain = Recipe::PlusOne("norm".into());
    let original = numbers.floats(&weight, &plain, 0..experts * out).unwrap();
    let gains = numbers.floats(&Weight { shape: vec![columns], encoding: Encoding::F32 }, &gain, 0..1).unwrap();
    assert!(gains.iter().any(|x| (x - 1.0).abs() > 0.01), "{gains:?}");
    for (input, output, centred) in [(20, 12, false), (5, 12, false), (20, 6, true), (4, 4, true)] {
        let recipe = plain.rotated(Side::Input { block: input, gain: Some(gain.clone()) }, centred);
        let recipe = recipe.rotated(Side::Output { block: output }, centred);
        let found = numbers.floats(&weight, &recipe, 0..experts * out).unwrap();
        let matrix = |block: usize, row: usize, column: usize| {
            let mut unit = vec![if centred { -1.0 / block as f32 } else { 0.0 }; block];
            unit[column % block] += 1.0;
            hadamard_row(&mut unit);
            if row / block == column / block { f64::from(unit[row % block]) } else { 0.0 }
        };
        for (place, found) in found.iter().enumerate() {
            let (expert, row, column) = (place / (out * columns), place / columns % out, place % columns);
            let sum = |r: usize| -> f64 {
                let from = &original[(expert * out + r) * columns..][..columns];
                let each = from.iter().zip(&gains).enumerate();
                each.map(|(c, (x, gain))| f64::from(*x) * f64::from(*gain) * matrix(input, column, c)).sum()
            };
            let expected: f64 = (0..out).map(|r| matrix(output, row, r) * sum(r)).sum();
            assert!((expected - f64::from(*found)).abs() < 1e-6, "{input}, {output}, number {place}: {found}, not {expected}");
        }
        for rows in [0..1, 5..7, 11..13, 3..36, 35..36] {
            let some = numbers.floats(&weight, &recipe, rows.clone()).unwrap();
            assert_eq!(some, found[rows.start * columns..rows.end * columns], "{input}, {output}, rows {rows:?}");
        }
    }
}

/// A bias is what the matrix, however it is rotated, makes of a vector, and what it was before.
#[test]
fn folded_biases_are_products_with_the_vector() {
    let (experts, out, columns) = (3, 12, 20);
    let shape = vec![experts, out, columns];
    let f32s = |shape: &[usize]| Weight { shape: shape.to_vec(), encoding: Encoding::F32 };
    let numbers = Numbers { origin: Origin::Seeded(7), scales: Scales::Block };
    let floats = |shape: &[usize], recipe: &Recipe, rows| numbers.floats(&f32s(shape), recipe, rows).unwrap();
    let matrix = Recipe::Stack((0..experts).map(|e| format!("expert.{e}")).collect()).rotated(Side::Output { block: 4 }, true);
    let [vector, bias] = ["norm.bias", "bias"].map(|name| Recipe::Copy(name.into()));
    for bias in [None, Some(bias)] {
        let folded = Folded { matrix: matrix.clone(), shape: shape.clone(), vector: vector.clone(), bias: bias.clone() };
        let recipe = Recipe::Folded(Box::new(folded));
        let found = floats(&[experts, out], &recipe, 0..experts);
        let (lines, x) = (floats(&shape, &matrix, 0..experts * out), floats(&[columns], &vector, 0..1));
        let before = bias.map_or(vec![0.0; experts * out], |bias| floats(&[experts, out], &bias, 0..experts));
        for (place, found) in found.iter().enumerate() {
            let line = &lines[place * columns..][..columns];
            let expected = f64::from(before[place]) + line.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>();
            assert!((expected - f64::from(*found)).abs() < 1e-6, "number {place}: {found}, not {expected}");
        }
        assert!(found.iter().any(|x| x.abs() > 0.01), "{found:?}");
        assert_eq!(floats(&[experts, out], &recipe, 1..3), found[out..]);
    }
}

#[test]
fn only_calibrated_integers_are_rotated() {
    for (precision, name) in Precision::ALL {
        assert_eq!(Rotations::for_precision(precision, false), Rotations::default(), "{name}");
        let expected =
            if name.starts_with('w') { Rotations { centred: name.starts_with("w8"), ..Rotations::ALL } } else { Rotations::default() };
        assert_eq!(Rotations::for_precision(precision, true), expected, "{name}");
    }
}

/// A value that is read in any other way stays as it is.
#[test]
fn whoever_else_reads_a_value_forbids_its_rotation() {
    let change = |change: &dyn Fn(&mut Program)| {
        let mut programs = write("llama", Rotations::default());
        let mut program = Program::clone(&programs.programs[0].program);
        change(&mut program);
        programs.programs[0].program = Checked::new(program).unwrap();
        rotate(&mut programs, Rotations { normed: false, ..Rotations::ALL }).unwrap();
        let [residual, values, down] = ["layers.0.mlp.gate_proj", "layers.0.self_attn.v_proj", "layers.0.ffn.gated.rotated"];
        let written = &programs.programs[0];
        let is_stream = written.program.stages.iter().any(|stage| stage.rotated);
        let of = |weight: &str| &written.recipes[&*format!("{weight}.weight")];
        assert_eq!(is_stream, matches!(of(residual), Recipe::Rotated(_)));
        (is_stream, of(values).rows_together() > 1, written.program.ops.iter().any(|op| *op.path == *down))
    };
    let output = |program: &mut Program, value: &str| program.outputs.push(qhx_ir::Output { name: "more".into(), value: value.into() });
    assert_eq!(change(&|_| {}), (true, true, true));
    assert_eq!(change(&|p| output(p, "layers.1.attn.add")), (false, true, true), "the stream is an output");
    assert_eq!(change(&|p| output(p, "layers.1.ffn.down_proj")), (false, true, true), "what is added is an output");
    assert_eq!(change(&|p| output(p, "layers.0.attn.v_proj")), (true, false, true), "values are an output");
    let clip = |program: &mut Program, path: &str| {
        if let Some(OpKind::Linear { clip, .. }) = program.ops.iter_mut().find(|op| *op.path == *path).map(|op| &mut op.op) {
            *clip = Some(qhx_ir::Clip { input: [-9.0, 9.0], output: [-9.0, 9.0] });
        }
    };
    assert_eq!(change(&|p| clip(p, "layers.0.ffn.down_proj")), (false, true, false), "a bounded product");
    assert_eq!(change(&|p| clip(p, "layers.0.attn.o_proj")), (false, false, true), "a bounded product after attention");
}

/// A layer norm can become an RMS norm only where all norms of the stream are layer norms, and all that read them take a bias.
#[test]
fn means_are_taken_away_where_nothing_needs_them() {
    let is_rotated = |change: &dyn Fn(&mut Program)| {
        let mut programs = write("phimoe", Rotations::default());
        let mut program = Program::clone(&programs.programs[0].program);
        change(&mut program);
        programs.programs[0].program = Checked::new(program).unwrap();
        rotate(&mut programs, Rotations { residual: true, centred: true, ..Rotations::default() }).unwrap();
        programs.programs[0].program.stages.iter().any(|stage| stage.rotated)
    };
    let path = "layers.1.moe.post_attention_layernorm";
    fn op<'p>(program: &'p mut Program, path: &str) -> &'p mut OpKind {
        &mut program.ops.iter_mut().find(|op| *op.path == *path).unwrap().op
    }
    assert!(is_rotated(&|_| {}));
    let without_bias = |p: &mut Program| {
        let OpKind::LayerNorm { bias, .. } = op(p, path) else { panic!("{path}") };
        let bias = bias.take().unwrap();
        p.weights.remove(&bias);
    };
    assert!(is_rotated(&without_bias), "a layer norm without a bias");
    let to_rms = |p: &mut Program| {
        without_bias(p);
        let OpKind::LayerNorm { x, weight, eps, .. } = op(p, path).clone() else { panic!("{path}") };
        *op(p, path) = OpKind::RmsNorm { x, weight: Some(weight), eps };
    };
    assert!(!is_rotated(&to_rms), "an RMS norm, which does not take the mean away");
    let tied = |p: &mut Program| {
        let OpKind::Linear { weight, .. } = op(p, "lm_head.logits") else { panic!("no output head") };
        let head = std::mem::replace(weight, "embed_tokens.weight".into());
        p.weights.remove(&head);
    };
    assert!(!is_rotated(&tied), "a table as output head");
    let shared = |p: &mut Program| {
        let OpKind::LayerNorm { weight, .. } = op(p, path) else { panic!("{path}") };
        let own = std::mem::replace(weight, "layers.0.post_attention_layernorm.weight".into());
        p.weights.remove(&own);
    };
    assert!(!is_rotated(&shared), "a weight of two norms");
}

/// The biases of layer norms reach every product that reads them.
#[test]
fn biases_of_norms_become_biases_of_products() {
    let written = &write("phimoe", Rotations { residual: true, centred: true, ..Rotations::default() }).programs[0];
    let is_folded = |name: &Name| matches!(written.recipes[name], Recipe::Folded(_)) && !written.program.weights[name].shape.is_empty();
    let mut found = BTreeMap::new();
    for op in &written.program.ops {
        let biases = match &op.op {
            OpKind::Linear { bias, .. } => bias.iter().collect(),
            OpKind::Experts { bias, .. } => bias.iter().flat_map(|bias| [&bias.gate, &bias.up]).collect(),
            _ => Vec::new(),
        };
        let folded = biases.into_iter().filter(|name| is_folded(name)).count();
        *found.entry(op.path.rsplit('.').next().unwrap().to_owned()).or_insert(0) += folded;
    }
    found.retain(|_, folded| *folded > 0);
    let expected = [("experts", 6), ("gate", 3), ("k_proj", 3), ("logits", 1), ("q_proj", 3), ("v_proj", 3)];
    assert_eq!(found, expected.map(|(name, count)| (name.to_owned(), count)).into());
    assert_eq!(written.recipes.keys().collect::<Vec<_>>(), written.program.weights.keys().collect::<Vec<_>>());
}
