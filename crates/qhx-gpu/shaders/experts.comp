#version 460
// Products with the weights of chosen experts, a chosen pair of row and expert at a time.
// variant experts SUBGROUPS=1 INTEGER_DOT=1
// variant experts_no_dot SUBGROUPS=1
// variant experts_plain PLAIN=1
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "weight.glsl"
#include "product.glsl"
layout(local_size_x = 128) in;
const uint GROUP = 128u;
#include "reduce.glsl"
layout(constant_id = 7) const uint KIND = 0; // 0 gate and up, 1 down, 2 one of gate and up, which have different encodings
layout(constant_id = 8) const uint FUNCTION = 0;
layout(constant_id = 10) const uint TEAM_OUTPUTS = 16; // weight rows of a workgroup
layout(constant_id = 11) const uint CHOICES = 1; // of a row
layout(constant_id = 12) const uint EXPERTS = 1; // that are there
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t x_scales;
    uint64_t data[2]; // of gate and up, or of down
    uint64_t scales[2];
    uint64_t minima[2];
    uint64_t chosen;
    uint64_t added[2]; // the biases of gate and up, or 0; for down the weights of choices, and what is added to their sum, or 0
    uint64_t places; // of experts, or 0
    uint64_t y;
    uint width;
    uint stride;
    uint outputs;
    uint data_bytes;
    uint scale_bytes;
    uint min_bytes;
};

Matrix matrix(uint number, uint expert) {
    uint64_t first = uint64_t(expert) * outputs;
    return Matrix(data[number] + first * data_bytes, scales[number] + first * scale_bytes, minima[number] + first * min_bytes, data_bytes, scale_bytes, min_bytes);
}

// The bias of gate or up of an expert.
float bias(uint number, uint expert, uint output_row) {
    return added[number] == 0ul ? 0.0 : Floats(added[number]).at[expert * outputs + output_row];
}

#ifdef SUBGROUPS
#define TEAM_SUM subgroupAdd
#else
#define TEAM_SUM group_sum
#endif

void main() {
    Rows numbers = Rows(x, x_scales, width, stride);
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
    uint group = gl_WorkGroupID.y + gl_WorkGroupID.z * gl_NumWorkGroups.y;
    for (uint i = team; i < TEAM_OUTPUTS; i += teams) {
        uint output_row = gl_WorkGroupID.x * TEAM_OUTPUTS + i;
        if (output_row >= outputs) break;
        if (KIND == 0u) {
            uint row = group / CHOICES;
            uint expert = expert_place(Words(chosen).at[group], places, EXPERTS);
            if (expert == NONE) break;
            float both[2];
            [[unroll]] for (uint which = 0u; which < 2u; which++) {
                Matrix m = matrix(which, expert);
                sums[0] = 0.0;
                add_products(m, numbers, output_row, outputs, row, row + 1u, lane, lanes);
                both[which] = TEAM_SUM(sums[0]) * last_factor(m, numbers, output_row, row) + bias(which, expert, output_row);
            }
            if (lane == 0u) Floats(y).at[group * outputs + output_row] = activate(FUNCTION, both[0]) * both[1];
        } else if (KIND == 2u) {
            uint row = group / CHOICES;
            uint expert = expert_place(Words(chosen).at[group], places, EXPERTS);
            if (expert == NONE) break;
            Matrix m = matrix(0u, expert);
            sums[0] = 0.0;
            add_products(m, numbers, output_row, outputs, row, row + 1u, lane, lanes);
            float one = TEAM_SUM(sums[0]) * last_factor(m, numbers, output_row, row) + bias(0u, expert, output_row);
            if (lane == 0u) Floats(y).at[group * outputs + output_row] = one;
        } else {
            float all = 0.0;
            for (uint choice = 0u; choice < CHOICES; choice++) {
                uint pair = group * CHOICES + choice;
                uint expert = expert_place(Words(chosen).at[pair], places, EXPERTS);
                if (expert == NONE) continue;
                Matrix m = matrix(0u, expert);
                sums[0] = 0.0;
                add_products(m, numbers, output_row, outputs, pair, pair + 1u, lane, lanes);
                all += Floats(added[0]).at[pair] * (TEAM_SUM(sums[0]) * last_factor(m, numbers, output_row, pair));
            }
            uint at = group * outputs + output_row;
            if (lane == 0u) Floats(y).at[at] = added[1] == 0ul ? all : all + Floats(added[1]).at[at];
        }
    }
}
