//! What `qhx inspect --plan` shows: the ways to place a model, and a drawing of the one that is chosen.

use crate::{
    table::{Align, Table},
    units::show_bytes,
};
use qhx_ir::Checked;
use qhx_runtime::{
    LoadPlan,
    auto::{Measured, Tried},
    memory::weight_bytes,
    placement::{Phase, PlacedStage, Rules},
    planner::{Facts, Way},
};

/// The most stages on a line of the drawing.
const LINE: usize = 100;

/// What runs where as the rules of a file.
pub(super) fn rules(plan: &LoadPlan, asked: Option<&Rules>) -> Rules {
    let chosen = plan.choice.as_ref().and_then(|choice| choice.way.as_ref()).map(|way| &way.rules);
    chosen.or(asked).cloned().unwrap_or_else(|| Way::alone(plan.device.name()).rules)
}

/// The ways with what was predicted and measured, the devices, and the drawing.
pub(super) fn tables(program: &Checked, plan: &LoadPlan) -> String {
    let choice = plan.choice.as_ref();
    let mut parts = Vec::new();
    if let Some((measured, way)) = choice.and_then(|choice| Some((choice.measured.as_ref()?, choice.way.as_ref()?))) {
        parts.extend([ways(measured, way), facts(plan, &measured.facts)]);
    } else if let Some(choice) = choice {
        parts.push(format!("{}: {}\n", choice.device, choice.reason));
    }
    let mut phases: Vec<(&str, Phase)> = vec![("prefill", Phase::Prefill), ("decode", Phase::Decode)];
    if plan.placement.stages.iter().all(|stage| stage.phase.is_none()) {
        phases = vec![("every call", Phase::Decode)];
    }
    parts.extend(phases.into_iter().map(|(name, phase)| drawing(program, &plan.placement.stages, name, phase)));
    parts.join("\n")
}

fn ways(measured: &Measured, chosen: &Way) -> String {
    let mut table = Table::new([
        ("", Align::Left),
        ("way", Align::Left),
        ("predicted prefill", Align::Right),
        ("decode", Align::Right),
        ("measured prefill", Align::Right),
        ("decode (tok/s)", Align::Right),
        ("", Align::Left),
    ]);
    let rate = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
    for Tried { way, predicted, speed, failure } in &measured.ways {
        table.row([
            if way == chosen { "→" } else { "" }.to_owned(),
            way.name.clone(),
            rate(predicted.map(|p| p.prefill_tokens_per_second())),
            rate(predicted.map(|p| 1.0 / p.decode_seconds)),
            rate(speed.and_then(|speed| speed.prefill_tokens_per_second)),
            rate(speed.map(|speed| speed.decode_tokens_per_second)),
            failure.clone().unwrap_or_else(|| if speed.is_none() { "not tried".into() } else { String::new() }),
        ]);
    }
    table.render()
}

fn facts(plan: &LoadPlan, facts: &Facts) -> String {
    let mut table = Table::new([
        ("device", Align::Left),
        ("a call", Align::Right),
        ("an op", Align::Right),
        ("reads", Align::Right),
        ("multiplies", Align::Right),
        ("crossing", Align::Right),
    ]);
    for (name, device) in [("accelerator", &facts.accelerator), ("processor", &facts.processor)] {
        table.row([
            name.to_owned(),
            format!("{:.1} µs", 1e6 * device.call_seconds),
            format!("{:.1} µs", 1e6 * device.op_seconds),
            format!("{:.1} GB/s", 1e-9 * device.read_bytes_per_second),
            format!("{:.1} G/s", 1e-9 * device.products_per_second),
            format!("{:.1} GB/s", 1e-9 * device.copied_bytes_per_second),
        ]);
    }
    format!("{}both at once take {:.2} times as long as the slower alone; {}\n", table.render(), facts.together, plan.memory)
}

/// A line for each device, with a mark for each stage that it runs, in the order in which they run.
fn drawing(program: &Checked, stages: &[PlacedStage], name: &str, phase: Phase) -> String {
    let mut devices: Vec<(&str, u64)> = Vec::new();
    let mut columns: Vec<(&str, Vec<&str>)> = Vec::new();
    for stage in stages.iter().filter(|stage| stage.phase.is_none_or(|own| own == phase)) {
        let bytes = program.stage_place(&stage.stage).and_then(|place| program.cut(program.ops_of_stage(place).iter().copied()).ok());
        let bytes = bytes.map_or(0, |part| weight_bytes(&part));
        match devices.iter_mut().find(|(device, _)| *device == stage.device) {
            Some((_, sum)) => *sum += bytes,
            None => devices.push((&stage.device, bytes)),
        }
        match columns.last_mut() {
            Some((own, workers)) if *own == stage.stage => workers.push(&stage.device),
            _ => columns.push((&stage.stage, vec![&stage.device])),
        }
    }
    let width = devices.iter().map(|(device, _)| device.len()).max().unwrap_or(0);
    let mut text = format!("{name}: {} stages\n", columns.len());
    for (number, line) in columns.chunks(LINE).enumerate() {
        for (device, bytes) in &devices {
            let marks: String = line.iter().map(|(_, workers)| if workers.contains(device) { '█' } else { '·' }).collect();
            let size = if number == 0 { format!("  {}", show_bytes(*bytes)) } else { String::new() };
            text += &format!("  {device:width$} {marks}{size}\n");
        }
        let (first, last) = (line.first().map_or("", |column| column.0), line.last().map_or("", |column| column.0));
        text += &format!("  {:width$} {first} … {last}\n", "");
    }
    text
}
