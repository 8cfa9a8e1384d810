#version 460
// Puts the splits of attention together.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 128) in;
layout(constant_id = 0) const uint DIM = 64;
layout(constant_id = 1) const uint FORMED = 0; // 1: results are also stored as int8 with a scale for each 32
#include "heads.glsl"
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t x; // of each row, head and split: the numbers, the largest score, the sum
    uint64_t y;
    uint64_t numbers; // the results as int8, and their scales
    uint64_t scales;
    uint rows;
    uint heads;
    uint splits;
};

float share(float own, float most) { return own == most ? 1.0 : exp(own - most); }

void main() {
    uint row = gl_WorkGroupID.x + gl_WorkGroupID.z * gl_NumWorkGroups.x;
    uint head = gl_WorkGroupID.y;
    if (row >= rows || segment_of(Words(call), row) == NONE) return;
    Floats from = Floats(x + 4ul * uint64_t((row * heads + head) * splits) * (DIM + 2u));
    float most = LOWEST;
    for (uint i = 0u; i < splits; i++) most = max(most, from.at[i * (DIM + 2u) + DIM]);
    // A split without keys changes nothing, and a single one is what it is without splits.
    precise float sum = 0.0;
    for (uint i = 0u; i < splits; i++) sum = fma(from.at[i * (DIM + 2u) + DIM + 1u], share(from.at[i * (DIM + 2u) + DIM], most), sum);
    for (uint d = gl_LocalInvocationID.x; d < DIM; d += 128u) {
        precise float v = 0.0;
        for (uint i = 0u; i < splits; i++) v = fma(from.at[i * (DIM + 2u) + d], share(from.at[i * (DIM + 2u) + DIM], most), v);
        v /= sum;
        if (FORMED == 1u) finished[d] = v;
        Floats(y).at[(row * heads + head) * DIM + d] = v;
    }
    if (FORMED == 0u) return;
    barrier();
    uint run = gl_LocalInvocationID.x;
    if (run < DIM / 4u) store_formed(numbers, scales, (row * heads + head) * DIM, run);
}
