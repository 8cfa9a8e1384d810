#version 460
// The largest number of each row and its place, the first of equal ones; a NaN is larger than all numbers. First by parts of a row, then over the parts.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 128) in;
const uint GROUP = 128u;
layout(constant_id = 0) const uint LAST = 0; // whether x holds results of the first pass
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t y; // pairs of a place and the bits of a number
    uint width; // of a row; in the last pass the number of parts
    uint parts;
};
shared uvec3 best[GROUP];

// An order in which a NaN comes last, then its place: the order, the place, the bits.
uvec3 entry(uint bits, uint place) {
    uint magnitude = bits & 0x7fffffffu;
    uint order = magnitude > 0x7f800000u ? 0xffffffffu : magnitude == 0u ? 0x80000000u : (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
    return uvec3(order, place, bits);
}
uvec3 better(uvec3 a, uvec3 b) { return b.x > a.x || (b.x == a.x && b.y < a.y) ? b : a; }

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint row = gl_WorkGroupID.y;
    uint part = gl_WorkGroupID.x;
    uvec3 own = uvec3(0u, NONE, 0u);
    if (LAST == 0u) {
        for (uint i = part * GROUP + lane; i < width; i += parts * GROUP) own = better(own, entry(Words(x).at[row * width + i], i));
    } else {
        for (uint i = lane; i < width; i += GROUP) {
            uvec2 found = Pairs(x).at[row * width + i];
            if (found.x != NONE) own = better(own, entry(found.y, found.x));
        }
    }
    best[lane] = own;
    barrier();
    for (uint half_size = GROUP / 2u; half_size > 0u; half_size /= 2u) {
        if (lane < half_size) best[lane] = better(best[lane], best[lane + half_size]);
        barrier();
    }
    if (lane == 0u) Pairs(y).at[LAST == 0u ? row * parts + part : row] = best[0].yz;
}
