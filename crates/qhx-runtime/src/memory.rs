//! How much memory a model needs, and how much this machine has.
//!
//! The estimate is made before anything is allocated, from the program alone. Numbers about the machine come from the kernel's own files
//! where there are any; elsewhere they are unknown, and nothing is refused for lack of them.

use crate::soft_rows::soft_row_width;
use qhx_ir::{Bindings, Checked, DType, Dim, Encoding, OpKind, Program, dim};
use serde::Serialize;
use std::{collections::HashMap, fmt, fs, path::Path};

/// What a model will need, and what there is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    /// Weights that the programs name. They are mapped from files: read into memory as they are used, never copied.
    pub weight_bytes: u64,
    /// State of one session of `context` rows: keys and values, recurrent state.
    pub state_bytes: u64,
    /// Activations of a call of `chunk` rows.
    pub scratch_bytes: u64,
    /// Towers for the media that are given: their weights, and the activations of the largest medium. 0 where there are none.
    pub tower_bytes: u64,
    /// The sum.
    pub total_bytes: u64,
    /// What this machine, or the device, can give now; absent where it cannot be known.
    pub available_bytes: Option<u64>,
    /// The device whose own memory that is; absent: the machine's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The longest session counted for.
    pub context: usize,
    /// The rows per call counted for.
    pub chunk: usize,
}

impl MemoryEstimate {
    /// The needs of `program` for one session of `context` rows, read `chunk` rows at a time, with the outputs of up to `wanted` rows per call.
    pub fn of(program: &Checked, context: usize, chunk: usize, wanted: usize) -> Self {
        let weight_bytes = weight_bytes(program);
        let state_bytes = state_bytes(program, context);
        // Every row of a call may be one of a medium.
        let soft_rows = if soft_row_width(program).is_some() { chunk } else { 0 };
        let scratch_bytes = peak_activation_bytes(program, &Bindings { rows: chunk, soft_rows, wanted });
        Self {
            weight_bytes,
            state_bytes,
            scratch_bytes,
            tower_bytes: 0,
            total_bytes: weight_bytes.saturating_add(state_bytes).saturating_add(scratch_bytes),
            available_bytes: available_bytes(),
            device: None,
            context,
            chunk,
        }
    }

    /// The same with the towers that these media need.
    pub fn with_towers<'a>(mut self, needs: impl IntoIterator<Item = TowerNeed<'a>>) -> Self {
        let mut largest: HashMap<&str, TowerNeed<'_>> = HashMap::new();
        for need in needs {
            let entry = largest.entry(&need.program.name).or_insert(need);
            entry.rows = entry.rows.max(need.rows);
        }
        self.tower_bytes = largest.values().map(TowerNeed::bytes).fold(0, u64::saturating_add);
        self.total_bytes = self.total_bytes.saturating_add(self.tower_bytes);
        self
    }

    /// The same with slots that are held a second time, by their names.
    pub fn with_copies<'a>(mut self, program: &Program, slots: impl IntoIterator<Item = &'a str>) -> Self {
        let slots = slots.into_iter().filter_map(|slot| program.slots.get(slot));
        let bytes = slots.map(|slot| slot.bytes(self.context)).fold(0, u64::saturating_add);
        self.state_bytes = self.state_bytes.saturating_add(bytes);
        self.total_bytes = self.total_bytes.saturating_add(bytes);
        self
    }

    /// The same for a device that has memory of its own, of which so much can be used.
    pub fn on_device(mut self, name: &str, available: u64) -> Self {
        (self.available_bytes, self.device) = (Some(available), Some(name.to_owned()));
        self
    }

    /// What to do where it does not fit.
    pub(crate) fn remedy(&self) -> &'static str {
        match &self.device {
            Some(_) => "use a smaller context, a smaller precision, or the CPU",
            None => "use a smaller context, a smaller precision, or free memory",
        }
    }

    /// Whether it fits into what is available (yes, where that is unknown).
    pub fn fits(&self) -> bool {
        self.available_bytes.is_none_or(|available| self.total_bytes <= available)
    }
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let towers = if self.tower_bytes == 0 { String::new() } else { format!(", towers {}", show_bytes(self.tower_bytes)) };
        write!(
            f,
            "{} (weights {}, state for a context of {} {}, scratch {}{towers}) of {} available{}",
            show_bytes(self.total_bytes),
            show_bytes(self.weight_bytes),
            self.context,
            show_bytes(self.state_bytes),
            show_bytes(self.scratch_bytes),
            self.available_bytes.map_or("an unknown amount".into(), show_bytes),
            self.device.as_ref().map_or_else(String::new, |device| format!(" on {device}")),
        )
    }
}

