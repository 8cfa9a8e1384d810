//! Every check says what is wrong and where.

use super::*;
use crate::{
    Activation, ActivationForm, AlignedBytes, Clip, ExpertBias, KeyValue, KvType, Mask, RotaryVariant, Routing, Symbol, Weight,
    WeightTensor,
    reference::tests::bench::{Bench, i8_row},
};

/// Values, weights, slots and rotaries of many types.
fn base() -> Bench {
    let fixed = |n| Dim::Fixed(n);
    let frequencies = |n| vec![RotaryVariant { inv_freq: vec![1.0; n], amplitude: 1.0 }];
    Bench::new()
        .rows("x", &[8])
        .rows("wide", &[12])
        .rows("heads", &[2, 4])
        .rows("three", &[3, 4])
        .rows("a", &[2])
        .input("fixed", DType::F32, &[fixed(5), fixed(8)])
        .input("soft", DType::F32, &[Dim::R, fixed(8)])
        .input("at", DType::I32, &[Dim::R])
        .input("ids", DType::I32, &[Dim::T])
        .input("chosen", DType::I32, &[Dim::T, fixed(2)])
        .input("positions", DType::I32, &[fixed(2), Dim::T])
        .input("quarter", DType::F32, &[Dim::Exact(Symbol::T, 4), fixed(2), fixed(4)])
        .weight("w", &[3, 8], &[0.0; 24])
        .weight("n8", &[8], &[0.0; 8])
        .weight("n2", &[2], &[0.0; 2])
        .weight("three_d", &[4, 5, 8], &[0.0; 160])
        .weight("down", &[4, 8, 5], &[0.0; 160])
        .weight("expert_bias", &[4, 5], &[0.0; 20])
        .weight("kernel", &[8, 4], &[0.0; 32])
        .weight("even", &[1, 2, 2, 4], &[0.0; 16])
        .weight("odd", &[1, 3, 3, 4], &[0.0; 36])
        .tensor("int", i8_row(&[0; 8], 1.0))
        .slot("kv", Slot::Kv { kv_heads: 2, head_dim: 4, window: None, dtype: KvType::F16 })
        .slot("windowed", Slot::Kv { kv_heads: 2, head_dim: 4, window: Some(4), dtype: KvType::F16 })
        .slot("fifo", Slot::Fifo { rows: 3, channels: 8 })
        .slot("delta", Slot::Delta { heads: 2, key_dim: 4, value_dim: 4 })
        .rotary("small", Rotary { blocks: vec![(0, 4)], streams: vec![0, 1], variants: frequencies(2) })
        .rotary("large", Rotary { blocks: vec![(0, 6)], streams: vec![], variants: frequencies(3) })
        .rotary("deep", Rotary { blocks: vec![(0, 4)], streams: vec![0, 2], variants: frequencies(2) })
}

/// The op must be refused for this reason, under its path and stage.
#[track_caller]
fn refuse(op: OpKind, reason: &str) {
    refuse_after(base(), op, reason);
}

#[track_caller]
fn refuse_after(bench: Bench, op: OpKind, reason: &str) {
    let name = op.name();
    let error = Checked::new(bench.op("y", op).program).unwrap_err();
    let text = error.to_string();
    let CheckError::Op { stage, path, op, .. } = &error else { panic!("expected an error of the op: {text}") };
    assert_eq!((&**stage, &**path, *op), ("op", "op.y", name), "{text}");
    assert!(text.contains(reason), "`{text}` does not say `{reason}`");
    assert!(text.starts_with(&format!("program `bench`, stage `op`, op `op.y` ({name}): ")), "{text}");
}

fn linear(x: &str, weight: &str) -> OpKind {
    OpKind::Linear { x: x.into(), weight: weight.into(), bias: None, activation: ActivationForm::F32, clip: None }
}

fn attend(q: &str, kv: Option<(&str, &str)>, slot: Option<&str>, mask: Mask) -> OpKind {
    let kv = kv.map(|(k, v)| KeyValue { k: k.into(), v: v.into() });
    OpKind::Attend { q: q.into(), kv, slot: slot.map(Into::into), mask, scale: 1.0, softcap: None, relative_keys: None }
}

