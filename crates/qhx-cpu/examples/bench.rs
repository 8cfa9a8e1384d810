//! Times prefill and decode of a synthetic decoder with random weights.
//!
//! `cargo run --release -p qhx-cpu --example bench -- [threads] [instruction set] [small|wide|experts] [encoding] [form] [context]`

use half::f16;
use qhx_cpu::{CpuDevice, CpuOptions, measure_bandwidth};
use qhx_ir::*;
use std::{collections::HashMap, sync::Arc, time::Instant};

/// The sizes of a decoder.
struct Sizes {
    layers: usize,
    hidden: usize,
    ffn: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    experts: usize,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |i: usize| arguments.get(i).map(String::as_str).filter(|a| *a != "-");
    let threads: usize = argument(0).unwrap_or("2").parse()?;
    let instructions = argument(1).map(str::parse).transpose()?;
    let sizes = match argument(2).unwrap_or("small") {
        "wide" => Sizes { layers: 4, hidden: 2048, ffn: 6144, heads: 16, kv_heads: 8, head_dim: 128, vocab: 32000, experts: 0 },
        "experts" => Sizes { layers: 4, hidden: 2048, ffn: 448, heads: 16, kv_heads: 4, head_dim: 128, vocab: 32000, experts: 16 },
        _ => Sizes { layers: 30, hidden: 576, ffn: 1536, heads: 9, kv_heads: 3, head_dim: 64, vocab: 49152, experts: 0 },
    };
    let encoding: Encoding = argument(3).unwrap_or("i4_block32_min").parse()?;
    let form: ActivationForm = serde_json::from_value(argument(4).unwrap_or("i8_block32").into())?;
    let context: usize = argument(5).unwrap_or("0").parse()?;

    let (program, weights) = decoder(&sizes, encoding, form)?;
    let weights: Arc<dyn Weights> = Arc::new(weights);
    let device = CpuDevice::new(CpuOptions { threads: Some(threads), instructions })?;
    let info = device.describe();
    let begin = Instant::now();
    let mut executable = device.load_here(&program, &weights, &LoadOptions { max_rows: 512, max_soft_rows: 0, ..Default::default() })?;
    let load = begin.elapsed();
    println!("{}, {threads} threads, {}: loaded in {load:.1?}", info.description, info.facts["instructions"]);

    let mut pass = |state: &mut dyn State, rows: usize| -> Result<(), DeviceError> {
        let start = state.len();
        let ids: Vec<i32> = (0..rows).map(|i| ((start + i) * 7919 % sizes.vocab) as i32).collect();
        let positions: Vec<i32> = (start..start + rows).map(|i| i as i32).collect();
        let last = [rows as i32 - 1];
        executable.run(&mut Call {
            bindings: Bindings { rows, soft_rows: 0, wanted: 1 },
            inputs: &[InputData::I32(&ids), InputData::I32(&positions), InputData::I32(&last)],
            segments: &mut [Segment { state: Some(state), first_row: 0, valid_rows: rows }],
            epoch: 0,
            cancel: None,
            taps: None,
        })?;
        state_commit(rows, executable.weight_bytes_read());
        Ok(())
    };
    let mut state = CpuDevice::new(CpuOptions { threads: Some(1), instructions })?
        .load_here(&program, &weights, &LoadOptions::default())?
        .new_state(4096)?;
    for repeat in 0..3 {
        state.truncate(0)?;
        let begin = Instant::now();
        pass(&mut *state, 512)?;
        let prefill = begin.elapsed();
        state.commit(512)?;
        state.truncate(0)?;
        while state.len() < context {
            let rows = (context - state.len()).min(512);
            pass(&mut *state, rows)?;
            state.commit(rows)?;
        }
        let begin = Instant::now();
        for _ in 0..64 {
            pass(&mut *state, 1)?;
            state.commit(1)?;
        }
        let decode = begin.elapsed();
        println!(
            "run {repeat}: prefill {:.1} rows/s, decode {:.1} rows/s ({:.1} MB each, {:.1} GB/s)",
            512.0 / prefill.as_secs_f64(),
            64.0 / decode.as_secs_f64(),
            BYTES.load(std::sync::atomic::Ordering::Relaxed) as f64 / 1e6,
            BYTES.load(std::sync::atomic::Ordering::Relaxed) as f64 * 64.0 / decode.as_secs_f64() / 1e9,
        );
    }
    if let Some(bandwidth) = measure_bandwidth(threads) {
        println!("memory: {:.1} GB/s", bandwidth / 1e9);
    }
    Ok(())
}

static BYTES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

