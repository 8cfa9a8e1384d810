#version 460
// The step of one row in one dispatch: workgroups follow a list of instructions, as `stream.rs` writes it. Between levels of instructions that read one another's
// results all workgroups meet. They do so only where it was found out that all of them run at the same time; one that waits for too long gives up.
// variant step SUBGROUPS=1 INTEGER_DOT=1 ACROSS_GROUPS=1
// variant step_timed SUBGROUPS=1 INTEGER_DOT=1 ACROSS_GROUPS=1 TIMED=1
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
#include "common.glsl"
#ifdef TIMED
#extension GL_ARB_shader_clock : require
#endif
layout(constant_id = 0) const uint GROUP = 256;
layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint RUNS = 1; // of four numbers that an invocation holds of a row
#include "reduce.glsl"
#include "row.glsl"
#include "map.glsl"
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t stream;
    uint64_t meeting; // how many workgroups have come to meet, then whether one has given up
    uint begin; // the first instruction
    uint end;
    uint patience; // how often a workgroup looks for the others
};
const uint WORDS = 64u; // of an instruction
shared uint instructions[2u * WORDS]; // the one that is followed, and the next
uint current = 0u;
// Of the instruction: words, numbers, addresses.
uint word(uint i) { return instructions[current + i]; }
float number(uint i) { return uintBitsToFloat(word(i)); }
uint64_t place(uint i) { return uint64_t(word(i)) | uint64_t(word(i + 1u)) << 32; }
// The group that is worked on when this one is done: of the instruction that begins at this word; NONE: none of these.
uint next_at = 0u;
uint next_group = NONE;

// Room of a workgroup, and whose row is in it.
layout(constant_id = 22) const uint ROOM = 64;
shared uvec4 room[ROOM];
shared float row_scales[512];
uint held_source = NONE;
// A router's scores are in the room.
#define SCORE(e) uintBitsToFloat(room[(e) / 4u][(e) % 4u])
#include "route.glsl"

// The only segment, behind the header and the one row's entry: see `parameters.rs`.
Segment only_segment() {
    FixedWords c = FixedWords(call);
    return Segment(c.at[17], c.at[18], c.at[19], c.at[20], c.at[21], c.at[22], c.at[23]);
}

#include "step_hadamard.glsl"
#include "step_product.glsl"
#include "step_attend.glsl"
#include "step_recurrent.glsl"

// A row or a head, normed or gated, transformed, with something added, scaled.
void row_instruction(uint row) {
    uint width = word(18u);
    uint flags = word(20u);
    hold_row(RowWork(place(4u), place(6u), place(8u), place(10u), row * width, width, number(19u), flags & 1u, flags >> 4u & 15u, flags >> 1u & 3u));
    if (rows_need(TRANSFORMS) && word(24u) != 0u) {
        held_source = NONE;
        barrier();
        transform_row(width, word(24u), place(22u), number(25u));
    }
    end_row(place(12u), place(14u), row * width, width, number(21u));
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        if (!is_behind(j, width)) store4(place(16u), row * width, 4u * run(j), width, held[j]);
    }
}

void map_instruction(uint group) {
    uint i = group * GROUP + gl_LocalInvocationID.x;
    if (i >= word(10u)) return;
    Floats(place(8u)).at[i] = mapped(word(14u), word(15u), Floats(place(4u)).at[i], place(6u), i, word(11u), number(12u), number(13u));
}

// Parts of rows.
void part_instruction(uint group) {
    uint i = group * GROUP + gl_LocalInvocationID.x;
    uint width = word(9u);
    if (i >= word(8u) * width) return;
    uint row = i / width;
    uint column = i % width;
    Floats(place(6u)).at[row * word(12u) + word(13u) + column] = Floats(place(4u)).at[row * word(10u) + word(11u) + column];
}

// The scores of a router, read together.
void route_instruction() {
    uint lane = gl_LocalInvocationID.x;
    held_source = NONE;
    barrier();
    for (uint i = lane; i < word(10u); i += GROUP) room[i / 4u][i % 4u] = Words(place(4u)).at[i];
    barrier();
    if (lane == 0u) route(place(4u), place(6u), place(8u), 0u, word(10u), word(11u), word(12u), word(13u), number(14u));
}