#[test]
fn names_must_be_known() {
    refuse(linear("nothing", "w"), "reads `nothing`, which no input and no earlier op makes");
    refuse(linear("x", "nothing"), "names the weight `nothing`, which is not declared");
    refuse(OpKind::Rope { x: "heads".into(), positions: "positions".into(), rotary: "no".into() }, "rotary `no`, which is not declared");
    refuse(attend("heads", Some(("heads", "heads")), Some("no"), Mask::Causal), "slot `no`, which is not declared");
}

#[test]
fn tables_and_products() {
    refuse(OpKind::Embed { ids: "x".into(), table: "w".into(), scale: 1.0 }, "must be I32");
    refuse(OpKind::Embed { ids: "chosen".into(), table: "w".into(), scale: 1.0 }, "must have rank 1");
    refuse(OpKind::Embed { ids: "ids".into(), table: "n8".into(), scale: 1.0 }, "must have rank 2");
    refuse(OpKind::Embed { ids: "ids".into(), table: "w".into(), scale: f32::NAN }, "scale must be finite");
    refuse(OpKind::Interpolate { index: "chosen".into(), factor: "x".into(), table: "w".into() }, "must both be [rows, taps]");
    refuse(linear("wide", "w"), "last dimension 12, found [3, 8]");
    refuse(linear("ids", "w"), "must be F32");
    refuse(
        OpKind::Linear { x: "x".into(), weight: "w".into(), bias: Some("n8".into()), activation: ActivationForm::F32, clip: None },
        "must have shape [3], found [8]",
    );
    let form = |activation, clip| OpKind::Linear { x: "x".into(), weight: "w".into(), bias: None, activation, clip };
    refuse(form(ActivationForm::I8Row, None), "needs an integer weight, `w` is f32");
    refuse(form(ActivationForm::F32, Some(Clip { input: [1.0, -1.0], output: [0.0, 1.0] })), "low ≤ high");
    refuse(form(ActivationForm::F32, Some(Clip { input: [0.0, 1.0], output: [f32::NAN, 1.0] })), "low ≤ high");
}

#[test]
fn norms_and_functions() {
    let rms = |weight: &str, eps| OpKind::RmsNorm { x: "x".into(), weight: Some(weight.into()), eps };
    refuse(rms("n2", 1e-6), "must have shape [8], found [2]");
    refuse(rms("n8", 0.0), "eps must be positive");
    refuse(OpKind::LayerNorm { x: "x".into(), weight: "n8".into(), bias: Some("n2".into()), eps: 1e-6 }, "must have shape [8]");
    refuse(OpKind::LayerNorm { x: "x".into(), weight: "n8".into(), bias: None, eps: f32::INFINITY }, "eps must be positive");
    refuse(OpKind::Scale { x: "x".into(), factor: 1.0, weight: Some("n2".into()) }, "must have shape [8], found [2]");
    refuse(OpKind::Scale { x: "x".into(), factor: f32::NAN, weight: None }, "factor must be finite");
    refuse(OpKind::Softcap { x: "x".into(), cap: 0.0 }, "cap must be positive");
    let odd = base().rows("odd_rows", &[2 * 513]);
    refuse_after(odd, OpKind::Hadamard { x: "odd_rows".into() }, "1026 numbers a row, whose odd factor 513 is larger than 512");
    refuse(OpKind::Hadamard { x: "ids".into() }, "must be F32");
    refuse(OpKind::Clamp { x: "x".into(), low: 1.0, high: 0.0 }, "low ≤ high");
    refuse(OpKind::Clamp { x: "x".into(), low: f32::NAN, high: 0.0 }, "low ≤ high");
    refuse(OpKind::Add { a: "x".into(), b: "wide".into() }, "`x` [T, 8] and `wide` [T, 12] must have one shape");
    refuse(OpKind::GateAct { gate: "x".into(), up: "heads".into(), activation: Activation::Silu }, "must have one shape");
    refuse(OpKind::Activate { x: "ids".into(), activation: Activation::Silu }, "must be F32");
    // A norm's weight is read as plain numbers.
    let int8 = base().tensor("quantised", {
        let scale = AlignedBytes::zeroed(4);
        WeightTensor::new(Encoding::I8Row, vec![8], AlignedBytes::zeroed(64).into(), Some(scale.into()), None).unwrap()
    });
    refuse_after(int8, rms("quantised", 1e-6), "must be f32, f16 or bf16 here, found i8_row");
}

