//! What a device must reject: calls and states that do not match. It must not crash, and must continue as if nothing had happened.

use super::{
    CaseResult, Options, Outcome,
    build::{Builder, Case, normal},
    compare::{Bound, compare, tolerance},
    plan::{CallPlan, Owned, Piece, Plan},
    rng::Rng,
    session::{Cancel, Session},
};
use crate::{
    Bindings, Call, Checked, Device, DeviceError, IdMask, InputData, KeyValue, KvType, LoadOptions, Mask, OpKind, Outputs, Segment, Slot,
    SlotData, State, Want, Weights, reference::ReferenceDevice,
};
use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
};

/// A request that must fail.
type Demand = fn(&mut Subject<'_, '_>) -> Result<(), DeviceError>;

const DEMANDS: &[(&str, Demand)] = &[
    ("too few inputs", |s| s.call(|c| c.inputs.truncate(1))),
    ("too few numbers", |s| s.call(|c| c.inputs[1] = Owned::F32(vec![0.0; 3]))),
    ("integers for floats", |s| s.call(|c| c.inputs[1] = Owned::I32(vec![0; 2 * WIDTH]))),
    ("an id beyond the table", |s| s.call(|c| c.inputs[0] = Owned::I32(vec![0, TABLE as i32]))),
    ("a negative id", |s| s.call(|c| c.inputs[0] = Owned::I32(vec![-1, 0]))),
    ("a wanted row beyond the call", |s| s.call(|c| c.inputs[2] = Owned::I32(vec![2]))),
    ("no rows", |s| {
        s.call(|c| {
            c.bindings.rows = 0;
            c.inputs = vec![Owned::I32(vec![]), Owned::F32(vec![]), Owned::I32(vec![0])];
            c.segments.clear();
        })
    }),
    ("more rows than it was loaded for", |s| {
        s.call(|c| {
            c.bindings.rows = 1000;
            c.inputs[0] = Owned::I32(vec![0; 1000]);
            c.inputs[1] = Owned::F32(vec![0.0; 1000 * WIDTH]);
        })
    }),
    ("more wanted rows than it was loaded for", |s| {
        s.call(|c| {
            c.bindings.wanted = 1000;
            c.inputs[2] = Owned::I32(vec![0; 1000]);
        })
    }),
    ("a segment beyond the call", |s| s.call(|c| c.segments = vec![(1, 2)])),
    ("an empty segment", |s| s.call(|c| c.segments = vec![(0, 0)])),
    ("a segment without state", |s| s.call(|c| c.stateless = true)),
    ("a state of another device", |s| s.call(|c| c.foreign = true)),
    ("an epoch that does not exist", |s| s.call(|c| c.epoch = 1)),
    ("a want too many", |s| s.call(|c| c.wants = vec![Want::Largest; 2])),
    ("the probability of an id that does not exist", |s| s.call(|c| c.wants = vec![Want::LogProbs { target: WIDTH as u32, top: 1 }])),
    ("more of the largest than there are", |s| s.call(|c| c.wants = vec![Want::Top(WIDTH + 1)])),
    ("the largest none", |s| s.call(|c| c.wants = vec![Want::Top(0)])),
    ("more of the most probable than there are", |s| s.call(|c| c.wants = vec![Want::LogProbs { target: 0, top: WIDTH + 1 }])),
    ("a mask that never arrives", |s| {
        static MASK: OnceLock<IdMask> = OnceLock::new();
        s.call(|c| c.wants = vec![Want::LargestAllowed(&MASK)])
    }),
    ("a mask that allows nothing", |s| {
        static MASK: OnceLock<IdMask> = OnceLock::new();
        MASK.get_or_init(|| IdMask::none(WIDTH));
        s.call(|c| c.wants = vec![Want::LargestAllowed(&MASK)])
    }),
    ("rows beyond the context", |s| {
        let len = s.session.context - 1;
        s.session.states[0].import("kv", &rows(KvType::F16, len, WIDTH))?;
        s.session.states[0].set_len(len)?;
        let end = s.call(|_| ());
        s.session.states[0] = s.session.new_state()?;
        end
    }),
    ("a commit of nothing", |s| s.state().commit(1)),
    ("a commit of more rows than there are", |s| {
        s.call(|_| ())?;
        s.state().commit(3)
    }),
    ("a commit of some rows of a recurrent state", |s| {
        s.call(|_| ())?;
        s.state().commit(1)
    }),
    ("a commit on a copy made before it", |s| {
        s.call(|_| ())?;
        let mut copy = s.state().fork()?;
        std::mem::swap(&mut copy, &mut s.session.states[0]);
        // The copy holds what was committed, not the call that was not.
        s.state().commit(2)
    }),
    ("truncation to more rows", |s| s.state().truncate(1)),
    ("the export of no slot", |s| s.state().export("no").map(drop)),
    ("the import of no slot", |s| s.state().import("no", &SlotData::Recurrent(vec![]))),
    ("recurrent data for a KV slot", |s| s.state().import("kv", &SlotData::Recurrent(vec![0.0; WIDTH]))),
    ("KV rows for a recurrent slot", |s| s.state().import("fifo", &rows(KvType::F16, 1, WIDTH))),
    ("too few recurrent numbers", |s| s.state().import("fifo", &SlotData::Recurrent(vec![0.0; WIDTH]))),
    ("KV rows of another type", |s| s.state().import("kv", &rows(KvType::F32, 1, WIDTH))),
    ("KV rows of another width", |s| s.state().import("kv", &rows(KvType::F16, 1, WIDTH - 1))),
    ("KV rows beyond the context", |s| {
        let data = rows(KvType::F16, s.session.context + 1, WIDTH);
        s.state().import("kv", &data)
    }),
    ("a length beyond the context", |s| {
        let len = s.session.context + 1;
        s.state().set_len(len)
    }),
];

