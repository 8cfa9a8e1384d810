//! The ways in which a program can be placed on an accelerator and the processor.

use crate::{
    memory::MemoryEstimate,
    placement::{Overlap, Phase, Rules},
    split::{HotExperts, OpRange, all_experts, op_ranges, pool_bytes},
};
use qhx_ir::{Checked, DeviceError, Name, Op, OpKind};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// A way to place a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Way {
    /// For people: `cpu`, `gpu`, `experts on cpu` …
    pub name: String,
    /// What runs where. `default` is always named.
    pub rules: Rules,
}

impl Way {
    /// Everything on one device.
    pub fn alone(device: &str) -> Self {
        Self { name: device.to_owned(), rules: Rules { default: Some(device.to_owned()), ..Rules::default() } }
    }

    /// The same with an eighth less on the accelerator, where that is a number of hot experts or of layers and something is left.
    pub(crate) fn with_less(&self, accelerator: &str) -> Option<Self> {
        let fewer = |count: usize| (count > 1).then(|| count - (count / 8).max(1));
        let (before, after, rules) = match self.rules.hot_experts {
            Some(HotExperts { count, transfer_from }) => {
                let hot = HotExperts { count: fewer(count)?, transfer_from };
                (count, hot.count, Rules { hot_experts: Some(hot), ..self.rules.clone() })
            }
            None => {
                let mut layers: Vec<(usize, &String)> = Vec::new();
                for (path, device) in &self.rules.stages {
                    let number = path.split('.').nth(1).and_then(|number| number.parse().ok());
                    layers.push((number.filter(|_| device == accelerator)?, path));
                }
                layers.sort_unstable();
                let after = fewer(layers.len())?;
                let stages = layers[..after].iter().map(|&(_, path)| (path.clone(), accelerator.to_owned())).collect();
                (layers.len(), after, Rules { stages, ..self.rules.clone() })
            }
        };
        Some(Self { name: self.name.replacen(&before.to_string(), &after.to_string(), 1), rules })
    }

    /// Whether more than one device takes part.
    pub fn is_split(&self) -> bool {
        self.rules.devices().len() > 1
    }
}

/// What bounds the choice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Bytes of the accelerator's own memory; absent: it uses the host's.
    pub(super) bytes: Option<u64>,
    pub(super) context: usize,
    pub(super) chunk: usize,
    pub(super) wanted: usize,
    /// Whether the accelerator can hold experts that change.
    pub(super) replaces_weights: bool,
}

/// The names of the two devices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names<'a> {
    pub(super) accelerator: &'a str,
    pub(super) processor: &'a str,
}

/// The two ways with one device, then all splits that are worth a thought and fit.
pub(super) fn ways(program: &Checked, names: Names<'_>, room: Room) -> Result<Vec<Way>, DeviceError> {
    let Names { accelerator, processor } = names;
    let (on_accelerator, on_processor) = (Way::alone(accelerator), Way::alone(processor));
    let by_phase = |prefill: &str, decode: &str| Way {
        name: format!("prefill on {prefill}, decode on {decode}"),
        rules: Rules { default: Some(prefill.to_owned()), decode: Some(decode.to_owned()), ..Rules::default() },
    };
    let mut all = vec![on_accelerator, by_phase(accelerator, processor), by_phase(processor, accelerator)];
    let (layers, experts) = (layers(program), experts(program));
    // As many layers as fit, of those that a rule may move.
    let most = |total: usize, way: &dyn Fn(usize) -> Way| -> Result<Option<Way>, DeviceError> {
        let (mut fits, mut beyond) = (0, total + 1);
        while beyond - fits > 1 {
            let middle = fits + (beyond - fits) / 2;
            *(if room.holds(program, names, &way(middle))? { &mut fits } else { &mut beyond }) = middle;
        }
        Ok((fits > 0).then(|| way(fits)))
    };
    let moved = |paths: &[Name], to: &str| paths.iter().map(|path| (path.to_string(), to.to_owned())).collect::<BTreeMap<_, _>>();
    if !experts.is_empty() {
        // The rest on the accelerator, with the experts of as many layers as fit beside it.
        let rest_there = |there: usize| Way {
            name: match there {
                0 => format!("experts on {processor}"),
                _ => format!("experts of {} of {} layers on {processor}", experts.len() - there, experts.len()),
            },
            rules: Rules { default: Some(accelerator.into()), stages: moved(&experts[there..], processor), ..Rules::default() },
        };
        let experts_there = |there: usize| Way {
            name: format!("experts of {there} of {} layers on {accelerator}", experts.len()),
            rules: Rules { default: Some(processor.into()), stages: moved(&experts[..there], accelerator), ..Rules::default() },
        };
        all.push(rest_there(0));
        all.extend(most(experts.len() - 1, &rest_there)?);
        all.extend(most(experts.len(), &experts_there)?);
        // The rest on the accelerator, and beside it as many experts as fit, whichever are chosen most often.
        let total = all_experts(program).map_or(0, |all| all.count);
        // Looking up rows costs the processor next to nothing, and where their table would be there is room for experts.
        let looked_up = embeddings(program);
        let hot = |whole: usize, count: usize| Way {
            name: match whole {
                0 => format!("{count} hot experts of {total} on {accelerator}"),
                _ => format!("{count} hot experts and all of {whole} of {} layers on {accelerator}", experts.len()),
            },
            rules: Rules {
                default: Some(accelerator.into()),
                stages: moved(&[&experts[whole..], &looked_up].concat(), processor),
                // Both devices are at work on every layer as it is.
                overlap: Some(Overlap::Whether(false)),
                hot_experts: Some(HotExperts { count, transfer_from: None }),
                ..Rules::default()
            },
        };
        if room.replaces_weights && total > 1 {
            let alone = most(total - 1, &|count| hot(0, count))?;
            // Layers that have all of their experts there need no crossing: some of them, and fewer hot experts of the others.
            let each = total.div_ceil(experts.len());
            let layers = alone.iter().filter_map(|way| way.rules.hot_experts).map(|hot| hot.count / each).sum::<usize>();
            let mut shares: Vec<usize> = [layers / 2, layers * 3 / 4].into_iter().filter(|&whole| whole > 0).collect();
            shares.dedup();
            all.extend(alone);
            for whole in shares {
                all.extend(most(total - each * whole, &|count| hot(whole, count))?);
            }
        }
    }
    let first_there = |there: usize| Way {
        name: format!("first {there} of {} layers on {accelerator}", layers.len()),
        rules: Rules { default: Some(processor.into()), stages: moved(&layers[..there], accelerator), ..Rules::default() },
    };
    if layers.len() > 1 {
        all.extend(most(layers.len() - 1, &first_there)?);
    }
    let mut fitting = vec![on_processor];
    for way in all {
        if room.holds(program, names, &way)? {
            fitting.push(way);
        }
    }
    Ok(fitting)
}

