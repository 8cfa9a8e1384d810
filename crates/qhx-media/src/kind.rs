//! The two kinds of media.

use super::{
    MediaError, MediaProblem,
    sniff::{ImageFormat, SoundFormat},
};
use qhx_bundle::files;
use serde::{Deserialize, Serialize};
use std::{fmt, io::Read, path::Path};

/// The most first bytes that are needed to tell what a file is.
const START: u64 = 64;

/// What a medium is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MediaKind {
    /// An image.
    Image,
    /// A sound.
    Audio,
}

impl MediaKind {
    /// What a file is, by its first bytes.
    pub fn of_file(path: &Path) -> Result<Self, MediaError> {
        let mut start = Vec::new();
        let file = files::open(path).map_err(|error| match error {
            files::ReadError::Io { source, .. } => source,
            other => std::io::Error::other(format!("it {}", other.reason())),
        });
        let read = file.and_then(|file| file.take(START).read_to_end(&mut start));
        read.map_err(MediaProblem::Read).and_then(|_| Self::of_bytes(&start)).map_err(|problem| problem.of_file(path))
    }

    /// What a file is that begins with these bytes; the problem is that it is neither.
    pub fn of_bytes(start: &[u8]) -> Result<Self, MediaProblem> {
        match (ImageFormat::of(start), SoundFormat::of(start)) {
            (Ok(_), _) => Ok(Self::Image),
            (_, Ok(_)) => Ok(Self::Audio),
            (Err(problem), Err(_)) => Err(problem),
        }
    }

    /// What the content of a message calls a part of this kind.
    pub fn part_type(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Audio => "audio",
        }
    }

    /// The kind of a message's part of this type; none if it is no medium.
    pub fn of_part(part_type: &str) -> Option<Self> {
        [Self::Image, Self::Audio].into_iter().find(|kind| kind.part_type() == part_type)
    }

    /// As people call several of them.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Image => "images",
            Self::Audio => "sounds",
        }
    }
}

impl fmt::Display for MediaKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Image => "image",
            Self::Audio => "sound",
        })
    }
}
