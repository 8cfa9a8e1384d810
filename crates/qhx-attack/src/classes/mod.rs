//! The classes of hostile input: for each, how a case is made and what the libraries do with it.

mod bundle;
mod chat;
mod config;
mod faults;
mod gguf;
mod media;
mod placement;
mod processes;
mod safetensors;
mod serving;
mod template;
mod tokenizer;

use crate::{files::Files, random::Random, seeds::Seeds, server::Client};
pub(crate) use qhx_attack::probes::Outcome;
use std::{path::PathBuf, time::Duration};

/// A class of hostile input.
pub(crate) struct Class {
    /// As it is named on the command line.
    pub(crate) name: &'static str,
    /// Makes a case. Nothing but the seeds and the random numbers may matter.
    pub(crate) make: fn(&Seeds, &mut Random) -> Case,
    /// Hands a case to the libraries.
    pub(crate) attempt: fn(&Case, &Bench) -> Outcome,
}

/// A hostile input.
#[derive(Default)]
pub(crate) struct Case {
    /// The files that it consists of.
    pub(crate) files: Files,
    /// Arguments of `qhx` for it, where `{case}` is the folder of the files, `{out}` a place for output and `{bundles}` the folder of good bundles.
    pub(crate) arguments: Vec<String>,
    /// Whether all that can follow is tried, or only what is quick.
    pub(crate) deep: bool,
    /// How a request's client behaves.
    pub(crate) client: Client,
}

/// What a worker has at hand.
pub(crate) struct Bench {
    /// The good files.
    pub(crate) seeds: Seeds,
    /// The folder of good bundles.
    pub(crate) bundles: PathBuf,
    /// A folder of its own, for files of cases.
    pub(crate) scratch: PathBuf,
    /// The binary.
    pub(crate) qhx: PathBuf,
    /// CPU time allowed for a case.
    pub(crate) limit: Duration,
}

/// Classes of files.
const OF_FILES: [Class; 10] = [
    Class { name: "gguf", make: gguf::make, attempt: gguf::attempt },
    Class { name: "safetensors", make: safetensors::make, attempt: safetensors::attempt },
    Class { name: "config", make: config::make, attempt: config::attempt },
    Class { name: "bundle", make: bundle::make, attempt: bundle::attempt },
    Class { name: "program", make: bundle::make_program, attempt: bundle::attempt },
    Class { name: "template", make: template::make, attempt: template::attempt },
    Class { name: "tokenizer", make: tokenizer::make, attempt: tokenizer::attempt },
    Class { name: "media", make: media::make, attempt: media::attempt },
    Class { name: "chat", make: chat::make, attempt: chat::attempt },
    Class { name: "toml", make: placement::make, attempt: placement::attempt },
];

/// All classes, in the order in which they run.
pub(crate) fn classes() -> impl Iterator<Item = &'static Class> {
    OF_FILES.iter().chain(&serving::CLASSES).chain(&processes::CLASSES)
}

/// What the harness itself is tried with: cases that fail in every way that it must notice.
const FAULTS: Class = Class { name: "faults", make: faults::make, attempt: faults::attempt };

/// The class of that name.
pub(crate) fn class(name: &str) -> Option<&'static Class> {
    classes().chain([&FAULTS]).find(|class| class.name == name)
}

impl Case {
    /// A case of one file.
    fn of(name: &str, content: Vec<u8>) -> Self {
        Self { files: [(name.to_owned(), content)].into(), ..Self::default() }
    }

    /// Arguments of `qhx`, separated by spaces.
    fn command(mut self, line: &str) -> Self {
        self.arguments = line.split(' ').map(str::to_owned).collect();
        self
    }

    /// A file's content; empty where there is none.
    fn file(&self, name: &str) -> &[u8] {
        self.files.get(name).map_or(&[], Vec::as_slice)
    }

    /// A file's content as text.
    fn text(&self, name: &str) -> String {
        String::from_utf8_lossy(self.file(name)).into_owned()
    }
}

/// A message of any error.
fn refused(error: impl std::fmt::Display) -> String {
    error.to_string()
}
