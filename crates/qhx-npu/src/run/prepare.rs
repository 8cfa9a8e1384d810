//! Compiling a program ahead of time: every part at all rows that the target lists, saved as context binaries.

use super::{
    device::{Kv, NpuOptions},
    graphs::{experts_name, failed, part_name},
    plan::{ContextFile, PLAN_VERSION, Plan},
};
use crate::{
    CompileOptions, Device,
    graph::Graph,
    lower::{CONTEXT_STEP, Part, Sizes, Work, experts::ExpertSizes, experts::expert_sizes, experts::lower_experts, lower, parts},
};
use qhx_ir::{Artifact, Checked, DeviceError, Symbol, Target, Weights};
use sha2::{Digest, Sha256};
use std::{
    io::Read,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

pub(super) fn prepare(
    device: &Device,
    program: &Checked,
    weights: &Arc<dyn Weights>,
    target: &Target,
    options: &NpuOptions,
) -> Result<Vec<Artifact>, DeviceError> {
    let mut rows = target.rows.clone();
    rows.sort_unstable();
    rows.dedup();
    if rows.first().is_none_or(|&first| first == 0) || target.context == 0 {
        return Err(DeviceError::Resources(format!("target {}: rows {rows:?} and context {} are impossible", target.name, target.context)));
    }
    let ring = rows.last().copied().filter(|_| options.kv == Kv::Ring);
    let context = if ring.is_some() { target.context } else { target.context.next_multiple_of(CONTEXT_STEP) };
    let mut plan = Plan {
        plan_version: PLAN_VERSION,
        arch: device.arch().to_string(),
        library: device.library().build().to_string(),
        context,
        ring,
        rows: rows.clone(),
        part_bytes: options.part_bytes,
        contexts: vec![],
    };
    let mut folder = Folder::new(program, target)?;
    for (number, part) in parts(program, options.part_bytes).iter().enumerate() {
        let Work::Graph(_) = part.work else { continue };
        let graphs = part_rows(part, &rows).into_iter().map(|rows| {
            let (context, ring) = if part.reads_kv { (context, ring) } else { (0, None) };
            let sizes = Sizes { rows, context, ring, taps: false };
            Ok(lower(program, part, Some(weights), sizes, part_name(number, sizes))?.graph)
        });
        let graphs = graphs.collect::<Result<Vec<_>, DeviceError>>()?;
        folder.contexts(device, &format!("part{number}"), graphs, options, &mut plan)?;
    }
    let batch = rows.last().copied().unwrap_or(1);
    let mut sizes: Vec<ExpertSizes> = program.ops.iter().flat_map(|op| expert_sizes(program, op, batch)).collect();
    sizes.sort_by_key(|&sizes| experts_name(sizes));
    sizes.dedup();
    if !sizes.is_empty() {
        let graphs = sizes.into_iter().map(|sizes| lower_experts(program, sizes, experts_name(sizes))).collect();
        // Their weights are inputs: there is nothing to share, and one small context holds them all.
        folder.context(device, "experts".into(), graphs, false, &mut plan)?;
    }
    let name = Plan::file_name(&program.name);
    let text = serde_json::to_string_pretty(&plan).map_err(|e| DeviceError::Resources(e.to_string()))?;
    let file = folder.path.join(&name);
    std::fs::write(&file, text).map_err(|e| DeviceError::Resources(format!("{}: {e}", file.display())))?;
    folder.artifacts.push(Artifact { name, file });
    Ok(folder.artifacts)
}

/// The rows at which a part is compiled.
pub(crate) fn part_rows(part: &Part, rows: &[usize]) -> Vec<usize> {
    let mut all: Vec<usize> = match part.work {
        // Wanted rows are one as a rule.
        Work::Graph(Symbol::L) if !part.whole => vec![1],
        _ => rows.iter().map(|rows| rows.next_multiple_of(part.multiple)).collect(),
    };
    all.dedup();
    all
}

/// The folder in which context binaries are written.
struct Folder<'a> {
    path: PathBuf,
    program: String,
    artifacts: Vec<Artifact>,
    cancel: Option<&'a AtomicBool>,
}

impl<'a> Folder<'a> {
    fn new(program: &Checked, target: &'a Target) -> Result<Self, DeviceError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let path = target.folder.clone().unwrap_or_else(|| {
            let name = format!("qhx-npu-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
            std::env::temp_dir().join(name)
        });
        std::fs::create_dir_all(&path).map_err(|e| DeviceError::Resources(format!("{}: {e}", path.display())))?;
        Ok(Self { path, program: program.name.to_string(), artifacts: vec![], cancel: target.cancel.as_deref() })
    }

    /// One context for graphs that share their weights, or one for each of them.
    fn contexts(&mut self, device: &Device, name: &str, graphs: Vec<Graph>, o: &NpuOptions, plan: &mut Plan) -> Result<(), DeviceError> {
        if o.share_weights {
            return self.context(device, name.into(), graphs, true, plan);
        }
        graphs.into_iter().try_for_each(|graph| self.context(device, graph.name.clone(), vec![graph], false, plan))
    }

    fn context(&mut self, device: &Device, name: String, graphs: Vec<Graph>, shared: bool, plan: &mut Plan) -> Result<(), DeviceError> {
        if self.cancel.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
            return Err(DeviceError::Cancelled);
        }
        // One graph has nobody to share with; without the flag every library loads it.
        let shared_weights = shared && graphs.len() > 1;
        let options = CompileOptions { share_weights: shared_weights, ..Default::default() };
        let context = device.compile(&graphs, &options).map_err(failed)?;
        let name = format!("{}_{name}.bin", self.program);
        let file = self.path.join(&name);
        let bytes = context.save(&file).map_err(failed)?;
        let sha256 = sum(&file).map_err(|e| DeviceError::Resources(format!("{}: {e}", file.display())))?;
        let graphs = graphs.into_iter().map(|graph| graph.name).collect();
        plan.contexts.push(ContextFile { file: name.clone(), bytes, sha256, shared_weights, graphs });
        self.artifacts.push(Artifact { name, file });
        Ok(())
    }
}

fn sum(file: &Path) -> std::io::Result<String> {
    let mut file = std::fs::File::open(file)?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            n => hash.update(&buffer[..n]),
        }
    }
}
