//! Who may ask: keys, and protection against pages of other origins.

use crate::{app::App, error::ApiError};
use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use sha2::{Digest, Sha256};
use std::{net::IpAddr, sync::Arc};

/// The hashes of keys: compared in a time that does not depend on how much of a key is right.
pub(crate) struct Keys(Vec<[u8; 32]>);

/// Who asks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Caller {
    /// Requests of one scope share what was computed.
    pub(crate) scope: u64,
}

impl Keys {
    pub(crate) fn new(keys: &[String]) -> Self {
        Self(keys.iter().map(|key| Sha256::digest(key).into()).collect())
    }

    pub(crate) fn are_needed(&self) -> bool {
        !self.0.is_empty()
    }

    /// The number of a key, from 1; none for one that is not known. All are looked at in any case.
    fn number_of(&self, key: &str) -> Option<u64> {
        let hash: [u8; 32] = Sha256::digest(key).into();
        let mut found = None;
        for (place, known) in self.0.iter().enumerate() {
            let difference = known.iter().zip(&hash).fold(0, |all, (a, b)| all | (a ^ b));
            if std::hint::black_box(difference) == 0 {
                found = Some(place as u64 + 1);
            }
        }
        found
    }
}

/// What needs no key: whether the server lives, and the page, which asks for one.
const OPEN: [&str; 5] = ["/health", "/", "/page.css", "/page.js", "/markdown.js"];

