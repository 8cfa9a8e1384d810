// Ops with a state, for one row: short convolution and the delta rule.

void short_conv(uint group) {
    uint i = group * GROUP + gl_LocalInvocationID.x;
    uint channels = word(12u);
    if (i >= channels) return;
    uint kernel = word(13u);
    Segment s = only_segment();
    uint slot = s.recurrent + 6u * word(14u);
    uint64_t old = address(Words(call), slot);
    uint64_t next = address(Words(call), slot + 2u);
    uint64_t record = address(Words(call), slot + 4u);
    float own = Floats(place(4u)).at[i];
    float sum = place(8u) == 0ul ? 0.0 : Floats(place(8u)).at[i];
    for (uint j = 0u; j < kernel; j++) {
        float v = j + 1u < kernel ? (old == 0ul ? 0.0 : Floats(old).at[j * channels + i]) : own;
        sum += Floats(place(6u)).at[i * kernel + j] * v;
        if (j > 0u) Floats(next).at[(j - 1u) * channels + i] = v;
    }
    Floats(place(10u)).at[i] = activate(word(15u), sum);
    if (record != 0ul) Floats(record).at[i] = own;
}

// Columns of a head's state that a workgroup takes; its keys are divided among the other invocations.
const uint COLUMNS = 16u;
const uint D_Q = 4u, D_K = 6u, D_V = 8u, D_A = 10u, D_B = 12u, A_LOG = 14u, DT_BIAS = 16u, D_Y = 18u;
const uint D_HEADS = 20u, KEY_HEADS = 21u, KEY_DIM = 22u, VALUE_DIM = 23u, D_SLOT = 24u, D_SCALE = 25u, D_EPS = 26u;

float log_plus_one(float x) { return x < 0.01 ? x * (1.0 - x * (0.5 - x * (1.0 / 3.0 - x * 0.25))) : log(1.0 + x); }

// The sum over all invocations that have the same column.
float column_sum(float x) {
    uint lane = gl_LocalInvocationID.x;
    barrier();
    room[lane / 4u][lane % 4u] = floatBitsToUint(x);
    barrier();
    float all = 0.0;
    for (uint n = lane % COLUMNS; n < GROUP; n += COLUMNS) all += uintBitsToFloat(room[n / 4u][n % 4u]);
    return all;
}

void delta(uint group) {
    uint lane = gl_LocalInvocationID.x;
    uint heads = word(D_HEADS);
    uint key_dim = word(KEY_DIM);
    uint value_dim = word(VALUE_DIM);
    uint head = group % heads;
    uint column = group / heads * COLUMNS + lane % COLUMNS;
    bool own = column < value_dim;
    held_source = NONE;
    Segment s = only_segment();
    uint slot = s.recurrent + 6u * word(D_SLOT);
    uint64_t before = address(Words(call), slot);
    uint64_t after = address(Words(call), slot + 2u);
    uint64_t record = address(Words(call), slot + 4u);
    uint key_head = head / (heads / word(KEY_HEADS));
    Floats q = Floats(place(D_Q) + 4ul * (key_head * key_dim));
    Floats k = Floats(place(D_K) + 4ul * (key_head * key_dim));
    float squares_q = 0.0;
    float squares_k = 0.0;
    for (uint i = lane; i < key_dim; i += GROUP) {
        squares_q += q.at[i] * q.at[i];
        squares_k += k.at[i] * k.at[i];
    }
    float factor_q = number(D_SCALE) / sqrt(group_sum(squares_q) + number(D_EPS));
    float factor_k = 1.0 / sqrt(group_sum(squares_k) + number(D_EPS));
    float x = Floats(place(D_A)).at[head] + Floats(place(DT_BIAS)).at[head];
    float soft = max(x, 0.0) + log_plus_one(exp(-abs(x)));
    float decay = exp(-exp(Floats(place(A_LOG)).at[head]) * soft);
    float step_size = sigmoid(Floats(place(D_B)).at[head]);
    if (record != 0ul && group / heads == 0u) {
        // As `delta_rows.comp` writes it.
        Floats to = Floats(record + 4ul * (head * (2u * key_dim + value_dim + 2u)));
        for (uint i = lane; i < key_dim; i += GROUP) {
            to.at[i] = k.at[i] * factor_k;
            to.at[key_dim + value_dim + 2u + i] = q.at[i] * factor_q;
        }
        for (uint i = lane; i < value_dim; i += GROUP) to.at[key_dim + i] = Floats(place(D_V)).at[head * value_dim + i];
        if (lane == 0u) {
            to.at[key_dim + value_dim] = decay;
            to.at[key_dim + value_dim + 1u] = step_size;
        }
    }
    float read = 0.0;
    if (own && before != 0ul) {
        for (uint i = lane / COLUMNS; i < key_dim; i += GROUP / COLUMNS) {
            read += Floats(before).at[(head * key_dim + i) * value_dim + column] * decay * (k.at[i] * factor_k);
        }
    }
    read = column_sum(read);
    float change = own ? step_size * (Floats(place(D_V)).at[head * value_dim + column] - read) : 0.0;
    float result = 0.0;
    if (own) {
        for (uint i = lane / COLUMNS; i < key_dim; i += GROUP / COLUMNS) {
            uint at = (head * key_dim + i) * value_dim + column;
            float state = before != 0ul ? Floats(before).at[at] * decay : 0.0;
            state += k.at[i] * factor_k * change;
            Floats(after).at[at] = state;
            result += state * (q.at[i] * factor_q);
        }
    }
    result = column_sum(result);
    if (own && lane < COLUMNS) Floats(place(D_Y)).at[head * value_dim + column] = result;
}
