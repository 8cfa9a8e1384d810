//! The page: static files in the binary, which ask nobody but this server.

use axum::{
    http::{HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
};

/// Nothing from elsewhere, nothing inline, no frame around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("permissions-policy"), "camera=(), geolocation=(), microphone=(self)"),
    ];
    (headers.map(|(name, value)| (name, HeaderValue::from_static(value))), text).into_response()
}

pub(crate) async fn index() -> Response {
    file("text/html; charset=utf-8", include_str!("../page/index.html"))
}

pub(crate) async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("../page/page.css"))
}

pub(crate) async fn script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("../page/page.js"))
}

pub(crate) async fn markdown() -> Response {
    file("text/javascript; charset=utf-8", include_str!("../page/markdown.js"))
}
