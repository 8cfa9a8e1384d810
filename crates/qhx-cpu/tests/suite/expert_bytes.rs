//! A mixture of experts reads the weights of the chosen experts and of no other: counted, and proven by taking the others away.

#![allow(unsafe_code)] // memory that may not be read is made by the operating system

use qhx_cpu::{CpuDevice, CpuOptions};
use qhx_ir::{
    Activation, ActivationForm, Bindings, Bytes, Call, Checked, DType, Dim, Encoding, Executable, Generator, Input, InputData, LoadOptions,
    Op, OpKind, Output, Outputs, PROGRAM_VERSION, Program, Segment, Stage, Weight, WeightTensor, Weights,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

const EXPERTS: usize = 16;
const HIDDEN: usize = 64;
const FFN: usize = 48;

fn program() -> Checked {
    let input = |name: &str, dtype, width| Input {
        name: name.into(),
        dtype,
        shape: vec![Dim::T, Dim::Fixed(width)],
        generator: Generator::Carried,
    };
    let weight = |shape: [usize; 3]| Weight { shape: shape.to_vec(), encoding: Encoding::F32 };
    let op = OpKind::Experts {
        x: "x".into(),
        experts: "experts".into(),
        weights: "weights".into(),
        gate: "gate".into(),
        up: "up".into(),
        down: "down".into(),
        activation: Activation::Silu,
        form: ActivationForm::F32,
        bias: None,
        held: None,
    };
    Checked::new(Program {
        program_version: PROGRAM_VERSION,
        name: "mixture".into(),
        inputs: vec![input("x", DType::F32, HIDDEN), input("experts", DType::I32, 2), input("weights", DType::F32, 2)],
        outputs: vec![Output { name: "y".into(), value: "moe.experts".into() }],
        slots: BTreeMap::new(),
        epochs: vec![],
        rotaries: BTreeMap::new(),
        stages: vec![Stage { name: "moe".into(), tap: Some("moe.experts".into()), rotated: false, centred: false }],
        weights: BTreeMap::from([
            ("gate".into(), weight([EXPERTS, FFN, HIDDEN])),
            ("up".into(), weight([EXPERTS, FFN, HIDDEN])),
            ("down".into(), weight([EXPERTS, HIDDEN, FFN])),
        ]),
        ops: vec![Op { path: "moe.experts".into(), op }],
    })
    .unwrap()
}

/// Bytes read by a call whose rows chose these experts, the rows of each expert, and the result. With `guarded`, every other expert lies in memory that faults when read.
fn call(chosen: &[[i32; 2]], guarded: bool) -> (u64, Vec<usize>, Vec<f32>) {
    let program = program();
    let tensor = |weight: &Weight| {
        let numbers: Vec<f32> = (0..weight.shape.iter().product()).map(|i: usize| (i % 13) as f32 / 13.0 - 0.5).collect();
        let tensor = WeightTensor::from_f32(&weight.shape, &numbers).unwrap();
        if guarded { Guarded::copy_of(&tensor, chosen.as_flattened()) } else { tensor }
    };
    let tensors: HashMap<String, WeightTensor> = program.weights.iter().map(|(name, weight)| (name.to_string(), tensor(weight))).collect();
    let weights: Arc<dyn Weights> = Arc::new(tensors);
    let device = CpuDevice::new(CpuOptions { threads: Some(2), ..Default::default() }).unwrap();
    let mut executable = device.load_here(&program, &weights, &LoadOptions::default()).unwrap();
    let rows = chosen.len();
    let (x, shares) = (vec![0.25; rows * HIDDEN], vec![0.5; rows * 2]);
    let experts: Vec<i32> = chosen.as_flattened().to_vec();
    let inputs = [InputData::F32(&x), InputData::I32(&experts), InputData::F32(&shares)];
    let mut segments = [Segment::new(None, 0, rows)];
    let (bindings, mut outputs) = (Bindings { rows, soft_rows: 0, wanted: 0 }, Outputs::new());
    executable.run(&mut Call::new(bindings, &inputs, &mut segments, &mut outputs)).unwrap();
    let read = executable.weights_read().unwrap();
    (read.bytes, read.expert_rows[0].clone(), outputs.value("y").unwrap().to_vec())
}

/// Pages of which those of unchosen experts are closed.
struct Guarded {
    start: *mut u8,
    len: usize,
}

// SAFETY: the pages are written before the value is shared, and never after.
unsafe impl Send for Guarded {}
// SAFETY: as above.
unsafe impl Sync for Guarded {}

impl Guarded {
    fn copy_of(tensor: &WeightTensor, chosen: &[i32]) -> WeightTensor {
        let bytes = tensor.data();
        let expert = bytes.len() / EXPERTS;
        // SAFETY: a fresh private mapping of the wanted length, filled within its bounds; parts of it are closed before anyone else sees it.
        let pages = unsafe {
            assert!(expert.is_multiple_of(libc::sysconf(libc::_SC_PAGESIZE) as usize), "an expert is whole pages");
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let start = libc::mmap(std::ptr::null_mut(), bytes.len(), libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.cast(), bytes.len());
            for number in (0..EXPERTS).filter(|e| !chosen.contains(&(*e as i32))) {
                assert_eq!(libc::mprotect(start.byte_add(number * expert), expert, libc::PROT_NONE), 0);
            }
            Self { start: start.cast(), len: bytes.len() }
        };
        WeightTensor::new(tensor.encoding(), tensor.shape().to_vec(), Bytes::new(Arc::new(pages)), None, None).unwrap()
    }
}

impl AsRef<[u8]> for Guarded {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the mapping lives as long as this value; reading a closed page ends the process, which is what the test is about.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: unmaps what `copy_of` mapped.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

#[test]
fn only_the_chosen_experts_are_read() {
    let row = |columns: usize| Encoding::F32.row_bytes(columns).unwrap().data;
    let expert = (2 * FFN * row(HIDDEN) + HIDDEN * row(FFN)) as u64;
    assert_eq!(call(&[[3, 11]], false).0, 2 * expert, "a decode step reads its two experts");
    assert_eq!(call(&[[3, 11]; 40], false).0, 2 * expert, "rows that chose the same experts share the reading");
    let all: Vec<[i32; 2]> = (0..40).map(|i| [i % 16, (i + 5) % 16]).collect();
    let (bytes, rows, _) = call(&all, false);
    assert_eq!(bytes, 16 * expert, "a prompt reads each used expert once");
    assert_eq!(rows, (0..16).map(|e| all.as_flattened().iter().filter(|&&c| c == e).count()).collect::<Vec<_>>());
}

#[test]
fn the_other_experts_are_not_touched() {
    for chosen in [vec![[3, 11]], vec![[0, 15]], vec![[7, 8]; 40], (0..9).map(|i| [i % 3, 12]).collect()] {
        assert_eq!(call(&chosen, true), call(&chosen, false), "{chosen:?}");
    }
}
