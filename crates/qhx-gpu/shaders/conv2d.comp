#version 460
// 2-D convolution with zeros around each segment.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 256) in;
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t x; // [rows, width, inputs]
    uint64_t weight; // [outputs, kernel, kernel, inputs]
    uint64_t bias; // or 0
    uint64_t y; // [out_rows, out_width, outputs]
    uint out_rows;
    uint width;
    uint inputs;
    uint out_width;
    uint outputs;
    uint kernel;
    uint stride;
    uint rows_per_row; // of x
};

void main() {
    uint i = flat_index();
    if (i >= out_rows * out_width * outputs) return;
    uint o = i % outputs;
    uint column = i / outputs % out_width;
    uint out_row = i / (outputs * out_width);
    uint number = segment_of(Words(call), out_row * stride * rows_per_row);
    if (number == NONE) return;
    Segment s = segment(Words(call), number);
    uint first = s.first_row / rows_per_row;
    int valid = int((s.valid_rows + rows_per_row - 1u) / rows_per_row);
    int padding = int(kernel - 1u) / 2;
    float sum = bias == 0ul ? 0.0 : Floats(bias).at[o];
    for (uint a = 0u; a < kernel; a++) {
        int row = int(out_row * stride - first + a) - padding;
        if (row < 0 || row >= valid) continue;
        for (uint b = 0u; b < kernel; b++) {
            int at = int(column * stride + b) - padding;
            if (at < 0 || at >= int(width)) continue;
            uint from = ((first + uint(row)) * width + uint(at)) * inputs;
            uint taps = ((o * kernel + a) * kernel + b) * inputs;
            for (uint c = 0u; c < inputs; c++) sum += Floats(weight).at[taps + c] * Floats(x).at[from + c];
        }
    }
    Floats(y).at[i] = sum;
}
