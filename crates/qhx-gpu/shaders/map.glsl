// An elementwise operation: sums, products, gates, functions, bounds. `width`: numbers of b, where it is a weight.
float mapped(uint operation, uint function, float x, uint64_t b, uint i, uint width, float low, float high) {
    switch (operation) {
        case 0: return x + Floats(b).at[i];
        case 1: return x * Floats(b).at[i];
        case 2: return activate(function, x) * Floats(b).at[i];
        case 3: return activate(function, x);
        case 4: return x * low * Floats(b).at[i % width];
        case 5: return x * low;
        case 6: return low * safe_tanh(x / low);
        default: return min(max(x, low), high);
    }
}
