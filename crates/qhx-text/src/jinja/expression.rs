//! Evaluating expressions.

use super::arguments::Arguments;
use super::ast::{ArgumentList, Comparison, Expression, Kind, Literal, Step, StepKind};
use super::error::{Result, fail};
use super::functions::Function;
use super::interpreter::Interpreter;
use super::object::{Frame, Object};
use super::text::Text;
use super::value::{Dict, Missing, Value};
use std::rc::Rc;

impl<'t> Interpreter<'t> {
    pub(super) fn evaluate(&mut self, expression: &'t Expression, frame: &Rc<Frame>) -> Result<Value> {
        self.budget.steps(1)?;
        self.budget.enter()?;
        self.at = expression.at as usize;
        let value = self.scoped(|this| this.value_of(&expression.kind, frame))?;
        self.budget.leave();
        Ok(value)
    }

    fn value_of(&mut self, kind: &'t Kind, frame: &Rc<Frame>) -> Result<Value> {
        match kind {
            Kind::Literal(literal) => Ok(match literal {
                Literal::None => Value::None,
                Literal::Bool(value) => Value::Bool(*value),
                Literal::Int(value) => Value::Int(*value),
                Literal::Float(value) => Value::Float(*value),
                Literal::Str(text) => Value::Str(text.into()),
            }),
            Kind::Name(name) => {
                let variable = self.variable(frame, *name)?;
                let name = self.symbols.name(*name);
                match variable.or_else(|| Function::named(name).map(Value::Function)) {
                    Some(found) => Ok(found),
                    None => self.missing(Missing::Name(name.clone())),
                }
            }
            Kind::List(items) => {
                let items = self.all(items, frame)?;
                self.list(items)
            }
            Kind::Tuple(items) => {
                let items = self.all(items, frame)?;
                self.tuple(items)
            }
            Kind::Dict(entries) => self.dict_of(entries, frame),
            Kind::Arithmetic { first, rest } => {
                let mut value = self.evaluate(first, frame)?;
                for (operator, right) in rest {
                    let right_value = self.evaluate(right, frame)?;
                    self.at = right.at as usize;
                    value = self.arithmetic(*operator, &value, &right_value)?;
                }
                Ok(value)
            }
            Kind::Concat(parts) => {
                let values = self.all(parts, frame)?;
                let bytes = values.iter().filter_map(Value::as_str).map(str::len).sum();
                self.budget.allocate(bytes)?;
                let mut text = String::with_capacity(bytes);
                for value in &values {
                    match value.as_str() {
                        Some(paid) => text.push_str(paid),
                        None => self.print(value, &mut text)?,
                    }
                }
                self.made(text)
            }
            Kind::Compare { first, rest } => self.comparisons(first, rest, frame),
            Kind::Not { negated, value } => {
                let value = self.evaluate(value, frame)?;
                Ok(Value::Bool(self.truth(&value) != *negated))
            }
            Kind::And(values) => self.first_with_truth(values, false, frame),
            Kind::Or(values) => self.first_with_truth(values, true, frame),
            Kind::Signs { minus, value } => {
                let mut value = self.evaluate(value, frame)?;
                for minus in minus.iter().rev() {
                    self.budget.steps(1)?;
                    value = self.sign(*minus, &value)?;
                }
                Ok(value)
            }
            Kind::Conditional { branches, otherwise } => {
                for (value, condition) in branches {
                    let condition = self.evaluate(condition, frame)?;
                    if self.truth(&condition) {
                        return self.evaluate(value, frame);
                    }
                }
                match otherwise {
                    Some(value) => self.evaluate(value, frame),
                    None => self.missing(Missing::Other("the inline `if` is false and has no `else`")),
                }
            }
            Kind::Postfix { value, steps } => {
                let mut value = self.evaluate(value, frame)?;
                for step in steps {
                    value = self.step(value, step, frame)?;
                }
                Ok(value)
            }
        }
    }

    fn all(&mut self, expressions: &'t [Expression], frame: &Rc<Frame>) -> Result<Vec<Value>> {
        let mut values = self.room(expressions.len())?;
        for expression in expressions {
            values.push(self.evaluate(expression, frame)?);
        }
        Ok(values)
    }

    fn dict_of(&mut self, entries: &'t [(Expression, Expression)], frame: &Rc<Frame>) -> Result<Value> {
        let mut dict = Dict::default();
        for (key, value) in entries {
            let key = self.evaluate(key, frame)?;
            let value = self.evaluate(value, frame)?;
            self.insert(&mut dict, key, value)?;
        }
        self.dict(dict)
    }

