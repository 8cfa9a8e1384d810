#version 460
// Softmax attention, a row and a head for each workgroup; keys are taken by blocks, and what was seen so far is scaled whenever a larger score is met.
// variant attend SUBGROUPS=1
// variant attend_plain PLAIN=1
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "pages.glsl"
layout(local_size_x = 128) in;
const uint GROUP = 128u;
#include "reduce.glsl"
layout(constant_id = 1) const uint MASK = 0; // 0 full, 1 causal, 2 window
layout(constant_id = 2) const uint DIM = 64;
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t q;
    uint64_t k; // without a slot
    uint64_t v;
    uint64_t relative; // or 0
    uint64_t y;
    uint64_t offset;
    uint rows;
    uint heads;
    uint kv_heads;
    uint window;
    uint distances;
    uint rows_per_row;
    float scale;
    float cap; // 0: none
};
const uint PARTS = (DIM + GROUP - 1u) / GROUP;
shared float query[DIM];
shared float weights[GROUP];

uint64_t page_row(Segment s, uint j, uint kv_head) { return key_row(Words(call), s, offset, j, kv_heads, kv_head, DIM); }

float score(Segment s, uint first, uint j, uint index, uint head, uint kv_head) {
    float sum = 0.0;
    if (SLOT == 0u) {
        uint at = ((first + j) * kv_heads + kv_head) * DIM;
        for (uint d = 0u; d < DIM; d++) sum += query[d] * Floats(k).at[at + d];
    } else if (SLOT == 1u) {
        Floats row = Floats(page_row(s, j, kv_head));
        for (uint d = 0u; d < DIM; d++) sum += query[d] * row.at[d];
    } else {
        Words row = Words(page_row(s, j, kv_head));
        for (uint d = 0u; d < DIM / 2u; d++) {
            vec2 pair = unpackHalf2x16(row.at[d]);
            sum += query[2u * d] * pair.x + query[2u * d + 1u] * pair.y;
        }
        if ((DIM & 1u) == 1u) sum += query[DIM - 1u] * unpackHalf2x16(row.at[DIM / 2u]).x;
    }
    sum *= scale;
    if (relative != 0ul && index >= j && index - j < distances) {
        uint at = ((index - j) * heads + head) * DIM;
        float more = 0.0;
        for (uint d = 0u; d < DIM; d++) more += query[d] * Floats(relative).at[at + d];
        sum += more;
    }
    return cap > 0.0 ? cap * safe_tanh(sum / cap) : sum;
}

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint row = gl_WorkGroupID.x + gl_WorkGroupID.z * gl_NumWorkGroups.x;
    uint head = gl_WorkGroupID.y;
    if (row >= rows) return;
    uint number = segment_of(Words(call), row * rows_per_row);
    if (number == NONE) return;
    Segment s = segment(Words(call), number);
    uint first = s.first_row / rows_per_row;
    uint index = row - first;
    uint total = (s.valid_rows + rows_per_row - 1u) / rows_per_row;
    if (SLOT != 0u) {
        index += s.before;
        total += s.before;
    }
    uint kv_head = head / (heads / kv_heads);
    for (uint d = lane; d < DIM; d += GROUP) query[d] = Floats(q).at[(row * heads + head) * DIM + d];
    barrier();
    uint end = MASK == 0u ? total : index + 1u;
    uint begin = MASK == 2u && index + 1u > window ? index + 1u - window : 0u;
    float most = LOWEST;
    float sum = 0.0;
    float mixed[PARTS];
    [[unroll]] for (uint p = 0u; p < PARTS; p++) mixed[p] = 0.0;
    for (uint block = begin; block < end; block += GROUP) {
        uint j = block + lane;
        float own = j < end ? score(s, first, j, index, head, kv_head) : LOWEST;
        float higher = max(most, group_max(own));
        float shrink = exp(most - higher);
        most = higher;
        float weight = j < end ? exp(own - most) : 0.0;
        weights[lane] = weight;
        sum = sum * shrink + group_sum(weight);
        barrier();
        uint count = min(GROUP, end - block);
        [[unroll]] for (uint p = 0u; p < PARTS; p++) {
            uint d = p * GROUP + lane;
            if (d < DIM) {
                float part = mixed[p] * shrink;
                for (uint i = 0u; i < count; i++) {
                    // Never behind the last key: software loads what is the same for all lanes before it looks whether any is still in the loop.
                    uint j = min(block + i, end - 1u);
                    float value;
                    if (SLOT == 0u) value = Floats(v).at[((first + j) * kv_heads + kv_head) * DIM + d];
                    else {
                        uint64_t values = page_row(s, j, kv_head) + slot_half(kv_heads, DIM);
                        if (SLOT == 1u) value = Floats(values).at[d];
                        else value = half_float(Words(values).at[d / 2u] >> (d & 1u) * 16u);
                    }
                    part += weights[i] * value;
                }
                mixed[p] = part;
            }
        }
        barrier();
    }
    [[unroll]] for (uint p = 0u; p < PARTS; p++) {
        uint d = p * GROUP + lane;
        if (d < DIM) Floats(y).at[(row * heads + head) * DIM + d] = mixed[p] / sum;
    }
}
