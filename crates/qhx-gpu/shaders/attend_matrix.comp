#version 460
// Softmax attention over cached keys in f16, by products of small matrices: a workgroup takes some rows of a segment for one query head, each of its subgroups SIZE of
// them. Keys and values of a page come through shared memory, CHUNK numbers of each at a time. Queries and softmax weights are split into two f16, so that
// nothing is lost of their f32 but the last digits.
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#pragma use_vulkan_memory_model
#define SUBGROUPS 1
#include "common.glsl"
#include "pages.glsl"
layout(constant_id = 1) const uint MASK = 0; // 0 full, 1 causal, 2 window
layout(constant_id = 2) const uint DIM = 64; // a multiple of SIZE and of 8
layout(constant_id = 3) const uint GROUP = 64;
layout(local_size_x_id = 3) in;
// A small matrix has SIZE rows and columns, DEPTH of those that are summed over.
layout(constant_id = 4) const uint SIZE = 16;
layout(constant_id = 5) const uint DEPTH = 16;
layout(constant_id = 6) const uint TEAMS = 2; // subgroups
layout(constant_id = 7) const uint VALUES = 64; // numbers of a value that a workgroup takes, a multiple of SIZE
layout(constant_id = 8) const uint CHUNK = 64; // a multiple of SIZE and DEPTH
layout(constant_id = 9) const uint TABLE = 0; // the table of tiles of TEAMS * SIZE rows
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
const uint KEY_CHUNKS = (DIM + CHUNK - 1u) / CHUNK;
const uint VALUE_CHUNKS = (VALUES + CHUNK - 1u) / CHUNK;
// Words of a row in shared memory, or sixteens: a few more keep rows in different banks.
const uint QUERY_PITCH = KEY_CHUNKS * CHUNK / 2u + 4u;
const uint SCORE_PITCH = PAGE_ROWS + 4u;
const uint CHUNK_PITCH = CHUNK / 8u + 1u;
shared uint high_queries[TEAMS * SIZE * QUERY_PITCH];
shared uint low_queries[TEAMS * SIZE * QUERY_PITCH];
// Scores; then of each row the weights of a page, their high halves before the low ones; at the end, results.
shared uint scores[TEAMS * SIZE * SCORE_PITCH];
shared float factors[TEAMS * SIZE];
shared uvec4 chunk[PAGE_ROWS * CHUNK_PITCH];
const uint LOADS = (PAGE_ROWS * CHUNK / 8u + GROUP - 1u) / GROUP;
uvec4 ahead[LOADS];

// Within a subgroup.
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

// Loads the numbers from `first` on of the first rows of a page. Behind them anything may stand, also what is no number.
void load(uint64_t from, uint first, uint end, uint rows) {
    [[unroll]] for (uint i = 0u; i < LOADS; i++) {
        uint at = i * GROUP + gl_LocalInvocationID.x;
        uint row = at / (CHUNK / 8u);
        uint number = first + at % (CHUNK / 8u) * 8u;
        ahead[i] = row < rows && number < end ? Quads(from).at[row * (DIM / 8u) + number / 8u] : uvec4(0u);
    }
}
void store() {
    barrier();
    [[unroll]] for (uint i = 0u; i < LOADS; i++) {
        uint at = i * GROUP + gl_LocalInvocationID.x;
        if (at < PAGE_ROWS * CHUNK / 8u) chunk[at / (CHUNK / 8u) * CHUNK_PITCH + at % (CHUNK / 8u)] = ahead[i];
    }
    barrier();
}

