#version 460
// Cosines and sines of a rotary embedding for all rows of a call.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
layout(local_size_x = 64) in;
layout(push_constant) uniform Arguments {
    uint64_t call;
    uint64_t positions; // [streams, rows]
    uint64_t table; // of each variant: frequencies, then the amplitude
    uint64_t streams;
    uint64_t y; // [rows, frequencies, 2]
    uint rows;
    uint frequencies;
    uint variants;
    uint rows_per_row;
};

// The binary digits of 2/π after the point.
const uint DIGITS[7] = uint[](0xA2F9836Eu, 0x4E441529u, 0xFC2757D1u, 0xF534DDC0u, 0xDB629599u, 0x3C439041u, 0xFE5163ABu);

// Cosine and sine of any angle, with the error of a polynomial: the angle is reduced by whole quarters of a turn in integers.
vec2 cosine_sine(float angle) {
    uint bits = floatBitsToUint(abs(angle));
    int exponent = int(bits >> 23) - 150; // angle = mantissa · 2^exponent
    uint mantissa = (bits & 0x7fffffu) | 0x800000u;
    uint quarter = 0u;
    float r; // in quarters of a turn, −½ to ½
    if (exponent < -48) {
        r = abs(angle) * 0.6366197723675814;
    } else {
        // mantissa · 2/π · 2^exponent: of its digits, two before the point and 62 behind it are wanted.
        int first = exponent < 0 ? 0 : exponent; // digits of 2/π that only make whole turns
        first = max(first - 2, 0);
        uint word = uint(first) / 32u;
        uint shift = uint(first) % 32u;
        uint w[4];
        for (uint i = 0u; i < 4u; i++) {
            uint high = DIGITS[min(word + i, 6u)];
            uint low = DIGITS[min(word + i + 1u, 6u)];
            w[i] = shift == 0u ? high : (high << shift | low >> (32u - shift));
        }
        // product = mantissa · (w as a fraction of 96 digits); 24 digits before the point.
        uint64_t p2 = uint64_t(mantissa) * uint64_t(w[2]);
        uint64_t p1 = uint64_t(mantissa) * uint64_t(w[1]) + (p2 >> 32);
        uint64_t p0 = uint64_t(mantissa) * uint64_t(w[0]) + (p1 >> 32);
        // p0 has 24 digits before the point and 32 behind it; the next 32 are those of p1.
        uint64_t whole = p0 << 8 | (p1 & 0xfffffffful) >> 24; // 24 before, 40 behind
        uint64_t rest = (p1 & 0xfffffful) << 40 | (p2 & 0xfffffffful) << 8;
        int left = exponent - first; // still to be multiplied by 2^left
        // value = whole.rest · 2^left as a number of 64 + 64 digits; the point stands behind digit 24.
        // Move the point so that two digits are before it.
        int move = 22 + left;
        uint64_t turned;
        if (move >= 0) turned = move == 0 ? whole : (whole << move | rest >> (64 - move));
        else turned = whole >> (-move);
        // Round to the nearest quarter.
        uint64_t rounded = turned + 0x2000000000000000ul;
        quarter = uint(rounded >> 62);
        int64_t fraction = int64_t(turned - (uint64_t(quarter) << 62)); // in units of 2^-62 quarters
        r = float(int(fraction >> 32)) * (1.0 / 1073741824.0) + float(uint(fraction & 0xfffffffful) >> 8) * (1.0 / 18014398509481984.0);
    }
    // r quarters are r · π/2 radians.
    float x = r * 1.5707963267948966;
    float s = x * x;
    float sine = x * (1.0 + s * (-1.0 / 6.0 + s * (1.0 / 120.0 + s * (-1.0 / 5040.0 + s * (1.0 / 362880.0)))));
    float cosine = 1.0 + s * (-0.5 + s * (1.0 / 24.0 + s * (-1.0 / 720.0 + s * (1.0 / 40320.0 - s / 3628800.0))));
    vec2 turned_by = quarter == 0u ? vec2(cosine, sine) : quarter == 1u ? vec2(-sine, cosine) : quarter == 2u ? vec2(-cosine, -sine) : vec2(sine, -cosine);
    return angle < 0.0 ? vec2(turned_by.x, -turned_by.y) : turned_by;
}

void main() {
    uint i = flat_index();
    if (i >= rows * frequencies) return;
    uint row = i / frequencies;
    uint f = i % frequencies;
    uint number = segment_of(Words(call), row * rows_per_row);
    uint epoch = number == NONE ? 0u : segment(Words(call), number).epoch;
    uint variant = min(epoch, variants - 1u) * (frequencies + 1u);
    float angle = float(Integers(positions).at[Words(streams).at[f] * rows + row]) * Floats(table).at[variant + f];
    vec2 turned = cosine_sine(angle) * Floats(table).at[variant + frequencies];
    Floats(y).at[2u * i] = turned.x;
    Floats(y).at[2u * i + 1u] = turned.y;
}
