//! An op with experts on two devices: the accelerator computes the choices of experts that lie there, the processor the others, at the same time.

use super::{
    Pool,
    choices::{Batch, Choice, Kind, Rows, most_at_once},
    forecast::Forecast,
};
use crate::recorded::Recorded;
use qhx_ir::{Checked, Device, DeviceError, Executable, ExpertCache, LoadOptions, Name, Op, OpKind, Replace, Weights};
use std::sync::{Arc, atomic::AtomicBool};

/// The op, as the host sees it.
pub(in crate::split) struct SharedExperts {
    path: Name,
    /// Its number in the pool.
    layer: usize,
    experts: usize,
    kind: Kind,
    /// Computes choices from where the experts lie.
    processor: Box<dyn Executable>,
    most_choices: usize,
    /// Of the layer behind this one, and how many experts it has.
    forecast: Option<(Forecast, usize)>,
    /// What the call under way has left for the processor.
    rest: Rest,
}

/// Choices that the processor computes, of rows that were given.
#[derive(Default)]
struct Rest {
    x: Vec<f32>,
    choices: Vec<Choice>,
    sums: Vec<f32>,
    /// The slots that the accelerator reads meanwhile.
    busy: Vec<usize>,
}

/// What the accelerator is told: the slot of each choice, and what it counts. One that the processor computes counts nothing there.
pub(in crate::split) struct Told {
    pub(in crate::split) slots: Vec<i32>,
    pub(in crate::split) factors: Vec<f32>,
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
        let most_choices = most_at_once(options.max_rows, kind.per_row);
        let limits = LoadOptions {
            max_rows: most_choices,
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
        Ok(Self { path: op.path.clone(), layer, experts, kind, processor, most_choices, forecast, rest: Rest::default() })
    }

    /// The rows of the op, the experts that they chose and what each counts.
    pub(in crate::split) fn reads(op: &Op) -> Option<[&Name; 3]> {
        match &op.op {
            OpKind::Experts { x, experts, weights, .. } => Some([x, experts, weights]),
            _ => None,
        }
    }

    /// The op that computes on the accelerator what lies there.
    pub(in crate::split) fn op_of_slots(&self, x: Name, slots: Name, factors: Name, pool: &Pool) -> Result<OpKind, DeviceError> {
        self.kind.op([x, slots, factors], &pool.slots_of(self.layer), &self.path)
    }

    /// Choices of a row.
    pub(in crate::split) fn per_row(&self) -> usize {
        self.kind.per_row
    }

    /// Deals the choices of a call out to the devices. With `replace`, experts that enough rows chose are brought to the accelerator for it.
    pub(in crate::split) fn deal(
        &mut self,
        [x, chosen, factors]: [&[f32]; 3],
        pool: &mut Pool,
        mut replace: Option<&mut Replace<'_>>,
        cache: &mut ExpertCache,
    ) -> Result<Told, DeviceError> {
        let (layer, per_row, Rest { x: rows, choices, busy, .. }) = (self.layer, self.kind.per_row.max(1), &mut self.rest);
        rows.clear();
        rows.extend_from_slice(x);
        let mut by_expert: Vec<Vec<usize>> = vec![Vec::new(); self.experts];
        for (choice, &expert) in chosen.iter().enumerate() {
            // Whole numbers come back as floats.
            let own = by_expert.get_mut(expert as usize).filter(|_| expert >= 0.0);
            own.ok_or_else(|| DeviceError::Call(format!("expert {expert} was chosen of {}", self.experts)))?.push(choice);
        }
        choices.clear();
        busy.clear();
        let mut told = Told { slots: vec![0; chosen.len()], factors: vec![0.0; chosen.len()] };
        let mut tell = |own: &[usize], slot: usize, busy: &mut Vec<usize>| {
            busy.push(slot);
            own.iter().for_each(|&choice| (told.slots[choice], told.factors[choice]) = (slot as i32, factors[choice]));
        };
        let mut wanted = Vec::new();
        for (expert, own) in by_expert.iter().enumerate().filter(|(_, own)| !own.is_empty()) {
            match pool.choose(layer, expert, own.len()) {
                Some(slot) => {
                    cache.hits += own.len() as u64;
                    tell(own, slot, busy);
                }
                None => wanted.push(expert),
            }
        }
        // Those that most rows chose first.
        wanted.sort_by_key(|&expert| std::cmp::Reverse(by_expert[expert].len()));
        let mut fetches = pool.at_once(layer);
        for expert in wanted {
            let own = &by_expert[expert];
            if let (Some(replace), true) = (&mut replace, fetches > 0 && pool.is_worth_transfer(layer, own.len()))
                && let Some(slot) = pool.fetch(layer, expert, busy, *replace, cache)?
            {
                fetches -= 1;
                cache.fetched += own.len() as u64;
                tell(own, slot, busy);
                continue;
            }
            cache.misses += own.len() as u64;
            choices.extend(own.iter().map(|&choice| Choice { row: choice / per_row, expert, factor: factors[choice] }));
        }
        Ok(told)
    }

    /// What the processor's choices give, for each row. With `replace`, the experts that the next layer is likely to choose are brought to the accelerator first.
    pub(in crate::split) fn rest(
        &mut self,
        pool: &mut Pool,
        replace: Option<&mut Replace<'_>>,
        batch: &mut Batch,
        cancel: Option<&AtomicBool>,
        cache: &mut ExpertCache,
    ) -> Result<&[f32], DeviceError> {
        let Self { layer, ref kind, ref mut processor, most_choices, ref mut forecast, ref mut rest, .. } = *self;
        let Rest { x, choices, sums, busy } = rest;
        if let (Some((forecast, of)), Some(replace)) = (forecast, replace) {
            let rows = x.len() / kind.hidden.max(1);
            let mut likely: Vec<(usize, usize)> = forecast.rows(x, rows, *of)?.into_iter().enumerate().collect();
            likely.retain(|&(_, rows)| rows > 0 && pool.is_worth_transfer(layer + 1, rows));
            likely.sort_by_key(|&(_, rows)| std::cmp::Reverse(rows));
            for (expert, _) in likely.into_iter().take(pool.at_once(layer + 1)) {
                busy.extend(pool.fetch(layer + 1, expert, busy, replace, cache)?);
            }
        }
        sums.clear();
        sums.resize(x.len(), 0.0);
        let rows = Rows { x, hidden: kind.hidden };
        choices.chunks(most_choices).try_for_each(|choices| batch.add(&mut **processor, rows, choices, cancel, sums))?;
        Ok(sums)
    }

    /// Bytes beside weights.
    pub(in crate::split) fn scratch_bytes(&self) -> u64 {
        self.processor.scratch_bytes()
    }
}
