// Products of weight rows with rows of numbers. A weight row is taken in chunks of 16 bytes (int6: a block of 24); a lane takes every so-manieth chunk.
#ifndef STORED_ROWS
layout(constant_id = 4) const uint FORM = 0; // how the other rows come: 0 floats, 1 int8 with a scale for each row, 2 int8 with a scale for each 32
layout(constant_id = 5) const uint ROWS = 1; // rows that meet a weight row at once
layout(constant_id = 6) const uint OUTPUTS = 1; // weight rows at once
layout(constant_id = 9) const uint AHEAD = 1; // chunks that are loaded before the first is used
#endif

#ifdef INTEGER_DOT
#extension GL_EXT_integer_dot_product : require
int dot4(uint a, uint b) { return dotPacked4x8EXT(int(a), int(b)); }
#else
int dot4(uint a, uint b) {
    int sum = 0;
    [[unroll]] for (int i = 0; i < 32; i += 8) sum += bitfieldExtract(int(a), i, 8) * bitfieldExtract(int(b), i, 8);
    return sum;
}
#endif

struct Matrix {
    uint64_t data;
    uint64_t scales;
    uint64_t minima;
    uint data_bytes;
    uint scale_bytes;
    uint min_bytes;
};
#ifndef STORED_ROWS
struct Rows {
    uint64_t numbers;
    uint64_t scales;
    uint width;
    uint stride; // numbers from row to row, a multiple of 32
};
#endif

float sums[OUTPUTS * ROWS];

// Several rows at once have the sums that each has alone. A step in one dispatch has one row, and leaves the compiler its freedom.
#ifdef STORED_ROWS
#define ALIKE
#define dot_alike dot
#define SCALED(scale, sum, minimum, all) scale * sum + minimum * all
#define add(place, number) sums[place] += number
#else
#define ALIKE precise
#define SCALED scaled
#include "alike.glsl"
float scaled(float scale, float sum, float minimum, float all) {
    precise float both = scale * sum;
    if (MIN == 1u) both = fma(minimum, all, both);
    return both;
}
void add(uint place, float number) {
    precise float more = sums[place] + number;
    sums[place] = more;
}
#endif

#ifndef STORED_ROWS
// Of a row: four numbers, sixteen bytes and the scale of a block, from a column on.
vec4 row_floats(Rows x, uint row, uint column) { return Vectors(x.numbers + 4ul * (uint64_t(row) * x.stride + column)).at[0]; }
uvec4 row_bytes(Rows x, uint row, uint column) { return Quads(x.numbers + uint64_t(row) * x.stride + column).at[0]; }
float row_scale(Rows x, uint row, uint column) { return Floats(x.scales).at[FORM == 1u ? row : row * (x.stride / 32u) + column / 32u]; }
#endif

// Four stored integers as signed bytes.
uint centred(uint q, uint zero) { return MIN == 1u ? q : ((q | 0x80808080u) - zero) ^ 0x80808080u; }

vec4 bytes_as_floats(uint word) {
    return vec4(bitfieldExtract(int(word), 0, 8), bitfieldExtract(int(word), 8, 8), bitfieldExtract(int(word), 16, 8), int(word) >> 24);
}

void add_floats(uvec4 raw, uint chunk, uint slot, uint first_row, uint rows, Rows x) {
    uint columns = ENCODING == 0u ? 4u : 8u;
    vec4 low, high = vec4(0.0);
    if (ENCODING == 0u) low = uintBitsToFloat(raw);
    else if (ENCODING == 1u) {
        low = vec4(unpackHalf2x16(raw.x), unpackHalf2x16(raw.y));
        high = vec4(unpackHalf2x16(raw.z), unpackHalf2x16(raw.w));
    } else {
        low = uintBitsToFloat(uvec4(raw.x << 16, raw.x & 0xffff0000u, raw.y << 16, raw.y & 0xffff0000u));
        high = uintBitsToFloat(uvec4(raw.z << 16, raw.z & 0xffff0000u, raw.w << 16, raw.w & 0xffff0000u));
    }
    // What stands behind the end of a row has no meaning.
    uint first = chunk * columns;
    if (first + columns > x.width) {
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            if (first + j >= x.width) low[j] = 0.0;
            if (first + 4u + j >= x.width) high[j] = 0.0;
        }
    }
    [[unroll]] for (uint r = 0u; r < ROWS; r++) {
        if (ROWS > 1u && first_row + r >= rows) continue;
        ALIKE float sum = dot_alike(low, row_floats(x, first_row + r, first));
        if (ENCODING != 0u) sum += dot_alike(high, row_floats(x, first_row + r, first + 4u));
        add(slot * ROWS + r, sum);
    }
}

