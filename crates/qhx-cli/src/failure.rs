//! What went wrong, as the user sees it: one readable block on stderr and an exit code.

use crate::{hints, output};
use qhx_runtime::Error as RuntimeError;
use std::{any::Any, borrow::Cow, error::Error, ffi::OsString, process::ExitCode};

/// Why a command did not succeed.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    message: String,
    causes: Vec<String>,
    hint: Option<String>,
}

impl Failure {
    /// The exit code of wrong usage.
    pub(crate) const USAGE: u8 = 2;
    const WORK: u8 = 1;
    /// Nobody reads what we print any more (`qhx … | head`): no failure, and nothing to tell.
    const NOBODY_READS: u8 = 0;

    /// The user asked for something that cannot be asked for.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { code: Self::USAGE, message: message.into(), causes: Vec::new(), hint: None }
    }

    /// The work failed.
    pub(crate) fn work(message: impl Into<String>) -> Self {
        Self { code: Self::WORK, ..Self::usage(message) }
    }

    pub(crate) fn nobody_reads() -> Self {
        Self { code: Self::NOBODY_READS, ..Self::usage("") }
    }

    /// The exit code of a process whose work this was, and which has said why.
    #[cfg(unix)]
    pub(crate) fn told(code: u8) -> Self {
        Self { code, ..Self::usage("") }
    }

    /// What to do about it.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Puts the place where it went wrong before the message.
    pub(crate) fn after(mut self, place: &str) -> Self {
        self.message.insert_str(0, place);
        self
    }

    /// What led to it.
    pub(crate) fn causes(mut self, causes: impl IntoIterator<Item = String>) -> Self {
        self.causes.extend(causes);
        self
    }

    /// Whether there is nothing to tell.
    pub(crate) fn is_quiet(&self) -> bool {
        self.message.is_empty()
    }

    /// The first line.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// What to do about it, where something is known.
    pub(crate) fn advice(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// Prints the block and gives the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        if !self.is_quiet() {
            output::note(&self.block());
        }
        self.code.into()
    }

    fn block(&self) -> String {
        let mut lines = vec![format!("error: {}", self.message)];
        lines.extend(self.causes.iter().map(|cause| format!("  cause: {cause}")));
        lines.extend(self.hint.iter().map(|hint| format!("  hint: {hint}")));
        // A line break in a text from elsewhere must not look like a line of ours.
        lines.iter().map(|line| shortened(line).replace('\n', "\n    ")).collect::<Vec<_>>().join("\n")
    }
}

/// The longest line that is shown whole: messages quote files, and a name in a file can have megabytes.
const SHOWN_BYTES: usize = 8 << 10;

/// A line without its middle, if it is too long: messages begin with what was read and end with the reason.
fn shortened(line: &str) -> Cow<'_, str> {
    if line.len() <= SHOWN_BYTES {
        return line.into();
    }
    let half = SHOWN_BYTES / 2;
    let is_boundary = |at: &usize| line.is_char_boundary(*at);
    let (head, tail) =
        ((0..=half).rev().find(is_boundary).unwrap_or(0), (line.len() - half..=line.len()).find(is_boundary).unwrap_or(line.len()));
    format!("{} … ({} bytes left out) … {}", &line[..head], tail - head, &line[tail..]).into()
}

/// Any error of the libraries. Its text comes first, then those causes that the text does not tell already.
impl<E: Error + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut failure = Self::work(error.to_string());
        let mut told = failure.message.clone();
        let mut cause = error.source();
        while let Some(error) = cause {
            let text = error.to_string();
            if !told.contains(&text) {
                told += &text;
                failure.causes.push(text);
            }
            cause = error.source();
        }
        if is_usage(&error) {
            failure.code = Self::USAGE;
        }
        failure.hint = hints::hint(&error);
        failure
    }
}

/// Errors of the libraries that only a flag can cause.
fn is_usage(error: &dyn Any) -> bool {
    let of_library = match error.downcast_ref() {
        Some(qhx::Error::Runtime(error)) => Some(error),
        _ => None,
    };
    matches!(
        of_library.or_else(|| error.downcast_ref()),
        Some(
            RuntimeError::UnknownDevice { .. }
                | RuntimeError::Placement { .. }
                | RuntimeError::Option { .. }
                | RuntimeError::Sampler(_)
                | RuntimeError::StopStrings(_)
                | RuntimeError::EmptyPrompt
        )
    )
}

/// Names the argument that is not UTF-8.
pub(crate) fn not_utf8(arguments: &[OsString]) -> Failure {
    let message = match arguments.iter().enumerate().find(|(_, argument)| argument.to_str().is_none()) {
        Some((place, argument)) => format!("argument {place} is not valid UTF-8: {argument:?}"),
        None => "an argument is not valid UTF-8".into(),
    };
    Failure::usage(message).hint("text must be UTF-8; only paths may hold other bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fmt, io};

    #[test]
    fn a_flood_in_a_message_is_cut_in_its_middle() {
        let block = Failure::work(format!("model.gguf: the name {} is too long", "é".repeat(200_000))).hint("rename it").block();
        assert!(block.len() < 2 * SHOWN_BYTES, "{} bytes", block.len());
        assert!(block.starts_with("error: model.gguf: the name éé") && block.ends_with("éé is too long\n  hint: rename it"), "{block}");
        assert!(block.contains("bytes left out"), "{block}");
        assert_eq!(Failure::work("short").block(), "error: short");
    }

    #[derive(Debug)]
    struct Outer(&'static str, io::Error);
    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }
    impl Error for Outer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.1)
        }
    }

    #[test]
    fn a_cause_is_told_once() {
        let cause = || io::Error::other("disk full");
        let block = Failure::from(Outer("cannot write", cause())).hint("free some space").block();
        assert_eq!(block, "error: cannot write\n  cause: disk full\n  hint: free some space");
        assert_eq!(Failure::from(Outer("cannot write: disk full", cause())).block(), "error: cannot write: disk full");
        assert_eq!(Failure::work("no file a\nerror: fine").block(), "error: no file a\n    error: fine");
    }

    #[test]
    fn exit_codes() {
        assert_eq!(Failure::from(RuntimeError::EmptyPrompt).code, 2);
        assert_eq!(Failure::from(RuntimeError::Cancelled).code, 1);
        assert_eq!(Failure::from(io::Error::other("x")).code, 1);
    }
}
