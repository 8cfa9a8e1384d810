//! Several models in a memory budget.

use crate::common::{self, TestServer};
use serde_json::{Value, json};
use std::{io::Read, path::Path};

/// A server of so many models with memory for `budget` of them.
fn server(count: usize, budget: f64) -> (TestServer, Vec<String>) {
    let server = TestServer::with(|options| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../qhx/builtin");
        options.models.extend((1..count).map(|_| folder.clone()));
        options.load.context = Some(4096);
        let load = qhx::Model::options().load_options(options.load.clone()).open("builtin").unwrap();
        options.memory_budget = Some((load.runtime().memory().total_bytes as f64 * budget) as u64);
    });
    let names: Vec<String> =
        server.get("/v1/models").json()["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(names.iter().collect::<std::collections::BTreeSet<_>>().len(), count, "{names:?}");
    (server, names)
}

fn ask(server: &TestServer, name: &str) -> common::Response {
    server.post("/v1/completions", json!({ "model": name, "prompt": "Once", "max_tokens": 2 }))
}

fn ask_until_loaded(server: &TestServer, name: &str) {
    common::wait_until("the model is loaded", || ask(server, name).status == 200);
}

fn states(server: &TestServer) -> Vec<Value> {
    server.get("/v1/models").json()["data"].as_array().unwrap().iter().map(|model| model["status"]["value"].clone()).collect()
}

/// Two models in a budget that holds one: the other is unloaded when it is idle, and what loads says so.
#[test]
fn several_models_take_turns() {
    let (server, names) = server(2, 1.5);
    assert_eq!(ask(&server, &names[0]).status, 200);
    for turn in [1, 0, 1] {
        let first = ask(&server, &names[turn]);
        assert!(first.status == 503 && !first.header("retry-after").is_empty() && first.text().contains("model_loading"), "{first:?}");
        ask_until_loaded(&server, &names[turn]);
        let states = states(&server);
        assert_eq!((&states[turn], &states[1 - turn]), (&json!("ready"), &json!("unloaded")));
    }
}

#[test]
fn the_least_recently_used_makes_room_and_never_one_in_use() {
    let (server, names) = server(3, 2.5);
    ask_until_loaded(&server, &names[1]);
    // The first is used after the second.
    assert_eq!(ask(&server, &names[0]).status, 200);
    ask_until_loaded(&server, &names[2]);
    assert_eq!(states(&server), ["ready", "unloaded", "ready"]);
    // Both are in use now.
    let busy: Vec<_> = [0, 2]
        .into_iter()
        .map(|place| {
            let body =
                json!({ "model": names[place], "prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": true, "temperature": 1 });
            let mut stream = server.send("POST", "/v1/completions", &[], body.to_string().as_bytes());
            stream.read_exact(&mut [0; 200]).unwrap();
            // Read no further, so that it goes on: the rest is more than connections hold.
            stream
        })
        .collect();
    let mut text = String::new();
    common::wait_until("loading has failed", || {
        let refused = ask(&server, &names[1]);
        assert_eq!(refused.status, 503, "{refused:?}");
        text = refused.text();
        text.contains("model_failed")
    });
    assert!(text.contains("memory budget"), "{text}");
    // They go on all the while.
    for mut stream in busy {
        let mut more = [0; 20_000];
        stream.read_exact(&mut more).unwrap();
        assert!(String::from_utf8_lossy(&more).matches("data: ").count() > 10);
    }
}

/// `keep_alive: 0` of ollama unloads a model; it is loaded again when it is asked for.
#[test]
fn models_are_unloaded_when_nobody_uses_them() {
    let (server, names) = server(1, 2.0);
    let unload = server.post("/api/generate", json!({ "model": names[0], "keep_alive": 0 }));
    assert_eq!(unload.json()["done_reason"], "unload", "{unload:?}");
    common::wait_until("the model is unloaded", || states(&server) == ["unloaded"]);
    // It lives, and will be there when it is asked for.
    assert_eq!(server.get("/health").status, 200);
    ask_until_loaded(&server, &names[0]);
}
