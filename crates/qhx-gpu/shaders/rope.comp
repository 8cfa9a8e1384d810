#version 460
// Heads: normed where there is a norm before, then pairs of numbers rotated. A head of a row for each workgroup. Keys go to the pages of their sessions, with their values.
// variant rope SUBGROUPS=1
// variant rope_plain PLAIN=1
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 64) in;
const uint GROUP = 64u;
#include "reduce.glsl"
layout(constant_id = 0) const uint DIM = 64;
layout(constant_id = 1) const uint NORM = 0;
layout(constant_id = 2) const uint KEPT = 0; // 0: the heads are only stored; 1: keys of f32 pages, 2: of f16 pages
#define SLOT KEPT
#include "pages.glsl"
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t weight; // of the norm, or 0
    uint64_t turns; // [rows, frequencies, 2]
    uint64_t roles; // of each number of a head: its partner, its frequency, whether it is the second of the pair; partner NONE: unchanged
    uint64_t y; // or 0
    uint64_t call; // of keys that are kept, their values and where their slot begins in a page
    uint64_t v;
    uint64_t offset;
    uint count; // of heads of rows
    uint heads;
    uint frequencies;
    float eps;
};
shared float head[DIM];
shared float turned[DIM];

// Two numbers, from an even one on, as f16.
uint pair_of_halves(float low, float high) { return half_bits(low) | half_bits(high) << 16; }

void main() {
    uint number = flat_group();
    if (number >= count) return;
    uint row = number / heads;
    uint first = number * DIM;
    float squares = 0.0;
    for (uint d = gl_LocalInvocationID.x; d < DIM; d += GROUP) {
        float number_of_head = Floats(x).at[first + d];
        head[d] = number_of_head;
        squares += number_of_head * number_of_head;
    }
    barrier();
    float factor = 1.0;
    if (NORM == 1u) factor = 1.0 / sqrt(group_sum(squares) / float(DIM) + eps);
    for (uint d = gl_LocalInvocationID.x; d < DIM; d += GROUP) {
        float own = head[d] * factor;
        if (NORM == 1u && weight != 0ul) own *= Floats(weight).at[d];
        uint partner = Words(roles).at[3u * d];
        if (partner != NONE) {
            uint f = Words(roles).at[3u * d + 1u];
            float cosine = Floats(turns).at[2u * (row * frequencies + f)];
            float sine = Floats(turns).at[2u * (row * frequencies + f) + 1u];
            float other = head[partner] * factor;
            if (NORM == 1u && weight != 0ul) other *= Floats(weight).at[partner];
            own = own * cosine + (Words(roles).at[3u * d + 2u] == 1u ? other : -other) * sine;
        }
        if (y != 0ul) Floats(y).at[first + d] = own;
        if (KEPT != 0u) turned[d] = own;
    }
    if (KEPT == 0u) return;
    barrier();
    uint segment_number = segment_of(Words(call), row);
    if (segment_number == NONE) return;
    Segment s = segment(Words(call), min(segment_number, segments(Words(call)) - 1u));
    uint64_t keys = key_row(Words(call), s, offset, s.before + row - s.first_row, heads, number % heads, DIM);
    uint64_t values = keys + slot_half(heads, DIM);
    for (uint word = gl_LocalInvocationID.x; word < row_words(DIM); word += GROUP) {
        if (KEPT == 1u) {
            Floats(keys).at[word] = turned[word];
            Floats(values).at[word] = Floats(v).at[first + word];
        } else {
            // Behind an odd number of them stands 0.
            uint last = min(2u * word + 1u, DIM - 1u);
            bool both = last > 2u * word;
            Words(keys).at[word] = pair_of_halves(turned[2u * word], both ? turned[last] : 0.0);
            Words(values).at[word] = pair_of_halves(Floats(v).at[first + 2u * word], both ? Floats(v).at[first + last] : 0.0);
        }
    }
}
