//! Answers that are sent as they come. A client that reads slowly fills its own buffer and no other; one that is gone ends its answer.

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::Response,
};
use futures_core::Stream;
use serde::Serialize;
use std::{
    convert::Infallible,
    future::Future,
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    sync::mpsc,
    task::spawn_blocking,
    time::{sleep, timeout},
};

/// Frames that wait for a client before it holds its own answer up.
const BUFFERED: usize = 256;
/// How long servers and clients bear with each other.
const PATIENCE: Patience = Patience { read: Duration::from_secs(60), keep_alive: Duration::from_secs(10) };

#[derive(Clone, Copy)]
struct Patience {
    /// How long a client may take no frame.
    read: Duration,
    /// How often a client that waits is told that its answer is on its way.
    keep_alive: Duration,
}

/// The client is gone, or takes nothing.
#[derive(Debug)]
pub(crate) struct Gone;

/// Where frames go.
pub(crate) struct Sink {
    frames: mpsc::Sender<Bytes>,
    kind: Kind,
    patience: Patience,
}

/// How frames are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Server-sent events.
    Events,
    /// A line of JSON each.
    Lines,
}

struct Frames(mpsc::Receiver<Bytes>);

impl Stream for Frames {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|frame| frame.map(Ok))
    }
}

/// A response whose body `work` writes.
pub(crate) fn respond<F: Future<Output = Result<(), Gone>> + Send + 'static>(kind: Kind, work: impl FnOnce(Sink) -> F) -> Response {
    let (frames, receiver) = mpsc::channel(BUFFERED);
    let work = work(Sink { frames, kind, patience: PATIENCE });
    tokio::spawn(work);
    let mut response = Response::new(Body::from_stream(Frames(receiver)));
    let content_type = match kind {
        Kind::Events => "text/event-stream; charset=utf-8",
        Kind::Lines => "application/x-ndjson",
    };
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies are not to collect it.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl Kind {
    fn frame(self, value: &impl Serialize) -> Result<String, Gone> {
        let json = serde_json::to_string(value).map_err(|_| Gone)?;
        Ok(match self {
            Self::Events => format!("data: {json}\n\n"),
            Self::Lines => format!("{json}\n"),
        })
    }
}

impl Sink {
    /// A frame of JSON.
    pub(crate) async fn send(&self, value: &impl Serialize) -> Result<(), Gone> {
        self.raw(self.kind.frame(value)?).await
    }

    /// The same for much, which is written on a thread for that.
    pub(crate) async fn send_large(&self, value: impl Serialize + Send + 'static) -> Result<(), Gone> {
        let kind = self.kind;
        let frame = spawn_blocking(move || kind.frame(&value)).await;
        self.raw(frame.map_err(|_| Gone)??).await
    }

    /// A named event.
    pub(crate) async fn event(&self, name: &str, value: &impl Serialize) -> Result<(), Gone> {
        let json = serde_json::to_string(value).map_err(|_| Gone)?;
        self.raw(format!("event: {name}\ndata: {json}\n\n")).await
    }

    /// A named event whose JSON comes in parts: what several events have in common is not copied.
    pub(crate) async fn event_in_parts<const N: usize>(&self, name: &str, json: [Bytes; N]) -> Result<(), Gone> {
        self.raw(format!("event: {name}\ndata: ")).await?;
        for part in json {
            self.raw(part).await?;
        }
        self.raw("\n\n").await
    }

    /// What ends a stream of the OpenAI API.
    pub(crate) async fn done(&self) -> Result<(), Gone> {
        self.raw("data: [DONE]\n\n").await
    }

    async fn raw(&self, text: impl Into<Bytes>) -> Result<(), Gone> {
        match timeout(self.patience.read, self.frames.send(text.into())).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(Gone),
        }
    }

    /// Waits for something, as long as the client does; it is told now and then that it is not forgotten.
    pub(crate) async fn wait_for<T>(&self, what: impl Future<Output = T>) -> Result<T, Gone> {
        let mut what = pin!(what);
        loop {
            tokio::select! {
                // What has come is sent before it is looked whether the client is there.
                biased;
                value = &mut what => return Ok(value),
                () = self.frames.closed() => return Err(Gone),
                () = sleep(self.patience.keep_alive) => match self.kind {
                    Kind::Events => self.raw(": keep-alive\n\n").await?,
                    Kind::Lines => {}
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{future::pending, time::Instant};

    /// A sink with room for two frames whose patience is short.
    fn sink(kind: Kind) -> (Sink, mpsc::Receiver<Bytes>) {
        let (frames, receiver) = mpsc::channel(2);
        let patience = Patience { read: Duration::from_millis(50), keep_alive: Duration::from_millis(5) };
        (Sink { frames, kind, patience }, receiver)
    }

    fn wait<T>(work: impl Future<Output = T>) -> T {
        let threads = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        threads.block_on(async { timeout(Duration::from_secs(20), work).await }).expect("it ends")
    }

    #[test]
    fn whoever_waits_is_told_that_the_answer_is_on_its_way() {
        let (sink, mut frames) = sink(Kind::Events);
        wait(async {
            tokio::select! {
                _ = sink.wait_for(pending::<()>()) => panic!("the client is still there"),
                () = async {
                    for _ in 0..3 {
                        assert_eq!(&frames.recv().await.unwrap()[..], b": keep-alive\n\n");
                    }
                } => {}
            }
        });
        // Lines of JSON have no comments.
        let (sink, mut frames) = self::sink(Kind::Lines);
        wait(async {
            assert!(timeout(Duration::from_millis(40), sink.wait_for(pending::<()>())).await.is_err());
            assert!(frames.try_recv().is_err());
        });
    }

    #[test]
    fn whoever_is_gone_is_not_waited_for() {
        for kind in [Kind::Events, Kind::Lines] {
            let (mut sink, frames) = sink(kind);
            // Nothing is sent that could fail.
            sink.patience.keep_alive = Duration::from_secs(3600);
            wait(async { tokio::join!(async { assert!(sink.wait_for(pending::<()>()).await.is_err()) }, async { drop(frames) }) });
            assert!(wait(sink.done()).is_err());
        }
    }

    #[test]
    fn whoever_takes_nothing_is_given_up() {
        let (sink, frames) = sink(Kind::Events);
        wait(async {
            sink.send(&1).await.unwrap();
            sink.send(&2).await.unwrap();
            let began = Instant::now();
            assert!(sink.send(&3).await.is_err() && began.elapsed() >= sink.patience.read);
        });
        drop(frames);
    }
}
