//! Table look-ups, products with weights in every encoding and activation form, and mixtures of experts.

use crate::{
    Activation, ActivationForm, Clip, Encoding, ExpertBias, OpKind, Routing,
    conformance::{
        build::{Builder, Case, normal, wild},
        compare::tolerance,
        rng::Rng,
    },
};

/// Every encoding.
pub(super) const EMBED_FORMS: usize = 17;
/// Every pair of an encoding and an activation form that may meet.
pub(super) const LINEAR_FORMS: usize = 62;

/// Row lengths of weights: awkward ones, and those of real models.
const INPUTS: [usize; 18] = [1, 3, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 200, 576, 1000, 1536, 4100];

fn linear_form(number: usize) -> (Encoding, ActivationForm) {
    use ActivationForm::{F16, F32, I8Block32, I8Row};
    let forms = Encoding::all().into_iter().flat_map(|encoding| {
        let forms: &[_] = if encoding.is_float() { &[F32, F16] } else { &[F32, F16, I8Row, I8Block32] };
        forms.iter().map(move |&form| (encoding, form))
    });
    let forms: Vec<_> = forms.collect();
    assert_eq!((forms.len(), Encoding::all().len()), (LINEAR_FORMS, EMBED_FORMS), "the suite's counts follow the encodings");
    forms[number % forms.len()]
}

pub(super) fn embed(rng: Rng, number: usize) -> Case {
    let mut b = Builder::new(rng, "embed", tolerance::ARITHMETIC);
    let encoding = Encoding::all()[number % EMBED_FORMS];
    let (rows, width) = (b.rng.between(1, 300), b.rng.pick(&super::WIDTHS));
    let scale = b.rng.pick(&[1.0, 1.0, 0.25, 50.596]);
    b.note(format!("{encoding} [{rows}, {width}], scale {scale}"));
    let ids = b.index("ids", &[], rows);
    let table = b.weight("table", &[rows, width], encoding, 1.0);
    let y = b.op("op.embed", OpKind::Embed { ids, table, scale });
    b.finish(&y)
}

pub(super) fn interpolate(rng: Rng, number: usize) -> Case {
    let mut b = Builder::new(rng, "interpolate", tolerance::ARITHMETIC);
    let encoding = Encoding::all()[number % EMBED_FORMS];
    let (rows, width, taps) = (b.rng.between(1, 100), b.rng.pick(&super::WIDTHS), b.rng.pick(&[1, 4, 4, 5]));
    b.note(format!("{encoding} [{rows}, {width}], {taps} taps"));
    let index = b.index("index", &[taps], rows);
    let factor = b.rows("factor", &[taps], normal);
    let table = b.weight("table", &[rows, width], encoding, 1.0);
    let y = b.op("op.interpolate", OpKind::Interpolate { index, factor, table });
    b.finish(&y)
}

pub(super) fn linear(rng: Rng, number: usize) -> Case {
    let mut b = Builder::new(rng, "linear", tolerance::SUM);
    let (encoding, activation) = linear_form(number);
    let inputs = b.rng.pick(&INPUTS);
    let outputs = b.rng.pick(&super::WIDTHS);
    // Only few long rows: the reference is slow.
    b.case.rows.most = (400_000 / (inputs * outputs)).clamp(3, 140);
    let middle = if b.rng.one_in(5) { Some(b.rng.between(1, 3)) } else { None };
    b.note(format!("{encoding} [{outputs}, {inputs}], activation {activation:?}, heads {middle:?}"));
    let tail: Vec<usize> = middle.into_iter().chain([inputs]).collect();
    let x = b.rows("x", &tail, wild);
    let weight = b.weight("weight", &[outputs, inputs], encoding, 1.0 / (inputs as f32).sqrt());
    let bias = b.rng.one_in(2).then(|| b.plain("bias", &[outputs], 1.0));
    let clip = b.rng.one_in(5).then(|| Clip { input: [-0.9, 1.1], output: [-0.5, f32::INFINITY] });
    b.note(format!("bias {}, clip {}", bias.is_some(), clip.is_some()));
    let y = b.op("op.linear", OpKind::Linear { x, weight, bias, activation, clip });
    if b.rng.one_in(6) {
        // The same on the wanted rows only, as heads are computed.
        b.note("on wanted rows");
        let rows = b.wanted();
        let OpKind::Linear { x, weight, bias, .. } = b.case.program.ops[0].op.clone() else { unreachable!("just made") };
        let x = b.op("op.gather", OpKind::Gather { x, rows });
        let head = b.op("op.head", OpKind::Linear { x, weight, bias, activation, clip });
        b.output("head", &head);
    }
    b.finish(&y)
}

