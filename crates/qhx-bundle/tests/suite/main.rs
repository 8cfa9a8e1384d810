//! Bundles as others meet them: written, opened, damaged.

mod crash;
mod fixture;
mod integrity;
mod mutations;
mod refusals;
mod replace;
mod round_trip;
mod schema;
mod targets;
