#version 460
// Puts the splits of attention together.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 128) in;
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t x; // of each row, head and split: the numbers, the largest score, the sum
    uint64_t y;
    uint rows;
    uint heads;
    uint dim;
    uint splits;
};

void main() {
    uint row = gl_WorkGroupID.x + gl_WorkGroupID.z * gl_NumWorkGroups.x;
    uint head = gl_WorkGroupID.y;
    if (row >= rows || segment_of(Words(call), row) == NONE) return;
    Floats from = Floats(x + 4ul * uint64_t((row * heads + head) * splits) * (dim + 2u));
    float most = LOWEST;
    for (uint i = 0u; i < splits; i++) most = max(most, from.at[i * (dim + 2u) + dim]);
    float sum = 0.0;
    for (uint i = 0u; i < splits; i++) sum += from.at[i * (dim + 2u) + dim + 1u] * exp(from.at[i * (dim + 2u) + dim] - most);
    for (uint d = gl_LocalInvocationID.x; d < dim; d += 128u) {
        float v = 0.0;
        for (uint i = 0u; i < splits; i++) v += from.at[i * (dim + 2u) + d] * exp(from.at[i * (dim + 2u) + dim] - most);
        Floats(y).at[(row * heads + head) * dim + d] = v / sum;
    }
}
