#version 460
// Means of neighbouring rows.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 256) in;
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t x;
    uint64_t y;
    uint rows; // of the result
    uint width;
    uint size;
    uint rows_per_row; // of x
};

void main() {
    uint i = flat_index();
    if (i >= rows * width) return;
    uint c = i % width;
    uint row = i / width;
    uint number = segment_of(Words(call), row * size * rows_per_row);
    if (number == NONE) return;
    Segment s = segment(Words(call), number);
    uint end = s.first_row / rows_per_row + (s.valid_rows + rows_per_row - 1u) / rows_per_row;
    uint count = min((row + 1u) * size, end) - row * size;
    float sum = 0.0;
    for (uint j = 0u; j < count; j++) sum += Floats(x).at[(row * size + j) * width + c];
    Floats(y).at[i] = sum / float(count);
}
