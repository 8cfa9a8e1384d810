#version 460
// What each row brings to the delta rule, head by head: its unit key and value, decay and step, its unit query.
// variant delta_rows SUBGROUPS=1
// variant delta_rows_plain PLAIN=1
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 64) in;
const uint GROUP = 64u;
#include "reduce.glsl"
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t q;
    uint64_t k;
    uint64_t v;
    uint64_t a;
    uint64_t b;
    uint64_t a_log;
    uint64_t dt_bias;
    uint64_t y; // [rows, heads, 2 key_dim + value_dim + 2]
    uint rows;
    uint heads;
    uint key_heads;
    uint key_dim;
    uint value_dim;
    uint slot;
    float scale;
    float eps;
};

float log_plus_one(float x) { return x < 0.01 ? x * (1.0 - x * (0.5 - x * (1.0 / 3.0 - x * 0.25))) : log(1.0 + x); }

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint head = gl_WorkGroupID.x;
    uint row = gl_WorkGroupID.y + gl_WorkGroupID.z * gl_NumWorkGroups.y;
    if (row >= rows) return;
    uint number = segment_of(Words(call), row);
    if (number == NONE) return;
    Segment s = segment(Words(call), number);
    uint width = 2u * key_dim + value_dim + 2u;
    uint key_at = (row * key_heads + head / (heads / key_heads)) * key_dim;
    float squares_q = 0.0;
    float squares_k = 0.0;
    for (uint i = lane; i < key_dim; i += GROUP) {
        float x = Floats(q).at[key_at + i];
        float z = Floats(k).at[key_at + i];
        squares_q += x * x;
        squares_k += z * z;
    }
    float factor_q = scale / sqrt(group_sum(squares_q) + eps);
    float factor_k = 1.0 / sqrt(group_sum(squares_k) + eps);
    float x = Floats(a).at[row * heads + head] + Floats(dt_bias).at[head];
    float soft = max(x, 0.0) + log_plus_one(exp(-abs(x)));
    float decay = exp(-exp(Floats(a_log).at[head]) * soft);
    float step_size = sigmoid(Floats(b).at[row * heads + head]);
    uint64_t record = address(Words(call), s.recurrent + 6u * slot + 4u);
    [[unroll]] for (uint copy = 0u; copy < 2u; copy++) {
        if (copy == 1u && record == 0ul) return;
        Floats to = copy == 0u ? Floats(y + 4ul * uint64_t((row * heads + head) * width))
                               : Floats(record + 4ul * uint64_t(((row - s.first_row) * heads + head) * width));
        for (uint i = lane; i < key_dim; i += GROUP) {
            to.at[i] = Floats(k).at[key_at + i] * factor_k;
            to.at[key_dim + value_dim + 2u + i] = Floats(q).at[key_at + i] * factor_q;
        }
        for (uint i = lane; i < value_dim; i += GROUP) to.at[key_dim + i] = Floats(v).at[(row * heads + head) * value_dim + i];
        if (lane == 0u) {
            to.at[key_dim + value_dim] = decay;
            to.at[key_dim + value_dim + 1u] = step_size;
        }
    }
}
