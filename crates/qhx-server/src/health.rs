//! Whether the server lives.

use crate::{app::App, body::Json, error::ApiError};
use axum::{extract::State, http::StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;

/// `/health`: 200 once the first model is ready, 503 with the reason before.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let status = app.models.find(None)?.status();
    match status.state {
        // It was there, and will be again when it is asked for.
        "ready" | "unloaded" => Ok(Json(json!({ "status": "ok" }))),
        state => {
            let message = format!("the model is {state}: {}", status.about.unwrap_or_default());
            Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).code("model_loading").retry_after(2))
        }
    }
}
