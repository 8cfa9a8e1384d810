// Products of one row with weights. The row is normed, gated, transformed and rounded by every workgroup for itself, and stays where it is for the next product of the same row.
struct Kind {
    uint encoding;
    uint block;
    uint minimum;
    uint wide;
    uint form;
};
layout(constant_id = 2) const uint ENCODING_A = 0;
layout(constant_id = 3) const uint BLOCK_A = 0;
layout(constant_id = 4) const uint MIN_A = 0;
layout(constant_id = 5) const uint WIDE_A = 0;
layout(constant_id = 6) const uint FORM_A = 0;
layout(constant_id = 7) const uint ENCODING_B = 0;
layout(constant_id = 8) const uint BLOCK_B = 0;
layout(constant_id = 9) const uint MIN_B = 0;
layout(constant_id = 10) const uint WIDE_B = 0;
layout(constant_id = 11) const uint FORM_B = 0;
layout(constant_id = 23) const uint ENCODING_C = 0;
layout(constant_id = 24) const uint BLOCK_C = 0;
layout(constant_id = 25) const uint MIN_C = 0;
layout(constant_id = 26) const uint WIDE_C = 0;
layout(constant_id = 27) const uint FORM_C = 0;
#define KIND_A Kind(ENCODING_A, BLOCK_A, MIN_A, WIDE_A, FORM_A)
#define KIND_B Kind(ENCODING_B, BLOCK_B, MIN_B, WIDE_B, FORM_B)
#define KIND_C Kind(ENCODING_C, BLOCK_C, MIN_C, WIDE_C, FORM_C)
Kind kind;
#define STORED_ROWS
#define ENCODING kind.encoding
#define BLOCK kind.block
#define MIN kind.minimum
#define WIDE_SCALES kind.wide
#define FORM kind.form
#define ROWS 1u
#define OUTPUTS 2u
#define AHEAD 2u // chunks of a weight row that a lane has on their way
#include "weight.glsl"
struct Rows {
    uint width;
    uint stride; // numbers from row to row
};
vec4 row_floats(Rows x, uint row, uint column) { return uintBitsToFloat(room[(row * x.stride + column) / 4u]); }
uvec4 row_bytes(Rows x, uint row, uint column) { return room[(row * x.stride + column) / 16u]; }
float row_scale(Rows x, uint row, uint column) { return row_scales[FORM == 1u ? row : row * (x.stride / 32u) + column / 32u]; }
#include "product.glsl"

// Where a product's words are: see `stream.rs`.
// Of gate and up, `BIAS` and `ADDED` are both biases.
const uint X = 4u, UP = 6u, NORM_WEIGHT = 8u, NORM_BIAS = 10u, DATA = 12u, SCALES = 16u, MINIMA = 20u, BIAS = 24u, ADDED = 26u, Y = 28u, CHOSEN = 30u, FACTORS = 32u, PLACES = 34u;
const uint WIDTH = 36u, OUT = 37u, DATA_BYTES = 38u, SCALE_BYTES = 39u, MIN_BYTES = 40u, LOW = 41u, HIGH = 42u, IN_LOW = 43u, IN_HIGH = 44u, EPS = 45u;
const uint ROW_FLAGS = 46u, FUNCTION = 47u, SOURCE = 48u, CHOICES = 49u, EXPERTS = 50u, MODE = 51u, CHUNKS = 52u, APART = 53u, TASK_ROWS = 54u, EACH = 55u;
const uint HARTLEY = 56u, ODD_FACTOR = 58u, FACTOR = 59u; // of a transform, if there is one

// Brings the rows of a product into the room, in their form.
void bring_rows(uint rows, uint width, uint stride) {
    uint flags = word(ROW_FLAGS);
    for (uint row = 0u; row < rows; row++) {
        hold_row(RowWork(place(X), place(UP), place(NORM_WEIGHT), place(NORM_BIAS), row * width, width, number(EPS), flags & 1u, flags >> 4u & 15u, flags >> 1u & 3u));
        if (rows_need(TRANSFORMS) && word(ODD_FACTOR) != 0u) transform_row(width, word(ODD_FACTOR), place(HARTLEY), number(FACTOR));
        bound_row(width, number(IN_LOW), number(IN_HIGH));
        float inverse = 0.0;
        if (FORM == 1u) {
            float most = largest_of_row();
            inverse = inverse_scale(most);
            if (gl_LocalInvocationID.x == 0u) row_scales[row] = forward_scale(most);
        }
        [[unroll]] for (uint j = 0u; j < RUNS; j++) {
            if (is_behind(j, stride)) continue;
            vec4 v = held[j];
            if (FORM == 2u) {
                float most = largest_of_block(v);
                inverse = inverse_scale(most);
                if ((run(j) & 7u) == 0u && run(j) < stride / 4u) row_scales[row * (stride / 32u) + run(j) / 8u] = forward_scale(most);
            }
            if (run(j) >= stride / 4u) continue;
            if (FORM == 0u) {
                if ((flags & 0x100u) != 0u) [[unroll]] for (uint c = 0u; c < 4u; c++) v[c] = rounded_to_half(v[c]);
                room[row * stride / 4u + run(j)] = floatBitsToUint(v);
            } else {
                uint at = row * stride / 4u + run(j);
                room[at / 4u][at % 4u] = packed4(v, inverse);
            }
        }
    }
    barrier();
}

