#version 460
// Whole rows: gated, normed, with something added, scaled, and as products take them (rounded to f16 or int8, padded with zeros to whole blocks of 32). A row for each workgroup.
// variant row SUBGROUPS=1
// variant row_plain PLAIN=1
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(constant_id = 0) const uint GROUP = 256;
layout(local_size_x_id = 0) in;
#include "reduce.glsl"
layout(constant_id = 1) const uint RUNS = 1; // of an invocation
layout(constant_id = 2) const uint GATED = 0; // x is act(x) · up
layout(constant_id = 3) const uint FUNCTION = 0;
layout(constant_id = 4) const uint NORM = 0; // 1: by the root of the mean square, 2: layer norm
layout(constant_id = 5) const uint FORM = 0; // 0: none, 1: f32, 2: f16, 3: int8 by row, 4: int8 by 32, 5: each number as two f16, by row
#include "row.glsl"
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t up;
    uint64_t weight; // or 0
    uint64_t bias; // or 0
    uint64_t added; // or 0
    uint64_t factor; // a number, or 0
    uint64_t y; // or 0
    uint64_t numbers; // in the form
    uint64_t scales;
    uint rows;
    uint width;
    float eps;
    float low;
    float high;
    float scale;
};

// The power of two that brings a row whose largest number is `most` to where f16 is finest.
float towards_half(float most) {
    int exponent = clamp(14 - (int(floatBitsToUint(most) >> 23) - 127), -126, 126);
    return vanishes(most) ? 1.0 : uintBitsToFloat(uint(exponent + 127) << 23);
}
// A number as f16, and what that leaves over.
uint two_halves(float x) {
    uint high = half_bits(x);
    return high | half_bits(x - half_float(high)) << 16;
}

void main() {
    uint row = flat_group();
    if (row >= rows) return;
    uint first = row * width;
    hold_row(RowWork(x, up, weight, bias, first, width, eps, GATED, FUNCTION, NORM));
    end_row(added, factor, first, width, scale);
    if (y != 0ul) {
        [[unroll]] for (uint j = 0u; j < RUNS; j++) store4(y, first, 4u * run(j), width, held[j]);
    }
    if (FORM == 0u) return;
    uint blocks = (width + 31u) / 32u;
    bound_row(width, low, high);
    if (FORM < 3u) {
        [[unroll]] for (uint j = 0u; j < RUNS; j++) {
            vec4 v = held[j];
            if (FORM == 2u) [[unroll]] for (uint c = 0u; c < 4u; c++) v[c] = rounded_to_half(v[c]);
            if (run(j) < blocks * 8u) Vectors(numbers).at[row * blocks * 8u + run(j)] = v;
        }
        return;
    }
    float most = 0.0;
    if (FORM == 5u) {
        float upwards = towards_half(largest_of_row());
        if (gl_LocalInvocationID.x == 0u) Floats(scales).at[row] = 1.0 / upwards;
        [[unroll]] for (uint j = 0u; j < RUNS; j++) {
            uvec4 v;
            [[unroll]] for (uint c = 0u; c < 4u; c++) v[c] = two_halves(held[j][c] * upwards);
            if (run(j) < blocks * 8u) Quads(numbers).at[row * blocks * 8u + run(j)] = v;
        }
        return;
    }
    if (FORM == 3u) {
        most = largest_of_row();
        if (gl_LocalInvocationID.x == 0u) Floats(scales).at[row] = forward_scale(most);
    }
    float inverse = inverse_scale(most);
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        if (FORM == 4u) {
            most = largest_of_block(held[j]);
            inverse = inverse_scale(most);
            if ((run(j) & 7u) == 0u && run(j) < blocks * 8u) Floats(scales).at[row * blocks + run(j) / 8u] = forward_scale(most);
        }
        if (run(j) < blocks * 8u) Words(numbers).at[row * blocks * 8u + run(j)] = packed4(held[j], inverse);
    }
}
