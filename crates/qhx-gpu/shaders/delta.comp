#version 460
// The delta rule, row after row: SHARE invocations hold a column of a head's state, each every so-manieth number of it. What a row reads from the state for its key and
// for its query is summed at once, for the result follows from both: q·(d·S + k·δ) = d·(q·S) + (q·k)·δ.
// variant delta SUBGROUPS=1
// variant delta_plain PLAIN=1
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 64) in;
layout(constant_id = 0) const uint KEY_DIM = 128;
layout(constant_id = 1) const uint REPLAY = 0;
layout(constant_id = 2) const uint SHARE = 1; // 1 without subgroups, else a power of two that they are a multiple of
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
const uint OWN = (KEY_DIM + SHARE - 1u) / SHARE;
const uint COLUMNS = 64u / SHARE;
float state[OWN];
// The next row's, which are loaded while this one's are used.
float keys[OWN];
float queries[OWN];
float decay;
float step_size;
float value;

void load(uint64_t from, uint part, uint column) {
    Floats row = Floats(from);
    [[unroll]] for (uint i = 0u; i < OWN; i++) {
        uint at = i * SHARE + part;
        bool there = KEY_DIM % SHARE == 0u || at < KEY_DIM;
        keys[i] = there ? row.at[at] : 0.0;
        queries[i] = there ? row.at[KEY_DIM + value_dim + 2u + at] : 0.0;
    }
    decay = row.at[KEY_DIM + value_dim];
    step_size = row.at[KEY_DIM + value_dim + 1u];
    value = row.at[KEY_DIM + column];
}

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint part = lane % SHARE;
    uint head = gl_WorkGroupID.x;
    uint column = gl_WorkGroupID.y * COLUMNS + lane / SHARE;
    bool own = column < value_dim;
    column = min(column, value_dim - 1u);
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
    [[unroll]] for (uint i = 0u; i < OWN; i++) {
        uint at = i * SHARE + part;
        state[i] = before != 0ul && at < KEY_DIM ? Floats(before).at[(head * KEY_DIM + at) * value_dim + column] : 0.0;
    }
    uint64_t from = rows + 4ul * uint64_t((first * heads + head) * width);
    if (first < last) load(from, part, column);
    for (uint row = first; row < last; row++) {
        float key[OWN];
        float query[OWN];
        [[unroll]] for (uint i = 0u; i < OWN; i++) {
            key[i] = keys[i];
            query[i] = queries[i];
        }
        float d = decay;
        float size = step_size;
        float wanted = value;
        from += 4ul * uint64_t(heads * width);
        if (row + 1u < last) load(from, part, column);
        precise float read = 0.0;
        precise float result = 0.0;
        precise float meeting = 0.0;
        [[unroll]] for (uint i = 0u; i < OWN; i++) {
            read = fma(state[i], key[i], read);
            result = fma(state[i], query[i], result);
            meeting = fma(key[i], query[i], meeting);
        }
#ifdef SUBGROUPS
        [[unroll]] for (uint mask = 1u; mask < SHARE; mask *= 2u) {
            read += subgroupShuffleXor(read, mask);
            result += subgroupShuffleXor(result, mask);
            meeting += subgroupShuffleXor(meeting, mask);
        }
#endif
        precise float delta = size * fma(-d, read, wanted);
        // A replay makes the same of it.
        [[unroll]] for (uint i = 0u; i < OWN; i++) {
            precise float later = fma(key[i], delta, d * state[i]);
            state[i] = later;
        }
        precise float answer = fma(meeting, delta, d * result);
        if (REPLAY == 0u && own && part == 0u) Floats(y).at[(row * heads + head) * value_dim + column] = answer;
    }
    [[unroll]] for (uint i = 0u; i < OWN; i++) {
        uint at = i * SHARE + part;
        if (own && at < KEY_DIM) Floats(after).at[(head * KEY_DIM + at) * value_dim + column] = state[i];
    }
}
