// The orthogonal transform of the row that a workgroup holds, as `qhx_ir::hadamard` states it: number i · odd + j of 2^steps · odd has the indexes i and j. In the room, numbers with the same j
// stand together: i + j · 2^steps, so that each step makes sums and differences of numbers whose places differ in one bit.
layout(constant_id = 31) const uint ODD = 1; // the odd factor whose loops are unrolled
const uint TRANSFORMS = 16u, OTHER_ODDS = 32u; // of `ROW_WORK`

// So that lanes that take numbers far apart find them in different banks. Four in a row stay together.
uint spread(uint at) { return at ^ (at >> 4u & 28u); }
float room_number(uint at) { return uintBitsToFloat(room[at / 4u][at % 4u]); }

// The small dense blocks come first: they mix the numbers with the same i, which stand together in the row. What is held then has its place in the room.
void dense_blocks(uint width, uint steps, uint odd, uint64_t hartley) {
    bool unrolled = ODD > 1u && odd == ODD && steps >= 2u;
    if (unrolled) {
        for (uint i = gl_LocalInvocationID.x; i < ODD * ODD; i += GROUP) row_scales[i] = FixedFloats(hartley).at[i];
    }
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        if (4u * run(j) < width) room[run(j)] = floatBitsToUint(held[j]);
    }
    barrier();
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        vec4 sum = vec4(0.0);
        uint at = 4u * run(j);
        if (unrolled) {
            if (at < width) {
                uint first = (at & (1u << steps) - 1u) / 4u * ODD;
                float entries[ODD];
                [[unroll]] for (uint k = 0u; k < ODD; k++) entries[k] = row_scales[(at >> steps) * ODD + k];
                [[unroll]] for (uint k = 0u; k < ODD; k++) {
                    vec4 four = uintBitsToFloat(room[first + k]);
                    [[unroll]] for (uint c = 0u; c < 4u; c++) sum[(4u * k + c) / ODD] += entries[(4u * k + c) % ODD] * four[c];
                }
            }
        } else if (rows_need(OTHER_ODDS)) {
            for (uint c = 0u; c < 4u && at + c < width; c++) {
                uint block = (at + c & (1u << steps) - 1u) * odd;
                uint row = (at + c >> steps) * odd;
                for (uint k = 0u; k < odd; k++) sum[c] += FixedFloats(hartley).at[row + k] * room_number(block + k);
            }
        }
        held[j] = sum;
    }
    barrier();
}

// Four numbers in a row, from where they are in the room.
vec4 gathered(uint at, uint width, uint steps, uint odd) {
    vec4 four = vec4(0.0);
    uint i = at / odd;
    uint j = at % odd;
    [[unroll]] for (uint c = 0u; c < 4u; c++) {
        if (at + c < width) four[c] = room_number(spread(i + (j << steps)));
        j++;
        if (j == odd) {
            j = 0u;
            i++;
        }
    }
    return four;
}

// Nobody may need the room when it begins; it is free again when it has ended.
void transform_row(uint width, uint odd, uint64_t hartley, float factor) {
    uint lane = gl_LocalInvocationID.x;
    uint steps = uint(findLSB(width));
    if (odd > 1u) dense_blocks(width, steps, odd, hartley);
    // The first two steps are within four numbers, some more within a subgroup: as many as leave a multiple of four.
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        vec4 v = held[j];
        if (steps > 0u) v = vec4(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
        if (steps > 1u) v = vec4(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
        held[j] = v;
    }
    uint done = 2u;
    for (uint mask = 1u; done < steps && (steps - done) % 4u != 0u && mask < gl_SubgroupSize; mask *= 2u) {
        float sign = (lane & mask) == 0u ? 1.0 : -1.0;
        [[unroll]] for (uint j = 0u; j < RUNS; j++) {
            if (!is_behind(j, width)) held[j] = subgroupShuffleXor(held[j], mask) + sign * held[j];
        }
        done++;
    }
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        if (4u * run(j) < width) room[spread(4u * run(j)) / 4u] = floatBitsToUint(held[j]);
    }
    barrier();
    // The others four at a time, of sixteen numbers; where fewer are left, some of the last ones are passed over.
    while (done < steps) {
        uint low = min(done, steps - 4u);
        for (uint item = lane; item < width / 16u; item += GROUP) {
            uint first = spread((item >> low) << (low + 4u) | item & (1u << low) - 1u);
            float x[16];
            [[unroll]] for (uint i = 0u; i < 16u; i++) x[i] = room_number(first ^ spread(i << low));
            [[unroll]] for (uint bit = 0u; bit < 4u; bit++) {
                if (low + bit < done) continue;
                [[unroll]] for (uint i = 0u; i < 16u; i++) {
                    if ((i >> bit & 1u) != 0u) continue;
                    float other = x[i | 1u << bit];
                    x[i | 1u << bit] = x[i] - other;
                    x[i] += other;
                }
            }
            [[unroll]] for (uint i = 0u; i < 16u; i++) {
                uint at = first ^ spread(i << low);
                room[at / 4u][at % 4u] = floatBitsToUint(x[i]);
            }
        }
        done = low + 4u;
        barrier();
    }
    [[unroll]] for (uint j = 0u; j < RUNS; j++) {
        uint at = 4u * run(j);
        vec4 v = vec4(0.0);
        if (at < width) {
            if (odd == 1u) v = uintBitsToFloat(room[spread(at) / 4u]);
            else if (ODD > 1u && odd == ODD) v = gathered(at, width, steps, ODD);
            else if (rows_need(OTHER_ODDS)) v = gathered(at, width, steps, odd);
        }
        held[j] = v * factor;
    }
    barrier();
}