/// A tower, and the rows of its largest call.
#[derive(Clone, Copy, Debug)]
pub struct TowerNeed<'a> {
    /// Its program.
    pub program: &'a Checked,
    /// Patches or frames.
    pub rows: usize,
}

impl TowerNeed<'_> {
    /// Bytes of its weights and of its activations.
    pub fn bytes(&self) -> u64 {
        let scratch = peak_activation_bytes(self.program, &Bindings { rows: self.rows, soft_rows: 0, wanted: 0 });
        weight_bytes(self.program).saturating_add(scratch)
    }
}

/// A number of bytes for people: `12.3 MiB`.
pub fn show_bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// Stored bytes of all weights that a program names.
pub fn weight_bytes(program: &Program) -> u64 {
    program.weights.values().map(|w| tensor_bytes(w.encoding, &w.shape)).fold(0, u64::saturating_add)
}

/// State of one session of `context` rows.
pub fn state_bytes(program: &Program, context: usize) -> u64 {
    program.slots.values().map(|slot| slot.bytes(context)).fold(0, u64::saturating_add)
}

/// Bytes of weights that one decode step reads: whole matrices, one row of each look-up table, the chosen experts only.
pub fn weight_bytes_per_token(program: &Checked) -> u64 {
    let mut read: HashMap<&str, u64> = HashMap::new();
    for op in &program.ops {
        for name in op.op.weights() {
            let Some(weight) = program.weights.get(name) else { continue };
            let whole = tensor_bytes(weight.encoding, &weight.shape);
            let rows = weight.shape.first().copied().unwrap_or(1).max(1) as u64;
            let bytes = match &op.op {
                OpKind::Embed { .. } => whole / rows,
                OpKind::Interpolate { .. } => 4 * (whole / rows),
                OpKind::Experts { experts, .. } => whole / rows * experts_per_row(program, experts).min(rows),
                _ => whole,
            };
            // A tied table is looked up and multiplied with: the larger use counts.
            let entry = read.entry(name).or_default();
            *entry = (*entry).max(bytes);
        }
    }
    read.values().fold(0, |sum, &bytes| sum.saturating_add(bytes))
}

/// How many experts a row chooses, by the value that says which.
pub(crate) fn experts_per_row(program: &Checked, chosen: &str) -> u64 {
    match program.value_type(chosen).shape.last() {
        Some(Dim::Fixed(count)) => *count as u64,
        _ => u64::MAX,
    }
}

/// Stored bytes of a tensor, padding included.
pub fn tensor_bytes(encoding: Encoding, shape: &[usize]) -> u64 {
    let columns = shape.last().copied().unwrap_or(0);
    let rows = shape.iter().rev().skip(1).fold(1u64, |n, &d| n.saturating_mul(d as u64));
    let row = encoding.row_bytes(columns).map_or(u64::MAX, |r| (r.data as u64).saturating_add(r.scale as u64).saturating_add(r.min as u64));
    rows.saturating_mul(row)
}

/// Bits of a tensor's numbers or quants, scales and minima, without the padding of rows.
pub fn stored_bits(encoding: Encoding, shape: &[usize]) -> f64 {
    let columns = shape.last().copied().unwrap_or(0) as f64;
    let rows: f64 = shape.iter().rev().skip(1).map(|&d| d as f64).product();
    let row = match encoding {
        Encoding::F32 => 32.0 * columns,
        Encoding::F16 | Encoding::Bf16 => 16.0 * columns,
        Encoding::I8Row => 8.0 * columns + 32.0,
        Encoding::Block(block) => {
            let factors = if block.min { 2.0 } else { 1.0 };
            f64::from(block.quants.bits()) * columns + (columns / block.block as f64).ceil() * factors * 8.0 * block.scale.bytes() as f64
        }
    };
    rows * row
}

