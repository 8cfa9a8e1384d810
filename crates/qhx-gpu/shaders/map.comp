#version 460
// Elementwise: sums, products, gates, functions, bounds.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
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
    float x = Floats(a).at[i];
    switch (OPERATION) {
        case 0: x += Floats(b).at[i]; break;
        case 1: x *= Floats(b).at[i]; break;
        case 2: x = activate(FUNCTION, x) * Floats(b).at[i]; break;
        case 3: x = activate(FUNCTION, x); break;
        case 4: x = x * low * Floats(b).at[i % width]; break;
        case 5: x = x * low; break;
        case 6: x = low * safe_tanh(x / low); break;
        case 7: x = min(max(x, low), high); break;
    }
    Floats(y).at[i] = x;
}
