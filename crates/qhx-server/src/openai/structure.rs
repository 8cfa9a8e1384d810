//! What the content of an answer follows: formats, tools, reasoning.

use super::types::{Effort, ResponseFormat, ToolChoiceJson, ToolChoiceWord};
use crate::error::ApiError;
use qhx::{Constraint, Model, Structure, ToolChoice, text::reply::Tools};
use serde_json::{Map, Value};

/// Tokens of reasoning for an effort; none: as many as the model likes.
fn budget(effort: Effort) -> Option<usize> {
    match effort {
        Effort::None | Effort::Minimal => Some(0),
        Effort::Low => Some(512),
        Effort::Medium => Some(2048),
        Effort::High => None,
    }
}

pub(crate) fn constraint(format: ResponseFormat) -> Result<Option<Constraint>, ApiError> {
    Ok(match format {
        ResponseFormat::Text => None,
        ResponseFormat::JsonObject => Some(Constraint::JsonObject),
        ResponseFormat::JsonSchema { json_schema } => {
            let schema = json_schema.schema.ok_or_else(|| ApiError::field("response_format.json_schema.schema", "is missing"))?;
            Some(Constraint::JsonSchema(schema))
        }
        ResponseFormat::Regex { regex } => Some(Constraint::Regex(regex)),
        ResponseFormat::Lark { grammar } => Some(Constraint::Lark(grammar)),
    })
}

/// Says which of the tools are called.
pub(crate) fn choose_tools(
    structure: &mut Structure,
    tools: Option<&Value>,
    choice: Option<ToolChoiceJson>,
    parallel: bool,
) -> Result<(), ApiError> {
    structure.one_call = !parallel;
    let Some(tools) = tools else {
        return match choice {
            None | Some(ToolChoiceJson::Word(ToolChoiceWord::None | ToolChoiceWord::Auto)) => Ok(()),
            Some(_) => Err(ApiError::field("tool_choice", "needs `tools`")),
        };
    };
    match choice {
        None | Some(ToolChoiceJson::Word(ToolChoiceWord::Auto)) => {}
        Some(ToolChoiceJson::Word(ToolChoiceWord::Required)) => structure.tool_choice = ToolChoice::Required,
        Some(ToolChoiceJson::Word(ToolChoiceWord::None)) => structure.tool_choice = ToolChoice::None,
        Some(ToolChoiceJson::Function { function, .. }) => {
            let only = Tools::from_json(tools).map_err(qhx::Error::from)?.only(&function.name);
            let missing = || ApiError::field("tool_choice", format!("names `{}`, which is not among `tools`", function.name));
            structure.tools = Some(only.ok_or_else(missing)?);
            (structure.tool_choice, structure.one_call) = (ToolChoice::Required, true);
        }
    }
    Ok(())
}

/// Says how much the model reasons. `enable_thinking` is what templates call it.
pub(crate) fn limit_reasoning(
    structure: &mut Structure,
    template_options: &mut Map<String, Value>,
    model: &Model,
    effort: Option<Effort>,
    most: Option<usize>,
) -> Result<(), ApiError> {
    let most = match (effort, most) {
        (None, None) => return Ok(()),
        (_, Some(most)) => Some(most),
        (Some(effort), None) => budget(effort),
    };
    if model.reply_format().reasoning.is_none() {
        return match most {
            Some(0) => Ok(()),
            _ => Err(ApiError::field("reasoning_effort", "needs a model that reasons, which this one is not")),
        };
    }
    template_options.entry("enable_thinking").or_insert(Value::Bool(most != Some(0)));
    // A template that begins the reasoning in any case is made to end it.
    structure.reasoning_budget = most;
    Ok(())
}