const TABLE: usize = 10;
const WIDTH: usize = 8;

fn rows(dtype: KvType, rows: usize, width: usize) -> SlotData {
    let bytes = vec![0; rows * width * dtype.bytes()];
    SlotData::Kv { dtype, rows, keys: bytes.clone(), values: bytes }
}

/// One case for each request, and two for weights that are not what the program declares.
pub(super) fn run(device: &dyn Device, options: &Options, report: &mut dyn FnMut(CaseResult)) {
    let case = case(Rng::new(&[options.seed]));
    let program = Checked::new(case.program.clone()).expect("the suite's own program type-checks");
    let refusal = program.ops.iter().find_map(|op| device.accepts(&program, op).err());
    let weights = [("a missing weight", None), ("a weight of another shape", Some([TABLE, WIDTH + 1]))];
    let names = DEMANDS.iter().map(|d| d.0).chain(weights.map(|w| w.0));
    for (number, what) in names.enumerate().filter(|&(number, _)| options.wants("refusals", number)) {
        let outcome = super::guard(|| match (&refusal, DEMANDS.get(number)) {
            (Some(refusal), _) => Outcome::Refused(refusal.to_string()),
            (None, Some((_, demand))) => verdict(demanded(device, &case, &program, *demand, options)),
            (None, None) => verdict(load_with(device, &case, &program, weights[number - DEMANDS.len()].1)),
        });
        report(CaseResult { name: format!("refusals/{number}"), seed: options.seed, what: what.into(), outcome });
    }
}

fn verdict(result: Result<f64, String>) -> Outcome {
    match result {
        Ok(worst) => Outcome::Passed { worst },
        Err(reason) => Outcome::Failed(reason),
    }
}

/// An embedding that is attended to and convolved, and the wanted rows of that.
fn case(rng: Rng) -> Case {
    let mut b = Builder::new(rng, "refusals", tolerance::CHAIN);
    let ids = b.index("ids", &[], TABLE);
    let x = b.rows("x", &[WIDTH], normal);
    let rows = b.wanted();
    let table = b.plain("table", &[TABLE, WIDTH], 1.0);
    let embedded = b.op("op.embed", OpKind::Embed { ids, table, scale: 1.0 });
    let x = b.op("op.add", OpKind::Add { a: embedded, b: x });
    let weight = b.plain("weight", &[WIDTH, 3], 0.5);
    let slot = Some(b.slot("fifo", Slot::Fifo { rows: 2, channels: WIDTH }));
    let x = b.op("op.conv", OpKind::ShortConv { x, weight, bias: None, slot, activation: None });
    let shape = vec![crate::Dim::T, crate::Dim::Fixed(1), crate::Dim::Fixed(WIDTH)];
    let q = b.op("op.heads", OpKind::Reshape { x, shape });
    let kv = Some(KeyValue { k: q.clone(), v: q.clone() });
    let slot = Some(b.kv_slot("kv", 1, WIDTH, None, KvType::F16));
    let attend = OpKind::Attend { q, kv, slot, mask: Mask::Causal, scale: 0.5, softcap: None, relative_keys: None };
    let x = b.op("op.attend", attend);
    let y = b.op("op.rows", OpKind::Gather { x, rows });
    b.finish(&y)
}

struct Subject<'s, 'c> {
    session: &'s mut Session<'c>,
    case: &'c Case,
}

/// A call of two rows, to be spoiled.
struct Spoiled {
    bindings: Bindings,
    inputs: Vec<Owned>,
    /// First and number of rows.
    segments: Vec<(usize, usize)>,
    epoch: usize,
    stateless: bool,
    foreign: bool,
    wants: Vec<Want<'static>>,
}

impl Subject<'_, '_> {
    fn state(&mut self) -> &mut dyn State {
        &mut *self.session.states[0]
    }

