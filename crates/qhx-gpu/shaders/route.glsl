// Chooses experts for a row.
#include "quantise.glsl"
// Rises with the number, all numbers in one order.
uint order(float x) {
    uint u = floatBitsToUint(x);
    return (u & 0x80000000u) != 0u ? ~u : u | 0x80000000u;
}

// `mixer`: two winners, each with its band, which is twice the jitter; else the `top` largest, by softmax.
void route(uint64_t scores, uint64_t chosen, uint64_t weights, uint row, uint experts, uint mixer, uint top, uint renormalise, float band) {
#ifndef SCORE
    Floats r = Floats(scores + 4ul * uint64_t(row) * experts);
#define SCORE(e) r.at[e]
#endif
    if (mixer == 1u) {
        uint skipped = NONE;
        for (uint choice = 0u; choice < 2u; choice++) {
            uint best = skipped == 0u ? 1u : 0u;
            for (uint e = 0u; e < experts; e++) {
                if (e != skipped && SCORE(e) > SCORE(best)) best = e;
            }
            float sum = 0.0;
            for (uint e = 0u; e < experts; e++) {
                if (e == skipped) continue;
                float gap = SCORE(best) - SCORE(e);
                float size = max(abs(SCORE(e)), SCORE(best));
                bool dropped = gap > 0.0 && (size <= 0.0 || exact_quotient(gap, size) > band);
                if (!dropped) sum += exp(-gap);
            }
            Words(chosen).at[row * 2u + choice] = best;
            Floats(weights).at[row * 2u + choice] = 1.0 / sum;
            skipped = best;
        }
        return;
    }
    float most = SCORE(0);
    for (uint e = 1u; e < experts; e++) most = max(most, SCORE(e));
    float sum = 0.0;
    uint last_order = 0xffffffffu;
    uint last = 0u;
    for (uint choice = 0u; choice < top; choice++) {
        uint best = NONE;
        for (uint e = 0u; e < experts; e++) {
            uint own = order(SCORE(e));
            // Behind those that were chosen: smaller, or equal and further on.
            if (choice > 0u && (own > last_order || (own == last_order && e <= last))) continue;
            if (best == NONE || own > order(SCORE(best))) best = e;
        }
        best = best == NONE ? 0u : best;
        last = best;
        last_order = order(SCORE(best));
        float weight = exp(SCORE(best) - most);
        Words(chosen).at[row * top + choice] = best;
        Floats(weights).at[row * top + choice] = weight;
        sum += weight;
    }
    if (renormalise == 0u) {
        sum = 0.0;
        for (uint e = 0u; e < experts; e++) sum += exp(SCORE(e) - most);
    }
    for (uint choice = 0u; choice < top; choice++) Floats(weights).at[row * top + choice] /= sum;
}
