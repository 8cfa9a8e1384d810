//! From a request of the Anthropic API to a conversation.

use super::types::{
    Content, MessageParam, MessagesRequest, OutputFormat, Role, Thinking, ThinkingKind, ToolChoice as Choice, ToolChoiceKind,
};
use crate::{
    error::ApiError,
    generate::{ChatJob, Sampling},
    messages::{check_fields, image_part, object},
    openai::structure::limit_reasoning,
};
use qhx::{Constraint, Model, Structure, ToolChoice, text::reply::Tools};
use serde_json::{Map, Value};

/// A line that coding agents put into the system prompt; it changes with every request, and nothing computed for one could serve the next.
const BILLING: &str = "x-anthropic-billing-header";

pub(super) fn job(request: MessagesRequest, model: &Model) -> Result<ChatJob, ApiError> {
    if request.max_tokens == 0 {
        return Err(ApiError::field("max_tokens", "is 0, expected at least 1"));
    }
    if request.service_tier.as_deref().is_some_and(|tier| !["auto", "standard_only"].contains(&tier)) {
        return Err(ApiError::field("service_tier", "can only be `auto` or `standard_only`"));
    }
    let mut messages = Vec::new();
    if let Some(system) = request.system {
        let text = system_text(system)?;
        if !text.is_empty() {
            messages.push(object([("role", "system".into()), ("content", text.into())]));
        }
    }
    for (place, message) in request.messages.into_iter().enumerate() {
        let wrong = |problem: String| ApiError::field("messages", format!("message {}: {problem}", place + 1));
        convert(message, &mut messages).map_err(wrong)?;
    }
    let mut tools = Vec::new();
    for tool in request.tools.unwrap_or_default() {
        if let Some(kind) = tool.kind.filter(|kind| kind != "custom") {
            return Err(ApiError::field("tools", format!("has one of type `{kind}`; only tools that you run yourself are supported")));
        }
        let mut function = object([("name", tool.name.into()), ("parameters", tool.input_schema.into())]);
        if let Some(description) = tool.description {
            function["description"] = description.into();
        }
        tools.push(object([("type", "function".into()), ("function", function)]));
    }
    let tools = (!tools.is_empty()).then(|| Value::from(tools));
    let mut structure = Structure::default();
    choose_tools(&mut structure, tools.as_ref(), request.tool_choice)?;
    let OutputFormat::JsonSchema { schema } = match request.output_config.and_then(|config| config.format) {
        Some(format) => format,
        None => OutputFormat::JsonSchema { schema: Value::Null },
    };
    structure.constraint = (!schema.is_null()).then_some(Constraint::JsonSchema(schema));
    let mut template_options = Map::new();
    think(&mut structure, &mut template_options, model, request.thinking)?;
    let sampling = Sampling {
        temperature: request.temperature,
        top_p: request.top_p,
        top_k: request.top_k,
        stop: request.stop_sequences.unwrap_or_default(),
        max_tokens: Some(request.max_tokens),
        structure,
        ..Sampling::default()
    };
    Ok(ChatJob { messages, tools, template_options, sampling, choices: 1 })
}

fn system_text(system: Content) -> Result<String, ApiError> {
    let blocks = match system {
        Content::Text(text) => return Ok(text),
        Content::Blocks(blocks) => blocks,
    };
    let mut texts = Vec::new();
    for block in &blocks {
        let text = block["text"].as_str().filter(|_| block["type"] == "text");
        let text = text.ok_or_else(|| ApiError::field("system", "has a block that is not text"))?;
        if !text.starts_with(BILLING) {
            texts.push(text);
        }
    }
    Ok(texts.join("\n\n"))
}

