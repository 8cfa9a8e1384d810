//! The block formats of GGUF: plain decoding, and splitting into the bundle's layout without loss.
//!
//! Every supported format is `q · scale`, or `q · scale + min`, over blocks of 16 or 32 numbers. GGUF keeps quants, scales and minima of a block together,
//! often in fewer bits than a byte; the bundle keeps them apart. Splitting never rounds: products of a super-block's f16 scale and a 6- or 8-bit
//! factor are exact in f32.
//!
//! | GGUF | quants | block | scale, minimum |
//! |---|---|---|---|
//! | Q8_0 | int8 | 32 | f16 |
//! | Q4_0 | int4 (q − 8) | 32 | f16 |
//! | Q4_1 | int4 | 32 | f16, with minimum |
//! | Q5_0 | int8 (q − 16) | 32 | f16 |
//! | Q5_1 | int8 (0..=31) | 32 | f16, with minimum |
//! | Q4_K | int4 | 32 | f32, with minimum |
//! | Q5_K | int8 (0..=31) | 32 | f32, with minimum |
//! | Q6_K | int8 (q − 32) | 16 | f32 |

use super::SourceType;
use half::f16;
use qhx_ir::{BlockEncoding, Quants, ScaleType};

/// The bundle encoding that a GGUF block type becomes; `None` for types without blocks.
pub fn encoding(source_type: SourceType) -> Option<BlockEncoding> {
    let (quants, block, min, scale) = match source_type {
        SourceType::Q8_0 => (Quants::I8, 32, false, ScaleType::F16),
        SourceType::Q4_0 => (Quants::I4, 32, false, ScaleType::F16),
        SourceType::Q4_1 => (Quants::I4, 32, true, ScaleType::F16),
        SourceType::Q5_0 => (Quants::I8, 32, false, ScaleType::F16),
        SourceType::Q5_1 => (Quants::I8, 32, true, ScaleType::F16),
        SourceType::Q4K => (Quants::I4, 32, true, ScaleType::F32),
        SourceType::Q5K => (Quants::I8, 32, true, ScaleType::F32),
        SourceType::Q6K => (Quants::I8, 16, false, ScaleType::F32),
        _ => return None,
    };
    Some(BlockEncoding { quants, block, min, scale })
}

/// Bytes of quants, number of scales and number of minima that a row of `columns` numbers splits into (before any padding).
pub fn split_lengths(encoding: BlockEncoding, columns: usize) -> (usize, usize, usize) {
    let blocks = columns / encoding.block;
    let quants = match encoding.quants {
        Quants::I8 => columns,
        Quants::I6 => columns / 4 * 3,
        Quants::I4 => columns / 2,
    };
    (quants, blocks, if encoding.min { blocks } else { 0 })
}

/// Splits whole blocks into quants (signed bytes, or two int4 in a byte as in [`qhx_ir::encoding`]), scales and minima.
///
/// Scales and minima come as f32; for encodings with f16 scales every one of them is an f16 number. Lengths must be those of
/// [`split_lengths`]; types without blocks are not accepted.
pub fn split(source_type: SourceType, source: &[u8], quants: &mut [u8], scales: &mut [f32], minima: &mut [f32]) {
    let (numbers, bytes) = source_type.block();
    let blocks = source.len() / bytes;
    let lengths = encoding(source_type).map(|e| split_lengths(e, blocks * numbers));
    assert_eq!(lengths, Some((quants.len(), scales.len(), minima.len())), "a row of {source_type} does not fit these buffers");
    assert_eq!(source.len() % bytes, 0, "{source_type} needs whole blocks");
    if blocks == 0 {
        return;
    }
    let (q, s, m) = (quants.len() / blocks, scales.len() / blocks, minima.len() / blocks);
    for (i, block) in source.chunks_exact(bytes).enumerate() {
        let (quants, scales, minima) = (&mut quants[i * q..][..q], &mut scales[i * s..][..s], &mut minima[i * m..][..m]);
        match source_type {
            SourceType::Q8_0 => {
                scales[0] = f16_at(block, 0);
                quants.copy_from_slice(&block[2..]);
            }
            SourceType::Q4_0 => {
                scales[0] = f16_at(block, 0);
                quants.copy_from_slice(&block[2..]); // the same packing
            }
            SourceType::Q4_1 => {
                (scales[0], minima[0]) = (f16_at(block, 0), f16_at(block, 2));
                quants.copy_from_slice(&block[4..]); // the same packing
            }
            SourceType::Q5_0 => {
                scales[0] = f16_at(block, 0);
                five_bits(&block[2..], |j, q| quants[j] = q.wrapping_sub(16));
            }
            SourceType::Q5_1 => {
                (scales[0], minima[0]) = (f16_at(block, 0), f16_at(block, 2));
                five_bits(&block[4..], |j, q| quants[j] = q);
            }
            SourceType::Q4K => {
                k_scales(block, |j, scale, min| (scales[j], minima[j]) = (scale, -min));
                // 64 numbers in 32 bytes: first all low halves, then all high ones.
                for (packed, quants) in block[16..].chunks_exact(32).zip(quants.chunks_exact_mut(32)) {
                    for j in 0..16 {
                        quants[j] = packed[j] & 15 | packed[j + 16] << 4;
                        quants[j + 16] = packed[j] >> 4 | packed[j + 16] & 0xf0;
                    }
                }
            }
            SourceType::Q5K => {
                k_scales(block, |j, scale, min| (scales[j], minima[j]) = (scale, -min));
                q5k_quants(block, |j, q| quants[j] = q);
            }
            SourceType::Q6K => {
                let d = f16_at(block, 208);
                for (scale, &factor) in scales.iter_mut().zip(&block[192..208]) {
                    *scale = d * (factor as i8) as f32;
                }
                q6k_quants(block, |j, q| quants[j] = q as u8);
            }
            _ => {} // excluded above
        }
    }
}

