//! `+`, `-`, `*` and the like, as Python has them.

use super::ast::Operator;
use super::error::{Result, fail};
use super::interpreter::Interpreter;
use super::value::Value;

impl Interpreter<'_> {
    pub(super) fn arithmetic(&mut self, operator: Operator, left: &Value, right: &Value) -> Result<Value> {
        self.scoped(|this| this.arithmetic_within(operator, left, right))
    }

    fn arithmetic_within(&mut self, operator: Operator, left: &Value, right: &Value) -> Result<Value> {
        for value in [left, right] {
            if let Value::Undefined(missing) = value {
                fail!("{}", missing.words());
            }
        }
        match (operator, left, right) {
            (Operator::Add, Value::Str(a), Value::Str(b)) => self.joined(a, b),
            (Operator::Add, Value::Safe(_), _) | (Operator::Add, _, Value::Safe(_)) => self.joined_safe(left, right),
            (Operator::Add, Value::List(a), Value::List(b)) => {
                let items = self.joined_items(&a.items, &b.items)?;
                self.list(items)
            }
            (Operator::Add, Value::Tuple(a), Value::Tuple(b)) => {
                let items = self.joined_items(&a.items, &b.items)?;
                self.tuple(items)
            }
            (Operator::Multiply, _, _) if repeated(left, right).is_some() => self.repeat(left, right),
            (Operator::Remainder, Value::Str(format), _) => {
                let text = self.percent_format(format, right)?;
                self.made(text)
            }
            _ => match (left.as_int(), right.as_int()) {
                (Some(a), Some(b)) => integers(operator, a, b),
                _ => match (as_float(left), as_float(right)) {
                    (Some(a), Some(b)) => floats(operator, a, b),
                    _ => {
                        let (left, right) = (self.type_of(left), self.type_of(right));
                        fail!("`{}` does not work on '{left}' and '{right}'", symbol(operator))
                    }
                },
            },
        }
    }

    pub(super) fn sign(&mut self, minus: bool, value: &Value) -> Result<Value> {
        match value {
            Value::Undefined(missing) => fail!("{}", missing.words()),
            Value::Float(number) => Ok(Value::Float(if minus { -number } else { *number })),
            _ => match value.as_int() {
                Some(number) if !minus => Ok(Value::Int(number)),
                Some(number) => number.checked_neg().map(Value::Int).map_or_else(|| fail!("{TOO_LARGE}"), Ok),
                None => fail!("a sign does not work on a value of type '{}'", self.type_of(value)),
            },
        }
    }

    fn joined(&mut self, a: &str, b: &str) -> Result<Value> {
        self.budget.allocate(a.len() + b.len())?;
        self.made([a, b].concat())
    }

    fn joined_safe(&mut self, left: &Value, right: &Value) -> Result<Value> {
        let mut text = String::new();
        for value in [left, right] {
            match value {
                Value::Safe(safe) => self.append(&mut text, safe)?,
                Value::Str(plain) => self.append_escaped(&mut text, plain)?,
                _ => fail!("`+` does not work on 'str' and '{}'", self.type_of(value)),
            }
        }
        self.safe(text)
    }

    fn joined_items(&mut self, a: &[Value], b: &[Value]) -> Result<Vec<Value>> {
        let mut items = self.room(a.len() + b.len())?;
        items.extend_from_slice(a);
        items.extend_from_slice(b);
        Ok(items)
    }

    fn repeat(&mut self, left: &Value, right: &Value) -> Result<Value> {
        let Some((value, count)) = repeated(left, right) else { fail!("nothing to repeat") };
        let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
        match value {
            Value::Str(text) | Value::Safe(text) => {
                self.budget.allocate_many(count, text.len())?;
                // An empty text is never worth a loop.
                let text = if text.is_empty() { String::new() } else { text.repeat(count) };
                self.made(text)
            }
            _ => {
                let list = value.as_items().unwrap_or_default();
                let mut items = self.room(list.len().saturating_mul(count))?;
                if !list.is_empty() {
                    (0..count).for_each(|_| items.extend_from_slice(list));
                }
                if matches!(value, Value::List(_)) { self.list(items) } else { self.tuple(items) }
            }
        }
    }
}

const TOO_LARGE: &str = "the result is too large for a number";

/// A text, list or tuple and how often it is wanted.
fn repeated<'v>(left: &'v Value, right: &'v Value) -> Option<(&'v Value, i128)> {
    let is_sequence = |value: &Value| matches!(value, Value::Str(_) | Value::Safe(_) | Value::List(_) | Value::Tuple(_));
    let (value, count) = if is_sequence(left) { (left, right) } else { (right, left) };
    count.as_int().filter(|_| is_sequence(value)).map(|count| (value, count))
}

/// A number as a float.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    match value {
        Value::Float(number) => Some(*number),
        _ => value.as_int().map(|number| number as f64),
    }
}

fn integers(operator: Operator, a: i128, b: i128) -> Result<Value> {
    let result = match operator {
        Operator::Add => a.checked_add(b),
        Operator::Subtract => a.checked_sub(b),
        Operator::Multiply => a.checked_mul(b),
        Operator::Divide => return floats(operator, a as f64, b as f64),
        Operator::FloorDivide | Operator::Remainder if b == 0 => fail!("division by zero"),
        Operator::FloorDivide => a.checked_div_euclid(b).map(|quotient| {
            let exact = a.checked_rem_euclid(b) == Some(0);
            // Euclid rounds up where the divisor is negative.
            if b < 0 && !exact { quotient - 1 } else { quotient }
        }),
        Operator::Remainder => a.checked_rem_euclid(b).map(|rest| if b < 0 && rest != 0 { rest + b } else { rest }),
        Operator::Power if b < 0 => return floats(operator, a as f64, b as f64),
        Operator::Power => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)).or(if matches!(a, 0 | 1) { Some(a) } else { None }),
    };
    match result {
        Some(result) => Ok(Value::Int(result)),
        None => fail!("{TOO_LARGE}"),
    }
}

fn floats(operator: Operator, a: f64, b: f64) -> Result<Value> {
    if b == 0.0 && matches!(operator, Operator::Divide | Operator::FloorDivide | Operator::Remainder) {
        fail!("division by zero");
    }
    let remainder = || {
        let rest = a % b;
        if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest.copysign(if rest == 0.0 { b } else { rest }) }
    };
    let result = match operator {
        Operator::Add => a + b,
        Operator::Subtract => a - b,
        Operator::Multiply => a * b,
        Operator::Divide => a / b,
        Operator::FloorDivide => {
            let quotient = (a - remainder()) / b;
            let floor = quotient.floor();
            if quotient - floor > 0.5 { floor + 1.0 } else { floor }
        }
        Operator::Remainder => remainder(),
        Operator::Power if a == 0.0 && b < 0.0 => fail!("zero cannot be raised to a negative power"),
        Operator::Power if a < 0.0 && b.fract() != 0.0 && a.is_finite() && b.is_finite() => fail!("complex numbers are not supported"),
        Operator::Power => {
            let power = a.powf(b);
            if power.is_infinite() && a.is_finite() && b.is_finite() {
                fail!("{TOO_LARGE}");
            }
            power
        }
    };
    Ok(Value::Float(result))
}

fn symbol(operator: Operator) -> &'static str {
    match operator {
        Operator::Add => "+",
        Operator::Subtract => "-",
        Operator::Multiply => "*",
        Operator::Divide => "/",
        Operator::FloorDivide => "//",
        Operator::Remainder => "%",
        Operator::Power => "**",
    }
}