void main() {
    uint team = gl_SubgroupID;
    uint lane = gl_SubgroupInvocationID;
    uint tile = gl_WorkGroupID.x;
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
    uint end = MASK == 0u ? total : index + count;
    uint begin = MASK == 2u && index + 1u > window ? index + 1u - window : 0u;
    uint page = begin / PAGE_ROWS;
    uint64_t keys_at = key_row(c, s, offset, page * PAGE_ROWS, kv_heads, kv_head, DIM);
    load(keys_at, 0u, DIM, min(PAGE_ROWS, end - page * PAGE_ROWS));
    for (uint i = gl_LocalInvocationID.x; i < TEAMS * SIZE * (QUERY_PITCH - 4u); i += GROUP) {
        uint row = i / (QUERY_PITCH - 4u);
        uint pair = i % (QUERY_PITCH - 4u);
        uvec2 halves = uvec2(0u);
        if (row < count && 2u * pair < DIM) {
            uint64_t from = q + 4ul * (uint64_t((first_row + row) * heads + head) * DIM + 2u * pair);
            halves = split(scale * vec2(Floats(from).at[0], Floats(from).at[1]));
        }
        high_queries[row * QUERY_PITCH + pair] = halves.x;
        low_queries[row * QUERY_PITCH + pair] = halves.y;
    }
    uint own_queries = team * SIZE * QUERY_PITCH;
    uint own_scores = team * SIZE * SCORE_PITCH;
    Sums results[VALUES / SIZE];
    [[unroll]] for (uint n = 0u; n < VALUES / SIZE; n++) results[n] = Sums(0.0);
    uint row = team * SIZE + lane / EACH;
    uint part = lane % EACH;
    uint own_row = row * SCORE_PITCH;
    uint own_index = index + row;
    float most = LOWEST;
    float sum = 0.0;
    for (; page * PAGE_ROWS < end; page++) {
        uint first_key = page * PAGE_ROWS;
        uint keys = min(PAGE_ROWS, end - first_key);
        uint64_t values_at = keys_at + slot_half(kv_heads, DIM);
        Sums own[PAGE_ROWS / SIZE];
        [[unroll]] for (uint n = 0u; n < PAGE_ROWS / SIZE; n++) own[n] = Sums(0.0);
        [[unroll]] for (uint part = 0u; part < KEY_CHUNKS; part++) {
            store();
            if (part + 1u < KEY_CHUNKS) load(keys_at, (part + 1u) * CHUNK, DIM, keys);
            else load(values_at, first_value, first_value + VALUES, keys);
            [[unroll]] for (uint d = 0u; d < CHUNK; d += DEPTH) {
                Left high;
                Left low;
                uint place = own_queries + (part * CHUNK + d) / 2u;
                coopMatLoad(high, high_queries, place, QUERY_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                coopMatLoad(low, low_queries, place, QUERY_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                [[unroll]] for (uint n = 0u; n < PAGE_ROWS / SIZE; n++) {
                    Right k;
                    coopMatLoad(k, chunk, n * SIZE * CHUNK_PITCH + d / 8u, CHUNK_PITCH, gl_CooperativeMatrixLayoutColumnMajor);
                    own[n] = coopMatMulAdd(low, k, own[n]);
                    own[n] = coopMatMulAdd(high, k, own[n]);
                }
            }
        }
        [[unroll]] for (uint n = 0u; n < PAGE_ROWS / SIZE; n++) {
            coopMatStore(own[n], scores, own_scores + n * SIZE, SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        }
        meet();
        vec2 mine[TURNS];
        float largest = LOWEST;
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
        [[unroll]] for (uint mask = 1u; mask < EACH; mask *= 2u) largest = max(largest, subgroupShuffleXor(largest, mask));
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
        [[unroll]] for (uint mask = 1u; mask < EACH; mask *= 2u) all += subgroupShuffleXor(all, mask);
        sum = sum * factor + all;
        if (part == 0u) factors[row] = factor;
        meet();
        Sums shrink;
        coopMatLoad(shrink, factors, team * SIZE, 0u, gl_CooperativeMatrixLayoutColumnMajor);
        [[unroll]] for (uint n = 0u; n < VALUES / SIZE; n++) results[n] = results[n] * shrink;
        [[unroll]] for (uint part = 0u; part < VALUE_CHUNKS; part++) {
            store();
            if (part + 1u < VALUE_CHUNKS) load(values_at, first_value + (part + 1u) * CHUNK, first_value + VALUES, keys);
            else if (first_key + PAGE_ROWS < end) {
                keys_at = key_row(c, s, offset, first_key + PAGE_ROWS, kv_heads, kv_head, DIM);
                load(keys_at, 0u, DIM, min(PAGE_ROWS, end - first_key - PAGE_ROWS));
            }
            [[unroll]] for (uint key = 0u; key < PAGE_ROWS; key += DEPTH) {
                Left high;
                Left low;
                coopMatLoad(high, scores, own_scores + key / 2u, SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                coopMatLoad(low, scores, own_scores + (PAGE_ROWS + key) / 2u, SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                [[unroll]] for (uint n = part * (CHUNK / SIZE); n < min((part + 1u) * (CHUNK / SIZE), VALUES / SIZE); n++) {
                    Right v;
                    uint place = key * CHUNK_PITCH + (n * SIZE - part * CHUNK) / 8u;
                    coopMatLoad(v, chunk, place, CHUNK_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                    results[n] = coopMatMulAdd(low, v, results[n]);
                    results[n] = coopMatMulAdd(high, v, results[n]);
                }
            }
        }
    }
    if (part == 0u) factors[row] = sum;
    // Results leave through shared memory.
    const uint TOGETHER = PAGE_ROWS / SIZE;
    uint first_own = team * SIZE;
    uint own_count = min(SIZE, count - min(count, first_own));
    [[unroll]] for (uint first = 0u; first < VALUES / SIZE; first += TOGETHER) {
        meet();
        [[unroll]] for (uint n = first; n < min(first + TOGETHER, VALUES / SIZE); n++) {
            coopMatStore(results[n], scores, own_scores + (n - first) * SIZE, SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        }
        meet();
        uint width = min(PAGE_ROWS, VALUES - first * SIZE);
        for (uint i = lane; i < own_count * width; i += LANES) {
            uint r = first_own + i / width;
            uint64_t to = y + 4ul * (uint64_t((first_row + r) * heads + head) * DIM + first_value + first * SIZE + i % width);
            Floats(to).at[0] = uintBitsToFloat(scores[r * SCORE_PITCH + i % width]) / factors[r];
        }
    }
}
