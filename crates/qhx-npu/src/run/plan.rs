//! The plan of a prepared program: its context binaries, and their row counts and context length. Stored next to them as `NAME.npu.json`.

use crate::{Arch, budget::PerToken};
use qhx_ir::DeviceError;
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

/// The supported version of this file.
pub(super) const PLAN_VERSION: u32 = 3;

/// More rows than any graph or session has: a sign that a plan is damaged.
const MOST_ROWS: usize = 1 << 24;

/// The largest plan that is read, in bytes.
const MOST_BYTES: u64 = 16 << 20;

/// The plan of one program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GraphPlan {
    /// The version of the file: 3.
    pub plan_version: u32,
    /// `v79`, `v81`.
    pub arch: String,
    /// The QAIRT release that compiled it; older libraries cannot load it.
    pub library: String,
    /// Rows of the KV cache; for ring buffers, the most rows that attention sees.
    pub context: usize,
    /// For ring buffers: the most rows of a call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring: Option<usize>,
    /// Row counts of the graphs.
    pub rows: Vec<usize>,
    /// The most bytes of weights per graph, by which the program was split into parts.
    pub part_bytes: u64,
    /// What decoding one token takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_token: Option<PerToken>,
    /// Where the plan differs from what was requested and why, and its risks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The context binaries.
    pub contexts: Vec<ContextFile>,
}

/// A context binary. Pieces of one program may share it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContextFile {
    /// Its name in the plan's folder.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256, in hexadecimal.
    pub sha256: String,
    /// Whether its graphs share one set of weights.
    pub shared_weights: bool,
    /// The first and last stage that it covers, wholly or in part.
    pub stages: [String; 2],
    /// Number of layers that it covers, wholly or in part.
    pub layers: usize,
    /// Those of its graphs that belong to this program.
    pub graphs: Vec<String>,
}

impl GraphPlan {
    /// The file's name for a program.
    pub(super) fn file_name(program: &str) -> String {
        format!("{program}.npu.json")
    }

    pub(super) fn read(folder: &Path, program: &str, arch: Arch) -> Result<Self, DeviceError> {
        let file = folder.join(Self::file_name(program));
        let plan = Self::read_file(&file)?;
        match plan.arch == arch.to_string() {
            true => Ok(plan),
            false => Err(wrong(&file, format!("is for {}, but the processor is {arch}: use the folder for {arch}", plan.arch))),
        }
    }

    /// Reads a plan for any processor.
    pub fn read_file(file: &Path) -> Result<Self, DeviceError> {
        let wrong = |reason: String| wrong(file, reason);
        let read = || {
            // Asked before opening: opening a FIFO would wait for its writer.
            if !std::fs::metadata(file)?.is_file() {
                return Err(io::Error::other("it is not a regular file"));
            }
            let mut text = String::new();
            File::open(file)?.take(MOST_BYTES + 1).read_to_string(&mut text)?;
            Ok(text)
        };
        let text = read().map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => wrong(
                "cannot be read: there is no such file. The folder was not prepared for this placement: forge the bundle with the same one"
                    .into(),
            ),
            _ => wrong(format!("cannot be read: {e}")),
        })?;
        if text.len() as u64 > MOST_BYTES {
            return Err(wrong(format!("is larger than {MOST_BYTES} bytes, the most that a plan may have")));
        }
        let plan: Self = serde_json::from_str(&text).map_err(|e| wrong(format!("is not a plan of an NPU program: {e}")))?;
        if plan.plan_version != PLAN_VERSION {
            return Err(wrong(format!(
                "plan_version is {}, but this qhx reads {PLAN_VERSION}: forge the bundle again or update qhx",
                plan.plan_version
            )));
        }
        plan.check().map_err(wrong)?;
        Ok(plan)
    }

    /// Checks that its numbers and names are plausible.
    fn check(&self) -> Result<(), String> {
        let Self { rows, context, ring, contexts, .. } = self;
        let rise = rows.windows(2).all(|pair| pair[0] < pair[1]);
        let mut numbers = rows.iter().chain([context]).chain(ring);
        if rows.is_empty() || !rise || !numbers.all(|number| (1..=MOST_ROWS).contains(number)) {
            let ring = ring.map_or(String::new(), |ring| format!(" and ring {ring}"));
            return Err(format!(
                "rows {rows:?}, context {context}{ring} are impossible: rows must be in ascending order, and each number 1 to {MOST_ROWS}"
            ));
        }
        // A path could lead out of the folder.
        let is_plain = |name: &str| !name.starts_with('.') && Path::new(name).file_name() == Some(name.as_ref());
        match contexts.iter().find(|context| !is_plain(&context.file)) {
            Some(bad) => Err(format!("`{}` is not a plain file name", bad.file)),
            None => Ok(()),
        }
    }
}

