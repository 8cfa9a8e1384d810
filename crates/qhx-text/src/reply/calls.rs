//! Tool calls: what may be called, and the call that a text is.

use super::CallFormat;
use serde_json::{Map, Value};

/// A call that the model asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The function.
    pub name: String,
    /// Its arguments: a JSON object, written out.
    pub arguments: String,
}

/// The tools of a conversation, in the form of the OpenAI API.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tools(Vec<Tool>);

#[derive(Clone, Debug, PartialEq)]
struct Tool {
    name: String,
    parameters: Value,
}

/// Why a list of tools cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tools: {problem}")]
pub struct ToolsError {
    problem: String,
}

impl Tools {
    /// Reads `[{"type": "function", "function": {"name": …, "parameters": {…}}}, …]`.
    pub fn from_json(json: &Value) -> Result<Self, ToolsError> {
        let wrong = |problem: String| ToolsError { problem };
        let list = json.as_array().ok_or_else(|| wrong("expected a list of tools".to_owned()))?;
        let mut tools: Vec<Tool> = Vec::new();
        for (place, tool) in list.iter().enumerate() {
            let number = place + 1;
            if tool["type"].as_str().is_some_and(|kind| kind != "function") {
                return Err(wrong(format!("tool {number} is of type {}, expected \"function\"", tool["type"])));
            }
            let function = &tool["function"];
            let name = function["name"].as_str().filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| wrong(format!("tool {number} has no `function.name`")))?;
            if !name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c)) {
                return Err(wrong(format!(
                    "the name {name:?} of tool {number} has characters other than letters, digits, `_`, `-` and `.`"
                )));
            }
            if tools.iter().any(|tool| tool.name == name) {
                return Err(wrong(format!("two tools are called {name:?}")));
            }
            let parameters = match &function["parameters"] {
                Value::Null => serde_json::json!({ "type": "object", "properties": {} }),
                parameters @ Value::Object(_) => parameters.clone(),
                _ => return Err(wrong(format!("`parameters` of {name:?} must be a JSON schema"))),
            };
            tools.push(Tool { name: name.to_owned(), parameters });
        }
        Ok(Self(tools))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The names with the JSON schemas of their parameters.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|tool| (tool.name.as_str(), &tool.parameters))
    }

    /// Only the tool of this name.
    pub fn only(&self, name: &str) -> Option<Self> {
        self.0.iter().find(|tool| tool.name == name).map(|tool| Self(vec![tool.clone()]))
    }

    /// The call that a text between its marks is; none where it is not one.
    pub(super) fn parse(&self, format: &CallFormat, text: &str) -> Option<ToolCall> {
        let (name, arguments) = match format {
            CallFormat::Json { arguments } => json_call(text, arguments)?,
            CallFormat::Functions => self.function_call(text)?,
            CallFormat::Braces { quote } => braces_call(text, quote)?,
        };
        Some(ToolCall { name, arguments: Value::Object(arguments).to_string() })
    }

    /// Whether a parameter of a tool is a text, as far as its schema says.
    fn is_text(&self, tool: &str, parameter: &str) -> Option<bool> {
        let tool = self.0.iter().find(|known| known.name == tool)?;
        match tool.parameters["properties"][parameter].get("type")? {
            Value::String(kind) => Some(kind == "string"),
            Value::Array(kinds) => Some(kinds.iter().all(|kind| kind == "string" || kind == "null")),
            _ => None,
        }
    }

    fn function_call(&self, text: &str) -> Option<(String, Map<String, Value>)> {
        let (name, mut rest) = text.trim().strip_prefix("<function=")?.split_once('>')?;
        let mut arguments = Map::new();
        loop {
            rest = rest.trim_start();
            if let Some(end) = rest.strip_prefix("</function>") {
                return end.trim().is_empty().then(|| (name.to_owned(), arguments));
            }
            let (key, behind) = rest.strip_prefix("<parameter=")?.split_once('>')?;
            let (value, behind) = behind.split_once("</parameter>")?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let typed = || serde_json::from_str(value.trim()).unwrap_or_else(|_| Value::from(value));
            let value = if self.is_text(name, key) == Some(true) { Value::from(value) } else { typed() };
            arguments.insert(key.to_owned(), value);
            rest = behind;
        }
    }
}

fn json_call(text: &str, arguments: &str) -> Option<(String, Map<String, Value>)> {
    let Value::Object(mut call) = serde_json::from_str(text.trim()).ok()? else { return None };
    let name = call.get("name")?.as_str()?.to_owned();
    let arguments = match call.remove(arguments) {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments,
        // Some models write the object as a text.
        Some(Value::String(text)) => serde_json::from_str(&text).ok()?,
        Some(_) => return None,
    };
    Some((name, arguments))
}

fn braces_call(text: &str, quote: &str) -> Option<(String, Map<String, Value>)> {
    let (name, rest) = text.trim().strip_prefix("call:")?.split_once('{')?;
    let mut reader = Braces { rest, quote, depth: 0 };
    let arguments = reader.object()?;
    reader.rest.trim().is_empty().then(|| (name.to_owned(), arguments))
}

/// Objects and values that may stand in each other.
const MAX_DEPTH: usize = 64;

