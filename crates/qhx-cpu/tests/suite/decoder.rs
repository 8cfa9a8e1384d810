//! A decoder with random weights, for tests and benchmarks.
#![allow(dead_code, unreachable_pub, missing_docs)] // Each of its users takes a part of it.

use half::f16;
use qhx_ir::*;
use std::collections::HashMap;

/// The sizes of a decoder.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub layers: usize,
    pub hidden: usize,
    pub ffn: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub experts: usize,
}

/// A pre-norm decoder with gated feed-forward layers (or experts) and a tied int8 table.
pub fn decoder(
    sizes: &Sizes,
    encoding: Encoding,
    form: ActivationForm,
) -> Result<(Checked, HashMap<String, WeightTensor>), Box<dyn std::error::Error>> {
    let Sizes { layers, hidden, ffn, heads, kv_heads, head_dim, vocab, experts } = *sizes;
    let mut noise = 0x1234_5678_9abc_def1u64;
    let mut weights = HashMap::new();
    let mut declared = std::collections::BTreeMap::new();
    let mut ops: Vec<Op> = Vec::new();
    let mut stages = vec![Stage { name: "embed".into(), tap: None, rotated: false, centred: false }];
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
        stages.push(Stage { name: at("attn").into(), tap: None, rotated: false, centred: false });
        stages.push(Stage { name: at("ffn").into(), tap: None, rotated: false, centred: false });
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
            push(
                &at("ffn.experts"),
                OpKind::Experts { x: h, experts, weights, gate, up, down, activation: Activation::Silu, form, bias: None, held: None },
            )
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
    stages.push(Stage { name: "lm_head".into(), tap: None, rotated: false, centred: false });
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

/// A tensor of random numbers.
pub fn random(encoding: Encoding, shape: &[usize], noise: &mut u64) -> WeightTensor {
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
            let steps = match b.quants {
                Quants::I8 => 127.0,
                Quants::I6 => 31.5,
                Quants::I4 => 7.5,
            };
            let half = b.scale == ScaleType::F16;
            let scales = floats(scale, half, 0.5 * size / steps, size / steps);
            (quants(data), Some(scales), b.min.then(|| floats(min, half, -size, -0.5 * size)))
        }
    };
    WeightTensor::new(encoding, shape.to_vec(), data, scale, min).expect("made to measure")
}
