//! `qhx forge --plan`: which contexts a model becomes on the NPU, before anything is compiled.

use super::synth::read_config;
use crate::{
    failure::Failure,
    forging::{self, Order},
    hints::TARGET_FLAGS,
    output,
    table::{Align, Table, facts},
    targets::TargetFlags,
    units::show_bytes,
};
use qhx_forge::Material;
use qhx_ir::{Piece, Traffic};
use qhx_npu::{
    Arch, NpuOptions,
    budget::{Budget, Limits, PerToken, PlannedContext, Wanted, budget},
};
use qhx_runtime::registry::NpuSettings;
use serde::Serialize;
use std::path::Path;

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
pub(crate) fn run(material: &Material, targets: &TargetFlags, order: Order<'_>, json: bool) -> Result<(), Failure> {
    let precision = order.precision;
    let (programs, limit) = forging::forge(order, |options| material.programs_for_targets(options))?;
    targets.check_media(|name| programs.iter().any(|program| *program.name == *name))?;
    let (settings, context) = (targets.settings()?, targets.context(limit)?);
    let rows: Vec<usize> = std::iter::once(1).chain(targets.prefill_rows()?.into_iter().map(|rows| rows.min(context))).collect();
    // A tower is compiled for one size of pictures or sounds; which one does not matter here.
    let whole = |(number, program)| Piece { program, rows: if number == 0 { &rows } else { &[1] } };
    let pieces: Vec<Piece<'_>> = programs.iter().enumerate().map(whole).collect();
    let wanted: Vec<Wanted<'_>> = pieces.chunks(1).map(|pieces| Wanted { name: &pieces[0].program.name, pieces }).collect();
    let plan = |&arch: &Arch| {
        let refused = |reason| Failure::work(format!("{arch}: the model does not fit: {reason}")).hint(TARGET_FLAGS);
        budget(&wanted, context, &options(&settings, arch)?).map_err(refused)
    };
    let plans = targets.arches()?.iter().map(plan).collect::<Result<Vec<_>, _>>()?;
    let report = Report { precision: precision.to_string(), plans };
    if json { output::print_json(&report) } else { output::print(&report.tables()) }
}

/// What the flags mean to the device.
#[cfg(feature = "npu")]
fn options(settings: &NpuSettings, arch: Arch) -> Result<NpuOptions, Failure> {
    Ok(settings.options(arch))
}

#[cfg(not(feature = "npu"))]
fn options(_: &NpuSettings, arch: Arch) -> Result<NpuOptions, Failure> {
    Err(Failure::work(format!("cannot plan for {arch}: this build has no NPU: it was made without the feature `npu`")))
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
        for PlannedContext { name, bytes, graphs, stages: [first, last], layers, .. } in &plan.contexts {
            let stages = if first == last { first.clone() } else { format!("{first} to {last}") };
            table.row([name.clone(), stages, layers.to_string(), graphs.to_string(), show_bytes(*bytes)]);
        }
        table.row(["all".into(), String::new(), String::new(), plan.graphs.to_string(), show_bytes(plan.bytes)]);
        let Limits { contexts, context_bytes, risky_graphs, vtcm_mb } = plan.limits;
        let rows: Vec<String> = plan.rows.iter().map(usize::to_string).collect();
        let mut about = vec![
            ("processor", format!("{}, {vtcm_mb} MiB of fast memory", plan.arch)),
            ("precision", self.precision.clone()),
            ("rows of graphs", rows.join(", ")),
            ("context", format!("{} rows{}", plan.context, if plan.ring.is_some() { ", the latest" } else { "" })),
            ("on the host", show_bytes(plan.host_bytes)),
            ("limits", format!("{contexts} contexts at once, {} each", show_bytes(context_bytes))),
        ];
        about.extend(risky_graphs.map(|most| ("", format!("fewer than {most} graphs at once"))));
        about.extend(plan.per_token.iter().flat_map(per_token));
        about.extend(plan.notes.iter().map(|note| ("note", note.clone())));
        format!("{}\n{}", facts(&about), table.render())
    }
}

/// What writing one token takes, for people.
pub(crate) fn per_token(PerToken { traffic, weight_bytes }: &PerToken) -> [(&'static str, String); 3] {
    let Traffic { executions, bytes_in, bytes_out, bytes_lent } = *traffic;
    [
        ("one token takes", format!("{executions} executions of graphs, which read {} of weights", show_bytes(*weight_bytes))),
        ("one token copies", format!("{} into graphs and {} out of them", show_bytes(bytes_in), show_bytes(bytes_out))),
        ("", format!("{} are shared with the graphs: the emulator reads them in place, a phone copies them", show_bytes(bytes_lent))),
    ]
}
