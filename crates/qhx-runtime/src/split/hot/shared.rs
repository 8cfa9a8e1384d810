//! An op with experts on two devices: the accelerator computes the choices of experts that lie there, the processor the others, at the same time.

use super::{
    Pool,
    forecast::Forecast,
    kind::{Kind, SUM},
};
use crate::recorded::Recorded;
use qhx_ir::{
    Bindings, Call, Checked, Device, DeviceError, Executable, ExpertCache, InputData, LoadOptions, Name, Op, OpKind, Outputs, Replace,
    Segment, Weights,
};
use std::{
    cmp::Reverse,
    sync::{Arc, atomic::AtomicBool},
};

/// The op, as the host sees it.
pub(in crate::split) struct SharedExperts {
    path: Name,
    /// Its number in the pool.
    layer: usize,
    experts: usize,
    kind: Kind,
    /// Computes choices from where the experts lie.
    processor: Box<dyn Executable>,
    /// The most rows of a call of it.
    most_rows: usize,
    /// Of the layer behind this one, and how many experts it has.
    forecast: Option<(Forecast, usize)>,
    /// What the call under way has left for the processor.
    rest: Rest,
}

/// The processor's calls have at most so many choices, which memory is taken for.
const MOST_CHOICES: usize = 1024;

/// Rows that were given, with their choices, and what the processor has of them.
#[derive(Default)]
struct Rest {
    x: Vec<f32>,
    chosen: Vec<i32>,
    factors: Vec<f32>,
    /// For each expert its own number where the processor computes it, else -1.
    cold: Vec<i32>,
    sums: Vec<f32>,
    outputs: Outputs,
    /// The slots that the accelerator reads meanwhile.
    busy: Vec<usize>,
}

impl SharedExperts {
    /// The op at a place of `program`, with its number in the pool. `next` is the place of the next op with experts.
    pub(in crate::split) fn load(
        device: &dyn Device,
        program: &Checked,
        (layer, place, next): (usize, usize, Option<usize>),
        pool: &Pool,
        weights: &Arc<dyn Weights>,
        options: &LoadOptions,
    ) -> Result<Self, DeviceError> {
        let op = &program.ops[place];
        let (kind, experts) = Kind::of(program, op)?;
        let names: Vec<Name> = op.op.weights().into_iter().cloned().collect();
        let most_rows = (MOST_CHOICES / kind.per_row.max(1)).min(options.max_rows).max(1);
        let limits = LoadOptions {
            max_rows: most_rows,
            max_soft_rows: 0,
            max_wanted: 1,
            max_segments: 1,
            artifacts: None,
            scratch_group: None,
            ..options.clone()
        };
        let choices = kind.program(experts, &names, &op.path)?;
        let processor = Recorded::of(device.load(&choices, weights, &limits)?, device.name(), options.timeline.as_ref());
        let forecast = match next.filter(|_| pool.transfers()) {
            Some(next) => {
                let of = Kind::of(program, &program.ops[next])?.1;
                Forecast::new(device, program, next, kind.hidden, weights, options)?.map(|forecast| (forecast, of))
            }
            None => None,
        };
        Ok(Self { path: op.path.clone(), layer, experts, kind, processor, most_rows, forecast, rest: Rest::default() })
    }

    /// The rows of the op, the experts that they chose and what each counts.
    pub(in crate::split) fn reads(op: &Op) -> Option<[&Name; 3]> {
        match &op.op {
            OpKind::Experts { x, experts, weights, .. } => Some([x, experts, weights]),
            _ => None,
        }
    }

    /// The op that computes on the accelerator what lies there.
    pub(in crate::split) fn op_of_slots(&self, reads: [Name; 4], pool: &Pool) -> Result<OpKind, DeviceError> {
        self.kind.op(reads, &pool.slots_of(self.layer), &self.path)
    }

    /// How many experts there are.
    pub(in crate::split) fn count(&self) -> usize {
        self.experts
    }

    /// Where the accelerator has each expert when a call begins, or -1.
    pub(in crate::split) fn held(&self, pool: &Pool) -> Vec<i32> {
        (0..self.experts).map(|expert| pool.slot(self.layer, expert).map_or(-1, |slot| slot as i32)).collect()
    }

