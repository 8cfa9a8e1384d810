use super::*;
use crate::read::safetensors;
use crate::read::testing::Random;
use qhx_ir::AlignedBytes;
use qhx_ir::encoding::{Encoding, WeightTensor};
use std::path::Path;

const TYPES: [SourceType; 8] = [
    SourceType::Q8_0,
    SourceType::Q4_0,
    SourceType::Q4_1,
    SourceType::Q5_0,
    SourceType::Q5_1,
    SourceType::Q4K,
    SourceType::Q5K,
    SourceType::Q6K,
];

/// Equal bit for bit, except that one NaN is as good as another.
fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
}

struct Row {
    quants: Vec<u8>,
    scales: Vec<f32>,
    minima: Vec<f32>,
}

fn split_row(source_type: SourceType, source: &[u8]) -> Row {
    let (numbers, bytes) = source_type.block();
    let (q, s, m) = split_lengths(encoding(source_type).unwrap(), source.len() / bytes * numbers);
    let mut row = Row { quants: vec![0; q], scales: vec![0.0; s], minima: vec![0.0; m] };
    split(source_type, source, &mut row.quants, &mut row.scales, &mut row.minima);
    row
}

/// The definition of the bundle's block encodings, written out.
fn decode_split(encoding: BlockEncoding, row: &Row, columns: usize) -> Vec<f32> {
    (0..columns)
        .map(|i| {
            let q = encoding.quants.get(&row.quants, i) - if encoding.min { 0 } else { encoding.quants.zero() };
            let product = q as f32 * row.scales[i / encoding.block];
            if encoding.min { product + row.minima[i / encoding.block] } else { product }
        })
        .collect()
}

#[test]
fn splitting_loses_nothing() {
    let mut random = Random(7);
    for source_type in TYPES {
        let (numbers, bytes) = source_type.block();
        let encoding = encoding(source_type).unwrap();
        for round in 0..300 {
            // All bytes random: scales are then also infinities, NaNs and subnormals.
            let blocks = 1 + round % 5;
            let source = random.bytes(blocks * bytes);
            let row = split_row(source_type, &source);
            let mut plain = vec![0.0; blocks * numbers];
            decode(source_type, &source, &mut plain);
            assert!(same(&decode_split(encoding, &row, plain.len()), &plain), "{source_type}, round {round}");
            if encoding.scale == ScaleType::F16 {
                let as_f16: Vec<f32> = row.scales.iter().map(|&s| f16::from_f32(s).to_f32()).collect();
                assert!(same(&as_f16, &row.scales), "{source_type}: a scale is no f16");
                let as_f16: Vec<f32> = row.minima.iter().map(|&s| f16::from_f32(s).to_f32()).collect();
                assert!(same(&as_f16, &row.minima), "{source_type}: a minimum is no f16");
            }
        }
    }
}

/// The same through the bundle's own tensor type, as the forge will store it.
#[test]
fn the_bundle_layout_decodes_to_the_same_numbers() {
    fn padded<T: bytemuck::NoUninit>(numbers: &[T], length: usize) -> AlignedBytes {
        let bytes: &[u8] = bytemuck::cast_slice(numbers);
        let mut padded = AlignedBytes::zeroed(length);
        padded.as_mut()[..bytes.len()].copy_from_slice(bytes);
        padded
    }
    let mut random = Random(8);
    for source_type in TYPES {
        let (numbers, bytes) = source_type.block();
        let encoding = encoding(source_type).unwrap();
        for blocks in 1..6 {
            let mut source = random.bytes(blocks * bytes);
            source.chunks_exact_mut(bytes).for_each(|block| {
                let scales: &[usize] = if source_type == SourceType::Q6K { &[208] } else { &[0, 2] };
                scales.iter().for_each(|at| block[at + 1] = block[at + 1] & 0x83 | 0x20); // finite
            });
            let row = split_row(source_type, &source);
            let row_bytes = Encoding::Block(encoding).row_bytes(blocks * numbers).unwrap();
            let stored = |xs: &[f32]| match encoding.scale {
                ScaleType::F16 => padded(&xs.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>(), row_bytes.scale),
                ScaleType::F32 => padded(xs, row_bytes.scale),
            };
            let minima = encoding.min.then(|| stored(&row.minima).into());
            let shape = vec![1, blocks * numbers];
            let (quants, scales) = (padded(&row.quants, row_bytes.data).into(), stored(&row.scales).into());
            let tensor = WeightTensor::new(Encoding::Block(encoding), shape, quants, Some(scales), minima).unwrap();
            let (mut plain, mut decoded) = (vec![0.0; blocks * numbers], vec![0.0; blocks * numbers]);
            decode(source_type, &source, &mut plain);
            tensor.decode_row(0, &mut decoded);
            assert_eq!(plain, decoded, "{source_type}");
        }
    }
}

/// `oracle/gguf_blocks.py` wrote what the reference package makes of these blocks.
#[test]
fn decodes_as_the_reference_package() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf_blocks.safetensors");
    let fixture = safetensors::open_file(&path).unwrap();
    for source_type in TYPES {
        let blocks = fixture.tensor(&format!("{source_type}.blocks")).unwrap();
        let expected = fixture.tensor(&format!("{source_type}.expected")).unwrap();
        let columns = expected.info().columns();
        for row in 0..expected.info().rows() {
            let (mut found, mut wanted) = (vec![0.0; columns], vec![0.0; columns]);
            decode(source_type, blocks.row(row).unwrap(), &mut found);
            expected.read_f32(row..row + 1, &mut wanted).unwrap();
            assert_eq!(found, wanted, "{source_type}, row {row}");
        }
    }
}

#[test]
fn a_q4_0_block_by_hand() {
    // Scale 0.5; number 0 is (3 − 8), number 16 is (15 − 8), all others are −8.
    let mut block = [0u8; 18];
    block[..2].copy_from_slice(&f16::from_f32(0.5).to_le_bytes());
    block[2] = 0xf3;
    let mut out = [0.0; 32];
    decode(SourceType::Q4_0, &block, &mut out);
    assert_eq!((out[0], out[1], out[16]), (-2.5, -4.0, 3.5));
}
