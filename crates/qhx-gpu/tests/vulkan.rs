//! The conformance suite on the GPU that Vulkan offers: in CI, Mesa's software Vulkan with the validation layer. Run by `cargo xtask test gpu`.

use qhx_gpu::{Features, GpuDevice, GpuOptions, Injected};
use qhx_ir::{
    Activation, ActivationForm, AlignedBytes, Bindings, Call, Checked, DType, Device, DeviceError, Dim, Encoding, Executable, Generator,
    Input, InputData, LoadOptions, Op, OpKind, Output, Outputs, PROGRAM_VERSION, Pause, Paused, Phase, Program, Segment, Stage, Ticket,
    Timeline, Weight, WeightTensor, Weights, conformance, reference::ReferenceDevice,
};
use std::{collections::HashMap, sync::Arc};

fn options() -> GpuOptions {
    GpuOptions { validate: std::env::var_os("QHX_GPU_NO_VALIDATION").is_none(), ..Default::default() }
}

/// By default each third: software Vulkan compiles shaders slowly. All of them with `cargo xtask test --extended gpu`.
fn some<T>(all: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    all.into_iter().step_by(if std::env::var_os("QHX_EXTENDED").is_some() { 1 } else { 3 })
}

fn conforms(options: GpuOptions, suite: &conformance::Options) {
    let device = GpuDevice::new(options);
    println!("{:?}", device.open().unwrap().describe());
    let summary = conformance::run(&device, suite, &mut |case| {
        if matches!(case.outcome, conformance::Outcome::Failed(_)) {
            println!("{case}");
        }
    });
    println!("{summary}");
    let messages = device.machine().unwrap().messages();
    assert!(messages.is_empty(), "the validation layer says: {messages:#?}");
    assert!(summary.failed.is_empty(), "{} cases failed", summary.failed.len());
}

#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn agrees_with_the_reference() {
    let suite = conformance::Options { strict: true, ..conformance::Options::from_environment() };
    conforms(options(), &suite);
}

/// Products, experts and attention by small matrices, in calls of any number of rows. Run apart, for it takes a newer Mesa.
#[test]
#[ignore = "needs Vulkan with cooperative matrices: cargo xtask test gpu"]
fn cooperative_matrices_agree_with_the_reference() {
    let options = GpuOptions { features: Features { matrix_rows: 1, few_rows: [1, 0], ..Default::default() }, ..options() };
    let features = format!("{:?}", GpuDevice::new(options.clone()).open().unwrap().describe().facts["features"]);
    assert!(features.contains("cooperative matrices"), "{features}");
    // A weight of each kind with each form of rows that is multiplied so.
    let products = [2, 3, 7, 8, 9, 12, 13, 21, 28, 37, 43, 45, 53, 59, 61].map(|number| format!("linear/{number}"));
    let experts = [3, 8, 45].map(|number| format!("experts/{number}"));
    let attention = (0..6).map(|number| format!("attend/{number}"));
    let others = ["attend_shared/0", "attend_shared/1", "attend_long/0", "model.mixture/0", "model.decoder/3"].map(str::to_owned);
    for name in some(products).chain(some(experts)).chain(some(attention)).chain(some(others)) {
        let suite = conformance::Options { cases: 8, strict: true, only: Some(name), ..Default::default() };
        conforms(options.clone(), &suite);
    }
}

/// The tiles of calls with few rows, in calls of any number of them.
#[test]
#[ignore = "needs Vulkan with cooperative matrices: cargo xtask test gpu"]
fn cooperative_matrices_of_few_rows_agree_with_the_reference() {
    let options = GpuOptions { features: Features { few_rows: [1, usize::MAX], ..Default::default() }, ..options() };
    let products = [2, 3, 7, 8, 9, 12, 13, 21, 28, 37, 43, 45, 53, 59, 61].map(|number| format!("linear/{number}"));
    let experts = [3, 8, 45].map(|number| format!("experts/{number}"));
    let models = ["model.mixture/0", "model.decoder/3"].map(str::to_owned);
    for name in some(products).chain(some(experts)).chain(some(models)) {
        let suite = conformance::Options { cases: 8, strict: true, only: Some(name), ..Default::default() };
        conforms(options.clone(), &suite);
    }
}

