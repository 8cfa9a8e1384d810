//! Tools for models whose chat template knows none: the prompt says what there is, and how to ask for it.

use qhx_runtime::text::{Chat, Message, reply::ReplyFormat};
use serde_json::{Value, json};

/// Puts the tools of a conversation into its system message, and earlier calls and their results into texts.
pub fn write_out(chat: &mut Chat) {
    let Some(tools) = chat.tools.take() else { return };
    let (marks, _) = ReplyFormat::by_prompt();
    let signatures: Vec<String> = tools.as_array().into_iter().flatten().map(|tool| tool["function"].to_string()).collect();
    let instruction = format!(
        "You can call functions. These are available, one per line as JSON:\n{}\n\nTo call a function, answer with\n{}\n{{\"name\": \"FUNCTION\", \"arguments\": {{…}}}}\n{}\nand nothing else. \
         Otherwise answer in plain text.",
        signatures.join("\n"),
        marks.open,
        marks.close
    );
    match chat.messages.first_mut().filter(|message| message.role() == "system") {
        Some(system) => {
            let before = system.content().as_str().unwrap_or_default().to_owned();
            system.fields_mut().insert("content".to_owned(), format!("{before}\n\n{instruction}").into());
        }
        None => chat.messages.insert(0, Message::new("system", instruction)),
    }
    for message in &mut chat.messages {
        let fields = message.fields_mut();
        if let Some(calls) = fields.remove("tool_calls") {
            let mut content = fields.get("content").and_then(Value::as_str).unwrap_or_default().to_owned();
            for call in calls.as_array().into_iter().flatten() {
                let function = &call["function"];
                let call = json!({ "name": function["name"], "arguments": function["arguments"] });
                content += &format!("{}\n{call}\n{}", marks.open, marks.close);
            }
            fields.insert("content".to_owned(), content.into());
        }
        if fields["role"] == "tool" {
            let result = fields.get("content").cloned().unwrap_or_default();
            let result = result.as_str().map_or_else(|| result.to_string(), str::to_owned);
            fields.insert("role".to_owned(), "user".into());
            fields.insert("content".to_owned(), format!("Result of the function:\n{result}").into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages;

    #[test]
    fn tools_calls_and_results_become_texts() {
        let json = r#"{"messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"}],
            "tools": [{"type": "function", "function": {"name": "weather"}}]}"#;
        let mut chat = messages::parse(json).unwrap();
        write_out(&mut chat);
        let contents: Vec<(&str, &str)> =
            chat.messages.iter().map(|message| (message.role(), message.content().as_str().unwrap())).collect();
        assert!(chat.tools.is_none() && contents[0].0 == "system" && contents[0].1.contains("{\"name\":\"weather\"}"), "{contents:?}");
        assert_eq!(contents[2], ("assistant", "<tool_call>\n{\"name\":\"weather\",\"arguments\":{\"city\":\"Rome\"}}\n</tool_call>"));
        assert_eq!(contents[3], ("user", "Result of the function:\nsunny"));
    }
}
