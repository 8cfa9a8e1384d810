//! What graphs look like; what they compute is tested in the emulator.

use super::*;
use crate::graph::{Node, Quantization, Role};
use half::f16;
use qhx_ir::{
    AlignedBytes, Encoding, Program, Slot, WeightTensor,
    conformance::models::{TinyModel, tiny},
};

use std::collections::HashMap;

const ROWS: usize = 8;
const CONTEXT: usize = 96;

/// All graphs of a program, each with its part.
fn graphs(program: &Checked, weights: Option<&Arc<dyn Weights>>, budget: u64) -> Vec<(Part, Lowered)> {
    let parts = parts(program, budget).into_iter().filter(|part| part.work != Work::Host);
    let sizes = Sizes { rows: ROWS, context: CONTEXT, ring: None, taps: true };
    parts.map(|part| (part.clone(), lower(program, &part, weights, sizes, "graph".into()).unwrap())).collect()
}

fn models() -> impl Iterator<Item = TinyModel> {
    (0..4).flat_map(tiny)
}

fn is_constant(graph: &Graph, tensor: TensorId) -> bool {
    matches!(graph.tensors[tensor.0].role, Role::Constant(_) | Role::Lazy(_))
}

/// One writer of a slot and a reader with other queries, six heads on two.
fn shared_attention() -> Checked {
    let program = r#"{"program_version": 1, "name": "shared",
        "inputs": [
            {"name": "q", "dtype": "f32", "shape": ["T", 6, 8], "generator": "carried"},
            {"name": "k", "dtype": "f32", "shape": ["T", 2, 8], "generator": "carried"},
            {"name": "v", "dtype": "f32", "shape": ["T", 2, 8], "generator": "carried"}],
        "outputs": [{"name": "y", "value": "b.scaled"}],
        "slots": {"kv": {"kv": {"kv_heads": 2, "head_dim": 8, "dtype": "f16"}}},
        "stages": [{"name": "a"}, {"name": "b"}],
        "weights": {"a.scale": {"shape": [8], "encoding": "f32"}, "b.scale": {"shape": [8], "encoding": "f32"}},
        "ops": [
            {"path": "a.attend", "op": {"attend": {"q": "q", "kv": {"k": "k", "v": "v"}, "slot": "kv", "mask": "causal", "scale": 0.5}}},
            {"path": "a.scaled", "op": {"scale": {"x": "a.attend", "weight": "a.scale"}}},
            {"path": "b.queries", "op": {"scale": {"x": "a.scaled", "weight": "b.scale"}}},
            {"path": "b.attend", "op": {"attend": {"q": "b.queries", "slot": "kv", "mask": {"window": 5}, "scale": 0.5}}},
            {"path": "b.scaled", "op": {"scale": {"x": "b.attend", "factor": 2}}}]}"#;
    Checked::new(Program::from_json(program).unwrap()).unwrap()
}

#[test]
fn shapes_do_not_depend_on_weights() {
    for model in models() {
        let with = graphs(&model.program, Some(&model.weights), u64::MAX);
        let without = graphs(&model.program, None, u64::MAX);
        for ((_, with), (_, without)) in with.iter().zip(&without) {
            let ports = |l: &Lowered| {
                let exchanged = l.graph.tensors.iter().filter(|t| matches!(t.role, Role::Input | Role::Output));
                exchanged.map(|t| (t.name.clone(), t.dims.clone())).collect::<Vec<_>>()
            };
            assert_eq!((ports(with), &with.feeds, &with.drains), (ports(without), &without.feeds, &without.drains), "{}", model.name);
            with.graph.check().unwrap_or_else(|e| panic!("{}: {e}", model.name));
        }
    }
}