    /// Deals the choices of a call out to the devices. With `replace`, experts that enough rows chose are brought to the accelerator for it, and where it has those that
    /// were chosen is given.
    pub(in crate::split) fn deal(
        &mut self,
        [x, chosen, factors]: [&[f32]; 3],
        pool: &mut Pool,
        replace: Option<&mut Replace<'_>>,
        cache: &mut ExpertCache,
    ) -> Result<Option<Vec<i32>>, DeviceError> {
        let (layer, rest) = (self.layer, &mut self.rest);
        rest.x.clear();
        rest.x.extend_from_slice(x);
        rest.chosen.clear();
        rest.factors.clear();
        rest.factors.extend_from_slice(factors);
        let mut rows_of = vec![0; self.experts];
        for &expert in chosen {
            // Whole numbers come back as floats.
            let rows = rows_of.get_mut(expert as usize).filter(|_| expert >= 0.0);
            *rows.ok_or_else(|| DeviceError::Call(format!("expert {expert} was chosen of {}", self.experts)))? += 1;
            rest.chosen.push(expert as i32);
        }
        rest.cold.clear();
        rest.cold.resize(self.experts, -1);
        rest.busy.clear();
        let mut held = vec![-1; self.experts];
        let mut wanted = Vec::new();
        for (expert, &rows) in rows_of.iter().enumerate().filter(|(_, rows)| **rows > 0) {
            match pool.choose(layer, expert, rows) {
                Some(slot) => {
                    cache.hits += rows as u64;
                    rest.busy.push(slot);
                    held[expert] = slot as i32;
                }
                None => wanted.push(expert),
            }
        }
        // Those that most rows chose first.
        wanted.sort_by_key(|&expert| Reverse(rows_of[expert]));
        let (mut fetches, mut replace) = (pool.at_once(layer), replace);
        for expert in wanted {
            let rows = rows_of[expert];
            if let (Some(replace), true) = (&mut replace, fetches > 0 && pool.is_worth_transfer(layer, rows))
                && let Some(slot) = pool.fetch(layer, expert, &rest.busy, *replace, cache)?
            {
                fetches -= 1;
                cache.fetched += rows as u64;
                rest.busy.push(slot);
                held[expert] = slot as i32;
                continue;
            }
            cache.misses += rows as u64;
            rest.cold[expert] = expert as i32;
        }
        Ok(replace.map(|_| held))
    }

    /// What the processor's choices give, for each row. With `replace`, the experts that the next layer is likely to choose are brought to the accelerator first.
    pub(in crate::split) fn rest(
        &mut self,
        pool: &mut Pool,
        replace: Option<&mut Replace<'_>>,
        cancel: Option<&AtomicBool>,
        cache: &mut ExpertCache,
    ) -> Result<&[f32], DeviceError> {
        let Self { layer, ref kind, ref mut processor, most_rows, ref mut forecast, ref mut rest, .. } = *self;
        let Rest { x, chosen, factors, cold, sums, outputs, busy } = rest;
        let hidden = kind.hidden.max(1);
        if let (Some((forecast, of)), Some(replace)) = (forecast, replace) {
            let mut likely: Vec<(usize, usize)> = forecast.rows(x, x.len() / hidden, *of)?.into_iter().enumerate().collect();
            likely.retain(|&(_, rows)| rows > 0 && pool.is_worth_transfer(layer + 1, rows));
            likely.sort_by_key(|&(_, rows)| Reverse(rows));
            for (expert, _) in likely.into_iter().take(pool.at_once(layer + 1)) {
                busy.extend(pool.fetch(layer + 1, expert, busy, replace, cache)?);
            }
        }
        sums.clear();
        if cold.iter().all(|&expert| expert < 0) {
            sums.resize(x.len(), 0.0);
            return Ok(sums);
        }
        let choices = chosen.chunks(most_rows * kind.per_row).zip(factors.chunks(most_rows * kind.per_row));
        for (x, (chosen, factors)) in x.chunks(most_rows * hidden).zip(choices) {
            let rows = x.len() / hidden;
            let inputs = [InputData::F32(x), InputData::I32(chosen), InputData::F32(factors), InputData::I32(cold)];
            let mut segments = [Segment::new(None, 0, rows)];
            let mut call = Call::new(Bindings { rows, soft_rows: 0, wanted: 0 }, &inputs, &mut segments, outputs);
            call.cancel = cancel;
            processor.run(&mut call)?;
            let found = outputs.value(SUM).unwrap_or_default();
            if found.len() != x.len() {
                return Err(DeviceError::Call(format!("{} numbers came back for {rows} rows of `{}`", found.len(), self.path)));
            }
            sums.extend_from_slice(found);
        }
        Ok(sums)
    }

    /// Bytes beside weights.
    pub(in crate::split) fn scratch_bytes(&self) -> u64 {
        self.processor.scratch_bytes()
    }
}
