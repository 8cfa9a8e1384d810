//! An op with experts on two devices: the accelerator computes the choices of experts that lie there, the processor the others, at the same time.

use super::{
    Pool,
    choices::{Batch, Chosen, Kind, most_at_once},
    forecast::Forecast,
};
use crate::{
    recorded::{Recorded, stages_shown},
    split::tokens::Share,
};
use qhx_ir::{
    Call, Checked, Device, DeviceError, Executable, ExpertCache, InputData, LoadOptions, Name, OpKind, State, StateBytes, Tap, Ticket,
    Weights,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool};

/// The op, as a part of a program that is its only op.
pub(in crate::split) struct SharedExperts {
    program: Checked,
    /// The places of rows, chosen experts and their factors among the inputs.
    inputs: [usize; 3],
    /// Its number in the pool.
    layer: usize,
    experts: usize,
    hidden: usize,
    /// Computes choices from where the experts lie.
    processor: Box<dyn Executable>,
    most_choices: usize,
    pool: Arc<Mutex<Pool>>,
    /// Of the layer behind this one, and how many experts it has.
    forecast: Option<(Forecast, usize)>,
    cache: ExpertCache,
    /// Bandwidth tokens of what each device does.
    bandwidth: Option<Share>,
}

impl SharedExperts {
    /// The op at a place of `program`, which is the only one of `part`. `next` is the place of the next op with experts.
    pub(in crate::split) fn load(
        device: &dyn Device,
        program: &Checked,
        (place, next): (usize, Option<usize>),
        part: Checked,
        pool: &Arc<Mutex<Pool>>,
        weights: &Arc<dyn Weights>,
        options: &LoadOptions,
    ) -> Result<Self, DeviceError> {
        let op = &program.ops[place];
        let (kind, experts) = Kind::of(program, op)?;
        let broken = || DeviceError::Call(format!("`{}` cannot be shared between devices", op.path));
        let OpKind::Experts { x, experts: chosen, weights: factors, .. } = &op.op else { return Err(broken()) };
        let input = |name: &Name| part.inputs.iter().position(|input| input.name == *name).ok_or_else(broken);
        let inputs = [input(x)?, input(chosen)?, input(factors)?];
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
        let choices = kind.named(experts, &names, &op.path)?;
        let processor = Recorded::of(device.load(&choices, weights, &limits)?, device.name(), options.timeline.as_ref());
        let hidden = kind.hidden;
        let (layer, transfers) = {
            let pool = lock(pool);
            (pool.layer(&op.path).ok_or_else(broken)?, pool.transfers())
        };
        let forecast = match next.filter(|_| transfers) {
            Some(next) => {
                let of = Kind::of(program, &program.ops[next])?.1;
                Forecast::new(device, program, next, hidden, weights, options)?.map(|forecast| (forecast, of))
            }
            None => None,
        };
        let (pool, cache) = (pool.clone(), ExpertCache::default());
        Ok(Self { program: part, inputs, layer, experts, hidden, processor, most_choices, pool, forecast, cache, bandwidth: None })
    }

    /// The same with bandwidth tokens: the devices compute at the same time only if there are enough for both.
    pub(in crate::split) fn with_tokens(self, bandwidth: Option<Share>) -> Self {
        Self { bandwidth, ..self }
    }

    /// The choices of a call by their experts.
    fn by_expert(&self, chosen: Chosen<'_>) -> Result<Vec<Vec<usize>>, DeviceError> {
        let mut all = vec![Vec::new(); self.experts];
        for (choice, &expert) in chosen.experts.iter().enumerate() {
            let own = usize::try_from(expert).ok().and_then(|expert| all.get_mut(expert));
            own.ok_or_else(|| DeviceError::Call(format!("expert {expert} was chosen of {}", self.experts)))?.push(choice);
        }
        Ok(all)
    }

    /// What each choice gives, one after the other.
    fn compute(&mut self, chosen: Chosen<'_>, rows: usize, cancel: Option<&AtomicBool>) -> Result<Vec<f32>, DeviceError> {
        let by_expert = self.by_expert(chosen)?;
        let Self {
            layer,
            hidden,
            most_choices,
            ref pool,
            ref mut processor,
            ref mut forecast,
            ref mut cache,
            ref bandwidth,
            ref program,
            ..
        } = *self;
        let mut pool = lock(pool);
        pool.begin(layer, rows, cache)?;
        let (mut there, mut fetched, mut here) = (Vec::new(), Vec::new(), Vec::new());
        for (expert, choices) in by_expert.iter().enumerate().filter(|(_, choices)| !choices.is_empty()) {
            let as_called = |name: usize| choices.iter().map(move |&choice| (choice, name));
            match pool.choose(layer, expert, choices.len()) {
                Some(slot) => there.extend(as_called(slot)),
                None if pool.is_worth_transfer(layer, choices.len()) => fetched.push(expert),
                None => here.extend(as_called(expert)),
            }
        }
        cache.hits += there.len() as u64;
        // Those that most rows chose first.
        fetched.sort_by_key(|&expert| std::cmp::Reverse(by_expert[expert].len()));
        let mut results = vec![0.0; chosen.experts.len() * hidden];
        let mut work = Accelerator { layer, chosen, hidden, cancel, under_way: None, busy: Vec::new() };
        work.run_all(&mut pool, &there, &mut results)?;
        let at_once = pool.at_once(layer).max(1);
        for experts in fetched.chunks(at_once) {
            // While the accelerator computes what it was given before.
            let (mut next, mut taken) = (Vec::new(), work.busy.clone());
            for &expert in experts {
                let choices = &by_expert[expert];
                match pool.fetch(layer, expert, &taken, cache)? {
                    Some(slot) => {
                        next.extend(choices.iter().map(|&choice| (choice, slot)));
                        taken.push(slot);
                    }
                    None => here.extend(choices.iter().map(|&choice| (choice, expert))),
                }
            }
            cache.fetched += next.len() as u64;
            work.run_all(&mut pool, &next, &mut results)?;
        }
        if let Some((forecast, of)) = forecast {
            let likely = forecast.rows(chosen.x, rows, *of)?;
            let mut likely: Vec<(usize, usize)> = likely.into_iter().enumerate().collect();
            likely.retain(|&(_, rows)| rows > 0 && pool.is_worth_transfer(layer + 1, rows));
            likely.sort_by_key(|&(_, rows)| std::cmp::Reverse(rows));
            let mut taken = work.busy.clone();
            for (expert, _) in likely.into_iter().take(pool.at_once(layer + 1)) {
                taken.extend(pool.fetch(layer + 1, expert, &taken, cache)?);
            }
        }
        cache.misses += here.len() as u64;
        // Two that would slow one another down take turns.
        if let Some(share) = bandwidth.as_ref().filter(|share| !share.fits_twice() && !here.is_empty() && work.under_way.is_some()) {
            share.while_waiting(&stages_shown(program), || work.wait(&mut pool, &mut results))?;
        }
        let done = here.chunks(most_choices).try_for_each(|choices| {
            let mut batch = Batch::new(chosen, choices);
            batch.call(cancel, |call| processor.run(call))?;
            batch.put(hidden, &mut results)
        });
        work.wait(&mut pool, &mut results)?;
        done.map(|()| results)
    }
}

