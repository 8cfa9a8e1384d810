#version 460
// Heads: normed where there is a norm before, then pairs of numbers rotated. A head of a row for each workgroup.
// variant rope SUBGROUPS=1
// variant rope_plain PLAIN=1
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 64) in;
const uint GROUP = 64u;
#include "reduce.glsl"
layout(constant_id = 0) const uint DIM = 64;
layout(constant_id = 1) const uint NORM = 0;
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t weight; // of the norm, or 0
    uint64_t turns; // [rows, frequencies, 2]
    uint64_t roles; // of each number of a head: its partner, its frequency, whether it is the second of the pair; partner NONE: unchanged
    uint64_t y;
    uint count; // of heads of rows
    uint heads;
    uint frequencies;
    float eps;
};
shared float head[DIM];

void main() {
    uint number = flat_group();
    if (number >= count) return;
    uint row = number / heads;
    uint first = number * DIM;
    float squares = 0.0;
    for (uint d = gl_LocalInvocationID.x; d < DIM; d += GROUP) {
        float v = Floats(x).at[first + d];
        head[d] = v;
        squares += v * v;
    }
    barrier();
    float factor = 1.0;
    if (NORM == 1u) factor = 1.0 / sqrt(group_sum(squares) / float(DIM) + eps);
    for (uint d = gl_LocalInvocationID.x; d < DIM; d += GROUP) {
        float v = head[d] * factor;
        if (NORM == 1u && weight != 0ul) v *= Floats(weight).at[d];
        uint partner = Words(roles).at[3u * d];
        if (partner != NONE) {
            uint f = Words(roles).at[3u * d + 1u];
            float cosine = Floats(turns).at[2u * (row * frequencies + f)];
            float sine = Floats(turns).at[2u * (row * frequencies + f) + 1u];
            float other = head[partner] * factor;
            if (NORM == 1u && weight != 0ul) other *= Floats(weight).at[partner];
            v = v * cosine + (Words(roles).at[3u * d + 2u] == 1u ? other : -other) * sine;
        }
        Floats(y).at[first + d] = v;
    }
}
