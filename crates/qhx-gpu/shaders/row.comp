#version 460
// Whole rows: gated, normed, and as products take them (rounded to f16 or int8, padded with zeros to whole blocks of 32). A row for each workgroup; every invocation
// holds some runs of four numbers.
// variant row SUBGROUPS=1
// variant row_plain PLAIN=1
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(constant_id = 0) const uint GROUP = 256;
layout(local_size_x_id = 0) in;
#include "reduce.glsl"
#include "quantise.glsl"
layout(constant_id = 1) const uint RUNS = 1; // of an invocation
layout(constant_id = 2) const uint GATED = 0; // x is act(x) · up
layout(constant_id = 3) const uint FUNCTION = 0;
layout(constant_id = 4) const uint NORM = 0; // 1: by the root of the mean square, 2: layer norm
layout(constant_id = 5) const uint FORM = 0; // 0: none, 1: f32, 2: f16, 3: int8 by row, 4: int8 by 32
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t up;
    uint64_t weight; // or 0
    uint64_t bias; // or 0
    uint64_t y; // or 0
    uint64_t numbers; // in the form
    uint64_t scales;
    uint rows;
    uint width;
    float eps;
    float low;
    float high;
};
shared float run_most[GROUP];
vec4 held[RUNS];

uint run(uint j) { return j * GROUP + gl_LocalInvocationID.x; }

vec4 load4(uint64_t from, uint first, uint i) {
    if (width % 4u == 0u) return i < width ? Vectors(from + 4ul * uint64_t(first + i)).at[0] : vec4(0.0);
    vec4 v = vec4(0.0);
    [[unroll]] for (uint c = 0u; c < 4u; c++) if (i + c < width) v[c] = Floats(from).at[first + i + c];
    return v;
}
// Zero behind the end of the row.
vec4 within(vec4 v, uint i) {
    if (width % 4u == 0u && i < width) return v;
    [[unroll]] for (uint c = 0u; c < 4u; c++) if (i + c >= width) v[c] = 0.0;
    return v;
}

void main() {
    uint row = flat_group();
    if (row >= rows) return;
    uint first = row * width;
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        vec4 v = load4(x, first, 4u * run(j));
        if (GATED == 1u) {
            vec4 u = load4(up, first, 4u * run(j));
            [[unroll]] for (uint c = 0u; c < 4u; c++) v[c] = activate(FUNCTION, v[c]) * u[c];
        }
        held[j] = v;
    }
    if (NORM != 0u) {
        float mean = 0.0;
        if (NORM == 2u) {
            float sum = 0.0;
            [[unroll]] for (uint j = 0u; j < RUNS; j++) sum += dot(held[j], vec4(1.0));
            mean = group_sum(sum) / float(width);
            [[unroll]] for (uint j = 0u; j < RUNS; j++) held[j] = within(held[j] - mean, 4u * run(j));
        }
        float squares = 0.0;
        [[unroll]] for (uint j = 0u; j < RUNS; j++) squares += dot(held[j], held[j]);
        float factor = 1.0 / sqrt(group_sum(squares) / float(width) + eps);
        [[unroll]] for (uint j = 0u; j < RUNS; j++) {
            held[j] *= factor;
            if (weight != 0ul) held[j] *= load4(weight, 0u, 4u * run(j));
            if (bias != 0ul) held[j] += load4(bias, 0u, 4u * run(j));
        }
    }
    if (y != 0ul) {
        [[unroll]] for (uint j = 0u; j < RUNS; j++) {
            uint i = 4u * run(j);
            if (width % 4u == 0u) {
                if (i < width) Vectors(y + 4ul * uint64_t(first + i)).at[0] = held[j];
            } else {
                [[unroll]] for (uint c = 0u; c < 4u; c++) if (i + c < width) Floats(y).at[first + i + c] = held[j][c];
            }
        }
    }
    if (FORM == 0u) return;
    uint blocks = (width + 31u) / 32u;
    [[unroll]] for (uint j = 0u; j < RUNS; j++) held[j] = within(min(max(held[j], low), high), 4u * run(j));
    if (FORM < 3u) {
        [[unroll]] for (uint j = 0u; j < RUNS; j++) {
            vec4 v = held[j];
            if (FORM == 2u) [[unroll]] for (uint c = 0u; c < 4u; c++) v[c] = rounded_to_half(v[c]);
            if (run(j) < blocks * 8u) Vectors(numbers).at[row * blocks * 8u + run(j)] = v;
        }
        return;
    }
    float most = 0.0;
    if (FORM == 3u) {
        [[unroll]] for (uint j = 0u; j < RUNS; j++) {
            vec4 a = abs(held[j]);
            most = max(most, max(max(a.x, a.y), max(a.z, a.w)));
        }
        most = group_max(most);
        if (gl_LocalInvocationID.x == 0u) Floats(scales).at[row] = forward_scale(most);
    }
    float inverse = inverse_scale(most);
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        if (FORM == 4u) {
            vec4 a = abs(held[j]);
            barrier();
            run_most[gl_LocalInvocationID.x] = max(max(a.x, a.y), max(a.z, a.w));
            barrier();
            // Eight runs are a block.
            most = 0.0;
            uint begin = gl_LocalInvocationID.x & ~7u;
            [[unroll]] for (uint k = 0u; k < 8u; k++) most = max(most, run_most[begin + k]);
            inverse = inverse_scale(most);
            if ((run(j) & 7u) == 0u && run(j) < blocks * 8u) Floats(scales).at[row * blocks + run(j) / 8u] = forward_scale(most);
        }
        uint packed = 0u;
        [[unroll]] for (uint c = 0u; c < 4u; c++) packed |= quantised(held[j][c], inverse) << (8u * c);
        if (run(j) < blocks * 8u) Words(numbers).at[row * blocks * 8u + run(j)] = packed;
    }
}
