#version 460
// Rows times a weight: each team of lanes takes some weight rows and all (or the next few) rows of the call.
// variant linear SUBGROUPS=1 INTEGER_DOT=1
// variant linear_no_dot SUBGROUPS=1
// variant linear_plain PLAIN=1
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "weight.glsl"
#include "product.glsl"
layout(local_size_x = 128) in;
const uint GROUP = 128u;
#include "reduce.glsl"
layout(constant_id = 7) const uint TEAM_OUTPUTS = 8; // weight rows of a workgroup
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t x_scales;
    uint64_t data;
    uint64_t scales;
    uint64_t minima;
    uint64_t bias; // or 0
    uint64_t added; // to the result, or 0
    uint64_t y;
    uint rows;
    uint width;
    uint stride;
    uint outputs;
    uint data_bytes;
    uint scale_bytes;
    uint min_bytes;
    float low;
    float high;
};

void main() {
    Matrix m = Matrix(data, scales, minima, data_bytes, scale_bytes, min_bytes);
    Rows numbers = Rows(x, x_scales, width, stride);
    uint first_row = gl_WorkGroupID.y * ROWS;
#ifdef SUBGROUPS
    uint team = gl_SubgroupID;
    uint teams = gl_NumSubgroups;
    uint lane = gl_SubgroupInvocationID;
    uint lanes = gl_SubgroupSize;
#else
    uint team = 0u;
    uint teams = 1u;
    uint lane = gl_LocalInvocationID.x;
    uint lanes = GROUP;
#endif
    for (uint i = team * OUTPUTS; i < TEAM_OUTPUTS; i += teams * OUTPUTS) {
        uint first_output = gl_WorkGroupID.x * TEAM_OUTPUTS + i;
        if (first_output >= outputs) break;
        [[unroll]] for (uint j = 0u; j < OUTPUTS * ROWS; j++) sums[j] = 0.0;
        add_products(m, numbers, first_output, outputs, first_row, rows, lane, lanes);
        [[unroll]] for (uint slot = 0u; slot < OUTPUTS; slot++) {
            [[unroll]] for (uint r = 0u; r < ROWS; r++) {
#ifdef SUBGROUPS
                precise float sum = subgroupAdd(sums[slot * ROWS + r]);
#else
                precise float sum = group_sum(sums[slot * ROWS + r]);
#endif
                uint output_row = first_output + slot;
                uint row = first_row + r;
                if (lane == (slot * ROWS + r) % lanes && output_row < outputs && row < rows) {
                    // A driver may load before it knows whether there is such an output, or anything to add: what it loads then is there, too.
                    uint place = row * outputs + output_row;
                    sum *= last_factor(m, numbers, min(output_row, outputs - 1u), row);
                    float own_bias = Floats(bias != 0ul ? bias : data).at[output_row];
                    float other = Floats(added != 0ul ? added : y).at[place];
                    if (bias != 0ul) sum += own_bias;
                    sum = min(max(sum, low), high);
                    if (added != 0ul) sum += other;
                    Floats(y).at[place] = sum;
                }
            }
        }
    }
}
