//! `qhx chat` in scripts and at a terminal, and saved sessions.

use crate::common::{DEVICE, Ran, bundle, fail, failed, fixture, ids, json, qhx, scratch, with_stdin};
use serde_json::{Value, json};
use std::fs;

/// A conversation from a script.
fn chat(arguments: &[&str], script: impl AsRef<[u8]>) -> Ran {
    let llama = bundle("llama");
    let all = [&["chat", llama.to_str().unwrap(), "--device", DEVICE, "--max-new", "6", "--ignore-eos"], arguments].concat();
    with_stdin(qhx(all), script.as_ref())
}

/// The same as one JSON object.
fn chat_json(arguments: &[&str], script: impl AsRef<[u8]>) -> Value {
    let found = chat(&[arguments, &["--json"]].concat(), script);
    assert_eq!(found.code, Some(0), "{found:?}");
    serde_json::from_str(&found.stdout).unwrap()
}

fn user_texts(conversation: &Value) -> Vec<&str> {
    conversation["turns"].as_array().unwrap().iter().map(|turn| turn["user"].as_str().unwrap()).collect()
}

/// What a fresh session answers to these messages.
fn fresh(messages: &[Value]) -> Value {
    let folder = scratch();
    let file = folder.path().join("chat.json");
    fs::write(&file, Value::from(messages).to_string()).unwrap();
    let llama = bundle("llama");
    let arguments = ["generate", llama.to_str().unwrap(), "--chat", file.to_str().unwrap(), "--json", "--device", DEVICE];
    json(arguments.iter().chain(&["--max-new", "6", "--ignore-eos"]))
}

#[test]
fn a_script_is_answered_as_fresh_sessions_would() {
    let script = "hello there\n\n/help\n/image a.png\n/audio a.wav\n/frobnicate\nand then?\n/reset\nhello there\n/system be brief\nhello there\n/exit\nnever read\n";
    let found = chat(&[], script);
    assert_eq!(found.code, Some(0), "{found:?}");
    for expected in [
        "/system TEXT",
        "it cannot be attached: `llama` takes text only",
        "there is no /frobnicate",
        "is forgotten",
        "system message is set",
    ] {
        assert!(found.stderr.contains(expected), "{expected}: {}", found.stderr);
    }
    assert_eq!(found.stderr.matches("6 tokens · ").count(), 4, "{}", found.stderr);
    let text = |messages: &[Value]| fresh(messages)["text"].as_str().unwrap().to_owned();
    let user = |text: &str| json!({ "role": "user", "content": text });
    let first = text(&[user("hello there")]);
    let answer = json!({ "role": "assistant", "content": first });
    let second = text(&[user("hello there"), answer.clone(), user("and then?")]);
    let briefly = text(&[json!({ "role": "system", "content": "be brief" }), user("hello there"), answer, user("hello there")]);
    let lines = |text: &str| text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(lines(&found.stdout), lines(&[first.clone(), second, first, briefly].join("\n")));
}

