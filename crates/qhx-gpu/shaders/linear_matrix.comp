#version 460
// Rows times a weight, by products of small matrices: of int8 where weight and rows are integers, else of f16, which holds such integers exactly. A workgroup takes
// a tile of outputs and rows; each subgroup a part of it, or, where rows are few, a part of the columns. A step's columns of both wait in shared memory while the
// next are loaded. Scales of blocks multiply the sums of their columns, so that what is rounded is what the program says.
// variant linear_matrix BYTES=1
// variant linear_matrix_half HALVES=1
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#pragma use_vulkan_memory_model
#define SUBGROUPS 1
#include "common.glsl"
#include "weight.glsl"
layout(constant_id = 4) const uint FORM = 1; // how rows come: 0 floats that f16 holds, 1 int8 with a scale for each row, 2 int8 with a scale for each 32, 3 each number as two f16, with a scale for each row
layout(constant_id = 5) const uint GROUP = 128;
layout(local_size_x_id = 5) in;
// A small matrix has SIZE outputs or rows, and DEPTH columns.
layout(constant_id = 6) const uint SIZE = 16;
layout(constant_id = 7) const uint DEPTH = 32;
layout(constant_id = 8) const uint TILE_OUTPUTS = 128;
layout(constant_id = 9) const uint TILE_ROWS = 128;
// Of a subgroup.
layout(constant_id = 10) const uint OWN_OUTPUTS = 64;
layout(constant_id = 11) const uint OWN_ROWS = 64;
layout(constant_id = 12) const uint STEP = 64; // columns
layout(constant_id = 13) const uint STAGES = 2; // steps in shared memory
layout(constant_id = 14) const uint GROUPED = 0; // 1: rows are grouped by experts
layout(constant_id = 15) const uint PARTS = 1; // of a step's columns, each for subgroups of its own
layout(push_constant) uniform Arguments {
    uint64_t x; // [rows, stride]
    uint64_t x_scales;
    uint64_t data;
    uint64_t scales;
    uint64_t minima;
    uint64_t bias; // or 0; of each expert where rows are grouped
    uint64_t added; // to the result, or 0
    uint64_t y;
    uint64_t groups; // of rows, as `group.comp` writes them
    uint rows;
    uint width;
    uint stride; // numbers of a row of x, a multiple of 32
    uint outputs;
    uint data_bytes; // of a weight row, a multiple of 64
    uint scale_bytes;
    uint min_bytes;
    float low;
    float high;
    uint share; // results of a row of x
};
#ifdef BYTES
#define NUMBER int8_t
#define SUM int
// Columns in sixteen bytes of shared memory.
const uint COLUMNS = DEPTH < 16u ? 8u : 16u;
#else
#define NUMBER float16_t
#define SUM float
const uint COLUMNS = 8u;
#endif
#define Left coopmat<NUMBER, gl_ScopeSubgroup, SIZE, DEPTH, gl_MatrixUseA>
#define Right coopmat<NUMBER, gl_ScopeSubgroup, DEPTH, SIZE, gl_MatrixUseB>
#define Sums coopmat<SUM, gl_ScopeSubgroup, SIZE, SIZE, gl_MatrixUseAccumulator>
#define FloatSums coopmat<float, gl_ScopeSubgroup, SIZE, SIZE, gl_MatrixUseAccumulator>

// One more sixteen keeps neighbouring rows in different banks.
const uint PITCH = STEP / COLUMNS + 1u;
// What f16 leaves over of numbers lies behind all rows.
const uint STAGE = (TILE_OUTPUTS + (FORM == 3u ? 2u : 1u) * TILE_ROWS) * PITCH;
const uint TEAM_ROWS = TILE_ROWS / OWN_ROWS;
const uint TEAMS = TILE_OUTPUTS / OWN_OUTPUTS * TEAM_ROWS;
// Results of a subgroup at a time, in sixteens.
const uint RESULTS = OWN_OUTPUTS * SIZE / 4u;
shared uvec4 staged[STAGES * STAGE > PARTS * TEAMS * RESULTS ? STAGES * STAGE : PARTS * TEAMS * RESULTS];

