//! `qhx serve --isolate`: the server runs in a process of its own, which is started again when it crashes. The socket stays here: the address remains, and whoever connects
//! meanwhile waits until there is a server again.
//!
//! The process is this program again, with the socket as its output. Its input tells it when to stop: one byte is the wish, and the end of input means that we are gone.

use crate::{failure::Failure, interrupt::Interrupt, output};
use std::{
    env,
    io::{self, Read, Write},
    net::TcpListener,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{self, Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// A process that crashes is started again so many times in [`WITHIN`]: what crashes more often needs a person.
const RESTARTS: usize = 3;
const WITHIN: Duration = Duration::from_secs(600);
/// How often it is looked whether the process has ended, or is to end.
const LOOK: Duration = Duration::from_millis(50);
/// What the process may take to end beyond the time for running answers.
const GRACE: Duration = Duration::from_secs(2);

/// Runs `qhx serve` with the arguments of this process on a socket, until it ends, is stopped, or has crashed too often. `drain` is what running answers may take to finish.
pub(crate) fn supervise(listener: &TcpListener, drain: Duration, interrupt: &Interrupt) -> Result<(), Failure> {
    let broken = |error: io::Error| Failure::work(format!("cannot run the server in a process of its own: {error}"));
    let mut crashes: Vec<Instant> = Vec::new();
    loop {
        let status = start(listener).and_then(|child| wait(child, drain, interrupt)).map_err(broken)?;
        match status.code() {
            Some(0) => return Ok(()),
            // It has said why.
            Some(code @ 1..=2) => return Err(Failure::told(code as u8)),
            _ if interrupt.is_set() => return Err(Failure::work(format!("the server did not stop in time: {status}"))),
            _ => {}
        }
        crashes.retain(|then| then.elapsed() < WITHIN);
        if crashes.len() == RESTARTS {
            let message = format!("the server has crashed again ({status}) after {RESTARTS} restarts in {} minutes", WITHIN.as_secs() / 60);
            return Err(Failure::work(message).hint("its log above may tell why; a request that crashes it would do so again"));
        }
        crashes.push(Instant::now());
        output::note(&format!("note: the server has crashed ({status}) and is started again: restart {} of {RESTARTS}", crashes.len()));
    }
}

/// In the process: the socket to serve. The process stops when the one that started it says so, and ends with it.
pub(crate) fn inherited_socket(interrupt: &Interrupt) -> Result<TcpListener, Failure> {
    let interrupt = interrupt.clone();
    let obey = move || {
        let mut input = io::stdin().lock();
        if input.read_exact(&mut [0]).is_ok() {
            interrupt.stop();
        }
        let _ = io::copy(&mut input, &mut io::sink());
        qhx_bundle::files::remove_temporaries();
        process::exit(1);
    };
    let socket = io::stdout().as_fd().try_clone_to_owned();
    let obeys = thread::Builder::new().name("qhx-supervised".into()).spawn(obey);
    let both = socket.and_then(|socket| obeys.map(|_| TcpListener::from(socket)));
    both.map_err(|error| Failure::work(format!("cannot take over the socket: {error}")))
}

fn start(listener: &TcpListener) -> io::Result<Child> {
    let mut command = Command::new(env::current_exe()?);
    command.args(["serve", "--supervised"]).args(env::args_os().skip(2));
    command.stdin(Stdio::piped()).stdout(OwnedFd::from(listener.try_clone()?));
    // What interrupts us is for us to handle.
    command.process_group(0).spawn()
}

/// Waits for the process to end, and asks it to once that is asked of us.
fn wait(mut child: Child, drain: Duration, interrupt: &Interrupt) -> io::Result<ExitStatus> {
    let mut control = child.stdin.take();
    let mut asked: Option<Instant> = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        match asked {
            None if interrupt.is_set() => {
                // One that has just ended needs no asking.
                let _ = control.as_mut().map(|control| control.write_all(b"."));
                asked = Some(Instant::now());
            }
            Some(then) if then.elapsed() > drain + GRACE => child.kill()?,
            _ => {}
        }
        thread::sleep(LOOK);
    }
}
