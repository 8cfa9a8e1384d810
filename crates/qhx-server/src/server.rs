//! The server itself: a listener, its connections, and how it stops.

use crate::{
    ServerOptions, access,
    app::{App, router},
};
use axum::Router;
use hyper::{
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use qhx::Cancel;
use std::{
    io,
    net::{SocketAddr, TcpListener as StdListener, ToSocketAddrs},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime,
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};

/// How long a client may take for the headers of a request.
const HEADER_TIME: Duration = Duration::from_secs(30);
/// How long a connection that has just been accepted has for its first request when the server stops.
const FIRST_REQUEST_TIME: Duration = Duration::from_secs(1);
/// How often it is looked whether the server is to stop, and whether models are idle.
const LOOK: Duration = Duration::from_millis(50);
/// So many bytes that requests have freed are given back to the system at once …
const MUCH: u64 = 8 << 20;
/// … and fewer after so long without requests.
const QUIET: Duration = Duration::from_millis(500);
/// How long engines may take to stop, and a model that is being loaded.
const LEAVE_TIME: Duration = Duration::from_secs(1);
/// Threads for connections: models work on their own.
const THREADS: usize = 2;

/// Why a server does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The address cannot be used.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// The threads cannot be started.
    #[error("cannot start the server: {0}")]
    Start(io::Error),
    /// A key that no request could bring.
    #[error("API key number {number} can never match: a key consists of visible ASCII characters without surrounding spaces")]
    Key {
        /// Which of them, from 1: a key itself is not told.
        number: usize,
    },
    /// There is nothing to serve.
    #[error("no model is named: a server needs one")]
    NoModel,
    /// The first model cannot be loaded.
    #[error("{model} cannot be loaded: {problem}")]
    Model {
        /// Its name.
        model: String,
        /// What is wrong.
        problem: String,
    },
}

/// A server that has an address.
pub struct Server {
    listener: StdListener,
    address: SocketAddr,
    options: ServerOptions,
}

impl Server {
    /// Takes an address; port 0 is any that is free. Connections wait until [`Server::run`].
    pub fn bind(address: impl ToSocketAddrs + std::fmt::Display, options: ServerOptions) -> Result<Self, ServerError> {
        let wrong = |source| ServerError::Listen { address: address.to_string(), source };
        Self::on(StdListener::bind(&address).map_err(wrong)?, options)
    }