void add_integers(uvec4 raw, uint64_t data, uint64_t scale_row, uint64_t min_row, uint chunk, uint slot, uint first_row, uint rows, Rows x) {
    uint words = ENCODING == 3u ? 4u : 8u;
    uint q[8];
    if (ENCODING == 3u) {
        q[0] = raw.x; q[1] = raw.y; q[2] = raw.z; q[3] = raw.w;
        q[4] = 0u; q[5] = 0u; q[6] = 0u; q[7] = 0u;
    } else if (ENCODING == 5u) {
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            q[j] = centred(raw[j] & 0x0f0f0f0fu, 0x08080808u);
            q[4u + j] = centred(raw[j] >> 4 & 0x0f0f0f0fu, 0x08080808u);
        }
    } else {
        uvec2 a = FixedPairs(data).at[chunk * 3u];
        uvec2 b = FixedPairs(data).at[chunk * 3u + 1u];
        uvec2 top = FixedPairs(data).at[chunk * 3u + 2u];
        uint half_bytes[4] = uint[](a.x, a.y, b.x, b.y);
        [[unroll]] for (uint j = 0u; j < 8u; j++) {
            uint low = (j < 4u ? half_bytes[j & 3u] : half_bytes[j & 3u] >> 4) & 0x0f0f0f0fu;
            q[j] = centred(low | (((j & 1u) == 0u ? top.x : top.y) >> (j / 2u * 2u) & 0x03030303u) << 4, 0x20202020u);
        }
    }
    uint first = chunk * words * 4u;
    float scale = BLOCK == 0u ? 1.0 : scale_number(scale_row, first / BLOCK);
    float minimum = MIN == 1u ? scale_number(min_row, first / BLOCK) : 0.0;
    [[unroll]] for (uint r = 0u; r < ROWS; r++) {
        if (ROWS > 1u && first_row + r >= rows) continue;
        uint row = first_row + r;
        if (FORM == 0u) {
            ALIKE float sum = 0.0;
            ALIKE float all = 0.0;
            [[unroll]] for (uint j = 0u; j < words; j++) {
                vec4 v = row_floats(x, row, first + 4u * j);
                sum += dot_alike(bytes_as_floats(q[j]), v);
                if (MIN == 1u) all += dot_alike(vec4(1.0), v);
            }
            add(slot * ROWS + r, SCALED(scale, sum, minimum, all));
        } else {
            int sum = 0;
            int all = 0;
            [[unroll]] for (uint j = 0u; j < words; j += 4u) {
                uvec4 v = row_bytes(x, row, first + 4u * j);
                [[unroll]] for (uint i = 0u; i < 4u; i++) {
                    sum += dot4(q[j + i], v[i]);
                    if (MIN == 1u) all += dot4(0x01010101u, v[i]);
                }
            }
            ALIKE float part = SCALED(scale, float(sum), minimum, float(all));
            if (FORM == 2u) part *= row_scale(x, row, first);
            add(slot * ROWS + r, part);
        }
    }
}

#ifndef STORED_ROWS
// Adds the products of weight rows `output ..` with the rows `first_row ..` to `sums`, as far as the lane has a part in them.
void add_products(Matrix m, Rows x, uint first_output, uint outputs, uint first_row, uint rows, uint lane, uint lanes) {
    uint columns = ENCODING == 0u ? 4u : ENCODING < 3u ? 8u : ENCODING == 3u ? 16u : 32u;
    uint chunks = (x.width + columns - 1u) / columns;
    // Several loads are under way before the first is used: memory answers late.
    for (uint first = lane; first < chunks; first += AHEAD * lanes) {
        uvec4 raw[AHEAD * OUTPUTS];
        [[unroll]] for (uint ahead = 0u; ahead < AHEAD; ahead++) {
            uint chunk = min(first + ahead * lanes, chunks - 1u);
            [[unroll]] for (uint slot = 0u; slot < OUTPUTS; slot++) {
                uint64_t data = m.data + uint64_t(min(first_output + slot, outputs - 1u)) * m.data_bytes;
                // int6 has blocks of 24 bytes.
                if (ENCODING != 4u) raw[ahead * OUTPUTS + slot] = FixedQuads(data).at[chunk];
            }
        }
        [[unroll]] for (uint ahead = 0u; ahead < AHEAD; ahead++) {
            uint chunk = first + ahead * lanes;
            if (chunk >= chunks) break;
            [[unroll]] for (uint slot = 0u; slot < OUTPUTS; slot++) {
                uint output_row = min(first_output + slot, outputs - 1u);
                uvec4 own = raw[ahead * OUTPUTS + slot];
                if (ENCODING < 3u) add_floats(own, chunk, slot, first_row, rows, x);
                else {
                    uint64_t data = m.data + uint64_t(output_row) * m.data_bytes;
                    uint64_t scale_row = m.scales + uint64_t(output_row) * m.scale_bytes;
                    uint64_t min_row = m.minima + uint64_t(output_row) * m.min_bytes;
                    add_integers(own, data, scale_row, min_row, chunk, slot, first_row, rows, x);
                }
            }
        }
    }
}

// What is multiplied to a sum once all lanes have been added up.
float last_factor(Matrix m, Rows x, uint output_row, uint row) {
    float factor = 1.0;
    if (ENCODING == 3u && BLOCK == 0u) factor *= FixedFloats(m.scales).at[output_row];
    if (FORM == 1u) factor *= row_scale(x, row, 0u);
    return factor;
}
#endif
