//! Whole tiny models.
use super::Group;
pub(super) const GROUPS: &[Group] = &[];