/// Reads JSON whose keys have no quotes and whose texts have others.
struct Braces<'a> {
    rest: &'a str,
    quote: &'a str,
    depth: usize,
}

impl<'a> Braces<'a> {
    fn take(&mut self, text: &str) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// What stands before the first of some characters.
    fn until(&mut self, ends: &[char]) -> Option<&'a str> {
        let end = self.rest.find(ends)?;
        let (before, rest) = self.rest.split_at(end);
        self.rest = rest;
        Some(before.trim())
    }

    /// Behind its opening brace.
    fn object(&mut self) -> Option<Map<String, Value>> {
        let mut entries = Map::new();
        while !self.take("}") {
            if !entries.is_empty() && !self.take(",") {
                return None;
            }
            let key = match self.take(self.quote) {
                true => {
                    let (key, rest) = self.rest.split_once(self.quote)?;
                    self.rest = rest;
                    key
                }
                false => self.until(&[':'])?,
            };
            if !self.take(":") {
                return None;
            }
            entries.insert(key.to_owned(), self.value()?);
        }
        Some(entries)
    }

    fn value(&mut self) -> Option<Value> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let value = if self.take(self.quote) {
            let (text, rest) = self.rest.split_once(self.quote)?;
            self.rest = rest;
            Value::from(text)
        } else if self.take("{") {
            Value::Object(self.object()?)
        } else if self.take("[") {
            let mut items = Vec::new();
            while !self.take("]") {
                if !items.is_empty() && !self.take(",") {
                    return None;
                }
                items.push(self.value()?);
            }
            Value::Array(items)
        } else {
            serde_json::from_str(self.until(&[',', '}', ']'])?).ok()?
        };
        self.depth -= 1;
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tools() -> Tools {
        let properties = json!({ "city": { "type": "string" }, "days": { "type": "integer" }, "free": {} });
        Tools::from_json(&json!([{ "type": "function", "function": { "name": "weather", "parameters": { "type": "object", "properties": properties } } }])).unwrap()
    }

    fn call(format: CallFormat, text: &str) -> Option<(String, Value)> {
        tools().parse(&format, text).map(|call| (call.name, serde_json::from_str(&call.arguments).unwrap()))
    }

    #[test]
    fn calls_are_read_in_each_format() {
        let json_format = || CallFormat::Json { arguments: "arguments".to_owned() };
        let expected = Some(("weather".to_owned(), json!({ "city": "Lisbon", "days": 2 })));
        assert_eq!(call(json_format(), "\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Lisbon\", \"days\": 2}}\n"), expected);
        assert_eq!(call(json_format(), r#"{"name": "weather", "arguments": "{\"city\": \"Lisbon\", \"days\": 2}"}"#), expected);
        let text = "\n<function=weather>\n<parameter=city>\nLisbon\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n";
        assert_eq!(call(CallFormat::Functions, text), expected);
        let braces = || CallFormat::Braces { quote: "<|\"|>".to_owned() };
        assert_eq!(call(braces(), "call:weather{city:<|\"|>Lisbon<|\"|>,days:2}"), expected);
        let deep = call(braces(), "call:f{a:{b:[1,<|\"|>x,}<|\"|>],c:null},d:true}").unwrap().1;
        assert_eq!(deep, json!({ "a": { "b": [1, "x,}"], "c": null }, "d": true }));
    }

    #[test]
    fn what_a_schema_calls_a_text_stays_one() {
        let text =
            "<function=weather><parameter=city>12</parameter><parameter=free>12</parameter><parameter=days>many</parameter></function>";
        assert_eq!(call(CallFormat::Functions, text).unwrap().1, json!({ "city": "12", "free": 12, "days": "many" }));
    }

    #[test]
    fn what_is_no_call_is_none() {
        for text in ["", "{", "{\"arguments\": {}}", "{\"name\": \"f\", \"arguments\": [1]}", "{\"name\": \"f\", \"arguments\": {}} x"] {
            assert_eq!(call(CallFormat::Json { arguments: "arguments".to_owned() }, text), None, "{text}");
        }
        for text in ["<function=f>", "<function=f></function> x", "<function=f><parameter=a>1</function>"] {
            assert_eq!(call(CallFormat::Functions, text), None, "{text}");
        }
        let deep = format!("call:f{{a:{}", "[".repeat(100_000));
        for text in ["call:f{", "call:f{a:1", "call:f{a 1}", "call:f{a:1}}", "call:f{a:nope}", deep.as_str()] {
            assert_eq!(call(CallFormat::Braces { quote: "'".to_owned() }, text), None, "{}", &text[..text.len().min(40)]);
        }
    }

    #[test]
    fn tools_are_checked() {
        let refused = |json: Value| Tools::from_json(&json).unwrap_err().to_string();
        let tool = |name: &str| json!({ "type": "function", "function": { "name": name } });
        assert!(refused(json!({})).contains("a list"));
        assert!(refused(json!([{ "type": "web_search" }])).contains("web_search"));
        assert!(refused(json!([{ "type": "function" }])).contains("function.name"));
        assert!(refused(json!([tool("a b")])).contains("characters"));
        assert!(refused(json!([tool("a"), tool("a")])).contains("two tools"));
        assert_eq!(Tools::from_json(&json!([tool("a")])).unwrap().iter().count(), 1);
    }
}
