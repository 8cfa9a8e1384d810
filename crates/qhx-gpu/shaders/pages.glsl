// Pages of keys and values: of each slot the keys `[kv_heads, 64, words]`, then the values, as `pages.rs` lays them out.
#ifndef SLOT
layout(constant_id = 0) const uint SLOT = 0; // 0 none: keys are those of the call; 1 f32; 2 f16
#endif
const uint PAGE_ROWS = 64u;

uint row_words(uint dim) { return SLOT == 2u ? (dim + 1u) / 2u : dim; }
uint64_t slot_half(uint kv_heads, uint dim) { return 4ul * kv_heads * PAGE_ROWS * row_words(dim); }
uint64_t key_row(Words call, Segment s, uint64_t offset, uint position, uint kv_heads, uint head, uint dim) {
    uint64_t page = address(call, s.pages + 2u * (position / PAGE_ROWS));
    return page + offset + 4ul * ((head * PAGE_ROWS + position % PAGE_ROWS) * row_words(dim));
}
