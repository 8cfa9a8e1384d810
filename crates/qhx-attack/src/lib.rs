//! What is done with hostile input in memory: [`probes`]. The fuzz targets in `fuzz/` and the classes of `cargo xtask attack` call the same ones.

pub mod probes;
