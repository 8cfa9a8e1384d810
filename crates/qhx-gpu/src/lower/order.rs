//! The order of steps: those that do not wait for one another stand side by side, so that few barriers part them.

use super::Tapped;
use crate::recorder::{Resource, Step};
use std::collections::HashMap;

/// Sorts steps by the length of the longest chain of steps before them; pauses come behind all that was before them. Taps follow the steps that make their values, in the order they had.
pub(super) fn by_level(steps: &mut Vec<Step>, taps: &mut [Tapped]) {
    let mut written: HashMap<Resource, usize> = HashMap::new();
    let mut read: HashMap<Resource, usize> = HashMap::new();
    let mut levels = Vec::with_capacity(steps.len());
    for step in steps.iter() {
        let after = |found: Option<&usize>| found.map_or(0, |level| level + 1);
        let reads = step.reads.iter().map(|resource| after(written.get(resource)));
        let writes = step.writes.iter().map(|resource| after(written.get(resource)).max(after(read.get(resource))));
        // The host is told of a pause when all before it is done.
        let before = if step.pause.is_some() { after(levels.iter().max()) } else { 0 };
        let level = reads.chain(writes).max().unwrap_or(0).max(before);
        for resource in &step.reads {
            let last = read.entry(*resource).or_insert(level);
            *last = level.max(*last);
        }
        for resource in &step.writes {
            written.insert(*resource, level);
        }
        levels.push(level);
    }
    let mut order: Vec<usize> = (0..steps.len()).collect();
    order.sort_by_key(|&step| (levels[step], step));
    let mut places = vec![0; steps.len()];
    order.iter().enumerate().for_each(|(place, &step)| places[step] = place);
    let mut all: Vec<Option<Step>> = steps.drain(..).map(Some).collect();
    steps.extend(order.iter().filter_map(|&step| all[step].take()));
    let mut last = 0;
    for tapped in taps {
        if tapped.after > 0 {
            last = last.max(places[tapped.after - 1] + 1);
        }
        tapped.after = last;
    }
}
