#version 460
// Softmax attention over cached keys in f16, by products of small matrices: a subgroup takes some rows of a segment for one query head. Keys are met a page at a time.
// Queries and softmax weights are split into two f16, so that nothing is lost of their f32 but the last digits.
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#pragma use_vulkan_memory_model
#define SUBGROUPS 1
#include "common.glsl"
#include "pages.glsl"
layout(constant_id = 1) const uint MASK = 0; // 0 full, 1 causal, 2 window
layout(constant_id = 2) const uint DIM = 64; // a multiple of DEPTH
layout(constant_id = 3) const uint GROUP = 64;
layout(local_size_x_id = 3) in;
// A small matrix has SIZE rows and columns, DEPTH of those that are summed over.
layout(constant_id = 4) const uint SIZE = 16;
layout(constant_id = 5) const uint DEPTH = 16;
layout(constant_id = 6) const uint TEAMS = 2; // subgroups
layout(constant_id = 7) const uint VALUES = 64; // numbers of a value that a workgroup takes
layout(constant_id = 8) const uint TABLE = 0; // the table of tiles of SIZE rows
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t q;
    uint64_t y;
    uint64_t offset;
    uint heads;
    uint kv_heads;
    uint window;
    float scale;
    float cap; // 0: none
};
#define Left coopmat<float16_t, gl_ScopeSubgroup, SIZE, DEPTH, gl_MatrixUseA>
#define Right coopmat<float16_t, gl_ScopeSubgroup, DEPTH, SIZE, gl_MatrixUseB>
#define Sums coopmat<float, gl_ScopeSubgroup, SIZE, SIZE, gl_MatrixUseAccumulator>

const uint LANES = GROUP / TEAMS;
// Lanes of a row, each with every so-manieth pair of a page's scores.
const uint EACH = LANES / SIZE;
const uint TURNS = PAGE_ROWS / 2u / EACH;
// Words of a row in shared memory: a few more keep rows in different banks.
const uint QUERY_PITCH = DIM / 2u + 4u;
const uint SCORE_PITCH = PAGE_ROWS + 4u;
shared uint high_queries[TEAMS * SIZE * QUERY_PITCH];
shared uint low_queries[TEAMS * SIZE * QUERY_PITCH];
// Scores; then of each row the weights of a page, their high halves before the low ones; at the end, results.
shared uint scores[TEAMS * SIZE * SCORE_PITCH];
shared float factors[TEAMS * SIZE];
// Values of keys of which some are not there.
shared uvec4 edge[TEAMS * DEPTH * (SIZE / 8u)];

void meet() {
    subgroupMemoryBarrierShared();
    subgroupBarrier();
}

// Two numbers as f16, and what these leave over.
uvec2 split(vec2 v) {
    v = clamp(v, vec2(-65504.0), vec2(65504.0));
    uint high = half_bits(v.x) | half_bits(v.y) << 16;
    vec2 rest = v - unpackHalf2x16(high);
    return uvec2(high, packHalf2x16(rest));
}

