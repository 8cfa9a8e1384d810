//! How many drafts are right.

/// The share of drafts that are thought to be right before any was tried.
const FIRST_SHARE: f64 = 0.6;
/// How many drafts a first thought counts as much as.
const FIRST_COUNT: f64 = 2.0;
/// What is left of earlier drafts when new ones are judged, and when none were tried.
const REMEMBERED: f64 = 0.9;
const REMEMBERED_IDLE: f64 = 0.99;

/// How many drafts of a source are right.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acceptance {
    first: f64,
    right: f64,
    tried: f64,
}

impl Default for Acceptance {
    fn default() -> Self {
        Self::expecting(FIRST_SHARE)
    }
}

impl Acceptance {
    /// Before anything was tried, where so large a share of earlier drafts was right.
    pub(crate) fn expecting(first: f64) -> Self {
        Self { first, right: 0.0, tried: 0.0 }
    }

    /// The share of drafts that are right, of those before which all were.
    pub(crate) fn share(&self) -> f64 {
        (self.right + self.first * FIRST_COUNT) / (self.tried + FIRST_COUNT)
    }

    pub(crate) fn learn(&mut self, drafted: usize, accepted: usize) {
        let tried = accepted + usize::from(accepted < drafted);
        self.right = self.right * REMEMBERED + accepted as f64;
        self.tried = self.tried * REMEMBERED + tried as f64;
    }

    /// A step without drafts: what comes now may be another kind of text.
    pub(crate) fn forget_a_little(&mut self) {
        self.right *= REMEMBERED_IDLE;
        self.tried *= REMEMBERED_IDLE;
    }
}
