//! Bodies of requests and responses: JSON, of limited size, in limited time, with every field known.

use crate::{app::App, error::ApiError};
use axum::{
    body::{Bytes, to_bytes},
    extract::{FromRequest, Request},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::{Serialize, de::DeserializeOwned};
use std::{sync::Arc, time::Duration};
use tokio::time::timeout;

/// How long a client may take to send a request.
const SEND_TIME: Duration = Duration::from_secs(60);

/// A request or a response in JSON.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let bytes = whole(request, app.options.body_bytes).await?;
        read(&bytes).map(Self)
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
    let declared = request.headers().get("content-length").and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|length| length > most as u64) {
        return Err(too_large());
    }
    match timeout(SEND_TIME, to_bytes(request.into_body(), most)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(_)) => Err(too_large()),
        Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the request did not arrive in time")),
    }
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