void main() {
    uint team = gl_SubgroupID;
    uint lane = gl_SubgroupInvocationID;
    uint tile = gl_WorkGroupID.x * TEAMS + team;
    uint head = gl_WorkGroupID.y;
    uint first_value = gl_WorkGroupID.z * VALUES;
    Words c = Words(call);
    if (tile >= c.at[5u + 2u * TABLE]) return;
    uint at = c.at[4u + 2u * TABLE] + 3u * tile;
    Segment s = segment(c, c.at[at]);
    uint first_row = c.at[at + 1u];
    uint count = c.at[at + 2u];
    uint index = s.before + first_row - s.first_row; // of the tile's first row
    uint total = s.before + s.valid_rows;
    uint kv_head = head / (heads / kv_heads);
    uint own_queries = team * SIZE * QUERY_PITCH;
    uint own_scores = team * SIZE * SCORE_PITCH;
    uint own_edge = team * DEPTH * (SIZE / 8u);
    for (uint i = lane; i < SIZE * DIM / 2u; i += LANES) {
        uint row = i / (DIM / 2u);
        uint pair = i % (DIM / 2u);
        uvec2 halves = uvec2(0u);
        if (row < count) {
            uint64_t from = q + 4ul * (uint64_t((first_row + row) * heads + head) * DIM + 2u * pair);
            halves = split(scale * vec2(Floats(from).at[0], Floats(from).at[1]));
        }
        high_queries[own_queries + row * QUERY_PITCH + pair] = halves.x;
        low_queries[own_queries + row * QUERY_PITCH + pair] = halves.y;
    }
    meet();
    uint end = MASK == 0u ? total : index + count;
    uint begin = MASK == 2u && index + 1u > window ? index + 1u - window : 0u;
    Sums results[VALUES / SIZE];
    [[unroll]] for (uint n = 0u; n < VALUES / SIZE; n++) results[n] = Sums(0.0);
    uint row = lane / EACH;
    uint part = lane % EACH;
    uint own_index = index + row;
    float most = LOWEST;
    float sum = 0.0;
    uint row_quads = row_words(DIM) / 4u;
    for (uint page = begin / PAGE_ROWS; page * PAGE_ROWS < end; page++) {
        uint first_key = page * PAGE_ROWS;
        uint keys = min(PAGE_ROWS, end - first_key);
        uint64_t key_place = key_row(c, s, offset, first_key, kv_heads, kv_head, DIM);
        uint64_t value_place = key_place + slot_half(kv_heads, DIM);
        Quads key_quads = Quads(key_place);
        Quads value_quads = Quads(value_place);
        for (uint block = 0u; block < keys; block += SIZE) {
            Sums own = Sums(0.0);
            [[unroll]] for (uint d = 0u; d < DIM; d += DEPTH) {
                Right k;
                Left a;
                coopMatLoad(k, key_quads.at, block * row_quads + d / 8u, row_quads, gl_CooperativeMatrixLayoutColumnMajor);
                coopMatLoad(a, low_queries, own_queries + d / 2u, QUERY_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                own = coopMatMulAdd(a, k, own);
                coopMatLoad(a, high_queries, own_queries + d / 2u, QUERY_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                own = coopMatMulAdd(a, k, own);
            }
            coopMatStore(own, scores, own_scores + block, SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        }
        meet();
        vec2 mine[TURNS];
        float largest = LOWEST;
        uint own_row = own_scores + row * SCORE_PITCH;
        [[unroll]] for (uint i = 0u; i < TURNS; i++) {
            uint pair = i * EACH + part;
            [[unroll]] for (uint n = 0u; n < 2u; n++) {
                uint key = first_key + 2u * pair + n;
                float score = uintBitsToFloat(scores[own_row + 2u * pair + n]);
                if (cap > 0.0) score = cap * safe_tanh(score / cap);
                bool seen = key < end && row < count && (MASK == 0u || key <= own_index) && (MASK != 2u || own_index - key < window);
                mine[i][n] = seen ? score : LOWEST;
                largest = max(largest, mine[i][n]);
            }
        }
        for (uint mask = 1u; mask < EACH; mask *= 2u) largest = max(largest, subgroupShuffleXor(largest, mask));
        float higher = max(most, largest);
        float factor = exp(most - higher);
        most = higher;
        float all = 0.0;
        // All have read their scores before weights take their place.
        meet();
        [[unroll]] for (uint i = 0u; i < TURNS; i++) {
            vec2 weight = vec2(mine[i].x == LOWEST ? 0.0 : exp(mine[i].x - higher), mine[i].y == LOWEST ? 0.0 : exp(mine[i].y - higher));
            all += weight.x + weight.y;
            uvec2 halves = split(weight);
            scores[own_row + i * EACH + part] = halves.x;
            scores[own_row + PAGE_ROWS / 2u + i * EACH + part] = halves.y;
        }
        for (uint mask = 1u; mask < EACH; mask *= 2u) all += subgroupShuffleXor(all, mask);
        sum = sum * factor + all;
        if (part == 0u) factors[team * SIZE + row] = factor;
        meet();
        Sums shrink;
        coopMatLoad(shrink, factors, team * SIZE, 0u, gl_CooperativeMatrixLayoutColumnMajor);
        [[unroll]] for (uint n = 0u; n < VALUES / SIZE; n++) results[n] = results[n] * shrink;
        for (uint block = 0u; block < keys; block += DEPTH) {
            Left high;
            Left low;
            coopMatLoad(high, scores, own_scores + block / 2u, SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
            coopMatLoad(low, scores, own_scores + (PAGE_ROWS + block) / 2u, SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
            bool whole = block + DEPTH <= keys;
            [[unroll]] for (uint n = 0u; n < VALUES / SIZE; n++) {
                Right v;
                uint first = block * row_quads + (first_value + n * SIZE) / 8u;
                if (whole) coopMatLoad(v, value_quads.at, first, row_quads, gl_CooperativeMatrixLayoutRowMajor);
                else {
                    // Behind the last key anything may stand, also what is no number.
                    meet();
                    for (uint i = lane; i < DEPTH * (SIZE / 8u); i += LANES) {
                        uint key = i / (SIZE / 8u);
                        edge[own_edge + i] = block + key < keys ? value_quads.at[first + key * row_quads + i % (SIZE / 8u)] : uvec4(0u);
                    }
                    meet();
                    coopMatLoad(v, edge, own_edge, SIZE / 8u, gl_CooperativeMatrixLayoutRowMajor);
                }
                results[n] = coopMatMulAdd(low, v, results[n]);
                results[n] = coopMatMulAdd(high, v, results[n]);
            }
        }
        meet();
    }
    if (part == 0u) factors[team * SIZE + row] = sum;
    // Results leave through shared memory.
    const uint TOGETHER = PAGE_ROWS / SIZE;
    [[unroll]] for (uint first = 0u; first < VALUES / SIZE; first += TOGETHER) {
        meet();
        [[unroll]] for (uint n = first; n < min(first + TOGETHER, VALUES / SIZE); n++) {
            coopMatStore(results[n], scores, own_scores + (n - first) * SIZE, SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        }
        meet();
        uint width = min(PAGE_ROWS, VALUES - first * SIZE);
        for (uint i = lane; i < count * width; i += LANES) {
            uint r = i / width;
            uint64_t to = y + 4ul * (uint64_t((first_row + r) * heads + head) * DIM + first_value + first * SIZE + i % width);
            Floats(to).at[0] = uintBitsToFloat(scores[own_scores + r * SCORE_PITCH + i % width]) / factors[team * SIZE + r];
        }
    }
}
