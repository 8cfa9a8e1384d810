//! What to do about an error of the library, in terms of the command line.

use qhx::{
    Error, Found, NotFound, is_repository,
    messages::{KNOWN_FIELDS, MessagesError, PartProblem},
};
use qhx_bundle::BundleError;
use qhx_forge::ForgeError;
use std::{
    any::Any,
    io::{self, ErrorKind},
};

/// The hint for an error, where there is one.
pub(crate) fn hint(error: &dyn Any) -> Option<String> {
    error.downcast_ref().and_then(of_library).or_else(|| error.downcast_ref().and_then(of_messages))
}

fn of_library(error: &Error) -> Option<String> {
    match error {
        Error::NotFound(missing) => Some(advice(missing)),
        Error::NotForged { path } => Some(format!("forge it first: qhx forge {} --out BUNDLE", path.display())),
        Error::NoCache => Some("set QHX_CACHE_DIR, or run `qhx forge SRC --out DIR` and use DIR".into()),
        Error::FailedGate { source_path, report, .. } => Some(format!(
            "see {}; `qhx forge {} --precision f32 --out DIR` makes an f32 bundle, --gate none one without a gate",
            report.display(),
            source_path.display()
        )),
        Error::Bundle(BundleError::NotABundle { .. }) => {
            Some("a bundle is a folder with a qhx.json; `qhx forge SRC --out DIR` makes one".into())
        }
        Error::Messages(error) => of_messages(error),
        Error::Forge(error) => match &**error {
            ForgeError::Bundle(BundleError::Io { source, .. }) if is_full(source) => {
                Some("nothing was left behind; make room, or keep the cache elsewhere: QHX_CACHE_DIR".into())
            }
            _ => None,
        },
        _ => None,
    }
}

/// Whether there was no room for a file.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::FileTooLarge | ErrorKind::QuotaExceeded)
}

fn of_messages(error: &MessagesError) -> Option<String> {
    match error {
        MessagesError::UnknownField { .. } => Some(format!("known fields are `{}`", KNOWN_FIELDS.join("`, `"))),
        MessagesError::Part { problem, .. } => match **problem {
            PartProblem::UnknownType { .. } => Some("known types are `text`, and `image` and `audio` with a `path`".into()),
            PartProblem::NotAFile { .. } => Some("qhx reads only local files: save it and give its path".into()),
            _ => None,
        },
        _ => None,
    }
}

/// What to do about a model that is not there.
pub(crate) fn advice(missing: &NotFound) -> String {
    let name = missing.reference.to_str().unwrap_or_default();
    if !missing.near.is_empty() {
        format!("did you mean {}?", missing.near.join(" or "))
    } else if missing.found == Found::Nothing && is_repository(name) && name.matches('/').count() == 1 {
        format!("if this is a repository of the Hugging Face hub, fetch it first: `hf download {name}`")
    } else {
        "give the path of a bundle, a Hugging Face folder or a GGUF file".into()
    }
}
