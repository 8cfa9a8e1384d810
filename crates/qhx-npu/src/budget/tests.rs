use super::*;
use crate::{
    graph::Role,
    lower::{Work, lower, parts},
};
use qhx_ir::conformance::models::{TinyModel, tiny};
use std::collections::BTreeSet;

fn sessions() -> impl Iterator<Item = TinyModel> {
    // f32 and int8 weights.
    [0, 3].into_iter().flat_map(tiny).filter(|model| !model.program.slots.is_empty())
}

fn limits(context_bytes: u64) -> Option<Limits> {
    Some(Limits { context_bytes, ..Limits::of(Arch::V81) })
}

fn plan(model: &TinyModel, rows: &[usize], options: &NpuOptions) -> Result<Budget, String> {
    budget(&[Wanted { name: &model.program.name, pieces: &[Piece { program: &model.program, rows }] }], 64, options)
}

/// Every graph that a program needs, once.
fn has_all_graphs(model: &TinyModel, plan: &Budget) {
    let all: Vec<Planned> = plan.contexts.iter().flat_map(|context| context.planned.clone()).collect();
    for (number, part) in parts(&model.program, plan.part_bytes).iter().enumerate().filter(|(_, part)| part.work != Work::Host) {
        for rows in part_rows(part, &plan.rows) {
            assert_eq!(
                all.iter().filter(|planned| **planned == Planned::Part { piece: 0, number, rows }).count(),
                1,
                "{}: {all:?}",
                model.name
            );
        }
    }
    assert_eq!((all.len(), plan.contexts.iter().map(|context| context.graphs).sum::<usize>()), (plan.graphs, plan.graphs));
    let names: BTreeSet<&String> = plan.contexts.iter().map(|context| &context.name).collect();
    assert_eq!(names.len(), plan.contexts.len(), "{names:?}");
}

#[test]
fn everything_is_in_one_context_or_in_as_many_as_it_takes() {
    for model in sessions() {
        let options = NpuOptions { part_bytes: u64::MAX, limits: limits(1 << 30), ..Default::default() };
        let whole = plan(&model, &[32, 1], &options).unwrap();
        assert_eq!((whole.contexts.len(), &whole.rows[..], whole.notes.len()), (1, &[1, 32][..], 0), "{}", model.name);
        assert!(whole.bytes > 1000 && whole.host_bytes > 100 && whole.graphs >= 3 && whole.contexts[0].shared_weights, "{whole:?}");
        has_all_graphs(&model, &whole);
        // No op can be cut.
        let ops = parts(&model.program, 1).into_iter().filter(|part| part.work != Work::Host).flat_map(|part| part.ops);
        let bytes = |op: usize| model.program.ops[op].op.weights().into_iter().map(|name| graph_bytes(&model.program.weights[name])).sum();
        let most = (whole.bytes / 3).max(ops.map(bytes).max().unwrap());
        // A context also has room for the keys and values of its layers.
        let room = most + whole.contexts[0].slot_bytes;
        let small = NpuOptions { part_bytes: most, context_bytes: most, limits: limits(room), ..options.clone() };
        let split = plan(&model, &[1, 32], &small).unwrap();
        assert!(split.contexts.len() >= 2 && split.contexts.iter().all(|c| c.bytes + c.slot_bytes <= room), "{split:?}");
        has_all_graphs(&model, &split);
        // A weight that two graphs use is in both.
        assert!(split.bytes >= whole.bytes && split.graphs > whole.graphs);
        assert_eq!(split.contexts[0].stages[0], whole.contexts[0].stages[0]);
        let few = limits(most).map(|limits| Limits { contexts: 1, ..limits });
        let error = plan(&model, &[1, 32], &NpuOptions { limits: few, ..small }).unwrap_err();
        assert!(error.contains(&most.to_string()) && error.contains("into 1 contexts"), "{error}");
        let error = plan(&model, &[1, 32], &NpuOptions { limits: limits(whole.bytes), ..options.clone() }).map(drop);
        let beside = error.is_err_and(|error| error.contains("keys and values of 64 rows take"));
        assert_eq!(beside, model.program.slots.values().any(|slot| !slot.is_recurrent()), "{}", model.name);
        let error = plan(&model, &[1, 32], &NpuOptions { limits: limits(64), ..options }).unwrap_err();
        assert!(error.contains("a context holds 64"), "{error}");
    }
}

