#ifndef QUANTISE
#define QUANTISE
// int8 forms. A quotient decides to which integer a number is rounded, so it is rounded as the program states: Vulkan's own division may be off by the last digits.

// a / b for positive normal numbers, rounded to the nearest, to even at a tie.
float exact_quotient(float a, float b) {
    uint ua = floatBitsToUint(a);
    uint ub = floatBitsToUint(b);
    uint ma = (ua & 0x7fffffu) | 0x800000u;
    uint mb = (ub & 0x7fffffu) | 0x800000u;
    int exponent = int(ua >> 23) - int(ub >> 23) + 127;
    // So that the quotient has 24 digits.
    uint shift = 24u;
    if (ma >= mb) shift = 23u; else exponent -= 1;
    // The device's own quotient is off by some units of its last digit, so that what is left is small: its lowest 32 bits are all of it.
    uint q = uint(float(ma) / float(mb) * float(1u << shift));
    int rest = int((ma << shift) - q * mb);
    while (rest < 0) {
        q--;
        rest += int(mb);
    }
    while (rest >= int(mb)) {
        q++;
        rest -= int(mb);
    }
    rest *= 2;
    if (rest > int(mb) || (rest == int(mb) && (q & 1u) == 1u)) q++;
    if (q == 0x1000000u) {
        q = 0x800000u;
        exponent++;
    }
    if (exponent <= 0) return a / b;
    if (exponent >= 255) return uintBitsToFloat(0x7f800000u);
    return uintBitsToFloat(uint(exponent) << 23 | (q & 0x7fffffu));
}

// Numbers below the normal ones count as 0: 127 divided by them overflows.
bool vanishes(float most) { return !(most >= 1.17549435e-38); }
// 0 where there is nothing to scale.
float inverse_scale(float most) {
    if (vanishes(most)) return 0.0;
    float inverse = exact_quotient(127.0, most);
    return isinf(inverse) ? 0.0 : inverse;
}
float forward_scale(float most) { return vanishes(most) ? 0.0 : exact_quotient(most, 127.0); }
uint quantised(float x, float inverse) { return uint(int(clamp(roundEven(x * inverse), -127.0, 127.0))) & 255u; }
#endif