/// What the accelerator is given, one call after the other.
struct Accelerator<'a> {
    layer: usize,
    chosen: Chosen<'a>,
    hidden: usize,
    cancel: Option<&'a AtomicBool>,
    under_way: Option<(Ticket, Batch)>,
    /// The slots that the call under way reads.
    busy: Vec<usize>,
}

impl Accelerator<'_> {
    /// Begins to compute choices, after those before them.
    fn run_all(&mut self, pool: &mut Pool, choices: &[(usize, usize)], results: &mut [f32]) -> Result<(), DeviceError> {
        let most = pool.executable(self.layer).1;
        for choices in choices.chunks(most) {
            self.wait(pool, results)?;
            let mut batch = Batch::new(self.chosen, choices);
            let ticket = batch.call(self.cancel, |call| pool.executable(self.layer).0.submit(call))?;
            self.busy = choices.iter().map(|&(_, slot)| slot).collect();
            self.busy.dedup();
            self.under_way = Some((ticket, batch));
        }
        Ok(())
    }

    /// Waits for the call under way.
    fn wait(&mut self, pool: &mut Pool, results: &mut [f32]) -> Result<(), DeviceError> {
        let Some((ticket, mut batch)) = self.under_way.take() else { return Ok(()) };
        self.busy.clear();
        batch.call(self.cancel, |call| pool.executable(self.layer).0.wait(ticket, call))?;
        batch.put(self.hidden, results)
    }
}

fn lock(pool: &Mutex<Pool>) -> MutexGuard<'_, Pool> {
    pool.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Executable for SharedExperts {
    fn program(&self) -> &Checked {
        &self.program
    }

    fn new_state(&self, context: usize) -> Result<Box<dyn State>, DeviceError> {
        self.processor.new_state(context)
    }

    fn submit(&mut self, call: &mut Call<'_>) -> Result<Ticket, DeviceError> {
        call.check(&self.program)?;
        Ok(Ticket(0))
    }

    fn wait(&mut self, _: Ticket, call: &mut Call<'_>) -> Result<(), DeviceError> {
        if call.is_cancelled() {
            return Err(DeviceError::Cancelled);
        }
        let [x, experts, factors] = self.inputs.map(|place| call.inputs[place]);
        let (InputData::F32(x), InputData::I32(experts), InputData::F32(factors)) = (x, experts, factors) else {
            return Err(DeviceError::Call(format!("program `{}`: inputs of another type", self.program.name)));
        };
        let (rows, hidden) = (call.bindings.rows, self.hidden);
        let per_row = (experts.len() / rows).max(1);
        let results = self.compute(Chosen { x, hidden, experts, factors, per_row }, rows, call.cancel)?;
        let mut sums = vec![0.0; rows * hidden];
        for (sum, choices) in sums.chunks_exact_mut(hidden).zip(results.chunks_exact(per_row * hidden)) {
            for choice in choices.chunks_exact(hidden) {
                sum.iter_mut().zip(choice).for_each(|(sum, number)| *sum += number);
            }
        }
        let made = &self.program.ops[0].path;
        if let Some(taps) = &mut call.taps {
            for &stage in self.program.stages_shown_by(made) {
                Tap::show(&self.program.stages[stage], &[rows, hidden], &sums, *taps);
            }
        }
        call.outputs.give(&self.program, call.wants, |_| sums.clone())
    }

    fn max_segments(&self) -> usize {
        usize::MAX
    }

    fn commits_partly(&self) -> bool {
        true
    }

    fn state_bytes(&self) -> Option<StateBytes> {
        Some(StateBytes::default())
    }

    fn expert_cache(&self) -> Option<ExpertCache> {
        Some(self.cache)
    }

    fn scratch_bytes(&self) -> u64 {
        // What the accelerator has beside weights is counted once.
        let pool = if self.layer == 0 { lock(&self.pool).scratch_bytes() } else { 0 };
        self.processor.scratch_bytes() + pool
    }
}
