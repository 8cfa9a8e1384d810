//! What a token costs and how a bundle is stored, counted from its programs.

use qhx_bundle::Bundle;
use qhx_ir::{Bindings, Checked, Encoding, Mask, Op, OpKind, dim};
use qhx_runtime::memory::tensor_bytes;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// All weights of one encoding.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct StoredAs {
    pub(crate) encoding: String,
    pub(crate) weights: usize,
    pub(crate) numbers: u64,
    pub(crate) bytes: u64,
}

/// The weights of all programs by encoding, as the files hold them (rows padded, scales included), most bytes first.
pub(crate) fn stored_as(bundle: &Bundle) -> Vec<StoredAs> {
    let mut seen = BTreeSet::new();
    let mut by_encoding: BTreeMap<Encoding, StoredAs> = BTreeMap::new();
    for (name, weight) in bundle.programs().values().flat_map(|program| &program.weights) {
        if seen.insert(name) {
            let stored = || StoredAs { encoding: weight.encoding.to_string(), weights: 0, numbers: 0, bytes: 0 };
            let entry = by_encoding.entry(weight.encoding).or_insert_with(stored);
            entry.weights += 1;
            entry.numbers += numbers(&weight.shape);
            entry.bytes += tensor_bytes(weight.encoding, &weight.shape);
        }
    }
    let mut list: Vec<_> = by_encoding.into_values().collect();
    list.sort_by_key(|stored| std::cmp::Reverse(stored.bytes));
    list
}

/// Numbers of weights that one token is computed with: matrices whole, one row of each table that is only looked up, the chosen experts only.
pub(crate) fn active_parameters(program: &Checked) -> u64 {
    let mut used: HashMap<&str, u64> = HashMap::new();
    for op in &program.ops {
        for name in op.op.weights() {
            let Some(weight) = program.weights.get(name) else { continue };
            let all = numbers(&weight.shape);
            let rows = weight.shape.first().map_or(1, |&rows| rows.max(1) as u64);
            let part = match &op.op {
                OpKind::Embed { .. } => all / rows,
                OpKind::Interpolate { .. } => 4 * (all / rows),
                OpKind::Experts { experts, .. } => all / rows * experts_per_row(program, experts).min(rows),
                _ => all,
            };
            let entry = used.entry(name).or_default();
            *entry = part.max(*entry);
        }
    }
    used.values().sum()
}

/// Multiplications and additions of one op's products, for one token that sees `context` rows. Norms, activations and the like are not counted:
/// they are a small part of a percent.
pub(crate) fn flops(program: &Checked, op: &Op, context: usize) -> u64 {
    let one_token = Bindings { rows: 1, soft_rows: 0, wanted: 1 };
    let shape = |name: &str| dim::bind_shape(&program.value_type(name).shape, &one_token).unwrap_or_default();
    let weight = |name: &str| program.weights.get(name).map_or(&[][..], |weight| &weight.shape);
    match &op.op {
        OpKind::Linear { x, weight: matrix, .. } => 2 * numbers(&shape(x)) * weight(matrix).first().map_or(0, |&out| out as u64),
        OpKind::Experts { experts, gate, up, down, .. } => {
            let each = [gate, up, down].map(|name| weight(name).iter().skip(1).map(|&d| d as u64).product::<u64>());
            2 * experts_per_row(program, experts) * each.iter().sum::<u64>()
        }
        OpKind::Attend { q, mask, .. } => {
            let seen = match mask {
                Mask::Window(window) => context.min(*window),
                Mask::Full | Mask::Causal => context,
            };
            4 * numbers(&shape(q)) * seen as u64
        }
        OpKind::GatedDelta { k, v, .. } => match (&shape(k)[..], &shape(v)[..]) {
            // Decay, what the state says of the key, the correction, what it says of the query.
            ([.., key_dim], [_, heads, value_dim]) => 7 * (heads * key_dim * value_dim) as u64,
            _ => 0,
        },
        OpKind::ShortConv { weight: taps, .. } => 2 * numbers(weight(taps)),
        OpKind::Conv2d { weight: kernel, .. } => match weight(kernel) {
            [_, inner @ ..] => 2 * numbers(&shape(&op.path)) * numbers(inner),
            [] => 0,
        },
        _ => 0,
    }
}

fn experts_per_row(program: &Checked, chosen: &str) -> u64 {
    match program.maker(chosen).map(|op| &program.ops[op].op) {
        Some(OpKind::Route { method, .. }) => method.experts_per_row() as u64,
        _ => 1,
    }
}

fn numbers(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |n: u64, &d| n.saturating_mul(d as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_forge::{Config, Precision, families};
    use serde_json::{Value, json};
    use std::path::Path;

    fn program(family: &str) -> (Value, Checked) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(family).join("config.json");
        let config: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let read = Config::new(&config);
        let written = (families::of(read).unwrap().write)(read, Precision::F32, &()).unwrap();
        let text = written.programs.into_iter().next().unwrap();
        (config, text.program)
    }

    #[test]
    fn a_dense_decoder_costs_what_its_matrices_do() {
        let (config, program) = program("llama");
        let number = |field: &str| config[field].as_u64().unwrap();
        let (hidden, ffn, layers) = (number("hidden_size"), number("intermediate_size"), number("num_hidden_layers"));
        let (heads, kv_heads) = (number("num_attention_heads"), number("num_key_value_heads"));
        let head_dim = config.get("head_dim").and_then(Value::as_u64).unwrap_or(hidden / heads);
        let layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * ffn;
        let head = hidden * number("vocab_size");
        let products = |context| program.ops.iter().map(|op| flops(&program, op, context)).sum::<u64>();
        assert_eq!(products(0), 2 * (layers * layer + head));
        assert_eq!(products(100) - products(0), 4 * layers * heads * head_dim * 100);
        let norms = (2 * layers + 1) * hidden;
        let tied = config["tie_word_embeddings"] == json!(true);
        assert_eq!(active_parameters(&program), layers * layer + head + norms + if tied { 0 } else { hidden });
    }

    #[test]
    fn only_the_chosen_experts_count() {
        let (config, program) = program("phimoe");
        let number = |field: &str| config[field].as_u64().unwrap();
        let expert = 3 * number("hidden_size") * number("intermediate_size");
        let (layers, experts) = (number("num_hidden_layers"), number("num_local_experts"));
        let all: u64 = program.weights.values().map(|weight| numbers(&weight.shape)).sum();
        let table = number("hidden_size") * (number("vocab_size") - 1);
        assert_eq!(all - active_parameters(&program), layers * (experts - 2) * expert + table);
        let in_experts = |op: &&Op| matches!(op.op, OpKind::Experts { .. });
        let counted: u64 = program.ops.iter().filter(in_experts).map(|op| flops(&program, op, 9)).sum();
        assert_eq!(counted, layers * 2 * 2 * expert);
    }
}
