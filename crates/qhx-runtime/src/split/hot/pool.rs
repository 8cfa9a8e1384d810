//! The experts that lie on the accelerator: slots of each kind, which its program takes for experts.

use super::{
    HotExperts,
    counts::{self, Counts},
    kind::Kind,
    residency::Residency,
};
use qhx_ir::{Checked, DeviceError, ExpertCache, Name, Replace, Weight, WeightTensor, Weights};
use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
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
    /// Slots whose experts are not there yet.
    on_the_way: Vec<usize>,
}

/// The slots of one kind.
struct Slots {
    /// The weights of the accelerator's program.
    weights: Vec<(Name, Weight)>,
    residency: Residency,
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

/// Between two steps so many experts at most take the place of others: about as many as are transferred during a step.
const SWAPS: usize = 8;
/// Counts are kept after so many rows, and at the end.
const KEPT_AFTER: usize = 4096;

impl Pool {
    /// The hottest experts of the ops at some places.
    pub(in crate::split) fn new(
        hot: HotExperts,
        program: &Checked,
        ops: &[usize],
        weights: &Arc<dyn Weights>,
        history: Option<&Path>,
    ) -> Result<Self, DeviceError> {
        let HotExperts { count, transfer_from } = hot;
        let known = history.map(counts::load).unwrap_or_default();
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
        let transfer_from = transfer_from.unwrap_or(usize::MAX);
        let history = history.map(Path::to_owned);
        let mut pool = Self { kinds: Vec::new(), layers, transfer_from, history, unkept: 0, on_the_way: Vec::new() };
        for (number, ((kind, slots), counts)) in kinds.iter().zip(counts).enumerate() {
            let residency = Residency::new(Counts::new(counts), *slots, &pool.in_turns(number), pool.transfers());
            pool.kinds.push(Slots { weights: kind.slots(number, *slots), residency });
        }
        Ok(pool)
    }

    /// The weights of the accelerator's program that are slots.
    pub(in crate::split) fn slots(&self) -> impl Iterator<Item = &(Name, Weight)> {
        self.kinds.iter().flat_map(|kind| &kind.weights)
    }

    /// Those of them that a layer's experts are taken from.
    pub(in crate::split) fn slots_of(&self, layer: usize) -> Vec<Name> {
        self.kinds[self.layers[layer].kind].weights.iter().map(|(name, _)| name.clone()).collect()
    }

    /// All weights, with what lies in the slots at first.
    pub(in crate::split) fn filled(&self, rest: &Arc<dyn Weights>) -> Result<Arc<dyn Weights>, DeviceError> {
        let mut slots = HashMap::new();
        for kind in 0..self.kinds.len() {
            self.fill(kind, &mut slots)?;
        }
        Ok(Arc::new(Filled { slots, rest: rest.clone() }))
    }

    /// The experts of a kind: the first of each layer, then the second of each.
    fn in_turns(&self, kind: usize) -> Vec<usize> {
        let own = || self.layers.iter().filter(|layer| layer.kind == kind);
        let most = own().map(|layer| layer.count).max().unwrap_or(0);
        (0..most).flat_map(|number| own().filter(move |layer| number < layer.count).map(move |layer| layer.first + number)).collect()
    }

    /// What lies in the slots of a kind at first.
    fn fill(&self, kind: usize, slots: &mut HashMap<Name, WeightTensor>) -> Result<(), DeviceError> {
        let Slots { weights, residency } = &self.kinds[kind];
        for (which, (name, _)) in weights.iter().enumerate() {
            let wrong = |reason: String| DeviceError::Weight { name: name.clone(), reason };
            // A slot that is free until a call needs it has to have some content.
            let expert = |expert: &Option<usize>| self.part(kind, expert.unwrap_or(0), which).ok_or_else(|| wrong("is missing".into()));
            let parts = residency.experts().iter().map(expert).collect::<Result<Vec<_>, _>>()?;
            slots.insert(name.clone(), WeightTensor::stacked(&parts).map_err(wrong)?);
        }
        Ok(())
    }

    /// What one of the weights has of an expert of a kind.
    fn part(&self, kind: usize, expert: usize, which: usize) -> Option<WeightTensor> {
        let layer = self.layers.iter().find(|layer| layer.kind == kind && (layer.first..layer.first + layer.count).contains(&expert))?;
        layer.weights[which].part(expert - layer.first)
    }

    /// A step of so many rows begins: counts fade, and some experts take the place of others.
    pub(in crate::split) fn begin(&mut self, rows: usize, replace: &mut Replace<'_>, cache: &mut ExpertCache) -> Result<(), DeviceError> {
        for kind in 0..self.kinds.len() {
            self.kinds[kind].residency.counts.fade(rows);
            for _ in 0..SWAPS {
                let Some((expert, slot)) = self.kinds[kind].residency.swap() else { break };
                self.transfer(kind, expert, slot, replace, cache)?;
            }
        }
        self.unkept += rows;
        if self.unkept >= KEPT_AFTER {
            self.keep();
        }
        Ok(())
    }

    /// The slots whose experts will not be there in time for the step that begins.
    pub(in crate::split) fn wait_for(&mut self, on_the_way: Vec<usize>) {
        self.on_the_way = on_the_way;
    }

    /// The slot of an expert of a layer, if it lies in one.
    pub(super) fn slot(&self, layer: usize, expert: usize) -> Option<usize> {
        let Layer { kind, first, .. } = self.layers[layer];
        self.kinds[kind].residency.slot(first + expert).filter(|slot| !self.on_the_way.contains(slot))
    }

    /// So many rows chose an expert of a layer. Gives its slot, if it lies in one.
    pub(super) fn choose(&mut self, layer: usize, expert: usize, rows: usize) -> Option<usize> {
        let Layer { kind, first, .. } = self.layers[layer];
        self.kinds[kind].residency.counts.add(first + expert, rows);
        self.slot(layer, expert)
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
        replace: &mut Replace<'_>,
        cache: &mut ExpertCache,
    ) -> Result<Option<usize>, DeviceError> {
        let Layer { kind, first, .. } = self.layers[layer];
        let residency = &mut self.kinds[kind].residency;
        if let Some(slot) = residency.slot(first + expert) {
            return Ok(Some(slot));
        }
        let Some(slot) = residency.stage(first + expert, busy) else { return Ok(None) };
        self.transfer(kind, first + expert, slot, replace, cache)?;
        Ok(Some(slot))
    }

    fn transfer(
        &mut self,
        kind: usize,
        expert: usize,
        slot: usize,
        replace: &mut Replace<'_>,
        cache: &mut ExpertCache,
    ) -> Result<(), DeviceError> {
        for which in 0..self.kinds[kind].weights.len() {
            let part = self.part(kind, expert, which);
            let Slots { weights, residency } = &mut self.kinds[kind];
            let name = &weights[which].0;
            let part = part.ok_or_else(|| DeviceError::Weight { name: name.clone(), reason: "is missing".into() })?;
            replace(name, slot, &part).inspect_err(|_| residency.forget(slot))?;
            cache.transferred_bytes += part.stored_bytes() as u64;
        }
        cache.transfers += 1;
        Ok(())
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

/// Weights, and what lies in slots.
struct Filled {
    slots: HashMap<Name, WeightTensor>,
    rest: Arc<dyn Weights>,
}

impl Weights for Filled {
    fn tensor(&self, name: &str) -> Option<WeightTensor> {
        self.slots.get(name).cloned().or_else(|| self.rest.tensor(name))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.unkept > 0 {
            self.keep();
        }
    }
}