fn state_commit(rows: usize, bytes: u64) {
    if rows == 1 {
        BYTES.store(bytes, std::sync::atomic::Ordering::Relaxed);
    }
}

/// A pre-norm decoder with gated feed-forward layers (or experts) and a tied int8 table.
fn decoder(
    sizes: &Sizes,
    encoding: Encoding,
    form: ActivationForm,
) -> Result<(Checked, HashMap<String, WeightTensor>), Box<dyn std::error::Error>> {
    let Sizes { layers, hidden, ffn, heads, kv_heads, head_dim, vocab, experts } = *sizes;
    let mut noise = 0x1234_5678_9abc_def1u64;
    let mut weights = HashMap::new();
    let mut declared = std::collections::BTreeMap::new();
    let mut ops: Vec<Op> = Vec::new();
    let mut stages = vec![Stage { name: "embed".into(), tap: None }];
    let mut slots = std::collections::BTreeMap::new();
    let mut weight = |name: &str, encoding: Encoding, shape: &[usize]| -> Name {
        weights.insert(name.to_string(), random(encoding, shape, &mut noise));
        declared.insert(Name::from(name), Weight { shape: shape.to_vec(), encoding });
        name.into()
    };
    let f32s = ActivationForm::F32;
    let table_encoding = if encoding.is_float() { encoding } else { Encoding::I8_BLOCK32 };
    let table = weight("table", table_encoding, &[vocab, hidden]);
    let mut push = |path: &str, op: OpKind| -> Name {
        ops.push(Op { path: path.into(), op });
        path.into()
    };
    let linear = |x: &Name, weight: Name| OpKind::Linear { x: x.clone(), weight, bias: None, activation: form, clip: None };
    let mut x = push("embed.rows", OpKind::Embed { ids: "ids".into(), table: table.clone(), scale: 1.0 });
    for l in 0..layers {
        let at = |name: &str| format!("layers.{l}.{name}");
        stages.push(Stage { name: at("attn").into(), tap: None });
        stages.push(Stage { name: at("ffn").into(), tap: None });
        let w = weight(&at("norm1"), Encoding::F32, &[hidden]);
        let h = push(&at("attn.norm"), OpKind::RmsNorm { x: x.clone(), weight: Some(w), eps: 1e-5 });
        let mut project = |name: &str, heads: usize, turn: bool| {
            let w = weight(&at(name), encoding, &[heads * head_dim, hidden]);
            let y = push(&at(&format!("attn.{name}")), linear(&h, w));
            let shape = vec![Dim::T, Dim::Fixed(heads), Dim::Fixed(head_dim)];
            let y = push(&at(&format!("attn.{name}_heads")), OpKind::Reshape { x: y, shape });
            match turn {
                true => {
                    push(&at(&format!("attn.{name}_rope")), OpKind::Rope { x: y, positions: "positions".into(), rotary: "rotary".into() })
                }
                false => y,
            }
        };
        let (q, k, v) = (project("q", heads, true), project("k", kv_heads, true), project("v", kv_heads, false));
        let slot: Name = at("kv").into();
        slots.insert(slot.clone(), Slot::Kv { kv_heads, head_dim, window: None, dtype: KvType::F16 });
        let scale = 1.0 / (head_dim as f32).sqrt();
        let attend = OpKind::Attend {
            q,
            kv: Some(KeyValue { k, v }),
            slot: Some(slot),
            mask: Mask::Causal,
            scale,
            softcap: None,
            relative_keys: None,
        };
        let y = push(&at("attn.attend"), attend);
        let y = push(&at("attn.joined"), OpKind::Reshape { x: y, shape: vec![Dim::T, Dim::Fixed(heads * head_dim)] });
        let w = weight(&at("o"), encoding, &[hidden, heads * head_dim]);
        let y = push(&at("attn.o"), linear(&y, w));
        x = push(&at("attn.add"), OpKind::Add { a: x, b: y });
        let w = weight(&at("norm2"), Encoding::F32, &[hidden]);
        let h = push(&at("ffn.norm"), OpKind::RmsNorm { x: x.clone(), weight: Some(w), eps: 1e-5 });
        let y = if experts > 0 {
            let w = weight(&at("router"), Encoding::F32, &[experts, hidden]);
            let scores = push(&at("ffn.scores"), OpKind::Linear { x: h.clone(), weight: w, bias: None, activation: f32s, clip: None });
            push(&at("ffn.route"), OpKind::Route { scores, method: Routing::Softmax { top_k: 2, renormalise: true } });
            let gate = weight(&at("gate"), encoding, &[experts, ffn, hidden]);
            let up = weight(&at("up"), encoding, &[experts, ffn, hidden]);
            let down = weight(&at("down"), encoding, &[experts, hidden, ffn]);
            let (experts, weights) = (at("ffn.route.experts").into(), at("ffn.route.weights").into());
            push(&at("ffn.experts"), OpKind::Experts { x: h, experts, weights, gate, up, down, activation: Activation::Silu, form })
        } else {
            let w = weight(&at("gate"), encoding, &[ffn, hidden]);
            let gate = push(&at("ffn.gate"), linear(&h, w));
            let w = weight(&at("up"), encoding, &[ffn, hidden]);
            let up = push(&at("ffn.up"), linear(&h, w));
            let y = push(&at("ffn.act"), OpKind::GateAct { gate, up, activation: Activation::Silu });
            let w = weight(&at("down"), encoding, &[hidden, ffn]);
            push(&at("ffn.down"), linear(&y, w))
        };
        x = push(&at("ffn.add"), OpKind::Add { a: x, b: y });
    }
    stages.push(Stage { name: "lm_head".into(), tap: None });
    let x = push("lm_head.wanted", OpKind::Gather { x, rows: "wanted".into() });
    let w = weight("norm", Encoding::F32, &[hidden]);
    let x = push("lm_head.norm", OpKind::RmsNorm { x, weight: Some(w), eps: 1e-5 });
    push("lm_head.logits", linear(&x, table));
    let input = |name: &str, shape: Vec<Dim>, generator| Input { name: name.into(), dtype: DType::I32, shape, generator };
    let inv_freq = (0..head_dim / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / head_dim as f32)).collect();
    let program = Program {
        program_version: PROGRAM_VERSION,
        name: "text".into(),
        inputs: vec![
            input("ids", vec![Dim::T], Generator::Ids),
            input("positions", vec![Dim::Fixed(1), Dim::T], Generator::PositionsSequence),
            input("wanted", vec![Dim::L], Generator::WantedRows),
        ],
        outputs: vec![Output { name: "logits".into(), value: "lm_head.logits".into() }],
        slots,
        epochs: vec![],
        rotaries: [(
            "rotary".into(),
            Rotary { blocks: vec![(0, head_dim)], streams: vec![], variants: vec![RotaryVariant { inv_freq, amplitude: 1.0 }] },
        )]
        .into(),
        stages,
        weights: declared,
        ops,
    };
    Ok((Checked::new(program)?, weights))
}

