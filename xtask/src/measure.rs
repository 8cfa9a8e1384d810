//! How long a command took, and how much CPU time it and all that it started used.

use crate::Failure;
use std::{
    process::{Child, Command, ExitStatus},
    time::{Duration, Instant},
};

/// A command that has ended.
pub(crate) struct Measured {
    pub(crate) status: ExitStatus,
    pub(crate) wall: Duration,
    /// Of the process and of its children, as far as they were waited for. Nothing where the system does not tell.
    pub(crate) cpu: Duration,
}

/// Runs a command to its end.
pub(crate) fn run(command: &mut Command) -> Result<Measured, Failure> {
    let start = Instant::now();
    let child = command.spawn().map_err(|e| format!("cannot start {command:?}: {e}"))?;
    let (status, cpu) = wait(child).map_err(|e| format!("cannot wait for {command:?}: {e}"))?;
    Ok(Measured { status, wall: start.elapsed(), cpu })
}

#[cfg(unix)]
#[allow(unsafe_code)] // The standard library does not tell what a child used.
fn wait(child: Child) -> std::io::Result<(ExitStatus, Duration)> {
    use std::{io, os::unix::process::ExitStatusExt};
    let id = libc::pid_t::try_from(child.id()).map_err(io::Error::other)?;
    let mut status = 0;
    // SAFETY: a `rusage` is numbers only, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the process is our child, which nobody else waits for; both pointers are to locals that live through the call.
    while unsafe { libc::wait4(id, &mut status, 0, &mut usage) } < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    let time = |t: libc::timeval| Duration::new(t.tv_sec.unsigned_abs(), t.tv_usec.unsigned_abs() as u32 * 1000);
    Ok((ExitStatus::from_raw(status), time(usage.ru_utime) + time(usage.ru_stime)))
}

#[cfg(not(unix))]
fn wait(mut child: Child) -> std::io::Result<(ExitStatus, Duration)> {
    Ok((child.wait()?, Duration::ZERO))
}
