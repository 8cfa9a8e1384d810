//! The plan of an arch folder: what was prepared ahead of time for a processor that runs graphs of fixed sizes.
//!
//! Stands in the manifest as `plan`. This module owns the types and the checks that need no file; what the graphs are is the device's business.

use crate::{BundlePath, ManifestError, json};
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What was prepared, and for what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TargetPlan {
    /// Where the context binaries load.
    pub made_for: MadeFor,
    /// The release of QAIRT that compiled them, with its build.
    pub toolchain: String,
    /// The oldest release whose libraries load them.
    pub oldest_qairt: String,
    /// Rows that a session can have.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub context: usize,
    /// Rows that graphs take at once, beside one; empty: prompts go row by row.
    pub prefill: Vec<usize>,
    /// Prompts, and ends of prompts, with fewer rows go row by row.
    pub prefill_min_tokens: usize,
    /// How rows of sessions are kept.
    pub kv: KvForm,
    /// How graphs were compiled.
    pub finalize: Finalize,
    /// Why it is not all that was asked for, and what is dangerous about it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The files of each program.
    #[serde(deserialize_with = "json::unique_map")]
    pub programs: BTreeMap<String, PreparedProgram>,
}

/// Which stage runs where: the rules of a placement file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PlacementRules {
    /// The device of everything that nothing else names; absent: the processor that the folder is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<String>,
    /// The device that reads prompts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<String>,
    /// The device that writes tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<String>,
    /// Devices by stage: the first words of an op's path; `*` is any one word.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "json::unique_map")]
    pub stages: BTreeMap<String, String>,
}

/// Where context binaries load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum MadeFor {
    /// On phones: graphs of one part share their weights.
    Phone,
    /// In the emulator, and on phones: every graph has its own weights.
    Emulator,
}

/// How rows of sessions are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum KvForm {
    /// All of them.
    Full,
    /// The latest ones.
    Ring,
}

/// How graphs were compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Finalize {
    /// Effort, 1 to 3.
    pub optimization: u32,
    /// Fast memory of the processor, in megabytes.
    pub vtcm_mb: u32,
    /// Vector threads.
    pub hvx_threads: u32,
    /// Whether activations are compressed on their way to memory.
    pub dlbc: bool,
}

/// The files of a prepared program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PreparedProgram {
    /// Which graph is in which context binary: one file, or where `placement` cuts the program one for each piece.
    pub graphs: Vec<BundlePath>,
    /// The context binaries.
    pub contexts: Vec<BundlePath>,
}

impl TargetPlan {
    /// Every check that needs no file. Where stages are `placed`, a program may run elsewhere.
    pub(crate) fn check<P>(&self, programs: &BTreeMap<String, P>, placed: bool) -> Result<(), ManifestError> {
        let wrong = |field: &str, reason: String| Err(ManifestError::Field { field: format!("plan.{field}"), reason });
        if self.context == 0 {
            return wrong("context", "must be at least 1".into());
        }
        if self.prefill.contains(&0) || self.prefill.windows(2).any(|pair| pair[0] >= pair[1]) {
            return wrong("prefill", format!("must be increasing numbers above 0, found {:?}", self.prefill));
        }
        if let Some(name) = self.programs.keys().find(|name| !programs.contains_key(*name)) {
            return wrong("programs", format!("has the program `{name}`, which `programs` does not list"));
        }
        if let Some(name) = programs.keys().find(|name| !placed && !self.programs.contains_key(*name)) {
            return wrong("programs", format!("must have every program, but `{name}` is missing"));
        }
        if let Some((name, _)) = self.programs.iter().find(|(_, program)| program.graphs.is_empty()) {
            return wrong(&format!("programs.{name}.graphs"), "must name a file".into());
        }
        // The device looks for its files beside each other.
        for file in self.programs.values().flat_map(|program| program.contexts.iter().chain(&program.graphs)) {
            if file.as_str().contains('/') {
                return wrong("programs", format!("`{file}` must be in the manifest's folder"));
            }
        }
        Ok(())
    }

    /// Every file that it names, with the field.
    pub(crate) fn named_files(&self) -> impl Iterator<Item = (String, &BundlePath)> {
        self.programs.iter().flat_map(|(name, program)| {
            let contexts = program.contexts.iter().enumerate();
            let contexts = contexts.map(move |(i, file)| (format!("plan.programs.{name}.contexts[{i}]"), file));
            let graphs = program.graphs.iter().enumerate();
            contexts.chain(graphs.map(move |(i, file)| (format!("plan.programs.{name}.graphs[{i}]"), file)))
        })
    }
}
