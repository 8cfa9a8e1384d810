#version 460
// Softmax attention for a tile of queries: some rows of one segment times the query heads that share a key head. Keys are taken by blocks, each key by one
// invocation; values by octets of numbers. A tile's keys may be split among workgroups, whose results `attend_merge` puts together.
// variant attend_tiles SUBGROUPS=1
// variant attend_tiles_plain PLAIN=1
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "pages.glsl"
layout(local_size_x = 128) in;
const uint GROUP = 128u;
#include "reduce.glsl"
layout(constant_id = 1) const uint MASK = 0; // 0 full, 1 causal, 2 window
layout(constant_id = 2) const uint DIM = 64; // a multiple of 8, at most 512
layout(constant_id = 3) const uint ROWS = 1; // of a tile
layout(constant_id = 4) const uint SHARE = 1; // query heads of a key head
layout(constant_id = 5) const uint TABLE = 0; // the table of tiles of so many rows
layout(constant_id = 6) const uint FORMED = 0; // 1: results are also stored as int8 with a scale for each 32
#include "heads.glsl"
#include "alike.glsl"
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t q;
    uint64_t k; // without a slot
    uint64_t v;
    uint64_t y; // with several splits, of each query and split: the numbers, the largest score, the sum
    uint64_t offset;
    uint64_t numbers; // the results as int8, and their scales
    uint64_t scales;
    uint heads;
    uint kv_heads;
    uint window;
    uint splits;
    uint alike; // 1: how keys are split follows from a row's place in its session alone
    float scale;
    float cap; // 0: none
};
const uint QUERIES = ROWS * SHARE;
const uint OCTETS = DIM / 8u;
const uint TEAMS = GROUP / OCTETS; // invocations that share an octet
shared vec4 queries[QUERIES * DIM / 4u];
shared float weights[QUERIES * GROUP];
shared float partial[GROUP * 8u];
shared uvec2 places[GROUP]; // of the keys of a block

// Of each query: the largest score so far, the sum of weights, and the factor by which a larger score shrinks what was summed before.
shared float most[QUERIES];
shared float sum[QUERIES];
shared float shrink[QUERIES];
#ifdef SUBGROUPS
#define SOFT_MAX subgroupMax
#define SOFT_SUM subgroupAdd
#else
#define SOFT_MAX group_max
#define SOFT_SUM group_sum
#endif

struct Octet { vec4 low; vec4 high; };

Octet octet(uint64_t row, uint number) {
    if (SLOT == 2u) {
        uvec4 raw = Quads(row).at[number];
        return Octet(vec4(unpackHalf2x16(raw.x), unpackHalf2x16(raw.y)), vec4(unpackHalf2x16(raw.z), unpackHalf2x16(raw.w)));
    }
    return Octet(Vectors(row).at[2u * number], Vectors(row).at[2u * number + 1u]);
}

// Blocks of a split, where it follows from the place of a row in its session: at most 32 such splits have all keys that the row sees. A tile's rows have the same, as `parameters.rs` lists tiles.
uint blocks_of_split(uint index) {
    uint keys = MASK == 2u ? min(index, window + window / 8u + 2u * GROUP) : index;
    return 1u << uint(findMSB(keys / (32u * GROUP)) + 1);
}

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint tile = gl_WorkGroupID.x;
    uint kv_head = gl_WorkGroupID.y;
    uint split = gl_WorkGroupID.z;
    // The tile: its segment, its first row, how many.
    Words c = Words(call);
    if (tile >= c.at[5u + 2u * TABLE]) return;
    uint at = c.at[4u + 2u * TABLE] + 3u * tile;
    Segment s = segment(c, c.at[at]);
    uint first_row = c.at[at + 1u];
    uint count = c.at[at + 2u];
    uint first = s.first_row;
    uint total = s.valid_rows;
    uint index = first_row - first; // of the tile's first row
    if (SLOT != 0u) {
        index += s.before;
        total += s.before;
    }
    for (uint i = lane; i < QUERIES * DIM / 4u; i += GROUP) {
        uint query = i / (DIM / 4u);
        uint r = query / SHARE;
        uint head = kv_head * SHARE + query % SHARE;
        queries[i] = r < count ? Vectors(q + 4ul * uint64_t(((first_row + r) * heads + head) * DIM)).at[i % (DIM / 4u)] : vec4(0.0);
    }
    barrier();
    uint end = MASK == 0u ? total : index + count;
    uint begin = MASK == 2u && index + 1u > window ? index + 1u - window : 0u;
    // The split's part of the keys, in whole blocks, which begin at multiples of their size: a key is in the same one for every row.
    uint first_block = begin / GROUP;
    uint blocks = (end + GROUP - 1u) / GROUP - first_block;
    uint each = alike == 1u ? blocks_of_split(index) : (blocks + splits - 1u) / splits;
    uint split_block = (alike == 1u ? first_block / each * each : first_block) + split * each;
    begin = max(first_block, split_block) * GROUP;
    end = min(end, (split_block + each) * GROUP);
    precise vec4 low[QUERIES];
    precise vec4 high[QUERIES];
    [[unroll]] for (uint i = 0u; i < QUERIES; i++) {
        low[i] = vec4(0.0);
        high[i] = vec4(0.0);
    }
    if (lane < QUERIES) {
        most[lane] = LOWEST;
        sum[lane] = 0.0;
    }
    barrier();
