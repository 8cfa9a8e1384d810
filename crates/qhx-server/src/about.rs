//! What the server is and does: for operators, gateways and the page.

use crate::{
    app::App,
    body::Json,
    error::ApiError,
    generate::blocking,
    models::{Entry, Status},
};
use axum::{
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use qhx::{Model, engine::EngineStats, runtime::memory::peak_rss_bytes};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// `/metrics`
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], app.metrics.text(&app.models)).into_response()
}

/// The models that are loaded, with what their engines do.
fn loaded(app: &App) -> impl Iterator<Item = (&Entry, Model, EngineStats, Status)> {
    app.models.entries().iter().filter_map(|entry| {
        let mut status = entry.status();
        let model = status.model.take()?;
        let stats = model.engine().ok()?.stats();
        Some((&**entry, model, stats, status))
    })
}

/// `/slots`: what each engine holds.
pub(crate) async fn slots(State(app): State<Arc<App>>) -> Json<Value> {
    let slots = loaded(&app).flat_map(|(entry, model, stats, _)| {
        let (sessions, context) = (model.runtime().sessions(), model.context());
        (0..sessions).map(move |id| json!({ "id": id, "model": entry.name, "n_ctx": context, "is_processing": id < stats.active }))
    });
    Json(slots.collect())
}

/// `/loads`: how busy each engine is, for gateways.
pub(crate) async fn loads(State(app): State<Arc<App>>) -> Json<Value> {
    let loads = loaded(&app).map(|(entry, _, stats, _)| {
        json!({
            "model": entry.name,
            "num_running_reqs": stats.active,
            "num_waiting_reqs": stats.waiting,
            "num_total_reqs": stats.active + stats.waiting,
            "kv_bytes": stats.kv_bytes + stats.recurrent_bytes,
            "prefixes": stats.prefixes,
        })
    });
    Json(json!({ "loads": loads.collect::<Vec<_>>() }))
}

/// `/server_info`: the server, its models and where they run.
pub(crate) async fn server_info(State(app): State<Arc<App>>) -> Json<Value> {
    let models = loaded(&app).map(|(entry, model, stats, status)| {
        let runtime = model.runtime();
        let stages: Vec<Value> =
            runtime.placement().stages.iter().map(|stage| json!({ "stage": stage.stage, "device": stage.device })).collect();
        json!({
            "id": entry.name,
            "name": model.name(),
            "takes": model.takes(),
            "context": model.context(),
            "context_limit": runtime.context_limit(),
            "sessions": runtime.sessions(),
            "device": runtime.device().name,
            "test_device": runtime.device().is_software(),
            "memory_bytes": status.bytes,
            "stages": stages,
            "fallbacks": runtime.placement().fallbacks,
            "reasoning": model.reply_format().reasoning.is_some(),
            "engine": stats,
        })
    });
    Json(json!({
        "server": "qhx",
        "version": env!("CARGO_PKG_VERSION"),
        "models": models.collect::<Vec<_>>(),
        "model_names": app.models.entries().iter().map(|entry| &entry.name).collect::<Vec<_>>(),
        "keys": app.keys.are_needed(),
        "peak_rss_bytes": peak_rss_bytes(),
    }))
}

/// `POST /verify`
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct VerifyRequest {
    /// One that `/v1/models` lists; absent: the first.
    model: Option<String>,
}

/// `/verify`: replays the oracle that the bundle carries, on this machine.
pub(crate) async fn verify(State(app): State<Arc<App>>, Json(request): Json<VerifyRequest>) -> Result<Json<Value>, ApiError> {
    let in_use = app.models.get(request.model.as_deref())?;
    let busy = |_| ApiError::new(StatusCode::TOO_MANY_REQUESTS, "a model is being verified already").retry_after(5);
    let _alone = app.verifying.try_acquire().map_err(busy)?;
    let model = in_use.model.clone();
    let report = blocking(&app, move || model.verify().map_err(ApiError::from)).await?;
    Ok(Json(json!({ "model": in_use.entry.name, "passed": report.passed, "result": report.result })))
}

/// `/version`
pub(crate) async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}