#[test]
fn linears_are_fully_connected_and_norms_are_matrices_with_a_bias() {
    for model in models() {
        for (_, Lowered { graph, .. }) in graphs(&model.program, Some(&model.weights), u64::MAX) {
            let rank = |tensor: TensorId| graph.tensors[tensor.0].dims.len();
            for Node { name, kind, inputs, .. } in &graph.nodes {
                match *kind {
                    // Relative keys are a table for each head: no other product with a constant is a `MatMul`.
                    "MatMul" => assert!(!is_constant(&graph, inputs[1]) || name.contains("relative"), "{}: {name}", model.name),
                    "RmsNorm" | "LayerNorm" => assert_eq!((inputs.len(), rank(inputs[0])), (3, 2), "{}: {name}", model.name),
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn keys_and_values_stay_at_their_heads() {
    let program = shared_attention();
    let programs = models().map(|m| m.program).filter(|p| p.slots.values().any(|s| matches!(s, Slot::Kv { .. })));
    for program in programs.chain([program]) {
        for (_, Lowered { graph, .. }) in graphs(&program, None, u64::MAX) {
            for tensor in &graph.tensors {
                let dims: Vec<usize> = tensor.dims.iter().map(|&d| d as usize).collect();
                // Rows of the context, each with the numbers of a head: keys or values.
                let [heads @ .., rows, dim] = &dims[..] else { continue };
                let slots = program.slots.values().filter_map(|slot| match *slot {
                    Slot::Kv { kv_heads, head_dim, .. } => Some((kv_heads, head_dim)),
                    _ => None,
                });
                if *rows >= CONTEXT && slots.clone().any(|(_, head_dim)| head_dim == *dim) {
                    let most = slots.filter(|s| s.1 == *dim).map(|s| s.0).max().unwrap_or(0);
                    assert!(heads.iter().product::<usize>() <= most, "{}: {dims:?}", tensor.name);
                }
            }
        }
    }
}

#[test]
fn a_reader_in_another_graph_finds_the_new_rows_in_the_slot() {
    let program = shared_attention();
    let masks = |budget: u64| -> Vec<Vec<Keys>> {
        let keys = |(_, feed): &(TensorId, Feed)| match feed {
            Feed::Mask { keys, .. } => Some(*keys),
            _ => None,
        };
        graphs(&program, None, budget).iter().map(|(_, l)| l.feeds.iter().filter_map(keys).collect()).collect()
    };
    assert_eq!(masks(u64::MAX), [[Keys::PastAndNew, Keys::PastAndNew]]);
    // One of the two weights in each graph.
    assert_eq!(masks(64), [[Keys::PastAndNew], [Keys::Past]]);
}

/// int4 weights have scales of rows where these say the same as those of blocks.
#[test]
fn int4_has_a_scale_for_each_row_or_block() {
    let program = r#"{"program_version": 1, "name": "product",
        "inputs": [{"name": "x", "dtype": "f32", "shape": ["T", 64], "generator": "carried"}],
        "outputs": [{"name": "y", "value": "a.y"}],
        "stages": [{"name": "a"}],
        "weights": {"w": {"shape": [2, 64], "encoding": "i4_block32"}},
        "ops": [{"path": "a.y", "op": {"linear": {"x": "x", "weight": "w", "activation": "f32"}}}]}"#;
    let program = Checked::new(Program::from_json(program).unwrap()).unwrap();
    let lowered = |scales: [[f32; 2]; 2]| {
        let row_bytes = Encoding::I4_BLOCK32.row_bytes(64).unwrap();
        let (data, mut scale) = (AlignedBytes::zeroed(2 * row_bytes.data), AlignedBytes::zeroed(2 * row_bytes.scale));
        for (row, scales) in scale.as_mut().chunks_mut(row_bytes.scale).zip(scales) {
            row[..4].copy_from_slice(&scales.map(|scale| f16::from_f32(scale).to_le_bytes()).concat());
        }
        let weight = WeightTensor::new(Encoding::I4_BLOCK32, vec![2, 64], data.into(), Some(scale.into()), None).unwrap();
        let weights: Arc<dyn Weights> = Arc::new(HashMap::from([("w".to_owned(), weight)]));
        let (_, lowered) = graphs(&program, Some(&weights), u64::MAX).remove(0);
        lowered.graph.check().unwrap();
        lowered.graph.tensors.into_iter().find(|tensor| tensor.dims == [2, 64]).unwrap().quantization
    };
    assert_eq!(lowered([[0.5; 2], [0.25; 2]]), Quantization::Channel4 { axis: 0, scales: vec![0.5, 0.25] });
    for scales in [[[0.5; 2], [0.25, 0.5]], [[0.5; 2], [-0.25; 2]]] {
        assert_eq!(lowered(scales), Quantization::Block4 { block: 32, scales: scales.concat() });
    }
}

/// Rows with heads, of widths that take one product and two: the graph is one that the processor takes, and ends in the shape it began with.
#[test]
fn hadamard_transforms_are_products() {
    for (shape, products) in [("64", 1), ("3, 96", 1), ("576", 2), ("2, 1536", 2)] {
        let program = format!(
            r#"{{"program_version": 1, "name": "transform",
            "inputs": [{{"name": "x", "dtype": "f32", "shape": ["T", {shape}], "generator": "carried"}}],
            "outputs": [{{"name": "y", "value": "a.y"}}],
            "stages": [{{"name": "a"}}],
            "weights": {{}},
            "ops": [{{"path": "a.y", "op": {{"hadamard": {{"x": "x"}}}}}}]}}"#
        );
        let program = Checked::new(Program::from_json(&program).unwrap()).unwrap();
        let (_, lowered) = graphs(&program, None, u64::MAX).remove(0);
        lowered.graph.check().unwrap();
        let nodes = |kind: &str| lowered.graph.nodes.iter().filter(|node| node.kind == kind).count();
        assert_eq!((nodes("FullyConnected"), nodes("Transpose")), (products, 2 * (products - 1)), "{shape}");
        let dims = |id: TensorId| &lowered.graph.tensors[id.0].dims;
        assert_eq!(dims(lowered.feeds[0].0), dims(lowered.drains[0].0), "{shape}");
    }
}

/// What is not rows of the call cannot be cut and padded: it is refused, not taken for rows.
#[test]
fn values_are_rows_of_the_call_or_refused() {
    let program = |shape: &str, to: &str| {
        let program = format!(
            r#"{{"program_version": 1, "name": "turned",
            "inputs": [{{"name": "x", "dtype": "f32", "shape": {shape}, "generator": "carried"}}],
            "outputs": [{{"name": "y", "value": "a.scaled"}}],
            "stages": [{{"name": "a"}}],
            "weights": {{}},
            "ops": [
                {{"path": "a.shaped", "op": {{"reshape": {{"x": "x", "shape": {to}}}}}}},
                {{"path": "a.scaled", "op": {{"scale": {{"x": "a.shaped", "factor": 2}}}}}}]}}"#
        );
        Checked::new(Program::from_json(&program).unwrap()).unwrap()
    };
    let refusals = |program: &Checked| program.ops.iter().filter_map(|op| refusal(program, op)).collect::<Vec<_>>();
    assert_eq!(refusals(&program(r#"["T", 8]"#, r#"["T", 2, 4]"#)), Vec::<String>::new());
    let turned = refusals(&program(r#"["T", 8]"#, r#"[4, "T", 2]"#));
    assert!(turned.len() == 2 && turned[0].contains("`a.shaped` [4, T, 2]: its first dimension"), "{turned:?}");
    assert_eq!(refusals(&program("[4, 8]", "[8, 4]")).len(), 2, "no rows at all");
    for model in models() {
        assert_eq!(refusals(&model.program), Vec::<String>::new(), "{}", model.name);
    }
}

#[test]
fn parts_hand_on_what_others_read_and_keep_kinds_of_rows_apart() {
    for (model, budget) in models().flat_map(|m| [u64::MAX, 4000, 1].map(|budget| (m.program.clone(), budget))) {
        let parts = parts(&model, budget);
        let mut known: Vec<Name> = model.inputs.iter().map(|i| i.name.clone()).collect();
        let mut seen: Vec<usize> = Vec::new();
        for part in &parts {
            assert!(part.reads.iter().all(|name| known.contains(name)), "{}: {part:?}", model.name);
            known.extend(part.makes.iter().cloned());
            seen.extend(&part.ops);
            assert!(part.ops.iter().all(|&op| parts::work_of(&model, &model.ops[op]) == part.work));
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..model.ops.len()).collect::<Vec<_>>(), "{}: every op once", model.name);
        assert!(model.outputs.iter().all(|o| known.contains(&o.value)), "{}", model.name);
    }
}