fn wrong(file: &Path, reason: String) -> DeviceError {
    DeviceError::Resources(format!("{}: {reason}", file.display()))
}

impl ContextFile {
    /// The SHA-256 as bytes.
    pub(super) fn sum(&self) -> Result<[u8; 32], DeviceError> {
        let digit = |at: usize| self.sha256.get(2 * at..2 * at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
        let bytes: Option<Vec<u8>> = (0..32).map(digit).collect();
        let bytes = bytes.filter(|_| self.sha256.len() == 64).and_then(|bytes| bytes.try_into().ok());
        bytes.ok_or_else(|| DeviceError::Resources(format!("`{}`: `{}` is not a SHA-256 checksum", self.file, self.sha256)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> GraphPlan {
        let file = ContextFile {
            file: "text_0.bin".into(),
            bytes: 7,
            sha256: "0a".repeat(32),
            shared_weights: true,
            stages: ["layers.0.attn".into(), "lm_head".into()],
            layers: 1,
            graphs: vec!["a".into()],
        };
        GraphPlan {
            plan_version: PLAN_VERSION,
            arch: "v81".into(),
            library: "QAIRT 2.51.0".into(),
            context: 512,
            ring: None,
            rows: vec![1, 128],
            part_bytes: 9,
            per_token: Some(PerToken { weight_bytes: 5, ..Default::default() }),
            notes: vec!["n".into()],
            contexts: vec![file],
        }
    }

    #[test]
    fn a_plan_is_read_back_and_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let write = |plan: &GraphPlan| {
            std::fs::write(folder.path().join(GraphPlan::file_name("text")), serde_json::to_string(plan).unwrap()).unwrap();
            GraphPlan::read(folder.path(), "text", Arch::V81).map_err(|e| e.to_string())
        };
        assert_eq!(write(&plan()), Ok(plan()));
        assert!(write(&GraphPlan { plan_version: 1, ..plan() }).unwrap_err().contains("update qhx"));
        assert!(write(&GraphPlan { arch: "v79".into(), ..plan() }).unwrap_err().contains("is for v79"));
        for rows in [vec![], vec![0], vec![128, 1], vec![1, 1], vec![1, usize::MAX]] {
            assert!(write(&GraphPlan { rows, ..plan() }).unwrap_err().contains("impossible"));
        }
        for (context, ring) in [(0, None), (usize::MAX, None), (512, Some(0)), (512, Some(usize::MAX))] {
            assert!(write(&GraphPlan { context, ring, ..plan() }).unwrap_err().contains("impossible"), "{context} {ring:?}");
        }
        for name in ["../text_0.bin", "/", "", "a/b.bin", ".hidden", "a.bin/"] {
            let mut away = plan();
            away.contexts[0].file = name.into();
            assert!(write(&away).unwrap_err().contains("not a plain file name"), "{name}");
        }
        assert_eq!(plan().contexts[0].sum().unwrap(), [10; 32]);
        assert!(ContextFile { sha256: "0g".repeat(32), ..plan().contexts.remove(0) }.sum().is_err());
        assert!(GraphPlan::read(folder.path(), "vision", Arch::V81).unwrap_err().to_string().contains("cannot be read"));
    }
}