/// Adds what a message says in the form of the OpenAI API: results of tools are messages of their own.
fn convert(message: MessageParam, messages: &mut Vec<Value>) -> Result<(), String> {
    let blocks = match message.content {
        Content::Text(text) => vec![object([("type", "text".into()), ("text", text.into())])],
        Content::Blocks(blocks) => blocks,
    };
    let (mut parts, mut calls, mut thoughts) = (Vec::new(), Vec::new(), String::new());
    for mut block in blocks {
        check_block(&block)?;
        let kind = block["type"].as_str().unwrap_or_default().to_owned();
        let mut take = |name: &str| block.get_mut(name).map(Value::take).unwrap_or_default();
        let mut text = |name: &str| match take(name) {
            Value::String(text) => Ok(text),
            _ => Err(format!("`{name}` must be a text")),
        };
        match kind.as_str() {
            "text" => parts.push(object([("type", "text".into()), ("text", text("text")?.into())])),
            "image" => parts.push(image(take("source"))?),
            "thinking" => thoughts += &text("thinking")?,
            "redacted_thinking" => {}
            "tool_use" => {
                let (id, name) = (text("id")?, text("name")?);
                let function = object([("name", name.into()), ("arguments", take("input"))]);
                calls.push(object([("id", id.into()), ("type", "function".into()), ("function", function)]));
            }
            "tool_result" => {
                let id = text("tool_use_id")?;
                let mut content = result_text(take("content"))?;
                if take("is_error") == true {
                    content.insert_str(0, "Error: ");
                }
                messages.push(object([("role", "tool".into()), ("tool_call_id", id.into()), ("content", content.into())]));
            }
            other => return Err(format!("a block of type `{other}` is not supported")),
        }
    }
    let only_text = parts.iter().all(|part| part["type"] == "text");
    let (is_empty, joined) = (parts.is_empty(), || parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n"));
    let content = if only_text { Value::from(joined()) } else { Value::from(parts) };
    match message.role {
        // A message may have been nothing but results.
        Role::User if is_empty => {}
        Role::User => messages.push(object([("role", "user".into()), ("content", content)])),
        Role::Assistant => {
            let mut said = object([("role", "assistant".into()), ("content", content)]);
            if !calls.is_empty() {
                said["tool_calls"] = calls.into();
            }
            if !thoughts.is_empty() {
                said["reasoning_content"] = thoughts.into();
            }
            messages.push(said);
        }
    }
    Ok(())
}

/// A field of a block that nobody reads is refused by its name. Where a prompt may be cached makes no difference: equal beginnings are found without it.
fn check_block(block: &Value) -> Result<(), String> {
    let Some(fields) = block.as_object() else { return Err("a block must be an object".to_owned()) };
    let known: &[&str] = match block["type"].as_str().unwrap_or_default() {
        "text" => &["text"],
        "image" => &["source"],
        "thinking" => &["thinking", "signature"],
        "redacted_thinking" => &["data"],
        "tool_use" => &["id", "name", "input"],
        "tool_result" => &["tool_use_id", "content", "is_error"],
        _ => return Ok(()),
    };
    let is_read = |name: &str| ["type", "cache_control"].contains(&name) || known.contains(&name);
    check_fields(fields, "content", is_read).map_err(|error| error.message)
}

fn image(mut source: Value) -> Result<Value, String> {
    match source["type"].as_str() {
        Some("base64") => {
            let (Some(kind), Some(data)) = (source["media_type"].as_str(), source["data"].as_str()) else {
                return Err("an image needs `source.media_type` and `source.data`".to_owned());
            };
            Ok(image_part(format!("data:{kind};base64,{data}").into()))
        }
        Some("url") if source["url"].is_string() => Ok(image_part(source["url"].take())),
        Some("url") => Err("an image needs `source.url`".to_owned()),
        other => Err(format!("an image with a source of type {other:?} is not supported; send it as `base64` or `url`")),
    }
}

fn result_text(content: Value) -> Result<String, String> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text),
        Value::Array(blocks) => {
            let text = |block: &Value| block["text"].as_str().map(str::to_owned).ok_or("a tool's result can only be text".to_owned());
            Ok(blocks.iter().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        _ => Err("a tool's result must be a text or blocks".to_owned()),
    }
}

