#version 460
// Rows of a table, or weighted sums of them.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "weight.glsl"
layout(local_size_x = 256) in;
layout(constant_id = 4) const uint TAPS = 0; // 0: one row, unweighted
layout(push_constant) uniform Arguments {
    uint64_t ids;
    uint64_t factors;
    uint64_t data;
    uint64_t scales;
    uint64_t minima;
    uint64_t y;
    uint rows;
    uint width;
    uint data_bytes; // of a row
    uint scale_bytes;
    uint min_bytes;
    float scale;
};

float table(uint id, uint column) {
    return weight_number(data + uint64_t(id) * data_bytes, scales + uint64_t(id) * scale_bytes, minima + uint64_t(id) * min_bytes, column);
}

void main() {
    uint i = flat_index();
    if (i >= rows * width) return;
    uint row = i / width;
    uint column = i % width;
    float v = 0.0;
    if (TAPS == 0u) {
        v = table(Words(ids).at[row], column) * scale;
    } else {
        for (uint tap = 0u; tap < TAPS; tap++) {
            v += Floats(factors).at[row * TAPS + tap] * table(Words(ids).at[row * TAPS + tap], column);
        }
    }
    Floats(y).at[i] = v;
}