Matrix expert_matrix(uint which, uint first) {
    uint64_t rows = uint64_t(first);
    return Matrix(place(DATA + 2u * which) + rows * word(DATA_BYTES), place(SCALES + 2u * which) + rows * word(SCALE_BYTES),
                  place(MINIMA + 2u * which) + rows * word(MIN_BYTES), word(DATA_BYTES), word(SCALE_BYTES), word(MIN_BYTES));
}

// What a team of lanes multiplies at once: the same row of two matrices (gate and up), the halves of one row, or two rows. Teams are subgroups, or where there are few
// rows workgroups.
struct Task {
    uint output_row;
    uint rows; // of the result
    uint chunks;
    uint apart; // the chunk at which the second half begins; 0: no halves
    uint choice; // gate and up of an expert
    uint lane;
    uint lanes;
};
Task task(uint group) {
    uint choice = word(MODE) == 1u ? group / word(EACH) : 0u;
    if (word(TASK_ROWS) == 0u) return Task(group, 1u, word(CHUNKS), word(APART), choice, gl_LocalInvocationID.x, GROUP);
    uint row = ((group - choice * word(EACH)) * gl_NumSubgroups + gl_SubgroupID) * word(TASK_ROWS);
    return Task(row, word(TASK_ROWS), word(CHUNKS), word(APART), choice, gl_SubgroupInvocationID, gl_SubgroupSize);
}
uint second_row(Task t) { return t.rows == 1u ? t.output_row : min(t.output_row + 1u, word(OUT) - 1u); }

// The chunks that are multiplied next: on their way while others are multiplied, a task is ended, and workgroups meet.
uvec4 ahead_chunks[AHEAD * 2u];
bool ahead_there = false;

// Where a lane's chunks come from: of both weight rows, in bytes.
struct Source {
    uint64_t first;
    uint64_t second;
    uint begin;
    uint step; // from a lane's chunk to its next
    uint first_last;
    uint apart;
    uint second_last;
};
Source source_of(uint64_t first, uint64_t second, Task t) {
    return Source(first, second, 16u * t.lane, 16u * t.lanes, 16u * ((t.apart > 0u ? t.apart : t.chunks) - 1u), 16u * t.apart, 16u * (t.chunks - 1u));
}
// No branch: what is loaded is on its way while the code goes on.
void load_chunks(Source s, uint begin) {
    [[unroll]] for (uint ahead = 0u; ahead < AHEAD; ahead++) {
        uint at = begin + ahead * s.step;
        ahead_chunks[2u * ahead] = FixedQuads(s.first + min(at, s.first_last)).at[0];
        ahead_chunks[2u * ahead + 1u] = FixedQuads(s.second + min(at + s.apart, s.second_last)).at[0];
    }
}

// The chunks of the group that is worked on next, where it is known what they are; else the one that is given.
Source next_source(Source otherwise) {
    ahead_there = false;
    if (next_group == NONE) return otherwise;
    Source found = otherwise;
    uint own = current;
    current = next_at;
    uint encoding = word(0u) == 0u ? ENCODING_A : word(0u) == 1u ? ENCODING_B : word(0u) == 11u ? ENCODING_C : NONE;
    // int6 has blocks of 24 bytes.
    if (encoding != NONE && encoding != 4u && word(MODE) == 0u) {
        Task t = task(next_group);
        if (t.output_row < word(OUT)) {
            uint64_t first = place(DATA) + uint64_t(t.output_row) * word(DATA_BYTES);
            uint64_t second = place(word(FUNCTION) != NONE ? DATA + 2u : DATA) + uint64_t(second_row(t)) * word(DATA_BYTES);
            found = source_of(first, second, t);
        }
        ahead_there = true;
    }
    current = own;
    return found;
}

// The instructions themselves can always be read.
void look_ahead() {
    Source next = next_source(Source(stream, stream, 0u, 0u, 0u, 0u, 0u));
    load_chunks(next, next.begin);
}

