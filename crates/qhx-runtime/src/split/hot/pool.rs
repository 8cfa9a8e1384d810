//! The experts that lie on the accelerator: a program for each kind of them, whose weights are slots.

use super::{
    HotExperts,
    choices::{Kind, most_at_once},
    counts::{self, Counts},
    residency::Residency,
};
use crate::recorded::Recorded;
use qhx_ir::{Checked, Device, DeviceError, Executable, ExpertCache, LoadOptions, Name, WeightTensor, Weights};
use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::Arc,
};

/// What lies on the accelerator, for all layers.
pub(in crate::split) struct Pool {
    kinds: Vec<Slots>,
    layers: Vec<Layer>,
    transfer_from: usize,
    history: Option<PathBuf>,
    /// Rows since the counts were kept.
    unkept: usize,
}

/// The slots of one kind.
struct Slots {
    /// The names of its program's weights.
    weights: &'static [&'static str],
    executable: Box<dyn Executable>,
    residency: Residency,
    most_choices: usize,
}

/// An op with experts.
struct Layer {
    path: Name,
    kind: usize,
    /// Its first expert among those of the kind.
    first: usize,
    count: usize,
    /// Its weights, where they lie.
    weights: Vec<WeightTensor>,
}

/// Between two steps so many experts at most take the place of others.
const SWAPS: usize = 2;
/// Counts are kept after so many rows, and at the end.
const KEPT_AFTER: usize = 4096;

impl Pool {
    /// Loads the hottest experts of the ops at some places.
    pub(in crate::split) fn load(
        device: &dyn Device,
        hot: HotExperts,
        program: &Checked,
        ops: &[usize],
        weights: &Arc<dyn Weights>,
        options: &LoadOptions,
    ) -> Result<Self, DeviceError> {
        let HotExperts { count, transfer_from } = hot;
        let known = options.history.as_deref().map(counts::load).unwrap_or_default();
        let kinds = Kind::all(program, ops, count)?;
        let mut layers = Vec::new();
        let mut counts: Vec<Vec<f64>> = vec![Vec::new(); kinds.len()];
        for &place in ops {
            let op = &program.ops[place];
            let (kind, count) = Kind::of(program, op)?;
            let kind = kinds.iter().position(|(known, _)| *known == kind).unwrap_or_default();
            let weights = op.op.weights().into_iter().map(|name| weights.declared(program, name)).collect::<Result<Vec<_>, _>>()?;
            layers.push(Layer { path: op.path.clone(), kind, first: counts[kind].len(), count, weights });
            let own = known.get(&*op.path).filter(|own| own.len() == count);
            counts[kind].extend(own.cloned().unwrap_or_else(|| vec![0.0; count]));
        }
        let mut pool = Self {
            kinds: Vec::new(),
            layers,
            transfer_from: transfer_from.unwrap_or(usize::MAX),
            history: options.history.clone(),
            unkept: 0,
        };
        for (number, ((kind, slots), counts)) in kinds.iter().zip(counts).enumerate() {
            let residency = Residency::new(Counts::new(counts), *slots, &pool.in_turns(number), pool.transfers());
            let most_choices = most_at_once(options.max_rows, kind.per_row);
            let limits = LoadOptions {
                max_rows: most_choices,
                max_soft_rows: 0,
                max_wanted: 1,
                max_segments: 1,
                max_state_bytes: None,
                replaceable: true,
                // It computes while other parts do.
                scratch_group: None,
                artifacts: None,
                ..options.clone()
            };
            let initial: Arc<dyn Weights> = Arc::new(pool.initial(number, kind.weights(), &residency)?);
            let executable = device.load(&kind.program(*slots)?, &initial, &limits)?;
            let executable = Recorded::of(executable, device.name(), options.timeline.as_ref());
            pool.kinds.push(Slots { weights: kind.weights(), executable, residency, most_choices });
        }
        Ok(pool)
    }

    /// The experts of a kind: the first of each layer, then the second of each.
    fn in_turns(&self, kind: usize) -> Vec<usize> {
        let own = || self.layers.iter().filter(|layer| layer.kind == kind);
        let most = own().map(|layer| layer.count).max().unwrap_or(0);
        (0..most).flat_map(|number| own().filter(move |layer| number < layer.count).map(move |layer| layer.first + number)).collect()
    }

    /// What lies in the slots at first.
    fn initial(&self, kind: usize, names: &[&str], residency: &Residency) -> Result<HashMap<String, WeightTensor>, DeviceError> {
        let stack = |(which, &name): (usize, &&str)| {
            let wrong = |reason: String| DeviceError::Weight { name: name.into(), reason };
            // A slot that is free until a call needs it has to have some content.
            let expert = |expert: &Option<usize>| self.part(kind, expert.unwrap_or(0), which).ok_or_else(|| wrong("is missing".into()));
            let parts = residency.experts().iter().map(expert).collect::<Result<Vec<_>, _>>()?;
            Ok((name.to_owned(), WeightTensor::stacked(&parts).map_err(wrong)?))
        };
        names.iter().enumerate().map(stack).collect()
    }

