//! Requests to a server that lives through all cases of a worker.

mod body;
mod forced;
mod grammar;
mod http;
mod keys;
mod media;
mod schema;

use super::{Bench, Case, Class, Outcome};
use crate::{
    http::post,
    random::Random,
    server::{Client, Server},
};
use serde_json::{Value, json};
use std::{cell::RefCell, ffi::OsStr};

/// All classes of requests.
pub(super) const CLASSES: [Class; 7] = [
    Class { name: "grammar", make: grammar::make, attempt },
    Class { name: "schema", make: schema::make, attempt },
    Class { name: "forced", make: forced::make, attempt },
    Class { name: "body", make: body::make, attempt },
    Class { name: "http", make: http::make, attempt },
    Class { name: "keys", make: keys::make, attempt: keys::attempt },
    Class { name: "mediafolder", make: media::make, attempt: media::attempt },
];

/// What is sent.
const FILE: &str = "request.http";

thread_local! {
    /// The server of this worker, whose cases are all of one class.
    static SERVER: RefCell<Option<Server>> = const { RefCell::new(None) };
}

/// Sends the request of a case to a server of the demo model.
fn attempt(case: &Case, bench: &Bench) -> Outcome {
    ask(bench, &["builtin".as_ref()], "", case.file(FILE), case.client)
}

/// Sends bytes to the server with these arguments. What is wrong with it is a panic, as in a library, and the next case gets a new server.
fn ask(bench: &Bench, arguments: &[&OsStr], headers: &str, bytes: &[u8], client: Client) -> Outcome {
    SERVER.with_borrow_mut(|place| {
        let mut server = match place.take() {
            Some(server) => server,
            None => {
                Server::start(&bench.qhx, &bench.scratch, arguments, headers, bench.limit).unwrap_or_else(|problem| panic!("{problem}"))
            }
        };
        let answers = server.ask(bytes, client).unwrap_or_else(|problem| panic!("{problem}"));
        *place = Some(server);
        if matches!(client, Client::Ends | Client::Leaves) {
            // Whether such a client is still answered depends on who is quicker.
            return Ok("no answer is owed".into());
        }
        let told = answers.iter().map(|answer| answer.status.to_string()).collect::<Vec<_>>().join(" ");
        if answers.iter().any(|answer| answer.status == 200) { Ok(told) } else { Err(told) }
    })
}

impl Case {
    /// A case of one request.
    fn sent(bytes: Vec<u8>) -> Self {
        Self::of(FILE, bytes)
    }
}

/// A request for an answer of so many tokens that follows `format`, in the form of `response_format`.
fn formatted(format: Value, tokens: usize, random: &mut Random) -> Case {
    let mut body = json!({ "max_tokens": tokens, "stream": random.one_in(4), "response_format": format });
    let path = match random.one_in(3) {
        true => {
            body["prompt"] = "Hi".into();
            "/v1/completions"
        }
        false => {
            body["messages"] = messages();
            "/v1/chat/completions"
        }
    };
    Case::sent(post(path, &body))
}

/// A request for an answer that follows a JSON schema, in one of the protocols.
fn of_schema(schema: Value, tokens: usize, random: &mut Random) -> Case {
    let stream = random.one_in(4);
    let (path, body) = match random.below(7) {
        0 => (
            "/v1/responses",
            json!({ "input": "Hi", "max_output_tokens": tokens, "stream": stream,
                "text": { "format": { "type": "json_schema", "name": "x", "schema": schema } } }),
        ),
        1 => (
            "/v1/messages",
            json!({ "model": "builtin", "max_tokens": tokens, "stream": stream, "messages": messages(),
                "tools": [{ "name": "f", "input_schema": schema }], "tool_choice": { "type": "any" } }),
        ),
        2 => (
            "/v1/chat/completions",
            json!({ "max_tokens": tokens, "stream": stream, "messages": messages(), "tool_choice": "required",
                "tools": [{ "type": "function", "function": { "name": "f", "parameters": schema } }] }),
        ),
        3 => (
            "/api/chat",
            json!({ "model": "builtin", "messages": messages(), "format": schema, "stream": stream, "options": { "num_predict": tokens } }),
        ),
        _ => {
            return formatted(json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } }), tokens, random);
        }
    };
    Case::sent(post(path, &body))
}

fn messages() -> Value {
    json!([{ "role": "user", "content": "Hi" }])
}