/// Steps of one row as lists of instructions: software takes them only here.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn agrees_with_the_reference_by_instructions() {
    for name in ["model.decoder", "model.hybrid", "model.mixture"] {
        let suite = conformance::Options { cases: 1, strict: true, only: Some(name.into()), ..Default::default() };
        conforms(GpuOptions { features: Features { streams: Some(true), ..Default::default() }, ..options() }, &suite);
    }
}

/// Holds a GPU without steps in one dispatch, which promises one of these numbers of rows, to its promise: a row alone, in company, and with drafts.
fn keeps_its_promise(features: Features, rows: &[usize], names: impl IntoIterator<Item = String>) {
    let device = GpuDevice::new(GpuOptions { features: Features { streams: Some(false), ..features }, ..options() });
    let promised = load(&device, None).unwrap().invariant_rows();
    assert!(rows.contains(&promised), "{promised} rows are promised, not {rows:?}");
    for name in names {
        let suite = conformance::Options { strict: true, cases: 1, only: Some(name.clone()), ..conformance::Options::default() };
        let summary = conformance::same_bits_in_company(&device, &suite, &mut |_| {});
        assert!(summary.failed.is_empty() && !summary.passed.is_empty(), "{name}: {summary}");
    }
    let messages = device.machine().unwrap().messages();
    assert!(messages.is_empty(), "the validation layer says: {messages:#?}");
}

/// A weight of each kind with each form of rows, and all that mixes rows.
fn company() -> impl Iterator<Item = String> {
    let products = [1, 2, 3, 7, 8, 9, 12, 13, 20, 21, 28, 37, 43, 45, 53, 59, 60, 61].map(|number| format!("linear/{number}"));
    let experts = [3, 8, 14, 45].map(|number| format!("experts/{number}"));
    let others = [
        "attend",
        "attend_long",
        "attend_shared",
        "attend_free",
        "gated_delta",
        "short_conv",
        "model.decoder/3",
        "model.hybrid/0",
        "model.mixture/0",
    ];
    some(products).chain(some(experts)).chain(others.map(str::to_owned))
}

#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn rows_are_the_same_in_company() {
    keeps_its_promise(Features { cooperative_matrix: false, ..Default::default() }, &[48], company());
    // Steps of one row in one dispatch add up in an order of their own.
    let streams = GpuDevice::new(GpuOptions { features: Features { streams: Some(true), ..Default::default() }, ..options() });
    assert_eq!(load(&streams, None).unwrap().invariant_rows(), 0);
}

/// Small matrices, which are faster, are left out of calls with drafts.
#[test]
#[ignore = "needs Vulkan with cooperative matrices: cargo xtask test gpu"]
fn cooperative_matrices_are_left_out_for_drafts() {
    let some = ["linear/3", "linear/8", "linear/45"];
    // A driver that crashed is started again without them, and then promises more.
    keeps_its_promise(Features::default(), &[2, 48], some.map(str::to_owned));
}

/// The ways that devices with fewer features take. Software Vulkan compiles shaders slowly, so that only some cases of each kind are run.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn agrees_with_the_reference_without_features() {
    let without = |features: Features, names: &[&str]| {
        for name in some(names) {
            let suite = conformance::Options { cases: 4, strict: true, only: Some((*name).into()), ..Default::default() };
            conforms(GpuOptions { features, ..options() }, &suite);
        }
    };
    let products = ["linear/1", "linear/9", "linear/20", "linear/45", "linear/60", "experts/8", "experts/14", "model.mixture"];
    without(Features { integer_dot: false, cooperative_matrix: false, ..Default::default() }, &products);
    let others = ["rms_norm", "layer_norm", "attend/0", "attend/1", "attend/2", "gated_delta/0", "gated_delta/1", "model.decoder/3"];
    let plain =
        Features { subgroups: false, host_memory: false, max_buffer: Some(4 << 20), shared_memory: Some(16 << 10), ..Default::default() };
    without(plain, &[&products[..], &others].concat());
}

/// Numbers of a row, and of what an expert makes of it: large enough that copies take a while.
const WIDTH: usize = 256;
const SLOTS: usize = 4;
const ROWS: usize = 32;

