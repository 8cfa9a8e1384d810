#version 460
// The delta rule, row after row: an invocation holds one column of a head's state.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 32) in;
layout(constant_id = 0) const uint KEY_DIM = 128;
layout(constant_id = 1) const uint REPLAY = 0;
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t rows; // as `delta_rows` makes them; in a replay the record
    uint64_t y;
    uint64_t old; // in a replay
    uint64_t next; // in a replay
    uint count; // in a replay: the rows that count
    uint heads;
    uint value_dim;
    uint slot;
};
shared float shared_row[2u * KEY_DIM + 2u];

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint head = gl_WorkGroupID.x;
    uint column = gl_WorkGroupID.y * 32u + lane;
    bool own = column < value_dim;
    uint width = 2u * KEY_DIM + value_dim + 2u;
    uint first = 0u;
    uint last = count;
    uint64_t before = old;
    uint64_t after = next;
    if (REPLAY == 0u) {
        Segment s = segment(Words(call), gl_WorkGroupID.z);
        first = s.first_row;
        last = first + s.valid_rows;
        before = address(Words(call), s.recurrent + 6u * slot);
        after = address(Words(call), s.recurrent + 6u * slot + 2u);
    }
    float state[KEY_DIM];
    for (uint i = 0u; i < KEY_DIM; i++) {
        state[i] = own && before != 0ul ? Floats(before).at[(head * KEY_DIM + i) * value_dim + column] : 0.0;
    }
    for (uint row = first; row < last; row++) {
        Floats from = Floats(rows + 4ul * uint64_t((row * heads + head) * width));
        barrier();
        for (uint i = lane; i < KEY_DIM; i += 32u) {
            shared_row[i] = from.at[i];
            shared_row[KEY_DIM + i] = from.at[KEY_DIM + value_dim + 2u + i];
        }
        barrier();
        float decay = from.at[KEY_DIM + value_dim];
        float read = 0.0;
        for (uint i = 0u; i < KEY_DIM; i++) {
            state[i] *= decay;
            read += state[i] * shared_row[i];
        }
        float delta = own ? from.at[KEY_DIM + value_dim + 1u] * (from.at[KEY_DIM + column] - read) : 0.0;
        float result = 0.0;
        for (uint i = 0u; i < KEY_DIM; i++) {
            state[i] += shared_row[i] * delta;
            result += state[i] * shared_row[KEY_DIM + i];
        }
        if (REPLAY == 0u && own) Floats(y).at[(row * heads + head) * value_dim + column] = result;
    }
    if (own) {
        for (uint i = 0u; i < KEY_DIM; i++) Floats(after).at[(head * KEY_DIM + i) * value_dim + column] = state[i];
    }
}
