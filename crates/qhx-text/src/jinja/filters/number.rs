//! Filters that give numbers.

use crate::jinja::arguments::{Arguments, integer, text};
use crate::jinja::ast::Operator;
use crate::jinja::budget::FLOAT_STEPS;
use crate::jinja::error::{Result, fail};
use crate::jinja::interpreter::Interpreter;
use crate::jinja::operators::as_float;
use crate::jinja::print::is_python_space;
use crate::jinja::value::Value;

pub(super) const NAMES: &[&str] = &["abs", "float", "int", "round"];

impl Interpreter<'_> {
    pub(super) fn number_filter(&mut self, name: &str, value: &Value, arguments: Arguments) -> Result<Value> {
        match name {
            "abs" => {
                arguments.none(name)?;
                match value {
                    Value::Float(number) => Ok(Value::Float(number.abs())),
                    _ => match value.as_int().and_then(i128::checked_abs) {
                        Some(number) => Ok(Value::Int(number)),
                        None => fail!("abs does not work on a value of type '{}'", self.type_of(value)),
                    },
                }
            }
            "int" => {
                let [default, base] = arguments.bind(name, ["default", "base"], 0)?;
                let base = base.map_or(Ok(10), |base| integer(name, &base))?;
                self.undefined_is_no_number(value)?;
                let number = match value {
                    Value::Float(number) => whole(*number)?,
                    _ => match value.as_str() {
                        Some(text) => {
                            self.budget.work(text.len().saturating_mul(8))?;
                            match parsed_int(text, base) {
                                Some(number) => Some(number),
                                None => parsed_float(text).map_or(Ok(None), whole)?,
                            }
                        }
                        None => value.as_int(),
                    },
                };
                Ok(number.map(Value::Int).or(default).unwrap_or(Value::Int(0)))
            }
            "float" => {
                let [default] = arguments.bind(name, ["default"], 0)?;
                self.undefined_is_no_number(value)?;
                self.budget.work(value.as_str().map_or(0, str::len).saturating_mul(8))?;
                let number = value.as_str().map_or_else(|| as_float(value), parsed_float);
                Ok(number.map(Value::Float).or(default).unwrap_or(Value::Float(0.0)))
            }
            _ => self.rounded(value, arguments),
        }
    }

    fn undefined_is_no_number(&self, value: &Value) -> Result<()> {
        match value {
            Value::Undefined(missing) => fail!("{}", missing.words()),
            _ => Ok(()),
        }
    }

    fn rounded(&mut self, value: &Value, arguments: Arguments) -> Result<Value> {
        let [precision, method] = arguments.bind("round", ["precision", "method"], 0)?;
        let precision = precision.map_or(Ok(0), |precision| integer("round", &precision))?.clamp(-400, 400);
        let method = method.map_or(Ok("common".into()), |method| text("round", Some(&method)))?;
        self.budget.steps(FLOAT_STEPS)?;
        let Some(number) = as_float(value) else { fail!("round does not work on a value of type '{}'", self.type_of(value)) };
        match &*method {
            "common" => match value.as_int() {
                Some(whole) if precision >= 0 => Ok(Value::Int(whole)),
                Some(whole) => {
                    let unit = Value::Int(10i128.checked_pow(precision.unsigned_abs().min(38) as u32).unwrap_or(i128::MAX));
                    let lower = self.arithmetic(Operator::FloorDivide, &Value::Int(whole), &unit)?.as_int().unwrap_or(0);
                    let unit = unit.as_int().unwrap_or(1);
                    let rest = whole - lower * unit;
                    let up = rest > unit - rest || (rest == unit - rest && lower % 2 != 0);
                    Ok(Value::Int((lower + i128::from(up)).saturating_mul(unit)))
                }
                None => Ok(Value::Float(round_half_even(number, precision as i32))),
            },
            "ceil" | "floor" => {
                let unit = 10f64.powi(precision as i32);
                let scaled = number * unit;
                let whole = if &*method == "ceil" { scaled.ceil() } else { scaled.floor() };
                Ok(Value::Float(whole / unit))
            }
            _ => fail!("round: the method must be 'common', 'ceil' or 'floor'"),
        }
    }
}

/// To the nearest number with so many digits behind the point, and where two are equally near, to the even one.
fn round_half_even(number: f64, precision: i32) -> f64 {
    if !number.is_finite() {
        return number;
    }
    if precision >= 0 {
        return format!("{number:.*}", precision as usize).parse().unwrap_or(number);
    }
    let unit = 10f64.powi(-precision);
    let scaled = number / unit;
    let rounded = scaled.round_ties_even() * unit;
    if rounded.is_finite() { rounded } else { 0.0 }
}

/// A number without its fraction; an error where Python has one too.
fn whole(number: f64) -> Result<Option<i128>> {
    if number.is_nan() || number.is_infinite() {
        return Ok(None);
    }
    if number.abs() >= 1.7e38 {
        fail!("the number is too large");
    }
    Ok(Some(number.trunc() as i128))
}

fn parsed_int(text: &str, base: i128) -> Option<i128> {
    let text = text.trim_matches(is_python_space);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefixed = |prefix: &str| digits.get(..2).filter(|start| start.eq_ignore_ascii_case(prefix)).map(|_| &digits[2..]);
    let digits = match base {
        2 => prefixed("0b"),
        8 => prefixed("0o"),
        16 => prefixed("0x"),
        _ => None,
    }
    .unwrap_or(digits);
    let digits = separated(digits)?;
    let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?;
    let number = i128::from_str_radix(&digits, base).ok()?;
    Some(if negative { -number } else { number })
}

fn parsed_float(text: &str) -> Option<f64> {
    separated(text.trim_matches(is_python_space))?.parse().ok()
}

/// Digits without the single underscores between them; nothing where an underscore stands elsewhere, or a sign where another was taken.
fn separated(digits: &str) -> Option<String> {
    if digits.starts_with('_') || digits.ends_with('_') || digits.contains("__") {
        return None;
    }
    Some(digits.replace('_', ""))
}
