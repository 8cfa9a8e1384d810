//! What a call is given.

use super::error::{Result, fail};
use super::text::Text;
use super::value::Value;

#[derive(Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Text, Value)>,
}

impl Arguments {
    /// The arguments by the names of the callee's parameters, of which the first `required` must be given.
    pub(super) fn bind<const N: usize>(self, callee: &str, names: [&str; N], required: usize) -> Result<[Option<Value>; N]> {
        if self.positional.len() > N {
            fail!("{callee} takes at most {N} arguments, {} are given", self.positional.len());
        }
        let mut bound = [const { None }; N];
        for (place, value) in bound.iter_mut().zip(self.positional) {
            *place = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|candidate| **candidate == *name) {
                Some(place) if bound[place].is_none() => bound[place] = Some(value),
                Some(_) => fail!("{callee}: the argument '{name}' is given twice"),
                None => fail!("{callee} has no argument '{name}'"),
            }
        }
        match bound.iter().take(required).position(Option::is_none) {
            Some(place) => fail!("{callee}: the argument '{}' is missing", names[place]),
            None => Ok(bound),
        }
    }

    /// For callees without parameters.
    pub(super) fn none(self, callee: &str) -> Result<()> {
        self.bind(callee, [], 0).map(|[]| ())
    }

    /// For callees that take any number of values, but none by name.
    pub(super) fn without_names(&self, callee: &str) -> Result<()> {
        match self.named.first() {
            Some((name, _)) => fail!("{callee} has no argument '{name}'"),
            None => Ok(()),
        }
    }
}

/// An argument that must be a text.
pub(super) fn text(callee: &str, value: Option<&Value>) -> Result<Text> {
    match value {
        Some(Value::Str(text) | Value::Safe(text)) => Ok(text.clone()),
        Some(other) => fail!("{callee} expects a text, not a value of type '{}'", other.type_name()),
        None => fail!("{callee}: a text is missing"),
    }
}

/// A text, where one is given that is not none.
pub(super) fn optional_text(callee: &str, value: Option<&Value>) -> Result<Option<Text>> {
    match value {
        None | Some(Value::None) => Ok(None),
        value => text(callee, value).map(Some),
    }
}

/// An argument that must be a whole number.
pub(super) fn integer(callee: &str, value: &Value) -> Result<i128> {
    match value.as_int() {
        Some(number) => Ok(number),
        None => fail!("{callee} expects a whole number, not a value of type '{}'", value.type_name()),
    }
}

/// A whole number, where one is given that is not none.
pub(super) fn optional_integer(callee: &str, value: Option<&Value>) -> Result<Option<i128>> {
    match value {
        None | Some(Value::None) => Ok(None),
        Some(value) => integer(callee, value).map(Some),
    }
}

/// A number of things: negative ones are none, and what is too many will be refused by the budget.
pub(super) fn count(number: i128) -> usize {
    usize::try_from(number.max(0)).unwrap_or(usize::MAX)
}
