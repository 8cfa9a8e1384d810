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
        match serde_json::from_slice(&bytes) {
            Ok(value) => Ok(Self(value)),
            Err(error) => Err(wrong(&error)),
        }
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

/// What is wrong with a body; a field that is not known is named.
fn wrong(error: &serde_json::Error) -> ApiError {
    let text = error.to_string();
    let named = text.split_once('`').and_then(|(before, rest)| Some((before, rest.split_once('`')?.0)));
    match named {
        Some(("unknown field ", name)) => {
            ApiError { param: Some(name.to_owned()), ..ApiError::bad_request(format!("`{name}` is not supported")) }
                .code("unsupported_field")
        }
        Some(("missing field ", name)) => {
            ApiError { param: Some(name.to_owned()), ..ApiError::bad_request(format!("`{name}` is missing")) }
        }
        _ => ApiError::bad_request(format!("the request is not what was expected: {text}")),
    }
}
