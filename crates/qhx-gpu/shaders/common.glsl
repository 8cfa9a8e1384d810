// What all shaders share: views of memory by address, the parameters of a call, small functions.
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#extension GL_EXT_control_flow_attributes : require
#ifdef SUBGROUPS
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

// Where workgroups of one dispatch read what others have written.
#ifdef ACROSS_GROUPS
#extension GL_KHR_memory_scope_semantics : require
#define SEEN nonprivate
// What the instructions of a step need, as `stream.rs` finds out: the rest is not compiled.
layout(constant_id = 28) const uint OPERATIONS = 0xffffffffu;
layout(constant_id = 29) const uint FUNCTIONS = 0xffffffffu;
layout(constant_id = 30) const uint ROW_WORK = 0xffffffffu;
#else
#define SEEN
const uint FUNCTIONS = 0xffffffffu;
const uint ROW_WORK = 0xffffffffu;
#endif

layout(buffer_reference, std430, buffer_reference_align = 4) SEEN buffer Floats { float at[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) SEEN buffer Words { uint at[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) SEEN buffer Integers { int at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) SEEN buffer Pairs { uvec2 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) SEEN buffer Addresses { uint64_t at[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) SEEN buffer Quads { uvec4 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) SEEN buffer Vectors { vec4 at[]; };

// What does not change while a dispatch runs.
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer FixedFloats { float at[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer FixedWords { uint at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer FixedPairs { uvec2 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer FixedQuads { uvec4 at[]; };

const float LOWEST = -3.402823466e38;
const uint NONE = 0xffffffffu;

// Where a grid of many groups is folded into two dimensions.
uint flat_group() { return gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x; }
// A macro: the size of a workgroup is declared behind this file.
#define flat_index() (flat_group() * gl_WorkGroupSize.x + gl_LocalInvocationID.x)

// The parameters of a call, as `parameters.rs` writes them.
const uint SEGMENT_WORDS = 8u;
struct Segment {
    uint first_row;
    uint valid_rows;
    uint before;
    uint epoch;
    uint partial;
    uint pages;
    uint recurrent;
};
uint segment_of(Words call, uint row) { return call.at[call.at[1] + row]; }
uint segments(Words call) { return call.at[0]; }
Segment segment(Words call, uint number) {
    uint w = call.at[2] + number * SEGMENT_WORDS;
    return Segment(call.at[w], call.at[w + 1u], call.at[w + 2u], call.at[w + 3u], call.at[w + 4u], call.at[w + 5u], call.at[w + 6u]);
}
uint64_t address(Words call, uint word) { return uint64_t(call.at[word]) | uint64_t(call.at[word + 1u]) << 32; }

// f32 to f16, rounded to the nearest, to even at a tie: what the program means by f16, on every device.
uint half_bits(float x) {
    uint u = floatBitsToUint(x);
    uint sign = u >> 16 & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return sign | 0x7e00u;
    if (u >= 0x477ff000u) return sign | 0x7c00u;
    if (u < 0x33000001u) return sign;
    if (u < 0x38800000u) {
        // Below the normal numbers: a multiple of 2^-24.
        uint shift = 126u - (u >> 23);
        uint mantissa = (u & 0x7fffffu) | 0x800000u;
        uint kept = mantissa >> shift;
        uint rest = mantissa & ((1u << shift) - 1u);
        uint tie = 1u << (shift - 1u);
        return sign | (kept + uint(rest > tie || (rest == tie && (kept & 1u) == 1u)));
    }
    uint odd = u >> 13 & 1u;
    return sign | ((u + 0xfffu + odd - 0x38000000u) >> 13);
}
float half_float(uint bits) { return unpackHalf2x16(bits & 0xffffu).x; }
float rounded_to_half(float x) { return half_float(half_bits(x)); }

// Elementwise functions, as `Activation` names them.
float sigmoid(float x) { return 1.0 / (1.0 + exp(-x)); }
float safe_tanh(float x) {
    float a = abs(x);
    // Small arguments by their series: a quotient of exponentials would cancel.
    if (a < 0.25) {
        float s = x * x;
        return x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0 - s * 1382.0 / 155925.0)))));
    }
    float e = exp(-2.0 * a);
    return sign(x) * (1.0 - e) / (1.0 + e);
}
float error_function(float x) {
    float a = abs(x);
    if (a < 1.0) {
        // The series 2/√π Σ (−1)ⁿ x^(2n+1) / (n! (2n+1)).
        float s = x * x;
        float term = x;
        float total = x;
        [[unroll]] for (uint n = 1u; n < 12u; n++) {
            term *= -s / float(n);
            total += term / float(2u * n + 1u);
        }
        return total * 1.1283791670955126;
    }
    if (a > 4.0) return sign(x);
    // A continued fraction for erfc, from the inside out.
    float f = a;
    for (uint n = 40u; n > 0u; n--) f = a + (float(n) * 0.5) / f;
    return sign(x) * (1.0 - exp(-a * a) * 0.5641895835477563 / f);
}
// Where an expert is, by the table of all places or else by its number, of so many that are there; NONE: it is not there.
uint expert_place(uint expert, uint64_t places, uint there) {
    if (places != 0ul) {
        expert = Words(places).at[expert];
        if (expert > 0x7fffffffu) return NONE;
    }
    return min(expert, there - 1u);
}
bool can_be(uint function, uint which) { return (FUNCTIONS >> which & 1u) != 0u && function == which; }
float activate(uint function, float x) {
    if (can_be(function, 0u)) return x * sigmoid(x);
    if (can_be(function, 1u)) return 0.5 * x * (1.0 + safe_tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    if (can_be(function, 2u)) return 0.5 * x * (1.0 + error_function(x * 0.7071067811865476));
    if (can_be(function, 3u)) return sigmoid(x);
    if (can_be(function, 4u)) return max(x, 0.0);
    return x;
}
