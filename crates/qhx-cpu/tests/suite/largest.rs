//! Where only the largest number of an output is wanted, it is the one that the whole product has, in its place: for all encodings, forms and instruction sets, and
//! for rows that are meant to mislead.

use crate::decoder::random;
use qhx_cpu::{CpuDevice, CpuOptions, InstructionSet};
use qhx_ir::*;
use std::{collections::HashMap, sync::Arc};

/// `y = x · weightᵀ`, perhaps through a softcap.
fn head(weight: &WeightTensor, form: ActivationForm, cap: Option<f32>) -> Checked {
    let linear = OpKind::Linear { x: "x".into(), weight: "weight".into(), bias: None, activation: form, clip: None };
    let mut ops = vec![Op { path: "head.product".into(), op: linear }];
    ops.extend(cap.map(|cap| Op { path: "head.capped".into(), op: OpKind::Softcap { x: "head.product".into(), cap } }));
    let shape = vec![Dim::L, Dim::Fixed(weight.columns())];
    let program = Program {
        program_version: PROGRAM_VERSION,
        name: "head".into(),
        inputs: vec![Input { name: "x".into(), dtype: DType::F32, shape, generator: Generator::Carried }],
        outputs: vec![Output { name: "y".into(), value: ops[ops.len() - 1].path.clone() }],
        slots: Default::default(),
        epochs: vec![],
        rotaries: Default::default(),
        stages: vec![Stage { name: "head".into(), tap: None, rotated: false, centred: false }],
        weights: [("weight".into(), Weight { shape: weight.shape().to_vec(), encoding: weight.encoding() })].into(),
        ops,
    };
    Checked::new(program).unwrap()
}

/// A head with and without its shortlist.
struct Heads {
    executable: Box<dyn Executable>,
    name: String,
    /// Bytes of weights that calls for all numbers read, and those of them that calls for the largest did not.
    given: usize,
    spared: usize,
}

impl Heads {
    fn new(weight: &WeightTensor, form: ActivationForm, cap: Option<f32>, instructions: InstructionSet, threads: usize) -> Self {
        let seen: Vec<Vec<f32>> = (0..8).map(|seed| hidden(weight.columns(), seed)).collect();
        Self::that_has_seen(&seen, weight, form, cap, instructions, threads)
    }

    /// The first rows are only looked at: they decide which columns are kept apart.
    fn that_has_seen(
        seen: &[Vec<f32>],
        weight: &WeightTensor,
        form: ActivationForm,
        cap: Option<f32>,
        instructions: InstructionSet,
        threads: usize,
    ) -> Self {
        let device = CpuDevice::new(CpuOptions {
            threads: Some(threads),
            instructions: Some(instructions),
            shortlist_from: Some(0),
            ..Default::default()
        })
        .unwrap();
        let weights: Arc<dyn Weights> = Arc::new(HashMap::from([("weight".to_owned(), weight.clone())]));
        let executable = device.load(&head(weight, form, cap), &weights, &LoadOptions::default()).unwrap();
        let name = format!("{} of {:?}, {form:?}, {cap:?}, {instructions}", weight.encoding(), weight.shape());
        let mut heads = Self { executable, name, given: 0, spared: 0 };
        for row in seen {
            heads.run(row, Want::Largest);
        }
        heads
    }

    /// All logits of a row, or only the largest, with its place.
    fn run(&mut self, x: &[f32], want: Want<'_>) -> (Vec<f32>, RowResult) {
        let (inputs, wants, mut outputs) = ([InputData::F32(x)], [want], Outputs::new());
        let mut call = Call::new(Bindings { rows: 1, soft_rows: 0, wanted: 1 }, &inputs, &mut [], &mut outputs);
        call.wants = &wants;
        self.executable.run(&mut call).unwrap();
        (outputs.value("y").unwrap().to_vec(), outputs.rows()[0].clone())
    }

