#version 460
// Norms over the last dimension, a row for each workgroup.
// variant norm SUBGROUPS=1
// variant norm_plain PLAIN=1
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 256) in;
const uint GROUP = 256u;
#include "reduce.glsl"
layout(constant_id = 0) const uint MEAN = 0; // a layer norm
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t weight; // or 0
    uint64_t bias; // or 0
    uint64_t y;
    uint rows;
    uint width;
    float eps;
};

void main() {
    uint row = flat_group();
    if (row >= rows) return;
    uint first = row * width;
    float mean = 0.0;
    if (MEAN == 1u) {
        float sum = 0.0;
        for (uint i = gl_LocalInvocationID.x; i < width; i += GROUP) sum += Floats(x).at[first + i];
        mean = group_sum(sum) / float(width);
    }
    float squares = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < width; i += GROUP) {
        float v = Floats(x).at[first + i] - mean;
        squares += v * v;
    }
    float factor = 1.0 / sqrt(group_sum(squares) / float(width) + eps);
    for (uint i = gl_LocalInvocationID.x; i < width; i += GROUP) {
        float v = (Floats(x).at[first + i] - mean) * factor;
        if (weight != 0ul) v *= Floats(weight).at[i];
        if (bias != 0ul) v += Floats(bias).at[i];
        Floats(y).at[first + i] = v;
    }
}
