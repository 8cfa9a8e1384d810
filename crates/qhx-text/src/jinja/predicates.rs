//! Tests: `x is defined`, `x is divisibleby 3`.

use super::arguments::{Arguments, integer};
use super::ast::Comparison;
use super::error::{Result, fail};
use super::interpreter::Interpreter;
use super::object::Object;
use super::operators::as_float;
use super::value::Value;

impl Interpreter<'_> {
    pub(super) fn test(&mut self, name: &str, value: &Value, arguments: Arguments) -> Result<bool> {
        self.scoped(|this| this.test_within(name, value, arguments))
    }

    fn test_within(&mut self, name: &str, value: &Value, arguments: Arguments) -> Result<bool> {
        let comparison = match name {
            "eq" | "equalto" | "==" => Some(Comparison::Equal),
            "ne" | "!=" => Some(Comparison::NotEqual),
            "lt" | "lessthan" | "<" => Some(Comparison::Less),
            "le" | "<=" => Some(Comparison::LessOrEqual),
            "gt" | "greaterthan" | ">" => Some(Comparison::Greater),
            "ge" | ">=" => Some(Comparison::GreaterOrEqual),
            "in" => Some(Comparison::In),
            _ => None,
        };
        if let Some(comparison) = comparison {
            let [other] = arguments.bind(name, ["other"], 1)?;
            return self.compare(comparison, value, &other.unwrap_or(Value::None));
        }
        match name {
            "sameas" => {
                let [other] = arguments.bind(name, ["other"], 1)?;
                Ok(self.same(value, &other.unwrap_or(Value::None)))
            }
            "divisibleby" => {
                let [divisor] = arguments.bind(name, ["num"], 1)?;
                let divisor = integer(name, &divisor.unwrap_or(Value::None))?;
                self.remainder(value, divisor, 0)
            }
            _ => {
                arguments.none(name)?;
                self.test_alone(name, value)
            }
        }
    }

    fn test_alone(&mut self, name: &str, value: &Value) -> Result<bool> {
        Ok(match name {
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "integer" => matches!(value, Value::Int(_)),
            "float" => matches!(value, Value::Float(_)),
            "number" => as_float(value).is_some(),
            "string" => value.as_str().is_some(),
            "mapping" => matches!(value, Value::Dict(_)),
            "escaped" => matches!(value, Value::Safe(_)),
            "sequence" => {
                matches!(value, Value::Str(_) | Value::Safe(_) | Value::List(_) | Value::Tuple(_) | Value::Dict(_) | Value::Range(_))
                    || value.is_undefined()
            }
            "iterable" => match value {
                Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) | Value::Function(_) | Value::Method(_) => false,
                Value::Object(id) => matches!(self.get(id), Object::Iterator(..) | Object::Loop(_)),
                _ => true,
            },
            "callable" => match value {
                Value::Undefined(_) | Value::Function(_) | Value::Method(_) => true,
                Value::Object(id) => matches!(self.get(id), Object::Macro(_) | Object::Loop(_) | Object::Joiner { .. }),
                _ => false,
            },
            "even" => self.remainder(value, 2, 0)?,
            "odd" => self.remainder(value, 2, 1)?,
            "lower" | "upper" => {
                let text = self.string_of(value)?;
                let has = |lower: bool| text.chars().any(|c| if lower { c.is_lowercase() } else { c.is_uppercase() });
                has(name == "lower") && !has(name == "upper")
            }
            "filter" => super::filters::exists(value.as_str().unwrap_or_default()),
            _ => fail!("there is no test '{name}'"),
        })
    }

    fn remainder(&mut self, value: &Value, divisor: i128, wanted: i128) -> Result<bool> {
        let rest = self.arithmetic(super::ast::Operator::Remainder, value, &Value::Int(divisor))?;
        self.equal(&rest, &Value::Int(wanted))
    }
}
