//! What ends a render early.

/// Why a template cannot be compiled or rendered, without the place: whoever knows it adds it.
#[derive(Debug)]
pub(super) enum Failure {
    /// The template is wrong, fails on these variables, or uses what is not supported.
    Problem(String),
    /// The template called `raise_exception`, with this text.
    Raised(String),
    /// The template needs more than it is granted.
    Limit(String),
    /// The caller no longer wants the text.
    Cancelled,
}

pub(super) type Result<T> = std::result::Result<T, Failure>;

/// A failure at a place in the template's source.
#[derive(Debug)]
pub(crate) enum Error {
    /// What is wrong, and in which line.
    Problem(String),
    /// What the template said with `raise_exception`.
    Raised(String),
    /// Which limit was reached, and in which line.
    Limit(String),
    /// The caller no longer wants the text.
    Cancelled,
}

/// Longest text of a template's own that an error repeats, in characters.
const LONGEST_QUOTE: usize = 2_000;
/// Longest piece of a source line that an error shows, in characters.
const LONGEST_EXCERPT: usize = 80;

impl Failure {
    pub(super) fn problem(text: impl Into<String>) -> Self {
        Self::Problem(text.into())
    }

    /// The failure with the line of the source that byte `at` stands in.
    pub(super) fn located(self, source: &str, at: usize) -> Error {
        match self {
            Self::Problem(text) => Error::Problem(format!("{} ({})", shortened(&text), place(source, at))),
            Self::Limit(text) => Error::Limit(format!("{text} ({})", place(source, at))),
            Self::Raised(text) => Error::Raised(shortened(&text)),
            Self::Cancelled => Error::Cancelled,
        }
    }
}

impl Error {
    /// What it says.
    pub(super) fn words(self) -> String {
        match self {
            Self::Problem(text) | Self::Raised(text) | Self::Limit(text) => text,
            Self::Cancelled => "cancelled".to_owned(),
        }
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(LONGEST_QUOTE) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The number of a line and what stands there, beginning shortly before the place if the line is long.
fn place(source: &str, at: usize) -> String {
    let at = (0..=at.min(source.len())).rev().find(|&at| source.is_char_boundary(at)).unwrap_or(0);
    let (before, after) = source.split_at(at);
    let number = before.matches('\n').count() + 1;
    let start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let end = after.find('\n').map_or(source.len(), |length| at + length);
    let line = &source[start..end];
    let skipped = before[start..].chars().count().saturating_sub(LONGEST_EXCERPT / 2);
    let skipped = if line.chars().count() > LONGEST_EXCERPT { skipped } else { 0 };
    let excerpt: String = line.chars().skip(skipped).take(LONGEST_EXCERPT).collect();
    format!("line {number}: {:?}", excerpt.trim())
}

/// `Err` with a problem, worded as `format!` would.
macro_rules! fail {
    ($($message:tt)*) => {
        return Err($crate::jinja::error::Failure::Problem(format!($($message)*)))
    };
}
pub(super) use fail;
