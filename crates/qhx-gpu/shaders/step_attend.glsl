// Attention of one row. A workgroup takes the query heads that share a key head, and a part of the keys; some lanes of a subgroup take a key together.
struct HeadsKind {
    uint slot;
    uint dim;
    uint share; // query heads of a key head
    uint lanes; // that take a key
};
layout(constant_id = 12) const uint SLOT_A = 2;
layout(constant_id = 13) const uint DIM_A = 8;
layout(constant_id = 14) const uint SHARE_A = 1;
layout(constant_id = 15) const uint LANES_A = 1;
layout(constant_id = 16) const uint SLOT_B = 2;
layout(constant_id = 17) const uint DIM_B = 8;
layout(constant_id = 18) const uint SHARE_B = 1;
layout(constant_id = 19) const uint LANES_B = 1;
layout(constant_id = 20) const uint MOST_SHARE = 1;
layout(constant_id = 21) const uint MOST_OCTETS = 1; // of a lane
#define HEADS_A HeadsKind(SLOT_A, DIM_A, SHARE_A, LANES_A)
#define HEADS_B HeadsKind(SLOT_B, DIM_B, SHARE_B, LANES_B)
HeadsKind heads_kind;
#define SLOT heads_kind.slot
#define DIM heads_kind.dim
#define SHARE heads_kind.share
#define LANES heads_kind.lanes
#include "pages.glsl"

// Where the words are: see `stream.rs`.
const uint A_Q = 4u, A_K = 6u, A_V = 8u, Q_WEIGHT = 10u, K_WEIGHT = 12u, Q_TURNS = 14u, Q_ROLES = 16u, K_TURNS = 18u, K_ROLES = 20u, A_Y = 22u, OFFSET = 24u;
const uint HEADS = 26u, KV_HEADS = 27u, WINDOW = 28u, SPLITS = 29u, SCALE = 30u, CAP = 31u, Q_FLAGS = 32u, K_FLAGS = 33u, Q_EPS = 34u, K_EPS = 35u;

// One number of a head: normed, then turned with its partner. Flags: 1 normed, 2 turned.
float turned(uint64_t x, uint d, float factor, uint64_t weight, uint64_t turns, uint64_t roles, uint flags) {
    float v = Floats(x).at[d] * factor;
    if (weight != 0ul) v *= Floats(weight).at[d];
    if ((flags & 2u) == 0u) return v;
    uint partner = Words(roles).at[3u * d];
    if (partner == NONE) return v;
    uint f = Words(roles).at[3u * d + 1u];
    float other = Floats(x).at[partner] * factor;
    if (weight != 0ul) other *= Floats(weight).at[partner];
    return v * Floats(turns).at[2u * f] + (Words(roles).at[3u * d + 2u] == 1u ? other : -other) * Floats(turns).at[2u * f + 1u];
}
// By which the norm scales a head, found by a subgroup.
float norm_factor(uint64_t x, uint flags, float eps) {
    if ((flags & 1u) == 0u) return 1.0;
    float squares = 0.0;
    for (uint d = gl_SubgroupInvocationID; d < DIM; d += gl_SubgroupSize) squares += Floats(x).at[d] * Floats(x).at[d];
    return 1.0 / sqrt(subgroupAdd(squares) / float(DIM) + eps);
}

struct Octet { vec4 low; vec4 high; };
Octet octet(uint64_t row, uint i) {
    if (SLOT == 2u) {
        uvec4 raw = Quads(row).at[i];
        return Octet(vec4(unpackHalf2x16(raw.x), unpackHalf2x16(raw.y)), vec4(unpackHalf2x16(raw.z), unpackHalf2x16(raw.w)));
    }
    return Octet(Vectors(row).at[2u * i], Vectors(row).at[2u * i + 1u]);
}

void keep_row(uint64_t to, uint64_t x, float factor, uint64_t weight, uint64_t turns, uint64_t roles, uint flags) {
    for (uint w = gl_SubgroupInvocationID; w < row_words(DIM); w += gl_SubgroupSize) {
        if (SLOT == 1u) Floats(to).at[w] = turned(x, w, factor, weight, turns, roles, flags);
        else Words(to).at[w] = half_bits(turned(x, 2u * w, factor, weight, turns, roles, flags)) | half_bits(turned(x, 2u * w + 1u, factor, weight, turns, roles, flags)) << 16;
    }
}

