//! `/v1/audio/transcriptions`: a sound file to text, by a model that hears.

use crate::{
    access::Caller,
    app::App,
    body::{Json, whole},
    error::ApiError,
    generate::{self, ChatJob, Collected, Sampling},
};
use axum::{
    Extension,
    extract::{FromRequest, Multipart, Request, State},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Map, json};
use std::sync::Arc;

/// What a model is asked to do with a sound.
const INSTRUCTION: &str = "Transcribe this speech.";

pub(crate) async fn answer(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let bytes = whole(Request::from_parts(parts.clone(), body), app.options.body_bytes).await?;
    let wrong = |problem: String| ApiError::bad_request(format!("the form cannot be read: {problem}"));
    let mut form =
        Multipart::from_request(Request::from_parts(parts, bytes.into()), &()).await.map_err(|error| wrong(error.to_string()))?;
    let (mut sound, mut model, mut prompt, mut format) = (None, None, None, "json".to_owned());
    let mut sampling = Sampling { temperature: Some(0.0), ..Sampling::default() };
    while let Some(field) = form.next_field().await.map_err(|error| wrong(error.to_string()))? {
        let name = field.name().unwrap_or_default().to_owned();
        let value = field.bytes().await.map_err(|error| wrong(error.to_string()))?;
        let text = || String::from_utf8_lossy(&value).trim().to_owned();
        match name.as_str() {
            "file" => sound = Some(value),
            "model" => model = Some(text()),
            "prompt" => prompt = Some(text()),
            "response_format" => format = text(),
            "temperature" => sampling.temperature = Some(text().parse().map_err(|_| ApiError::field("temperature", "must be a number"))?),
            "language" => prompt = Some(format!("Transcribe this speech. Its language is `{}`.", text())),
            other => return Err(ApiError::field(other, "is not supported").code("unsupported_field")),
        }
    }
    if !["json", "text"].contains(&format.as_str()) {
        return Err(ApiError::field("response_format", "can only be `json` or `text`"));
    }
    let sound = sound.ok_or_else(|| ApiError::field("file", "is missing"))?;
    let in_use = app.models.get(model.as_deref())?;
    let audio = json!({ "type": "input_audio", "input_audio": { "data": base64::encode(&sound), "format": "wav" } });
    let text = json!({ "type": "text", "text": prompt.unwrap_or_else(|| INSTRUCTION.to_owned()) });
    let messages = vec![json!({ "role": "user", "content": [audio, text] })];
    let job = ChatJob { messages, tools: None, template_options: Map::new(), sampling, choices: 1 };
    let replies = generate::reply(&app, &in_use, caller, job).await?;
    let Some(Collected { content, .. }) = replies.collect().await?.pop() else {
        return Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "there is no answer"));
    };
    let text = content.trim();
    match format.as_str() {
        "text" => {
            Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"))], format!("{text}\n")).into_response())
        }
        _ => Ok(Json(json!({ "text": text })).into_response()),
    }
}