/// Bits that the weights of some programs take for each of their numbers, scales included and the padding of rows not. A weight that several programs share counts once.
pub fn bits_per_weight<'a>(programs: impl IntoIterator<Item = &'a Checked>) -> f64 {
    let weights: HashMap<_, _> = programs.into_iter().flat_map(|program| &program.weights).collect();
    let (mut bits, mut numbers) = (0.0, 0.0);
    for weight in weights.values() {
        bits += stored_bits(weight.encoding, &weight.shape);
        numbers += weight.shape.iter().map(|&d| d as f64).product::<f64>();
    }
    bits / numbers.max(1.0)
}

/// The most bytes of values that are alive at once when the ops run in order: what a device needs at least for a call.
fn peak_activation_bytes(program: &Checked, bindings: &Bindings) -> u64 {
    let size = |name: &str| {
        let value = program.value_type(name);
        let element = match value.dtype {
            DType::F32 | DType::I32 => 4u64,
        };
        let numbers = dim::bind_shape(&value.shape, bindings).unwrap_or_default();
        numbers.iter().fold(element, |n, &d| n.saturating_mul(d as u64))
    };
    let mut last_use: HashMap<&str, usize> = HashMap::new();
    for (at, op) in program.ops.iter().enumerate() {
        op.op.inputs().into_iter().for_each(|name| {
            last_use.insert(name, at);
        });
    }
    program.outputs.iter().for_each(|output| {
        last_use.insert(&output.value, usize::MAX);
    });
    let mut alive: u64 = program.inputs.iter().map(|input| size(&input.name)).fold(0, u64::saturating_add);
    let mut peak = alive;
    for (at, op) in program.ops.iter().enumerate() {
        alive = op.outputs().iter().fold(alive, |sum, name| sum.saturating_add(size(name)));
        peak = peak.max(alive);
        let mut freed: Vec<_> = op.op.inputs().into_iter().filter(|name| last_use.get(&***name) == Some(&at)).collect();
        freed.sort();
        freed.dedup();
        alive = freed.iter().fold(alive, |sum, name| sum.saturating_sub(size(name)));
    }
    peak
}

/// Memory that can be had now without swapping: the machine's, or what is left of this process's control group where that is less.
pub fn available_bytes() -> Option<u64> {
    let machine = proc_field(Path::new("/proc/meminfo"), "MemAvailable:").map(|kib| kib.saturating_mul(1024));
    [machine, control_group_left()].into_iter().flatten().min()
}

/// The most memory this process has held so far; 0 where the system does not say.
pub fn peak_rss_bytes() -> u64 {
    proc_field(Path::new("/proc/self/status"), "VmHWM:").map_or(0, |kib| kib.saturating_mul(1024))
}

fn proc_field(file: &Path, field: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse().ok()
}

fn control_group_left() -> Option<u64> {
    let folder = Path::new("/sys/fs/cgroup");
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let limit = number("memory.max")?;
    // Cached file pages count as used but are given back when needed.
    let cached = proc_field(&folder.join("memory.stat"), "file ").unwrap_or(0);
    Some(limit.saturating_sub(number("memory.current")?.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_for_people() {
        assert_eq!(show_bytes(17), "17 B");
        assert_eq!(show_bytes(3 << 19), "1.5 MiB");
        assert_eq!(show_bytes(u64::MAX), "16.0 EiB");
    }

    #[test]
    fn stored_tensors_count_their_padding() {
        assert_eq!(tensor_bytes(Encoding::F32, &[3, 1]), 3 * 64);
        assert_eq!(tensor_bytes(Encoding::I8Row, &[2, 5, 70]), 10 * (128 + 4));
        assert_eq!(tensor_bytes(Encoding::F32, &[usize::MAX, usize::MAX]), u64::MAX);
    }
}
