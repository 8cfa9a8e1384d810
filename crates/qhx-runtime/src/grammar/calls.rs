//! Grammars of tool calls, in the format of the model's own template.

use super::{Grammars, follower::Follower, schema::written};
use crate::{
    Error,
    text::{
        Tokenizer,
        reply::{CallFormat, Marks, Tools},
    },
};
use serde_json::{Value, json};
use std::fmt::Write;

/// What writes a grammar in Lark's syntax, rule by rule.
struct Rules<'a> {
    text: String,
    count: usize,
    tokenizer: &'a Tokenizer,
}

impl Grammars {
    /// Calls from the first mark on, one or several; or else, where there is one, a content that follows a schema.
    pub(super) fn calls(
        &self,
        (marks, format): &(Marks, CallFormat),
        tools: &Tools,
        one: bool,
        content: Option<&Value>,
    ) -> Result<Follower, Error> {
        let mut rules = Rules::new(&self.tokenizer);
        let (open, close) = (rules.mark(&marks.open), rules.mark(&marks.close));
        let body = rules.body(format, tools)?;
        let call = rules.rule(format!("{open} {body} {close}"));
        let more = if one { String::new() } else { format!(" (/\\n?/ {call})*") };
        let mut start = format!("{call}{more}");
        if let Some(schema) = content {
            let json = rules.json(schema)?;
            start = format!("({start}) | {json}");
        }
        self.lark(rules.start(&start))
    }

    /// What follows the first mark of a call, its last one included.
    pub(super) fn behind_mark(&self, (marks, format): &(Marks, CallFormat), tools: &Tools) -> Result<Follower, Error> {
        let mut rules = Rules::new(&self.tokenizer);
        let close = rules.mark(&marks.close);
        let body = rules.body(format, tools)?;
        self.lark(rules.start(&format!("{body} {close}")))
    }
}