fn random(encoding: Encoding, shape: &[usize], noise: &mut u64) -> WeightTensor {
    let (columns, rows) = (shape[shape.len() - 1], shape[..shape.len() - 1].iter().product::<usize>());
    let bytes = encoding.row_bytes(columns).expect("benchmark shapes are small");
    let mut bits = move || {
        *noise ^= *noise << 13;
        *noise ^= *noise >> 7;
        *noise ^= *noise << 17;
        *noise
    };
    let mut float = {
        let mut state = bits();
        move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 24) as f32
        }
    };
    let mut quants = |count: usize| {
        let mut data = AlignedBytes::zeroed(count);
        data.as_mut().chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&bits().to_le_bytes()[..chunk.len()]));
        Bytes::from(data)
    };
    let mut floats = |count: usize, half: bool, low: f32, high: f32| {
        let mut data = AlignedBytes::zeroed(count);
        if half {
            bytemuck::cast_slice_mut::<u8, f16>(data.as_mut()).iter_mut().for_each(|x| *x = f16::from_f32(low + (high - low) * float()));
        } else {
            bytemuck::cast_slice_mut::<u8, f32>(data.as_mut()).iter_mut().for_each(|x| *x = low + (high - low) * float());
        }
        Bytes::from(data)
    };
    let size = 1.0 / (columns as f32).sqrt();
    let (data, scale, min) = (rows * bytes.data, rows * bytes.scale, rows * bytes.min);
    let (data, scale, min) = match encoding {
        Encoding::F32 => (floats(data, false, -size, size), None, None),
        Encoding::F16 | Encoding::Bf16 => (floats(data, true, -size, size), None, None),
        Encoding::I8Row => (quants(data), Some(floats(scale, false, 0.5 * size / 127.0, size / 127.0)), None),
        Encoding::Block(b) => {
            let (half, steps) = (b.scale == ScaleType::F16, if b.quants == Quants::I4 { 7.5 } else { 127.0 });
            let scales = floats(scale, half, 0.5 * size / steps, size / steps);
            (quants(data), Some(scales), b.min.then(|| floats(min, half, -size, -0.5 * size)))
        }
    };
    WeightTensor::new(encoding, shape.to_vec(), data, scale, min).expect("made to measure")
}