    /// Takes a socket that listens already.
    pub fn on(listener: StdListener, options: ServerOptions) -> Result<Self, ServerError> {
        if options.models.is_empty() {
            return Err(ServerError::NoModel);
        }
        if let Some(place) = options.keys.iter().position(|key| !access::can_be_sent(key)) {
            return Err(ServerError::Key { number: place + 1 });
        }
        let wrong = |source| ServerError::Listen { address: "the given socket".into(), source };
        listener.set_nonblocking(true).map_err(wrong)?;
        let address = listener.local_addr().map_err(wrong)?;
        Ok(Self { listener, address, options })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` is set; then finishes what runs, within the time that the options give. While the first model loads, everything but its progress is answered with 503;
    /// `ready` is called once it is there. A first model that cannot be loaded is an error.
    pub fn run(self, stop: Cancel, ready: impl FnOnce()) -> Result<(), ServerError> {
        let threads = runtime::Builder::new_multi_thread().worker_threads(THREADS).thread_name("qhx-http").enable_all().build();
        let threads = threads.map_err(ServerError::Start)?;
        let app = Arc::new(App::new(self.options, stop.clone()));
        let (stopping, stopped) = watch::channel(false);
        let listener = {
            let _inside = threads.enter();
            TcpListener::from_std(self.listener).map_err(ServerError::Start)?
        };
        let accepting = threads.spawn(accept(listener, router(app.clone()), app.clone(), stopped));
        let loaded = load_first(&app, &stop);
        if loaded.is_ok() && !stop.is_cancelled() {
            ready();
            let mut freed = Freed::new();
            while !stop.is_cancelled() {
                thread::sleep(LOOK);
                app.models.unload_idle();
                if freed.is_worth_giving_back(app.bodies.freed(), Instant::now()) {
                    (app.options.give_back)();
                }
            }
        }
        app.draining.store(true, Ordering::Relaxed);
        let _ = stopping.send(true);
        let drain = if loaded.is_ok() { app.options.drain } else { Duration::ZERO };
        let ended = threads.block_on(async { timeout(drain, accepting).await });
        if ended.is_err() {
            tracing::warn!("some answers did not finish in time");
        }
        threads.shutdown_timeout(LOOK);
        // Whoever was to be answered is, or has been told. An engine may be in the middle of something long.
        if until_stopped("qhx-leave", &stop, move || drop(app)).is_ok_and(|left| left.is_none()) {
            tracing::warn!("an engine has not stopped in time");
        }
        loaded
    }
}

/// Does work on a thread of its own; none if it is not done soon after `stop` is set.
fn until_stopped<T: Send + 'static>(name: &str, stop: &Cancel, work: impl FnOnce() -> T + Send + 'static) -> io::Result<Option<T>> {
    let (to, done) = mpsc::sync_channel(1);
    let work = move || drop(to.send(work()));
    thread::Builder::new().name(name.to_owned()).spawn(work)?;
    while !stop.is_cancelled() {
        match done.recv_timeout(LOOK) {
            Ok(done) => return Ok(Some(done)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other(format!("the thread {name} has ended: this is a bug"))),
        }
    }
    Ok(done.recv_timeout(LEAVE_TIME).ok())
}

/// Loads the first model.
fn load_first(app: &Arc<App>, stop: &Cancel) -> Result<(), ServerError> {
    let Some(first) = app.models.entries().first().cloned() else { return Err(ServerError::NoModel) };
    let (models, name) = (app.models.clone(), first.name.clone());
    let loaded = until_stopped("qhx-load", stop, move || models.load(&first)).map_err(ServerError::Start)?;
    match loaded.unwrap_or_else(|| Some("the server was stopped".to_owned())) {
        None => Ok(()),
        Some(problem) => Err(ServerError::Model { model: name, problem }),
    }
}

/// When freed memory is given back to the system: once it is much, and once no more follows.
struct Freed {
    given_back: u64,
    last: u64,
    since: Instant,
}

impl Freed {
    fn new() -> Self {
        Self { given_back: 0, last: 0, since: Instant::now() }
    }

    /// `freed` is all that was ever freed.
    fn is_worth_giving_back(&mut self, freed: u64, now: Instant) -> bool {
        if freed != self.last {
            (self.last, self.since) = (freed, now);
        }
        let is_quiet = now.duration_since(self.since) >= QUIET;
        let is_worth = freed - self.given_back >= MUCH || is_quiet && freed > self.given_back;
        if is_worth {
            self.given_back = freed;
        }
        is_worth
    }
}

/// Takes connections, no more than may be, until the server stops; then waits for them to end, and tells whoever comes meanwhile.
async fn accept(listener: TcpListener, router: Router, app: Arc<App>, mut stopped: watch::Receiver<bool>) {
    let most = app.options.connections.min(Semaphore::MAX_PERMITS);
    let places = Arc::new(Semaphore::new(most));
    loop {
        let next = async {
            let place = places.clone().acquire_owned().await;
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            next = next => next,
            _ = stopped.changed() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, for one: others will be closed.
                tracing::warn!(%error, "cannot accept a connection");
                sleep(LOOK).await;
                continue;
            }
        };
        let (router, stopped) = (router.clone(), stopped.clone());
        tokio::spawn(async move {
            serve(stream, router, stopped, true).await;
            drop(place);
        });
    }
    let turn_away = async {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => drop(tokio::spawn(serve(stream, router.clone(), stopped.clone(), false))),
                Err(_) => sleep(LOOK).await,
            }
        }
    };
    tokio::select! {
        _ = places.acquire_many(most as u32) => {}
        () = turn_away => {}
    }
}

/// Serves a connection: one request, or all that come.
async fn serve(stream: TcpStream, router: Router, mut stopped: watch::Receiver<bool>, keep_alive: bool) {
    let asked = AtomicBool::new(false);
    let router = TowerToHyperService::new(router);
    let service = service_fn(|request| {
        asked.store(true, Ordering::Relaxed);
        router.call(request)
    });
    // Tokens are small, and are to leave at once.
    let _ = stream.set_nodelay(true);
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_TIME).keep_alive(keep_alive);
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        _ = stopped.changed() => {
            // A request may be on its way: it is answered, be it by a refusal.
            let first = if asked.load(Ordering::Relaxed) { Duration::ZERO } else { FIRST_REQUEST_TIME };
            match timeout(first, connection.as_mut()).await {
                Ok(ended) => ended,
                Err(_) => {
                    // The answer that runs is the last of this connection.
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic;

    /// An engine in the middle of something long, or a disk that does not answer.
    #[test]
    fn what_does_not_end_is_not_waited_for() {
        let (go_on, never) = mpsc::channel::<()>();
        struct Slow(mpsc::Receiver<()>);
        impl Drop for Slow {
            fn drop(&mut self) {
                let _ = self.0.recv();
            }
        }
        let (stop, slow, began) = (Cancel::new(), Slow(never), Instant::now());
        let stopping = stop.clone();
        let stops = thread::spawn(move || stopping.cancel());
        assert_eq!(until_stopped("slow", &stop, move || drop(slow)).unwrap(), None);
        assert!((LEAVE_TIME..LEAVE_TIME * 20).contains(&began.elapsed()));
        stops.join().unwrap();
        // What ends is what counts, before the stop and after it.
        assert_eq!(until_stopped("quick", &stop, || 1).unwrap(), Some(1));
        assert_eq!(until_stopped("quick", &Cancel::new(), || 2).unwrap(), Some(2));
        assert!(until_stopped::<()>("panics", &Cancel::new(), || panic::resume_unwind(Box::new(()))).is_err());
        drop(go_on);
    }

    #[test]
    fn memory_is_given_back_once_it_is_much_or_no_more_follows() {
        let (mut freed, began) = (Freed::new(), Instant::now());
        let mut is_due = |bytes, milliseconds| freed.is_worth_giving_back(bytes, began + Duration::from_millis(milliseconds));
        assert!(!is_due(0, 10_000), "nothing was freed");
        assert!(!is_due(900_000, 10_010));
        assert!(!is_due(MUCH - 1, 10_020));
        assert!(is_due(MUCH, 10_030));
        assert!(!is_due(MUCH, 20_000));
        assert!(!is_due(MUCH + 1, 20_010));
        assert!(is_due(MUCH + 1, 20_510));
        assert!(!is_due(MUCH + 1, 30_000));
    }
}
