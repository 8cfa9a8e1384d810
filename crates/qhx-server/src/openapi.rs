//! `/openapi.json`: the description of the API, made from the types that read and write it.

use crate::{
    about::VerifyRequest,
    anthropic::types::{CountRequest, MessagesRequest, TokenCount},
    body::Json,
    ollama::types as ollama,
    openai::{
        requests::{ChatRequest, CompletionRequest},
        responses::types::ResponsesRequest,
        transcriptions::TranscriptionForm,
        types::{ChatResponse, CompletionResponse},
    },
    tokens::{DetokenizeRequest, Text, TokenizeRequest, Tokens},
};
use schemars::{
    JsonSchema, Schema, SchemaGenerator,
    generate::{Contract, SchemaSettings},
};
use serde_json::{Map, Value, json};

/// What describes the types.
struct Types {
    requests: SchemaGenerator,
    responses: SchemaGenerator,
}

impl Types {
    fn new() -> Self {
        let settings = |contract| {
            let mut settings = SchemaSettings::draft2020_12();
            settings.definitions_path = "/components/schemas".into();
            settings.meta_schema = None;
            settings.contract = contract;
            settings.into_generator()
        };
        Self { requests: settings(Contract::Deserialize), responses: settings(Contract::Serialize) }
    }
}

/// The paths, as they are collected.
struct Paths {
    types: Types,
    paths: Map<String, Value>,
}

/// What a response is.
enum Answer {
    Json(Schema),
    /// JSON, or a stream of it where the request asks for one.
    Stream(Schema, &'static str),
    Text,
}

impl Paths {
    fn add(&mut self, method: &str, path: &str, summary: &str, request: Option<Schema>, answer: Answer) {
        let json = |schema: &Schema| json!({ "application/json": { "schema": schema } });
        let content = match &answer {
            Answer::Json(schema) => json(schema),
            Answer::Stream(schema, kind) => {
                let mut content = json(schema);
                content[*kind] = json!({});
                content
            }
            Answer::Text => json!({ "text/plain": { "schema": { "type": "string" } } }),
        };
        let mut responses = json!({ "200": { "description": "The answer", "content": content } });
        for (status, description) in [
            ("400", "The request is wrong: the message says what"),
            ("401", "An API key is needed"),
            ("403", "Not from there"),
            ("404", "There is no such model"),
            ("405", "Not with this method"),
            ("413", "The request is too large"),
            ("429", "Too many requests wait: `Retry-After` says when to come again"),
            ("503", "The model is being loaded, or the server is stopping"),
        ] {
            let error = json!({ "application/json": { "schema": { "$ref": "#/components/schemas/Error" } } });
            responses[status] = json!({ "description": description, "content": error });
        }
        let mut operation =
            json!({ "summary": summary, "operationId": format!("{method}{}", path.replace(['/', '{', '}'], "_")), "responses": responses });
        if let Some(schema) = request {
            operation["requestBody"] = json!({ "required": true, "content": { "application/json": { "schema": schema } } });
        }
        let known = self.paths.entry(path.to_owned()).or_insert_with(|| json!({}));
        known[method] = operation;
        if path.contains('{') {
            known["parameters"] = json!([{ "name": "name", "in": "path", "required": true, "schema": { "type": "string" } }]);
        }
    }

    /// Says that a path takes a form.
    fn form(&mut self, path: &str, schema: Schema) {
        self.paths[path]["post"]["requestBody"] = json!({ "required": true, "content": { "multipart/form-data": { "schema": schema } } });
    }

    fn request<T: JsonSchema>(&mut self) -> Option<Schema> {
        Some(self.types.requests.subschema_for::<T>())
    }

