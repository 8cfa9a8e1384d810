//! `qhx forge --plan`: which contexts a model becomes on the NPU, before anything is compiled.

use super::synth::read_config;
use crate::{
    failure::Failure,
    output,
    table::{Align, Table, facts},
};
use qhx_forge::{Material, Precision};
use qhx_npu::{
    Arch, NpuOptions,
    budget::{Budget, Limits, PlannedContext, Wish, budget},
};
use qhx_runtime::memory::show_bytes;
use serde::Serialize;
use std::path::Path;

/// What is asked for.
pub(crate) struct PlanOrder<'a> {
    /// The processors.
    pub(crate) arches: Vec<Arch>,
    /// How weights are stored.
    pub(crate) precision: Precision,
    /// Rows of the graphs that read prompts.
    pub(crate) prefill: &'a [usize],
    /// Whether a plan that may exhaust the DSP's heap is wanted all the same.
    pub(crate) allow_risky: bool,
    /// One JSON object instead of tables.
    pub(crate) json: bool,
}

#[derive(Serialize)]
struct Report {
    precision: String,
    plans: Vec<Budget>,
}

/// A checkpoint, or a configuration alone: no weight is read.
pub(crate) fn material(source: &Path) -> Result<Material, Failure> {
    match source.extension().is_some_and(|extension| extension == "json") {
        true => Ok(Material::Synthetic { config: read_config(source)?, seed: 0 }),
        false => Ok(Material::open(source)?),
    }
}

/// Prints the plan for every processor that is asked for.
pub(crate) fn run(material: &Material, order: &PlanOrder<'_>) -> Result<(), Failure> {
    let programs = material.checked_programs(order.precision)?;
    let programs: Vec<_> = programs.iter().collect();
    let rows: Vec<usize> = std::iter::once(1).chain(order.prefill.iter().copied()).collect();
    let wish = Wish { programs: &programs, rows: &rows, part_bytes: NpuOptions::default().part_bytes, allow_risky: order.allow_risky };
    let plan = |&arch: &Arch| {
        let refused = |reason| Failure::work(format!("{arch}: the model does not fit: {reason}"));
        budget(&wish, arch, Limits::of(arch)).map_err(refused)
    };
    let plans = order.arches.iter().map(plan).collect::<Result<Vec<_>, _>>()?;
    let report = Report { precision: order.precision.to_string(), plans };
    if order.json { output::print_json(&report) } else { output::print(&report.tables()) }
}

impl Report {
    fn tables(&self) -> String {
        self.plans.iter().map(|plan| self.tables_of(plan)).collect::<Vec<_>>().join("\n")
    }

    fn tables_of(&self, plan: &Budget) -> String {
        let mut table = Table::new([
            ("context", Align::Left),
            ("stages", Align::Left),
            ("layers", Align::Right),
            ("graphs", Align::Right),
            ("weights", Align::Right),
        ]);
        for PlannedContext { program, number, bytes, graphs, stages: [first, last], layers, .. } in &plan.contexts {
            let stages = if first == last { first.clone() } else { format!("{first} to {last}") };
            table.row([format!("{program}_{number}"), stages, layers.to_string(), graphs.to_string(), show_bytes(*bytes)]);
        }
        table.row(["all".into(), String::new(), String::new(), plan.graphs.to_string(), show_bytes(plan.bytes)]);
        let Limits { contexts, context_bytes, risky_graphs, vtcm_mb } = plan.limits;
        let rows: Vec<String> = plan.rows.iter().map(usize::to_string).collect();
        let mut about = vec![
            ("processor", format!("{}, {vtcm_mb} MB of fast memory", plan.arch)),
            ("precision", self.precision.clone()),
            ("rows of graphs", rows.join(", ")),
            ("on the host", show_bytes(plan.host_bytes)),
            ("limits", format!("{contexts} contexts at once, {} each", show_bytes(context_bytes))),
        ];
        about.extend(risky_graphs.map(|most| ("", format!("fewer than {most} graphs at once"))));
        about.extend(plan.notes.iter().map(|note| ("note", note.clone())));
        format!("{}\n{}", facts(&about), table.render())
    }
}