/// The desired context size is respected as long as there are not too many contexts; they are then of about equal size.
#[test]
fn contexts_are_as_small_as_wished_but_never_too_many() {
    for model in sessions() {
        let wish = |context_bytes, contexts| {
            let limits = limits(1 << 30).map(|limits| Limits { contexts, ..limits });
            plan(&model, &[1, 32], &NpuOptions { part_bytes: 1000, context_bytes, limits, ..Default::default() }).unwrap()
        };
        let three = wish(1, 3);
        let parts: usize = three.contexts.iter().map(|context| context.parts.len()).sum();
        has_all_graphs(&model, &three);
        assert!(parts > 3 && three.contexts.len() <= 3 && three.contexts.len() > 1, "{}: {three:?}", model.name);
        let largest = parts_bytes(&model, 1000).into_iter().max().unwrap();
        let (small, large) = three.contexts.iter().fold((u64::MAX, 0), |(a, b), c| (a.min(c.bytes), b.max(c.bytes)));
        assert!(large - small <= 2 * largest, "{}: {small} to {large}, parts of up to {largest}", model.name);
        assert_eq!(wish(u64::MAX, 3).contexts.len(), 1);
        // The parts stand in the order in which they run.
        let order: Vec<usize> = three.contexts.iter().flat_map(|context| context.parts.clone()).collect();
        assert!(order.is_sorted(), "{order:?}");
    }
}

/// However many contexts a program would take, a plan has no more than can be loaded, or there is none.
#[test]
fn no_plan_has_one_context_too_many() {
    let (mut whole, mut refused) = (0, 0);
    for model in sessions() {
        let parts = parts_bytes(&model, 1000);
        let room = parts.iter().max().unwrap() * 2;
        let slots = plan(&model, &[1, 32], &NpuOptions { limits: limits(1 << 30), ..Default::default() }).unwrap().contexts[0].slot_bytes;
        for contexts in 1..=parts.len() + 1 {
            let limits = limits(room + slots).map(|limits| Limits { contexts, ..limits });
            let options = NpuOptions { part_bytes: 1000, context_bytes: room, limits, ..Default::default() };
            match plan(&model, &[1, 32], &options) {
                Ok(plan) => {
                    assert!(
                        plan.contexts.len() <= contexts,
                        "{}: {} contexts where {contexts} can be loaded",
                        model.name,
                        plan.contexts.len()
                    );
                    whole += 1;
                }
                Err(error) => {
                    let beside = error.contains("keys and values of 64 rows take");
                    assert!(beside || error.contains(&format!("into {contexts} contexts")), "{}: {error}", model.name);
                    refused += 1;
                }
            }
        }
    }
    assert!(whole > 0 && refused > 0, "{whole} plans, {refused} refused");
}

/// What is known of the processors: a larger number here is a phone that restarts.
#[test]
fn the_limits_of_the_processors() {
    let of = |risky_graphs| Limits { context_bytes: 3_500_000_000, contexts: 8, risky_graphs, vtcm_mb: 8 };
    assert_eq!([Arch::V79, Arch::V81].map(Limits::of), [of(None), of(Some(64))]);
    assert_eq!(Arch::ALL.map(Arch::vtcm_mb), [8, 8]);
    let options = NpuOptions::default();
    assert!(options.most_contexts == 8 && options.context_bytes < 3_500_000_000 && !options.allow_risky, "{options:?}");
}

fn parts_bytes(model: &TinyModel, part_bytes: u64) -> Vec<u64> {
    let graphs = parts(&model.program, part_bytes).into_iter().filter(|part| part.work != Work::Host);
    graphs.map(|part| constant_bytes(&model.program, &part)).collect()
}

/// Where graphs do not share their weights, decode and prefill have contexts of their own.
#[test]
fn graphs_with_weights_of_their_own_are_grouped_by_their_rows() {
    for model in sessions() {
        // As many graphs as it takes: of this generation no limit is known.
        let options = NpuOptions { arch: Arch::V79, part_bytes: 4000, context_bytes: 8000, share_weights: false, ..Default::default() };
        let apart = plan(&model, &[1, 16, 32], &options).unwrap();
        has_all_graphs(&model, &apart);
        let name = &model.program.name;
        for context in &apart.contexts {
            assert!(!context.shared_weights);
            let rows: BTreeSet<usize> = context
                .planned
                .iter()
                .map(|planned| match planned {
                    Planned::Part { rows, .. } => *rows,
                    Planned::Experts(sizes) => sizes.rows,
                })
                .collect();
            let label = context.name.strip_prefix(&format!("{name}_")).unwrap().rsplit_once('_').unwrap().0;
            let expected = if label == "decode" { 1 } else { label.strip_prefix("prefill").unwrap().parse().unwrap() };
            assert_eq!(rows.into_iter().collect::<Vec<_>>(), [expected], "{}", context.name);
        }
        let together = plan(&model, &[1, 16, 32], &NpuOptions { share_weights: true, ..options.clone() }).unwrap();
        // Every graph stores its weights, but the head, which has one row in any case.
        assert!(
            apart.bytes > 2 * together.bytes && apart.bytes <= 3 * together.bytes,
            "{}: {} {}",
            model.name,
            apart.bytes,
            together.bytes
        );
        assert_eq!(together.contexts[0].name, format!("{name}_0"));
        assert_eq!(plan(&model, &[1], &options).unwrap().contexts[0].name, format!("{name}_decode_0"));
    }
    let tower = [0].into_iter().flat_map(tiny).find(|model| model.name.starts_with("model.") && model.program.slots.is_empty()).unwrap();
    let alone = plan(&tower, &[8], &NpuOptions { share_weights: false, ..Default::default() }).unwrap();
    assert_eq!((alone.contexts[0].name.clone(), alone.per_token), (format!("{}_0", tower.program.name), None));
}

