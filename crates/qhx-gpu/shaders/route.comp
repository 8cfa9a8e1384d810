#version 460
// Chooses experts, a row for each invocation.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "route.glsl"
layout(local_size_x = 64) in;
layout(constant_id = 0) const uint MIXER = 0; // 1: two winners, each with its band
layout(push_constant) uniform Arguments {
    uint64_t scores;
    uint64_t chosen;
    uint64_t weights;
    uint rows;
    uint experts;
    uint top;
    uint renormalise;
    float band; // twice the jitter
};

void main() {
    uint row = flat_index();
    if (row >= rows) return;
    route(scores, chosen, weights, row, experts, MIXER, top, renormalise, band);
}
