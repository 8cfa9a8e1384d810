#version 460
// Many rows times an int8 weight, both with a scale for each row: integer products of small matrices. A workgroup takes a tile of 128 outputs and 64 rows; 64 columns of
// both wait in shared memory while the next 64 are loaded.
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#pragma use_vulkan_memory_model
#define SUBGROUPS 1
#include "common.glsl"
layout(local_size_x = 128) in;
layout(push_constant) uniform Arguments {
    uint64_t x; // int8, [rows, stride]
    uint64_t x_scales;
    uint64_t data;
    uint64_t scales;
    uint64_t bias; // or 0
    uint64_t added; // to the result, or 0
    uint64_t y;
    uint rows;
    uint width;
    uint stride; // bytes of a row of x, a multiple of 32
    uint outputs;
    uint data_bytes; // of a weight row, a multiple of 64
    float low;
    float high;
};
const uint OUTPUTS = 128u;
const uint ROWS = 64u;
// Sixteens of bytes: of 64 columns, and of a row in shared memory, where one more keeps neighbouring rows in different banks.
const uint QUADS = 4u;
const uint PITCH = 5u;
shared uvec4 weights[OUTPUTS * PITCH];
shared uvec4 numbers[ROWS * PITCH];
shared int results[4u * 256u];

uvec4 ahead_weights[4];
uvec4 ahead_numbers[2];

// Loads the 64 columns from k on. Beyond the end of x stand zeros, so that whatever weights have there does not count.
void load(uint first_output, uint first_row, uint k) {
    uint lane = gl_LocalInvocationID.x;
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        uint at = i * 128u + lane;
        uint output_row = min(first_output + at / QUADS, outputs - 1u);
        ahead_weights[i] = Quads(data + uint64_t(output_row) * data_bytes).at[k / 16u + at % QUADS];
    }
    [[unroll]] for (uint i = 0u; i < 2u; i++) {
        uint at = i * 128u + lane;
        uint column = k / 16u + at % QUADS;
        ahead_numbers[i] = column * 16u < stride ? Quads(x + uint64_t(first_row + at / QUADS) * stride).at[column] : uvec4(0u);
    }
}

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint first_output = gl_WorkGroupID.x * OUTPUTS;
    uint first_row = gl_WorkGroupID.y * ROWS;
    coopmat<int, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator> sums[8];
    [[unroll]] for (uint i = 0u; i < 8u; i++) sums[i] = coopmat<int, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>(0);
    load(first_output, first_row, 0u);
    for (uint k = 0u; k < width; k += 64u) {
        barrier();
        [[unroll]] for (uint i = 0u; i < 4u; i++) {
            uint at = i * 128u + lane;
            weights[at / QUADS * PITCH + at % QUADS] = ahead_weights[i];
        }
        [[unroll]] for (uint i = 0u; i < 2u; i++) {
            uint at = i * 128u + lane;
            numbers[at / QUADS * PITCH + at % QUADS] = ahead_numbers[i];
        }
        barrier();
        if (k + 64u < width) load(first_output, first_row, k + 64u);
        [[unroll]] for (uint part = 0u; part < 2u; part++) {
            coopmat<int8_t, gl_ScopeSubgroup, 16, 32, gl_MatrixUseA> a[2];
            [[unroll]] for (uint i = 0u; i < 2u; i++) {
                coopMatLoad(a[i], weights, (gl_SubgroupID * 32u + 16u * i) * PITCH + 2u * part, PITCH, gl_CooperativeMatrixLayoutRowMajor);
            }
            [[unroll]] for (uint j = 0u; j < 4u; j++) {
                coopmat<int8_t, gl_ScopeSubgroup, 32, 16, gl_MatrixUseB> b;
                coopMatLoad(b, numbers, 16u * j * PITCH + 2u * part, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
                [[unroll]] for (uint i = 0u; i < 2u; i++) sums[i * 4u + j] = coopMatMulAdd(a[i], b, sums[i * 4u + j]);
            }
        }
    }
    uint own = gl_SubgroupID * 256u;
    [[unroll]] for (uint i = 0u; i < 2u; i++) {
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            barrier();
            coopMatStore(sums[i * 4u + j], results, own, 16u, gl_CooperativeMatrixLayoutColumnMajor);
            barrier();
            for (uint n = gl_SubgroupInvocationID; n < 256u; n += gl_SubgroupSize) {
                uint row = first_row + 16u * j + n / 16u;
                uint output_row = first_output + gl_SubgroupID * 32u + 16u * i + n % 16u;
                if (row < rows && output_row < outputs) {
                    float sum = float(results[own + n]) * (Floats(scales).at[output_row] * Floats(x_scales).at[row]);
                    if (bias != 0ul) sum += Floats(bias).at[output_row];
                    sum = min(max(sum, low), high);
                    if (added != 0ul) sum += Floats(added).at[row * outputs + output_row];
                    Floats(y).at[row * outputs + output_row] = sum;
                }
            }
        }
    }
}