#[test]
fn what_may_exhaust_the_heap_is_not_the_default() {
    let model = &tiny(0)[0];
    let options = NpuOptions { part_bytes: u64::MAX, ..Default::default() };
    let whole = plan(model, &[1, 32], &options).unwrap();
    let risky = NpuOptions { limits: Some(Limits { risky_graphs: Some(whole.graphs), ..whole.limits }), ..options };
    let careful = plan(model, &[1, 32], &risky).unwrap();
    assert_eq!(careful.rows, [1]);
    assert!(careful.graphs < whole.graphs && careful.notes[0].contains("the risk"), "{careful:?}");
    // Nothing is shared where every part has one graph.
    assert!(careful.contexts.iter().all(|context| !context.shared_weights && context.name.contains("_decode_")), "{careful:?}");
    let bold = plan(model, &[1, 32], &NpuOptions { allow_risky: true, ..risky.clone() }).unwrap();
    assert_eq!(bold.rows, [1, 32]);
    assert!(bold.notes[0].contains("restarts the phone"), "{bold:?}");
    let hopeless = NpuOptions { limits: Some(Limits { risky_graphs: Some(1), ..whole.limits }), ..risky };
    assert!(plan(model, &[1], &hopeless).unwrap_err().contains("the risk"));
    assert_eq!(Limits::of(Arch::V79).risky_graphs, None);
}

/// The bytes of weights that a plan speaks of are those of the constants that graphs have.
#[test]
fn bytes_are_those_of_the_constants() {
    for model in tiny(0).into_iter().filter(|model| !model.program.slots.is_empty()) {
        for part in parts(&model.program, u64::MAX).iter().filter(|part| part.work != Work::Host) {
            let sizes = Sizes { rows: 1, ..part.sizes(kv_sizes(64, &[1], Kv::Full)) };
            let graph = lower(&model.program, part, Some(&model.weights), sizes, "g".into()).unwrap().graph;
            let constants = graph.tensors.iter().filter(|tensor| matches!(tensor.role, Role::Constant(_) | Role::Lazy(_)));
            let found: u64 = constants.map(|tensor| tensor.dtype.byte_len(&tensor.dims).unwrap() as u64).sum();
            let expected = constant_bytes(&model.program, part);
            // A graph has some small numbers of its own.
            assert!(expected.abs_diff(found) * 6 <= expected, "{}: {expected} bytes expected, {found} in the graph", model.name);
        }
    }
}

/// Pieces of a program come together in contexts as if it were whole, and are counted together.
#[test]
fn pieces_share_contexts_and_limits() {
    for model in sessions() {
        let (name, end) = (&model.program.name, model.program.ops.len());
        let cut = |from: usize, to: usize| model.program.cut(from..to).unwrap().renamed(format!("{name}-{from}-{to}"));
        let programs = [cut(0, end / 2), cut(end / 2, end)];
        let options = NpuOptions { part_bytes: u64::MAX, ..Default::default() };
        let laid_out = |rows: [&[usize]; 2], options: &NpuOptions| {
            let pieces = [0, 1].map(|n| Piece { program: &programs[n], rows: rows[n] });
            budget(&[Wanted { name, pieces: &pieces }], 64, options)
        };
        let both: &[usize] = &[1, 32];
        let together = laid_out([both, both], &options).unwrap();
        let alone = programs.each_ref().map(|program| {
            let pieces = [Piece { program, rows: both }];
            budget(&[Wanted { name, pieces: &pieces }], 64, &options).unwrap()
        });
        assert_eq!(together.contexts.iter().map(|context| &*context.name).collect::<Vec<_>>(), [format!("{name}_0")]);
        // A graph of experts serves all layers.
        let graphs: usize = alone.iter().map(|plan| plan.graphs).sum();
        assert!(together.graphs > 2 && together.graphs <= graphs, "{}: {} {graphs}", model.name, together.graphs);
        assert_eq!(together.bytes, alone.iter().map(|plan| plan.bytes).sum::<u64>());
        let (token, whole) = (together.per_token.unwrap(), plan(&model, both, &options).unwrap().per_token.unwrap());
        assert!(token.weight_bytes == whole.weight_bytes && token.traffic.executions > whole.traffic.executions, "{token:?} {whole:?}");
        let limits = Some(Limits { risky_graphs: Some(together.graphs), ..together.limits });
        let careful = NpuOptions { limits, ..options.clone() };
        assert_eq!(laid_out([both, both], &careful).unwrap().rows, [1], "{}", model.name);
        // A piece that only runs prefill cannot be left out.
        let limits = Some(Limits { risky_graphs: Some(2), ..together.limits });
        let error = laid_out([both, &[32]], &NpuOptions { limits, ..options.clone() }).unwrap_err();
        assert!(error.contains("the risk"), "{error}");
        assert!(laid_out([both, &[]], &options).unwrap_err().contains("needs those of prefill"));
    }
}