#[test]
fn rotaries() {
    let rope = |x: &str, positions: &str, rotary: &str| OpKind::Rope { x: x.into(), positions: positions.into(), rotary: rotary.into() };
    refuse(rope("x", "positions", "small"), "rank 3");
    refuse(rope("heads", "chosen", "small"), "must be [streams, T], found [T, 2]");
    refuse(rope("heads", "positions", "large"), "reaches beyond head size 4");
    refuse(rope("heads", "positions", "deep"), "uses streams [0, 2], `positions` has 2");
}

#[test]
fn attention() {
    let own = Some(("heads", "heads"));
    refuse(attend("x", own, None, Mask::Full), "rank 3");
    refuse(attend("heads", Some(("heads", "three")), None, Mask::Full), "keys and values must be [T, kv_heads, 4]");
    refuse(attend("heads", Some(("quarter", "quarter")), None, Mask::Full), "keys and values must be [T, kv_heads, 4]");
    refuse(attend("three", own, None, Mask::Full), "3 query heads are no multiple of 2 key heads");
    refuse(attend("heads", None, None, Mask::Full), "needs a KV slot to read");
    refuse(attend("heads", None, Some("kv"), Mask::Causal), "reads slot `kv` before any op writes it");
    refuse(attend("heads", own, Some("kv"), Mask::Full), "a full mask cannot have a slot");
    refuse(attend("heads", own, Some("windowed"), Mask::Causal), "which keeps a window only");
    refuse(attend("heads", own, Some("windowed"), Mask::Window(5)), "window 5 is larger than slot `windowed` keeps (4)");
    refuse(attend("heads", own, None, Mask::Window(0)), "a window of 0 sees nothing");
    refuse(attend("three", Some(("three", "three")), Some("kv"), Mask::Causal), "must be a KV slot of 3 x 4");
    refuse(attend("heads", own, Some("fifo"), Mask::Causal), "must be a KV slot of 2 x 4");
    refuse(attend("quarter", Some(("quarter", "quarter")), Some("kv"), Mask::Causal), "an op with a slot must have T rows, found T/4");
    let written = base().op("first", attend("heads", own, Some("kv"), Mask::Causal));
    refuse_after(written, attend("heads", own, Some("kv"), Mask::Causal), "slot `kv` has another writer already");
    let with = |scale, softcap, table: Option<&str>| {
        let kv = Some(KeyValue { k: "heads".into(), v: "heads".into() });
        OpKind::Attend { q: "heads".into(), kv, slot: None, mask: Mask::Causal, scale, softcap, relative_keys: table.map(Into::into) }
    };
    refuse(with(f32::NAN, None, None), "scale must be finite");
    refuse(with(1.0, Some(-1.0), None), "softcap must be positive");
    refuse(with(1.0, None, Some("three_d")), "last dimension 4");
}

#[test]
fn running_states() {
    let conv = |x: &str, weight: &str, slot: Option<&str>| OpKind::ShortConv {
        x: x.into(),
        weight: weight.into(),
        bias: None,
        slot: slot.map(Into::into),
        activation: None,
    };
    refuse(conv("fixed", "kernel", None), "must be [rows, channels], found [5, 8]");
    refuse(conv("wide", "kernel", None), "must have shape [12, 4], found [8, 4]");
    refuse(conv("x", "kernel", Some("kv")), "must be Fifo { rows: 3, channels: 8 }");
    let written = base().op("first", conv("x", "kernel", Some("fifo")));
    refuse_after(written, conv("x", "kernel", Some("fifo")), "another writer");
    let delta = |q: &str, v: &str, a: &str, a_log: &str, slot: &str, eps| {
        let [q, v, a, a_log, slot]: [Name; 5] = [q, v, a, a_log, slot].map(Into::into);
        OpKind::GatedDelta { k: q.clone(), q, v, b: a.clone(), a, dt_bias: a_log.clone(), a_log, slot, scale: 1.0, eps }
    };
    refuse(delta("three", "heads", "a", "n2", "delta", 1e-6), "value heads must be a multiple of key heads");
    refuse(delta("quarter", "heads", "a", "n2", "delta", 1e-6), "rows equal");
    refuse(delta("heads", "heads", "x", "n2", "delta", 1e-6), "`x` must be [T, 2], found [T, 8]");
    refuse(delta("heads", "heads", "a", "n8", "delta", 1e-6), "must have shape [2], found [8]");
    refuse(delta("heads", "heads", "a", "n2", "fifo", 1e-6), "must be Delta");
    refuse(delta("heads", "heads", "a", "n2", "delta", 0.0), "eps must be positive");
}