// Blocks with scales: of weights, or of rows.
const bool BLOCKED = BLOCK != 0u || FORM == 2u;
const uint BLOCK_COLUMNS = BLOCK != 0u ? BLOCK : 32u;
const uint BLOCKS = STEP / BLOCK_COLUMNS;
const uint SCALES = BLOCKED ? STAGES * BLOCKS * TILE_OUTPUTS : 1u;
shared float output_scales[SCALES];
shared float output_minima[MIN == 1u ? SCALES : 1u];
shared float row_scales[BLOCKED ? STAGES * BLOCKS * TILE_ROWS : 1u];

// Columns that an invocation loads at once, and the sixteens that they come in.
const uint WEIGHT_UNIT = ENCODING == 1u ? 8u : ENCODING == 3u ? 16u : 32u;
const uint WEIGHT_RAW = ENCODING == 4u ? 2u : 1u;
const bool WIDE_ROWS = FORM == 0u || FORM == 3u; // four bytes for each number
const uint ROW_UNIT = WIDE_ROWS ? 8u : 16u;
const uint ROW_RAW = WIDE_ROWS ? 2u : 1u;
const uint WEIGHT_UNITS = TILE_OUTPUTS * STEP / WEIGHT_UNIT;
const uint ROW_UNITS = TILE_ROWS * STEP / ROW_UNIT;
const uint WEIGHT_TURNS = (WEIGHT_UNITS + GROUP - 1u) / GROUP;
const uint ROW_TURNS = (ROW_UNITS + GROUP - 1u) / GROUP;
const uint SCALE_TURNS = BLOCKED ? (BLOCKS * TILE_OUTPUTS + GROUP - 1u) / GROUP : 1u;
const uint ROW_SCALE_TURNS = BLOCKED ? (BLOCKS * TILE_ROWS + GROUP - 1u) / GROUP : 1u;
uvec4 ahead_weights[WEIGHT_TURNS * WEIGHT_RAW];
uvec4 ahead_rows[ROW_TURNS * ROW_RAW];
float ahead_scales[SCALE_TURNS];
float ahead_minima[SCALE_TURNS];
float ahead_row_scales[ROW_SCALE_TURNS];

uint lane;
uint first_output;
uint first_row;
uint expert;
uint64_t order; // of grouped rows
// Of the rows whose columns this invocation loads.
uint64_t row_from[ROW_TURNS];

// The result's row, and none where the tile has fewer.
uint result_row(uint row) {
    if (GROUPED == 1u) return Words(order).at[first_row + row];
    return first_row + row < rows ? first_row + row : NONE;
}
// The row of x; where there is none, any.
uint source_row(uint row) {
    uint result = result_row(row);
    if (result == NONE) return 0u;
    return GROUPED == 1u ? result / share : result;
}
uint64_t weight_row(uint row) { return uint64_t(expert) * outputs + min(first_output + row, outputs - 1u); }

void find_rows() {
    [[unroll]] for (uint i = 0u; i < ROW_TURNS; i++) {
        uint at = i * GROUP + lane;
        uint row = source_row(min(at / (STEP / ROW_UNIT), TILE_ROWS - 1u));
        row_from[i] = x + uint64_t(row) * (stride * (WIDE_ROWS ? 4u : 1u));
    }
}