    /// Holds the shortlist's numbers to all.
    fn check(&mut self, x: &[f32], what: &str) {
        let (all, _) = self.run(x, Want::Logits);
        let whole = self.executable.weights_read().unwrap().bytes;
        let (_, found) = self.run(x, Want::Largest);
        let RowResult::Largest { id, value } = found else { panic!("{found:?}") };
        let (largest, bits, nan) = first_largest(&all);
        let same = if nan { value.is_nan() } else { (id as usize, value.to_bits()) == (largest, bits) };
        assert!(same, "{}, {what}: {found:?} is found, not {value} at {largest}", self.name);
        self.spared += whole.saturating_sub(self.executable.weights_read().unwrap().bytes) as usize;
        self.given += whole as usize;
    }
}

/// The place and the bits of the first of the largest numbers; whether any is none.
fn first_largest(numbers: &[f32]) -> (usize, u32, bool) {
    let best = (0..numbers.len()).fold(0, |best, i| if numbers[i] > numbers[best] { i } else { best });
    (best, numbers[best].to_bits(), numbers.iter().any(|x| x.is_nan()))
}

fn hidden(columns: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
    let mut uniform = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let mut row: Vec<f32> = (0..columns).map(|_| (0..6).map(|_| uniform()).sum::<f32>()).collect();
    // In models some columns hold far larger numbers than the others.
    for column in (0..columns).step_by(67).filter(|_| columns > 700) {
        row[column] *= 30.0;
    }
    row
}

fn forms(encoding: Encoding) -> &'static [ActivationForm] {
    use ActivationForm::{F16, F32, I8Block32, I8Row};
    if encoding.is_float() { &[F32, F16] } else { &[F32, I8Row, I8Block32] }
}

#[test]
fn every_encoding_form_and_instruction_set() {
    let mut noise = 0x1234_5678_9abc_def1;
    let mut seed = 0;
    for encoding in Encoding::all() {
        // Sketches of four and of five bits.
        let shapes = [(700, 33), (900, 800), (3001, 192), (300, 1500)];
        for &(rows, columns) in if crate::extended() { &shapes[..] } else { &shapes[..2] } {
            let weight = random(encoding, &[rows, columns], &mut noise);
            for &form in forms(encoding) {
                for instructions in InstructionSet::available() {
                    let mut heads = Heads::new(&weight, form, None, instructions, 2);
                    for _ in 0..5 {
                        seed += 1;
                        heads.check(&hidden(columns, seed), "a random row");
                    }
                    // Where numbers are spread evenly, a few hundred columns leave bounds that are tight enough for most rows.
                    let even = matches!(encoding, Encoding::F32 | Encoding::F16 | Encoding::I8Row | Encoding::I8_BLOCK32);
                    let spared = heads.spared as f64 / heads.given as f64;
                    assert!(spared > 0.2 || !even || !(192..=800).contains(&columns), "{}: {spared:.3} spared", heads.name);
                }
            }
        }
    }
}

#[test]
fn many_rows_and_close_decisions() {
    let mut noise = 0xfeed_5678_9abc_def1;
    let weight = random(Encoding::I8Row, &[4096, 256], &mut noise);
    let mut heads = Heads::new(&weight, ActivationForm::I8Row, None, *InstructionSet::available().last().unwrap(), 2);
    for seed in 0..3000 {
        heads.check(&hidden(256, 1000 + seed), "a random row");
    }
    assert!(heads.spared as f64 > 0.3 * heads.given as f64);
    // Rows that differ in one quant by one: which is larger is decided by a single unit. And rows that are equal: the first counts.
    let columns = 256;
    let base = hidden(columns, 7);
    let values: Vec<f32> =
        (0..512).flat_map(|row| base.iter().enumerate().map(move |(i, &x)| x + if i == row % 300 { 1e-6 } else { 0.0 })).collect();
    let weight = WeightTensor::from_f32(&[512, columns], &values).unwrap();
    for instructions in InstructionSet::available() {
        let mut heads = Heads::new(&weight, ActivationForm::F32, None, instructions, 3);
        for seed in 0..40 {
            heads.check(&hidden(columns, 500 + seed), "rows that are nearly equal");
        }
        heads.check(&base, "the row itself");
    }
}

