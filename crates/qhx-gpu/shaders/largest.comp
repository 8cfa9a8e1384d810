#version 460
// The `count` largest numbers of each row and their places, the largest first, the first of equal ones before others; a NaN is larger than all numbers. First by parts of a
// row, then over the parts.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 128) in;
const uint GROUP = 128u;
layout(constant_id = 0) const uint LAST = 0; // whether x holds results of the first pass
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t y; // pairs of a place and the bits of a number
    uint width; // of a row; in the last pass the number of pairs
    uint parts;
    uint count;
};
shared uvec3 best[GROUP];

// An order in which a NaN comes last, then its place: the order, the place, the bits.
uvec3 entry(uint bits, uint place) {
    uint magnitude = bits & 0x7fffffffu;
    uint order = magnitude > 0x7f800000u ? 0xffffffffu : magnitude == 0u ? 0x80000000u : (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
    return uvec3(order, place, bits);
}
bool comes_before(uvec3 a, uvec3 b) { return a.x > b.x || (a.x == b.x && a.y < b.y); }
uvec3 better(uvec3 a, uvec3 b) { return comes_before(b, a) ? b : a; }

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint row = gl_WorkGroupID.y;
    uint part = gl_WorkGroupID.x;
    const uvec3 nothing = uvec3(0u, NONE, 0u);
    uvec3 last = nothing;
    for (uint n = 0u; n < count; n++) {
        uvec3 own = nothing;
        if (LAST == 0u) {
            for (uint i = part * GROUP + lane; i < width; i += parts * GROUP) {
                uvec3 found = entry(Words(x).at[row * width + i], i);
                if (n == 0u || comes_before(last, found)) own = better(own, found);
            }
        } else {
            for (uint i = lane; i < width; i += GROUP) {
                uvec2 pair = Pairs(x).at[row * width + i];
                uvec3 found = entry(pair.y, pair.x);
                if (pair.x != NONE && (n == 0u || comes_before(last, found))) own = better(own, found);
            }
        }
        best[lane] = own;
        barrier();
        for (uint half_size = GROUP / 2u; half_size > 0u; half_size /= 2u) {
            if (lane < half_size) best[lane] = better(best[lane], best[lane + half_size]);
            barrier();
        }
        last = best[0];
        if (lane == 0u) Pairs(y).at[(LAST == 0u ? row * parts + part : row) * count + n] = last.yz;
        // `best` is written again.
        barrier();
    }
}