#ifdef SUBGROUPS
    uint soft_team = gl_SubgroupID;
    uint soft_teams = gl_NumSubgroups;
    uint soft_lane = gl_SubgroupInvocationID;
    uint soft_lanes = gl_SubgroupSize;
#else
    uint soft_team = 0u;
    uint soft_teams = 1u;
    uint soft_lane = lane;
    uint soft_lanes = GROUP;
#endif
    // From a key to its value.
    uint64_t value_part = SLOT == 0u ? v - k : slot_half(kv_heads, DIM);
    uint team = lane / OCTETS;
    for (uint block = begin; block < end; block += GROUP) {
        uint j = block + lane;
        precise float scores[QUERIES];
        [[unroll]] for (uint i = 0u; i < QUERIES; i++) scores[i] = 0.0;
        if (j < end) {
            uint64_t row = SLOT == 0u ? k + 4ul * uint64_t(((first + j) * kv_heads + kv_head) * DIM) : key_row(c, s, offset, j, kv_heads, kv_head, DIM);
            places[lane] = uvec2(uint(row), uint(row >> 32));
            [[unroll]]
            for (uint o = 0u; o < OCTETS; o++) {
                Octet key = octet(row, o);
                [[unroll]] for (uint i = 0u; i < QUERIES; i++) {
                    uint place = i * (DIM / 4u) + 2u * o;
                    scores[i] += dot_alike(queries[place], key.low) + dot_alike(queries[place + 1u], key.high);
                }
            }
        }
        [[unroll]] for (uint i = 0u; i < QUERIES; i++) {
            uint own = index + i / SHARE;
            bool seen = j < end && i / SHARE < count && (MASK == 0u || j <= own) && (MASK != 2u || own - j < window);
            precise float score = scores[i] * scale;
            if (cap > 0.0) score = cap * safe_tanh(score / cap);
            weights[i * GROUP + lane] = seen ? score : LOWEST;
        }
        barrier();
        // Each query's scores become weights, by one team of lanes.
        for (uint i = soft_team; i < QUERIES; i += soft_teams) {
            float largest = LOWEST;
            for (uint n = soft_lane; n < GROUP; n += soft_lanes) largest = max(largest, weights[i * GROUP + n]);
            largest = SOFT_MAX(largest);
            float higher = max(most[i], largest);
            precise float all = 0.0;
            for (uint n = soft_lane; n < GROUP; n += soft_lanes) {
                float score = weights[i * GROUP + n];
                precise float weight = score == LOWEST ? 0.0 : exp(score - higher);
                weights[i * GROUP + n] = weight;
                all += weight;
            }
            all = SOFT_SUM(all);
            if (soft_lane == 0u) {
                precise float factor = exp(most[i] - higher);
                precise float sum_so_far = fma(sum[i], factor, all);
                shrink[i] = factor;
                most[i] = higher;
                sum[i] = sum_so_far;
            }
        }
        barrier();
        [[unroll]] for (uint i = 0u; i < QUERIES; i++) {
            low[i] *= shrink[i];
            high[i] *= shrink[i];
        }
        uint many = min(GROUP, end - block);
        [[unroll]] for (uint turn = 0u; turn < (GROUP + TEAMS - 1u) / TEAMS; turn++) {
            uint n = turn * TEAMS + team;
            if (n >= many || team >= TEAMS) break;
            uint64_t row = (uint64_t(places[n].x) | uint64_t(places[n].y) << 32) + value_part;
            Octet value = octet(row, lane % OCTETS);
            [[unroll]] for (uint i = 0u; i < QUERIES; i++) {
                float weight = weights[i * GROUP + n];
                low[i] = fma(vec4(weight), value.low, low[i]);
                high[i] = fma(vec4(weight), value.high, high[i]);
            }
        }
        barrier();
    }
    [[unroll]] for (uint i = 0u; i < QUERIES; i++) {
        uint r = i / SHARE;
        uint head = kv_head * SHARE + i % SHARE;
        uint64_t to = y + 4ul * uint64_t((first_row + r) * heads + head) * (splits == 1u ? DIM : splits * (DIM + 2u));
        if (splits > 1u) to += 4ul * split * (DIM + 2u);
        [[unroll]] for (uint d = 0u; d < 4u; d++) {
            partial[d * GROUP + lane] = low[i][d];
            partial[(4u + d) * GROUP + lane] = high[i][d];
        }
        barrier();
        for (uint d = lane; d < DIM; d += GROUP) {
            precise float all = 0.0;
            for (uint t = 0u; t < TEAMS; t++) all += partial[(d % 8u) * GROUP + t * OCTETS + d / 8u];
            if (splits == 1u) all /= sum[i];
            if (FORMED == 1u) finished[d] = all;
            if (r < count) Floats(to).at[d] = all;
        }
        barrier();
        if (FORMED == 1u && splits == 1u && r < count) {
            uint place = ((first_row + r) * heads + head) * DIM;
            for (uint run = lane; run < DIM / 4u; run += GROUP) store_formed(numbers, scales, place, run);
        }
        if (splits > 1u && lane == 0u && r < count) {
            Floats(to).at[DIM] = most[i];
            Floats(to).at[DIM + 1u] = sum[i];
        }
    }
}
