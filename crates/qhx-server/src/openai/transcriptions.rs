//! `/v1/audio/transcriptions`: a sound file to text, by a model that hears.

use crate::{
    access::Caller,
    app::App,
    body::{Json, whole},
    error::ApiError,
    generate::{self, ChatJob, Collected, Sampling},
    messages::object,
    multipart::Fields,
};
use axum::{
    Extension,
    body::Bytes,
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use qhx::Model;
use schemars::JsonSchema;
use serde_json::{Map, json};
use std::{collections::HashSet, sync::Arc};

/// What a model is asked to do with a sound.
const INSTRUCTION: &str = "Transcribe this speech.";

/// The form that is sent. A field that is not here is refused by its name.
#[derive(Default, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct TranscriptionForm {
    /// A sound file.
    #[schemars(required, with = "String", extend("format" = "binary"))]
    file: Option<Bytes>,
    /// One that `/v1/models` lists; absent: the first.
    model: Option<String>,
    /// What the model is asked to do, instead of to transcribe.
    prompt: Option<String>,
    /// The language that is spoken.
    language: Option<String>,
    /// `json` or `text`.
    response_format: Option<String>,
    temperature: Option<f32>,
}

impl TranscriptionForm {
    fn read(kind: &str, bytes: &Bytes) -> Result<Self, ApiError> {
        let wrong = |problem: String| ApiError::bad_request(format!("the form cannot be read: {problem}"));
        let mut form = Self::default();
        let mut seen = HashSet::new();
        for field in Fields::new(kind, bytes).map_err(wrong)? {
            let field = field.map_err(wrong)?;
            if !seen.insert(field.name.clone()) {
                return Err(ApiError::field(field.name, "occurs twice in the form"));
            }
            let text = || String::from_utf8_lossy(field.value).trim().to_owned();
            match field.name.as_str() {
                "file" => form.file = Some(bytes.slice_ref(field.value)),
                "model" => form.model = Some(text()),
                "prompt" => form.prompt = Some(text()),
                "language" => form.language = Some(text()),
                "response_format" => form.response_format = Some(text()),
                "temperature" => form.temperature = Some(text().parse().map_err(|_| ApiError::field("temperature", "must be a number"))?),
                other => return Err(ApiError::field(other, "is not supported").code("unsupported_field")),
            }
        }
        Ok(form)
    }

    fn instruction(&self) -> String {
        let instruction = self.prompt.as_deref().unwrap_or(INSTRUCTION);
        match &self.language {
            Some(language) => format!("{instruction} Its language is `{language}`."),
            None => instruction.to_owned(),
        }
    }
}

pub(crate) async fn answer(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE).map(|kind| String::from_utf8_lossy(kind.as_bytes()).into_owned());
    let bytes = whole(request, app.options.body_bytes).await?;
    let form = generate::blocking(&app, move || TranscriptionForm::read(&kind.unwrap_or_default(), &bytes)).await?;
    let format = form.response_format.as_deref().unwrap_or("json");
    if !["json", "text"].contains(&format) {
        return Err(ApiError::field("response_format", "can only be `json` or `text`"));
    }
    let sound = form.file.clone().ok_or_else(|| ApiError::field("file", "is missing"))?;
    let in_use = app.models.get(form.model.as_deref())?;
    let (instruction, temperature) = (form.instruction(), form.temperature.unwrap_or(0.0));
    let prepare = move |_: &Model| {
        // What kind of file it is shows in its bytes.
        let data = object([("data", base64::encode(sound).into())]);
        let audio = object([("type", "input_audio".into()), ("input_audio", data)]);
        let text = object([("type", "text".into()), ("text", instruction.into())]);
        let messages = vec![object([("role", "user".into()), ("content", vec![audio, text].into())])];
        let sampling = Sampling { temperature: Some(temperature), ..Sampling::default() };
        Ok(ChatJob { messages, tools: None, template_options: Map::new(), sampling, choices: 1 })
    };
    let job = generate::prepared(&app, &in_use, prepare).await?;
    let replies = generate::reply(&app, &in_use, caller, job).await?;
    let Some(Collected { content, .. }) = replies.collect().await?.pop() else {
        return Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "there is no answer"));
    };
    let text = content.trim();
    match format {
        "text" => {
            Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"))], format!("{text}\n")).into_response())
        }
        _ => Ok(Json(json!({ "text": text })).into_response()),
    }
}
