//! What an answer has to look like: a JSON schema, a regular expression, a grammar, tool calls, limited reasoning.

use crate::text::reply::Tools;
use serde_json::Value;

/// What an answer has to look like. By default it is free.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Structure {
    /// What the content follows: the whole answer, or what comes behind the reasoning.
    pub constraint: Option<Constraint>,
    /// The tools that may be called. A call is always well-formed, in the model's own format, with arguments that follow the tool's schema.
    pub tools: Option<Tools>,
    /// Whether they must be.
    pub tool_choice: ToolChoice,
    /// At most one call.
    pub one_call: bool,
    /// The most tokens of reasoning; after them the model is made to answer.
    pub reasoning_budget: Option<usize>,
}

impl Structure {
    /// Whether answers are free.
    pub fn is_free(&self) -> bool {
        self.constraint.is_none() && self.reasoning_budget.is_none() && (self.tools.is_none() || self.tool_choice == ToolChoice::None)
    }
}

/// What a content follows.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Constraint {
    /// A JSON schema, by which the content is JSON.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// A regular expression that the whole content matches, in the syntax of the crate `regex`.
    Regex(String),
    /// A context-free grammar in the variant of Lark's syntax that the crate `llguidance` takes.
    Lark(String),
}

/// Whether tools are called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As the model likes.
    #[default]
    Auto,
    /// At least one.
    Required,
    /// None.
    None,
}
