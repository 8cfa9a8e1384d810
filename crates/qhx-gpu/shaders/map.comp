#version 460
// Elementwise operations.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "map.glsl"
layout(local_size_x = 256) in;
layout(constant_id = 0) const uint OPERATION = 0;
layout(constant_id = 1) const uint FUNCTION = 0;
layout(push_constant) uniform Arguments {
    uint64_t a;
    uint64_t b;
    uint64_t y;
    uint count;
    uint width; // numbers of b, where it is a weight
    float low;
    float high;
};

void main() {
    uint i = flat_index();
    if (i >= count) return;
    Floats(y).at[i] = mapped(OPERATION, FUNCTION, Floats(a).at[i], b, i, width, low, high);
}
