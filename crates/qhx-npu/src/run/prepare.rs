//! Compiling a program ahead of time: the contexts that the planner lays out, compiled one after the other and saved.

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
        atomic::{AtomicBool, AtomicU64, Ordering},
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
    let mut folder = Folder::new(program, target)?;
    let mut contexts = Vec::new();
    for context in &budget.contexts {
        let graph = |planned: &Planned| match *planned {
            Planned::Part { number, rows } => {
                let part = &parts[number];
                let sizes = Sizes { rows, ..part.sizes(kept) };
                Ok(lower(program, part, Some(weights), sizes, part_name(number, sizes))?.graph)
            }
            Planned::Experts(sizes) => Ok(lower_experts(program, sizes, experts_name(sizes))),
        };
        let graphs = context.planned.iter().map(graph).collect::<Result<Vec<_>, DeviceError>>()?;
        contexts.push(folder.context(device, context, graphs, options.compile())?);
    }
    let Budget { arch, rows, context, ring, part_bytes, per_token, notes, .. } = budget;
    let library = device.library().build().to_string();
    folder.plan(&Plan { plan_version: PLAN_VERSION, arch, library, context, ring, rows, part_bytes, per_token, notes, contexts })?;
    Ok(folder.artifacts)
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

    /// Compiles and writes a context.
    fn context(
        &mut self,
        device: &Device,
        planned: &PlannedContext,
        graphs: Vec<Graph>,
        compile: CompileOptions,
    ) -> Result<ContextFile, DeviceError> {
        if self.cancel.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
            return Err(DeviceError::Cancelled);
        }
        let shared_weights = planned.shared_weights;
        let options = CompileOptions { share_weights: shared_weights, ..compile };
        let context = device.compile(&graphs, &options).map_err(failed)?;
        let name = format!("{}.bin", planned.name);
        let file = self.path.join(&name);
        let bytes = context.save(&file).map_err(failed)?;
        let sha256 = sum(&file).map_err(|e| DeviceError::Resources(format!("{}: {e}", file.display())))?;
        let graphs = graphs.into_iter().map(|graph| graph.name).collect();
        self.artifacts.push(Artifact { name: name.clone(), file });
        let (stages, layers) = (planned.stages.clone(), planned.layers);
        Ok(ContextFile { file: name, bytes, sha256, shared_weights, stages, layers, graphs })
    }

    /// Writes the plan.
    fn plan(&mut self, plan: &Plan) -> Result<(), DeviceError> {
        let name = Plan::file_name(&self.program);
        let text = serde_json::to_string_pretty(plan).map_err(|e| DeviceError::Resources(e.to_string()))?;
        let file = self.path.join(&name);
        std::fs::write(&file, text).map_err(|e| DeviceError::Resources(format!("{}: {e}", file.display())))?;
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
