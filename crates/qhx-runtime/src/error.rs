//! What can go wrong between a bundle and its text.

use crate::{
    eval_error::EvalError,
    memory::{MemoryEstimate, show_bytes},
    sample::{SampleError, SamplerConfigError},
};
use qhx_ir::DeviceError;
use qhx_media::{MediaError, MediaKind};
use qhx_text::{ChatError, StopStringsError, TokenizerError};
use std::{io, path::PathBuf};

/// Why the runtime could not do what it was asked. Each text says what was expected, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text cannot be used to evaluate a model.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// A device was asked for that does not exist.
    #[error("there is no device `{found}`; expected one of {known}")]
    UnknownDevice {
        /// What was asked for.
        found: String,
        /// What could be.
        known: String,
    },
    /// A device was asked for that this build or this machine has not.
    #[error("device `{asked}` cannot be used: {reason}; this build of qhx offers {offered}")]
    NoDevice {
        /// What was asked for.
        asked: String,
        /// Why there is none.
        reason: String,
        /// What there is.
        offered: String,
    },
    /// The NPU is of another generation than the bundle.
    #[error(
        "the bundle is for Hexagon {asked}, this machine's processor is {here}: take the folder `{here}` of the bundle, or forge it for {here}"
    )]
    OtherArch {
        /// The bundle's.
        asked: String,
        /// The machine's.
        here: String,
    },
    /// An arch folder on another device.
    #[error(
        "{bundle} is prepared for the NPU and holds no weights for {device}: run it on the NPU, or use the bundle that it is a folder of"
    )]
    OnlyNpu {
        /// Where it is.
        bundle: String,
        /// What was asked for.
        device: String,
    },
    /// An arch folder with another placement than its own.
    #[error(
        "{bundle} has no weight `{weight}`: it is prepared for the NPU and holds only the weights that its own placement needs elsewhere; use the bundle that it is a folder of for another placement"
    )]
    OnlyOwnPlacement {
        /// Where it is.
        bundle: String,
        /// What is missing.
        weight: String,
    },
    /// An arch folder for phones in an emulator.
    #[error(
        "{bundle} is made for phones: its graphs share their weights, which QNN's emulator cannot load; run it on a phone, run the bundle that it is a folder of, or forge it for the emulator"
    )]
    OnlyPhones {
        /// Where it is.
        bundle: String,
    },
    /// No device takes every stage.
    #[error("program `{program}` cannot run on `{device}`: {refusals}")]
    NotPlaced {
        /// The program's name.
        program: String,
        /// What was asked for.
        device: String,
        /// Who refused what, and why.
        refusals: String,
    },
    /// A placement that is wrong, or not one for this model.
    #[error("placement: {reason}")]
    Placement {
        /// What was expected and found.
        reason: String,
    },
    /// The model needs more memory than there is.
    #[error("the model does not fit into memory: it needs {estimate}; {remedy}", estimate = .0, remedy = .0.remedy())]
    DoesNotFit(Box<MemoryEstimate>),
    /// Encoding a medium needs more memory than there is.
    #[error(
        "{medium}: encoding this {kind} takes {} of memory, {} are available; use a smaller one, or free memory",
        show_bytes(*needed),
        show_bytes(*available)
    )]
    MediumDoesNotFit {
        /// Its name.
        medium: String,
        /// What it is.
        kind: MediaKind,
        /// Bytes that the tower needs.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
    /// The model has no eyes or no ears.
    #[error("`{model}` takes no {}: it takes {takes}", kind.plural())]
    NotTaken {
        /// The model's name.
        model: String,
        /// What was given.
        kind: MediaKind,
        /// What it takes.
        takes: String,
    },
    /// A medium cannot be read or used.
    #[error(transparent)]
    Medium(#[from] MediaError),
    /// A medium was made ready for another model.
    #[error("{medium} was made ready by the front end of another model than `{model}`: open it again for this one")]
    OtherFrontEnd {
        /// Its name.
        medium: String,
        /// The model's name.
        model: String,
    },
    /// A program that encodes media is not one, or not one for this text program.
    #[error("program `{program}` cannot encode media for this model: {reason}")]
    Tower {
        /// The program's name.
        program: String,
        /// What is missing.
        reason: String,
    },
    /// As many placeholders as media there must be, and there are not.
    #[error("placeholders for {}: found {found} in the prompt, expected {expected} ({reason})", kind.plural())]
    Placeholders {
        /// What they stand for.
        kind: MediaKind,
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
        /// Why.
        reason: String,
    },
    /// A setting outside its limits.
    #[error("{option} is {found}, expected {expected}")]
    Option {
        /// The setting's name.
        option: &'static str,
        /// What it was.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// The program wants an input that comes with media or from another part, not with text.
    #[error("program `{program}` wants the input `{input}` made by {generator}, which a text session cannot make")]
    CannotMake {
        /// The program's name.
        program: String,
        /// The input's name.
        input: String,
        /// Its generator.
        generator: String,
    },
    /// The program is not one that a text session can run.
    #[error("program `{program}` is no text program: {reason}")]
    NotText {
        /// The program's name.
        program: String,
        /// What is missing.
        reason: String,
    },
    /// The program is not one that can draft for the model.
    #[error("program `{program}` cannot draft for the text program: {reason}")]
    NotDraft {
        /// The program's name.
        program: String,
        /// What is missing.
        reason: String,
    },
    /// Nothing to read.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// An id outside the vocabulary.
    #[error("id {id} (number {at} of the prompt) is not in the vocabulary: ids are 0 to {}", vocabulary - 1)]
    UnknownId {
        /// The id.
        id: u32,
        /// Where it stands, counted from 0.
        at: usize,
        /// How many ids there are.
        vocabulary: usize,
    },
    /// The text of the prompt cannot fit into the session, however few tokens it takes.
    #[error(
        "the prompt has {bytes} bytes of text, and a context of {context} tokens cannot hold more than {most}: shorten the prompt{}",
        if *limit > *context { format!(" or raise the context (this model allows up to {limit})") } else { String::new() }
    )]
    TextTooLong {
        /// Bytes of the prompt.
        bytes: usize,
        /// The most bytes that can fit.
        most: usize,
        /// Rows a session can hold.
        context: usize,
        /// The most this model can be asked for.
        limit: usize,
    },
    /// The prompt alone is longer than the session.
    #[error(
        "the prompt has {prompt} tokens, the context holds {context}: shorten the prompt{}",
        if *limit > *context { format!(" or raise the context (this model allows up to {limit})") } else { String::new() }
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Rows a session can hold.
        context: usize,
        /// The most this model can be asked for.
        limit: usize,
    },
    /// The session has no room for more rows.
    #[error("the session is full: {rows} rows and {more} more are beyond its context of {context}")]
    ContextFull {
        /// Rows in the session.
        rows: usize,
        /// Rows that were to come.
        more: usize,
        /// Rows it can hold.
        context: usize,
    },
    /// A rollback to a place that the session has not reached.
    #[error("cannot roll back to row {to}: the session has {rows} rows")]
    Rollback {
        /// Where to.
        to: usize,
        /// Rows in the session.
        rows: usize,
    },
    /// Somebody asked to stop; the session is as it was.
    #[error("cancelled")]
    Cancelled,
    /// Too many requests wait.
    #[error("{waiting} requests are waiting already: try again later")]
    QueueFull {
        /// How many.
        waiting: usize,
    },
    /// The engine was stopped before the answer was complete.
    #[error("the engine was stopped before the answer was complete")]
    EngineStopped,
    /// The engine failed in a step; what it had begun is lost, new requests can be made.
    #[error("the engine failed while it worked on this answer: this is a bug; the request can be made again")]
    EngineFailed,
    /// A call that several answers shared failed.
    #[error("{0}")]
    SharedCall(String),
    /// A thread cannot be started.
    #[error("cannot start a thread: {source}")]
    Thread {
        /// What the system said.
        source: io::Error,
    },
    /// The device failed.
    #[error(transparent)]
    Device(DeviceError),
    /// A sampling setting is wrong.
    #[error(transparent)]
    Sampler(#[from] SamplerConfigError),
    /// No token could be chosen.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The model has no tokenizer, so it takes and gives ids only.
    #[error("{what} needs a tokenizer, and this bundle has none: give token ids")]
    NoTokenizer {
        /// What was asked for.
        what: &'static str,
    },
    /// The model has no chat template.
    #[error("`{model}` is a completion model: its checkpoint has no chat template, so it cannot chat; give it a text to continue")]
    NoTemplate {
        /// The model's name.
        model: String,
    },
    /// A conversation gave no prompt.
    #[error(transparent)]
    Chat(ChatError),
    /// A grammar cannot be followed.
    #[error("the grammar cannot be used: {problem}")]
    Grammar {
        /// What is wrong with it.
        problem: String,
    },
    /// Other grammars take all the places where they are compiled.
    #[error("{compiling} other grammars are being compiled: try again in a moment")]
    GrammarsBusy {
        /// How many.
        compiling: usize,
    },
    /// This build has no grammars.
    #[error("this build follows no grammars (cargo feature `grammar`)")]
    NoGrammars,
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A stop string is wrong.
    #[error(transparent)]
    StopStrings(#[from] StopStringsError),
    /// A snapshot cannot be restored.
    #[error("snapshot {}: {reason}", path.display())]
    Snapshot {
        /// The file.
        path: PathBuf,
        /// What was expected and found.
        reason: String,
    },
    /// A tensor file cannot be read.
    #[error("{}: {reason}", path.display())]
    Tensors {
        /// The file.
        path: PathBuf,
        /// What was expected and found.
        reason: String,
    },
    /// A file is not read.
    #[error(transparent)]
    Read(#[from] qhx_bundle::files::ReadError),
    /// A file cannot be read or written.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// `read`, `write` …
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The bundle is wrong.
    #[error(transparent)]
    Bundle(#[from] qhx_bundle::BundleError),
}

impl Error {
    /// A device that this machine does not have.
    pub(crate) fn absent(asked: String, reason: String) -> Self {
        let offered = if cfg!(feature = "cpu") { "cpu, auto" } else { "nothing but reference" };
        Self::NoDevice { asked, reason, offered: offered.to_owned() }
    }

    /// The same for another answer that was in the same call.
    pub(crate) fn again(&self) -> Self {
        match self {
            Self::Cancelled => Self::Cancelled,
            Self::Device(DeviceError::StatesFull { needed, limit }) => {
                Self::Device(DeviceError::StatesFull { needed: *needed, limit: *limit })
            }
            other => Self::SharedCall(other.to_string()),
        }
    }
}

impl From<ChatError> for Error {
    fn from(error: ChatError) -> Self {
        if error == ChatError::Cancelled { Self::Cancelled } else { Self::Chat(error) }
    }
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Cancelled => Self::Cancelled,
            DeviceError::Absent { device, reason } => Self::absent(device, reason),
            other => Self::Device(other),
        }
    }
}
