//! How a model writes reasoning and tool calls, found out from its chat template: a conversation with a tool call is rendered, and what stands around the call's name tells the format.

use crate::{Chat, ChatTemplate, Message};
use serde_json::{Value, json};

/// The texts around a part of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marks {
    /// Before it.
    pub open: String,
    /// Behind it.
    pub close: String,
}

impl Marks {
    fn new(open: &str, close: &str) -> Self {
        Self { open: open.to_owned(), close: close.to_owned() }
    }
}

/// How a tool call is written between its marks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallFormat {
    /// `{"name": "f", "arguments": {…}}`
    Json {
        /// What the arguments are called: `arguments`, `parameters`.
        arguments: String,
    },
    /// `<function=f><parameter=k>v</parameter></function>`, with line ends between them.
    Functions,
    /// `call:f{k:'v',n:1}`, with a mark of its own for quotes.
    Braces {
        /// What stands around a text.
        quote: String,
    },
}

/// How far the reasoning of a reply is when the reply begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reasoning {
    /// The model may begin it.
    NotBegun,
    /// The prompt has begun it.
    Begun,
    /// The prompt has ended it, or the model has none.
    Over,
}

/// How a model writes the parts of a reply.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ReplyFormat {
    /// Around its reasoning, where it has any.
    pub reasoning: Option<Marks>,
    /// Around a tool call, and how the call is written; none where the template knows no tool calls.
    pub calls: Option<(Marks, CallFormat)>,
}

/// The marks around reasoning that templates know.
const REASONING: [(&str, &str); 2] = [("<think>", "</think>"), ("<|channel>thought", "<channel|>")];
/// Texts that no template contains.
const NAME: &str = "qhx_probe_name";
const KEY: &str = "qhx_probe_key";
const VALUE: &str = "qhx probe value";

impl ReplyFormat {
    /// As tool calls are written where a template knows none and the prompt has to ask for them.
    pub fn by_prompt() -> (Marks, CallFormat) {
        (Marks::new("<tool_call>", "</tool_call>"), CallFormat::Json { arguments: "arguments".to_owned() })
    }

    /// As a template has it.
    pub fn of(template: &ChatTemplate) -> Self {
        let has = |(open, close): &&(&str, &str)| template.has_text(open) && template.has_text(close);
        let reasoning = REASONING.iter().find(has).map(|(open, close)| Marks::new(open, close));
        // Some templates take the arguments as an object, some as a text.
        let as_object = json!({ KEY: VALUE });
        let as_text = Value::String(as_object.to_string());
        let calls = [as_object, as_text].into_iter().find_map(|arguments| found_in(&rendered(template, arguments)?));
        Self { reasoning, calls }
    }

    /// How far the reasoning of a reply is to a prompt that ends with this text.
    pub fn reasoning_at(&self, end_of_prompt: &str) -> Reasoning {
        let end = end_of_prompt.trim_end();
        match &self.reasoning {
            Some(marks) if end.ends_with(&marks.open) => Reasoning::Begun,
            Some(marks) if !end.ends_with(&marks.close) => Reasoning::NotBegun,
            _ => Reasoning::Over,
        }
    }
}

/// A conversation with a tool call as the template writes it.
fn rendered(template: &ChatTemplate, arguments: Value) -> Option<String> {
    let call = json!({ "type": "function", "id": "call00000", "function": { "name": NAME, "arguments": arguments } });
    let mut asked: Message = Message::new("assistant", "");
    asked.fields_mut().insert("tool_calls".to_owned(), json!([call]));
    let mut chat = Chat::new(vec![Message::new("user", "?"), asked]);
    chat.add_generation_prompt = false;
    template.render(&chat).ok()
}

