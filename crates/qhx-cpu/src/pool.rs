//! The thread pool: who works, never what the work is.
//!
//! A job is a number of units and a function of the unit's number. Each thread, the calling one among them, has a range of them and takes it from front to back:
//! units that follow one another read memory that follows itself, which a CPU fetches fastest. A thread that is through with its own range takes units from the back
//! of others' ranges, so a slow or busy core simply takes fewer. What a unit computes must not depend on who takes it: then results are the same for
//! any number of threads. Idle workers spin for a moment (the next op follows within microseconds), then give way, then sleep: later where the last pause was short.
#![allow(unsafe_code)] // A job borrows the caller's stack; the barrier at its end is what makes that sound.

use crate::{
    affinity::{Core, Held},
    sync::{self, Arc, AtomicBool, AtomicU64, AtomicUsize, JoinHandle, Mutex, MutexGuard, Thread, UnsafeCell, linger},
};
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

/// How long a waiting thread stays awake before it sleeps.
const AWAKE: Duration = Duration::from_micros(100);
/// The same where the last job came within this time: its caller waits for another device between two jobs, and waking all threads takes about as long as a small job.
const LONG_AWAKE: Duration = Duration::from_millis(2);

/// The unit's number and the number of the thread that took it (0 is the caller).
type Body<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A fixed set of threads that run one job at a time.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the one caller whose job runs.
    caller: Mutex<()>,
    /// The cores that threads are kept on, the caller's first; none: they run where the system puts them.
    cores: Vec<Core>,
}

/// What became of the jobs while a pool was watched.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) jobs: usize,
    /// From sharing out to the end of the last unit.
    pub(crate) whole: Duration,
    /// Of that, the mean over all threads before their first unit.
    pub(crate) late: Duration,
    /// The same from there to the end of their last unit.
    pub(crate) busy: Duration,
}

/// When the threads of a pool worked, where somebody wants to know.
struct Watch {
    is_on: AtomicBool,
    epoch: Instant,
    /// Of the current job, when each thread began its first unit and ended its last one, in nanoseconds since the epoch; 0: it had none.
    times: Vec<Line<[AtomicU64; 2]>>,
    tally: Mutex<Tally>,
}

impl Watch {
    fn new(threads: usize) -> Self {
        let times = (0..threads).map(|_| Line([AtomicU64::new(0), AtomicU64::new(0)])).collect();
        Self { is_on: AtomicBool::new(false), epoch: Instant::now(), times, tally: Mutex::new(Tally::default()) }
    }

    /// The time, if somebody wants to know; never 0.
    fn now(&self) -> Option<u64> {
        self.is_on.load(Ordering::Relaxed).then(|| self.epoch.elapsed().as_nanos() as u64 + 1)
    }

    /// A job is about to be shared out.
    fn begin(&self) -> Option<u64> {
        let now = self.now()?;
        self.times.iter().flat_map(|times| &times.0).for_each(|time| time.store(0, Ordering::Relaxed));
        Some(now)
    }

    /// The job that began then is done.
    fn end(&self, began: u64) {
        let Some(now) = self.now() else { return };
        let whole = now - began;
        let (mut late, mut busy) = (0, 0);
        for Line([first, last]) in &self.times {
            let (first, last) = (first.load(Ordering::Relaxed), last.load(Ordering::Relaxed));
            late += if first == 0 { whole } else { first - began };
            busy += last - first;
        }
        let mean = |sum: u64| Duration::from_nanos(sum / self.times.len() as u64);
        let mut tally = lock(&self.tally);
        tally.jobs += 1;
        tally.whole += Duration::from_nanos(whole);
        tally.late += mean(late);
        tally.busy += mean(busy);
    }
}

struct Shared {
    /// The units of each thread's range that nobody has taken yet. A unit is owned by whoever takes it out of one; only then may `job` be read.
    untaken: Vec<Line<AtomicU64>>,
    /// Jobs so far: who looked for units before the last one came looks again.
    jobs: Line<AtomicUsize>,
    /// Units that are done.
    done: Line<AtomicUsize>,
    job: UnsafeCell<Job>,
    asleep: Vec<Line<AtomicBool>>,
    /// The caller, where it sleeps until the last unit is done.
    caller_asleep: AtomicBool,
    caller: Mutex<Option<Thread>>,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    watch: Watch,
}

