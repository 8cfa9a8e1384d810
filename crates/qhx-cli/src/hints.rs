//! What to do about an error of the library, in terms of the command line.

use qhx::{
    Error, Found, NotFound, is_repository,
    messages::{KNOWN_FIELDS, MessagesError, PartProblem},
};
use qhx_bundle::{BundleError, ManifestError};
use qhx_forge::ForgeError;
use qhx_ir::DeviceError;
use qhx_runtime::{
    DeviceChoice, Error as RuntimeError,
    media::{MediaError, MediaProblem},
};
use std::{
    any::Any,
    io::{self, ErrorKind},
};

/// The hint for an error, where there is one.
pub(crate) fn hint(error: &dyn Any) -> Option<String> {
    let library = error.downcast_ref().and_then(of_library);
    let others = || error.downcast_ref().and_then(of_messages).or_else(|| error.downcast_ref().and_then(of_runtime));
    library.or_else(others).or_else(|| error.downcast_ref().and_then(of_forge))
}

fn of_runtime(error: &RuntimeError) -> Option<String> {
    match error {
        RuntimeError::NoDevice { asked, .. } if asked == DeviceChoice::Npu.name() => {
            Some("QHX_QNN_DIR names the folder with QNN's libraries".into())
        }
        RuntimeError::NoDevice { asked, .. } if asked == DeviceChoice::Split.name() => {
            Some("--placement FILE.toml splits a model over the devices that it names".into())
        }
        RuntimeError::OtherArch { here, .. } => Some(format!("qhx forge SRC --out DIR --target {here}")),
        RuntimeError::OnlyNpu { .. } => Some("--device npu runs it".into()),
        RuntimeError::OnlyPhones { .. } => Some("`qhx forge … --for emulator` makes one for both".into()),
        RuntimeError::DoesNotFit(estimate) if estimate.device.is_some() => {
            Some("--context N sets the context, --gpu-memory SIZE the limit, --device cpu uses the CPU".into())
        }
        RuntimeError::DoesNotFit(_) => Some("--context N sets the context, --overcommit loads it all the same".into()),
        RuntimeError::TextTooLong { context, limit, .. } | RuntimeError::PromptTooLong { context, limit, .. } if limit > context => {
            Some(format!("--context N sets the context, up to {limit}"))
        }
        RuntimeError::Medium(MediaError { problem: MediaProblem::TooLong { .. }, .. }) => Some("--split goes through it in windows".into()),
        _ => None,
    }
}

fn of_forge(error: &ForgeError) -> Option<String> {
    match error {
        ForgeError::Target(_) | ForgeError::Run(RuntimeError::Device(DeviceError::Resources(_))) => Some(TARGET_FLAGS.into()),
        ForgeError::Run(error) => of_runtime(error),
        _ => None,
    }
}

/// Where to look for what changes an NPU target.
pub(crate) const TARGET_FLAGS: &str = "the flags of NPU targets (--context, --prefill, --kv, --image-size, --audio-seconds, --allow-risky, --optimize) are in `qhx help forge`";

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
        Error::Bundle(BundleError::Manifest { source: ManifestError::OtherRuntime { .. }, .. }) => {
            Some("fetch the model's checkpoint, and forge that: qhx forge SRC --out DIR --target v79,v81".into())
        }
        Error::Messages(error) => of_messages(error),
        Error::Runtime(error) => of_runtime(error),
        Error::Forge(error) => match &**error {
            ForgeError::Bundle(BundleError::Io { source, .. }) if is_full(source) => {
                Some("nothing was left behind; make room, or keep the cache elsewhere: QHX_CACHE_DIR".into())
            }
            other => of_forge(other),
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