/// Experts that rows are given to by the caller.
fn experts() -> Checked {
    let input = |name: &str, dtype, width: usize| Input {
        name: name.into(),
        dtype,
        shape: vec![Dim::T, width.into()],
        generator: Generator::Carried,
    };
    let weight = || Weight { encoding: Encoding::F32, shape: vec![SLOTS, WIDTH, WIDTH] };
    let op = OpKind::Experts {
        x: "x".into(),
        experts: "experts".into(),
        weights: "factors".into(),
        gate: "gate".into(),
        up: "up".into(),
        down: "down".into(),
        activation: Activation::Silu,
        form: ActivationForm::F32,
        bias: None,
        held: None,
    };
    let program = Program {
        program_version: PROGRAM_VERSION,
        name: "experts".into(),
        inputs: vec![input("x", DType::F32, WIDTH), input("experts", DType::I32, 1), input("factors", DType::F32, 1)],
        outputs: vec![Output { name: "sum".into(), value: "experts.sum".into() }],
        slots: Default::default(),
        epochs: Vec::new(),
        rotaries: Default::default(),
        stages: vec![Stage { name: "experts".into(), tap: None, rotated: false, centred: false }],
        weights: WEIGHTS.map(|name| (name.into(), weight())).into(),
        ops: vec![Op { path: "experts.sum".into(), op }],
    };
    Checked::new(program).unwrap()
}

const WEIGHTS: [&str; 3] = ["gate", "up", "down"];

/// One of the weights of an expert, by its number: all differ.
fn part(expert: usize, which: usize) -> WeightTensor {
    let number = |place: usize| ((place * (2 * expert + 3) + 7 * which) % 31) as f32 / 256.0 - 0.06;
    WeightTensor::from_f32(&[WIDTH, WIDTH], &(0..WIDTH * WIDTH).map(number).collect::<Vec<_>>()).unwrap()
}

fn load(device: &dyn Device, timeline: Option<Timeline>) -> Result<Box<dyn Executable>, DeviceError> {
    let stack = |which| WeightTensor::stacked(&(0..SLOTS).map(|slot| part(slot, which)).collect::<Vec<_>>()).unwrap();
    let weights: HashMap<String, WeightTensor> = (0..3).map(|which| (WEIGHTS[which].to_owned(), stack(which))).collect();
    let weights: Arc<dyn Weights> = Arc::new(weights);
    device.load(
        &experts(),
        &weights,
        &LoadOptions { max_rows: ROWS, replaceable: WEIGHTS.map(Into::into).to_vec(), timeline, ..Default::default() },
    )
}

/// Rows, each for one of some slots.
struct Rows {
    x: Vec<f32>,
    slots: Vec<i32>,
    factors: Vec<f32>,
    outputs: Outputs,
}

impl Rows {
    fn new(slots: &[usize], round: usize) -> Self {
        let number = |place: usize| ((place * 13 + round) % 17) as f32 / 8.0 - 1.0;
        Self {
            x: (0..ROWS * WIDTH).map(number).collect(),
            slots: (0..ROWS).map(|row| slots[row % slots.len()] as i32).collect(),
            factors: vec![0.5; ROWS],
            outputs: Outputs::new(),
        }
    }