/// Decodes whole blocks to f32, straight from the definition of each format. Types without blocks are not accepted.
pub fn decode(source_type: SourceType, source: &[u8], out: &mut [f32]) {
    let (numbers, bytes) = source_type.block();
    assert!(encoding(source_type).is_some(), "{source_type} has no blocks");
    assert!(
        source.len() % bytes == 0 && source.len() / bytes * numbers == out.len(),
        "{source_type}: source and destination differ in length"
    );
    for (block, out) in source.chunks_exact(bytes).zip(out.chunks_exact_mut(numbers)) {
        match source_type {
            SourceType::Q8_0 => {
                let d = f16_at(block, 0);
                for (out, &q) in out.iter_mut().zip(&block[2..]) {
                    *out = (q as i8) as f32 * d;
                }
            }
            SourceType::Q4_0 => {
                let d = f16_at(block, 0);
                four_bits(&block[2..], |j, q| out[j] = (q as f32 - 8.0) * d);
            }
            SourceType::Q4_1 => {
                let (d, m) = (f16_at(block, 0), f16_at(block, 2));
                four_bits(&block[4..], |j, q| out[j] = q as f32 * d + m);
            }
            SourceType::Q5_0 => {
                let d = f16_at(block, 0);
                five_bits(&block[2..], |j, q| out[j] = (q as f32 - 16.0) * d);
            }
            SourceType::Q5_1 => {
                let (d, m) = (f16_at(block, 0), f16_at(block, 2));
                five_bits(&block[4..], |j, q| out[j] = q as f32 * d + m);
            }
            SourceType::Q4K => {
                let (mut scales, mut minima) = ([0.0; 8], [0.0; 8]);
                k_scales(block, |j, scale, min| (scales[j], minima[j]) = (scale, min));
                for (j, out) in out.iter_mut().enumerate() {
                    let byte = block[16 + j / 64 * 32 + j % 32];
                    let q = if j % 64 < 32 { byte & 15 } else { byte >> 4 };
                    *out = q as f32 * scales[j / 32] - minima[j / 32];
                }
            }
            SourceType::Q5K => {
                let (mut scales, mut minima) = ([0.0; 8], [0.0; 8]);
                k_scales(block, |j, scale, min| (scales[j], minima[j]) = (scale, min));
                q5k_quants(block, |j, q| out[j] = q as f32 * scales[j / 32] - minima[j / 32]);
            }
            SourceType::Q6K => {
                let d = f16_at(block, 208);
                q6k_quants(block, |j, q| out[j] = d * (block[192 + j / 16] as i8) as f32 * q as f32);
            }
            _ => {} // excluded above
        }
    }
}

fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// 32 numbers of 4 bits in 16 bytes: the low halves are numbers 0..16, the high ones 16..32.
fn four_bits(packed: &[u8], mut each: impl FnMut(usize, u8)) {
    for (j, &byte) in packed[..16].iter().enumerate() {
        each(j, byte & 15);
        each(j + 16, byte >> 4);
    }
}

/// 32 numbers of 5 bits: 4 bytes with the fifth bits, then the lower four as in [`four_bits`].
fn five_bits(packed: &[u8], mut each: impl FnMut(usize, u8)) {
    let high = u32::from_le_bytes([packed[0], packed[1], packed[2], packed[3]]);
    four_bits(&packed[4..], |j, q| each(j, q | ((high >> j & 1) as u8) << 4));
}

/// The eight scales and minima of a Q4_K or Q5_K super-block: two f16, then 16 factors of 6 bits in 12 bytes.
fn k_scales(block: &[u8], mut each: impl FnMut(usize, f32, f32)) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    let packed = &block[4..16];
    for j in 0..8 {
        let (scale, min) = if j < 4 {
            (packed[j] & 63, packed[j + 4] & 63)
        } else {
            (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
        };
        each(j, d * scale as f32, dmin * min as f32);
    }
}

/// The 256 numbers (0..=31) of a Q5_K super-block: fifth bits in 32 bytes at 16, lower four in 128 bytes at 48.
fn q5k_quants(block: &[u8], mut each: impl FnMut(usize, u8)) {
    for j in 0..256 {
        let byte = block[48 + j / 64 * 32 + j % 32];
        let low = if j % 64 < 32 { byte & 15 } else { byte >> 4 };
        let high = block[16 + j % 32] >> (j / 32) & 1;
        each(j, low | high << 4);
    }
}

/// The 256 numbers (−32..=31) of a Q6_K super-block: lower four bits in 128 bytes, upper two in the next 64.
fn q6k_quants(block: &[u8], mut each: impl FnMut(usize, i8)) {
    for j in 0..256 {
        let (half, quarter, l) = (j / 128, j % 128 / 32, j % 32);
        let byte = block[half * 64 + quarter % 2 * 32 + l];
        let low = if quarter < 2 { byte & 15 } else { byte >> 4 };
        let high = block[128 + half * 32 + l] >> (2 * quarter) & 3;
        each(j, (low | high << 4) as i8 - 32);
    }
}

#[cfg(test)]
mod tests;