#[test]
fn experts() {
    let route = |method| OpKind::Route { scores: "a".into(), method };
    refuse(route(Routing::Softmax { top_k: 3, renormalise: false }), "cannot choose 3 of 2 experts");
    refuse(route(Routing::Softmax { top_k: 0, renormalise: false }), "cannot choose 0");
    refuse(route(Routing::SparseMixer { jitter: f32::NAN }), "jitter must be finite");
    refuse(OpKind::Route { scores: "heads".into(), method: Routing::SparseMixer { jitter: 0.1 } }, "must be [rows, experts]");
    let experts = |x: &str, chosen: &str, weights: &str, down: &str, form| {
        let [x, experts, weights, gate, up, down] = [x, chosen, weights, "three_d", "three_d", down].map(Into::into);
        OpKind::Experts { x, experts, weights, gate, up, down, activation: Activation::Silu, form, bias: None, held: None }
    };
    refuse(experts("wide", "chosen", "a", "down", ActivationForm::F32), "last dimension 12");
    refuse(experts("x", "chosen", "a", "three_d", ActivationForm::F32), "must have shape [4, 8, 5], found [4, 5, 8]");
    refuse(experts("x", "chosen", "x", "down", ActivationForm::F32), "must be [T, k]");
    refuse(experts("x", "chosen", "a", "down", ActivationForm::I8Block32), "needs an integer weight");
    let biased = |gate: &str, up: &str| {
        let mut op = experts("x", "chosen", "a", "down", ActivationForm::F32);
        let OpKind::Experts { bias, .. } = &mut op else { unreachable!("just made") };
        *bias = Some(ExpertBias { gate: gate.into(), up: up.into() });
        op
    };
    refuse(biased("expert_bias", "n8"), "weight `n8` must have shape [4, 5], found [8]");
    refuse(biased("expert_bias", "missing"), "names the weight `missing`, which is not declared");
    let held = |name: &str| {
        let mut op = experts("x", "chosen", "a", "down", ActivationForm::F32);
        let OpKind::Experts { held, .. } = &mut op else { unreachable!("just made") };
        *held = Some(name.into());
        op
    };
    refuse(held("a"), "`a` must be I32");
    refuse(held("chosen"), "`chosen` must be an input [experts], found [T, 2]");
    // A router that may choose an expert that does not exist.
    let routed = base().op("route", OpKind::Route { scores: "x".into(), method: Routing::SparseMixer { jitter: 0.1 } });
    let op = experts("x", "op.route.experts", "op.route.weights", "down", ActivationForm::F32);
    refuse_after(routed, op, "`op.route.experts` chooses among 8 rows, there are 4");
    let routed = base().op("route", OpKind::Route { scores: "x".into(), method: Routing::SparseMixer { jitter: 0.1 } });
    let op = OpKind::Interpolate { index: "op.route.experts".into(), factor: "op.route.weights".into(), table: "w".into() };
    refuse_after(routed, op, "chooses among 8 rows, there are 3");
}

