//! Filters that look at attributes of items, and those that apply tests and filters to each item.
//!
//! Jinja's are lazy; here all items are looked at when the filter is applied. The result can be read once, as there.

use crate::jinja::arguments::{Arguments, text};
use crate::jinja::error::{Result, fail};
use crate::jinja::interpreter::Interpreter;
use crate::jinja::value::{Missing, Value};

pub(super) const NAMES: &[&str] = &["attr", "map", "reject", "rejectattr", "select", "selectattr"];

impl Interpreter<'_> {
    pub(super) fn select_filter(&mut self, name: &str, value: &Value, arguments: Arguments) -> Result<Value> {
        match name {
            "attr" => {
                let [attribute] = arguments.bind(name, ["name"], 1)?;
                let attribute = text(name, attribute.as_ref())?;
                let of = self.type_of(value);
                let found = self.own_attribute(value, &attribute)?;
                found.map_or_else(|| self.missing(Missing::Attribute { of, name: attribute }), Ok)
            }
            "map" => self.mapped(value, arguments),
            _ => self.selected(name, value, arguments),
        }
    }

    fn mapped(&mut self, value: &Value, arguments: Arguments) -> Result<Value> {
        let mut result = Vec::new();
        if !self.truth(value) {
            return self.iterator(result);
        }
        let items = self.items(value)?;
        if arguments.positional.is_empty() && arguments.named.iter().any(|(name, _)| **name == *"attribute") {
            let [attribute, default] = arguments.bind("map", ["attribute", "default"], 1)?;
            let path = self.path(attribute.as_ref())?;
            let default = default.filter(|default| !matches!(default, Value::None));
            for item in items {
                let item = self.along(item, &path, default.as_ref())?;
                self.push(&mut result, item)?;
            }
            return self.iterator(result);
        }
        let Arguments { positional, named } = arguments;
        let Some((filter, positional)) = positional.split_first() else { fail!("map needs the name of a filter or an attribute") };
        let filter = text("map", Some(filter))?;
        for item in items {
            self.budget.allocate_many(positional.len() + named.len(), size_of::<Value>())?;
            let item = self.filter(&filter, item, Arguments { positional: positional.to_vec(), named: named.clone() })?;
            self.push(&mut result, item)?;
        }
        self.iterator(result)
    }

    fn selected(&mut self, name: &str, value: &Value, arguments: Arguments) -> Result<Value> {
        let (by_attribute, wanted) = (name.ends_with("attr"), name.starts_with("select"));
        let mut result = Vec::new();
        if !self.truth(value) {
            return self.iterator(result);
        }
        let Arguments { positional, named } = arguments;
        let mut positional = &positional[..];
        let mut path = Vec::new();
        if by_attribute {
            let Some((attribute, rest)) = positional.split_first() else { fail!("{name} needs the name of an attribute") };
            path = self.path(Some(attribute))?;
            positional = rest;
        }
        for item in self.items(value)? {
            let tested = self.along(item.clone(), &path, None)?;
            let holds = match positional.split_first() {
                Some((test, positional)) => {
                    let test = text(name, Some(test))?;
                    self.budget.allocate_many(positional.len() + named.len(), size_of::<Value>())?;
                    self.test(&test, &tested, Arguments { positional: positional.to_vec(), named: named.clone() })?
                }
                None => self.truth(&tested),
            };
            if holds == wanted {
                self.push(&mut result, item)?;
            }
        }
        self.iterator(result)
    }

    /// The parts of an attribute's path, such as `function.name` or `0.id`.
    pub(super) fn path(&mut self, attribute: Option<&Value>) -> Result<Vec<Value>> {
        match attribute {
            None | Some(Value::None) => Ok(Vec::new()),
            Some(Value::Str(text) | Value::Safe(text)) => self.path_of(text),
            Some(other) => Ok(vec![other.clone()]),
        }
    }

    fn path_of(&mut self, text: &str) -> Result<Vec<Value>> {
        let mut path = Vec::new();
        for part in text.split('.') {
            let is_index = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
            let part = match part.parse() {
                Ok(index) if is_index => Value::Int(index),
                _ => self.text(part)?,
            };
            self.push(&mut path, part)?;
        }
        Ok(path)
    }

    /// What lies at the end of a path; the default where a part of it is undefined.
    pub(super) fn along(&mut self, mut value: Value, path: &[Value], default: Option<&Value>) -> Result<Value> {
        for part in path {
            self.budget.steps(1)?;
            value = self.item(&value, part)?;
            if let Some(default) = default.filter(|default| value.is_undefined() && !matches!(default, Value::None)) {
                value = default.clone();
            }
        }
        Ok(value)
    }

    /// Texts in lower case, others as they are.
    pub(super) fn ignoring_case(&mut self, value: Value) -> Result<Value> {
        match value.as_str() {
            Some(text) => self.in_case(text, "lower"),
            None => Ok(value),
        }
    }

    /// Each item with what lies along a path from it.
    pub(super) fn keyed(
        &mut self,
        value: &Value,
        attribute: Option<&Value>,
        case_sensitive: bool,
        default: Option<&Value>,
    ) -> Result<Vec<(Value, Value)>> {
        let path = self.path(attribute)?;
        let items = self.items(value)?;
        self.budget.allocate_many(items.len(), size_of::<(Value, Value)>())?;
        let mut keyed = Vec::with_capacity(items.len());
        for item in items {
            let key = self.along(item.clone(), &path, default)?;
            keyed.push((if case_sensitive { key } else { self.ignoring_case(key)? }, item));
        }
        Ok(keyed)
    }

    /// Each item with what lies along several paths from it, given with commas between them.
    pub(super) fn keyed_by_several(
        &mut self,
        value: &Value,
        attribute: Option<&Value>,
        case_sensitive: bool,
    ) -> Result<Vec<(Value, Value)>> {
        let mut paths = Vec::new();
        match attribute {
            Some(Value::Str(text) | Value::Safe(text)) => {
                for part in text.split(',') {
                    paths.push(self.path_of(part)?);
                }
            }
            other => paths.push(self.path(other)?),
        }
        let items = self.items(value)?;
        self.budget.allocate_many(items.len(), size_of::<(Value, Value)>())?;
        let mut keyed = Vec::with_capacity(items.len());
        for item in items {
            let mut keys = self.room(paths.len())?;
            for path in &paths {
                let key = self.along(item.clone(), path, None)?;
                keys.push(if case_sensitive { key } else { self.ignoring_case(key)? });
            }
            keyed.push((self.list(keys)?, item));
        }
        Ok(keyed)
    }
}
