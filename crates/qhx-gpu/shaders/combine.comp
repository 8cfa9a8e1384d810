#version 460
// Adds up what a row's chosen experts gave, each times its weight, and something else.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 256) in;
layout(push_constant) uniform Arguments {
    uint64_t x; // [rows, choices, width]
    uint64_t weights;
    uint64_t added; // or 0
    uint64_t chosen;
    uint64_t places; // of experts, or 0
    uint64_t y;
    uint count; // of numbers of y
    uint width;
    uint choices;
};

void main() {
    uint i = flat_index();
    if (i >= count) return;
    uint row = i / width;
    float all = 0.0;
    for (uint choice = 0u; choice < choices; choice++) {
        uint pair = row * choices + choice;
        if (expert_place(Words(chosen).at[pair], places, NONE) == NONE) continue;
        all += Floats(weights).at[pair] * Floats(x + 4ul * (uint64_t(pair) * width + i % width)).at[0];
    }
    Floats(y).at[i] = added == 0ul ? all : all + Floats(added).at[i];
}