#[test]
fn shapes() {
    refuse(OpKind::Concat { xs: vec![] }, "at least one");
    refuse(OpKind::Concat { xs: vec!["x".into(), "fixed".into()] }, "`fixed` [5, 8] does not fit [T, 8]");
    let slice = |axis, start, length| OpKind::Slice { x: "heads".into(), axis, start, length };
    for (axis, start, length) in [(0, 0, 1), (1, 1, 2), (2, 0, 0), (3, 0, 1), (1, usize::MAX, 2)] {
        refuse(slice(axis, start, length), "cannot take");
    }
    let reshape = |shape: Vec<Dim>| OpKind::Reshape { x: "x".into(), shape };
    refuse(reshape(vec![Dim::T, Dim::Fixed(9)]), "[T, 8] cannot become [T, 9]");
    refuse(reshape(vec![Dim::Ceil(Symbol::T, 2), Dim::Fixed(16)]), "cannot become");
    refuse(reshape(vec![Dim::T, Dim::L]), "cannot become");
    refuse(OpKind::Gather { x: "x".into(), rows: "chosen".into() }, "must have rank 1");
    refuse(OpKind::ScatterRows { x: "wide".into(), rows: "soft".into(), at: "at".into() }, "does not fit `wide` [T, 12]");
    refuse(OpKind::ScatterAddRows { x: "x".into(), rows: "soft".into(), at: "ids".into() }, "`soft` [R, 8] at `ids`");
    let conv = |x: &str, weight: &str, stride| OpKind::Conv2d { x: x.into(), weight: weight.into(), bias: None, stride };
    refuse(conv("heads", "even", 1), "must be square and odd");
    refuse(conv("heads", "odd", 0), "for stride 0");
    refuse(conv("quarter", "odd", 2), "for stride 2, found [T/4, 2, 4]");
    refuse(conv("x", "odd", 1), "rank 3");
    refuse(OpKind::Pool { x: "x".into(), size: 0 }, "cannot be pooled by 0");
    refuse(OpKind::Pool { x: "fixed".into(), size: 5 }, "cannot be pooled by 5");
    // Two symbols in one shape.
    let op = OpKind::Gather { x: "x".into(), rows: "at".into() };
    let both = base().input("t_by_r", DType::F32, &[Dim::T, Dim::R]).op("first", op);
    assert!(Checked::new(both.program).unwrap_err().to_string().contains("input `t_by_r` has two symbolic dimensions"));
}

fn relu(x: &str) -> OpKind {
    OpKind::Activate { x: x.into(), activation: Activation::Relu }
}

#[track_caller]
fn refuse_program(change: impl FnOnce(&mut Program), reason: &str) {
    let mut program = Bench::new().rows("x", &[8]).op("y", relu("x")).program;
    Checked::new(program.clone()).unwrap();
    change(&mut program);
    let text = Checked::new(program).unwrap_err().to_string();
    assert!(text.starts_with("program `bench`") && text.contains(reason), "`{text}` does not say `{reason}`");
}

#[test]
fn declarations() {
    refuse_program(|p| p.ops.clear(), "needs ops and outputs");
    refuse_program(|p| p.outputs.clear(), "needs ops and outputs");
    refuse_program(|p| p.inputs.push(p.inputs[0].clone()), "input `x` is declared twice");
    refuse_program(|p| p.outputs.push(p.outputs[0].clone()), "output `op.y` is declared twice");
    refuse_program(|p| p.outputs[0].value = "no".into(), "output `op.y` names the value `no`, which nothing makes");
    refuse_program(|p| p.stages[0].tap = Some("no".into()), "stage `op` names the value `no`");
    let rotate = |p: &mut Program, width: usize| {
        p.inputs[0].shape[1] = Dim::Fixed(width);
        p.stages[0] = Stage { name: "op".into(), tap: Some("x".into()), rotated: true, centred: false };
    };
    refuse_program(|p| rotate(p, 2 * 521), "stage `op` is rotated, but its tap has no rows that could be turned back");
    refuse_program(|p| p.stages[0].name = "o".into(), "stage `?`, op `op.y` (activate): lies under no stage");
    refuse_program(|p| p.ops.push(p.ops[0].clone()), "the value `op.y` is made twice");
    refuse_program(|p| p.ops[0].path = "op".into(), "which nothing makes");
    let weight = |shape: &[usize]| Weight { shape: shape.to_vec(), encoding: Encoding::F32 };
    refuse_program(|p| p.weights.extend([("w".into(), weight(&[8]))]), "weight `w` is used by no op");
    for shape in [&[][..], &[0, 4], &[usize::MAX, 2], &[1 << 30, 1 << 30]] {
        refuse_program(|p| p.weights.extend([("w".into(), weight(shape))]), "weight `w` has the impossible shape");
    }
    let kv = |kv_heads, window| Slot::Kv { kv_heads, head_dim: 4, window, dtype: KvType::F16 };
    refuse_program(|p| p.slots.extend([("s".into(), kv(1, None))]), "slot `s` is used by no op");
    refuse_program(|p| p.slots.extend([("s".into(), kv(0, None))]), "slot `s` has an impossible size");
    refuse_program(|p| p.slots.extend([("s".into(), kv(1, Some(0)))]), "slot `s` has an impossible size");
    refuse_program(|p| p.slots.extend([("s".into(), Slot::Fifo { rows: 1, channels: usize::MAX })]), "impossible size");
    refuse_program(|p| p.epochs = vec![5, 5], "epochs [5, 5] must rise");
    refuse_program(|p| p.inputs[0].shape.push(Dim::R), "input `x` has two symbolic dimensions");
    refuse_program(|p| p.inputs[0].shape = vec![Dim::Fixed(usize::MAX), Dim::Fixed(2)], "too large");
}

