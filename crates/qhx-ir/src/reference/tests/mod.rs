//! The reference against numbers worked out by hand: it is the yardstick, so nothing but arithmetic may vouch for it.

mod attention;
pub(crate) mod bench;
mod products;
mod recurrent;
mod rows;
mod transactions;

use bench::{Bench, assert_close};
