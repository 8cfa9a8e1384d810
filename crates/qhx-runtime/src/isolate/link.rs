//! The process of a device, and the way to it.

use super::{
    Worker,
    wire::{self, Reply, Request},
};
use qhx_ir::DeviceError;
use std::{
    io::{self, BufReader, BufWriter},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

/// How long the process may be silent. Its own watch over the device is shorter.
const PATIENCE: Duration = Duration::from_secs(300);

/// A process, as long as it lives.
pub(super) struct Link {
    device: String,
    inner: Mutex<Inner>,
}

struct Inner {
    child: Child,
    /// None once the process is given up.
    requests: Option<BufWriter<ChildStdin>>,
    replies: Receiver<io::Result<(Reply, Vec<u8>)>>,
    /// Why it was given up.
    lost: Option<String>,
}

/// A conversation with the process: nobody else talks to it meanwhile.
pub(super) struct Talk<'a> {
    device: &'a str,
    inner: MutexGuard<'a, Inner>,
}

impl Link {
    /// Starts the process.
    pub(super) fn start(device: &str, worker: &Worker) -> Result<Self, DeviceError> {
        let absent = |e: io::Error| DeviceError::Absent {
            device: device.to_owned(),
            reason: format!("its process {} cannot be started: {e}", worker.program.display()),
        };
        let mut command = Command::new(&worker.program);
        command.args(&worker.arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        // What interrupts us is for us to handle.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().map_err(absent)?;
        let (requests, output) = (child.stdin.take().map(BufWriter::new), child.stdout.take());
        let Some(output) = output else { return Err(absent(io::ErrorKind::BrokenPipe.into())) };
        let (sender, replies) = mpsc::channel();
        let read = move || {
            let mut output = BufReader::new(output);
            // Ends with the process, or when nobody listens any more.
            while let received = wire::receive(&mut output)
                && let goes_on = received.is_ok()
                && sender.send(received).is_ok()
                && goes_on
            {}
        };
        thread::Builder::new().name("qhx-worker".into()).spawn(read).map_err(absent)?;
        Ok(Self { device: device.to_owned(), inner: Mutex::new(Inner { child, requests, replies, lost: None }) })
    }

    /// Talks to the process.
    pub(super) fn talk(&self) -> Talk<'_> {
        Talk { device: &self.device, inner: self.inner.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Whether the process is gone.
    pub(super) fn is_lost(&self) -> bool {
        self.talk().inner.lost.is_some()
    }

    /// A request and its only reply.
    pub(super) fn ask(&self, request: &Request, body: &[&[u8]]) -> Result<(Reply, Vec<u8>), DeviceError> {
        let mut talk = self.talk();
        talk.send(request, body)?;
        talk.receive()
    }

    /// A request without a reply; a process that is gone needs none.
    pub(super) fn tell(&self, request: &Request) {
        let _ = self.talk().send(request, &[]);
    }
}

impl Talk<'_> {
    pub(super) fn send(&mut self, request: &Request, body: &[&[u8]]) -> Result<(), DeviceError> {
        let sent = match &mut self.inner.requests {
            Some(requests) => wire::send(requests, request, body),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        sent.map_err(|e| self.give_up(e.to_string()))
    }

    /// The next reply; [`Reply::Failed`] is an error.
    pub(super) fn receive(&mut self) -> Result<(Reply, Vec<u8>), DeviceError> {
        match self.inner.replies.recv_timeout(PATIENCE) {
            Ok(Ok((Reply::Failed(failure), _))) => Err(failure.into()),
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(e)) => Err(self.give_up(e.to_string())),
            Err(RecvTimeoutError::Disconnected) => Err(self.give_up("it has ended".into())),
            Err(RecvTimeoutError::Timeout) => Err(self.give_up(format!("it did not reply within {} s", PATIENCE.as_secs()))),
        }
    }

    /// The error for a reply that does not belong to its request.
    pub(super) fn unexpected(&mut self) -> DeviceError {
        self.give_up("it replied something else than was asked".into())
    }

    /// Ends the process: whatever it holds is lost.
    fn give_up(&mut self, reason: String) -> DeviceError {
        let Inner { child, requests, lost, .. } = &mut *self.inner;
        if lost.is_none() {
            *requests = None;
            let _ = child.kill();
            let ended = child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
            *lost = Some(format!("its process is gone ({reason}; {ended})"));
        }
        DeviceError::Lost { device: self.device.to_owned(), reason: lost.clone().unwrap_or_default() }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // It ends when its input does; a driver that hangs is not waited for.
        self.requests = None;
        for _ in 0..200 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