void attend(uint group) {
    uint lane = gl_LocalInvocationID.x;
    uint kv_heads = word(KV_HEADS);
    uint kv_head = group % kv_heads;
    uint split = group / kv_heads;
    Words c = Words(call);
    Segment s = only_segment();
    uint total = s.before + 1u;
    uint first = word(WINDOW) > 0u && total > word(WINDOW) ? total - word(WINDOW) : 0u;
    uint each = (total - first + word(SPLITS) - 1u) / word(SPLITS);
    first += split * each;
    uint last = min(total, first + each);
    held_source = NONE;
    barrier();
    // Queries go to the room, the new key and value to their page.
    for (uint head = gl_SubgroupID; head < SHARE; head += gl_NumSubgroups) {
        uint64_t x = place(A_Q) + 4ul * ((kv_head * SHARE + head) * DIM);
        float factor = norm_factor(x, word(Q_FLAGS), number(Q_EPS));
        for (uint d = gl_SubgroupInvocationID; d < DIM; d += gl_SubgroupSize) {
            room[(head * DIM + d) / 4u][d % 4u] = floatBitsToUint(turned(x, d, factor, place(Q_WEIGHT), place(Q_TURNS), place(Q_ROLES), word(Q_FLAGS)));
        }
    }
    if (place(A_K) != 0ul && first < total && last == total) {
        uint64_t to = key_row(c, s, place(OFFSET), total - 1u, kv_heads, kv_head, DIM);
        if (gl_SubgroupID == SHARE % gl_NumSubgroups) {
            uint64_t x = place(A_K) + 4ul * (kv_head * DIM);
            keep_row(to, x, norm_factor(x, word(K_FLAGS), number(K_EPS)), place(K_WEIGHT), place(K_TURNS), place(K_ROLES), word(K_FLAGS));
        }
        if (gl_SubgroupID == (SHARE + 1u) % gl_NumSubgroups) keep_row(to + slot_half(kv_heads, DIM), place(A_V) + 4ul * (kv_head * DIM), 1.0, 0ul, 0ul, 0ul, 0u);
    }
    controlBarrier(gl_ScopeWorkgroup, gl_ScopeWorkgroup, gl_StorageSemanticsBuffer | gl_StorageSemanticsShared, gl_SemanticsAcquireRelease | gl_SemanticsMakeAvailable | gl_SemanticsMakeVisible);
    uint octets = DIM / 8u / LANES;
    uint teams = GROUP / LANES;
    uint own = lane % LANES;
    float most[MOST_SHARE];
    float sum[MOST_SHARE];
    vec4 low[MOST_SHARE * MOST_OCTETS];
    vec4 high[MOST_SHARE * MOST_OCTETS];
    [[unroll]] for (uint i = 0u; i < SHARE; i++) {
        most[i] = LOWEST;
        sum[i] = 0.0;
        [[unroll]] for (uint o = 0u; o < octets; o++) {
            low[i * MOST_OCTETS + o] = vec4(0.0);
            high[i * MOST_OCTETS + o] = vec4(0.0);
        }
    }
    const uint AT_ONCE = 2u;
    for (uint block = first; block < last; block += AT_ONCE * teams) {
        float scores[AT_ONCE * MOST_SHARE];
        Octet values[AT_ONCE * MOST_OCTETS];
        [[unroll]] for (uint n = 0u; n < AT_ONCE; n++) {
            uint j = min(block + n * teams + lane / LANES, last - 1u);
            uint64_t row = key_row(c, s, place(OFFSET), j, kv_heads, kv_head, DIM);
            [[unroll]] for (uint i = 0u; i < SHARE; i++) scores[n * MOST_SHARE + i] = 0.0;
            [[unroll]] for (uint o = 0u; o < octets; o++) {
                Octet key = octet(row, o * LANES + own);
                values[n * MOST_OCTETS + o] = octet(row + slot_half(kv_heads, DIM), o * LANES + own);
                [[unroll]] for (uint i = 0u; i < SHARE; i++) {
                    uint at = i * (DIM / 4u) + 2u * (o * LANES + own);
                    scores[n * MOST_SHARE + i] += dot(uintBitsToFloat(room[at]), key.low) + dot(uintBitsToFloat(room[at + 1u]), key.high);
                }
            }
        }
        [[unroll]] for (uint n = 0u; n < AT_ONCE; n++) {
            bool seen = block + n * teams + lane / LANES < last;
            [[unroll]] for (uint i = 0u; i < SHARE; i++) {
                float score = scores[n * MOST_SHARE + i];
                for (uint mask = LANES / 2u; mask > 0u; mask /= 2u) score += subgroupShuffleXor(score, mask);
                score *= number(SCALE);
                if (number(CAP) > 0.0) score = number(CAP) * safe_tanh(score / number(CAP));
                float higher = seen ? max(most[i], score) : most[i];
                float shrink = exp(most[i] - higher);
                float weight = seen ? exp(score - higher) : 0.0;
                most[i] = higher;
                sum[i] = sum[i] * shrink + weight;
                [[unroll]] for (uint o = 0u; o < octets; o++) {
                    low[i * MOST_OCTETS + o] = low[i * MOST_OCTETS + o] * shrink + weight * values[n * MOST_OCTETS + o].low;
                    high[i * MOST_OCTETS + o] = high[i * MOST_OCTETS + o] * shrink + weight * values[n * MOST_OCTETS + o].high;
                }
            }
        }
    }
    // All teams' parts together: within subgroups first, then over the room, as many heads at a time as it holds. Each subgroup's largest score and sum are beside it.
    uint sums_at = SHARE * gl_NumSubgroups;
    [[unroll]] for (uint i = 0u; i < SHARE; i++) {
        float highest = subgroupMax(most[i]);
        float factor = exp(most[i] - highest);
        float all = subgroupAdd(own == 0u ? sum[i] * factor : 0.0);
        if (subgroupElect()) {
            row_scales[i * gl_NumSubgroups + gl_SubgroupID] = highest;
            row_scales[sums_at + i * gl_NumSubgroups + gl_SubgroupID] = all;
        }
        [[unroll]] for (uint o = 0u; o < octets; o++) {
            vec4 a = low[i * MOST_OCTETS + o] * factor;
            vec4 b = high[i * MOST_OCTETS + o] * factor;
            for (uint mask = LANES; mask < gl_SubgroupSize; mask *= 2u) {
                a += subgroupShuffleXor(a, mask);
                b += subgroupShuffleXor(b, mask);
            }
            low[i * MOST_OCTETS + o] = a;
            high[i * MOST_OCTETS + o] = b;
        }
    }
    uint at_once = min(SHARE, max(1u, ROOM / (gl_NumSubgroups * (DIM / 4u))));
    for (uint begin = 0u; begin < SHARE; begin += at_once) {
        barrier();
        [[unroll]] for (uint i = 0u; i < SHARE; i++) {
            if (i < begin || i >= begin + at_once || gl_SubgroupInvocationID >= LANES) continue;
            [[unroll]] for (uint o = 0u; o < octets; o++) {
                uint at = ((i - begin) * gl_NumSubgroups + gl_SubgroupID) * (DIM / 4u) + 2u * (o * LANES + own);
                room[at] = floatBitsToUint(low[i * MOST_OCTETS + o]);
                room[at + 1u] = floatBitsToUint(high[i * MOST_OCTETS + o]);
            }
        }
        barrier();
        for (uint e = lane; e < min(at_once, SHARE - begin) * DIM; e += GROUP) {
            uint i = begin + e / DIM;
            uint d = e % DIM;
            float highest = LOWEST;
            for (uint t = 0u; t < gl_NumSubgroups; t++) highest = max(highest, row_scales[i * gl_NumSubgroups + t]);
            float v = 0.0;
            float all = 0.0;
            for (uint t = 0u; t < gl_NumSubgroups; t++) {
                float factor = exp(row_scales[i * gl_NumSubgroups + t] - highest);
                v += factor * uintBitsToFloat(room[((i - begin) * gl_NumSubgroups + t) * (DIM / 4u) + d / 4u][d % 4u]);
                all += factor * row_scales[sums_at + i * gl_NumSubgroups + t];
            }
            uint head = kv_head * SHARE + i;
            uint64_t to = place(A_Y) + 4ul * (word(SPLITS) == 1u ? head * DIM : (head * word(SPLITS) + split) * (DIM + 2u));
            Floats(to).at[d] = word(SPLITS) == 1u ? v / all : v;
            if (word(SPLITS) > 1u && d == 0u) {
                Floats(to).at[DIM] = highest;
                Floats(to).at[DIM + 1u] = all;
            }
        }
    }
}

