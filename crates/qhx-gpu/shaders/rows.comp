#version 460
// Moving rows: parts of rows (concat, slice), chosen rows (gather), rows put at chosen places (scatter).
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 256) in;
layout(constant_id = 0) const uint MODE = 0; // 0 part, 1 gather, 2 scatter, 3 scatter and add
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t index;
    uint64_t y;
    uint rows;
    uint width; // numbers that are moved of each row
    uint x_stride;
    uint x_first;
    uint y_stride;
    uint y_first;
};

void main() {
    uint i = flat_index();
    if (i >= rows * width) return;
    uint row = i / width;
    uint column = i % width;
    uint from = row;
    uint to = row;
    if (MODE == 1u) from = Words(index).at[row];
    if (MODE >= 2u) to = Words(index).at[row];
    float v = Floats(x).at[from * x_stride + x_first + column];
    uint place = to * y_stride + y_first + column;
    if (MODE == 3u) v += Floats(y).at[place];
    Floats(y).at[place] = v;
}