    fn call(&mut self, spoil: impl FnOnce(&mut Spoiled)) -> Result<(), DeviceError> {
        let (bindings, inputs) = super::plan::inputs(self.case, &self.session.program, &two_rows(), 5);
        let mut call = Spoiled { bindings, inputs, segments: vec![(0, 2)], epoch: 0, stateless: false, foreign: false, wants: vec![] };
        (call.bindings.wanted, call.inputs[2]) = (1, Owned::I32(vec![0]));
        spoil(&mut call);
        let weights: Arc<dyn Weights> = Arc::new(self.case.weights.clone());
        let reference = ReferenceDevice.load(&self.session.program, &weights, &LoadOptions::default())?;
        let mut foreign: Box<dyn State> = Box::new(Stranger(reference.new_state(self.session.context)?));
        let data: Vec<InputData<'_>> = call.inputs.iter().map(Owned::data).collect();
        let state: &mut dyn State = if call.foreign { &mut *foreign } else { &mut *self.session.states[0] };
        let mut state = Some(state).filter(|_| !call.stateless);
        let segments = call
            .segments
            .iter()
            .map(|&(first_row, valid_rows)| Segment { epoch: call.epoch, ..Segment::new(state.take(), first_row, valid_rows) });
        let mut segments: Vec<Segment<'_>> = segments.collect();
        let mut outputs = Outputs::new();
        let mut run = Call::new(call.bindings, &data, &mut segments, &mut outputs);
        run.wants = &call.wants;
        self.session.executable.run(&mut run)
    }
}

fn two_rows() -> CallPlan {
    let piece = Piece { session: 0, from: 0, first_row: 0, rows: 2, commit: Some(2) };
    CallPlan { number: 0, rows: 2, pieces: vec![piece], all_wanted: false, partial: false }
}

/// The request must fail, and an ordinary call after it must give the usual result.
fn demanded(device: &dyn Device, case: &Case, program: &Checked, demand: Demand, options: &Options) -> Result<f64, String> {
    let plan = Plan { sessions: 1, calls: vec![two_rows()] };
    let load = |device: &dyn Device| Session::new(device, case, program, &plan).map_err(|e| format!("does not load: {e}"));
    let (mut session, mut reference) = (load(device)?, load(&ReferenceDevice)?);
    match demand(&mut Subject { session: &mut session, case }) {
        Err(DeviceError::Call(_) | DeviceError::Resources(_)) => {}
        Err(other) => return Err(format!("expected the call to be rejected, found: {other}")),
        Ok(()) => return Err("the request succeeded".into()),
    }
    let bound = Bound { tolerance: options.tolerance(case), floor: case.floor, flips: None };
    let run =
        |session: &mut Session<'_>| session.run(&plan.calls[0], 0, Cancel::Never).map_err(|e| format!("an ordinary call after it: {e}"));
    let worst = compare(&run(&mut reference)?, &run(&mut session)?, bound).map_err(|e| format!("an ordinary call after it: {e}"))?;
    session.commit(&plan.calls[0]).map_err(|e| format!("the commit after it: {e}"))?;
    Ok(worst)
}

fn load_with(device: &dyn Device, case: &Case, program: &Checked, shape: Option<[usize; 2]>) -> Result<f64, String> {
    let mut weights: HashMap<_, _> = case.weights.clone();
    weights.remove("table");
    if let Some(shape) = shape {
        let encoding = case.program.weights["table"].encoding;
        weights.insert("table".into(), super::weights::random(&mut Rng::new(&[1]), encoding, &shape, 1.0));
    }
    let weights: Arc<dyn Weights> = Arc::new(weights);
    match device.load(program, &weights, &LoadOptions::default()) {
        Ok(_) => Err("the program was loaded".into()),
        Err(e) if e.to_string().contains("table") => Ok(0.0),
        Err(e) => Err(format!("the error does not name the weight: {e}")),
    }
}

/// A state that no device made.
struct Stranger(Box<dyn State>);

impl State for Stranger {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn capacity(&self) -> usize {
        self.0.capacity()
    }
    fn commit(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.0.commit(rows)
    }
    fn truncate(&mut self, len: usize) -> Result<(), DeviceError> {
        self.0.truncate(len)
    }
    fn fork(&self) -> Result<Box<dyn State>, DeviceError> {
        self.0.fork()
    }
    fn export_rows(&self, slot: &str, first: usize) -> Result<SlotData, DeviceError> {
        self.0.export_rows(slot, first)
    }
    fn import_rows(&mut self, slot: &str, first: usize, data: &SlotData) -> Result<(), DeviceError> {
        self.0.import_rows(slot, first, data)
    }
    fn set_len(&mut self, len: usize) -> Result<(), DeviceError> {
        self.0.set_len(len)
    }
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}
