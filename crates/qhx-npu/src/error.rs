//! Errors of the NPU device and of QNN, with their meaning and what to do.

use std::{fmt, path::PathBuf};
use thiserror::Error;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an NPU operation failed.
#[derive(Debug, Error)]
pub enum Error {
    /// The library file cannot be loaded.
    #[error("cannot load {}: {reason}; {advice}", .path.display())]
    Load {
        /// The file that was to be loaded.
        path: PathBuf,
        /// The loader's message.
        reason: String,
        /// What to do.
        advice: &'static str,
    },
    /// The library is not QNN's, or not a version that qhx can use.
    #[error("{} is not a library that qhx can use: {reason}", .path.display())]
    Library {
        /// What was loaded.
        path: PathBuf,
        /// What was expected and found.
        reason: String,
    },
    /// A library call failed.
    #[error(transparent)]
    Call(Box<CallError>),
    /// A graph is invalid; the library would either not notice or crash.
    #[error("graph `{graph}`, {place}: {reason}")]
    Graph {
        /// The graph.
        graph: String,
        /// The tensor or node.
        place: String,
        /// What was expected and found.
        reason: String,
    },
    /// A context binary cannot be used here.
    #[error("context binary {name}: {reason}")]
    Binary {
        /// The file, or what stands for it.
        name: String,
        /// What was expected and found, and what to do.
        reason: String,
    },
    /// The buffers of an execution do not match its graph.
    #[error("graph `{graph}`: {reason}")]
    Execute {
        /// The graph.
        graph: String,
        /// What was expected and found.
        reason: String,
    },
    /// This machine or this library does not support the request.
    #[error("{0}")]
    Unsupported(String),
}

/// A failed library call.
#[derive(Debug)]
pub struct CallError {
    /// The function.
    pub call: &'static str,
    /// What the call was for: the graph, the node, the file.
    pub subject: String,
    /// QNN's error code.
    pub code: u16,
    /// The library's message for the code.
    pub message: Option<String>,
    /// Warnings and errors that the library logged during the call.
    pub log: Vec<String>,
}

impl std::error::Error for CallError {}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, subject, code, message, log } = self;
        let known = meaning(*code);
        write!(f, "QNN {call} failed for {subject}: error {code}")?;
        match (known, message) {
            (Some((meaning, advice)), _) => write!(f, ", {meaning}; {advice}")?,
            (None, Some(message)) => write!(f, ", {message}")?,
            (None, None) => {}
        }
        for line in log {
            write!(f, "\n  library: {line}")?;
        }
        Ok(())
    }
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        Self::Call(Box::new(error))
    }
}

/// What a QNN error code means here, and what to do about it.
fn meaning(code: u16) -> Option<(&'static str, &'static str)> {
    const OURS: &str = "this is a bug in qhx: please report it with the lines below";
    const FILE: &str = "copy the context binary again, or rebuild it with `qhx forge`";
    const LIBRARIES: &str = "use libQnnHtp.so, libQnnSystem.so, and the stub and skel for this DSP version from one QAIRT release";
    Some(match code {
        1000 => ("not supported by this library on this processor", "try a newer QAIRT release, or place this stage on another device"),
        1002 => (
            "the graph could not be prepared, or memory ran out",
            "either an op of the graph is not supported at these shapes (the lines below name it), or the graph must be split into smaller contexts",
        ),
        1003 => ("an operating system call failed", "see the lines below; on a phone, check that this process may access the DSP"),
        1004 => ("an argument is invalid", OURS),
        1005 => ("not allowed in this state", OURS),
        1006 => ("the library does not support this processor", "use a QAIRT release that supports this chip"),
        1007 => (
            "the host could not communicate with the DSP",
            "the DSP may have restarted or run out of memory: close other programs that use the NPU and try again; check that ADSP_LIBRARY_PATH names the folder with the skel",
        ),
        1008 => ("the libraries come from different releases, or the skel was not found", LIBRARIES),
        1009 | 1010 => ("an NPU resource is exhausted or in use", "close other programs that use the NPU, or use fewer contexts"),
        1100 => ("a general error", "see the lines below"),
        3110 => (
            "the op does not support these types, shapes or parameters",
            "place this stage on another device; the lines below say what is wrong",
        ),
        4000..=4002 => ("the backend rejected its configuration or handle", OURS),
        4003 => ("the backend cannot be initialised", LIBRARIES),
        4005 => ("the library does not know this op", "use a newer QAIRT release"),
        5000 => (
            "the context or its binary was rejected",
            "the binary may come from a newer QAIRT release than this library: use the libraries of that release or a newer one",
        ),
        5001 | 5002 => ("the context no longer exists", OURS),
        5003 => ("a graph of the context is not finished", OURS),
        5004 => {
            ("the library cannot load this version of context binary", "use libraries of the QAIRT release that made it, or newer ones")
        }
        5005 => (
            "the context cannot be created from the binary",
            "it was compiled for another processor, is damaged, or does not fit into the DSP's memory: `qhx doctor` says which",
        ),
        5006 | 5007 => ("the context cannot be serialised", "check the free memory: the graphs and their binary are held at the same time"),
        5008 | 5010 => ("the context's configuration was rejected", OURS),
        5011 => ("the binary is not optimal for this processor", "forge the model for this processor"),
        6000 | 6001 | 6005 | 6006 | 6007 => ("the graph or one of its ops was rejected", OURS),
        6002 | 6003 => ("the context has no graph of that name, or more than one", FILE),
        6004 => ("a tensor does not match the graph", OURS),
        6020..=6022 => (
            "the graph could not be prepared",
            "an op of the graph is not supported at these shapes (the lines below name it): place its stage on another device",
        ),
        6023 => ("the graph is not finished", OURS),
        6024 => ("the graph is already finished", OURS),
        6025 | 6031 => ("the execution was aborted", "the DSP may have restarted: load the model again"),
        7000..=7003 => ("a tensor's name, id or handle was rejected", OURS),
        7004 => ("a tensor's type, shape or quantisation was rejected", OURS),
        14000 | 14001 => ("the device's configuration was rejected", "this QAIRT release may not support the chip: use a newer one"),
        14002..=14099 => ("the NPU could not be opened", LIBRARIES),
        30001 => ("this is not a context binary", FILE),
        30010 => ("the binary is damaged or truncated", FILE),
        30000..=30099 => ("the binary cannot be read", FILE),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_call_says_what_it_means_what_to_do_and_what_the_library_logged() {
        let error = Error::from(CallError {
            call: "contextCreateFromBinary",
            subject: "model.bin".into(),
            code: 5005,
            message: Some("QNN_CONTEXT_ERROR_CREATE_FROM_BINARY".into()),
            log: vec!["bad soc".into()],
        });
        let text = error.to_string();
        for part in ["contextCreateFromBinary", "model.bin", "5005", "another processor", "qhx doctor", "library: bad soc"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn an_unknown_code_is_reported_in_the_librarys_words() {
        let error = CallError { call: "x", subject: "y".into(), code: 12_345, message: Some("odd".into()), log: vec![] };
        assert_eq!(error.to_string(), "QNN x failed for y: error 12345, odd");
    }
}