// Loads the columns from k on. Beyond the end of a row stand zeros in x, so that what integers have there does not count. No address lies beyond the end of a row:
// a driver may load before it knows whether what it loads is wanted.
void load(uint k) {
    [[unroll]] for (uint i = 0u; i < WEIGHT_TURNS; i++) {
        uint at = i * GROUP + lane;
        uint column = k + at % (STEP / WEIGHT_UNIT) * WEIGHT_UNIT;
        [[unroll]] for (uint n = 0u; n < WEIGHT_RAW; n++) ahead_weights[i * WEIGHT_RAW + n] = uvec4(0u);
        if (at < WEIGHT_UNITS && column < width) {
            uint64_t from = data + weight_row(at / (STEP / WEIGHT_UNIT)) * data_bytes;
            if (ENCODING == 4u) {
                uint first = column / 32u * 3u;
                ahead_weights[i * WEIGHT_RAW] = uvec4(Pairs(from).at[first], Pairs(from).at[first + 1u]);
                ahead_weights[(i + 1u) * WEIGHT_RAW - 1u].xy = Pairs(from).at[first + 2u];
            } else ahead_weights[i * WEIGHT_RAW] = Quads(from).at[column / WEIGHT_UNIT];
        }
    }
    [[unroll]] for (uint i = 0u; i < ROW_TURNS; i++) {
        uint at = i * GROUP + lane;
        uint column = k + at % (STEP / ROW_UNIT) * ROW_UNIT;
        bool there = at < ROW_UNITS && column < stride;
        [[unroll]] for (uint n = 0u; n < ROW_RAW; n++) {
            ahead_rows[i * ROW_RAW + n] = there ? Quads(row_from[i]).at[min(column, stride - ROW_UNIT) / ROW_UNIT * ROW_RAW + n] : uvec4(0u);
        }
    }
    if (!BLOCKED) return;
    [[unroll]] for (uint i = 0u; i < SCALE_TURNS; i++) {
        if (BLOCK == 0u) break;
        uint at = i * GROUP + lane;
        uint column = k + at % BLOCKS * BLOCK_COLUMNS;
        bool there = at < BLOCKS * TILE_OUTPUTS && column < width;
        uint64_t row = there ? weight_row(at / BLOCKS) : 0ul;
        uint block = min(column, width - 1u) / BLOCK_COLUMNS;
        ahead_scales[i] = there ? scale_number(scales + row * scale_bytes, block) : 1.0;
        if (MIN == 1u) ahead_minima[i] = there ? scale_number(minima + row * min_bytes, block) : 0.0;
    }
    [[unroll]] for (uint i = 0u; i < ROW_SCALE_TURNS; i++) {
        uint at = i * GROUP + lane;
        uint column = k + at % BLOCKS * BLOCK_COLUMNS;
        bool there = FORM == 2u && at < BLOCKS * TILE_ROWS && column < stride;
        uint row = source_row(min(at / BLOCKS, TILE_ROWS - 1u));
        ahead_row_scales[i] = there ? Floats(x_scales).at[row * (stride / 32u) + min(column, stride - 32u) / 32u] : 1.0;
    }
}

uint halves(float a, float b) { return packHalf2x16(vec2(a, b)); }
// Four signed bytes as f16.
uvec2 bytes_as_halves(uint word) {
    return uvec2(halves(bitfieldExtract(int(word), 0, 8), bitfieldExtract(int(word), 8, 8)), halves(bitfieldExtract(int(word), 16, 8), int(word) >> 24));
}
// Four stored integers as signed bytes.
uint centred(uint q, uint zero) { return MIN == 1u ? q : ((q | 0x80808080u) - zero) ^ 0x80808080u; }

// Stores 16 bytes as numbers of the small matrices.
void store_bytes(uvec4 bytes, uint at) {
#ifdef BYTES
    if (COLUMNS == 16u) staged[at] = bytes;
    else {
        staged[at] = uvec4(bytes.xy, 0u, 0u);
        staged[at + 1u] = uvec4(bytes.zw, 0u, 0u);
    }
#else
    staged[at] = uvec4(bytes_as_halves(bytes.x), bytes_as_halves(bytes.y));
    staged[at + 1u] = uvec4(bytes_as_halves(bytes.z), bytes_as_halves(bytes.w));
#endif
}

