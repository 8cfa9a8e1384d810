// A head that is stored as products take it: in int8 with a scale for each 32. Before this, DIM and FORMED are declared.
#include "quantise.glsl"
shared float finished[FORMED == 1u ? DIM : 1u];

// Stores four numbers of the head, and with the first of a block its scale. `place` is the head's first number among all.
void store_formed(uint64_t numbers, uint64_t scales, uint place, uint run) {
    float most = 0.0;
    uint first = run / 8u * 32u;
    for (uint d = first; d < first + 32u; d++) most = max(most, abs(finished[d]));
    float inverse = inverse_scale(most);
    uint packed = 0u;
    [[unroll]] for (uint c = 0u; c < 4u; c++) packed |= quantised(finished[4u * run + c], inverse) << (8u * c);
    Words(numbers).at[place / 4u + run] = packed;
    if (run % 8u == 0u) Floats(scales).at[(place + first) / 32u] = forward_scale(most);
}