    /// What one of the weights has of an expert of a kind.
    fn part(&self, kind: usize, expert: usize, which: usize) -> Option<WeightTensor> {
        let layer = self.layers.iter().find(|layer| layer.kind == kind && (layer.first..layer.first + layer.count).contains(&expert))?;
        layer.weights[which].part(expert - layer.first)
    }

    /// A step begins with the call of its first layer: counts fade, and some experts take the place of others.
    pub(super) fn begin(&mut self, layer: usize, rows: usize, cache: &mut ExpertCache) -> Result<(), DeviceError> {
        if layer != 0 {
            return Ok(());
        }
        for kind in 0..self.kinds.len() {
            self.kinds[kind].residency.counts.fade(rows);
            for _ in 0..SWAPS {
                let Some((expert, slot)) = self.kinds[kind].residency.swap() else { break };
                self.transfer(kind, expert, slot, cache)?;
            }
        }
        self.unkept += rows;
        if self.unkept >= KEPT_AFTER {
            self.keep();
        }
        Ok(())
    }

    /// So many rows chose an expert of a layer. Gives its slot, if it has one.
    pub(super) fn choose(&mut self, layer: usize, expert: usize, rows: usize) -> Option<usize> {
        let Layer { kind, first, .. } = self.layers[layer];
        let residency = &mut self.kinds[kind].residency;
        residency.counts.add(first + expert, rows);
        residency.slot(first + expert)
    }

    /// Whether an expert that so many rows of a call chose is worth its transfer.
    pub(super) fn is_worth_transfer(&self, layer: usize, rows: usize) -> bool {
        rows >= self.transfer_from && self.at_once(layer) > 0
    }

    /// Whether any expert ever is.
    pub(super) fn transfers(&self) -> bool {
        self.transfer_from != usize::MAX
    }

    /// Experts that may be transferred at once for a call of a layer.
    pub(super) fn at_once(&self, layer: usize) -> usize {
        self.kinds[self.layers[layer].kind].residency.at_once()
    }

    /// Brings an expert of a layer to the accelerator for a call; none where it has no slot that is not `busy`.
    pub(super) fn fetch(
        &mut self,
        layer: usize,
        expert: usize,
        busy: &[usize],
        cache: &mut ExpertCache,
    ) -> Result<Option<usize>, DeviceError> {
        let Layer { kind, first, .. } = self.layers[layer];
        let residency = &mut self.kinds[kind].residency;
        if let Some(slot) = residency.slot(first + expert) {
            return Ok(Some(slot));
        }
        let Some(slot) = residency.stage(first + expert, busy) else { return Ok(None) };
        self.transfer(kind, first + expert, slot, cache)?;
        Ok(Some(slot))
    }

    fn transfer(&mut self, kind: usize, expert: usize, slot: usize, cache: &mut ExpertCache) -> Result<(), DeviceError> {
        for (which, &name) in self.kinds[kind].weights.iter().enumerate() {
            let missing = || DeviceError::Weight { name: name.into(), reason: "is missing".into() };
            let part = self.part(kind, expert, which).ok_or_else(missing)?;
            let Slots { executable, residency, .. } = &mut self.kinds[kind];
            executable.replace_part(name, slot, &part).inspect_err(|_| residency.forget(slot))?;
            cache.transferred_bytes += part.stored_bytes() as u64;
        }
        cache.transfers += 1;
        Ok(())
    }

    /// The program that computes choices of a layer's experts on the accelerator, and the most of them in a call.
    pub(super) fn executable(&mut self, layer: usize) -> (&mut dyn Executable, usize) {
        let Slots { executable, most_choices, .. } = &mut self.kinds[self.layers[layer].kind];
        (&mut **executable, *most_choices)
    }

    /// The number of the layer whose op has a path.
    pub(super) fn layer(&self, path: &str) -> Option<usize> {
        self.layers.iter().position(|layer| *layer.path == *path)
    }

    /// Bytes beside weights.
    pub(super) fn scratch_bytes(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.executable.scratch_bytes()).sum()
    }

    /// Keeps the counts for the next start.
    fn keep(&mut self) {
        self.unkept = 0;
        let Some(path) = &self.history else { return };
        let counts = |layer: &Layer| {
            let counts = &self.kinds[layer.kind].residency.counts;
            (layer.path.to_string(), (layer.first..layer.first + layer.count).map(|expert| counts.of(expert)).collect())
        };
        counts::store(path, self.layers.iter().map(counts).collect::<BTreeMap<_, _>>());
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.unkept > 0 {
            self.keep();
        }
    }
}
