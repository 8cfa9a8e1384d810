#version 460
// Rows as they enter products: bounded, rounded to f16 or to int8 with scales, padded with zeros to whole blocks of 32.
// variant prepare SUBGROUPS=1
// variant prepare_plain PLAIN=1
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 128) in;
const uint GROUP = 128u;
#include "reduce.glsl"
#include "quantise.glsl"
layout(constant_id = 0) const uint FORM = 0; // 0 f32, 1 f16, 2 int8 by row, 3 int8 by 32
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t y; // floats, or words of four int8
    uint64_t scales;
    uint rows;
    uint width;
    float low;
    float high;
};

float number(uint first, uint i) { return i < width ? min(max(Floats(x).at[first + i], low), high) : 0.0; }

void main() {
    uint row = flat_group();
    if (row >= rows) return;
    uint first = row * width;
    uint blocks = (width + 31u) / 32u;
    if (FORM < 2u) {
        for (uint i = gl_LocalInvocationID.x; i < blocks * 32u; i += GROUP) {
            float v = number(first, i);
            Floats(y).at[row * blocks * 32u + i] = FORM == 1u ? rounded_to_half(v) : v;
        }
        return;
    }
    if (FORM == 2u) {
        float most = 0.0;
        for (uint i = gl_LocalInvocationID.x; i < width; i += GROUP) most = max(most, abs(number(first, i)));
        most = group_max(most);
        float inverse = inverse_scale(most);
        for (uint word = gl_LocalInvocationID.x; word < blocks * 8u; word += GROUP) {
            uint packed = 0u;
            [[unroll]] for (uint j = 0u; j < 4u; j++) packed |= quantised(number(first, word * 4u + j), inverse) << (8u * j);
            Words(y).at[row * blocks * 8u + word] = packed;
        }
        if (gl_LocalInvocationID.x == 0u) Floats(scales).at[row] = forward_scale(most);
        return;
    }
    for (uint block = gl_LocalInvocationID.x; block < blocks; block += GROUP) {
        float most = 0.0;
        for (uint i = 0u; i < 32u; i++) most = max(most, abs(number(first, block * 32u + i)));
        float inverse = inverse_scale(most);
        for (uint word = 0u; word < 8u; word++) {
            uint packed = 0u;
            [[unroll]] for (uint j = 0u; j < 4u; j++) packed |= quantised(number(first, block * 32u + word * 4u + j), inverse) << (8u * j);
            Words(y).at[(row * blocks + block) * 8u + word] = packed;
        }
        Floats(scales).at[row * blocks + block] = forward_scale(most);
    }
}