/// The format of the call in a rendered conversation.
fn found_in(text: &str) -> Option<(Marks, CallFormat)> {
    if let Some((before, rest)) = text.split_once(&format!("<function={NAME}>")) {
        let (inside, after) = rest.split_once("</function>")?;
        inside.contains(&format!("<parameter={KEY}>")).then_some(())?;
        return Some((marks(before, after)?, CallFormat::Functions));
    }
    if let Some((before, rest)) = text.split_once(&format!("call:{NAME}{{")) {
        let (quote, after) = rest.split_once(KEY)?.1.strip_prefix(':')?.split_once(VALUE)?;
        let after = after.strip_prefix(quote)?.strip_prefix('}')?;
        return Some((marks(before, after)?, CallFormat::Braces { quote: quote.to_owned() }));
    }
    let name = text.find(&format!("\"{NAME}\""))?;
    for (start, _) in text[..name].rmatch_indices('{') {
        let mut objects = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
        let Some(Ok(Value::Object(call))) = objects.next() else { continue };
        let arguments = ["arguments", "parameters"].into_iter().find(|key| call.contains_key(*key));
        if let Some(arguments) = arguments.filter(|_| call.get("name") == Some(&NAME.into())) {
            let (before, after) = (&text[..start], &text[start + objects.byte_offset()..]);
            return Some((marks(before, after)?, CallFormat::Json { arguments: arguments.to_owned() }));
        }
    }
    None
}

/// The tags directly around a call: `<tool_call>` and `</tool_call>`.
fn marks(before: &str, after: &str) -> Option<Marks> {
    let (before, after) = (before.trim_end(), after.trim_start());
    let open = before.strip_suffix('>').and_then(|_| before.rfind('<')).map(|at| &before[at..])?;
    let close = after.strip_prefix('<').and_then(|_| after.find('>')).map(|end| &after[..=end])?;
    (!open.contains(char::is_whitespace) && !close.contains(char::is_whitespace)).then(|| Marks::new(open, close))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The way of one family of templates: JSON in tags.
    const JSON: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n\
        {\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}";
    /// Functions and parameters as tags, with reasoning.
    const FUNCTIONS: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n<think>\n\n</think>\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n\
        <function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}";
    /// Braces with quotes of their own.
    const BRACES: &str = "{% for m in messages %}<|turn>{{ m.role }}\n{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ '{' }}\
        {%- for k, v in c.function.arguments | items %}{{ k }}:<|\"|>{{ v }}<|\"|>{% endfor %}{{ '}' }}<tool_call|>{% endfor %}<turn|>\n{% endfor %}\
        {# <think> </think> #}{{ '<|channel>thought\n<channel|>' if thinking }}";

    fn format(source: &str) -> ReplyFormat {
        ReplyFormat::of(&ChatTemplate::new(source, []).unwrap())
    }

    #[test]
    fn templates_tell_their_format() {
        let json = CallFormat::Json { arguments: "arguments".to_owned() };
        assert_eq!(format(JSON), ReplyFormat { reasoning: None, calls: Some((Marks::new("<tool_call>", "</tool_call>"), json)) });
        let found = format(FUNCTIONS);
        assert_eq!(found.calls, Some((Marks::new("<tool_call>", "</tool_call>"), CallFormat::Functions)));
        assert_eq!(found.reasoning, Some(Marks::new("<think>", "</think>")));
        assert_eq!(found.reasoning_at("assistant\n<think>\n"), Reasoning::Begun);
        assert_eq!(found.reasoning_at("<think>\n\n</think>\n\n"), Reasoning::Over);
        assert_eq!(found.reasoning_at("assistant\n"), Reasoning::NotBegun);
        assert_eq!(format(JSON).reasoning_at("assistant\n"), Reasoning::Over);
        let found = format(BRACES);
        let braces = CallFormat::Braces { quote: "<|\"|>".to_owned() };
        assert_eq!(found.calls, Some((Marks::new("<|tool_call>", "<tool_call|>"), braces)));
        assert_eq!(found.reasoning, Some(Marks::new("<|channel>thought", "<channel|>")));
    }

    #[test]
    fn templates_without_tool_calls_have_no_format() {
        for source in [
            "{{ messages[0].content }}",
            "{{ raise_exception('no tools') }}",
            "{{ messages | tojson }}",
            "{{ messages[1].tool_calls[0].function.name }}",
        ] {
            assert_eq!(format(source), ReplyFormat::default(), "{source}");
        }
    }
}
