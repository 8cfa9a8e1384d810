//! Templates whose work grows with the square of the conversation, as that of some published ones does: they render what jinja2 renders.

use qhx_text::{Chat, ChatError, ChatTemplate, Message};
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::atomic::AtomicBool;
use std::{env, fs, time::Instant};

const MESSAGES: usize = 2_001;
const TOOL_TURNS: usize = 300;

/// Turns of about a kilobyte.
fn conversation() -> Chat {
    let text = |number: usize| format!("{number}{}", " word".repeat(200));
    Chat::new((0..MESSAGES).map(|number| Message::new(["user", "assistant"][number % 2], text(number))).collect())
}

/// Questions, calls of a tool, what it gave, and answers.
fn tool_turns() -> Chat {
    let turn = |number: usize| {
        let call =
            json!({ "type": "function", "id": format!("call{number}"), "function": { "name": "look", "arguments": { "at": number } } });
        [
            json!({ "role": "user", "content": "Look!" }),
            json!({ "role": "assistant", "content": "", "tool_calls": [call] }),
            json!({ "role": "tool", "tool_call_id": format!("call{number}"), "content": "seen ".repeat(60) }),
            json!({ "role": "assistant", "content": "I see." }),
        ]
    };
    Chat::new(Message::list_from_json(Value::Array((0..TOOL_TURNS).flat_map(turn).collect())).expect("messages"))
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, []).expect("a template")
}

/// One text that becomes longer with each message.
const GROWING: &str = "{% macro content(message) %}{{ message.content }}{% endmacro %}{% set ns = namespace(out='') %}\
    {% for message in messages %}{% set ns.out = ns.out ~ message.role ~ ': ' %}{% set ns.out = ns.out ~ content(message) ~ '\\n' %}{% endfor %}{{ ns.out }}";

/// Each message looks back for the last one of the other side, and its calls look ahead for what they gave.
const SCANNING: &str = "{% for message in messages %}{% if message.role != 'tool' %}{% set before = namespace(role='', found=false) %}\
    {% for at in range(loop.index0 - 1, -1, -1) %}{% if not before.found and messages[at].role != 'tool' %}\
    {% set before.role = messages[at].role %}{% set before.found = true %}{% endif %}{% endfor %}\
    {% if before.role != message.role %}<{{ message.role }}>{% endif %}{{ message.content }}\
    {% if message.tool_calls %}{% set ahead = namespace(stopped=false) %}{% for at in range(loop.index0 + 1, messages | length) %}\
    {% if ahead.stopped %}{% elif messages[at].role != 'tool' %}{% set ahead.stopped = true %}{% else %}[{{ messages[at].content }}]\
    {% endif %}{% endfor %}{% endif %}{% endif %}{% endfor %}";

/// Each message makes lists of those before it and of those with a role.
const SLICING: &str = "{% for message in messages %}{% set before = messages[:loop.index0] %}\
    {% set users = before | selectattr('role', 'equalto', 'user') | list %}{{ before | length }}/{{ users | length }} {% endfor %}";

#[test]
fn long_conversations_render_as_in_python() {
    for chat in [conversation(), tool_turns()] {
        let (mut grown, mut scanned, mut sliced) = (String::new(), String::new(), String::new());
        let (mut last, mut users) = ("", 0);
        for (number, message) in chat.messages.iter().enumerate() {
            let (role, content) = (message.role(), message.content().as_str().unwrap_or_default());
            writeln!(grown, "{role}: {content}").expect("a line");
            write!(sliced, "{number}/{users} ").expect("a piece");
            users += usize::from(role == "user");
            if role == "tool" {
                write!(scanned, "[{content}]").expect("a piece");
                continue;
            }
            if role != last {
                write!(scanned, "<{role}>").expect("a piece");
            }
            scanned += content;
            last = role;
        }
        for (source, expected) in [(GROWING, grown), (SCANNING, scanned), (SLICING, sliced)] {
            let rendered = template(source).render(&chat);
            assert!(rendered.as_ref() == Ok(&expected), "{source}: {:?}", rendered.map(|text| text.len()));
        }
    }
}