/// A range of units in one number, so that it changes at once.
#[derive(Clone, Copy)]
struct Range {
    start: u32,
    end: u32,
}

impl Range {
    fn of(number: u64) -> Self {
        Self { start: (number >> 32) as u32, end: number as u32 }
    }

    fn number(self) -> u64 {
        (self.start as u64) << 32 | self.end as u64
    }

    /// The first unit and the rest.
    fn first(self) -> Option<(u32, Self)> {
        (self.start < self.end).then(|| (self.start, Self { start: self.start + 1, ..self }))
    }

    /// The last unit and the rest.
    fn last(self) -> Option<(u32, Self)> {
        (self.start < self.end).then(|| (self.end - 1, Self { end: self.end - 1, ..self }))
    }
}

/// Keeps what different threads write out of one cache line.
#[repr(align(128))]
struct Line<T>(T);

#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    units: usize,
}

// SAFETY: `job` is the only field that is not `Sync` by itself. It is written by the one caller (who holds `Pool::caller`) while all ranges of `untaken` are empty and
// all units of the job before are done, and read only by threads that own a unit of the current job.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is used only while the job's caller waits in `Pool::run`; the pointee is `Sync`.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads` threads, the caller included.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        Self::start(threads, Vec::new())
    }

    /// A pool of one thread for each of these cores, which it is kept on.
    pub(crate) fn pinned(cores: Vec<Core>) -> std::io::Result<Self> {
        Self::start(cores.len(), cores)
    }

    fn start(threads: usize, cores: Vec<Core>) -> std::io::Result<Self> {
        let nothing: &'static Body<'static> = &|_, _| {};
        let shared = Arc::new(Shared {
            untaken: (0..threads).map(|_| Line(AtomicU64::new(0))).collect(),
            jobs: Line(AtomicUsize::new(0)),
            done: Line(AtomicUsize::new(0)),
            job: UnsafeCell::new(Job { body: nothing, units: 0 }),
            asleep: (1..threads).map(|_| Line(AtomicBool::new(false))).collect(),
            caller_asleep: AtomicBool::new(false),
            caller: Mutex::new(None),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            watch: Watch::new(threads),
        });
        let mut pool = Self { shared, workers: Vec::new(), caller: Mutex::new(()), cores };
        for number in 1..threads {
            let (shared, core) = (pool.shared.clone(), pool.cores.get(number).copied());
            let work = move || {
                if let Some(core) = core {
                    core.keep();
                }
                shared.work(number);
            };
            // An error drops the pool, which ends the workers that were started.
            pool.workers.push(sync::Builder::new().name(format!("qhx-cpu-{number}")).spawn(work)?);
        }
        Ok(pool)
    }

    /// Threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// The cores that threads are kept on.
    pub(crate) fn cores(&self) -> &[Core] {
        &self.cores
    }

    /// Keeps the caller on its core until the result is dropped: the thread is not ours, so it is given back as it was.
    pub(crate) fn hold_caller(&self) -> Option<Held> {
        self.cores.first().map(|core| core.hold())
    }

    /// Notes from here on when threads work, or no longer.
    pub(crate) fn watch(&self, is_on: bool) {
        self.shared.watch.is_on.store(is_on, Ordering::Relaxed);
    }

    /// What became of the jobs since this was asked the last time.
    pub(crate) fn take_tally(&self) -> Tally {
        std::mem::take(&mut *lock(&self.shared.watch.tally))
    }

    /// Runs `body` once for each unit and returns when all are done. A panic in a unit becomes a panic here, after the others are done.
    pub(crate) fn run(&self, units: usize, body: &Body<'_>) {
        if units <= 1 || self.workers.is_empty() {
            (0..units).for_each(|unit| body(unit, 0));
            return;
        }
        let shared = &*self.shared;
        let guard = lock(&self.caller);
        // SAFETY: this lengthens the lifetime only on paper: nobody uses the pointer after `wait` below has seen all units done.
        let body = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
        shared.done.0.store(0, Ordering::Relaxed);
        let began = shared.watch.begin();
        // SAFETY: no unit is left and all units of the last job are done, so no thread reads `job` now.
        shared.job.with_mut(|job| unsafe { *job = Job { body, units } });
        assert!(units <= u32::MAX as usize, "{units} units are too many");
        let threads = shared.untaken.len();
        let first_of = |thread: usize| (thread * units / threads) as u32;
        for (thread, range) in shared.untaken.iter().enumerate() {
            range.0.store(Range { start: first_of(thread), end: first_of(thread + 1) }.number(), Ordering::Release);
        }
        shared.jobs.0.fetch_add(1, Ordering::SeqCst);
        for (flag, worker) in shared.asleep.iter().zip(&self.workers).take(units - 1) {
            // Pairs with the store in `work`: either the worker sees the units or we see it asleep.
            if flag.0.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        shared.take_units(0);
        shared.wait(units);
        if let Some(began) = began {
            shared.watch.end(began);
        }
        // While this is still the caller: else the next one could take it.
        let panic = lock(&shared.panic).take();
        drop(guard);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker only ends by a panic outside of a unit, which there is none.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// A worker's life.
    fn work(&self, number: usize) {
        let asleep = &self.asleep[number - 1].0;
        let mut awake = AWAKE;
        while !self.stop.load(Ordering::Relaxed) {
            let seen = self.jobs.0.load(Ordering::Acquire);
            let called = || self.jobs.0.load(Ordering::SeqCst) != seen || self.stop.load(Ordering::SeqCst);
            self.take_units(number);
            let began = Instant::now();
            if !linger(awake, called) {
                asleep.store(true, Ordering::SeqCst);
                while !called() {
                    sync::park();
                }
                asleep.store(false, Ordering::SeqCst);
            }
            awake = awake_after(began.elapsed());
        }
    }

    /// Takes and runs units until none is left: the thread's own from the front, then others' from the back.
    fn take_units(&self, number: usize) {
        let threads = self.untaken.len();
        let mut taken = 0;
        for other in 0..threads {
            let (range, take) = (&self.untaken[(number + other) % threads].0, if other == 0 { Range::first } else { Range::last });
            let mut now = range.load(Ordering::Acquire);
            while let Some((unit, rest)) = take(Range::of(now)) {
                match range.compare_exchange_weak(now, rest.number(), Ordering::AcqRel, Ordering::Acquire) {
                    Err(changed) => now = changed,
                    Ok(_) => {
                        if taken == 0
                            && let Some(now) = self.watch.now()
                        {
                            self.watch.times[number].0[0].store(now, Ordering::Relaxed);
                        }
                        // SAFETY: we own a unit of the current job, so its caller is in `run`, `job` is not written, and `body` is alive.
                        let body = self.job.with(|job| unsafe { &*(*job).body });
                        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| body(unit as usize, number))) {
                            lock(&self.panic).get_or_insert(panic);
                        }
                        taken += 1;
                        now = range.load(Ordering::Acquire);
                    }
                }
            }
        }
        if taken > 0 {
            // Told in one go, so that threads do not fight over the counter. Until then the job cannot end: ours are not yet counted.
            if let Some(now) = self.watch.now() {
                self.watch.times[number].0[1].store(now, Ordering::Relaxed);
            }
            // SAFETY: as above.
            let units = self.job.with(|job| unsafe { (*job).units });
            self.finish(taken, units);
        }
    }

    fn finish(&self, mine: usize, units: usize) {
        let done = self.done.0.fetch_add(mine, Ordering::SeqCst) + mine;
        if done == units
            && self.caller_asleep.load(Ordering::SeqCst)
            && let Some(caller) = &*lock(&self.caller)
        {
            caller.unpark();
        }
    }

    /// The caller's wait for the units that others took.
    fn wait(&self, units: usize) {
        let all_done = || self.done.0.load(Ordering::SeqCst) == units;
        if linger(AWAKE, all_done) {
            return;
        }
        *lock(&self.caller) = Some(sync::current());
        self.caller_asleep.store(true, Ordering::SeqCst);
        while !all_done() {
            sync::park();
        }
        self.caller_asleep.store(false, Ordering::SeqCst);
    }
}