    fn response<T: JsonSchema>(&mut self) -> Schema {
        self.types.responses.subschema_for::<T>()
    }
}

/// Any object.
fn object() -> Schema {
    schemars::json_schema!({ "type": "object" })
}

pub(crate) async fn openapi() -> Json<Value> {
    const EVENTS: &str = "text/event-stream";
    const LINES: &str = "application/x-ndjson";
    let mut paths = Paths { types: Types::new(), paths: Map::new() };
    let (chat, chat_answer) = (paths.request::<ChatRequest>(), paths.response::<ChatResponse>());
    paths.add("post", "/v1/chat/completions", "Answer a conversation", chat, Answer::Stream(chat_answer, EVENTS));
    let (text, text_answer) = (paths.request::<CompletionRequest>(), paths.response::<CompletionResponse>());
    paths.add("post", "/v1/completions", "Continue or score texts", text, Answer::Stream(text_answer, EVENTS));
    let request = paths.request::<ResponsesRequest>();
    paths.add("post", "/v1/responses", "Answer a conversation", request, Answer::Stream(object(), EVENTS));
    paths.add("get", "/v1/models", "The models", None, Answer::Json(object()));
    paths.add("get", "/v1/models/{name}", "A model", None, Answer::Json(object()));
    paths.add("post", "/v1/audio/transcriptions", "The text of a sound", None, Answer::Json(object()));
    let form = TranscriptionForm::json_schema(&mut paths.types.requests);
    paths.form("/v1/audio/transcriptions", form);
    let request = paths.request::<MessagesRequest>();
    paths.add("post", "/v1/messages", "Answer a conversation (Anthropic)", request, Answer::Stream(object(), EVENTS));
    let (count, count_answer) = (paths.request::<CountRequest>(), paths.response::<TokenCount>());
    paths.add("post", "/v1/messages/count_tokens", "Count the tokens of a conversation (Anthropic)", count, Answer::Json(count_answer));
    let request = paths.request::<ollama::ChatRequest>();
    paths.add("post", "/api/chat", "Answer a conversation (ollama)", request, Answer::Stream(object(), LINES));
    let request = paths.request::<ollama::GenerateRequest>();
    paths.add("post", "/api/generate", "Answer a prompt (ollama)", request, Answer::Stream(object(), LINES));
    let request = paths.request::<ollama::ShowRequest>();
    paths.add("post", "/api/show", "A model (ollama)", request, Answer::Json(object()));
    paths.add("get", "/api/tags", "The models (ollama)", None, Answer::Json(object()));
    paths.add("get", "/api/ps", "The loaded models (ollama)", None, Answer::Json(object()));
    paths.add("get", "/api/version", "The version (ollama)", None, Answer::Json(object()));
    let (request, answer) = (paths.request::<TokenizeRequest>(), paths.response::<Tokens>());
    paths.add("post", "/tokenize", "The tokens of a text or a conversation", request, Answer::Json(answer));
    let (request, answer) = (paths.request::<DetokenizeRequest>(), paths.response::<Text>());
    paths.add("post", "/detokenize", "The text of tokens", request, Answer::Json(answer));
    paths.add("get", "/tokenizer_info", "The tokenizer", None, Answer::Json(object()));
    paths.add("get", "/health", "Whether the server lives", None, Answer::Json(object()));
    paths.add("get", "/server_info", "The server, its models and where they run", None, Answer::Json(object()));
    paths.add("get", "/loads", "How busy each model is", None, Answer::Json(object()));
    paths.add("get", "/slots", "The places for answers", None, Answer::Json(schemars::json_schema!({ "type": "array" })));
    let request = paths.request::<VerifyRequest>();
    paths.add("post", "/verify", "Replay the oracle that the bundle carries", request, Answer::Json(object()));
    paths.add("get", "/version", "The version", None, Answer::Json(object()));
    paths.add("get", "/metrics", "Numbers for Prometheus", None, Answer::Text);
    let Paths { mut types, paths } = paths;
    let mut schemas = types.requests.take_definitions(true);
    schemas.extend(types.responses.take_definitions(true));
    // Each protocol has its own form.
    schemas.insert("Error".to_owned(), json!({ "type": "object", "required": ["error"] }));
    let security = json!({ "key": { "type": "http", "scheme": "bearer" } });
    Json(json!({
        "openapi": "3.1.0",
        "info": { "title": "qhx", "version": env!("CARGO_PKG_VERSION"), "description": "A server for language models" },
        "paths": paths,
        "components": { "schemas": schemas, "securitySchemes": security },
        "security": [{}, { "key": [] }],
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::routes;
    use std::collections::BTreeSet;

    #[test]
    fn every_path_is_described() {
        let threads = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let Json(description) = threads.block_on(openapi());
        let paths = description["paths"].as_object().unwrap().iter();
        let described: BTreeSet<String> = paths
            .flat_map(|(path, methods)| methods.as_object().unwrap().keys().map(move |method| format!("{method} {path}")))
            .filter(|described| !described.starts_with("parameters "))
            .collect();
        // The page, and the description itself.
        let others = ["/", "/page.css", "/page.js", "/markdown.js", "/openapi.json"];
        let routes = routes().into_iter().filter(|(path, ..)| !others.contains(path));
        let there = routes.map(|(path, method, _)| format!("{method} {path}").to_lowercase().replace("{*", "{"));
        assert_eq!(described, there.collect::<BTreeSet<String>>());
    }
}
