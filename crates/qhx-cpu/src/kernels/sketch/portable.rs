//! Dot products of codes and bytes, number by number.

use super::{BLOCK, Shape};

/// `out[r]` becomes the bits of `Σ code · x`, for each row of `planes`.
pub(super) fn dots(shape: Shape, planes: &[u8], x: &[i8], out: &mut [f32]) {
    for (planes, out) in planes.chunks_exact(shape.stride()).zip(out) {
        let (nibbles, bits) = planes.split_at(shape.blocks() * BLOCK / 2);
        let mut dot = 0;
        for (block, x) in x.chunks_exact(BLOCK).take(shape.blocks()).enumerate() {
            for (i, &x) in x.iter().enumerate() {
                let byte = nibbles[block * BLOCK / 2 + i % (BLOCK / 2)];
                let mut code = if i < BLOCK / 2 { byte & 15 } else { byte >> 4 };
                if shape.extra == 1 {
                    code = code << 1 | bits[block * BLOCK / 8 + i / 8] >> (i % 8) & 1;
                }
                dot += code as i32 * x as i32;
            }
        }
        *out = f32::from_bits(dot.cast_unsigned());
    }
}