#[test]
fn rows_that_mislead() {
    let mut noise = 0x0bad_5678_9abc_def1;
    for (encoding, form) in
        [(Encoding::I8Row, ActivationForm::I8Row), (Encoding::F16, ActivationForm::F32), (Encoding::F32, ActivationForm::F32)]
    {
        let weight = random(encoding, &[1500, 192], &mut noise);
        let mut rows: Vec<(String, Vec<f32>)> = [0.0, 1e-42, 1e-30, 1e-3, 1.0, 300.0, 1e5, 1e30, f32::INFINITY]
            .map(|scale| (format!("a row times {scale}"), hidden(192, 3).iter().map(|x| x * scale).collect()))
            .into();
        let (mut hole, mut single) = (hidden(192, 4), vec![0.0; 192]);
        (hole[17], single[100]) = (f32::NAN, -5.0);
        rows.extend([("a row with a hole".to_owned(), hole), ("a row with one number".to_owned(), single)]);
        for cap in [None, Some(30.0)] {
            for instructions in InstructionSet::available() {
                for (what, row) in &rows {
                    // Afresh each time: a row for which nothing can be spared makes the next ones go the plain way.
                    Heads::new(&weight, form, cap, instructions, 2).check(row, what);
                }
            }
        }
    }
    // Weights that no sketch can hold.
    let mut values: Vec<f32> = (0..64).flat_map(|row| hidden(192, 90 + row)).collect();
    (values[5 * 192 + 3], values[9 * 192], values[20 * 192 + 1]) = (f32::INFINITY, f32::NAN, 1e35);
    values[30 * 192..31 * 192].fill(0.0);
    values[31 * 192..32 * 192].iter_mut().for_each(|x| *x *= 1e-38);
    let weight = WeightTensor::from_f32(&[64, 192], &values).unwrap();
    for instructions in InstructionSet::available() {
        for seed in 0..8 {
            let mut heads = Heads::new(&weight, ActivationForm::F32, None, instructions, 1);
            heads.check(&hidden(192, 70 + seed), "weights beyond bounds");
        }
    }
}

/// Rows most of which the bytes of a query leave out: the winner is one that only they speak for.
#[test]
fn what_bytes_leave_out_counts() {
    let sign = |i: usize| {
        let mixed = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 63 == 0 { -1.0f32 } else { 1.0 }
    };
    for instructions in InstructionSet::available() {
        // One large number; all others are less than half a step of it.
        let (rows, columns, winner) = (200, 1500, 111);
        let mut values: Vec<f32> = (0..rows * columns).map(sign).collect();
        values[winner * columns] = -1.0;
        let mut x: Vec<f32> = values[winner * columns..][..columns].iter().map(|w| 0.5 * w).collect();
        x[0] = 254.0;
        let weight = WeightTensor::from_f32(&[rows, columns], &values).unwrap();
        let mut heads = Heads::new(&weight, ActivationForm::F32, None, instructions, 2);
        heads.check(&x, "a row with one large number");
        assert!(matches!(heads.run(&x, Want::Largest).1, RowResult::Largest { id, .. } if id as usize == winner));
        // The same among the columns that are kept apart.
        let (rows, columns, winner) = (40, 512, 23);
        let apart: Vec<usize> = (0..32).map(|i| 5 + 13 * i).collect();
        let mut values: Vec<f32> = (0..rows * columns).map(sign).collect();
        (0..rows).for_each(|row| values[row * columns + apart[0]] = if row == winner { 0.95 } else { 1.0 });
        let (mut seen, mut x) = (vec![0.01; columns], vec![0.0; columns]);
        for &column in &apart {
            seen[column] = 10.0;
            x[column] = 0.49 * values[winner * columns + column];
        }
        x[apart[0]] = 127.0;
        let weight = WeightTensor::from_f32(&[rows, columns], &values).unwrap();
        let mut heads = Heads::that_has_seen(&vec![seen; 8], &weight, ActivationForm::F32, None, instructions, 2);
        heads.check(&x, "a row with one large number among those kept apart");
        assert!(matches!(heads.run(&x, Want::Largest).1, RowResult::Largest { id, .. } if id as usize == winner));
    }
}