impl<'a> Rules<'a> {
    fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { text: String::new(), count: 0, tokenizer }
    }

    fn start(self, start: &str) -> String {
        format!("start: {start}\n{}", self.text)
    }

    /// A rule of its own, and its name.
    fn rule(&mut self, text: String) -> String {
        self.count += 1;
        let _ = writeln!(self.text, "rule_{}: {text}", self.count);
        format!("rule_{}", self.count)
    }

    /// A text as it stands.
    fn literal(&self, text: &str) -> String {
        Value::from(text).to_string()
    }

    /// A mark: a token of its own where the tokenizer has one.
    fn mark(&self, text: &str) -> String {
        match self.tokenizer.token_to_id(text).filter(|id| self.tokenizer.is_added(*id)) {
            Some(id) => format!("<[{id}]>"),
            None => self.literal(text),
        }
    }

    fn json(&mut self, schema: &Value) -> Result<String, Error> {
        let schema = written(schema.clone())?;
        Ok(self.rule(format!("%json {schema}")))
    }

    fn body(&mut self, format: &CallFormat, tools: &Tools) -> Result<String, Error> {
        match format {
            CallFormat::Json { arguments } => {
                let call = |(name, schema): (&str, &Value)| {
                    json!({
                        "type": "object",
                        "properties": { "name": { "const": name }, arguments: schema },
                        "required": ["name", arguments],
                        "additionalProperties": false,
                    })
                };
                let calls: Vec<Value> = tools.iter().map(call).collect();
                let json = self.json(&json!({ "anyOf": calls }))?;
                Ok(self.rule(format!("/\\n?/ {json} /\\n?/")))
            }
            CallFormat::Functions => {
                let functions: Result<Vec<String>, Error> = tools.iter().map(|(name, schema)| self.function(name, schema)).collect();
                let functions = functions?.join(" | ");
                Ok(self.rule(format!("\"\\n\" ({functions}) \"\\n\"")))
            }
            CallFormat::Braces { quote } => {
                let quote = self.mark(quote);
                let calls: Result<Vec<String>, Error> = tools
                    .iter()
                    .map(|(name, schema)| {
                        let arguments = self.members(schema, &quote, 0)?;
                        let open = self.literal(&format!("call:{name}{{"));
                        Ok(self.rule(format!("{open} {arguments} \"}}\"")))
                    })
                    .collect();
                let calls = calls?.join(" | ");
                Ok(self.rule(format!("({calls})")))
            }
        }
    }

    /// `<function=f>` with its parameters, in the order of the schema.
    fn function(&mut self, name: &str, schema: &Value) -> Result<String, Error> {
        let mut parts = vec![self.literal(&format!("<function={name}>\n"))];
        for (key, value, required) in properties(schema) {
            let open = self.literal(&format!("<parameter={key}>\n"));
            let close = self.literal("\n</parameter>\n");
            let parameter = match value.get("enum").and_then(Value::as_array).filter(|_| value["type"] == "string") {
                Some(texts) => {
                    let texts: Vec<String> = texts.iter().filter_map(Value::as_str).map(|text| self.literal(text)).collect();
                    self.rule(format!("{open} ({}) {close}", texts.join(" | ")))
                }
                None if value["type"] == "string" => {
                    self.count += 1;
                    let text = format!("text_{}", self.count);
                    let _ = writeln!(self.text, "{text}[suffix={close}]: /(?s:.*)/");
                    self.rule(format!("{open} {text}"))
                }
                None => {
                    let json = self.json(value)?;
                    self.rule(format!("{open} {json} {close}"))
                }
            };
            parts.push(if required { parameter } else { format!("({parameter})?") });
        }
        parts.push(self.literal("</function>"));
        Ok(self.rule(parts.join(" ")))
    }

    /// The members of an object between braces, in the order of the schema, with commas between those that are there.
    fn members(&mut self, schema: &Value, quote: &str, depth: usize) -> Result<String, Error> {
        let mut members = Vec::new();
        for (key, value, required) in properties(schema) {
            let value = self.value(value, quote, depth + 1)?;
            let key = self.literal(&format!("{key}:"));
            members.push((self.rule(format!("{key} {value}")), required));
        }
        // From the last to the first: what may follow when something stood before, and when nothing did.
        let (mut more, mut first) = ("\"\"".to_owned(), "\"\"".to_owned());
        for (member, required) in members.into_iter().rev() {
            let (with_comma, alone) = (format!("\",\" {member} {more}"), format!("{member} {more}"));
            let skip = |rest: &str| if required { String::new() } else { format!(" | {rest}") };
            let (next_more, next_first) = (self.rule(with_comma + &skip(&more)), self.rule(alone + &skip(&first)));
            (more, first) = (next_more, next_first);
        }
        Ok(first)
    }

    fn value(&mut self, schema: &Value, quote: &str, depth: usize) -> Result<String, Error> {
        const MAX_DEPTH: usize = 32;
        if depth > MAX_DEPTH {
            return Err(super::wrong(format!("a tool's parameters are nested more than {MAX_DEPTH} deep")));
        }
        if let Some(choices) = schema.get("enum").and_then(Value::as_array) {
            let choices: Vec<String> = choices
                .iter()
                .map(|choice| match choice {
                    Value::String(text) => format!("{quote} {} {quote}", self.literal(text)),
                    other => self.literal(&other.to_string()),
                })
                .collect();
            return Ok(self.rule(choices.join(" | ")));
        }
        let number = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,3})?/";
        Ok(match schema["type"].as_str() {
            Some("string") => self.rule(format!("{quote} /(?s:.*)/ {quote}")),
            Some("integer") => self.rule("/-?(0|[1-9][0-9]{0,17})/".to_owned()),
            Some("number") => self.rule(number.to_owned()),
            Some("boolean") => self.rule("\"true\" | \"false\"".to_owned()),
            Some("null") => self.rule("\"null\"".to_owned()),
            Some("array") => {
                let item = self.value(&schema["items"], quote, depth + 1)?;
                self.rule(format!("\"[\" ({item} (\",\" {item})*)? \"]\""))
            }
            Some("object") if schema.get("properties").is_some() => {
                let members = self.members(schema, quote, depth)?;
                self.rule(format!("\"{{\" {members} \"}}\""))
            }
            // Anything.
            _ => {
                self.count += 1;
                let any = format!("any_{}", self.count);
                let _ = writeln!(
                    self.text,
                    "{any}: {quote} /(?s:.*)/ {quote} | {number} | \"true\" | \"false\" | \"null\" | \"[\" ({any} (\",\" {any})*)? \"]\" | \"{{\" ({any}_member (\",\" {any}_member)*)? \"}}\"\n\
                     {any}_member: /[A-Za-z_][A-Za-z0-9_]*/ \":\" {any}"
                );
                any
            }
        })
    }
}

/// The properties of an object's schema, and whether each is required.
fn properties(schema: &Value) -> Vec<(&String, &Value, bool)> {
    let required = |key: &str| schema["required"].as_array().is_some_and(|keys| keys.iter().any(|known| known == key));
    let properties = schema["properties"].as_object();
    properties.into_iter().flatten().map(|(key, value)| (key, value, required(key))).collect()
}
