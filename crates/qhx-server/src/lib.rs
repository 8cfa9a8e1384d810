//! An HTTP server for language models, which speaks the protocols that existing clients already use.
//!
//! The server is thin: what is asked becomes a request to the library [`qhx`], whose engine works on threads of its own, and what comes back is written in the form that the
//! client expects. A client that goes away takes its request with it; a slow one holds nobody up, because the engine never waits for a connection.
//!
//! ```no_run
//! use qhx_server::{Server, ServerOptions};
//! let mut options = ServerOptions::default();
//! options.models = vec!["builtin".into()];
//! let server = Server::bind("127.0.0.1:8080", options)?;
//! println!("listening on http://{}", server.address());
//! server.run(qhx::Cancel::new(), || {})?;
//! # Ok::<(), qhx_server::ServerError>(())
//! ```

mod about;
mod access;
mod anthropic;
mod app;
mod body;
mod error;
mod fetch;
mod generate;
mod health;
mod json_size;
mod messages;
mod metrics;
mod models;
mod multipart;
mod ollama;
mod openai;
mod openapi;
mod options;
mod page;
mod server;
mod stream;
pub mod tls;
mod tokens;

// For hostile input: `qhx-attack`.
#[doc(hidden)]
pub use multipart::form_fields;
pub use options::ServerOptions;
pub use server::{Server, ServerError};
