//! Where the time of calls goes, step by step, while somebody wants to know.

use crate::{
    ops::Step,
    pool::{Pool, Tally},
};
use qhx_ir::{Profile, StepProfile};
use std::time::Duration;

/// What was measured so far.
pub(crate) struct Profiler {
    profile: Profile,
    /// For each step of the program, its place among the kinds.
    kinds: Vec<usize>,
}

impl Profiler {
    /// For calls of a program with these steps.
    pub(crate) fn new(steps: &[Step], pool: &Pool) -> Self {
        let mut profile = Profile::default();
        let kinds = steps.iter().map(Step::kind).map(|step| {
            let known = profile.steps.iter().position(|kind| kind.step == step);
            known.unwrap_or_else(|| {
                profile.steps.push(StepProfile { step, ..StepProfile::default() });
                profile.steps.len() - 1
            })
        });
        let kinds = kinds.collect();
        pool.watch(true);
        pool.take_tally();
        Self { profile, kinds }
    }

    /// A step of the program took so long and read so many bytes.
    pub(crate) fn step(&mut self, number: usize, time: Duration, weight_bytes: u64, pool: &Pool) {
        let Tally { jobs, whole, late, busy } = pool.take_tally();
        let kind = &mut self.profile.steps[self.kinds[number]];
        kind.runs += 1;
        kind.seconds += time.as_secs_f64();
        kind.weight_bytes += weight_bytes;
        kind.barriers += jobs;
        kind.shared_seconds += whole.as_secs_f64();
        kind.late_seconds += late.as_secs_f64();
        kind.busy_seconds += busy.as_secs_f64();
    }

    /// A call took so long.
    pub(crate) fn call(&mut self, time: Duration) {
        self.profile.calls += 1;
        self.profile.seconds += time.as_secs_f64();
    }

    /// What was measured, the longest first.
    pub(crate) fn finish(mut self, pool: &Pool) -> Profile {
        pool.watch(false);
        self.profile.steps.retain(|step| step.runs > 0);
        self.profile.steps.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        self.profile
    }
}
