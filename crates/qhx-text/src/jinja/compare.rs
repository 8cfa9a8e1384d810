//! `==`, `<`, `in`, and sorting.

use super::ast::Comparison;
use super::error::{Result, fail};
use super::interpreter::Interpreter;
use super::object::Object;
use super::value::{Value, View};
use std::cmp::Ordering;
use std::rc::Rc;

impl Interpreter<'_> {
    pub(super) fn compare(&mut self, comparison: Comparison, left: &Value, right: &Value) -> Result<bool> {
        Ok(match comparison {
            Comparison::Equal => self.equal(left, right)?,
            Comparison::NotEqual => !self.equal(left, right)?,
            Comparison::Less => self.order(left, right, "<")? == Some(Ordering::Less),
            Comparison::LessOrEqual => matches!(self.order(left, right, "<=")?, Some(Ordering::Less | Ordering::Equal)),
            Comparison::Greater => self.order(left, right, ">")? == Some(Ordering::Greater),
            Comparison::GreaterOrEqual => matches!(self.order(left, right, ">=")?, Some(Ordering::Greater | Ordering::Equal)),
            Comparison::In => self.contains(right, left)?,
            Comparison::NotIn => !self.contains(right, left)?,
        })
    }

    pub(super) fn equal(&mut self, a: &Value, b: &Value) -> Result<bool> {
        self.budget.steps(1)?;
        Ok(match (a, b) {
            (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
            (Value::Str(a) | Value::Safe(a), Value::Str(b) | Value::Safe(b)) => {
                if a.len() != b.len() {
                    return Ok(false);
                }
                self.budget.work(a.len())?;
                a == b
            }
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                Rc::ptr_eq(a, b) || (a.items.len() == b.items.len() && self.first_difference(&a.items, &b.items)?.is_none())
            }
            (Value::Dict(a), Value::Dict(b)) => {
                if Rc::ptr_eq(a, b) {
                    return Ok(true);
                }
                if a.len() != b.len() {
                    return Ok(false);
                }
                for (key, value) in a.entries() {
                    let key = self.key(key)?;
                    match b.get(&key) {
                        Some(other) if self.equal(value, other)? => {}
                        _ => return Ok(false),
                    }
                }
                true
            }
            (Value::Range(a), Value::Range(b)) => {
                let length = a.len();
                length == b.len() && (length == 0 || (a.start == b.start && (length == 1 || a.step == b.step)))
            }
            (Value::Object(a), Value::Object(b)) => a == b,
            (Value::Function(a), Value::Function(b)) => a == b,
            (Value::Method(a), Value::Method(b)) => a.1 == b.1 && self.same(&a.0, &b.0),
            (Value::View(..), Value::View(..)) => fail!("views of dicts cannot be compared here; compare lists"),
            _ => order_of_numbers(a, b) == Some(Ordering::Equal),
        })
    }

    /// Python's `is`, as far as values have an identity here.
    pub(super) fn same(&self, a: &Value, b: &Value) -> bool {
        match (a, b) {
            (Value::Undefined(a), Value::Undefined(b)) => Rc::ptr_eq(a, b),
            (Value::None, Value::None) => true,
            (Value::Bool(a), Value::Bool(b)) => a == b,
            (Value::Int(a), Value::Int(b)) => a == b,
            (Value::Str(a), Value::Str(b)) => a == b,
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => Rc::ptr_eq(a, b),
            (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
            (Value::Object(a), Value::Object(b)) => a == b,
            (Value::Function(a), Value::Function(b)) => a == b,
            _ => false,
        }
    }

    fn first_difference(&mut self, a: &[Value], b: &[Value]) -> Result<Option<usize>> {
        for (place, (a, b)) in a.iter().zip(b).enumerate() {
            if !self.equal(a, b)? {
                return Ok(Some(place));
            }
        }
        Ok(None)
    }

    /// How two values stand to each other; nothing where a number is not a number.
    fn order(&mut self, a: &Value, b: &Value, operator: &str) -> Result<Option<Ordering>> {
        self.budget.steps(2)?;
        match (a, b) {
            (Value::Undefined(missing), _) | (_, Value::Undefined(missing)) => fail!("{}", missing.words()),
            (Value::Str(a) | Value::Safe(a), Value::Str(b) | Value::Safe(b)) => {
                self.budget.work(a.len().min(b.len()))?;
                Ok(Some(a.cmp(b)))
            }
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => match self.first_difference(&a.items, &b.items)? {
                Some(place) => self.order(&a.items[place], &b.items[place], operator),
                None => Ok(Some(a.items.len().cmp(&b.items.len()))),
            },
            _ if is_number(a) && is_number(b) => Ok(order_of_numbers(a, b)),
            _ => fail!("`{operator}` does not work on '{}' and '{}'", self.type_of(a), self.type_of(b)),
        }
    }

    pub(super) fn less(&mut self, a: &Value, b: &Value) -> Result<bool> {
        Ok(self.order(a, b, "<")? == Some(Ordering::Less))
    }

    pub(super) fn contains(&mut self, container: &Value, item: &Value) -> Result<bool> {
        match container {
            Value::Str(text) | Value::Safe(text) => {
                let Some(part) = item.as_str() else {
                    fail!("`in` a text needs a text on its left, not a value of type '{}'", self.type_of(item));
                };
                self.budget.work(text.len() + part.len())?;
                Ok(text.contains(part))
            }
            Value::Dict(dict) | Value::View(View::Keys, dict) => {
                let key = self.key(item)?;
                Ok(dict.get(&key).is_some())
            }
            Value::Range(range) => {
                let place = item.as_int().map(|item| item - i128::from(range.start));
                let step = i128::from(range.step);
                Ok(place.is_some_and(|place| place % step == 0 && (0..range.len() as i128).contains(&(place / step))))
            }
            Value::List(list) | Value::Tuple(list) => self.any_equal(&list.items, item),
            Value::Object(id) if matches!(self.get(id), Object::Iterator(..)) => {
                // Reads no further than it has to.
                loop {
                    let next = if let Object::Iterator(items, _) = self.get_mut(id) { items.pop_front() } else { None };
                    let Some(next) = next else { return Ok(false) };
                    if self.equal(&next, item)? {
                        return Ok(true);
                    }
                }
            }
            _ => {
                let items = self.items(container)?;
                self.any_equal(&items, item)
            }
        }
    }

    fn any_equal(&mut self, items: &[Value], item: &Value) -> Result<bool> {
        for candidate in items {
            if self.same(candidate, item) || self.equal(candidate, item)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Sorts by keys, stably. (The standard library's sort may panic where an order is none, as with numbers that are not numbers.)
    pub(super) fn sorted(&mut self, mut items: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<Value>> {
        if reverse {
            items.reverse();
        }
        self.budget.allocate_many(items.len(), 2 * size_of::<(Value, Value)>())?;
        let mut width = 1;
        while width < items.len() {
            let mut merged = Vec::with_capacity(items.len());
            for pair in items.chunks(2 * width) {
                let (left, right) = pair.split_at(width.min(pair.len()));
                self.merge(left, right, &mut merged)?;
            }
            items = merged;
            width *= 2;
        }
        if reverse {
            items.reverse();
        }
        Ok(items.into_iter().map(|(_, item)| item).collect())
    }

    fn merge(&mut self, left: &[(Value, Value)], right: &[(Value, Value)], merged: &mut Vec<(Value, Value)>) -> Result<()> {
        let (mut left, mut right) = (left.iter().peekable(), right.iter().peekable());
        loop {
            let take_right = match (left.peek(), right.peek()) {
                (Some(a), Some(b)) => self.less(&b.0, &a.0)?,
                (None, Some(_)) => true,
                (_, None) => false,
            };
            match if take_right { right.next() } else { left.next() } {
                Some(item) => merged.push(item.clone()),
                None => return Ok(()),
            }
        }
    }
}

fn is_number(value: &Value) -> bool {
    matches!(value, Value::Bool(_) | Value::Int(_) | Value::Float(_))
}

/// Numbers by their exact values; nothing where one is not a number, or no number at all.
fn order_of_numbers(a: &Value, b: &Value) -> Option<Ordering> {
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => a.partial_cmp(b),
        (Value::Float(a), _) => Some(integer_and_float(b.as_int()?, *a)?.reverse()),
        (_, Value::Float(b)) => integer_and_float(a.as_int()?, *b),
        _ => Some(a.as_int()?.cmp(&b.as_int()?)),
    }
}

fn integer_and_float(a: i128, b: f64) -> Option<Ordering> {
    if b.is_nan() {
        return None;
    }
    // Beyond the integers of ours, the conversion gives the largest or the smallest.
    let whole = b.floor();
    Some(a.cmp(&(whole as i128)).then(if b > whole { Ordering::Less } else { Ordering::Equal }))
}