fn choose_tools(structure: &mut Structure, tools: Option<&Value>, choice: Option<Choice>) -> Result<(), ApiError> {
    let Some(choice) = choice else { return Ok(()) };
    structure.one_call = choice.disable_parallel_tool_use.unwrap_or(false);
    match choice.kind {
        ToolChoiceKind::Auto => {}
        ToolChoiceKind::None => structure.tool_choice = ToolChoice::None,
        ToolChoiceKind::Any | ToolChoiceKind::Tool if tools.is_none() => return Err(ApiError::field("tool_choice", "needs `tools`")),
        ToolChoiceKind::Any => structure.tool_choice = ToolChoice::Required,
        ToolChoiceKind::Tool => {
            let name = choice.name.ok_or_else(|| ApiError::field("tool_choice.name", "is missing"))?;
            let tools = Tools::from_json(tools.unwrap_or(&Value::Null)).map_err(qhx::Error::from)?;
            let missing = || ApiError::field("tool_choice", format!("names `{name}`, which is not among `tools`"));
            structure.tools = Some(tools.only(&name).ok_or_else(missing)?);
            (structure.tool_choice, structure.one_call) = (ToolChoice::Required, true);
        }
    }
    Ok(())
}

fn think(
    structure: &mut Structure,
    template_options: &mut Map<String, Value>,
    model: &Model,
    thinking: Option<Thinking>,
) -> Result<(), ApiError> {
    let most = match thinking {
        None => return Ok(()),
        Some(Thinking { kind: ThinkingKind::Disabled, .. }) => Some(0),
        Some(Thinking { budget_tokens, .. }) => budget_tokens,
    };
    if model.reply_format().reasoning.is_none() && most != Some(0) {
        return Err(ApiError::field("thinking", "needs a model that reasons, which this one is not"));
    }
    limit_reasoning(structure, template_options, model, None, Some(most.unwrap_or(usize::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn converted(message: Value) -> Result<Vec<Value>, String> {
        let mut messages = Vec::new();
        convert(serde_json::from_value(message).unwrap(), &mut messages).map(|()| messages)
    }

    #[test]
    fn blocks_become_messages() {
        let results = json!({ "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": "t1", "content": [{ "type": "text", "text": "sunny" }] },
            { "type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": true, "cache_control": { "type": "ephemeral" } },
            { "type": "text", "text": "And now?" },
        ] });
        let expected = [
            json!({ "role": "tool", "tool_call_id": "t1", "content": "sunny" }),
            json!({ "role": "tool", "tool_call_id": "t2", "content": "Error: no such city" }),
            json!({ "role": "user", "content": "And now?" }),
        ];
        assert_eq!(converted(results).unwrap(), expected);
        let said = json!({ "role": "assistant", "content": [
            { "type": "thinking", "thinking": "Hm.", "signature": "" },
            { "type": "text", "text": "Let me see." },
            { "type": "tool_use", "id": "t1", "name": "f", "input": { "a": 1 } },
        ] });
        let calls = json!([{ "id": "t1", "type": "function", "function": { "name": "f", "arguments": { "a": 1 } } }]);
        assert_eq!(
            converted(said).unwrap(),
            [json!({ "role": "assistant", "content": "Let me see.", "tool_calls": calls, "reasoning_content": "Hm." })]
        );
        let picture = json!({ "role": "user", "content": [{ "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "AAEC" } }] });
        assert_eq!(converted(picture).unwrap()[0]["content"][0]["image_url"]["url"], "data:image/png;base64,AAEC");
        for block in [
            json!({ "type": "document" }),
            json!({ "type": "image", "source": { "type": "file", "file_id": "x" } }),
            json!({ "type": "text" }),
            json!({ "type": "text", "text": "x", "frobnicate": 1 }),
        ] {
            assert!(converted(json!({ "role": "user", "content": [block] })).is_err(), "{block}");
        }
    }

    #[test]
    fn lines_that_change_with_every_request_are_dropped() {
        let blocks = json!([{ "type": "text", "text": "x-anthropic-billing-header: cc=1" }, { "type": "text", "text": "Be kind." }]);
        assert_eq!(system_text(serde_json::from_value(blocks).unwrap()).unwrap(), "Be kind.");
    }
}
