//! Fields of messages: one that neither the server nor the model's template reads is refused by its name.

use crate::error::ApiError;
use qhx::text::ChatTemplate;
use serde_json::{Map, Value};

/// Fields of a message that are read, or only label it.
const MESSAGE: [&str; 6] = ["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"];
/// Fields of a part of a content.
const PART: [&str; 11] =
    ["type", "text", "image_url", "input_audio", "image", "audio", "audio_url", "path", "url", "cache_control", "detail"];

/// Checks the messages of a conversation for a model whose template is this, if it has one.
pub(crate) fn check(messages: &[Value], template: Option<&ChatTemplate>) -> Result<(), ApiError> {
    let by_template = |name: &str| template.is_some_and(|template| template.reads_field(name));
    for (number, message) in messages.iter().enumerate() {
        let Some(fields) = message.as_object() else { continue };
        let place = format!("messages[{number}]");
        let is_read = |name: &str| MESSAGE.contains(&name) || by_template(name);
        check_fields(fields, &place, is_read)?;
        for (number, part) in message["content"].as_array().into_iter().flatten().enumerate() {
            let Some(fields) = part.as_object() else { continue };
            let place = format!("{place}.content[{number}]");
            check_fields(fields, &place, |name| PART.contains(&name) || by_template(name))?;
            let detail = [&part["detail"], &part["image_url"]["detail"]].into_iter().find_map(Value::as_str);
            if detail.is_some_and(|detail| !["auto", "high"].contains(&detail)) {
                return Err(ApiError::field(format!("{place}.image_url.detail"), "can only be `auto` or `high`"));
            }
        }
    }
    Ok(())
}

/// Every field is read, or says nothing.
pub(crate) fn check_fields(fields: &Map<String, Value>, place: &str, is_read: impl Fn(&str) -> bool) -> Result<(), ApiError> {
    let says_nothing = |value: &Value| match value {
        Value::Null => true,
        Value::Array(values) => values.is_empty(),
        _ => false,
    };
    match fields.iter().find(|(name, value)| !is_read(name) && !says_nothing(value)) {
        Some((name, _)) => Err(ApiError::field(format!("{place}.{name}"), "is not supported").code("unsupported_field")),
        None => Ok(()),
    }
}

/// An object of these fields, which are moved: `json!` would copy them, and texts and media may be long.
pub(crate) fn object<const N: usize>(fields: [(&str, Value); N]) -> Value {
    Value::Object(fields.map(|(name, value)| (name.to_owned(), value)).into_iter().collect())
}

/// A part that carries or names an image.
pub(crate) fn image_part(url: Value) -> Value {
    object([("type", "image_url".into()), ("image_url", object([("url", url)]))])
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_that_nobody_reads_are_named() {
        let template = ChatTemplate::new("{# no bold #}{{ message.mood ~ 'audio: loud' }}", []).unwrap();
        let param = |message: Value| check(&[json!({ "role": "system", "content": "x" }), message], Some(&template)).err()?.param;
        // What the official clients send back of an answer.
        assert_eq!(param(json!({ "role": "assistant", "content": "Hi", "refusal": null, "annotations": [], "audio": null })), None);
        assert_eq!(param(json!({ "role": "user", "content": "Hi", "name": "Ann", "mood": "good" })), None);
        let image = |more: Value| json!({ "role": "user", "content": [{ "type": "image_url", "image_url": more }] });
        assert_eq!(param(image(json!({ "url": "data:", "detail": "auto" }))), None);
        for (message, name) in [
            (json!({ "role": "assistant", "audio": { "id": "a" } }), "messages[1].audio"),
            (json!({ "role": "user", "content": [{ "type": "text", "text": "x", "bold": true }] }), "messages[1].content[0].bold"),
            (image(json!({ "url": "data:", "detail": "low" })), "messages[1].content[0].image_url.detail"),
        ] {
            assert_eq!(param(message).as_deref(), Some(name));
        }
    }
}