impl Room {
    /// Whether what a way puts on the accelerator fits there.
    fn holds(&self, program: &Checked, names: Names<'_>, way: &Way) -> Result<bool, DeviceError> {
        let Some(bytes) = self.bytes else { return Ok(true) };
        let mut seen = BTreeSet::new();
        let mut needed = match way.rules.hot_experts {
            Some(hot) => pool_bytes(program, hot.count)?,
            None => 0,
        };
        // Parts share the memory for intermediate values: what is there serves one that needs no more.
        let mut scratch = 0;
        for phase in Phase::ALL {
            for run in runs(program, names, way, phase).into_iter().filter(|run| run.device == ACCELERATOR) {
                if seen.insert((run.ops.start, run.ops.end)) {
                    let part = MemoryEstimate::of(&run.part(program)?, self.context, self.chunk, self.wanted);
                    needed = needed.saturating_add(part.total_bytes - part.scratch_bytes);
                    if part.scratch_bytes > scratch {
                        scratch = part.scratch_bytes;
                        needed = needed.saturating_add(scratch);
                    }
                }
            }
        }
        Ok(needed <= bytes)
    }
}

/// The places of the two devices.
pub(super) const ACCELERATOR: usize = 0;
const PROCESSOR: usize = 1;

/// The ops of a program in a phase, by device.
pub(super) fn runs(program: &Checked, names: Names<'_>, way: &Way, phase: Phase) -> Vec<OpRange> {
    op_ranges(program, |op| match way.rules.device(program, &op.path, phase) {
        Some((device, _)) if device == names.accelerator => ACCELERATOR,
        _ => PROCESSOR,
    })
}

/// The first words of all layers' paths: `layers.0` …
fn layers(program: &Checked) -> Vec<Name> {
    let mut all: Vec<Name> = Vec::new();
    for op in &program.ops {
        let mut words = op.path.splitn(3, '.');
        if let (Some(first), Some(number), Some(_)) = (words.next(), words.next(), words.next())
            && number.parse::<usize>().is_ok()
        {
            let layer: Name = format!("{first}.{number}").into();
            if all.last() != Some(&layer) {
                all.push(layer);
            }
        }
    }
    all
}

/// The paths of the ops that look up rows of a table, where nothing else reads it.
fn embeddings(program: &Checked) -> Vec<Name> {
    let looks_up = |op: &&Op| matches!(op.op, OpKind::Embed { .. });
    let read: BTreeSet<&Name> = program.ops.iter().filter(|op| !looks_up(op)).flat_map(|op| op.op.weights()).collect();
    let alone = |op: &&Op| op.op.weights().iter().all(|table| !read.contains(table));
    program.ops.iter().filter(looks_up).filter(alone).map(|op| op.path.clone()).collect()
}

/// The paths of the ops with experts.
fn experts(program: &Checked) -> Vec<Name> {
    program.ops.iter().filter(|op| matches!(op.op, OpKind::Experts { .. })).map(|op| op.path.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What did not fit is tried again with less, until nothing is left: the last layers go first, and what lies on the processor is not counted.
    #[test]
    fn a_way_with_less_has_fewer_experts_or_layers() {
        let moved = |layers: usize, to: &str| (0..layers).map(|layer| (format!("layers.{layer}"), to.to_owned())).collect();
        let way = |name: &str, default: &str, stages, hot_experts| Way {
            name: name.into(),
            rules: Rules { default: Some(default.into()), stages, hot_experts, ..Rules::default() },
        };
        let first = way("first 12 of 28 layers on gpu", "cpu", moved(12, "gpu"), None);
        let less = first.with_less("gpu").unwrap();
        assert_eq!(less, way("first 11 of 28 layers on gpu", "cpu", moved(11, "gpu"), None));
        assert_eq!(std::iter::successors(Some(first), |way| way.with_less("gpu")).last().unwrap().rules.stages, moved(1, "gpu"));
        let hot = |count| Some(HotExperts { count, transfer_from: Some(3) });
        let experts = way("16 hot experts of 64 on gpu", "gpu", moved(4, "cpu"), hot(16));
        assert_eq!(experts.with_less("gpu").unwrap(), way("14 hot experts of 64 on gpu", "gpu", moved(4, "cpu"), hot(14)));
        for without in [
            way("experts of 4 of 6 layers on cpu", "gpu", moved(4, "cpu"), None),
            way("1 hot experts of 64 on gpu", "gpu", moved(4, "cpu"), hot(1)),
            Way::alone("gpu"),
        ] {
            assert_eq!(without.with_less("gpu"), None);
        }
    }
}
