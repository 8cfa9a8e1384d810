//! Filters over lists and what can be iterated over.

use crate::jinja::arguments::{Arguments, count, integer, text};
use crate::jinja::ast::Operator;
use crate::jinja::budget::ENTRY_BYTES;
use crate::jinja::error::{Result, fail};
use crate::jinja::interpreter::Interpreter;
use crate::jinja::object::Object;
use crate::jinja::value::{Dict, Missing, Value, View};

#[rustfmt::skip]
pub(super) const NAMES: &[&str] = &[
    "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list", "max", "min", "reverse", "slice",
    "sort", "sum", "unique",
];

impl Interpreter<'_> {
    pub(super) fn sequence_filter(&mut self, name: &str, value: Value, arguments: Arguments) -> Result<Value> {
        match name {
            "d" | "default" => {
                let [default, falsy] = arguments.bind(name, ["default_value", "boolean"], 0)?;
                let falsy = falsy.is_some_and(|falsy| self.truth(&falsy));
                let wanted = value.is_undefined() || (falsy && !self.truth(&value));
                Ok(if wanted { default.unwrap_or(Value::Str("".into())) } else { value })
            }
            "sort" => {
                let [reverse, case_sensitive, attribute] = arguments.bind(name, ["reverse", "case_sensitive", "attribute"], 0)?;
                let [reverse, case_sensitive] = [reverse, case_sensitive].map(|flag| flag.is_some_and(|flag| self.truth(&flag)));
                let keyed = self.keyed_by_several(&value, attribute.as_ref(), case_sensitive)?;
                let items = self.sorted(keyed, reverse)?;
                self.list(items)
            }
            "dictsort" => self.dict_sorted(&value, arguments),
            "groupby" => self.grouped(&value, arguments),
            "unique" => {
                let [case_sensitive, attribute] = arguments.bind(name, ["case_sensitive", "attribute"], 0)?;
                let case_sensitive = case_sensitive.is_some_and(|flag| self.truth(&flag));
                let mut seen = Dict::default();
                let mut unique = Vec::new();
                for (key, item) in self.keyed(&value, attribute.as_ref(), case_sensitive, None)? {
                    let key = self.key(&key)?;
                    self.budget.allocate(ENTRY_BYTES)?;
                    self.budget.steps(24)?;
                    if seen.insert(Value::None, key, Value::None) {
                        self.push(&mut unique, item)?;
                    }
                }
                self.iterator(unique)
            }
            "min" | "max" => {
                let [case_sensitive, attribute] = arguments.bind(name, ["case_sensitive", "attribute"], 0)?;
                let case_sensitive = case_sensitive.is_some_and(|flag| self.truth(&flag));
                let mut best: Option<(Value, Value)> = None;
                for (key, item) in self.keyed(&value, attribute.as_ref(), case_sensitive, None)? {
                    let better = match &best {
                        None => true,
                        Some((least, _)) if name == "min" => self.less(&key, least)?,
                        Some((most, _)) => self.less(most, &key)?,
                    };
                    if better {
                        best = Some((key, item));
                    }
                }
                best.map_or_else(|| self.missing(Missing::Other("the sequence is empty")), |(_, item)| Ok(item))
            }
            "sum" => {
                let [attribute, start] = arguments.bind(name, ["attribute", "start"], 0)?;
                let path = self.path(attribute.as_ref().filter(|attribute| !matches!(attribute, Value::None)))?;
                let mut sum = start.unwrap_or(Value::Int(0));
                if sum.as_str().is_some() {
                    fail!("sum does not work on texts; use join");
                }
                for item in self.items(&value)? {
                    let item = self.along(item, &path, None)?;
                    sum = self.arithmetic(Operator::Add, &sum, &item)?;
                }
                Ok(sum)
            }
            "batch" => self.batched(&value, arguments),
            "slice" => self.sliced(&value, arguments),
            _ => {
                arguments.none(name)?;
                self.plain_sequence_filter(name, &value)
            }
        }
    }

    fn plain_sequence_filter(&mut self, name: &str, value: &Value) -> Result<Value> {
        match name {
            "count" | "length" => Ok(Value::Int(self.length(value)? as i128)),
            "first" => {
                if let Value::Object(id) = value
                    && let Object::Iterator(items, _) = self.get_mut(id)
                {
                    let first = items.pop_front();
                    return first.map_or_else(|| self.missing(Missing::Other("the sequence is empty")), Ok);
                }
                let first = match value {
                    Value::List(list) | Value::Tuple(list) => list.items.first().cloned(),
                    Value::Range(range) => range.get(0),
                    _ => self.items(value)?.into_iter().next(),
                };
                first.map_or_else(|| self.missing(Missing::Other("the sequence is empty")), Ok)
            }
            "last" => {
                if let Value::Object(_) = value {
                    fail!("last does not work on a value of type '{}'; make a list of it first", self.type_of(value));
                }
                let last = match value {
                    Value::List(list) | Value::Tuple(list) => list.items.last().cloned(),
                    _ => self.items(value)?.pop(),
                };
                last.map_or_else(|| self.missing(Missing::Other("the sequence is empty")), Ok)
            }
            "list" => {
                let items = self.items(value)?;
                self.list(items)
            }
            "reverse" => match value {
                Value::Str(text) | Value::Safe(text) => {
                    self.budget.allocate(text.len())?;
                    self.budget.work(text.len())?;
                    self.made(text.chars().rev().collect())
                }
                _ => {
                    let mut items = self.items(value)?;
                    items.reverse();
                    // Of what can only be read once, Jinja makes a list.
                    if matches!(value, Value::Object(_)) { self.list(items) } else { self.iterator(items) }
                }
            },
            _ => match value {
                Value::Undefined(_) => self.iterator(Vec::new()),
                Value::Dict(dict) => {
                    let items = self.items(&Value::View(View::Items, dict.clone()))?;
                    self.iterator(items)
                }
                _ => fail!("items expects a dict, not a value of type '{}'", self.type_of(value)),
            },
        }
    }

    fn length(&mut self, value: &Value) -> Result<usize> {
        Ok(match value {
            Value::Undefined(_) => 0,
            Value::Str(text) | Value::Safe(text) => {
                self.budget.work(text.len())?;
                text.chars().count()
            }
            Value::List(list) | Value::Tuple(list) => list.items.len(),
            Value::Dict(dict) | Value::View(_, dict) => dict.len(),
            Value::Range(range) => range.len(),
            Value::Object(id) if matches!(self.get(id), Object::Loop(_)) => match self.loop_attribute(id, "length")? {
                Some(length) => count(length.as_int().unwrap_or(0)),
                None => 0,
            },
            _ => fail!("a value of type '{}' has no length", self.type_of(value)),
        })
    }

    fn dict_sorted(&mut self, value: &Value, arguments: Arguments) -> Result<Value> {
        let [case_sensitive, by, reverse] = arguments.bind("dictsort", ["case_sensitive", "by", "reverse"], 0)?;
        let [case_sensitive, reverse] = [case_sensitive, reverse].map(|flag| flag.is_some_and(|flag| self.truth(&flag)));
        let by = by.map_or(Ok("key".into()), |by| text("dictsort", Some(&by)))?;
        let place = match &*by {
            "key" => 0,
            "value" => 1,
            _ => fail!("dictsort sorts by 'key' or by 'value'"),
        };
        let Value::Dict(dict) = value else { fail!("dictsort expects a dict, not a value of type '{}'", self.type_of(value)) };
        let pairs = self.items(&Value::View(View::Items, dict.clone()))?;
        let mut keyed = Vec::with_capacity(pairs.len());
        for pair in pairs {
            let key = pair.as_items().and_then(|pair| pair.get(place)).cloned().unwrap_or(Value::None);
            keyed.push((if case_sensitive { key } else { self.ignoring_case(key)? }, pair));
        }
        let items = self.sorted(keyed, reverse)?;
        self.list(items)
    }

    fn grouped(&mut self, value: &Value, arguments: Arguments) -> Result<Value> {
        let [attribute, default, case_sensitive] = arguments.bind("groupby", ["attribute", "default", "case_sensitive"], 1)?;
        let case_sensitive = case_sensitive.is_some_and(|flag| self.truth(&flag));
        let keyed = self.keyed(value, attribute.as_ref(), case_sensitive, default.as_ref())?;
        let mut pairs = Vec::with_capacity(keyed.len());
        for (key, item) in keyed {
            let mut pair = self.room(2)?;
            pair.extend([key.clone(), item]);
            pairs.push((key, self.tuple(pair)?));
        }
        let path = self.path(attribute.as_ref())?;
        let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
        for pair in self.sorted(pairs, false)? {
            let Some([key, item]) = pair.as_items() else { continue };
            let same = match groups.last() {
                Some((last, _)) => self.equal(last, key)?,
                None => false,
            };
            if !same {
                groups.push((key.clone(), Vec::new()));
            }
            if let Some((_, items)) = groups.last_mut() {
                self.push(items, item.clone())?;
            }
        }
        let mut result = self.room(groups.len())?;
        for (key, items) in groups {
            // The key is written as the first item of the group has it.
            let key = match items.first() {
                Some(first) if !case_sensitive => self.along(first.clone(), &path, default.as_ref())?,
                _ => key,
            };
            let items = self.list(items)?;
            result.push(self.group(key, items)?);
        }
        self.list(result)
    }

    fn batched(&mut self, value: &Value, arguments: Arguments) -> Result<Value> {
        let [size, fill] = arguments.bind("batch", ["linecount", "fill_with"], 1)?;
        let size = count(integer("batch", &size.unwrap_or(Value::None))?);
        let items = self.items(value)?;
        let mut batches = Vec::new();
        let mut batch = Vec::new();
        for item in items {
            if batch.len() == size {
                let full = self.list(std::mem::take(&mut batch))?;
                self.push(&mut batches, full)?;
            }
            self.push(&mut batch, item)?;
        }
        if !batch.is_empty() {
            if let Some(fill) = fill.filter(|fill| !matches!(fill, Value::None)) {
                let missing = size.saturating_sub(batch.len());
                let room = self.room(missing)?;
                drop(room);
                batch.extend(std::iter::repeat_n(fill, missing));
            }
            let last = self.list(batch)?;
            self.push(&mut batches, last)?;
        }
        self.iterator(batches)
    }

    fn sliced(&mut self, value: &Value, arguments: Arguments) -> Result<Value> {
        let [slices, fill] = arguments.bind("slice", ["slices", "fill_with"], 1)?;
        let slices = count(integer("slice", &slices.unwrap_or(Value::None))?);
        let fill = fill.filter(|fill| !matches!(fill, Value::None));
        let items = self.items(value)?;
        if slices == 0 {
            fail!("slice: the number of slices must be at least 1");
        }
        let (each, extra) = (items.len() / slices, items.len() % slices);
        let mut result = Vec::new();
        let mut start = 0;
        for number in 0..slices {
            let end = start + each + usize::from(number < extra);
            let mut part = self.room(end - start + 1)?;
            part.extend_from_slice(&items[start..end]);
            part.extend(fill.clone().filter(|_| number >= extra));
            let part = self.list(part)?;
            self.push(&mut result, part)?;
            start = end;
        }
        self.iterator(result)
    }
}