#[test]
fn messages_of_several_lines_and_bytes_that_are_no_text() {
    let script = b"caf\xe9\n\"\"\"\n/not a command\nsecond line\n\"\"\"\none \\\ntwo\n /help\n";
    let found = chat_json(&[], script);
    assert_eq!(user_texts(&found), ["caf\u{fffd}", "/not a command\nsecond line", "one \ntwo", "/help"]);
    // The object has the conversation and each answer as `generate` has it.
    let messages = found["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 8);
    for (turn, before) in found["turns"].as_array().unwrap().iter().zip([1, 3, 5, 7]) {
        let expected = fresh(&messages[..before]);
        assert_eq!((&turn["ids"], &turn["prompt_ids"]), (&expected["ids"], &expected["prompt_ids"]));
        assert_eq!(turn["timing"]["generated_tokens"], 6);
    }
}

#[test]
fn a_saved_conversation_goes_on_where_it_was_left() {
    let folder = scratch();
    let file = folder.path().join("a session.qhx");
    let place = file.to_str().unwrap();
    let whole = chat_json(&["--system", "be brief"], format!("hello there\n/save \"{place}\"\nand then?\n"));
    let continued = chat_json(&[], format!("something else\n/load {place}\nand then?\n"));
    assert_eq!(continued["messages"], whole["messages"]);
    assert_eq!(continued["turns"][1]["ids"], whole["turns"][1]["ids"]);
    // `generate` goes on with it too, and saves what `chat` can load.
    let llama = bundle("llama");
    let arguments = ["generate", llama.to_str().unwrap(), "--json", "--device", DEVICE, "--max-new", "6", "--ignore-eos"];
    let generate = |more: &[&str]| json(arguments.iter().chain(more));
    let next = folder.path().join("next.qhx");
    let found = generate(&["--load-session", place, "--user", "and then?", "--save-session", next.to_str().unwrap()]);
    assert_eq!((&found["ids"], &found["prompt_ids"]), (&whole["turns"][1]["ids"], &whole["turns"][1]["prompt_ids"]));
    assert_eq!(chat_json(&[], format!("/load {}\n", next.display()))["messages"], whole["messages"]);
    // Ids are the whole prompt; what the session has of it is not computed again.
    let prompt = ids(&found["prompt_ids"]);
    let (again, anew) = (generate(&["--load-session", next.to_str().unwrap(), "--ids", &prompt]), generate(&["--ids", &prompt]));
    assert_eq!((&again["ids"], &again["text"]), (&anew["ids"], &anew["text"]));
    let runs = |generation: &Value| generation["stages"][0]["runs"].as_u64().unwrap();
    assert!(runs(&again) <= runs(&anew));
}

#[test]
fn wrong_session_files_are_refused() {
    let folder = scratch();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(at("notes"), "precious").unwrap();
    let saved = at("saved");
    chat_json(&[], format!("hello there\n/save {saved}\n"));
    failed(chat(&[], format!("/load {}\n", at("notes"))), 1, &["is not a session saved by this version of qhx"]);
    failed(chat(&[], format!("/save {}\n", at("notes"))), 1, &["is not a saved session", "another name"]);
    assert_eq!(fs::read_to_string(at("notes")).unwrap(), "precious");
    failed(chat(&[], format!("/load {}\n", at("missing"))), 1, &["cannot read"]);
    let mut bytes = fs::read(&saved).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(at("damaged"), bytes).unwrap();
    failed(chat(&[], format!("/load {}\n", at("damaged"))), 1, &["is damaged"]);
    let other = bundle("qwen3_5");
    let arguments = ["generate", other.to_str().unwrap(), "--device", DEVICE, "--user", "hello"];
    fail(arguments.iter().chain(&["--load-session", &saved]), 1, &["was saved with another model: `llama`", "this is `qwen3_5`"]);
    let llama = bundle("llama");
    let generate = ["generate", llama.to_str().unwrap(), "--device", DEVICE];
    let load = ["--load-session", &saved, "--user", "hello"];
    fail(generate.iter().chain(&load).chain(&["--system", "be brief"]), 2, &["--system does not go with --load-session"]);
    fail(generate.iter().chain(&load).chain(&["--split", "--audio", "a.wav"]), 2, &["--split does not go with saved sessions"]);
    // A session without a conversation is none for `chat`.
    let bare = at("bare");
    json(generate.iter().chain(&["--ids", "5,6", "--max-new", "2", "--json", "--save-session", &bare]));
    failed(chat(&[], format!("/load {bare}\n")), 1, &["holds no conversation"]);
}

#[test]
fn images_travel_with_a_saved_conversation() {
    let folder = scratch();
    let model = bundle("qwen3_vl");
    let image = fixture("media/files/rgb.png");
    let saved = folder.path().join("saved");
    let talk = |script: String| {
        let arguments = ["chat", model.to_str().unwrap(), "--device", DEVICE, "--max-new", "4", "--ignore-eos", "--json"];
        let found = with_stdin(qhx(arguments), script.as_bytes());
        assert_eq!(found.code, Some(0), "{found:?}");
        serde_json::from_str::<Value>(&found.stdout).unwrap()
    };
    let whole = talk(format!("/image {}\nwhat is this?\n/save {}\nand then?\n", image.display(), saved.display()));
    let continued = talk(format!("/load {}\nand then?\n", saved.display()));
    assert_eq!((&continued["messages"], &continued["turns"][0]["ids"]), (&whole["messages"], &whole["turns"][1]["ids"]));
    assert_eq!(continued["turns"][0]["prompt_ids"], whole["turns"][1]["prompt_ids"]);
}

#[test]
fn a_full_context_says_what_to_do() {
    let long = chat(&["--context", "8"], "one two three four five six seven eight nine ten\n");
    failed(long, 1, &["the context holds 8", "hint: send a shorter message"]);
    let script = "the river runs\nand the hill\nand the tree\nand the stone\n";
    let context = 2 * chat_json(&[], script)["turns"][0]["prompt_ids"].as_array().unwrap().len() + 12;
    let context = context.to_string();
    let full = chat(&["--context", &context], script);
    assert!(
        full.code == Some(1) && full.stderr.contains("/reset forgets the conversation") && full.stderr.contains("--context-shift"),
        "{full:?}"
    );
    for (flags, first) in [(&["--context-shift"][..], ""), (&[], "/set context-shift on\n")] {
        let shifted = chat(&[&["--context", &context, "--json"], flags].concat(), [first, script].concat());
        assert_eq!(shifted.code, Some(0), "{shifted:?}");
        assert!(shifted.stderr.contains("context shift: dropped the oldest "), "{shifted:?}");
        let conversation: Value = serde_json::from_str(&shifted.stdout).unwrap();
        assert_eq!(user_texts(&conversation).len(), 4);
        let messages = conversation["messages"].as_array().unwrap();
        assert!(messages.len() < 8 && messages[0]["role"] == "user", "{messages:?}");
        // The last answer is that to what is left.
        assert_eq!(conversation["turns"][3]["ids"], fresh(&messages[..messages.len() - 1])["ids"]);
    }
    // A message that does not fit even alone drops nothing.
    let alone = chat(&["--context", &context, "--context-shift"], format!("hello\n{}\n", "word ".repeat(500)));
    assert!(alone.code == Some(1) && alone.stderr.contains("send a shorter message") && !alone.stderr.contains("dropped"), "{alone:?}");
}

#[test]
fn settings_are_changed_within_a_conversation() {
    let flags = ["--temperature", "1.5", "--seed", "7", "--top-k", "20"];
    let by_flags = chat_json(&flags, "the river\n");
    let by_command = chat_json(&[], "/set temperature 1.5\n/set seed 7\n/set top-k 20\nthe river\n");
    assert_eq!(by_command["turns"][0]["ids"], by_flags["turns"][0]["ids"]);
    assert_ne!(by_command["turns"][0]["ids"], chat_json(&[], "the river\n")["turns"][0]["ids"]);
    let shown = chat(&["--top-p", "0.9"], "/set\n/set max-new 3\nthe river\n");
    assert!(shown.stderr.contains("top-p               0.9") && shown.stderr.contains("3 tokens · "), "{shown:?}");
    failed(chat(&[], "/set temperature -1\n"), 2, &["temperature must be"]);
    failed(chat(&[], "/set colour 1\n"), 2, &["there is no setting \"colour\""]);
}

/// A real terminal, with what a person sees and does.
#[cfg(unix)]
mod terminal {
    use super::*;
    use crate::common::wait_until;
    use std::{
        fs::File,
        io::{Read, Write},
        os::{fd::FromRawFd, unix::fs::PermissionsExt},
        path::Path,
        process::{Child, Stdio},
        sync::{Arc, Mutex},
        thread::{self, JoinHandle},
    };

    struct Terminal {
        person: File,
        child: Child,
        seen: Arc<Mutex<Vec<u8>>>,
        reader: JoinHandle<()>,
        read: usize,
    }

    impl Terminal {
        fn chat(cache: &Path, arguments: &[&str]) -> Self {
            let (mut person, mut program) = (0, 0);
            let none = std::ptr::null_mut();
            // SAFETY: both descriptors are written to places of ours; the rest is optional and absent.
            #[allow(unsafe_code)]
            let made = unsafe { libc::openpty(&mut person, &mut program, none, none.cast(), none.cast()) };
            assert_eq!(made, 0);
            // SAFETY: openpty has just opened them, and nobody else owns them.
            #[allow(unsafe_code)]
            let (person, program) = unsafe { (File::from_raw_fd(person), File::from_raw_fd(program)) };
            let llama = bundle("llama");
            let mut command =
                qhx([&["chat", llama.to_str().unwrap(), "--device", DEVICE, "--max-new", "3", "--ignore-eos"], arguments].concat());
            let side = || Stdio::from(program.try_clone().unwrap());
            command.stdin(side()).stdout(side()).stderr(side()).env("TERM", "xterm").env("QHX_CACHE_DIR", cache);
            let child = command.spawn().unwrap();
            let seen: Arc<Mutex<Vec<u8>>> = Arc::default();
            let (mut from, to) = (person.try_clone().unwrap(), seen.clone());
            let reader = thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = from.read(&mut bytes) {
                    to.lock().unwrap().extend_from_slice(&bytes[..count]);
                }
            });
            let mut terminal = Self { person, child, seen, reader, read: 0 };
            terminal.wait_for("› ");
            terminal
        }

        /// Waits until this is shown, after what was waited for before; gives what is shown between.
        fn wait_for(&mut self, text: &str) -> String {
            let (seen, start, mut found) = (&self.seen, self.read, None);
            wait_until(&format!("{text:?} is shown"), || {
                let seen = String::from_utf8_lossy(&seen.lock().unwrap()).into_owned();
                found = seen.get(start..).and_then(|new| Some(new[..new.find(text)?].to_owned()));
                found.is_some()
            });
            let between = found.unwrap();
            self.read += between.len() + text.len();
            between
        }

        /// Pastes as terminals do: marked where the program asked for it.
        fn paste(&mut self, text: &str) {
            let seen = String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned();
            let marked = seen.rfind("\x1b[?2004h") > seen.rfind("\x1b[?2004l");
            self.enter(if marked { format!("\x1b[200~{text}\x1b[201~") } else { text.to_owned() });
        }

        fn enter(&mut self, keys: impl AsRef<[u8]>) {
            self.person.write_all(keys.as_ref()).unwrap();
        }

        fn leave(mut self) {
            self.enter(b"/exit\r");
            assert!(self.child.wait().unwrap().success());
            self.reader.join().unwrap();
            let seen = String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned();
            assert!(seen.rfind("\x1b[?2004h") < seen.rfind("\x1b[?2004l"), "the terminal is left as it was: {seen:?}");
        }
    }

    #[test]
    fn a_paste_of_several_lines_is_one_message() {
        let folder = scratch();
        let file = folder.path().join("saved");
        let mut terminal = Terminal::chat(folder.path(), &[]);
        terminal.paste("first line\r/second line\r\nthird");
        terminal.enter(b"\r");
        // While the model answers, too.
        terminal.wait_for("\x1b[?2004l");
        let before = terminal.wait_for("\x1b[?2004h");
        assert!(!before.contains("first token"), "pastes are marked only at the next prompt: {before:?}");
        terminal.paste("fourth\rfifth");
        terminal.enter(b"\r");
        terminal.wait_for("first token");
        terminal.wait_for("first token");
        // Bytes that are no text are told, and do not end it.
        terminal.wait_for("› ");
        terminal.enter(b"caf\xe9\r");
        terminal.wait_for("not UTF-8");
        terminal.wait_for("› ");
        // Lines that arrive together are all there.
        terminal.enter(b"one\rtwo \\\rlines\r");
        terminal.wait_for("first token");
        terminal.wait_for("first token");
        terminal.enter(format!("/save {}\r", file.display()));
        terminal.wait_for("saved 4 turns");
        terminal.leave();
        let saved = chat_json(&[], format!("/load {}\n", file.display()));
        let texts: Vec<_> =
            saved["messages"].as_array().unwrap().iter().step_by(2).map(|message| message["content"].as_str().unwrap()).collect();
        assert_eq!(texts, ["first line\n/second line\nthird", "fourth\nfifth", "one", "two \nlines"]);
    }

    #[test]
    fn history_is_kept_for_the_next_time_and_for_its_owner() {
        let folder = scratch();
        let mut terminal = Terminal::chat(folder.path(), &["--no-history"]);
        terminal.enter(b"secret words\r");
        terminal.wait_for("first token");
        terminal.leave();
        let history = folder.path().join("chat_history");
        assert!(!history.exists());
        let mut terminal = Terminal::chat(folder.path(), &[]);
        terminal.enter(b"the river\r");
        terminal.wait_for("first token");
        terminal.leave();
        assert_eq!(fs::metadata(&history).unwrap().permissions().mode() & 0o777, 0o600);
        let kept = fs::read_to_string(&history).unwrap();
        assert!(kept.contains("the river\n/exit\n") && !kept.contains("secret"), "{kept:?}");
        let mut terminal = Terminal::chat(folder.path(), &[]);
        // Up twice, past /exit.
        terminal.enter(b"\x1b[A\x1b[A");
        terminal.wait_for("the river");
        terminal.enter(b"\r");
        terminal.wait_for("first token");
        terminal.leave();
    }
}
