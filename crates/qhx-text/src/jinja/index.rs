//! `x.name`, `x[item]` and `x[a:b:c]`.

use super::budget::OBJECT_BYTES;
use super::error::{Failure, Result, fail};
use super::interpreter::Interpreter;
use super::methods;
use super::object::Object;
use super::text::Text;
use super::value::{Key, Missing, Range, Value};

impl Interpreter<'_> {
    /// `value.name`: an attribute, else an item of that name.
    pub(super) fn attribute(&mut self, value: &Value, name: &Text) -> Result<Value> {
        if let Some(found) = self.own_attribute(value, name)? {
            return Ok(found);
        }
        if let Value::Dict(dict) = value
            && let Some(found) = dict.get(&Key::Str(name.clone()))
        {
            return Ok(found.clone());
        }
        self.missing(Missing::Attribute { of: self.type_of(value), name: name.clone() })
    }

    /// `value[item]`: an item, else an attribute of that name.
    pub(super) fn item(&mut self, value: &Value, item: &Value) -> Result<Value> {
        if let Value::Undefined(missing) = value {
            fail!("{}", missing.words());
        }
        if let Some(found) = self.own_item(value, item)? {
            return Ok(found);
        }
        match item {
            Value::Str(name) | Value::Safe(name) => {
                let of = self.type_of(value);
                let found = self.own_attribute(value, name)?;
                found.map_or_else(|| self.missing(Missing::Attribute { of, name: name.clone() }), Ok)
            }
            _ => self.missing(Missing::Item { of: self.type_of(value) }),
        }
    }

    /// An item, where the value has such items and this one.
    fn own_item(&mut self, value: &Value, item: &Value) -> Result<Option<Value>> {
        Ok(match (value, item.as_int()) {
            (Value::Dict(dict), _) => match self.key(item) {
                Ok(key) => dict.get(&key).cloned(),
                // A key that cannot be one is not there.
                Err(Failure::Problem(_)) => None,
                Err(limit) => return Err(limit),
            },
            (Value::List(list) | Value::Tuple(list), Some(index)) => place(index, list.items.len()).map(|place| list.items[place].clone()),
            (Value::Range(range), Some(index)) => place(index, range.len()).and_then(|place| range.get(place)),
            (Value::Str(text) | Value::Safe(text), Some(index)) => {
                self.budget.work(text.len())?;
                let length = if text.is_ascii() { text.len() } else { text.chars().count() };
                let character = place(index, length).and_then(|place| text.chars().nth(place));
                match character {
                    Some(character) => Some(self.text(character.encode_utf8(&mut [0; 4]))?),
                    None => None,
                }
            }
            _ => None,
        })
    }

    /// An attribute that the value's type has: methods, and the attributes of objects.
    pub(super) fn own_attribute(&mut self, value: &Value, name: &Text) -> Result<Option<Value>> {
        if let Value::Undefined(missing) = value {
            fail!("{}", missing.words());
        }
        let of = self.type_of(value);
        if name.starts_with('_') {
            // Names of the language's inside stay inside; other names with an underscore are just not there.
            let inside = name.starts_with("__") && !matches!(value, Value::Object(_));
            return inside.then(|| self.missing(Missing::Unsafe { of, name: name.clone() })).transpose();
        }
        if let Value::Object(id) = value {
            let found = match self.get(id) {
                Object::Namespace(entries) => entries.get(&Key::Str(name.clone())).cloned(),
                Object::Loop(_) => self.loop_attribute(id, name)?,
                Object::Macro(closure) if **name == *"name" => Some(Value::Str((&closure.definition.name).into())),
                Object::Cycler { items, next, .. } if **name == *"current" => items.get(*next).cloned(),
                _ => None,
            };
            if found.is_some() || matches!(self.get(id), Object::Namespace(_)) {
                return Ok(found);
            }
        }
        if let Value::Tuple(list) = value
            && list.is_group
            && let Some(place) = ["grouper", "list"].iter().position(|field| **field == **name)
        {
            return Ok(list.items.get(place).cloned());
        }
        Ok(match methods::find(of, name) {
            methods::Found::Method => Some(Value::Method(self.budget.keep((value.clone(), name.clone()), OBJECT_BYTES)?)),
            methods::Found::Unsafe => Some(self.missing(Missing::Unsafe { of, name: name.clone() })?),
            methods::Found::Unsupported => fail!("the attribute '{name}' of '{of}' objects is not supported"),
            methods::Found::Nothing => None,
        })
    }

    /// `value[start:stop:step]`
    pub(super) fn slice(&mut self, value: &Value, [start, stop, step]: &[Value; 3]) -> Result<Value> {
        if let Value::Undefined(missing) = value {
            fail!("{}", missing.words());
        }
        let bound = |value: &Value| match value {
            Value::None => Ok(None),
            _ => match value.as_int() {
                Some(number) => Ok(Some(number)),
                None => fail!("the bounds of a slice must be whole numbers or none, not of type '{}'", value.type_name()),
            },
        };
        let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
        if step == 0 {
            fail!("the step of a slice cannot be zero");
        }
        let cut = |length: usize| Cut::new(length, start, stop, step);
        match value {
            Value::List(list) | Value::Tuple(list) => {
                let cut = cut(list.items.len());
                let mut items = self.room(cut.count)?;
                items.extend(cut.places().map(|place| list.items[place].clone()));
                if matches!(value, Value::List(_)) { self.list(items) } else { self.tuple(items) }
            }
            Value::Str(text) | Value::Safe(text) => {
                self.budget.allocate(text.len())?;
                self.budget.work(text.len())?;
                let length = if text.is_ascii() { text.len() } else { text.chars().count() };
                let cut = cut(length);
                let part: String = if step == 1 {
                    text.chars().skip(cut.first as usize).take(cut.count).collect()
                } else {
                    self.budget.allocate_many(length, size_of::<char>())?;
                    let characters: Vec<char> = text.chars().collect();
                    cut.places().map(|place| characters[place]).collect()
                };
                self.made(part)
            }
            Value::Range(range) => {
                let cut = cut(range.len());
                let at = |index: i128| i64::try_from(i128::from(range.start) + i128::from(range.step) * index).ok();
                let step = i64::try_from(i128::from(range.step).saturating_mul(cut.step)).ok();
                match (at(cut.first), at(cut.end), step) {
                    (Some(start), Some(stop), Some(step)) => Ok(Value::Range(Range { start, stop, step })),
                    _ => fail!("the numbers of the range are too large"),
                }
            }
            _ => fail!("a value of type '{}' cannot be sliced", self.type_of(value)),
        }
    }
}

/// The place that an index means; negative ones count from the end.
fn place(index: i128, length: usize) -> Option<usize> {
    let index = if index < 0 { index + length as i128 } else { index };
    usize::try_from(index).ok().filter(|index| *index < length)
}

/// What a slice takes of a sequence.
struct Cut {
    first: i128,
    end: i128,
    step: i128,
    count: usize,
}

impl Cut {
    fn new(length: usize, start: Option<i128>, stop: Option<i128>, step: i128) -> Self {
        let length = length as i128;
        let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
        let bound = |bound: i128| (if bound < 0 { bound.saturating_add(length) } else { bound }).clamp(lowest, highest);
        let (from, to) = if step > 0 { (lowest, highest) } else { (highest, lowest) };
        let (first, end) = (start.map_or(from, bound), stop.map_or(to, bound));
        let distance = if step > 0 { end - first } else { first - end };
        let stride = step.unsigned_abs().min(1 << 64) as i128;
        let count = if distance > 0 { (distance - 1) / stride + 1 } else { 0 };
        Self { first, end, step, count: count as usize }
    }

    fn places(&self) -> impl Iterator<Item = usize> {
        (0..self.count as i128).map(|number| (self.first + number * self.step) as usize)
    }
}
