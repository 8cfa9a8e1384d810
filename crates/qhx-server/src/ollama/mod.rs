//! The API of ollama: `/api/chat`, `/api/generate`, `/api/tags`, `/api/show`, `/api/ps`, `/api/version`.

mod answer;
mod time;
pub(crate) mod types;

use crate::{
    about,
    app::App,
    body::Json,
    error::ApiError,
    models::{Entry, Status},
};
use axum::extract::State;
use serde_json::{Value, json};
use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};
use types::ShowRequest;

pub(crate) use answer::{chat, generate};

/// What is known of a model; little where it is not loaded.
fn details(status: &Status) -> Value {
    let facts = status.model.as_ref().map(|model| &model.bundle().manifest().model);
    json!({
        "parent_model": "",
        "format": "qhx",
        "family": facts.map_or("", |facts| &facts.family),
        "families": facts.map(|facts| vec![&facts.family]),
        "parameter_size": facts.map_or(String::new(), |facts| format!("{:.1}M", facts.parameters as f64 / 1e6)),
        "quantization_level": "",
    })
}

fn listed(entry: &Entry) -> Value {
    let status = entry.status();
    json!({
        "name": entry.name,
        "model": entry.name,
        "modified_at": time::written(entry.since),
        "size": status.bytes,
        "digest": status.model.as_ref().map(|model| model.runtime().fingerprint().to_owned()).unwrap_or_default(),
        "details": details(&status),
    })
}

pub(crate) async fn tags(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "models": app.models.entries().iter().map(|entry| listed(entry)).collect::<Vec<_>>() }))
}

pub(crate) async fn ps(State(app): State<Arc<App>>) -> Json<Value> {
    let loaded = app.models.entries().iter().filter_map(|entry| {
        let status = entry.status();
        status.model.as_ref()?;
        // One that stays is said to stay for a long time.
        const LONG: Duration = Duration::from_secs(100 * 365 * 86_400);
        let left = status.keep_alive.map_or(LONG, |after| after.saturating_sub(status.last_used.map_or(after, |used| used.elapsed())));
        let mut about = listed(entry);
        about["size_vram"] = json!(0);
        about["expires_at"] = time::written(SystemTime::now() + left).into();
        about["context_length"] = status.model.map_or(0, |model| model.context()).into();
        Some(about)
    });
    Json(json!({ "models": loaded.collect::<Vec<_>>() }))
}

pub(crate) async fn show(State(app): State<Arc<App>>, Json(request): Json<ShowRequest>) -> Result<Json<Value>, ApiError> {
    let name = request.model.or(request.name).ok_or_else(|| ApiError::field("model", "is missing"))?;
    let in_use = app.models.get(Some(&name))?;
    let (model, status) = (&in_use.model, in_use.entry.status());
    let mut capabilities = vec!["completion"];
    if model.runtime().template().is_ok() {
        capabilities.push("tools");
    }
    if model.reply_format().reasoning.is_some() {
        capabilities.push("thinking");
    }
    if model.runtime().media().image.is_some() {
        capabilities.push("vision");
    }
    if model.runtime().media().audio.is_some() {
        capabilities.push("audio");
    }
    let facts = &model.bundle().manifest().model;
    let family = &facts.family;
    Ok(Json(json!({
        "modelfile": "",
        "parameters": "",
        "license": "",
        "template": model.runtime().template().map(|chat| chat.template.source().to_owned()).unwrap_or_default(),
        "modified_at": time::written(in_use.entry.since),
        "details": details(&status),
        "model_info": {
            "general.architecture": family,
            "general.basename": model.name(),
            "general.parameter_count": facts.parameters,
            format!("{family}.context_length"): facts.context_length,
        },
        "capabilities": capabilities,
    })))
}

pub(crate) async fn version() -> Json<Value> {
    about::version().await
}
