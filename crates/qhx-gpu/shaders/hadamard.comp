#version 460
// The orthogonal transform of a row: sums and differences, then small dense blocks; a row for each workgroup.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 256) in;
layout(buffer_reference, std430, buffer_reference_align = 4) coherent buffer Moving { float at[]; };
layout(push_constant) uniform Arguments {
    uint64_t x;
    uint64_t hartley; // [odd, odd], or 0 where the odd factor is 1
    uint64_t room; // as large as x
    uint64_t y;
    uint rows;
    uint width;
    uint odd;
    float factor;
};

void step_barrier() {
    memoryBarrierBuffer();
    barrier();
}

void main() {
    uint row = flat_group();
    if (row >= rows) return;
    uint lane = gl_LocalInvocationID.x;
    uint first = row * width;
    Moving work = Moving(room);
    for (uint i = lane; i < width; i += 256u) work.at[first + i] = Floats(x).at[first + i];
    step_barrier();
    for (uint distance = odd; distance < width; distance *= 2u) {
        for (uint pair = lane; pair < width / 2u; pair += 256u) {
            uint i = first + pair / distance * 2u * distance + pair % distance;
            float a = work.at[i];
            float b = work.at[i + distance];
            work.at[i] = a + b;
            work.at[i + distance] = a - b;
        }
        step_barrier();
    }
    for (uint i = lane; i < width; i += 256u) {
        float sum = 0.0;
        if (hartley == 0ul) sum = work.at[first + i];
        else {
            uint block = first + i / odd * odd;
            for (uint j = 0u; j < odd; j++) sum += Floats(hartley).at[i % odd * odd + j] * work.at[block + j];
        }
        Floats(y).at[first + i] = sum * factor;
    }
}
