//! Limits of a case: memory, enforced by the system, and time, enforced by whoever waits for it.

use std::{
    env,
    ffi::OsStr,
    fs,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Address space of a process, in KiB.
const MEMORY_KIB: u64 = 4 << 20;
/// A process that blocks forever uses no CPU time, so the wall-clock limit is this many times the CPU limit.
const WALL_FACTOR: u32 = 6;
/// Linux reports CPU time in hundredths of a second.
const TICK: Duration = Duration::from_millis(10);

/// `program`, with a memory limit and without core dumps.
pub(crate) fn limited(program: &Path) -> Command {
    let mut command = Command::new("sh");
    let script = format!("ulimit -c 0; ulimit -v {MEMORY_KIB} 2>/dev/null; exec \"$0\" \"$@\"");
    // Each thread's own arena would reserve address space that nobody uses.
    command.args([OsStr::new("-c"), script.as_ref(), program.as_os_str()]).env("MALLOC_ARENA_MAX", "2");
    command
}

/// The folders of [`contained`], within that of a worker.
pub(crate) const FOLDERS: [&str; 3] = ["here", "tmp", "home"];

/// The same, with nothing of this process's environment but where programs are: whatever it writes unasked lands in [`FOLDERS`].
pub(crate) fn contained(program: &Path, scratch: &Path) -> Command {
    let mut command = limited(program);
    let [here, tmp, home] = FOLDERS.map(|name| scratch.join(name));
    command.current_dir(here).env_clear().envs(env::vars_os().filter(|(name, _)| name == "PATH"));
    command.envs([("TMPDIR", tmp), ("HOME", home), ("QHX_CACHE_DIR", scratch.join("cache"))]).env("MALLOC_ARENA_MAX", "2");
    command.stdin(Stdio::null());
    command
}

/// Measures how long a process takes. CPU time counts, so that a busy machine causes no failures.
pub(crate) struct Watch {
    process: u32,
    limit: Duration,
    began: Instant,
    used_before: Duration,
}

impl Watch {
    /// Starts measuring.
    pub(crate) fn new(process: u32, limit: Duration) -> Self {
        Self { process, limit, began: Instant::now(), used_before: cpu_time(process).unwrap_or_default() }
    }

    /// What is wrong, once the process has taken too long.
    pub(crate) fn overdue(&self) -> Option<String> {
        let used = cpu_time(self.process).map_or(Duration::ZERO, |now| now.saturating_sub(self.used_before));
        if used > self.limit {
            return Some(format!("took more than {} s of CPU time", self.limit.as_secs_f64()));
        }
        let wall = self.limit * WALL_FACTOR;
        // One that could go on waits for nothing but a core.
        let is_blocked = self.began.elapsed() > wall && !is_runnable(self.process);
        is_blocked.then(|| format!("did not end within {} s", wall.as_secs_f64()))
    }
}

/// Waits for a process to exit, and kills it with an error if it takes too long.
pub(crate) fn wait(child: &mut Child, watch: &Watch) -> Result<ExitStatus, String> {
    loop {
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            return Ok(status);
        }
        if let Some(problem) = watch.overdue() {
            let _ = child.kill();
            let _ = child.wait();
            return Err(problem);
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Whether a thread of a process runs or could run, where the system reports it.
fn is_runnable(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let mut statuses = threads.filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok());
    statuses.any(|status| status.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('R')))
}

/// CPU time of a process and all its threads, where the system reports it.
fn cpu_time(process: u32) -> Option<Duration> {
    let status = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field is a name in parentheses, which may hold anything; user and system time are fields 14 and 15.
    let mut fields = status.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let ticks: u32 = fields.next()?.parse::<u32>().ok()?.checked_add(fields.next()?.parse().ok()?)?;
    Some(TICK * ticks)
}
