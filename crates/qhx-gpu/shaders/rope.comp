#version 460
// Rotates pairs of numbers of heads.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 256) in;
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t turns; // [rows, frequencies, 2]
    uint64_t roles; // of each number of a head: its partner, its frequency, whether it is the second of the pair; partner NONE: unchanged
    uint64_t y;
    uint count;
    uint heads;
    uint dim;
    uint frequencies;
};

void main() {
    uint i = flat_index();
    if (i >= count) return;
    uint d = i % dim;
    uint row = i / (dim * heads);
    float v = Floats(x).at[i];
    uint partner = Words(roles).at[3u * d];
    if (partner != NONE) {
        uint f = Words(roles).at[3u * d + 1u];
        float cosine = Floats(turns).at[2u * (row * frequencies + f)];
        float sine = Floats(turns).at[2u * (row * frequencies + f) + 1u];
        float other = Floats(x).at[i - d + partner];
        v = v * cosine + (Words(roles).at[3u * d + 2u] == 1u ? other : -other) * sine;
    }
    Floats(y).at[i] = v;
}