/// Far more is made than may be there at once.
#[test]
fn what_is_dropped_is_given_back() {
    let chat = conversation();
    for (source, expected) in [
        ("{% for m in messages %}{% set x = 'x' * 1000000 %}{% endfor %}{{ x is defined }}", "False"),
        ("{% set ns = namespace() %}{% for m in messages %}{% set ns.x = 'x' * 1000000 %}{% endfor %}{{ ns.x | length }}", "1000000"),
        ("{% set x = 'x' * 1000000 %}{{ ([x] * 100000) | length }}", "100000"),
        ("{% set ns = namespace(x=[]) %}{% for m in messages %}{% set ns.x = [1] * 30000 %}{% endfor %}{{ ns.x | length }}", "30000"),
        ("{% for m in messages %}{% for n in range(300) %}{% set ns = namespace(x=n) %}{% endfor %}{% endfor %}", ""),
        ("{% for m in messages %}{% set x %}{{ 'x' * 500000 }}{% endset %}{% endfor %}", ""),
        ("{% for m in messages %}{% set x = messages | map(attribute='role') %}{% set y = x | list %}{% endfor %}", ""),
        ("{% for m in messages %}{% set b = messages[:] %}{% for n in b %}{% break %}{% endfor %}{% endfor %}", ""),
        (
            "{% for m in messages %}{% set d = {} %}{% for n in 'abcdefgh' * 10 %}{% set d = dict(d, **{n: m}) %}{% endfor %}{% endfor %}",
            "",
        ),
        (
            "{% set ns = namespace(x=0) %}{% for m in messages %}{% set n = namespace(x='x' * 200000) %}{% set n.n = n %}{% if loop.index > 300 %}{% break %}{% endif %}{% endfor %}",
            "",
        ),
    ] {
        assert_eq!(template(source).render(&chat).as_deref(), Ok(expected), "{source}");
    }
}

/// What is kept is not given back, wherever it is kept.
#[test]
fn what_is_kept_counts() {
    let chat = conversation();
    let text = "('x' * 1000000 ~ loop.index)";
    for kept in [
        format!("{{% set ns.x = ns.x + [{text}] %}}"),
        format!("{{% set ns.x = ns.x + [{{1: {text}}}] %}}"),
        format!("{{% set ns.x = ns.x + [namespace(x={text})] %}}"),
        format!("{{% set ns.x = ns.x + [{text}.strip] %}}"),
        format!("{{% set ns.x = ns.x + [[{text}] | map('string')] %}}"),
        format!("{{% set t = {text} %}}{{% macro m() %}}{{{{ t }}}}{{% endmacro %}}{{% set ns.x = ns.x + [m] %}}"),
        format!("{{{{ {text} }}}}"),
    ] {
        let source = format!("{{% set ns = namespace(x=[]) %}}{{% for m in messages %}}{kept}{{% endfor %}}");
        let rendered = template(&source).render(&chat);
        assert!(matches!(&rendered, Err(ChatError::Endless { limit }) if limit.contains(" MiB ")), "{kept}: {rendered:?}");
    }
}

#[test]
fn rendering_can_be_cancelled() {
    let (chat, cancel) = (conversation(), AtomicBool::new(true));
    let plain = template("{% for m in messages %}{{ m.content }}{% endfor %}");
    assert_eq!(plain.render_until(&chat, &cancel), Err(ChatError::Cancelled));
    assert_eq!(plain.render_until(&Chat { without_system: true, ..chat.clone() }, &cancel), Err(ChatError::Cancelled));
    assert!(plain.render_until(&chat, &AtomicBool::new(false)).is_ok());
}

/// Published templates, with what Python's jinja2 makes of long conversations. Run by `cargo xtask test --extended judges`; `QHX_LONG_TEMPLATES` names the file of cases.
#[test]
#[ignore = "needs published templates: cargo xtask test --extended judges"]
fn published_templates_render_as_in_python() {
    let cases = fs::read(env::var_os("QHX_LONG_TEMPLATES").expect("QHX_LONG_TEMPLATES names the cases")).expect("cases");
    let cases: Vec<Value> = serde_json::from_slice(&cases).expect("cases in JSON");
    assert!(cases.len() >= 8, "{} cases", cases.len());
    for case in &cases {
        let template = ChatTemplate::new(case["template"].as_str().expect("a template"), [("bos_token", "<s>"), ("eos_token", "</s>")]);
        let messages: Vec<Message> = Message::list_from_json(case["messages"].clone()).expect("messages");
        let (count, began) = (messages.len(), Instant::now());
        let rendered = template.expect("it compiles").render(&Chat { add_generation_prompt: true, ..Chat::new(messages) });
        println!("{}: {count} messages in {:.2} s", case["name"], began.elapsed().as_secs_f64());
        let is_equal = rendered.as_deref() == Ok(case["text"].as_str().expect("a text"));
        assert!(is_equal, "{} of {count} messages: {:?}", case["name"], rendered.map(|text| text.len()));
    }
}
