//! Keys: whoever brings one in any form gets in, and nobody else; files of keys of any content.

use super::{FILE, ask};
use crate::{
    classes::{Bench, Case, Outcome},
    http::request,
    mutate::mutate_bytes,
    random::Random,
    seeds::Seeds,
    server::Client,
};
use std::fs;

/// The keys of the server.
const KEYS: [&str; 3] = ["sk-first", "a key with blanks", "0"];
/// A file of keys, for the binary alone.
const KEY_FILE: &str = "keys";
/// Whether a request brings a key.
const MAY: &str = "may";

pub(super) fn make(_: &Seeds, random: &mut Random) -> Case {
    let key = random.word(&KEYS);
    let (header, may) = match random.below(12) {
        0 => (format!("Authorization: Bearer {key}"), true),
        1 => (format!("authorization:   bEaReR   {key}  "), true),
        2 => (format!("X-API-Key: {key}"), true),
        3 => (format!("Authorization: Basic dTpw\r\nX-API-Key: {key}"), true),
        4 => (format!("Authorization: Bearer {key}x"), false),
        5 => (format!("Authorization: Bearer {}", &key[1..]), false),
        6 => (
            format!("Authorization: {}{key}", random.word(&["", "Basic ", "Bearer", "Bearer\t", "Digest ", "Bearer: ", "Bearer \u{a0}"])),
            false,
        ),
        7 => (
            format!("Authorization: Bearer {}", random.word(&["", " ", "sk-FIRST", "sk-first,0", "null", "undefined", "sk-first\u{0}"])),
            false,
        ),
        8 => (format!("X-API-Key: {}", "x".repeat(random.length(100_000))), false),
        9 => (format!("Cookie: key={key}\r\nX-Api-Keys: {key}\r\nProxy-Authorization: Bearer {key}"), false),
        10 => (format!("Authorization: Bearer wrong\r\nAuthorization: Bearer {key}"), false),
        _ => ("Accept: */*".to_owned(), false),
    };
    let (method, path) = *random.pick(&[
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/slots"),
        ("GET", "/openapi.json"),
        ("GET", "/nothing"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/api/chat"),
        ("POST", "/verify/"),
        ("PUT", "/v1/models"),
        ("GET", "/health/../metrics"),
        ("GET", "//metrics"),
        ("GET", "/metrics?key=sk-first"),
    ]);
    let mut file = KEYS.join(random.word(&["\n", "\r\n", "\n\n", "\r", "\t\n"])).into_bytes();
    mutate_bytes(&mut file, usize::MAX, b"\xef\xbb\xbfschl\xc3\xbcssel\n", random);
    if random.one_in(8) {
        file = file.repeat(random.length(3_000_000) / file.len().max(1) + 1);
    }
    let mut case = Case::of(FILE, request(method, path, &format!("{header}\r\n"), b""));
    case.files.extend([(KEY_FILE.to_owned(), file), (MAY.to_owned(), may.to_string().into_bytes())]);
    // Without a model it ends as soon as it has read the keys.
    case.command(&format!("serve {{case}}/nothing --port 0 --api-key-file {{case}}/{KEY_FILE}"))
}

pub(super) fn attempt(case: &Case, bench: &Bench) -> Outcome {
    let file = bench.scratch.join("keys");
    fs::write(&file, KEYS.join("\n")).map_err(super::super::refused)?;
    let arguments = ["builtin".as_ref(), "--api-key-file".as_ref(), file.as_os_str()];
    let told = ask(bench, &arguments, "X-API-Key: 0\r\n", case.file(FILE), Client::Waits);
    let status = told.clone().unwrap_or_else(|refused| refused);
    match case.text(MAY).as_str() {
        "true" => assert_ne!(status, "401", "a key was not taken"),
        // A header that is none may be refused before anybody reads it.
        _ => assert!(["401", "400", "431"].contains(&status.as_str()), "whoever has no key got in: {status}"),
    }
    told
}
