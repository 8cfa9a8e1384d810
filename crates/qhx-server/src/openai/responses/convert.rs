//! From a request to a conversation.

use super::types::{Input, ResponsesRequest};
use crate::{
    error::ApiError,
    generate::{ChatJob, Sampling},
    messages::{image_part, object},
    openai::{
        requests::at_least_one,
        structure::{choose_tools, constraint, limit_reasoning},
        types::{FunctionWord, NamedFunction, NamedSchema, ResponseFormat, ToolChoiceJson, ToolChoiceWord},
    },
};
use qhx::{Model, Structure};
use serde_json::{Map, Value};

pub(super) fn job(request: ResponsesRequest, model: &Model) -> Result<ChatJob, ApiError> {
    let refused = |field: &str, problem: &str| Err(ApiError::field(field, problem));
    if request.store == Some(true) {
        return refused("store", "cannot be true: nothing is stored");
    }
    if request.previous_response_id.is_some() {
        return refused("previous_response_id", "is not supported: nothing is stored; send the whole conversation");
    }
    if request.background == Some(true) {
        return refused("background", "cannot be true");
    }
    if request.truncation.as_deref().is_some_and(|how| how != "disabled") {
        return refused("truncation", "can only be `disabled`: nothing is cut silently");
    }
    if request.service_tier.as_deref().is_some_and(|tier| !["auto", "default"].contains(&tier)) {
        return refused("service_tier", "can only be `auto` or `default`");
    }
    if request.include.as_ref().is_some_and(|include| !include.is_empty()) {
        return refused("include", "must be empty");
    }
    let mut messages = Vec::new();
    if let Some(instructions) = request.instructions {
        messages.push(object([("role", "system".into()), ("content", instructions.into())]));
    }
    match request.input {
        Input::Text(text) => messages.push(object([("role", "user".into()), ("content", text.into())])),
        Input::Items(items) => {
            for (place, item) in items.into_iter().enumerate() {
                let wrong = |problem: String| ApiError::field("input", format!("item {}: {problem}", place + 1));
                add(item, &mut messages).map_err(wrong)?;
            }
        }
    }
    let tools = request.tools.unwrap_or_default().into_iter().map(tool).collect::<Result<Vec<_>, _>>()?;
    let tools = (!tools.is_empty()).then(|| Value::from(tools));
    let mut structure = Structure::default();
    choose_tools(
        &mut structure,
        tools.as_ref(),
        request.tool_choice.map(choice).transpose()?,
        request.parallel_tool_calls.unwrap_or(true),
    )?;
    structure.constraint = match request.text.and_then(|text| text.format) {
        Some(text) => constraint(format(text)?)?,
        None => None,
    };
    let mut template_options = Map::new();
    let effort = request.reasoning.and_then(|reasoning| reasoning.effort);
    limit_reasoning(&mut structure, &mut template_options, model, effort, None)?;
    let sampling = Sampling {
        temperature: request.temperature,
        top_p: request.top_p,
        max_tokens: at_least_one("max_output_tokens", request.max_output_tokens)?,
        structure,
        ..Sampling::default()
    };
    Ok(ChatJob { messages, tools, template_options, sampling, choices: 1 })
}

/// Adds what an item says in the form of chat completions.
fn add(mut item: Value, messages: &mut Vec<Value>) -> Result<(), String> {
    // A message need not say that it is one.
    let kind = item["type"].as_str().unwrap_or("message").to_owned();
    let mut take = |name: &str| item.get_mut(name).map(Value::take).unwrap_or_default();
    let mut text = |name: &str| Some(take(name)).filter(Value::is_string).ok_or_else(|| format!("`{name}` must be a text"));
    match kind.as_str() {
        "message" => {
            let role = text("role")?;
            let content = match take("content") {
                text @ Value::String(_) => text,
                Value::Array(parts) => parts.into_iter().map(part).collect::<Result<Vec<_>, _>>()?.into(),
                _ => return Err("`content` must be a text or a list of parts".to_owned()),
            };
            messages.push(object([("role", role), ("content", content)]));
        }
        "function_call" => {
            let function = object([("name", text("name")?), ("arguments", text("arguments")?)]);
            let call = object([("id", text("call_id")?), ("type", "function".into()), ("function", function)]);
            // Calls that were made together are one message.
            match messages.last_mut().and_then(|last| last.get_mut("tool_calls")?.as_array_mut()) {
                Some(calls) => calls.push(call),
                None => {
                    let calls = vec![call].into();
                    messages.push(object([("role", "assistant".into()), ("content", Value::Null), ("tool_calls", calls)]));
                }
            }
        }
        "function_call_output" => {
            let (id, content) = (text("call_id")?, text("output")?);
            messages.push(object([("role", "tool".into()), ("tool_call_id", id), ("content", content)]));
        }
        // What was reasoned before is not needed again.
        "reasoning" => {}
        other => return Err(format!("an item of type `{other}` is not supported")),
    }
    Ok(())
}

