//! Compiling a program ahead of time: the contexts that the planner lays out, compiled and saved.

use super::{
    device::NpuOptions,
    graphs::{experts_name, failed, part_name},
    plan::{ContextFile, PLAN_VERSION, Plan},
};
use crate::{
    CompileOptions, Device,
    budget::{Budget, Planned, PlannedContext, Wanted, budget, kv_sizes},
    graph::Graph,
    lower::{Sizes, experts::lower_experts, lower, parts},
};
use qhx_ir::{Artifact, Checked, DeviceError, Target, Weights};
use sha2::{Digest, Sha256};
use std::{
    io::Read,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Which contexts a program becomes.
pub(super) fn plan(program: &Checked, target: &Target, options: &NpuOptions) -> Result<Budget, DeviceError> {
    let refused = |reason| DeviceError::Resources(format!("program `{}` does not fit: {reason}", program.name));
    budget(&[Wanted { program, rows: &target.rows }], target.context, options).map_err(refused)
}

pub(super) fn prepare(
    device: &Device,
    program: &Checked,
    weights: &Arc<dyn Weights>,
    target: &Target,
    options: &NpuOptions,
) -> Result<Vec<Artifact>, DeviceError> {
    let budget = plan(program, target, options)?;
    let parts = parts(program, budget.part_bytes);
    let kept = kv_sizes(target.context, &budget.rows, options.kv);
    let graph = |planned: &Planned| match *planned {
        Planned::Part { number, rows } => {
            let part = &parts[number];
            let sizes = Sizes { rows, ..part.sizes(kept) };
            Ok(lower(program, part, Some(weights), sizes, part_name(number, sizes))?.graph)
        }
        Planned::Experts(sizes) => Ok(lower_experts(program, sizes, experts_name(sizes))),
    };
    let folder = folder(target)?;
    let context = |planned: &PlannedContext| {
        if target.cancel.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed)) {
            return Err(DeviceError::Cancelled);
        }
        let graphs = planned.planned.iter().map(graph).collect::<Result<Vec<_>, DeviceError>>()?;
        let made = compile(device, &folder, planned, graphs, options.compile())?;
        let most = budget.limits.context_bytes;
        match made.bytes > most {
            false => Ok(made),
            true => Err(DeviceError::Resources(format!(
                "context `{}` came out with {} bytes for {} bytes of weights, {} loads {most}: use --optimize 3, at which graphs share more, or a smaller precision",
                made.file, made.bytes, planned.bytes, options.arch
            ))),
        }
    };
    // One after the other: the library compiles one graph at a time, whatever the threads.
    let contexts = budget.contexts.iter().map(context).collect::<Result<Vec<_>, DeviceError>>()?;
    let Budget { arch, rows, context, ring, part_bytes, per_token, notes, .. } = budget;
    let library = device.library().build().to_string();
    let plan = Plan { plan_version: PLAN_VERSION, arch, library, context, ring, rows, part_bytes, per_token, notes, contexts };
    let text = serde_json::to_string_pretty(&plan).map_err(|e| DeviceError::Resources(e.to_string()))?;
    let plan_name = Plan::file_name(&program.name);
    let file = folder.join(&plan_name);
    std::fs::write(&file, text).map_err(|e| unwritten(&file, e))?;
    let names = plan.contexts.into_iter().map(|context| context.file).chain([plan_name]);
    Ok(names.map(|name| Artifact { file: folder.join(&name), name }).collect())
}

/// The folder in which context binaries are written.
fn folder(target: &Target) -> Result<PathBuf, DeviceError> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let path = target.folder.clone().unwrap_or_else(|| {
        let name = format!("qhx-npu-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        std::env::temp_dir().join(name)
    });
    std::fs::create_dir_all(&path).map_err(|e| unwritten(&path, e))?;
    Ok(path)
}

/// Compiles and writes a context.
fn compile(
    device: &Device,
    folder: &Path,
    planned: &PlannedContext,
    graphs: Vec<Graph>,
    options: CompileOptions,
) -> Result<ContextFile, DeviceError> {
    let shared_weights = planned.shared_weights;
    let context = device.compile(&graphs, &CompileOptions { share_weights: shared_weights, ..options }).map_err(failed)?;
    let name = format!("{}.bin", planned.name);
    let file = folder.join(&name);
    let bytes = context.save(&file).map_err(failed)?;
    let sha256 = sum(&file).map_err(|e| unwritten(&file, e))?;
    let graphs = graphs.into_iter().map(|graph| graph.name).collect();
    let (stages, layers) = (planned.stages.clone(), planned.layers);
    Ok(ContextFile { file: name, bytes, sha256, shared_weights, stages, layers, graphs })
}

fn unwritten(file: &Path, error: std::io::Error) -> DeviceError {
    DeviceError::Resources(format!("{}: {error}", file.display()))
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
