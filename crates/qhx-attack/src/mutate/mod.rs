//! How a good file becomes a hostile one.

mod bytes;
mod gguf;
mod json;

pub(crate) use bytes::mutate_bytes;
pub(crate) use gguf::attack_fields;
pub(crate) use json::{Json, mutate_json};

/// Numbers at which arithmetic tends to break.
pub(crate) const NASTY_INTEGERS: [u64; 18] = [
    0,
    1,
    2,
    3,
    31,
    255,
    256,
    4096,
    65_535,
    65_536,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 53,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX,
];
