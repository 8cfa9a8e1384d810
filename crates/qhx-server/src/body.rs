//! Bodies of requests and responses: JSON, of limited size, in limited time, with every field known.

use crate::{app::App, error::ApiError, json_size};
use axum::{
    body::{Bytes, HttpBody},
    extract::{FromRequest, Request, State},
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
    time::timeout,
};

/// How long a client may take to send a request.
const SEND_TIME: Duration = Duration::from_secs(60);
/// What is larger is read on a thread for that: others wait for this one.
const READ_AT_ONCE: usize = 16 << 10;
/// So many bytes of a request need no room.
const FREE_BYTES: usize = 64 << 10;
/// Room is counted in units of so many bytes.
const UNIT: usize = 1 << 10;

/// Memory for the bodies of all requests and what is read from them.
pub(crate) struct Bodies {
    room: Arc<Semaphore>,
    /// Bytes that requests have taken and freed since the server began.
    freed: AtomicU64,
}

/// What a request takes of it.
struct Room {
    bodies: Arc<Bodies>,
    taken: Mutex<Option<OwnedSemaphorePermit>>,
    /// What was asked for, even where it needed no room.
    bytes: AtomicU64,
}

impl Bodies {
    /// Room for several requests that are as large as may be.
    pub(crate) fn new(largest: usize) -> Arc<Self> {
        let units = (largest.saturating_mul(4) / UNIT).clamp(1, u32::MAX as usize);
        Arc::new(Self { room: Arc::new(Semaphore::new(units)), freed: AtomicU64::new(0) })
    }

    /// A request is done with so many bytes.
    pub(crate) fn free(&self, bytes: u64) {
        self.freed.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that requests have taken and freed since the server began.
    pub(crate) fn freed(&self) -> u64 {
        self.freed.load(Ordering::Relaxed)
    }
}

impl Room {
    /// Takes so many bytes more. A request that needs few always gets them.
    fn take(&self, bytes: usize) -> Result<(), ApiError> {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        if bytes < FREE_BYTES {
            return Ok(());
        }
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        let full = |_| {
            let message = "too many large requests at once: try again";
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).code("too_many_large_requests").retry_after(1)
        };
        let more = self.bodies.room.clone().try_acquire_many_owned(units).map_err(full)?;
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *taken {
            Some(taken) => taken.merge(more),
            none => *none = Some(more),
        }
        Ok(())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.bodies.free(*self.bytes.get_mut());
    }
}

/// Gives each request its room, until it is answered or its answer begins.
pub(crate) async fn with_room(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let room = Arc::new(Room { bodies: app.bodies.clone(), taken: Mutex::new(None), bytes: AtomicU64::new(0) });
    request.extensions_mut().insert(room.clone());
    let response = next.run(request).await;
    drop(room);
    response
}

/// A request or a response in JSON.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned + Send + 'static> FromRequest<Arc<App>> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let room = request.extensions().get::<Arc<Room>>().cloned();
        let bytes = whole(request, app.options.body_bytes).await?;
        let at_once = bytes.len() <= READ_AT_ONCE;
        let work = move || {
            let memory = json_size::measure(&bytes).map_err(ApiError::bad_request)?;
            room.map_or(Ok(()), |room| room.take(memory))?;
            read(&bytes)
        };
        let read = match at_once {
            true => work(),
            false => {
                spawn_blocking(work).await.map_err(|_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "reading the request failed"))?
            }
        };
        read.map(Self)
    }
}

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        serde_json::to_vec(&self.0).map(json).unwrap_or_else(unwritable)
    }
}

/// A response of JSON that is written already.
pub(crate) fn json(bytes: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], bytes).into_response()
}

fn unwritable(error: serde_json::Error) -> Response {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
}

/// A response that may be large: made and written on a thread for that.
pub(crate) async fn large_json<T: Serialize>(make: impl FnOnce() -> T + Send + 'static) -> Result<Response, ApiError> {
    let written = spawn_blocking(move || serde_json::to_vec(&make())).await;
    let written = written.map_err(|_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "writing the answer failed: this is a bug"))?;
    Ok(written.map(json).unwrap_or_else(unwritable))
}