/// Lets requests through that may be made.
pub(crate) async fn check(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    match caller(&app, request.headers(), request.uri().path()) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

fn caller(app: &App, headers: &HeaderMap, path: &str) -> Result<Caller, ApiError> {
    let forbidden = |message: String| ApiError::new(StatusCode::FORBIDDEN, message);
    let host = name_of(headers, header::HOST)?.unwrap_or_default();
    if let Some(origin) = name_of(headers, header::ORIGIN)?
        && origin.split_once("://").map(|(_, host)| host) != Some(host)
    {
        return Err(forbidden(format!("a page of {origin} may not use this server")));
    }
    if !app.keys.are_needed() {
        // A page that makes its own name point to this machine has that name here.
        if !is_local_name(host) {
            return Err(forbidden(format!("this server is not called {host}: use its address, or start it with --api-key")));
        }
        return Ok(Caller::default());
    }
    if OPEN.contains(&path) {
        return Ok(Caller::default());
    }
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let key = text(header::AUTHORIZATION).and_then(bearer).or_else(|| text(HeaderName::from_static("x-api-key")));
    let number = app.keys.number_of(key.unwrap_or_default().trim());
    let number = number.ok_or_else(|| {
        let message = if key.is_some() { "this API key is not known" } else { "an API key is needed: `Authorization: Bearer KEY`" };
        ApiError::new(StatusCode::UNAUTHORIZED, message).code("invalid_api_key")
    })?;
    Ok(Caller { scope: if app.options.share_prefixes { 0 } else { number } })
}

/// The key of an `Authorization`; schemes are written in any case.
fn bearer(value: &str) -> Option<&str> {
    let (scheme, key) = value.trim_start().split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(key)
}

/// A header that names a server: given once, in ASCII, without a user. A proxy could read anything else differently.
fn name_of(headers: &HeaderMap, header: HeaderName) -> Result<Option<&str>, ApiError> {
    let mut values = headers.get_all(&header).iter();
    let Some(value) = values.next() else { return Ok(None) };
    match value.to_str() {
        Ok(text) if values.next().is_none() && !text.contains('@') => Ok(Some(text)),
        _ => Err(ApiError::bad_request(format!("the header `{header}` is not a valid host name"))),
    }
}

/// Whether a key can be sent in a header.
pub(crate) fn can_be_sent(key: &str) -> bool {
    !key.is_empty() && key.trim() == key && key.bytes().all(|byte| (b' '..=b'~').contains(&byte))
}

/// Whether a `Host` is an address or this machine's own name, and not one that anybody can register.
fn is_local_name(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.is_empty() || name.parse::<IpAddr>().is_ok() || name == "localhost" || name.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ServerOptions,
        app::{router, routes},
    };
    use axum::{Router, body::Body, http::Method};
    use hyper::service::Service;
    use hyper_util::service::TowerToHyperService;
    use tokio::runtime::{Builder, Runtime};

    /// What may be asked without a key, and nothing else: whoever opens another path says so here.
    const NEEDS_NO_KEY: [&str; 5] = ["/", "/page.css", "/page.js", "/markdown.js", "/health"];

    /// All that answers requests, with the key `right` and without a connection or a model.
    struct Answering {
        service: TowerToHyperService<Router>,
        threads: Runtime,
    }

    impl Answering {
        fn new() -> Self {
            let options = ServerOptions { keys: vec!["right".into()], models: vec!["no model".into()], ..ServerOptions::default() };
            let app = Arc::new(App::new(options, qhx::Cancel::new()));
            Self { service: TowerToHyperService::new(router(app)), threads: Builder::new_current_thread().enable_all().build().unwrap() }
        }

        fn ask(&self, method: &Method, path: &str, headers: &[(&str, &str)]) -> StatusCode {
            let mut request = Request::builder().method(method).uri(path).header(header::HOST, "localhost");
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            self.threads.block_on(self.service.call(request.body(Body::empty()).unwrap())).unwrap().status()
        }
    }

    #[test]
    fn every_path_needs_a_key_but_those_that_are_open() {
        let server = Answering::new();
        let nearly: [&[(&str, &str)]; 9] = [
            &[],
            &[("authorization", "Bearer wrong")],
            &[("authorization", "Bearer righ")],
            &[("authorization", "Bearer ")],
            &[("authorization", "right")],
            &[("authorization", "Basic right")],
            &[("x-api-key", "wrong")],
            &[("x-api-key", "")],
            &[("cookie", "x-api-key=right")],
        ];
        for (path, own, _) in routes() {
            let is_open = NEEDS_NO_KEY.contains(&path);
            let path = path.replace("{*name}", "builtin");
            for method in [&own, &Method::HEAD, &Method::OPTIONS, &Method::PUT] {
                for headers in nearly {
                    let refused = server.ask(method, &path, headers) == StatusCode::UNAUTHORIZED;
                    assert_eq!(refused, !is_open, "{method} {path} with {headers:?}");
                }
            }
            for headers in [("authorization", "Bearer right"), ("x-api-key", "right")] {
                let status = server.ask(&own, &path, &[headers]);
                assert!(![StatusCode::UNAUTHORIZED, StatusCode::METHOD_NOT_ALLOWED].contains(&status), "{own} {path}: {status}");
            }
        }
        assert!(NEEDS_NO_KEY.iter().all(|open| routes().iter().any(|(path, ..)| path == open)));
    }

    /// What only looks like an open path, and what is nowhere.
    #[test]
    fn paths_that_are_not_there_need_a_key_too() {
        let server = Answering::new();
        for path in ["/nothing", "/health/", "//health", "/%68ealth", "/HEALTH", "/health/../metrics", "/page.css/..", "/metrics?key=right"]
        {
            for method in [Method::GET, Method::POST] {
                assert_eq!(server.ask(&method, path, &[]), StatusCode::UNAUTHORIZED, "{method} {path}");
            }
        }
        assert_eq!(server.ask(&Method::GET, "/nothing", &[("x-api-key", "right")]), StatusCode::NOT_FOUND);
    }

    #[test]
    fn keys_are_known_by_their_hashes() {
        let keys = Keys::new(&["one".into(), "two".into()]);
        assert_eq!(
            (keys.number_of("one"), keys.number_of("two"), keys.number_of("onf"), keys.number_of("")),
            (Some(1), Some(2), None, None)
        );
        // In some of so many, the differences from a known one cancel each other out.
        assert!((0..4000).all(|number| keys.number_of(&number.to_string()).is_none()));
        assert!(keys.are_needed() && !Keys::new(&[]).are_needed());
    }

    #[test]
    fn names_that_anybody_can_register_are_not_local() {
        for host in ["", "localhost", "localhost:8080", "127.0.0.1:1", "[::1]:80", "192.168.1.5", "x.localhost"] {
            assert!(is_local_name(host), "{host}");
        }
        for host in ["example.com", "localhost.example.com:80", "127.0.0.1.nip.io"] {
            assert!(!is_local_name(host), "{host}");
        }
    }

    #[test]
    fn keys_are_found_in_headers_of_any_case() {
        for (value, key) in [("Bearer k", Some("k")), ("bearer k", Some("k")), ("BEARER  k", Some(" k")), ("Basic k", None), ("k", None)] {
            assert_eq!(bearer(value), key, "{value}");
        }
        for (key, can) in [("sk-1", true), ("two words", true), ("", false), (" k", false), ("k\n", false), ("schlüssel", false)] {
            assert_eq!(can_be_sent(key), can, "{key:?}");
        }
    }

    #[test]
    fn headers_that_name_no_server_are_refused() {
        let found = |values: &[&[u8]]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::HOST, axum::http::HeaderValue::from_bytes(value).unwrap());
            }
            name_of(&headers, header::HOST).map(|name| name.map(str::to_owned)).map_err(|error| error.status)
        };
        assert_eq!(found(&[]), Ok(None));
        assert_eq!(found(&[b"localhost:1"]), Ok(Some("localhost:1".into())));
        for wrong in [&[&b"l\xc3\xb6calhost"[..]][..], &[b"user@localhost"], &[b"localhost", b"localhost"]] {
            assert_eq!(found(wrong), Err(StatusCode::BAD_REQUEST));
        }
    }
}
