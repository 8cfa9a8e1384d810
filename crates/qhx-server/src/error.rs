//! What a client is told when something is wrong, in the form of the protocol that it speaks.

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use qhx::runtime::Error as RunError;
use serde_json::{Value, json};

/// Why a request is not answered.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    /// The field that is to blame.
    pub(crate) param: Option<String>,
    /// For programs.
    pub(crate) code: Option<&'static str>,
    /// Seconds after which it may be tried again.
    pub(crate) retry_after: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// The request is wrong.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// Something here is wrong, and not the request. The log has all of it.
    fn internal(message: &str) -> Self {
        tracing::error!(message, "failed");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, without_folders(message))
    }

    /// A field is wrong.
    pub(crate) fn field(name: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let name = name.into();
        Self { message: format!("`{name}` {problem}"), param: Some(name), ..Self::bad_request("") }
    }

    pub(crate) fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    pub(crate) fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// The kinds of errors by the names that OpenAI and Anthropic share.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "api_error",
        }
    }

    /// The body of the response, or a frame of a stream.
    pub(crate) fn body(&self, protocol: Protocol) -> Value {
        match protocol {
            Protocol::OpenAi => {
                json!({ "error": { "message": self.message, "type": self.kind(), "param": self.param, "code": self.code } })
            }
            Protocol::Anthropic => json!({ "type": "error", "error": { "type": self.kind(), "message": self.message } }),
            Protocol::Ollama => json!({ "error": self.message }),
        }
    }
}

/// Whose clients speak to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Protocol {
    pub(crate) fn of(path: &str) -> Self {
        match path {
            path if path.starts_with("/v1/messages") => Self::Anthropic,
            path if path.starts_with("/api/") => Self::Ollama,
            _ => Self::OpenAi,
        }
    }
}

impl IntoResponse for ApiError {
    /// The body is written where the path is known: [`write_errors`].
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// Writes the bodies of errors in the form that the path's clients expect.
pub(crate) async fn write_errors(request: Request, next: Next) -> Response {
    let protocol = Protocol::of(request.uri().path());
    let mut response = next.run(request).await;
    let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.remove(header::CONTENT_LENGTH);
    if let Some(seconds) = error.retry_after {
        headers.insert(header::RETRY_AFTER, seconds.into());
    }
    if error.status == StatusCode::UNAUTHORIZED {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    *response.body_mut() = Body::from(error.body(protocol).to_string());
    response
}

impl From<RunError> for ApiError {
    fn from(error: RunError) -> Self {
        let message = error.to_string();
        match error {
            RunError::PromptTooLong { .. } | RunError::TextTooLong { .. } | RunError::ContextFull { .. } => {
                Self::bad_request(message).code("context_length_exceeded")
            }
            RunError::QueueFull { .. } => Self::new(StatusCode::TOO_MANY_REQUESTS, message).code("queue_full").retry_after(1),
            RunError::EngineStopped | RunError::Cancelled | RunError::GrammarsBusy { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, message).retry_after(1)
            }
            RunError::EmptyPrompt
            | RunError::UnknownId { .. }
            | RunError::NotTaken { .. }
            | RunError::Medium(_)
            | RunError::MediumDoesNotFit { .. }
            | RunError::Placeholders { .. }
            | RunError::Option { .. }
            | RunError::Sampler(_)
            | RunError::StopStrings(_)
            | RunError::NoTokenizer { .. }
            | RunError::NoTemplate { .. }
            | RunError::Grammar { .. }
            | RunError::Chat(_)
            | RunError::Tokenizer(_) => Self::bad_request(message),
            _ => Self::internal(&message),
        }
    }
}

impl From<qhx::Error> for ApiError {
    fn from(error: qhx::Error) -> Self {
        match error {
            qhx::Error::Runtime(error) => error.into(),
            error @ qhx::Error::Messages(_) => Self { param: Some("messages".to_owned()), ..Self::bad_request(error.to_string()) },
            error @ qhx::Error::Tools(_) => Self { param: Some("tools".to_owned()), ..Self::bad_request(error.to_string()) },
            error => Self::internal(&error.to_string()),
        }
    }
}

/// A text without the folders of the files that it names: where they are is nobody's concern but the operator's.
///
/// Folders may have blanks in their names: a path goes on to the last separator before a sign that ends it. That may be too much, and never too little.
pub(crate) fn without_folders(text: &str) -> String {
    const SEPARATORS: [char; 2] = ['/', '\\'];
    let ends_path = |c: char| "`'\"(),:;\n".contains(c);
    let (mut shown, mut before, mut rest) = (String::with_capacity(text.len()), ' ', text);
    while let Some(first) = rest.chars().next() {
        let drive = path_root(rest).filter(|_| before.is_whitespace() || ends_path(before));
        let Some(drive) = drive else {
            shown.push(first);
            (before, rest) = (first, &rest[first.len_utf8()..]);
            continue;
        };
        let end = rest[drive..].find(ends_path).map_or(rest.len(), |end| drive + end);
        let last = rest[..end].rfind(SEPARATORS).unwrap_or(0) + 1;
        let end = rest[last..end].find(char::is_whitespace).map_or(end, |blank| last + blank);
        let path = rest[..end].trim_end_matches(SEPARATORS);
        shown.push_str(path.rsplit(SEPARATORS).next().unwrap_or_default());
        (before, rest) = ('/', &rest[end..]);
    }
    shown
}

/// Whether a text begins with an absolute path, and how long the name of its drive is: `/home`, `C:\models`.
fn path_root(text: &str) -> Option<usize> {
    match text.as_bytes() {
        [b'/', next, ..] if !next.is_ascii_whitespace() && *next != b'/' => Some(0),
        [drive, b':', b'/' | b'\\', next, ..] if drive.is_ascii_alphabetic() && *next != b'/' => Some(2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_left_out() {
        for (text, shown) in [
            ("cannot read /home/ann/models/a.bin: no such file", "cannot read a.bin: no such file"),
            ("/a/b: file `/c/weights.bin` (see '/d/e/'): 1/2", "b: file `weights.bin` (see 'e'): 1/2"),
            ("and/or a / b //, 1/2", "and/or a / b //, 1/2"),
            ("see http://a.example/b", "see http://a.example/b"),
            ("cannot read /home/a b/m/x.bin: no such file", "cannot read x.bin: no such file"),
            ("`/a b/c d/é.bin` is not there", "`é.bin` is not there"),
            (r"C:\Users\Ann B\m.gguf: damaged, D:/x/", "m.gguf: damaged, x"),
        ] {
            assert_eq!(without_folders(text), shown);
        }
    }
}