/// The bytes of a body, if they are not too many.
pub(crate) async fn whole(request: Request, most: usize) -> Result<Bytes, ApiError> {
    let too_large = || ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the request has more than {most} bytes"));
    for value in request.headers().get_all(header::CONTENT_ENCODING) {
        let coding = String::from_utf8_lossy(value.as_bytes());
        if !coding.trim().eq_ignore_ascii_case("identity") {
            let message = format!("the content coding `{coding}` is not supported: send the request uncompressed");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
    }
    let declared = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|length| length > most as u64) {
        return Err(too_large());
    }
    let room = request.extensions().get::<Arc<Room>>().cloned();
    let mut body = request.into_body();
    let collect = async {
        let (mut bytes, mut counted) = (Vec::new(), FREE_BYTES);
        while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            let frame = frame.map_err(|error| ApiError::bad_request(format!("the body does not match its headers: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if data.len() > most - bytes.len() {
                return Err(too_large());
            }
            bytes.extend_from_slice(&data);
            if let Some(room) = room.as_ref().filter(|_| bytes.len() > counted) {
                // A body grows by copying: it has room for twice as much.
                room.take(FREE_BYTES.max(bytes.capacity() - counted))?;
                counted = bytes.capacity().max(counted + FREE_BYTES);
            }
        }
        Ok(Bytes::from(bytes))
    };
    let late = |_| Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the request did not arrive in time"));
    timeout(SEND_TIME, collect).await.unwrap_or_else(late)
}

/// A body in JSON, and nothing behind it.
fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| wrong(&error.path().to_string(), error.inner()))?;
    json.end().map_err(|error| wrong(".", &error))?;
    Ok(value)
}

/// What is wrong with a body; the field that is to blame is named. `path` is as far as it was read, a dot where it is the whole.
fn wrong(path: &str, error: &serde_json::Error) -> ApiError {
    let text = error.to_string();
    let named = text.split_once('`').and_then(|(before, rest)| Some((before, rest.split_once('`')?.0)));
    let below = |name: &str| match path {
        "." => name.to_owned(),
        path if path == name || path.ends_with(&format!(".{name}")) => path.to_owned(),
        path => format!("{path}.{name}"),
    };
    match named {
        Some(("unknown field ", name)) => ApiError::field(below(name), "is not supported").code("unsupported_field"),
        Some(("missing field ", name)) => ApiError::field(below(name), "is missing"),
        _ if path == "." || error.is_syntax() || error.is_eof() => {
            ApiError::bad_request(format!("the request is not what was expected: {text}"))
        }
        _ => ApiError::field(path, format!("is not what was expected: {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::requests::ChatRequest;

    #[test]
    fn the_field_that_is_wrong_is_named() {
        let wrong = |body: &str| read::<ChatRequest>(body.as_bytes()).map(|_| ()).unwrap_err();
        for (body, param) in [
            (r#"{"messages": [], "frobnicate": 1}"#, "frobnicate"),
            (r#"{"n": 1}"#, "messages"),
            (r#"{"messages": [], "n": "three"}"#, "n"),
            (r#"{"messages": [], "stop": 5}"#, "stop"),
            (r#"{"messages": [], "stream_options": {"include_all": true}}"#, "stream_options.include_all"),
            (r#"{"messages": [], "response_format": {"type": "json_schema"}}"#, "response_format.json_schema"),
            (r#"{"messages": [], "tool_choice": {"type": "allowed_tools"}}"#, "tool_choice"),
        ] {
            let error = wrong(body);
            assert_eq!(error.param.as_deref(), Some(param), "{body}: {}", error.message);
            assert!(error.message.contains(param) && !error.message.contains("untagged"), "{}", error.message);
        }
        for body in ["", "{", "[]", "{\"messages\": []} more"] {
            assert_eq!(wrong(body).param, None, "{body}");
        }
    }
}
