//! What can be wrong with an image or a sound.

use super::{MAX_PIXELS, MAX_SAMPLES, MAX_SIDE, SAMPLING_RATES};
use std::{io, path::Path};

/// An image or sound that cannot be used: which one, and why.
#[derive(Debug, thiserror::Error)]
#[error("{name}: {problem}")]
pub struct MediaError {
    /// The file's name, or what its bytes were called.
    pub name: String,
    /// What is wrong.
    #[source]
    pub problem: MediaProblem,
}

/// Why an image or a sound cannot be used. Each text goes on after the file's name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MediaProblem {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Read(#[source] io::Error),
    /// The file is larger than any that is read.
    #[error("has {}, the limit is {limit} bytes; use a smaller file", .size.map_or("too many bytes".into(), |size| format!("{size} bytes")))]
    FileTooBig {
        /// Its size, where it has one.
        size: Option<u64>,
        /// The most bytes.
        limit: u64,
    },
    /// There is nothing in the file.
    #[error("is empty: it has no bytes")]
    NoBytes,
    /// The bytes are of no known format.
    #[error("is not {expected}: it starts with {starts}; {formats} can be read, whatever the file is called")]
    Unknown {
        /// `an image` or `a sound`.
        expected: &'static str,
        /// The first bytes, readable.
        starts: String,
        /// What can be read.
        formats: &'static str,
    },
    /// The format is known, but not read.
    #[error("is {found}, which is not read; {formats} are")]
    OtherFormat {
        /// What it is.
        found: String,
        /// What can be read.
        formats: &'static str,
    },
    /// This build has no decoder for any such file.
    #[error("is {} file, and this build of qhx has no {content} decoders (cargo feature `{content}`)", if *content == "image" { "an image" } else { "a sound" })]
    NotBuilt {
        /// `image` or `sound`: what it is, and the name of the cargo feature.
        content: &'static str,
    },
    /// The file ends too early.
    #[error("is cut off: the {format} file ends before its {content} does; copy or download it again")]
    Truncated {
        /// `PNG`, `FLAC` …
        format: &'static str,
        /// `image` or `sound`.
        content: &'static str,
    },
    /// The bytes break the rules of their format.
    #[error("is a damaged {format} file: {reason}")]
    Damaged {
        /// `PNG`, `FLAC` …
        format: &'static str,
        /// What the decoder says.
        reason: String,
    },
    /// The file is fine, but uses something that is not supported.
    #[error("is a kind of {format} that is not read: {reason}")]
    Unsupported {
        /// `PNG`, `FLAC` …
        format: &'static str,
        /// What it uses.
        reason: String,
    },
    /// An image without area.
    #[error("has no pixels: it says that it is {width} x {height}")]
    NoPixels {
        /// Columns.
        width: u64,
        /// Rows.
        height: u64,
    },
    /// More pixels than are decoded.
    #[error("says that it is {width} x {height}: {} million pixels, and at most {} million are decoded; use a smaller image", width * height / 1_000_000, MAX_PIXELS / 1_000_000)]
    TooManyPixels {
        /// Columns.
        width: u64,
        /// Rows.
        height: u64,
    },
    /// A side longer than is decoded.
    #[error("says that it is {width} x {height}, and sides of at most {MAX_SIDE} pixels are decoded; cut it into parts")]
    SideTooLong {
        /// Columns.
        width: u64,
        /// Rows.
        height: u64,
    },
    /// The bytes given for a picture are not `width · height · 3`.
    #[error("has {found} bytes for {width} x {height} pixels of three channels")]
    WrongBytes {
        /// Columns.
        width: u64,
        /// Rows.
        height: u64,
        /// Bytes.
        found: usize,
    },
    /// An image much longer than wide, or the other way round.
    #[error("is {width} x {height}: one side is {aspect:.1} times the other, and this model takes at most {most} times; crop it")]
    Aspect {
        /// Columns.
        width: u64,
        /// Rows.
        height: u64,
        /// Their ratio.
        aspect: f64,
        /// The largest ratio.
        most: f64,
    },
    /// The model's size rule leaves nothing of the image.
    #[error(
        "is {width} x {height}, of which this model's limit of {max_soft_rows} soft rows leaves no row and no column of {block} pixels"
    )]
    NothingLeft {
        /// Columns.
        width: u64,
        /// Rows.
        height: u64,
        /// The limit.
        max_soft_rows: usize,
        /// Pixels along a side of a block.
        block: usize,
    },
    /// A sound without samples.
    #[error("has no sound in it: the {format} file decodes to 0 samples")]
    NoSamples {
        /// `WAV`, `FLAC` …
        format: &'static str,
    },
    /// A sound too short for a single frame.
    #[error("is too short: {found} samples at {rate} Hz, and the model needs at least {needed} ({:.1} ms)", *needed as f64 * 1e3 / f64::from(*rate))]
    TooShort {
        /// Samples at the front end's rate.
        found: usize,
        /// The fewest.
        needed: usize,
        /// Samples per second.
        rate: u32,
    },
    /// A sound longer than the model takes in one piece.
    #[error("is {seconds:.2} s long and this model takes at most {most:.2} s in one piece; cut it, or go through it in windows")]
    TooLong {
        /// Its length.
        seconds: f64,
        /// The longest.
        most: f64,
    },
    /// A sound longer than is decoded.
    #[error("has more than {} million samples, the most that is decoded; cut it into parts", MAX_SAMPLES / 1_000_000)]
    TooManySamples,
    /// A sampling rate out of reason.
    #[error("has a sampling rate of {found} Hz; {} to {} Hz are understood", SAMPLING_RATES.start(), SAMPLING_RATES.end())]
    Rate {
        /// The rate.
        found: u32,
    },
}

impl MediaProblem {
    /// The same with the file's name before it.
    pub(super) fn of(self, name: impl Into<String>) -> MediaError {
        MediaError { name: name.into(), problem: self }
    }

    /// The same with the path before it.
    pub(super) fn of_file(self, path: &Path) -> MediaError {
        self.of(path.display().to_string())
    }
}