    fn call<R>(&mut self, run: impl FnOnce(&mut Call<'_>) -> R) -> R {
        let inputs = [InputData::F32(&self.x), InputData::I32(&self.slots), InputData::F32(&self.factors)];
        let bindings = Bindings { rows: ROWS, soft_rows: 0, wanted: 0 };
        run(&mut Call::new(bindings, &inputs, &mut [Segment::new(None, 0, ROWS)], &mut self.outputs))
    }

    fn submit(&mut self, executable: &mut dyn Executable) -> Result<Ticket, DeviceError> {
        self.call(|call| executable.submit(call))
    }

    fn wait(&mut self, executable: &mut dyn Executable, ticket: Ticket) -> Result<Vec<f32>, DeviceError> {
        self.call(|call| executable.wait(ticket, call))?;
        Ok(self.outputs.value("sum").unwrap().to_vec())
    }
}

/// Experts take the place of others while a call is under way, also of those that it reads; calls see each at once and whole, whether or not copies have a queue of their own.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn weights_are_replaced_while_it_computes() {
    for transfer_queue in [true, false] {
        let device = GpuDevice::new(GpuOptions { features: Features { transfer_queue, ..Default::default() }, ..options() });
        let mut gpu = load(&device, Some(Timeline::default())).unwrap();
        let mut reference = load(&ReferenceDevice, None).unwrap();
        let (mut transfers, mut expert) = (Vec::new(), SLOTS);
        for round in 0..24 {
            let slots = [round % SLOTS, (round + 1) % SLOTS];
            let mut rows = Rows::new(&slots, round);
            let ticket = rows.submit(&mut *gpu).unwrap();
            let expected = {
                let mut rows = Rows::new(&slots, round);
                let ticket = rows.submit(&mut *reference).unwrap();
                rows.wait(&mut *reference, ticket).unwrap()
            };
            // One that the call reads, one that the next reads, and the same once more.
            for slot in [round % SLOTS, (round + 2) % SLOTS, (round + 2) % SLOTS] {
                for (which, name) in WEIGHTS.into_iter().enumerate() {
                    gpu.replace_part(name, slot, &part(expert, which)).unwrap();
                    reference.replace_part(name, slot, &part(expert, which)).unwrap();
                }
                expert += 1;
            }
            let found = rows.wait(&mut *gpu, ticket).unwrap();
            let largest = expected.iter().fold(0.0f32, |most, number| most.max(number.abs()));
            let differs = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(largest > 0.0 && differs <= 1e-4 * largest, "round {round}: differs by {differs} of {largest}");
            transfers.extend(gpu.take_transfers().unwrap());
        }
        let unfit = WeightTensor::from_f32(&[WIDTH, 1], &[0.0; WIDTH]).unwrap();
        for (weight, slot, part) in [("gate", 0, unfit), ("gate", SLOTS, part(0, 0)), ("gates", 0, part(0, 0))] {
            let error = gpu.replace_part(weight, slot, &part).unwrap_err();
            assert!(matches!(&error, DeviceError::Weight { name, .. } if **name == *weight), "{error}");
        }
        // One after the other, each with its bytes.
        assert!(transfers.len() > 100, "{} transfers", transfers.len());
        assert!(transfers.iter().all(|transfer| transfer.began <= transfer.ended && transfer.bytes == (4 * WIDTH * WIDTH) as u64));
        assert!(transfers.windows(2).all(|pair| pair[0].ended <= pair[1].began), "{transfers:?}");
        let messages = device.machine().unwrap().messages();
        assert!(messages.is_empty(), "the validation layer says: {messages:#?}");
    }
}

/// A transfer that fails behind the caller's back is an error of a later call, never a call with old weights.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn a_failed_transfer_is_told() {
    for first in 2..8 {
        let device = GpuDevice::new(GpuOptions { fault: Some((Injected::Loss, first)), ..options() });
        let mut gpu = load(&device, None).unwrap();
        let step = |gpu: &mut dyn Executable, round: usize| -> Result<(), DeviceError> {
            for (which, name) in WEIGHTS.into_iter().enumerate() {
                gpu.replace_part(name, round % SLOTS, &part(SLOTS + round, which))?;
            }
            let mut rows = Rows::new(&[round % SLOTS], round);
            let ticket = rows.submit(gpu)?;
            rows.wait(gpu, ticket).map(drop)
        };
        let error = (0..4).map(|round| step(&mut *gpu, round)).find_map(Result::err);
        assert!(matches!(error, Some(DeviceError::Lost { .. })), "{first}: {error:?}");
        assert!(step(&mut *gpu, 0).is_err());
    }
}

/// Three pauses: one that waits for what the host makes of a sum, one that only shows a sum and lets the host change an input, and one for which it makes something meanwhile.
const PAUSES: &str = r#"{
  "program_version": 1,
  "name": "pauses",
  "inputs": [
    {"name": "x", "dtype": "f32", "shape": ["T", 96], "generator": "carried"},
    {"name": "doubled", "dtype": "f32", "shape": ["T", 96], "generator": "carried"},
    {"name": "row", "dtype": "i32", "shape": ["T"], "generator": "carried"},
    {"name": "meanwhile", "dtype": "f32", "shape": ["T", 96], "generator": "carried"},
    {"name": "changed", "dtype": "f32", "shape": ["T", 96], "generator": "carried"}
  ],
  "outputs": [{"name": "sum", "value": "pauses.sum"}],
  "stages": [{"name": "pauses"}],
  "weights": {},
  "ops": [
    {"path": "pauses.act", "op": {"activate": {"x": "x", "activation": "silu"}}},
    {"path": "pauses.more", "op": {"add": {"a": "pauses.act", "b": "doubled"}}},
    {"path": "pauses.moved", "op": {"gather": {"x": "pauses.more", "rows": "row"}}},
    {"path": "pauses.twice", "op": {"add": {"a": "pauses.moved", "b": "changed"}}},
    {"path": "pauses.sum", "op": {"mul": {"a": "pauses.twice", "b": "meanwhile"}}}
  ]
}"#;

