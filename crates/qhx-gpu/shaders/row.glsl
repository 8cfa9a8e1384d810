#include "quantise.glsl"

// A row in registers: every invocation holds some runs of four numbers. Gated, normed, bounded. What of this rows need is in `ROW_WORK`.
const uint GATES = 1u, LAYER_NORMS = 2u, NORM_BIASES = 4u, UNEVEN_WIDTHS = 8u;
bool rows_need(uint work) { return (ROW_WORK & work) != 0u; }
vec4 held[RUNS];

struct RowWork {
    uint64_t x;
    uint64_t up; // of a gate
    uint64_t weight; // or 0
    uint64_t bias; // or 0
    uint first; // number of x and up
    uint width;
    float eps;
    uint gated; // 1: x is act(x) · up
    uint function;
    uint norm; // 1: by the root of the mean square, 2: layer norm
};

uint run(uint j) { return j * GROUP + gl_LocalInvocationID.x; }
// Whether no invocation has anything of a row in this run.
bool is_behind(uint j, uint width) { return j > 0u && 4u * j * GROUP >= width; }

vec4 load4(uint64_t from, uint first, uint i, uint width) {
    if (!rows_need(UNEVEN_WIDTHS) || width % 4u == 0u) return i < width ? Vectors(from + 4ul * uint64_t(first + i)).at[0] : vec4(0.0);
    vec4 v = vec4(0.0);
    [[unroll]] for (uint c = 0u; c < 4u; c++) if (i + c < width) v[c] = Floats(from).at[first + i + c];
    return v;
}
void store4(uint64_t to, uint first, uint i, uint width, vec4 v) {
    if (!rows_need(UNEVEN_WIDTHS) || width % 4u == 0u) {
        if (i < width) Vectors(to + 4ul * uint64_t(first + i)).at[0] = v;
    } else {
        [[unroll]] for (uint c = 0u; c < 4u; c++) if (i + c < width) Floats(to).at[first + i + c] = v[c];
    }
}
// Zero behind the end of the row.
vec4 within(vec4 v, uint i, uint width) {
    if (!rows_need(UNEVEN_WIDTHS)) return i < width ? v : vec4(0.0);
    if (width % 4u == 0u && i < width) return v;
    [[unroll]] for (uint c = 0u; c < 4u; c++) if (i + c >= width) v[c] = 0.0;
    return v;
}

void hold_row(RowWork w) {
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        held[j] = vec4(0.0);
        if (is_behind(j, w.width)) continue;
        vec4 v = load4(w.x, w.first, 4u * run(j), w.width);
        if (rows_need(GATES) && w.gated == 1u) {
            vec4 u = load4(w.up, w.first, 4u * run(j), w.width);
            [[unroll]] for (uint c = 0u; c < 4u; c++) v[c] = activate(w.function, v[c]) * u[c];
        }
        held[j] = v;
    }
    if (w.norm == 0u) return;
    // On the way while sums are made.
    vec4 weights[RUNS];
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        weights[j] = vec4(1.0);
        if (w.weight != 0ul && !is_behind(j, w.width)) weights[j] = load4(w.weight, 0u, 4u * run(j), w.width);
    }
    if (rows_need(LAYER_NORMS) && w.norm == 2u) {
        float sum = 0.0;
        [[unroll]] for (uint j = 0u; j < RUNS; j++) sum += dot(held[j], vec4(1.0));
        float mean = group_sum(sum) / float(w.width);
        [[unroll]] for (uint j = 0u; j < RUNS; j++) held[j] = within(held[j] - mean, 4u * run(j), w.width);
    }
    float squares = 0.0;
    [[unroll]] for (uint j = 0u; j < RUNS; j++) squares += dot(held[j], held[j]);
    float factor = 1.0 / sqrt(group_sum(squares) / float(w.width) + w.eps);
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        if (is_behind(j, w.width)) continue;
        held[j] = held[j] * factor * weights[j];
        if (rows_need(NORM_BIASES) && w.bias != 0ul) held[j] += load4(w.bias, 0u, 4u * run(j), w.width);
    }
}

// Adds another row, and scales both.
void end_row(uint64_t added, uint64_t factor, uint first, uint width, float scale) {
    if (added == 0ul) return;
    if (factor != 0ul) scale *= Floats(factor).at[0];
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        if (!is_behind(j, width)) held[j] = (held[j] + load4(added, first, 4u * run(j), width)) * scale;
    }
}

void bound_row(uint width, float low, float high) {
    [[unroll]] for (uint j = 0u; j < RUNS; j++) held[j] = within(min(max(held[j], low), high), 4u * run(j), width);
}

float largest4(vec4 v) {
    vec4 a = abs(v);
    return max(max(a.x, a.y), max(a.z, a.w));
}
float largest_of_row() {
    float most = 0.0;
    [[unroll]] for (uint j = 0u; j < RUNS; j++) most = max(most, largest4(held[j]));
    return group_max(most);
}
uint packed4(vec4 v, float inverse) {
    uint packed = 0u;
    [[unroll]] for (uint c = 0u; c < 4u; c++) packed |= quantised(v[c], inverse) << (8u * c);
    return packed;
}

// The largest number of the block that the run belongs to: eight runs are a block of 32.
shared float run_most[GROUP];
float largest_of_block(vec4 v) {
#ifdef SUBGROUPS
    if (gl_SubgroupSize >= 8u) {
        float largest = largest4(v);
        [[unroll]] for (uint mask = 1u; mask < 8u; mask *= 2u) largest = max(largest, subgroupShuffleXor(largest, mask));
        return largest;
    }
#endif
    barrier();
    run_most[gl_LocalInvocationID.x] = largest4(v);
    barrier();
    float most = 0.0;
    uint begin = gl_LocalInvocationID.x & ~7u;
    [[unroll]] for (uint k = 0u; k < 8u; k++) most = max(most, run_most[begin + k]);
    return most;
}
