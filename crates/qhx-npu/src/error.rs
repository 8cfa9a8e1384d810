//! What can go wrong between us and QNN, in words.

use std::{fmt, path::PathBuf};
use thiserror::Error;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something about the NPU did not work.
#[derive(Debug, Error)]
pub enum Error {
    /// The library file cannot be loaded.
    #[error("cannot load {}: {reason}; {advice}", .path.display())]
    Load {
        /// What was to be loaded.
        path: PathBuf,
        /// What the system said.
        reason: String,
        /// What to do.
        advice: &'static str,
    },
    /// The library is not one of QNN, or not one that we can use.
    #[error("{} is no library that qhx can use: {reason}", .path.display())]
    Library {
        /// What was loaded.
        path: PathBuf,
        /// What was expected and found.
        reason: String,
    },
    /// A call of the library failed.
    #[error(transparent)]
    Call(Box<CallError>),
    /// A graph is wrong; the library would not notice, or crash.
    #[error("graph `{graph}`, {place}: {reason}")]
    Graph {
        /// The graph.
        graph: String,
        /// Its tensor or node.
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
    /// An execution does not fit its graph.
    #[error("graph `{graph}`: {reason}")]
    Execute {
        /// The graph.
        graph: String,
        /// What was expected and found.
        reason: String,
    },
    /// This machine or this library cannot do what was asked.
    #[error("{0}")]
    Unsupported(String),
}

/// A failed call of the library.
#[derive(Debug)]
pub struct CallError {
    /// The function.
    pub call: &'static str,
    /// What it was about: the graph, the node, the file.
    pub subject: String,
    /// QNN's number.
    pub code: u16,
    /// What the library says of the number.
    pub message: Option<String>,
    /// What the library logged during the call, warnings and errors.
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

/// What a number of QNN's means here and what to do about it.
fn meaning(code: u16) -> Option<(&'static str, &'static str)> {
    const OURS: &str = "this is a mistake in qhx: please report it with the lines below";
    const FILE: &str = "make the context binary anew with `qhx forge`, or copy it again";
    const LIBRARIES: &str = "take libQnnHtp.so, libQnnSystem.so, the stub and the skel of the DSP's version from one QAIRT release";
    Some(match code {
        1000 => ("not supported by this library on this processor", "a newer QAIRT may; otherwise place this stage on another device"),
        1002 => (
            "the graph could not be prepared, or memory ran out",
            "an op of the graph is not supported at these shapes (the lines below name it), or the graph must be split into smaller contexts",
        ),
        1003 => ("a call of the operating system failed", "see the lines below; on a phone: is the DSP accessible to this process?"),
        1004 => ("an argument is invalid", OURS),
        1005 => ("not allowed in this state", OURS),
        1006 => ("this processor is not supported by the library", "use a QAIRT release that knows this chip"),
        1007 => (
            "the host could not talk to the DSP",
            "the DSP may have restarted or run out of memory: close other users of the NPU and try again; set ADSP_LIBRARY_PATH to the folder with the skel",
        ),
        1008 => ("the parts of the library are of different releases, or the skel was not found", LIBRARIES),
        1009 | 1010 => ("a resource of the NPU is used up or taken", "close other users of the NPU, or use fewer contexts"),
        1100 => ("a general error", "see the lines below"),
        3110 => (
            "the op does not take these types, shapes or parameters",
            "place this stage on another device; the lines below say what is wrong",
        ),
        4000..=4002 => ("the backend refused its configuration or handle", OURS),
        4003 => ("the backend cannot be initialised", LIBRARIES),
        4005 => ("the library does not know this op", "use a newer QAIRT release"),
        5000 => (
            "the context or its binary was refused",
            "a binary made by a newer QAIRT than this library looks like this: use the libraries of that release or a newer one",
        ),
        5001 | 5002 => ("the context does not exist any more", OURS),
        5003 => ("a graph of the context is not finished", OURS),
        5004 => ("the binary's version does not fit the library", "use libraries of at least the QAIRT release that made it"),
        5005 => (
            "the context cannot be made from the binary",
            "it was made for another processor, is damaged, or does not fit into the DSP's memory: `qhx doctor` says which",
        ),
        5006 | 5007 => ("the context cannot be written out", "is there enough memory? the graphs and their binary are held at once"),
        5008 | 5010 => ("the context's configuration was refused", OURS),
        5011 => ("the binary is not optimal for this processor", "forge the model for this processor"),
        6000 | 6001 | 6005 | 6006 | 6007 => ("the graph or one of its ops was refused", OURS),
        6002 | 6003 => ("no graph of that name, or two of it", FILE),
        6004 => ("a tensor does not fit the graph", OURS),
        6020..=6022 => (
            "the graph could not be prepared",
            "an op of the graph is not supported at these shapes (the lines below name it): place its stage on another device",
        ),
        6023 => ("the graph is not finished", OURS),
        6024 => ("the graph is finished already", OURS),
        6025 | 6031 => ("the execution was cut off", "the DSP may have restarted: load the model again"),
        7000..=7003 => ("a tensor's name, number or handle was refused", OURS),
        7004 => ("a tensor's type, shape or quantisation was refused", OURS),
        14000 | 14001 => ("the device's configuration was refused", "this QAIRT release may not know the chip: use a newer one"),
        14002..=14099 => ("the NPU could not be opened", LIBRARIES),
        30001 => ("this is no context binary", FILE),
        30010 => ("the binary is damaged or cut off", FILE),
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
    fn an_unknown_number_is_told_in_the_librarys_words() {
        let error = CallError { call: "x", subject: "y".into(), code: 12_345, message: Some("odd".into()), log: vec![] };
        assert_eq!(error.to_string(), "QNN x failed for y: error 12345, odd");
    }
}