fn pauses() -> Vec<Pause> {
    let names = |names: &[&str]| names.iter().map(|&name| name.into()).collect();
    vec![
        Pause { before: 1, gives: names(&["pauses.act"]), takes: names(&["doubled", "row"]), changes: Vec::new() },
        Pause { before: 3, gives: names(&["pauses.more"]), takes: Vec::new(), changes: names(&["changed"]) },
        Pause { before: 4, gives: Vec::new(), takes: names(&["meanwhile"]), changes: Vec::new() },
    ]
}

/// A call with pauses, of which the host answers so many.
fn paused(executable: &mut dyn Executable, rows: usize, phase: Phase, answers: usize) -> Result<Vec<f32>, DeviceError> {
    let width = 96;
    let x: Vec<f32> = (0..rows * width).map(|place| (place % 23) as f32 / 8.0 - 1.0).collect();
    let (unknown, no_row) = (vec![0.0; rows * width], vec![0; rows]);
    let inputs = [InputData::F32(&x), InputData::F32(&unknown), InputData::I32(&no_row), InputData::F32(&unknown), InputData::F32(&x)];
    let mut host = |paused: &mut Paused<'_>| {
        if paused.number >= answers {
            return Err(DeviceError::Call("no answer".into()));
        }
        if paused.number == 2 {
            assert!(paused.given.is_empty());
            (paused.take)(0, InputData::F32(&x.iter().map(|x| x + 0.5).collect::<Vec<_>>()));
            return Ok(());
        }
        let [given] = paused.given else { panic!("one value is given") };
        if paused.number == 1 {
            // Only a device that stops there can take it.
            if phase == Phase::Prefill {
                assert!(paused.replace.is_some());
                (paused.take)(0, InputData::F32(&given.iter().map(|x| 3.0 * x).collect::<Vec<_>>()));
            }
            return Ok(());
        }
        (paused.take)(0, InputData::F32(&given.iter().map(|x| 2.0 * x).collect::<Vec<_>>()));
        (paused.take)(1, InputData::I32(&(0..rows).map(|row| (rows - 1 - row) as i32).collect::<Vec<_>>()));
        Ok(())
    };
    let (mut outputs, mut segments) = (Outputs::new(), [Segment::new(None, 0, rows)]);
    let mut call = Call::new(Bindings { rows, soft_rows: 0, wanted: 0 }, &inputs, &mut segments, &mut outputs);
    call.phase = phase;
    call.host = Some(&mut host);
    executable.run(&mut call)?;
    Ok(outputs.value("sum").unwrap().to_vec())
}

/// What the host makes in pauses of a call is what the rest of it reads, in one submission and in several; a host that fails ends the call, and nothing but the call.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn calls_pause_for_the_host() {
    let program = Checked::new(Program::from_json(PAUSES).unwrap()).unwrap();
    let weights: Arc<dyn Weights> = Arc::new(HashMap::new());
    let load_options = LoadOptions { max_rows: 9, pauses: pauses(), ..Default::default() };
    let device = GpuDevice::new(options());
    let mut gpu = device.load(&program, &weights, &load_options).unwrap();
    let mut reference = ReferenceDevice.load(&program, &weights, &load_options).unwrap();
    for round in 0..6 {
        for (rows, phase) in [(1, Phase::Decode), (5, Phase::Decode), (9, Phase::Prefill), (2, Phase::Prefill)] {
            for answers in [3, round % 3] {
                let found = paused(&mut *gpu, rows, phase, answers);
                match (paused(&mut *reference, rows, phase, answers), found) {
                    (Ok(expected), Ok(found)) => {
                        let differs = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                        assert!(found.len() == expected.len() && differs < 1e-5, "{rows} rows, {phase:?}: differs by {differs}");
                    }
                    (Err(expected), Err(found)) => assert_eq!(expected.to_string(), found.to_string()),
                    (expected, found) => panic!("{expected:?} is not {found:?}"),
                }
            }
        }
    }
    // A call that is begun and left alone does not keep the next one waiting.
    let (x, rows) = (vec![0.0; 96], vec![0]);
    let inputs = [InputData::F32(&x), InputData::F32(&x), InputData::I32(&rows), InputData::F32(&x), InputData::F32(&x)];
    let mut outputs = Outputs::new();
    let mut segments = [Segment::new(None, 0, 1)];
    let mut call = Call::new(Bindings { rows: 1, soft_rows: 0, wanted: 0 }, &inputs, &mut segments, &mut outputs);
    call.phase = Phase::Decode;
    let _ = gpu.submit(&mut call).unwrap();
    assert!(paused(&mut *gpu, 5, Phase::Decode, 3).is_ok());
    // Nobody is there to answer.
    let error = gpu.run(&mut call).unwrap_err().to_string();
    assert!(error.contains("nobody answers"), "{error}");
    assert!(paused(&mut *gpu, 1, Phase::Decode, 3).is_ok());
    let messages = device.machine().unwrap().messages();
    assert!(messages.is_empty(), "the validation layer says: {messages:#?}");
}

