// Weights as they are stored: see `encoding.rs` and `quants.rs` of qhx-ir.
#ifndef STORED_ROWS
layout(constant_id = 0) const uint ENCODING = 0; // 0 f32, 1 f16, 2 bf16, 3 int8, 4 int6, 5 int4
layout(constant_id = 1) const uint BLOCK = 0; // numbers of a scale: 16 or 32; 0: a row
layout(constant_id = 2) const uint MIN = 0;
layout(constant_id = 3) const uint WIDE_SCALES = 0; // f32
#endif

// The number a block begins with in a row of scales or minima.
float scale_number(uint64_t row, uint block) {
    if (WIDE_SCALES == 1u) return FixedFloats(row).at[block];
    uint pair = FixedWords(row).at[block / 2u];
    return half_float(pair >> (block & 1u) * 16u);
}

int quant(uint64_t row, uint column) {
    uint block = column / 32u;
    uint i = column % 32u;
    if (ENCODING == 3u) return bitfieldExtract(int(FixedWords(row).at[column / 4u]), int(column % 4u) * 8, 8);
    uint first = block * (ENCODING == 4u ? 24u : 16u);
    uint low_byte = first + i % 16u;
    uint low = FixedWords(row).at[low_byte / 4u] >> (low_byte % 4u) * 8u;
    uint q = (i < 16u ? low : low >> 4) & 15u;
    if (ENCODING == 4u) {
        uint top_byte = first + 16u + i % 8u;
        q |= (FixedWords(row).at[top_byte / 4u] >> ((top_byte % 4u) * 8u + i / 8u * 2u) & 3u) << 4;
        return int(q) - (MIN == 1u ? 0 : 32);
    }
    return int(q) - (MIN == 1u ? 0 : 8);
}

// One number of a weight.
float weight_number(uint64_t data, uint64_t scale, uint64_t minimum, uint column) {
    switch (ENCODING) {
        case 0: return FixedFloats(data).at[column];
        case 1: return half_float(FixedWords(data).at[column / 2u] >> (column & 1u) * 16u);
        case 2: return uintBitsToFloat((FixedWords(data).at[column / 2u] >> (column & 1u) * 16u) << 16);
    }
    if (BLOCK == 0u) return float(quant(data, column)) * FixedFloats(scale).at[0];
    float v = float(quant(data, column)) * scale_number(scale, column / BLOCK);
    if (MIN == 1u) v += scale_number(minimum, column / BLOCK);
    return v;
}
