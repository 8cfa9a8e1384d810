//! Texts of templates.

use super::budget::Kept;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

/// A text, shared by those who have it.
#[derive(Clone)]
pub(super) enum Text {
    /// The template's or the caller's own.
    Given(Arc<str>),
    /// Made while rendering, and paid for.
    Made(Rc<Kept<Box<str>>>),
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Self::Given(text) => text,
            Self::Made(text) => text,
        }
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self::Given(text.into())
    }
}

impl From<&Arc<str>> for Text {
    fn from(text: &Arc<str>) -> Self {
        Self::Given(text.clone())
    }
}

impl PartialEq for Text {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Text {}

impl Hash for Text {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (**self).hash(hasher);
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