// Puts the parts of a head together: so many invocations as there are take a number of it, each some of the parts.
void merge(uint head) {
    uint dim = word(8u);
    uint splits = word(9u);
    uint lane = gl_LocalInvocationID.x;
    Floats from = Floats(place(4u) + 4ul * (head * splits * (dim + 2u)));
    held_source = NONE;
    float own_most = lane < splits ? from.at[lane * (dim + 2u) + dim] : LOWEST;
    float own_sum = lane < splits ? from.at[lane * (dim + 2u) + dim + 1u] : 0.0;
    float factor = exp(own_most - group_max(own_most));
    float all = group_sum(own_sum * factor);
    if (lane < splits) row_scales[lane] = factor;
    barrier();
    uint each = max(1u, GROUP / dim);
    for (uint first = 0u; first < dim; first += GROUP) {
        uint d = first + (each == 1u ? lane : lane % dim);
        uint part = each == 1u ? 0u : lane / dim;
        float v = 0.0;
        if (d < dim && part < each) for (uint i = part; i < splits; i += each) v += row_scales[i] * from.at[i * (dim + 2u) + d];
        if (each > 1u) {
            room[lane / 4u][lane % 4u] = floatBitsToUint(v);
            barrier();
            v = 0.0;
            if (lane < dim) for (uint i = 0u; i < each; i++) v += uintBitsToFloat(room[(i * dim + lane) / 4u][(i * dim + lane) % 4u]);
        }
        if (d < dim && part == 0u) Floats(place(6u)).at[head * dim + d] = v / all;
    }
}