// Puts what was loaded into shared memory.
void store(uint stage, uint k) {
    [[unroll]] for (uint i = 0u; i < WEIGHT_TURNS; i++) {
        uint at = i * GROUP + lane;
        if (at >= WEIGHT_UNITS) break;
        uint unit = at % (STEP / WEIGHT_UNIT);
        uint to = stage * STAGE + at / (STEP / WEIGHT_UNIT) * PITCH + unit * (WEIGHT_UNIT / COLUMNS);
        uvec4 raw = ahead_weights[i * WEIGHT_RAW];
        if (ENCODING == 1u) {
            // What stands behind the end of a row has no meaning.
            uint left = width - min(k + unit * 8u, width);
            [[unroll]] for (uint j = 0u; j < 4u; j++) raw[j] &= left > 2u * j + 1u ? 0xffffffffu : left > 2u * j ? 0xffffu : 0u;
            staged[to] = raw;
        } else if (ENCODING == 3u) {
            store_bytes(raw, to);
        } else {
            uvec4 low = raw & 0x0f0f0f0fu;
            uvec4 high = raw >> 4 & 0x0f0f0f0fu;
            uint zero = 0x08080808u;
            if (ENCODING == 4u) {
                uvec2 top = ahead_weights[(i + 1u) * WEIGHT_RAW - 1u].xy;
                zero = 0x20202020u;
                low |= (uvec4(top, top >> 2) & 0x03030303u) << 4;
                high |= (uvec4(top >> 4, top >> 6) & 0x03030303u) << 4;
            }
            [[unroll]] for (uint j = 0u; j < 4u; j++) {
                low[j] = centred(low[j], zero);
                high[j] = centred(high[j], zero);
            }
            store_bytes(low, to);
            store_bytes(high, to + 16u / COLUMNS);
        }
    }
    [[unroll]] for (uint i = 0u; i < ROW_TURNS; i++) {
        uint at = i * GROUP + lane;
        if (at >= ROW_UNITS) break;
        uint to = stage * STAGE + (TILE_OUTPUTS + at / (STEP / ROW_UNIT)) * PITCH + at % (STEP / ROW_UNIT) * (ROW_UNIT / COLUMNS);
        if (FORM == 0u) {
            vec4 a = uintBitsToFloat(ahead_rows[i * ROW_RAW]);
            vec4 b = uintBitsToFloat(ahead_rows[(i + 1u) * ROW_RAW - 1u]);
            staged[to] = uvec4(halves(a.x, a.y), halves(a.z, a.w), halves(b.x, b.y), halves(b.z, b.w));
        } else if (FORM == 3u) {
            uvec4 a = ahead_rows[i * ROW_RAW];
            uvec4 b = ahead_rows[(i + 1u) * ROW_RAW - 1u];
            uvec4 even = uvec4(a.xz, b.xz);
            uvec4 odd = uvec4(a.yw, b.yw);
            staged[to] = (even & 0xffffu) | odd << 16;
            staged[to + TILE_ROWS * PITCH] = even >> 16 | (odd & 0xffff0000u);
        } else {
            store_bytes(ahead_rows[i * ROW_RAW], to);
        }
    }
    if (!BLOCKED) return;
    [[unroll]] for (uint i = 0u; i < SCALE_TURNS; i++) {
        if (BLOCK == 0u) break;
        uint at = i * GROUP + lane;
        uint to = (stage * BLOCKS + at % BLOCKS) * TILE_OUTPUTS + at / BLOCKS;
        if (at >= BLOCKS * TILE_OUTPUTS) break;
        output_scales[to] = ahead_scales[i];
        if (MIN == 1u) output_minima[to] = ahead_minima[i];
    }
    [[unroll]] for (uint i = 0u; i < ROW_SCALE_TURNS; i++) {
        uint at = i * GROUP + lane;
        if (at < BLOCKS * TILE_ROWS) row_scales[(stage * BLOCKS + at % BLOCKS) * TILE_ROWS + at / BLOCKS] = ahead_row_scales[i];
    }
}

const uint HIGH = OWN_OUTPUTS / SIZE;
const uint WIDE = OWN_ROWS / SIZE;

#define LOAD_LEFT(to, i, part) coopMatLoad(to, staged, first_left + i * SIZE * PITCH + (part) * DEPTH / COLUMNS, PITCH, gl_CooperativeMatrixLayoutRowMajor)
#define LOAD_RIGHT(to, j, part) coopMatLoad(to, staged, first_right + (j) * SIZE * PITCH + (part) * DEPTH / COLUMNS, PITCH, gl_CooperativeMatrixLayoutColumnMajor)

