// Sums that come out alike, bit by bit, in every variant of a shader: the compiler may neither reorder what is `precise` nor choose where it rounds.
float dot_alike(vec4 a, vec4 b) {
    precise float sum = a.x * b.x;
    sum = fma(a.y, b.y, sum);
    sum = fma(a.z, b.z, sum);
    sum = fma(a.w, b.w, sum);
    return sum;
}