/// Two query heads that share a key head, and a product that takes both as int8 with a scale for each 32: attention stores them so.
const HEADS: &str = r#"{
  "program_version": 1,
  "name": "heads",
  "inputs": [
    {"name": "q", "dtype": "f32", "shape": ["T", 2, 32], "generator": "carried"},
    {"name": "k", "dtype": "f32", "shape": ["T", 1, 32], "generator": "carried"},
    {"name": "v", "dtype": "f32", "shape": ["T", 1, 32], "generator": "carried"}
  ],
  "outputs": [{"name": "sum", "value": "heads.sum"}],
  "slots": {"kv": {"kv": {"kv_heads": 1, "head_dim": 32, "dtype": "f16"}}},
  "stages": [{"name": "heads"}],
  "weights": {"weight": {"shape": [24, 64], "encoding": "i8_row"}},
  "ops": [
    {"path": "heads.attend", "op": {"attend": {"q": "q", "kv": {"k": "k", "v": "v"}, "slot": "kv", "mask": "causal", "scale": 0.25}}},
    {"path": "heads.flat", "op": {"reshape": {"x": "heads.attend", "shape": ["T", 64]}}},
    {"path": "heads.sum", "op": {"linear": {"x": "heads.flat", "weight": "weight", "activation": "i8_block32"}}}
  ]
}"#;

/// Attention stores its heads as products take them: of many rows at once, and where keys are split among workgroups.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn heads_are_stored_as_products_take_them() {
    let program = Checked::new(Program::from_json(HEADS).unwrap()).unwrap();
    let (mut data, mut scales) = (AlignedBytes::zeroed(24 * 64), AlignedBytes::zeroed(24 * 4));
    data.as_mut().iter_mut().enumerate().for_each(|(n, byte)| *byte = (n * n * 7 % 251) as u8);
    scales.as_mut().chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&0.01f32.to_le_bytes()));
    let weight = WeightTensor::new(Encoding::I8Row, vec![24, 64], data.into(), Some(scales.into()), None).unwrap();
    let weights: Arc<dyn Weights> = Arc::new(HashMap::from([("weight".to_owned(), weight)]));
    let device = GpuDevice::new(options());
    let run = |device: &dyn Device| -> Vec<Vec<f32>> {
        let mut executable = device.load(&program, &weights, &LoadOptions { max_rows: 200, ..Default::default() }).unwrap();
        let mut state = executable.new_state(400).unwrap();
        // The second call has few rows that see many keys.
        let calls = [200, 5].map(|rows: usize| {
            let numbers = |width: usize, by: usize| (0..rows * width).map(|n| (n * n * by % 997) as f32 / 300.0 - 1.5).collect::<Vec<_>>();
            let [q, k, v] = [numbers(64, 3), numbers(32, 5), numbers(32, 11)];
            let inputs = [InputData::F32(&q), InputData::F32(&k), InputData::F32(&v)];
            let (bindings, mut outputs) = (Bindings { rows, soft_rows: 0, wanted: 0 }, Outputs::new());
            let mut segments = [Segment::new(Some(&mut *state), 0, rows)];
            executable.run(&mut Call::new(bindings, &inputs, &mut segments, &mut outputs)).unwrap();
            state.commit(rows).unwrap();
            outputs.value("sum").unwrap().to_vec()
        });
        calls.to_vec()
    };
    for (found, expected) in run(&device).iter().zip(run(&ReferenceDevice)) {
        let largest = expected.iter().fold(0.0f32, |most, number| most.max(number.abs()));
        let differs = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // A number between two integers may become either.
        assert!(largest > 0.1 && differs <= 0.005 * largest, "{} rows: differs by {differs} of {largest}", found.len() / 24);
    }
    let messages = device.machine().unwrap().messages();
    assert!(messages.is_empty(), "the validation layer says: {messages:#?}");
}

