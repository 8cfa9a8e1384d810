//! Methods of Python's types. The sandbox gives out none that change what they belong to.

pub(super) mod string;

use super::arguments::{Arguments, integer};
use super::error::{Result, fail};
use super::interpreter::Interpreter;
use super::object::ObjectId;
use super::value::{Value, View};

/// What there is under an attribute's name.
pub(super) enum Found {
    Method,
    /// Python has it, and the sandbox does not give it out.
    Unsafe,
    /// Python has it, and it is not supported here.
    Unsupported,
    Nothing,
}

/// Looks an attribute up in a type.
pub(super) fn find(type_name: &str, name: &str) -> Found {
    let (methods, unsafe_ones, unsupported): (&[&str], &[&str], &[&str]) = match type_name {
        "str" => (string::METHODS, &[], &["encode", "isidentifier", "isprintable", "maketrans", "translate"]),
        "list" => (&["copy", "count", "index"], &["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"], &[]),
        "tuple" => (&["count", "index"], &[], &[]),
        "dict" => (&["copy", "get", "items", "keys", "values"], &["clear", "pop", "popitem", "setdefault", "update"], &["fromkeys"]),
        "dict_keys" | "dict_values" | "dict_items" => (&[], &[], &["isdisjoint", "mapping"]),
        "range" => (&["count", "index"], &[], &["start", "stop", "step"]),
        "int" | "bool" => (
            &["bit_length", "conjugate"],
            &[],
            &["as_integer_ratio", "bit_count", "denominator", "from_bytes", "imag", "numerator", "real", "to_bytes"],
        ),
        "float" => (&["conjugate", "is_integer"], &[], &["as_integer_ratio", "fromhex", "hex", "imag", "real"]),
        "loop" => (&["changed", "cycle"], &[], &[]),
        "cycler" => (&["next", "reset"], &[], &["items", "pos"]),
        "macro" => (&[], &[], &["arguments", "caller", "catch_kwargs", "catch_varargs", "explicit_caller"]),
        "function" => (&[], &[], &["fromkeys"]),
        _ => (&[], &[], &[]),
    };
    if methods.contains(&name) {
        Found::Method
    } else if unsafe_ones.contains(&name) {
        Found::Unsafe
    } else if unsupported.contains(&name) {
        Found::Unsupported
    } else {
        Found::Nothing
    }
}

impl Interpreter<'_> {
    /// Calls a method that [`find`] found.
    pub(super) fn method(&mut self, value: &Value, name: &str, arguments: Arguments) -> Result<Value> {
        match value {
            Value::Str(text) => self.string_method(text, name, arguments),
            Value::Safe(_)
                if ["center", "format", "format_map", "join", "ljust", "partition", "replace", "rjust", "rpartition"].contains(&name) =>
            {
                fail!("the method '{name}' of a text marked as safe is not supported")
            }
            Value::Safe(text) => self.string_method(text, name, arguments),
            Value::Dict(dict) => match name {
                "get" => {
                    let [key, default] = arguments.bind(name, ["key", "default"], 1)?;
                    let key = self.key(&key.unwrap_or(Value::None))?;
                    Ok(dict.get(&key).cloned().or(default).unwrap_or(Value::None))
                }
                _ => {
                    arguments.none(name)?;
                    Ok(match name {
                        "items" => Value::View(View::Items, dict.clone()),
                        "keys" => Value::View(View::Keys, dict.clone()),
                        "values" => Value::View(View::Values, dict.clone()),
                        _ => value.clone(),
                    })
                }
            },
            Value::List(_) | Value::Tuple(_) | Value::Range(_) => self.sequence_method(value, name, arguments),
            Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                arguments.none(name)?;
                Ok(match (name, value) {
                    ("is_integer", Value::Float(number)) => Value::Bool(number.fract() == 0.0 && number.is_finite()),
                    ("bit_length", _) => Value::Int(i128::from(128 - value.as_int().unwrap_or(0).unsigned_abs().leading_zeros())),
                    (_, Value::Float(_)) => value.clone(),
                    _ => Value::Int(value.as_int().unwrap_or(0)),
                })
            }
            Value::Object(id) => self.object_method(id, value, name, arguments),
            _ => fail!("a value of type '{}' has no method '{name}'", self.type_of(value)),
        }
    }

    fn object_method(&mut self, id: &ObjectId, value: &Value, name: &str, arguments: Arguments) -> Result<Value> {
        match self.type_of(value) {
            "loop" => self.loop_method(id, name, arguments),
            "cycler" => self.cycler_method(id, name, arguments),
            of => fail!("a value of type '{of}' has no method '{name}'"),
        }
    }

    fn sequence_method(&mut self, value: &Value, name: &str, arguments: Arguments) -> Result<Value> {
        if name == "copy" {
            arguments.none(name)?;
            return Ok(value.clone());
        }
        let [wanted, start, stop] = arguments.bind(name, ["value", "start", "stop"], 1)?;
        let wanted = wanted.unwrap_or(Value::None);
        let items = self.items(value)?;
        let length = items.len() as i128;
        let bound = |value: Option<Value>, default: i128| -> Result<i128> {
            let bound = value.map_or(Ok(default), |value| integer(name, &value))?;
            Ok((if bound < 0 { bound.saturating_add(length) } else { bound }).clamp(0, length))
        };
        let (start, stop) = (bound(start, 0)? as usize, bound(stop, length)? as usize);
        let mut count = 0;
        for (place, item) in items.iter().enumerate().take(stop).skip(start) {
            if self.equal(item, &wanted)? {
                if name == "index" {
                    return Ok(Value::Int(place as i128));
                }
                count += 1;
            }
        }
        if name == "index" {
            fail!("index: the value is not in the {}", self.type_of(value));
        }
        Ok(Value::Int(count))
    }
}