pub(super) fn experts(rng: Rng, number: usize) -> Case {
    let mut b = Builder::new(rng, "experts", tolerance::CHAIN);
    let (encoding, form) = linear_form(number);
    let (experts, k) = (b.rng.between(1, 9), b.rng.between(1, 4));
    let k = k.min(experts);
    let (hidden, ffn) = (b.rng.pick(&[1, 16, 33, 64, 96, 100]), b.rng.pick(&[1, 8, 31, 32, 64, 72]));
    b.case.rows.most = if hidden * ffn > 2000 { 12 } else { 50 };
    let activation = b.rng.pick(&[Activation::Silu, Activation::GeluTanh, Activation::GeluErf]);
    b.note(format!("{k} of {experts} experts {hidden} x {ffn}, {encoding}, form {form:?}, {activation:?}"));
    // The inner rows are rounded after arithmetic that may differ a little.
    b.case.flips = (form != ActivationForm::F32).then_some(tolerance::FLIP);
    let x = b.rows("x", &[hidden], wild);
    // Some of them may be elsewhere.
    let there = if b.rng.one_in(3) { b.rng.between(1, experts) } else { experts };
    let held = (b.rng.one_in(3) || there < experts).then(|| b.held("held", experts, there));
    let chosen = b.choice("experts", k, experts);
    let weights = b.rows("weights", &[k], normal);
    let experts = there;
    let y = add_experts(&mut b, "op.experts", [&x, &chosen, &weights], [experts, hidden, ffn], encoding, activation, form);
    // A row of one number may be what is left of large ones, which is less than f16 can tell.
    if hidden > 1 && b.rng.one_in(2) {
        b.note("with biases");
        let [gate, up] = ["gate", "up"].map(|name| b.plain(&format!("op.experts.{name}_bias"), &[experts, ffn], 1.0));
        if let Some(OpKind::Experts { bias, .. }) = b.case.program.ops.last_mut().map(|op| &mut op.op) {
            *bias = Some(ExpertBias { gate, up });
        }
    }
    if let Some(name) = held {
        b.note(format!("{there} of them there"));
        if let Some(OpKind::Experts { held, .. }) = b.case.program.ops.last_mut().map(|op| &mut op.op) {
            *held = Some(name);
        }
    }
    b.finish(&y)
}

pub(in crate::conformance) fn add_experts(
    b: &mut Builder,
    path: &str,
    [x, chosen, weights]: [&crate::Name; 3],
    [experts, hidden, ffn]: [usize; 3],
    encoding: Encoding,
    activation: Activation,
    form: ActivationForm,
) -> crate::Name {
    let [wide, deep] = [hidden, ffn].map(|n| 1.0 / (n as f32).sqrt());
    let gate = b.weight(&format!("{path}.gate"), &[experts, ffn, hidden], encoding, wide);
    let up = b.weight(&format!("{path}.up"), &[experts, ffn, hidden], encoding, wide);
    let down = b.weight(&format!("{path}.down"), &[experts, hidden, ffn], encoding, deep);
    let (x, experts, weights) = (x.clone(), chosen.clone(), weights.clone());
    b.op(path, OpKind::Experts { x, experts, weights, gate, up, down, activation, form, bias: None, held: None })
}

/// Which experts were chosen shows in what they compute.
fn routed(mut b: Builder, experts: usize, scores: fn(&mut Rng, &mut [f32]), method: Routing) -> Case {
    let hidden = b.rng.pick(&[4, 8, 17]);
    let scores = b.rows("scores", &[experts], scores);
    let x = b.rows("x", &[hidden], normal);
    b.op("op.route", OpKind::Route { scores, method });
    let [chosen, weights] = ["op.route.experts".into(), "op.route.weights".into()];
    b.output("weights", &weights);
    let sizes = [experts, hidden, 8];
    let y = add_experts(&mut b, "op.mix", [&x, &chosen, &weights], sizes, Encoding::F32, Activation::Silu, ActivationForm::F32);
    b.finish(&y)
}

pub(super) fn route(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "route", tolerance::CHAIN);
    let experts = b.rng.pick(&[1, 2, 5, 8, 16, 60, 128]);
    let top_k = b.rng.between(1, experts.min(8));
    let renormalise = b.rng.one_in(2);
    b.note(format!("softmax, {top_k} of {experts}, renormalise {renormalise}"));
    routed(b, experts, tied_scores, Routing::Softmax { top_k, renormalise })
}

/// Scores among which some are equal: the lowest index wins.
fn tied_scores(rng: &mut Rng, row: &mut [f32]) {
    row.iter_mut().for_each(|x| *x = rng.normal() * 3.0);
    if rng.one_in(3) {
        row.iter_mut().for_each(|x| *x = x.round());
    }
}

pub(super) fn sparse_mixer(rng: Rng, _: usize) -> Case {
    let mut b = Builder::new(rng, "sparse_mixer", tolerance::CHAIN);
    let experts = b.rng.pick(&[2, 3, 8, 16]);
    let jitter = b.rng.pick(&[0.01, 0.01, 0.1]);
    b.note(format!("{experts} experts, jitter {jitter}"));
    routed(b, experts, banded_scores, Routing::SparseMixer { jitter })
}

/// Scores that lie in and around the band of the winner, of either sign; sometimes exactly equal, sometimes all zero.
fn banded_scores(rng: &mut Rng, row: &mut [f32]) {
    let centre = rng.pick(&[1.0, 5.0, -1.0, -4.0, 0.0, 0.0]);
    let spread = rng.pick(&[0.0, 0.02, 0.05, 0.5]);
    row.iter_mut().for_each(|x| *x = centre + spread * rng.normal());
    match rng.below(4) {
        0 => row.iter_mut().for_each(|x| *x += rng.normal()),
        1 => {
            let first = row[0];
            row.iter_mut().step_by(rng.between(1, 3)).for_each(|x| *x = first);
        }
        2 if centre == 0.0 => row.iter_mut().for_each(|x| *x = x.min(0.0)),
        _ => {}
    }
}
