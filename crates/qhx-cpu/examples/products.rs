//! Times products of 512 rows with quantised matrices, as prefill has them, for each instruction set of this CPU.
//!
//! `cargo run --release -p qhx-cpu --example products -- [threads] [instruction set ...]`
//!
//! GOPS are multiplications and additions, in 10^9 per second; putting the rows into their integer form is counted too, once for four matrices.

#[path = "../tests/suite/decoder.rs"]
mod decoder;

use qhx_cpu::{CpuDevice, CpuOptions, InstructionSet};
use qhx_ir::*;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

const ROWS: usize = 512;
const MATRICES: usize = 4;
/// Rows and columns of a matrix.
const SHAPES: [(usize, usize); 4] = [(3584, 1024), (1024, 3584), (6144, 2048), (448, 4096)];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let threads: usize = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let mut sets = arguments.map(|name| name.parse()).collect::<Result<Vec<InstructionSet>, _>>()?;
    if sets.is_empty() {
        sets = InstructionSet::available().into_iter().filter(|&set| set != InstructionSet::Portable).collect();
    }
    let info = CpuDevice::new(CpuOptions { threads: Some(1), ..Default::default() })?.open()?.describe();
    println!("{}, {threads} threads", info.description);
    for (encoding, form) in [
        (Encoding::I8Row, ActivationForm::I8Row),
        (Encoding::I6_BLOCK32, ActivationForm::I8Block32),
        (Encoding::I4_BLOCK32, ActivationForm::I8Block32),
    ] {
        for (rows, columns) in SHAPES {
            print!("{encoding} {ROWS} x {columns} x {rows}:");
            let (program, weights) = program(rows, columns, encoding, form)?;
            let mut first: Option<Vec<u32>> = None;
            for &instructions in &sets {
                let device = CpuDevice::new(CpuOptions { threads: Some(threads), instructions: Some(instructions), ..Default::default() })?;
                let (time, bits) = timed(&device, &program, &weights, columns)?;
                let operations = 2 * ROWS * rows * columns * MATRICES;
                // Bits are the same where f32 sums have the same order.
                let same = first.get_or_insert_with(|| bits.clone()) == &bits;
                print!(
                    "  {instructions} {:.0} GOPS{}",
                    operations as f64 / time.as_secs_f64() / 1e9,
                    if same { "" } else { " (other bits)" }
                );
                first = Some(bits);
            }
            println!();
        }
    }
    Ok(())
}

/// The shortest of several calls, and the bits of the first product's results.
fn timed(device: &CpuDevice, program: &Checked, weights: &Arc<dyn Weights>, columns: usize) -> Result<(Duration, Vec<u32>), DeviceError> {
    let mut executable = device.load(program, weights, &LoadOptions { max_rows: ROWS, ..Default::default() })?;
    let x: Vec<f32> = (0..ROWS * columns).map(|i| (i * 2654435761 % 1000) as f32 / 400.0 - 1.25).collect();
    let mut outputs = Outputs::new();
    let (begin, mut best) = (Instant::now(), Duration::MAX);
    for call in 0.. {
        let start = Instant::now();
        executable.run(&mut Call::new(
            Bindings { rows: ROWS, soft_rows: 0, wanted: 0 },
            &[InputData::F32(&x)],
            &mut [Segment::new(None, 0, ROWS)],
            &mut outputs,
        ))?;
        best = best.min(start.elapsed());
        if call >= 5 && begin.elapsed() > Duration::from_secs(1) {
            break;
        }
    }
    let bits = outputs.value("product.0").into_iter().flatten().map(|x| x.to_bits()).collect();
    Ok((best, bits))
}

fn program(
    rows: usize,
    columns: usize,
    encoding: Encoding,
    form: ActivationForm,
) -> Result<(Checked, Arc<dyn Weights>), Box<dyn std::error::Error>> {
    let mut noise = 0x1234_5678_9abc_def1u64;
    let names: Vec<Name> = (0..MATRICES).map(|i| format!("product.{i}").into()).collect();
    let product = |name: &Name| OpKind::Linear { x: "x".into(), weight: name.clone(), bias: None, activation: form, clip: None };
    let shape = vec![Dim::T, Dim::Fixed(columns)];
    let program = Program {
        program_version: PROGRAM_VERSION,
        name: "text".into(),
        inputs: vec![Input { name: "x".into(), dtype: DType::F32, shape, generator: Generator::Patches }],
        outputs: names.iter().map(|name| Output { name: name.clone(), value: name.clone() }).collect(),
        slots: Default::default(),
        epochs: vec![],
        rotaries: Default::default(),
        stages: vec![Stage { name: "product".into(), tap: None, rotated: false, centred: false }],
        weights: names.iter().map(|name| (name.clone(), Weight { shape: vec![rows, columns], encoding })).collect(),
        ops: names.iter().map(|name| Op { path: name.clone(), op: product(name) }).collect(),
    };
    let weights: HashMap<String, WeightTensor> =
        names.iter().map(|name| (name.to_string(), decoder::random(encoding, &[rows, columns], &mut noise))).collect();
    Ok((Checked::new(program)?, Arc::new(weights)))
}
