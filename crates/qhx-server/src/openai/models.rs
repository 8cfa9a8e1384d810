//! `/v1/models`

use crate::{
    app::{App, seconds},
    body::Json,
    error::ApiError,
    models::Entry,
};
use axum::extract::{Path, State};
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let data: Vec<Value> = app.models.entries().iter().map(|entry| about(entry)).collect();
    Json(json!({ "object": "list", "data": data }))
}

pub(crate) async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    Ok(Json(about(app.models.find(Some(&name))?)))
}

fn about(entry: &Entry) -> Value {
    let status = entry.status();
    let mut about = json!({
        "id": entry.name,
        "object": "model",
        "created": seconds(entry.since),
        "owned_by": "qhx",
        "status": { "value": status.state, "about": status.about },
    });
    if let Some(model) = status.model {
        about["max_model_len"] = model.context().into();
        about["takes"] = model.takes().into();
        about["device"] = model.runtime().device().name.clone().into();
    }
    about
}
