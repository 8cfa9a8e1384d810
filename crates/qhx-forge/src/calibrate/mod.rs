//! Calibrated rounding: weights that become integers are rounded so that products with real inputs change least.
//!
//! ```text
//! texts ──passes──▶ f32 program ─────┐ inputs of every product, part after part
//!                   stored program ──┴─▶ moments ──▶ factors ──▶ rounded rows ──▶ bundle
//! ```
//!
//! [`texts`] gives token sequences. `run` takes them through the f32 program and, beside it, through the program of the bundle with the weights rounded so far: `moments` are of the
//! inputs that the bundle really gives, and what was lost before a product is made up for in its weights. `factor` and `round` are the
//! mathematics. Where rounding by moments does no better than rounding each number by itself on rows that were kept back, the latter stays.

mod experts;
mod factor;
mod moments;
mod multiply;
mod parts;
mod prepare;
mod round;
mod run;
#[cfg(test)]
mod tests;
pub mod texts;
mod work;

pub(crate) use prepare::CalibrationRun;
pub use texts::CalibrationTexts;

/// How weights are rounded by what they are multiplied with.
#[derive(Clone, Debug, Default)]
pub struct Calibration {
    /// What the model reads.
    pub texts: CalibrationTexts,
    /// Threads; absent: one for each core. Results do not depend on it.
    pub threads: Option<usize>,
}