/// How long a worker stays awake after a pause of this length.
fn awake_after(pause: Duration) -> Duration {
    if pause < LONG_AWAKE { LONG_AWAKE } else { AWAKE }
}

/// A lock whose data cannot be left half-changed by a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn each_unit_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads).unwrap();
            for units in [0, 1, 2, 7, 100] {
                for _ in 0..200 {
                    let counts: Vec<_> = (0..units).map(|_| AtomicUsize::new(0)).collect();
                    pool.run(units, &|unit, thread| {
                        assert!(thread < threads);
                        counts[unit].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    #[test]
    fn a_watched_pool_knows_when_threads_worked() {
        let pool = Pool::new(2).unwrap();
        let job = || pool.run(2, &|_, _| thread::sleep(Duration::from_millis(4)));
        job();
        assert_eq!(pool.take_tally().jobs, 0);
        pool.watch(true);
        (0..3).for_each(|_| job());
        pool.watch(false);
        job();
        let Tally { jobs, whole, late, busy } = pool.take_tally();
        assert_eq!(jobs, 3);
        assert!(
            whole >= Duration::from_millis(12) && late + busy <= whole && busy >= Duration::from_millis(12) / 2,
            "{whole:?} {late:?} {busy:?}"
        );
        assert_eq!(pool.take_tally().jobs, 0);
    }

    #[test]
    fn wakes_after_sleep() {
        let pool = Pool::new(3).unwrap();
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(1));
            let sum = AtomicUsize::new(0);
            pool.run(10, &|unit, _| {
                thread::sleep(Duration::from_micros(300));
                sum.fetch_add(unit, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 45);
        }
    }

    /// Jobs that come every now and then are waited for awake; one that comes late is slept for, and so is the next.
    #[test]
    fn short_pauses_are_stayed_awake_for() {
        assert!(awake_after(Duration::from_micros(300)) > Duration::from_millis(1));
        assert!(awake_after(Duration::from_millis(5)) < Duration::from_micros(300));
        assert!(!linger(Duration::from_micros(50), || false));
        let looks = AtomicUsize::new(0);
        assert!(linger(Duration::from_secs(3600), || looks.fetch_add(1, Ordering::Relaxed) == 100));
    }

    #[test]
    fn panics_reach_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(4).unwrap();
        for bad in [0, 3, 19] {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(20, &|unit, _| {
                    thread::sleep(Duration::from_micros(50));
                    assert_ne!(unit, bad, "unit {bad} fails");
                });
            }));
            assert!(result.is_err());
            let sum = AtomicUsize::new(0);
            pool.run(20, &|unit, _| {
                sum.fetch_add(unit, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 190);
        }
    }

    #[test]
    fn pinned_threads_have_a_core_each() {
        let cores = crate::affinity::cores();
        let pool = Pool::pinned(cores.clone()).unwrap();
        let seen = Mutex::new(vec![Vec::new(); cores.len()]);
        let _held = pool.hold_caller();
        // Long enough for every thread to take one.
        for _ in 0..200 {
            pool.run(2 * cores.len(), &|_, thread| {
                lock(&seen)[thread] = crate::affinity::cores();
                thread::sleep(Duration::from_millis(1));
            });
            if lock(&seen).iter().all(|seen| !seen.is_empty()) {
                break;
            }
        }
        let seen = lock(&seen).clone();
        assert_eq!(seen, cores.iter().map(|&core| vec![core]).collect::<Vec<_>>());
    }

    #[test]
    fn callers_take_turns() {
        let pool = Pool::new(2).unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let sum = AtomicUsize::new(0);
                        pool.run(5, &|unit, _| {
                            sum.fetch_add(unit, Ordering::Relaxed);
                        });
                        assert_eq!(sum.into_inner(), 10);
                    }
                });
            }
        });
    }
}