#[test]
fn rotary_tables() {
    let refuse = |blocks: &[(usize, usize)], streams: &[usize], frequencies: &[f32], variants: usize, reason: &str| {
        let variant = RotaryVariant { inv_freq: frequencies.to_vec(), amplitude: 1.0 };
        let rotary = Rotary { blocks: blocks.to_vec(), streams: streams.to_vec(), variants: vec![variant; variants] };
        refuse_program(|p| p.rotaries.extend([("r".into(), rotary)]), reason);
    };
    refuse(&[(0, 4)], &[], &[1.0; 2], 0, "rotary `r`: needs 1 or 1 variants, has 0");
    refuse(&[(0, 4)], &[], &[1.0; 2], 2, "needs 1 or 1 variants, has 2");
    refuse(&[(0, 3)], &[], &[1.0], 1, "even length");
    refuse(&[(0, 0)], &[], &[], 1, "even length");
    refuse(&[(0, 4), (2, 4)], &[], &[1.0; 4], 1, "rising and apart");
    refuse(&[(usize::MAX, 4)], &[], &[1.0; 2], 1, "rising and apart");
    refuse(&[(0, 4)], &[], &[1.0; 3], 1, "need 2 frequencies");
    refuse(&[(0, 4)], &[0], &[1.0; 2], 1, "name all 2 frequencies or none");
    refuse(&[(0, 4)], &[], &[1.0, f32::NAN], 1, "must be finite");
}

#[test]
fn stored_weights_must_be_the_declared_ones() {
    let program = base().program;
    let check = |name: &str, encoding, shape: &[usize]| check_weight(&program, name, encoding, shape).map_err(|e| e.to_string());
    assert_eq!(check("w", Encoding::F32, &[3, 8]), Ok(()));
    assert!(check("no", Encoding::F32, &[3, 8]).unwrap_err().contains("has no weight `no`"));
    assert!(check("w", Encoding::F16, &[3, 8]).unwrap_err().contains("must be f32, the stored one is f16"));
    assert!(check("w", Encoding::F32, &[8, 3]).unwrap_err().contains("must have shape [3, 8], the stored one has [8, 3]"));
}

#[test]
fn results_are_typed() {
    let conv = OpKind::Conv2d { x: "heads".into(), weight: "odd".into(), bias: None, stride: 2 };
    let bench = base().op("conv", conv);
    let route = OpKind::Route { scores: "x".into(), method: Routing::Softmax { top_k: 3, renormalise: true } };
    let mut program = bench.op("route", route).op("pool", OpKind::Pool { x: "heads".into(), size: 3 }).program;
    let used = |name: &Name| ["odd"].contains(&&**name);
    program.weights.retain(|name, _| used(name));
    program.slots.clear();
    let checked = Checked::new(program).unwrap();
    let shown = |value: &str| (checked.value_type(value).dtype, show_shape(&checked.value_type(value).shape));
    assert_eq!(shown("op.conv"), (DType::F32, "[ceil(T/2), 1, 1]".into()));
    assert_eq!(shown("op.route.experts"), (DType::I32, "[T, 3]".into()));
    assert_eq!(shown("op.route.weights"), (DType::F32, "[T, 3]".into()));
    assert_eq!(shown("op.pool"), (DType::F32, "[T/3, 2, 4]".into()));
    // Quotients of 2, 3 and (an input's) 4: segments start at multiples of all three.
    assert_eq!(checked.limits().segment_step, 12);
}