/// A layer and a head as the forge rotates them: rows are transformed behind norms and gates, before a norm, and heads one by one.
fn rotated(hidden: usize, ffn: usize) -> Checked {
    let (mut weights, mut ops) = (Vec::new(), Vec::new());
    let mut op = |path: &str, op: String| ops.push(format!(r#"{{"path": "rotated.{path}", "op": {op}}}"#));
    let mut linear = |x: &str, weight: &str, inputs: usize, outputs: usize| {
        weights.push(format!(r#""{weight}": {{"shape": [{outputs}, {inputs}], "encoding": "i8_row"}}"#));
        format!(r#"{{"linear": {{"x": "{x}", "weight": "{weight}", "activation": "i8_row"}}}}"#)
    };
    let [norm, hadamard] =
        [r#"{"rms_norm": {"x": "NAME", "eps": 1e-6}}"#, r#"{"hadamard": {"x": "NAME"}}"#].map(|op| move |x: &str| op.replace("NAME", x));
    let reshape = |x: &str, shape: &str| format!(r#"{{"reshape": {{"x": "{x}", "shape": [{shape}]}}}}"#);
    let gate =
        |gate: &str, up: &str, function: &str| format!(r#"{{"gate_act": {{"gate": "{gate}", "up": "{up}", "activation": "{function}"}}}}"#);
    let add = |a: &str, b: &str| format!(r#"{{"add": {{"a": "{a}", "b": "{b}"}}}}"#);
    op("norm", norm("x"));
    op("normed", hadamard("rotated.norm"));
    for (name, heads) in [("q", 2), ("k", 1), ("v", 1), ("z", 2)] {
        op(&format!("{name}_proj"), linear("rotated.normed", name, hidden, heads * 32));
        op(name, reshape(&format!("rotated.{name}_proj"), &format!(r#""T", {heads}, 32"#)));
    }
    let kv = r#""kv": {"k": "rotated.k", "v": "rotated.v"}, "slot": "kv", "mask": "causal""#;
    op("attend", format!(r#"{{"attend": {{"q": "rotated.q", {kv}, "scale": 0.25}}}}"#));
    op("heads", hadamard("rotated.attend"));
    op("gated", gate("rotated.z", "rotated.heads", "sigmoid"));
    op("flat", reshape("rotated.gated", r#""T", 64"#));
    op("joined", hadamard("rotated.flat"));
    op("o_proj", linear("rotated.joined", "o", 64, hidden));
    op("middle", add("x", "rotated.o_proj"));
    op("ffn_norm", norm("rotated.middle"));
    op("ffn_normed", hadamard("rotated.ffn_norm"));
    for name in ["gate", "up"] {
        op(&format!("{name}_proj"), linear("rotated.ffn_normed", name, hidden, ffn));
    }
    op("act", gate("rotated.gate_proj", "rotated.up_proj", "gelu_tanh"));
    op("acted", hadamard("rotated.act"));
    op("down_proj", linear("rotated.acted", "down", ffn, hidden));
    op("out", add("rotated.middle", "rotated.down_proj"));
    op("row", r#"{"gather": {"x": "rotated.out", "rows": "wanted"}}"#.to_owned());
    op("turned", hadamard("rotated.row"));
    op("last_norm", norm("rotated.turned"));
    op("last", hadamard("rotated.last_norm"));
    op("logits", linear("rotated.last", "head", hidden, 24));
    let program = format!(
        r#"{{
          "program_version": 1,
          "name": "rotated",
          "inputs": [
            {{"name": "x", "dtype": "f32", "shape": ["T", {hidden}], "generator": "carried"}},
            {{"name": "wanted", "dtype": "i32", "shape": ["L"], "generator": "wanted_rows"}}
          ],
          "outputs": [{{"name": "logits", "value": "rotated.logits"}}],
          "slots": {{"kv": {{"kv": {{"kv_heads": 1, "head_dim": 32, "dtype": "f32"}}}}}},
          "stages": [{{"name": "rotated"}}],
          "weights": {{{}}},
          "ops": [{}]
        }}"#,
        weights.join(", "),
        ops.join(", ")
    );
    Checked::new(Program::from_json(&program).unwrap()).unwrap()
}

/// Numbers that differ from row to row, as weights of a program: int8 with a scale per row.
fn made_up(program: &Checked) -> Arc<dyn Weights> {
    let weight = |(name, weight): (&qhx_ir::Name, &Weight)| {
        let [rows, columns] = weight.shape[..] else { panic!("{name} is a matrix") };
        let size = 1.0 / (columns as f32).sqrt();
        let noise = |n: usize| (n as u64 + 1).wrapping_mul(6364136223846793005) >> 40;
        let bytes = weight.encoding.row_bytes(columns).unwrap();
        let (mut data, mut scales) = (AlignedBytes::zeroed(rows * bytes.data), AlignedBytes::zeroed(rows * bytes.scale));
        data.as_mut().iter_mut().enumerate().for_each(|(n, byte)| *byte = noise(n) as u8);
        scales.as_mut().chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&(size / 100.0).to_le_bytes()));
        let tensor = WeightTensor::new(weight.encoding, weight.shape.clone(), data.into(), Some(scales.into()), None);
        (name.to_string(), tensor.unwrap())
    };
    let weights: HashMap<String, WeightTensor> = program.weights.iter().map(weight).collect();
    Arc::new(weights)
}

/// The logits of the last of three rows, then of one row after the other.
fn decoded(device: &dyn Device, program: &Checked, hidden: usize) -> Vec<Vec<f32>> {
    let mut executable = device.load(program, &made_up(program), &LoadOptions { max_rows: 3, ..Default::default() }).unwrap();
    let mut state = executable.new_state(64).unwrap();
    let calls = [3, 1, 1, 1].into_iter().enumerate().map(|(number, rows): (usize, usize)| {
        let x: Vec<f32> = (0..rows * hidden).map(|n| ((n * n + 7 * number) * 29 % 997) as f32 / 300.0 - 1.5).collect();
        let wanted = [rows as i32 - 1];
        let (inputs, mut outputs) = ([InputData::F32(&x), InputData::I32(&wanted)], Outputs::new());
        let mut segments = [Segment::new(Some(&mut *state), 0, rows)];
        let mut call = Call::new(Bindings { rows, soft_rows: 0, wanted: 1 }, &inputs, &mut segments, &mut outputs);
        call.phase = if rows == 1 { Phase::Decode } else { Phase::Prefill };
        executable.run(&mut call).unwrap();
        state.commit(rows).unwrap();
        outputs.value("logits").unwrap().to_vec()
    });
    calls.collect()
}

/// A step of one row with transforms is one dispatch, whatever their widths: with odd factors, wider than a workgroup, and not a multiple of four. Software takes a minute to compile such a step.
#[test]
#[ignore = "needs Vulkan: cargo xtask test gpu"]
fn rotated_steps_are_one_dispatch() {
    let hidden = 34;
    let program = rotated(hidden, 1280);
    let features = Features { streams: Some(true), ..Default::default() };
    let device = GpuDevice::new(GpuOptions { features, profile: true, ..options() });
    let (found, expected) = (decoded(&device, &program, hidden), decoded(&ReferenceDevice, &program, hidden));
    for (call, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let length = |row: &mut dyn Iterator<Item = f32>| row.map(|x| x * x).sum::<f32>().sqrt();
        let differs = length(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / length(&mut expected.iter().copied());
        println!("call {call} differs by {differs}");
        assert!(differs <= 0.05, "call {call} differs by {differs}");
    }
    let machine = device.machine().unwrap();
    let dispatches: Vec<(String, u64)> = machine.profile().into_iter().map(|(name, (count, _))| (name, count)).collect();
    let count = |wanted: &str| dispatches.iter().find(|(name, _)| name == wanted).map_or(0, |(_, count)| *count);
    // Three steps in one dispatch each, and three rows at once.
    assert_eq!((count("step") + count("step_timed"), count("hadamard"), count("linear")), (3, 7, 9), "{dispatches:?}");
    let messages = machine.messages();
    assert!(messages.is_empty(), "the validation layer says: {messages:#?}");
}
