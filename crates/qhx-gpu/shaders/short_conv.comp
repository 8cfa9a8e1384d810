#version 460
// Causal convolution over rows, channel by channel, and the rows that the next call needs of it.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 256) in;
layout(constant_id = 0) const uint MODE = 0; // 0 results, 1 the slot after the call, 2 the slot after some recorded rows
layout(constant_id = 1) const uint FUNCTION = 99;
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t x; // in mode 2 the record
    uint64_t weight;
    uint64_t bias; // or 0
    uint64_t y; // in mode 2 the slot's new content
    uint64_t old; // in mode 2 the slot's old content, or 0
    uint rows; // in mode 2 how many of the recorded rows count
    uint channels;
    uint kernel;
    uint slot; // place among recurrent slots, or NONE
    uint rows_per_row;
};

float before(uint64_t content, uint row, uint c) { return content == 0ul ? 0.0 : Floats(content).at[row * channels + c]; }

void main() {
    uint i = flat_index();
    uint c = i % channels;
    uint row = i / channels;
    uint kept = kernel - 1u;
    if (MODE == 2u) {
        if (row >= kept) return;
        uint from = rows + row;
        Floats(y).at[i] = from < kept ? before(old, from, c) : Floats(x).at[(from - kept) * channels + c];
        return;
    }
    if (MODE == 1u) {
        uint number = row / kept;
        if (number >= segments(Words(call))) return;
        Segment s = segment(Words(call), number);
        uint place = s.recurrent + 6u * slot;
        uint from = (s.valid_rows + rows_per_row - 1u) / rows_per_row + row % kept;
        uint first = s.first_row / rows_per_row;
        float v = from < kept ? before(address(Words(call), place), from, c) : Floats(x).at[(first + from - kept) * channels + c];
        Floats(address(Words(call), place + 2u)).at[row % kept * channels + c] = v;
        return;
    }
    if (row >= rows) return;
    uint number = segment_of(Words(call), row * rows_per_row);
    if (number == NONE) return;
    Segment s = segment(Words(call), number);
    uint first = s.first_row / rows_per_row;
    uint64_t content = slot == NONE ? 0ul : address(Words(call), s.recurrent + 6u * slot);
    float sum = bias == 0ul ? 0.0 : Floats(bias).at[c];
    for (uint j = 0u; j < kernel; j++) {
        uint at = row - first + j; // among the kept rows and the segment's own
        float v = at < kept ? before(content, at, c) : Floats(x).at[(first + at - kept) * channels + c];
        sum += Floats(weight).at[c * kernel + j] * v;
    }
    Floats(y).at[i] = activate(FUNCTION, sum);
    if (slot != NONE) {
        uint64_t record = address(Words(call), s.recurrent + 6u * slot + 4u);
        if (record != 0ul) Floats(record).at[(row - first) * channels + c] = Floats(x).at[i];
    }
}
