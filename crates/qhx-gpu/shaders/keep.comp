#version 460
// Writes the new keys and values of a call to the pages of their sessions.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "pages.glsl"
layout(local_size_x = 256) in;
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t k;
    uint64_t v;
    uint64_t offset; // of the slot in a page
    uint rows;
    uint kv_heads;
    uint dim;
};

void main() {
    uint words = row_words(dim);
    uint i = flat_index();
    if (i >= rows * kv_heads * words) return;
    uint word = i % words;
    uint head = i / words % kv_heads;
    uint row = i / (words * kv_heads);
    uint number = segment_of(Words(call), row);
    if (number == NONE) return;
    Segment s = segment(Words(call), number);
    uint position = s.before + row - s.first_row;
    uint64_t keys = key_row(Words(call), s, offset, position, kv_heads, head, dim);
    uint64_t values = keys + slot_half(kv_heads, dim);
    uint from = (row * kv_heads + head) * dim;
    if (SLOT == 1u) {
        Floats(keys).at[word] = Floats(k).at[from + word];
        Floats(values).at[word] = Floats(v).at[from + word];
        return;
    }
    uint first = 2u * word;
    bool both = first + 1u < dim;
    Words(keys).at[word] = half_bits(Floats(k).at[from + first]) | (both ? half_bits(Floats(k).at[from + first + 1u]) << 16 : 0u);
    Words(values).at[word] = half_bits(Floats(v).at[from + first]) | (both ? half_bits(Floats(v).at[from + first + 1u]) << 16 : 0u);
}
