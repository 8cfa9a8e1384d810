//! One group of cases for each op, or for each of its variants.

mod attention;
mod mixing;
pub(super) mod products;
mod recurrent;
mod simple;

use super::Group;

/// Row sizes that are difficult for kernels: one, odd, next to the size of a register, a block or a tile.
const WIDTHS: [usize; 16] = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 80, 100, 130];

const fn group(name: &'static str, weight: usize, least: usize, draw: fn(super::Rng, usize) -> super::Case) -> Group {
    Group { name, weight, least, draw }
}

/// All of them, products and attention with the most cases.
pub(super) const GROUPS: &[Group] = &[
    group("embed", 4, products::EMBED_FORMS, products::embed),
    group("interpolate", 4, products::EMBED_FORMS, products::interpolate),
    group("linear", 24, 2 * products::LINEAR_FORMS, products::linear),
    group("experts", 8, products::LINEAR_FORMS, products::experts),
    group("route", 6, 1, products::route),
    group("sparse_mixer", 6, 1, products::sparse_mixer),
    group("rms_norm", 4, 12, simple::rms_norm),
    group("layer_norm", 4, 1, simple::layer_norm),
    group("rope", 6, 1, simple::rope),
    group("gate_act", 4, 5, simple::gate_act),
    group("activate", 4, 5, simple::activate),
    group("add", 1, 1, simple::add),
    group("mul", 1, 1, simple::mul),
    group("scale", 2, 12, simple::scale),
    group("hadamard", 4, simple::HADAMARD_WIDTHS.len(), simple::hadamard),
    group("softcap", 2, 1, simple::softcap),
    group("clamp", 1, 1, simple::clamp),
    group("concat", 2, 1, simple::concat),
    group("slice", 2, 1, simple::slice),
    group("reshape", 2, 1, simple::reshape),
    group("gather", 2, 1, simple::gather),
    group("scatter_rows", 3, 1, simple::scatter_rows),
    group("scatter_add_rows", 3, 1, simple::scatter_add_rows),
    group("attend", 24, 1, attention::with_slot),
    group("attend_long", 2, 6, attention::long),
    group("attend_shared", 8, 1, attention::shared),
    group("attend_free", 12, 1, attention::without_slot),
    group("short_conv", 8, 1, recurrent::short_conv),
    group("gated_delta", 12, 1, recurrent::gated_delta),
    group("conv2d", 6, 1, mixing::conv2d),
    group("pool", 4, 1, mixing::pool),
];
