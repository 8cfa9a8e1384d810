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
    time::{sleep, timeout},
};

/// Frames that wait for a client before it holds its own answer up.
const BUFFERED: usize = 256;
/// How long a client may take none.
const READ_TIME: Duration = Duration::from_secs(60);
/// How often a client that waits is told that its answer is on its way.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The client is gone, or takes nothing.
#[derive(Debug)]
pub(crate) struct Gone;

/// Where frames go.
pub(crate) struct Sink {
    frames: mpsc::Sender<Bytes>,
    kind: Kind,
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
    let work = work(Sink { frames, kind });
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

impl Sink {
    /// A frame of JSON.
    pub(crate) async fn send(&self, value: &impl Serialize) -> Result<(), Gone> {
        let json = serde_json::to_string(value).map_err(|_| Gone)?;
        match self.kind {
            Kind::Events => self.raw(format!("data: {json}\n\n")).await,
            Kind::Lines => self.raw(format!("{json}\n")).await,
        }
    }

    /// A named event.
    pub(crate) async fn event(&self, name: &str, value: &impl Serialize) -> Result<(), Gone> {
        let json = serde_json::to_string(value).map_err(|_| Gone)?;
        self.raw(format!("event: {name}\ndata: {json}\n\n")).await
    }

    /// What ends a stream of the OpenAI API.
    pub(crate) async fn done(&self) -> Result<(), Gone> {
        self.raw("data: [DONE]\n\n".to_owned()).await
    }

    async fn raw(&self, text: String) -> Result<(), Gone> {
        match timeout(READ_TIME, self.frames.send(text.into())).await {
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
                () = sleep(KEEP_ALIVE) => match self.kind {
                    Kind::Events => self.raw(": keep-alive\n\n".to_owned()).await?,
                    Kind::Lines => {}
                },
            }
        }
    }
}