fn part(mut part: Value) -> Result<Value, String> {
    let kind = part["type"].as_str().unwrap_or_default().to_owned();
    let mut take = |name: &str| part.get_mut(name).map(Value::take).unwrap_or_default();
    match kind.as_str() {
        "input_text" | "output_text" | "text" => Ok(object([("type", "text".into()), ("text", take("text"))])),
        "input_image" => Ok(image_part(take("image_url"))),
        "input_audio" => Ok(object([("type", "input_audio".into()), ("input_audio", take("input_audio"))])),
        other => Err(format!("a part of type `{other}` is not supported")),
    }
}

/// A tool in the form of chat completions.
fn tool(mut tool: Value) -> Result<Value, ApiError> {
    match tool["type"].as_str() {
        Some("function") => {
            let mut take = |name: &str| tool.get_mut(name).map(Value::take).unwrap_or_default();
            let mut function = object([("name", take("name")), ("parameters", take("parameters"))]);
            let description = take("description");
            if description.is_string() {
                function["description"] = description;
            }
            Ok(object([("type", "function".into()), ("function", function)]))
        }
        other => Err(ApiError::field("tools", format!("has one of type `{}`; only functions are supported", other.unwrap_or_default()))),
    }
}

fn choice(choice: Value) -> Result<ToolChoiceJson, ApiError> {
    let wrong = || ApiError::field("tool_choice", "must be `auto`, `required`, `none` or a function by its name");
    match (choice.as_str(), choice["type"].as_str(), choice["name"].as_str()) {
        (Some("auto"), ..) => Ok(ToolChoiceJson::Word(ToolChoiceWord::Auto)),
        (Some("required"), ..) => Ok(ToolChoiceJson::Word(ToolChoiceWord::Required)),
        (Some("none"), ..) => Ok(ToolChoiceJson::Word(ToolChoiceWord::None)),
        (None, Some("function"), Some(name)) => {
            Ok(ToolChoiceJson::Function { _kind: FunctionWord::Function, function: NamedFunction { name: name.to_owned() } })
        }
        _ => Err(wrong()),
    }
}

fn format(mut format: Value) -> Result<ResponseFormat, ApiError> {
    match format["type"].as_str() {
        Some("json_schema") => {
            let schema = Some(format["schema"].take()).filter(|schema| !schema.is_null());
            Ok(ResponseFormat::JsonSchema { json_schema: NamedSchema { _name: None, _description: None, schema, _strict: None } })
        }
        Some("json_object") => Ok(ResponseFormat::JsonObject),
        Some("text") => Ok(ResponseFormat::Text),
        _ => Err(ApiError::field("text.format", "must be of type `text`, `json_object` or `json_schema`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn items_become_messages() {
        let items = [
            json!({ "role": "user", "content": [{ "type": "input_text", "text": "Weather?" }] }),
            json!({ "type": "reasoning", "id": "rs_1", "summary": [] }),
            json!({ "type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}" }),
            json!({ "type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}" }),
            json!({ "type": "function_call_output", "call_id": "c1", "output": "sunny" }),
        ];
        let mut messages = Vec::new();
        items.into_iter().for_each(|item| add(item, &mut messages).unwrap());
        assert_eq!(messages.len(), 3);
        assert_eq!(messages[0]["content"][0], json!({ "type": "text", "text": "Weather?" }));
        assert_eq!(messages[1]["tool_calls"].as_array().unwrap().len(), 2);
        assert_eq!(messages[2], json!({ "role": "tool", "tool_call_id": "c1", "content": "sunny" }));
        assert!(add(json!({ "type": "file_search_call" }), &mut messages).unwrap_err().contains("file_search_call"));
    }
}
