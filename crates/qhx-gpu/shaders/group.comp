#version 460
// Groups the chosen pairs of row and expert by expert, into tiles of rows that share one. Written are: how many tiles there are, the place of the order, the expert of
// each tile, and the order itself, in which the rest of an expert's last tile is none. The order among an expert's pairs does not matter. Pairs whose expert is not there are left out.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 256) in;
layout(constant_id = 0) const uint EXPERTS = 16;
layout(constant_id = 1) const uint TILE_ROWS = 64;
layout(push_constant) uniform Arguments {
    uint64_t chosen;
    uint64_t groups;
    uint64_t places; // of experts, or 0
    uint pairs;
    uint most_tiles;
};
shared uint counts[EXPERTS];
shared uint first_tile[EXPERTS + 1u];
shared uint taken[EXPERTS];

uint expert_of(uint pair) { return expert_place(Words(chosen).at[pair], places, EXPERTS); }

void main() {
    uint lane = gl_LocalInvocationID.x;
    Words g = Words(groups);
    uint order = 2u + most_tiles;
    for (uint e = lane; e < EXPERTS; e += 256u) {
        counts[e] = 0u;
        taken[e] = 0u;
    }
    barrier();
    for (uint pair = lane; pair < pairs; pair += 256u) {
        uint e = expert_of(pair);
        if (e != NONE) atomicAdd(counts[e], 1u);
    }
    barrier();
    if (lane == 0u) {
        uint tiles = 0u;
        for (uint e = 0u; e < EXPERTS; e++) {
            first_tile[e] = tiles;
            tiles += (counts[e] + TILE_ROWS - 1u) / TILE_ROWS;
        }
        first_tile[EXPERTS] = tiles;
        g.at[0] = tiles;
        g.at[1] = order;
    }
    barrier();
    for (uint e = lane; e < EXPERTS; e += 256u) {
        for (uint tile = first_tile[e]; tile < first_tile[e + 1u]; tile++) g.at[2u + tile] = e;
        for (uint at = first_tile[e] * TILE_ROWS + counts[e]; at < first_tile[e + 1u] * TILE_ROWS; at++) g.at[order + at] = NONE;
    }
    for (uint pair = lane; pair < pairs; pair += 256u) {
        uint e = expert_of(pair);
        if (e != NONE) g.at[order + first_tile[e] * TILE_ROWS + atomicAdd(taken[e], 1u)] = pair;
    }
}