    fn comparisons(&mut self, first: &'t Expression, rest: &'t [(Comparison, Expression)], frame: &Rc<Frame>) -> Result<Value> {
        let mut left = self.evaluate(first, frame)?;
        for (comparison, right) in rest {
            let right_value = self.evaluate(right, frame)?;
            self.at = right.at as usize;
            if !self.compare(*comparison, &left, &right_value)? {
                return Ok(Value::Bool(false));
            }
            left = right_value;
        }
        Ok(Value::Bool(true))
    }

    /// The first value that is as true as wanted, or the last.
    fn first_with_truth(&mut self, values: &'t [Expression], wanted: bool, frame: &Rc<Frame>) -> Result<Value> {
        let mut last = Value::None;
        for value in values {
            last = self.evaluate(value, frame)?;
            if self.truth(&last) == wanted {
                break;
            }
        }
        Ok(last)
    }

    /// A value with one more thing behind it.
    pub(super) fn step(&mut self, value: Value, step: &'t Step, frame: &Rc<Frame>) -> Result<Value> {
        self.budget.steps(1)?;
        self.scoped(|this| this.value_behind(value, step, frame))
    }

    fn value_behind(&mut self, value: Value, step: &'t Step, frame: &Rc<Frame>) -> Result<Value> {
        let at = step.at as usize;
        match &step.kind {
            StepKind::Attribute(name) => {
                self.at = at;
                self.attribute(&value, &name.into())
            }
            StepKind::Item(item) => {
                let item = self.evaluate(item, frame)?;
                self.at = at;
                self.item(&value, &item)
            }
            StepKind::Slice(bounds) => {
                let mut places = [Value::None, Value::None, Value::None];
                for (place, bound) in places.iter_mut().zip(&**bounds) {
                    if let Some(bound) = bound {
                        *place = self.evaluate(bound, frame)?;
                    }
                }
                self.at = at;
                self.slice(&value, &places)
            }
            StepKind::Call(arguments) => {
                let arguments = self.arguments(arguments, frame)?;
                self.at = at;
                self.call(&value, arguments)
            }
            StepKind::Filter(name, arguments) => {
                let arguments = self.arguments(arguments, frame)?;
                self.at = at;
                self.filter(name, value, arguments)
            }
            StepKind::Test { name, arguments, negated } => {
                let arguments = self.arguments(arguments, frame)?;
                self.at = at;
                Ok(Value::Bool(self.test(name, &value, arguments)? != *negated))
            }
        }
    }

    pub(super) fn arguments(&mut self, list: &'t ArgumentList, frame: &Rc<Frame>) -> Result<Arguments> {
        let mut arguments = Arguments { positional: self.all(&list.positional, frame)?, named: Vec::new() };
        if let Some(spread) = &list.spread {
            let spread = self.evaluate(spread, frame)?;
            arguments.positional.extend(self.items(&spread)?);
        }
        for (name, value) in &list.named {
            let value = self.evaluate(value, frame)?;
            self.name_argument(&mut arguments, name.into(), value)?;
        }
        if let Some(spread) = &list.spread_named {
            let Value::Dict(dict) = self.evaluate(spread, frame)? else { fail!("what stands behind `**` must be a dict") };
            for (key, value) in dict.entries() {
                let Value::Str(name) = key else { fail!("the names of arguments must be strings") };
                self.name_argument(&mut arguments, name.clone(), value.clone())?;
            }
        }
        Ok(arguments)
    }

    fn name_argument(&mut self, arguments: &mut Arguments, name: Text, value: Value) -> Result<()> {
        self.budget.allocate(size_of::<(Text, Value)>())?;
        self.budget.steps(arguments.named.len())?;
        if arguments.named.iter().any(|(taken, _)| *taken == name) {
            fail!("the argument '{name}' is given twice");
        }
        arguments.named.push((name, value));
        Ok(())
    }

    /// Whether a value counts as true.
    pub(super) fn truth(&self, value: &Value) -> bool {
        match value {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(value) => *value,
            Value::Int(value) => *value != 0,
            Value::Float(value) => *value != 0.0,
            Value::Str(text) | Value::Safe(text) => !text.is_empty(),
            Value::List(list) | Value::Tuple(list) => !list.items.is_empty(),
            Value::Dict(dict) | Value::View(_, dict) => dict.len() > 0,
            Value::Range(range) => range.len() > 0,
            Value::Object(_) | Value::Function(_) | Value::Method(_) => true,
        }
    }

    /// What an error calls a value's type.
    pub(super) fn type_of(&self, value: &Value) -> &'static str {
        match value {
            Value::Object(id) => match self.get(id) {
                Object::Namespace(_) => "namespace",
                Object::Macro(_) => "macro",
                Object::Loop(_) => "loop",
                Object::Iterator(..) => "iterator",
                Object::Cycler { .. } => "cycler",
                Object::Joiner { .. } => "joiner",
                Object::Gone => "object",
            },
            _ => value.type_name(),
        }
    }
}
