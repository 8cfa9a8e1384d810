//! The Hexagon device: lowers programs to QNN graphs with static shapes, compiles them to context binaries and runs those.
//!
//! Everything unsafe about QNN lives in this crate. [`graph`] is the wall inside it: lowering writes a [`graph::Graph`], a plain value that can be
//! looked at and tested without the library; the bindings turn one into a QNN graph.

pub mod graph;