void main() {
    lane = gl_LocalInvocationID.x;
    first_output = gl_WorkGroupID.x * TILE_OUTPUTS;
    first_row = gl_WorkGroupID.y * TILE_ROWS;
    expert = 0u;
    if (GROUPED == 1u) {
        Words g = Words(groups);
        if (gl_WorkGroupID.y >= g.at[0]) return;
        expert = g.at[2u + gl_WorkGroupID.y];
        order = groups + 4ul * g.at[1];
    }
    find_rows();
    uint team = gl_SubgroupID % TEAMS;
    uint own_part = gl_SubgroupID / TEAMS;
    uint own_output = team / TEAM_ROWS * OWN_OUTPUTS;
    uint own_row = team % TEAM_ROWS * OWN_ROWS;
    Sums sums[HIGH * WIDE];
    FloatSums scaled[HIGH * WIDE];
    [[unroll]] for (uint n = 0u; n < HIGH * WIDE; n++) {
        if (BLOCKED) scaled[n] = FloatSums(0.0);
        else sums[n] = Sums(0);
    }
    load(0u);
    uint stage = 0u;
    for (uint k = 0u; k < width; k += STEP) {
        if (STAGES == 1u) barrier();
        store(stage, k);
        barrier();
        if (k + STEP < width) load(k + STEP);
        uint first_left = stage * STAGE + own_output * PITCH;
        uint first_right = stage * STAGE + (TILE_OUTPUTS + own_row) * PITCH;
        if (!BLOCKED) {
            [[unroll]] for (uint n = 0u; n < STEP / DEPTH / PARTS; n++) {
                uint part = own_part * (STEP / DEPTH / PARTS) + n;
                Left a[HIGH];
                [[unroll]] for (uint i = 0u; i < HIGH; i++) LOAD_LEFT(a[i], i, part);
                [[unroll]] for (uint j = 0u; j < WIDE; j++) {
                    Right b;
                    LOAD_RIGHT(b, j, part);
                    [[unroll]] for (uint i = 0u; i < HIGH; i++) sums[i * WIDE + j] = coopMatMulAdd(a[i], b, sums[i * WIDE + j]);
                    if (FORM == 3u) {
                        LOAD_RIGHT(b, j + TILE_ROWS / SIZE, part);
                        [[unroll]] for (uint i = 0u; i < HIGH; i++) sums[i * WIDE + j] = coopMatMulAdd(a[i], b, sums[i * WIDE + j]);
                    }
                }
            }
        } else {
            [[unroll]] for (uint n = 0u; n < BLOCKS / PARTS; n++) {
                uint block = own_part * (BLOCKS / PARTS) + n;
                const uint DEPTHS = BLOCK_COLUMNS / DEPTH;
                Left a[HIGH * DEPTHS];
                FloatSums factors[HIGH];
                FloatSums least[HIGH];
                uint place = (stage * BLOCKS + block) * TILE_OUTPUTS + own_output;
                [[unroll]] for (uint i = 0u; i < HIGH; i++) {
                    [[unroll]] for (uint part = 0u; part < DEPTHS; part++) LOAD_LEFT(a[i * DEPTHS + part], i, block * DEPTHS + part);
                    coopMatLoad(factors[i], output_scales, place + i * SIZE, 0u, gl_CooperativeMatrixLayoutColumnMajor);
                    if (MIN == 1u) coopMatLoad(least[i], output_minima, place + i * SIZE, 0u, gl_CooperativeMatrixLayoutColumnMajor);
                }
                [[unroll]] for (uint j = 0u; j < WIDE; j++) {
                    Right b[DEPTHS];
                    [[unroll]] for (uint part = 0u; part < DEPTHS; part++) LOAD_RIGHT(b[part], j, block * DEPTHS + part);
                    FloatSums row_factors;
                    if (FORM == 2u) {
                        uint row_place = (stage * BLOCKS + block) * TILE_ROWS + own_row + j * SIZE;
                        coopMatLoad(row_factors, row_scales, row_place, 0u, gl_CooperativeMatrixLayoutRowMajor);
                    }
                    // The sums of a block's numbers meet its minimum.
                    FloatSums all;
                    if (MIN == 1u) {
                        Sums total = Sums(0);
                        [[unroll]] for (uint part = 0u; part < DEPTHS; part++) total = coopMatMulAdd(Left(NUMBER(1)), b[part], total);
                        all = FloatSums(total);
                        if (FORM == 2u) all = all * row_factors;
                    }
                    [[unroll]] for (uint i = 0u; i < HIGH; i++) {
                        Sums product = Sums(0);
                        [[unroll]] for (uint part = 0u; part < DEPTHS; part++) product = coopMatMulAdd(a[i * DEPTHS + part], b[part], product);
                        FloatSums own = FloatSums(product);
                        if (BLOCK != 0u) own = own * factors[i];
                        if (FORM == 2u) own = own * row_factors;
                        if (MIN == 1u) own = own + least[i] * all;
                        scaled[i * WIDE + j] = scaled[i * WIDE + j] + own;
                    }
                }
            }
        }
        if (STAGES == 2u) stage = 1u - stage;
    }
    // Results leave through shared memory, some rows at a time.
    uint own = gl_SubgroupID * RESULTS;
    [[unroll]] for (uint j = 0u; j < WIDE; j++) {
        barrier();
        [[unroll]] for (uint i = 0u; i < HIGH; i++) {
            if (BLOCKED) coopMatStore(scaled[i * WIDE + j], staged, own + i * SIZE / 4u, OWN_OUTPUTS / 4u, gl_CooperativeMatrixLayoutColumnMajor);
            else coopMatStore(sums[i * WIDE + j], staged, own + i * SIZE / 4u, OWN_OUTPUTS / 4u, gl_CooperativeMatrixLayoutColumnMajor);
        }
        barrier();
        for (uint n = lane; n < TEAMS * RESULTS; n += GROUP) {
            uint from = n / RESULTS;
            uint row = result_row(from % TEAM_ROWS * OWN_ROWS + j * SIZE + n % RESULTS / (OWN_OUTPUTS / 4u));
            uint first = first_output + from / TEAM_ROWS * OWN_OUTPUTS + n % (OWN_OUTPUTS / 4u) * 4u;
            if (row == NONE || first >= outputs) continue;
            uint many = min(4u, outputs - first);
            vec4 results;
#ifdef BYTES
            if (!BLOCKED) {
                ivec4 sum = ivec4(0);
                [[unroll]] for (uint part = 0u; part < PARTS; part++) sum += ivec4(staged[part * TEAMS * RESULTS + n]);
                results = vec4(sum);
            } else
#endif
            {
                results = uintBitsToFloat(staged[n]);
                [[unroll]] for (uint part = 1u; part < PARTS; part++) results += uintBitsToFloat(staged[part * TEAMS * RESULTS + n]);
            }
            float factor = FORM == 1u || FORM == 3u ? Floats(x_scales).at[GROUPED == 1u ? row / share : row] : 1.0;
            [[unroll]] for (uint c = 0u; c < 4u; c++) {
                uint output_row = min(first + c, outputs - 1u);
                if (ENCODING == 3u && BLOCK == 0u) results[c] *= Floats(scales).at[expert * outputs + output_row] * factor;
                else results[c] *= factor;
                if (bias != 0ul) results[c] += Floats(bias).at[expert * outputs + output_row];
            }
            results = min(max(results, low), high);
            uint64_t at = 4ul * (uint64_t(row) * outputs + first);
            if (outputs % 4u == 0u) {
                if (added != 0ul) results += Vectors(added + at).at[0];
                Vectors(y + at).at[0] = results;
            } else {
                for (uint c = 0u; c < many; c++) Floats(y + at).at[c] = results[c] + (added != 0ul ? Floats(added + at).at[c] : 0.0);
            }
        }
    }
}