bool follows(uint operation) { return (OPERATIONS >> operation & 1u) != 0u && word(0u) == operation; }
void follow(uint group) {
    if (follows(0u)) {
        kind = KIND_A;
        product(group);
    } else if (follows(1u)) {
        kind = KIND_B;
        product(group);
    } else if (follows(11u)) {
        kind = KIND_C;
        product(group);
    } else if (follows(2u)) {
        heads_kind = HEADS_A;
        attend(group);
    } else if (follows(3u)) {
        heads_kind = HEADS_B;
        attend(group);
    } else if (follows(4u)) merge(group);
    else if (follows(5u)) row_instruction(group);
    else if (follows(6u)) map_instruction(group);
    else if (follows(7u)) part_instruction(group);
    else if (follows(8u)) short_conv(group);
    else if (follows(9u)) delta(group);
    else if (follows(10u)) route_instruction();
}

shared uint gave_up;
const int ALL = gl_StorageSemanticsBuffer | gl_StorageSemanticsShared;
const int BOTH = gl_SemanticsAcquireRelease | gl_SemanticsMakeAvailable | gl_SemanticsMakeVisible;

// The first group of the current instruction that this workgroup works on: where the level's instructions before it end, others begin.
uint first_group() { return gl_WorkGroupID.x >= word(2u) ? gl_WorkGroupID.x - word(2u) : gl_WorkGroupID.x + gl_NumWorkGroups.x - word(2u); }

// Waits until so many workgroups have come: they see what all have written. False where one has given up.
bool meet(uint expected) {
    controlBarrier(gl_ScopeWorkgroup, gl_ScopeWorkgroup, ALL, BOTH);
    if (gl_LocalInvocationID.x == 0u) {
        Words all = Words(meeting);
        memoryBarrier(gl_ScopeDevice, gl_StorageSemanticsBuffer, gl_SemanticsRelease | gl_SemanticsMakeAvailable);
        atomicAdd(all.at[0], 1u, gl_ScopeDevice, 0, gl_SemanticsRelaxed);
        uint looks = 0u;
        uint over = 0u;
        while (over == 0u && atomicLoad(all.at[0], gl_ScopeDevice, 0, gl_SemanticsRelaxed) < expected) {
            looks++;
            if (looks % 256u == 0u) over = atomicLoad(all.at[1], gl_ScopeDevice, 0, gl_SemanticsRelaxed);
            if (looks >= patience) {
                over = 1u;
                atomicStore(all.at[1], 1u, gl_ScopeDevice, 0, gl_SemanticsRelaxed);
            }
        }
        gave_up = over;
        memoryBarrier(gl_ScopeDevice, gl_StorageSemanticsBuffer, gl_SemanticsAcquire | gl_SemanticsMakeVisible);
    }
    controlBarrier(gl_ScopeWorkgroup, gl_ScopeWorkgroup, ALL, BOTH);
    return gave_up == 0u;
}

// Where an instruction is timed: the first workgroup's clock when it begins, when it has done its part, and when all have.
const uint TIMES = 60u;
void stamp(uint instruction, uint what) {
#ifdef TIMED
    if (gl_WorkGroupID.x == 0u && gl_LocalInvocationID.x == 0u) Words(stream).at[instruction * WORDS + TIMES + what] = clock2x32ARB().x;
#endif
}

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint groups = gl_NumWorkGroups.x;
    uint meetings = 0u;
    if (lane < WORDS) instructions[lane] = FixedWords(stream).at[begin * WORDS + lane];
    uint next = begin + 1u < end && lane < WORDS ? FixedWords(stream).at[(begin + 1u) * WORDS + lane] : 0u;
    for (uint i = begin; i < end; i++) {
        current = (i - begin) % 2u * WORDS;
        uint other = WORDS - current;
        barrier();
        if (lane < WORDS) instructions[other + lane] = next;
        barrier();
        if (i + 2u < end && lane < WORDS) next = FixedWords(stream).at[(i + 2u) * WORDS + lane];
        stamp(i, 0u);
        uint count = word(1u);
        bool ends = word(3u) != 0u && i + 1u < end;
        uint after = NONE;
        if (i + 1u < end) {
            current = other;
            after = first_group();
            if (after >= word(1u)) after = NONE;
            current = WORDS - other;
        }
        for (uint group = first_group(); group < count; group += groups) {
            bool more = group + groups < count;
            next_at = more ? current : other;
            next_group = more ? group + groups : after;
            follow(group);
        }
        next_at = other;
        next_group = after;
        if (!ahead_there) look_ahead();
        stamp(i, 1u);
        if (ends) {
            meetings++;
            if (!meet(meetings * groups)) return;
        }
        stamp(i, 2u);
    }
}
