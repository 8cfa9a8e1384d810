//! Compiles a program ahead of time: compiles and saves the planned contexts.

use super::{
    device::NpuOptions,
    graphs::{experts_name, failed, part_name},
    plan::{ContextFile, GraphPlan, PLAN_VERSION},
};
use crate::{
    CompileOptions, Device,
    budget::{Budget, Planned, PlannedContext, Wanted, budget, common_rows, experts_of, kv_sizes, per_token},
    graph::Graph,
    lower::{Part, Sizes, experts::lower_experts, lower, parts},
};
use qhx_ir::{Artifact, DeviceError, Piece, Target, Weights};
use sha2::{Digest, Sha256};
use std::{
    hash::{BuildHasher, Hasher, RandomState},
    io::Read,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
};

/// Plans the contexts of a program.
pub(super) fn plan(pieces: &[Piece<'_>], target: &Target, options: &NpuOptions) -> Result<Budget, DeviceError> {
    let refused = |reason| DeviceError::Resources(format!("program `{}` does not fit on the NPU: {reason}", target.program));
    budget(&[Wanted { name: &target.program, pieces }], target.context, options).map_err(refused)
}

pub(super) fn prepare(
    device: &Device,
    pieces: &[Piece<'_>],
    weights: &Arc<dyn Weights>,
    target: &Target,
    options: &NpuOptions,
) -> Result<Vec<Artifact>, DeviceError> {
    let budget = plan(pieces, target, options)?;
    let rows: Vec<Vec<usize>> = pieces.iter().map(|piece| common_rows(piece, &budget.rows)).collect();
    let pieces: Vec<Piece<'_>> = pieces.iter().zip(&rows).map(|(piece, rows)| Piece { rows, ..*piece }).collect();
    let parts: Vec<Vec<Part>> = pieces.iter().map(|piece| parts(piece.program, budget.part_bytes)).collect();
    let kept = kv_sizes(target.context, &budget.rows, options.kv);
    let sizes = |piece: usize, number: usize, rows| Sizes { rows, ..parts[piece][number].sizes(kept) };
    let graph_name = |planned: &Planned| match *planned {
        Planned::Part { piece, number, rows } => part_name(&pieces[piece].program.name, number, sizes(piece, number, rows)),
        Planned::Experts(sizes) => experts_name(sizes),
    };
    let graph = |planned: &Planned| match *planned {
        Planned::Part { piece, number, rows } => {
            let (program, part) = (pieces[piece].program, &parts[piece][number]);
            Ok(lower(program, part, Some(weights), sizes(piece, number, rows), graph_name(planned))?.graph)
        }
        Planned::Experts(sizes) => Ok(lower_experts(pieces[0].program, sizes, graph_name(planned))),
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
                "context `{}` takes {} bytes for {} bytes of weights, but {} loads at most {most}: compile with more effort (optimization 3), with which graphs share more, or a smaller precision",
                made.file, made.bytes, planned.bytes, options.arch
            ))),
        }
    };
    // Sequentially: the library compiles one graph at a time, even from several threads.
    let contexts = budget.contexts.iter().map(context).collect::<Result<Vec<_>, DeviceError>>()?;
    let mut names: Vec<String> = contexts.iter().map(|context| context.file.clone()).collect();
    let per_token = per_token(&pieces, budget.part_bytes, kept)?;
    for (number, (piece, per_token)) in pieces.iter().zip(per_token).enumerate() {
        let experts = experts_of(piece);
        let is_own = |planned: &&Planned| match planned {
            Planned::Part { piece, .. } => *piece == number,
            Planned::Experts(sizes) => experts.contains(sizes),
        };
        let own = |(planned, made): (&PlannedContext, &ContextFile)| {
            let graphs: Vec<String> = planned.planned.iter().filter(is_own).map(graph_name).collect();
            (!graphs.is_empty()).then(|| ContextFile { graphs, ..made.clone() })
        };
        let plan = GraphPlan {
            plan_version: PLAN_VERSION,
            arch: budget.arch.clone(),
            library: device.library().build().to_string(),
            context: budget.context,
            ring: budget.ring,
            rows: piece.rows.to_vec(),
            part_bytes: budget.part_bytes,
            per_token,
            notes: budget.notes.clone(),
            contexts: budget.contexts.iter().zip(&contexts).filter_map(own).collect(),
        };
        let (name, text) = (GraphPlan::file_name(&piece.program.name), serde_json::to_string_pretty(&plan));
        let (file, text) = (folder.join(&name), text.map_err(|e| DeviceError::Resources(e.to_string()))?);
        std::fs::write(&file, text).map_err(|e| cannot_write(&file, e))?;
        names.push(name);
    }
    Ok(names.into_iter().map(|name| Artifact { file: folder.join(&name), name }).collect())
}

/// The folder for context binaries.
fn folder(target: &Target) -> Result<PathBuf, DeviceError> {
    if let Some(path) = &target.folder {
        std::fs::create_dir_all(path).map_err(|e| cannot_write(path, e))?;
        return Ok(path.clone());
    }
    // Where everybody may write, a name that can be foretold could be taken by somebody else first.
    let path = std::env::temp_dir().join(format!("qhx-npu-{:016x}", RandomState::new().build_hasher().finish()));
    std::fs::create_dir(&path).map_err(|e| cannot_write(&path, e))?;
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
    let sha256 = checksum(&file).map_err(|e| DeviceError::Resources(format!("cannot read {}: {e}", file.display())))?;
    let graphs = graphs.into_iter().map(|graph| graph.name).collect();
    let (stages, layers) = (planned.stages.clone(), planned.layers);
    Ok(ContextFile { file: name, bytes, sha256, shared_weights, stages, layers, graphs })
}

fn cannot_write(file: &Path, error: std::io::Error) -> DeviceError {
    DeviceError::Resources(format!("cannot write {}: {error}", file.display()))
}

/// The SHA-256 of a file, in hexadecimal.
fn checksum(file: &Path) -> std::io::Result<String> {
    let mut file = std::fs::File::open(file)?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            n => hash.update(&buffer[..n]),
        }
    }
}
