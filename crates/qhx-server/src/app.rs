//! What all requests share, and the paths.

use crate::{
    ServerOptions, about,
    access::{self, Keys},
    anthropic,
    body::{self, Bodies},
    error::{self, ApiError},
    fetch::{Fetcher, MediaAccess},
    health,
    metrics::Metrics,
    models::Models,
    ollama, openai, openapi, page, tokens,
};
use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    handler::Handler,
    http::{Method, StatusCode},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{self, MethodRouter},
};
use qhx::{Cancel, messages::FileAccess};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Instant, SystemTime, UNIX_EPOCH},
};
use tokio::sync::Semaphore;

/// Requests that are prepared at once.
const PREPARING: usize = 8;

/// What all requests share.
pub(crate) struct App {
    pub(crate) options: ServerOptions,
    pub(crate) keys: Keys,
    pub(crate) models: Arc<Models>,
    pub(crate) metrics: Metrics,
    /// The server is about to stop: what runs is finished, nothing new begins.
    pub(crate) draining: AtomicBool,
    /// One at a time: a replay takes the model for itself.
    pub(crate) verifying: Semaphore,
    /// Places for work that takes time before a request reaches an engine: templates, media, prompts to be scored.
    pub(crate) preparing: Arc<Semaphore>,
    pub(crate) bodies: Arc<Bodies>,
    fetcher: Fetcher,
    /// Different for each server, so that ids are.
    salt: u64,
    next_id: AtomicU64,
}

impl App {
    pub(crate) fn new(options: ServerOptions, cancel: Cancel) -> Self {
        let salt = random();
        Self {
            keys: Keys::new(&options.keys),
            models: Arc::new(Models::new(&options, cancel)),
            metrics: Metrics::default(),
            draining: AtomicBool::new(false),
            verifying: Semaphore::new(1),
            preparing: Arc::new(Semaphore::new(PREPARING)),
            bodies: Bodies::new(options.body_bytes),
            fetcher: Fetcher::new(&options.media_hosts, options.body_bytes),
            salt,
            next_id: AtomicU64::new(0),
            options,
        }
    }

    /// An id that nothing else has: `chatcmpl-…`.
    pub(crate) fn id(&self, prefix: &str) -> String {
        let number = self.next_id.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}{:012x}{number:012x}", self.salt & 0xffff_ffff_ffff)
    }

    /// Where the media of messages may come from.
    pub(crate) fn media_access(&self) -> MediaAccess {
        let files = self.options.media_folder.clone().map_or(FileAccess::None, FileAccess::Below);
        MediaAccess { files, fetcher: self.fetcher.clone() }
    }
}

/// A number that nobody can tell beforehand.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(Instant::now())
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    seconds(SystemTime::now())
}

pub(crate) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A path (`{*name}` stands for all that follows), how it is asked, and what answers.
pub(crate) type Route = (&'static str, Method, MethodRouter<Arc<App>>);

fn get<H: Handler<T, Arc<App>>, T: 'static>(path: &'static str, handler: H) -> Route {
    (path, Method::GET, routing::get(handler))
}

fn post<H: Handler<T, Arc<App>>, T: 'static>(path: &'static str, handler: H) -> Route {
    (path, Method::POST, routing::post(handler))
}

/// All paths.
pub(crate) fn routes() -> Vec<Route> {
    vec![
        get("/", page::index),
        get("/page.css", page::style),
        get("/page.js", page::script),
        get("/markdown.js", page::markdown),
        get("/health", health::health),
        get("/metrics", about::metrics),
        get("/slots", about::slots),
        get("/loads", about::loads),
        get("/server_info", about::server_info),
        post("/verify", about::verify),
        get("/version", about::version),
        get("/v1/models", openai::models::list),
        get("/v1/models/{*name}", openai::models::one),
        post("/v1/chat/completions", openai::chat::answer),
        post("/v1/completions", openai::completions::answer),
        post("/v1/responses", openai::responses::answer),
        post("/v1/audio/transcriptions", openai::transcriptions::answer),
        post("/v1/messages", anthropic::answer),
        post("/v1/messages/count_tokens", anthropic::count),
        post("/api/chat", ollama::chat),
        post("/api/generate", ollama::generate),
        get("/api/tags", ollama::tags),
        post("/api/show", ollama::show),
        get("/api/ps", ollama::ps),
        get("/api/version", ollama::version),
        post("/tokenize", tokens::tokenize),
        post("/detokenize", tokens::detokenize),
        get("/tokenizer_info", tokens::tokenizer_info),
        get("/openapi.json", openapi::openapi),
    ]
}

/// What answers all requests.
pub(crate) fn router(app: Arc<App>) -> Router {
    let paths = routes().into_iter().fold(Router::new(), |router, (path, _, answers)| router.route(path, answers));
    paths
        .fallback(nothing_here)
        .method_not_allowed_fallback(wrong_method)
        // Bodies have a limit of our own.
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(app.clone(), body::with_room))
        .layer(middleware::from_fn_with_state(app.clone(), turn_away))
        .layer(middleware::from_fn_with_state(app.clone(), access::check))
        .layer(middleware::from_fn(error::write_errors))
        .layer(middleware::from_fn(log))
        .with_state(app)
}

/// Nothing new begins while the server stops.
async fn turn_away(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match app.draining.load(Ordering::Relaxed) {
        true => ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is stopping").code("draining").retry_after(1).into_response(),
        false => next.run(request).await,
    }
}

async fn nothing_here(request: Request) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, format!("there is nothing at {}", request.uri().path()))
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} cannot be asked with {}", request.uri().path(), request.method()))
}

/// A line for each request: never what was asked or answered.
async fn log(request: Request, next: Next) -> Response {
    let (method, path, began) = (request.method().clone(), request.uri().path().to_owned(), Instant::now());
    let response = next.run(request).await;
    let (status, milliseconds) = (response.status().as_u16(), began.elapsed().as_millis() as u64);
    match path.as_str() {
        "/health" | "/metrics" => tracing::debug!(%method, path, status, milliseconds, "request"),
        _ => tracing::info!(%method, path, status, milliseconds, "request"),
    }
    response
}
