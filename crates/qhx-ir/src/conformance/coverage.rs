//! Whether few cases are enough: they must have every form of every op that many cases have.

use super::{FEW, Options, cases, models};
use crate::{Op, Program, Slot};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// What the cases have of each op: its parts, their kinds, and the encodings of its weights.
fn forms(cases: usize) -> BTreeSet<String> {
    let mut ops: BTreeMap<&str, Vec<BTreeSet<String>>> = BTreeMap::new();
    for group in cases::GROUPS.iter().chain(models::GROUPS) {
        for number in 0..group.count(cases) {
            let program = group.case(Options::default().seed, number).program;
            program.ops.iter().for_each(|op| ops.entry(op.op.name()).or_default().push(parts(op, &program)));
        }
    }
    let mut forms = BTreeSet::new();
    for (name, ops) in ops {
        for part in ops.iter().flatten() {
            forms.insert(format!("{name}: {part}"));
            if ops.iter().any(|parts| !parts.contains(part)) {
                forms.insert(format!("{name}: not {part}"));
            }
        }
    }
    forms
}

fn parts(op: &Op, program: &Program) -> BTreeSet<String> {
    // As programs write it: {"linear": {"x": "input", "weight": "w", "activation": "i8_row"}}.
    let json = serde_json::to_value(&op.op).unwrap();
    let fields = json[op.op.name()].as_object().unwrap();
    let mut parts: BTreeSet<String> = fields
        .iter()
        .map(|(field, value)| match (&**field, value) {
            ("activation" | "form" | "mask", Value::String(kind)) => format!("{field} {kind}"),
            ("mask" | "method", Value::Object(kind)) => format!("{field} {}", kind.keys().next().unwrap()),
            _ => field.clone(),
        })
        .collect();
    // What is left out in JSON is f32.
    let form = fields.get(if op.op.name() == "linear" { "activation" } else { "form" }).and_then(Value::as_str);
    for weight in op.op.weights() {
        let encoding = program.weights[weight].encoding;
        parts.insert(match encoding.is_float() {
            true => format!("{encoding}"),
            false => format!("{encoding} with rows in {}", form.unwrap_or("f32")),
        });
    }
    if let Some(Slot::Kv { dtype, window, .. }) = op.op.slot().map(|slot| &program.slots[slot]) {
        parts.insert(format!("rows kept in {dtype:?}{}", if window.is_some() { " for a window" } else { "" }));
    }
    parts
}

#[test]
fn few_cases_have_all_forms() {
    let (few, many) = (forms(FEW), forms(Options::default().cases));
    let missing: Vec<_> = many.difference(&few).collect();
    assert!(missing.is_empty(), "only in {} cases: {missing:#?}", Options::default().cases);
    assert!(many.len() > 300, "{}", many.len());
}