// The sums of a task with a row of the room: of both weight rows.
vec2 two_products(Task t, Matrix first, Matrix second, Rows x, uint row, bool last) {
    uvec2 outputs = uvec2(t.output_row, second_row(t));
    uint64_t data[2] = uint64_t[](first.data + uint64_t(outputs.x) * first.data_bytes, second.data + uint64_t(outputs.y) * first.data_bytes);
    uint64_t scales[2] = uint64_t[](first.scales + uint64_t(outputs.x) * first.scale_bytes, second.scales + uint64_t(outputs.y) * first.scale_bytes);
    uint64_t minima[2] = uint64_t[](first.minima + uint64_t(outputs.x) * first.min_bytes, second.minima + uint64_t(outputs.y) * first.min_bytes);
    uvec2 ends = uvec2(t.apart > 0u ? t.apart : t.chunks, t.chunks);
    vec2 factors = ENCODING == 3u && BLOCK == 0u ? vec2(FixedFloats(scales[0]).at[0], FixedFloats(scales[1]).at[0]) : vec2(1.0);
    sums[0] = 0.0;
    sums[1] = 0.0;
    if (ENCODING != 4u && !ahead_there) {
        Source own = source_of(data[0], data[1], t);
        load_chunks(own, own.begin);
    }
    ahead_there = false;
    for (uint base = 0u; base < ends.x; base += AHEAD * t.lanes) {
        // What is multiplied next is on its way before this is.
        uvec4 raw[AHEAD * 2u] = ahead_chunks;
        uint begin = base + t.lane;
        if (ENCODING != 4u) {
            // Branches find out where chunks come from, but nothing is loaded in them.
            Source from = source_of(data[0], data[1], t);
            from.begin = 16u * (begin + AHEAD * t.lanes);
            if (last && base + AHEAD * t.lanes >= ends.x) from = next_source(from);
            load_chunks(from, from.begin);
        }
        [[unroll]] for (uint ahead = 0u; ahead < AHEAD; ahead++) {
            [[unroll]] for (uint slot = 0u; slot < 2u; slot++) {
                uint chunk = begin + ahead * t.lanes + slot * t.apart;
                uvec4 own_chunk = raw[ahead * 2u + slot];
                if (ENCODING == 4u || MIN == 1u) {
                    if (chunk >= ends[slot]) continue;
                } else if (chunk >= ends[slot]) {
                    // Nothing is added, and no branch taken.
                    own_chunk = uvec4(ENCODING == 5u ? 0x88888888u : 0u);
                    chunk = ends[slot] - 1u;
                }
                if (ENCODING < 3u) add_floats(own_chunk, chunk, slot, row, row + 1u, x);
                else add_integers(own_chunk, data[slot], scales[slot], minima[slot], chunk, slot, row, row + 1u, x);
            }
        }
    }
    vec2 all = vec2(sums[0], sums[1]);
    if (t.lanes > gl_SubgroupSize) all = vec2(group_sum(all.x + all.y), 0.0);
    else if (t.apart > 0u) all = vec2(subgroupAdd(all.x + all.y), 0.0);
    else all = vec2(subgroupAdd(all.x), subgroupAdd(all.y));
    all *= factors;
    if (FORM == 1u) all *= row_scale(x, row, 0u);
    return all;
}

float bounded(float sum, uint output_row) {
    if (place(BIAS) != 0ul) sum += Floats(place(BIAS)).at[output_row];
    sum = min(max(sum, number(LOW)), number(HIGH));
    if (place(ADDED) != 0ul) sum += Floats(place(ADDED)).at[output_row];
    return sum;
}

void product(uint group) {
    uint mode = word(MODE);
    uint choices = word(CHOICES);
    bool pair = word(FUNCTION) != NONE; // gate and up
    Rows x = Rows(word(WIDTH), (word(WIDTH) + 31u) / 32u * 32u);
    if (held_source != word(SOURCE)) {
        barrier();
        bring_rows(mode == 2u ? choices : 1u, x.width, x.stride);
        held_source = word(SOURCE);
    }
    Task t = task(group);
    if (t.output_row >= word(OUT)) {
        look_ahead();
        return;
    }
    // Experts: gate and up of one choice, or down of all of them.
    uint first_choice = mode == 1u ? t.choice : 0u;
    uint last_choice = mode == 2u ? choices : first_choice + 1u;
    vec2 all = vec2(0.0);
    uint first = 0u;
    for (uint choice = first_choice; choice < last_choice; choice++) {
        if (mode != 0u) {
            uint expert = expert_place(Words(place(CHOSEN)).at[choice], place(PLACES), word(EXPERTS));
            if (expert == NONE) {
                if (choice + 1u == last_choice) look_ahead();
                continue;
            }
            first = expert * word(OUT);
        }
        vec2 found = two_products(t, expert_matrix(0u, first), expert_matrix(pair ? 1u : 0u, first), x, mode == 2u ? choice : 0u, choice + 1u == last_choice);
        all += mode == 2u ? Floats(place(FACTORS)).at[choice] * found : found;
    }
    uint lane = t.lane;
    if (pair) {
        uint at = first + t.output_row;
        if (place(BIAS) != 0ul) all += vec2(Floats(place(BIAS)).at[at], Floats(place(ADDED)).at[at]);
        if (lane == 0u) Floats(place(Y)).at[first_choice * word(OUT) + t.output_row] = activate(word(FUNCTION), all.x) * all.y;
    } else if (lane < t.rows && t.output_row + lane < word(OUT)) {
        Floats(place(Y)).at[t.output_row + lane] = bounded(lane == 0u ? all.x : all.y, t.output_row + lane);
    }
}
