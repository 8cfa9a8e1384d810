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
        atomic::{AtomicBool, Ordering},
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
/// A request that needed more leaves memory behind that is worth giving back.
const MUCH: usize = 1 << 20;

/// Memory for the bodies of all requests and what is read from them.
pub(crate) struct Bodies {
    room: Arc<Semaphore>,
    /// Much has been freed since it was last asked.
    freed: AtomicBool,
}

/// What a request takes of it.
struct Room {
    bodies: Arc<Bodies>,
    taken: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Bodies {
    /// Room for several requests that are as large as may be.
    pub(crate) fn new(largest: usize) -> Arc<Self> {
        let units = (largest.saturating_mul(4) / UNIT).clamp(1, u32::MAX as usize);
        Arc::new(Self { room: Arc::new(Semaphore::new(units)), freed: AtomicBool::new(false) })
    }

    /// Whether much has been freed since it was last asked.
    pub(crate) fn has_freed_much(&self) -> bool {
        self.freed.swap(false, Ordering::Relaxed)
    }
}

impl Room {
    /// Takes so many bytes more. A request that needs few always gets them.
    fn take(&self, bytes: usize) -> Result<(), ApiError> {
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
        let taken = self.taken.get_mut().unwrap_or_else(PoisonError::into_inner);
        if taken.as_ref().is_some_and(|taken| taken.num_permits() * UNIT >= MUCH) {
            self.bodies.freed.store(true, Ordering::Relaxed);
        }
    }
}

/// Gives each request its room, until it is answered or its answer begins.
pub(crate) async fn with_room(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let room = Arc::new(Room { bodies: app.bodies.clone(), taken: Mutex::new(None) });
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
        match serde_json::to_vec(&self.0) {
            Ok(bytes) => ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], bytes).into_response(),
            Err(error) => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        }
    }
}

/// The bytes of a body, if they are not too many.
pub(crate) async fn whole(request: Request, most: usize) -> Result<Bytes, ApiError> {
    let too_large = || ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the request has more than {most} bytes"));
    let (coding, declared) = (text(&request, header::CONTENT_ENCODING), text(&request, header::CONTENT_LENGTH));
    if let Some(coding) = coding.filter(|coding| !coding.trim().eq_ignore_ascii_case("identity")) {
        let message = format!("the content coding `{coding}` is not read: send the request as it is");
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    if declared.and_then(|length| length.parse::<u64>().ok()).is_some_and(|length| length > most as u64) {
        return Err(too_large());
    }
    let room = request.extensions().get::<Arc<Room>>().cloned();
    let mut body = request.into_body();
    let collect = async {
        let (mut bytes, mut counted) = (Vec::new(), FREE_BYTES);
        while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            let frame = frame.map_err(|error| ApiError::bad_request(format!("the body is not as its headers say: {error}")))?;
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

fn text(request: &Request, name: header::HeaderName) -> Option<String> {
    request.headers().get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
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
