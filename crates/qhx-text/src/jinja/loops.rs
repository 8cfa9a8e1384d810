//! `for`, and what `loop` knows in it.

use super::arguments::Arguments;
use super::ast::{For, LOOP};
use super::budget::{ITEM_BYTES, Paid};
use super::error::{Result, fail};
use super::interpreter::{Flow, Interpreter};
use super::object::{Frame, Loop, Object, ObjectId, Source};
use super::value::{Missing, Value, View};
use std::collections::VecDeque;
use std::rc::Rc;

impl<'t> Interpreter<'t> {
    pub(super) fn for_loop(&mut self, definition: &'t For, frame: &Rc<Frame>) -> Result<Flow> {
        let iterable = self.evaluate(&definition.iterable, frame)?;
        self.iterate(definition, &iterable, frame, 0)
    }

    fn iterate(&mut self, definition: &'t For, iterable: &Value, frame: &Rc<Frame>, depth0: usize) -> Result<Flow> {
        let (source, length) = self.source(iterable)?;
        let length = length.filter(|_| definition.condition.is_none());
        let state = Loop {
            definition,
            frame: frame.clone(),
            source,
            ahead: VecDeque::new(),
            ahead_paid: Paid::default(),
            index0: 0,
            length,
            previous: None,
            current: None,
            changed: None,
            depth0,
        };
        let id = &self.new_object(Object::Loop(state))?;
        let mut completed = false;
        let mut first = true;
        while let Some(item) = self.next_item(id)? {
            self.objects.reclaim();
            if let Object::Loop(state) = self.get_mut(id) {
                state.index0 += usize::from(!std::mem::take(&mut first));
                state.previous = state.current.replace(item.clone());
            }
            let inner = self.inner_frame(frame)?;
            self.set_variable(&inner, LOOP, Value::Object(id.clone()))?;
            self.assign(&definition.target, item, &inner)?;
            match self.run(&definition.body, &inner)? {
                Flow::Next => completed = true,
                Flow::Continue => {}
                Flow::Break => break,
            }
        }
        // What is read no more need not be kept.
        if let Object::Loop(state) = self.get_mut(id) {
            state.source = Source::Items(VecDeque::new());
        }
        // As in Jinja, a loop that never came to the end of its body counts as empty.
        if completed || definition.otherwise.is_empty() {
            return Ok(Flow::Next);
        }
        let inner = self.inner_frame(frame)?;
        self.run(&definition.otherwise, &inner)
    }

    /// The body of a recursive loop for other items, as a text.
    pub(super) fn call_loop(&mut self, id: &ObjectId, arguments: Arguments) -> Result<Value> {
        let [iterable] = arguments.bind("loop", ["iterable"], 1)?;
        let Object::Loop(state) = self.get(id) else { fail!("a loop is expected") };
        let (definition, frame, depth) = (state.definition, state.frame.clone(), state.depth0 + 1);
        if !definition.recursive {
            fail!("only a loop that is marked `recursive` can be called");
        }
        let iterable = iterable.unwrap_or(Value::None);
        self.budget.enter()?;
        let (output, _) = self.capture(|this| this.iterate(definition, &iterable, &frame, depth))?;
        self.budget.leave();
        self.made(output.text)
    }

    /// The items of an iterable value one by one, and how many there are if that is known.
    fn source(&mut self, value: &Value) -> Result<(Source, Option<usize>)> {
        Ok(match value {
            Value::List(list) | Value::Tuple(list) => (Source::List { list: list.clone(), next: 0 }, Some(list.items.len())),
            Value::Range(range) => (Source::Range { range: *range, next: 0 }, Some(range.len())),
            Value::Object(id) if matches!(self.get(id), Object::Iterator(..)) => (Source::Iterator(id.clone()), None),
            _ => {
                let items = self.items(value)?;
                let length = items.len();
                (Source::Items(items.into()), Some(length))
            }
        })
    }

    fn next_item(&mut self, id: &ObjectId) -> Result<Option<Value>> {
        let Object::Loop(state) = self.get_mut(id) else { return Ok(None) };
        match state.ahead.pop_front() {
            Some(item) => Ok(Some(item)),
            None => self.next_of_source(id),
        }
    }

    /// The next item that the loop's condition lets through.
    fn next_of_source(&mut self, id: &ObjectId) -> Result<Option<Value>> {
        loop {
            self.budget.steps(1)?;
            let Object::Loop(state) = self.get_mut(id) else { return Ok(None) };
            let (definition, frame) = (state.definition, state.frame.clone());
            let item = match &mut state.source {
                Source::List { list, next } => {
                    *next += 1;
                    list.items.get(*next - 1).cloned()
                }
                Source::Range { range, next } => {
                    *next += 1;
                    range.get(*next - 1)
                }
                Source::Items(items) => items.pop_front(),
                Source::Iterator(iterator) => {
                    let iterator = iterator.clone();
                    if let Object::Iterator(items, _) = self.get_mut(&iterator) { items.pop_front() } else { None }
                }
            };
            let (Some(item), Some(condition)) = (&item, &definition.condition) else { return Ok(item) };
            let inner = self.inner_frame(&frame)?;
            self.assign(&definition.target, item.clone(), &inner)?;
            let condition = self.evaluate(condition, &inner)?;
            if self.truth(&condition) {
                return Ok(Some(item.clone()));
            }
        }
    }

    /// The item after the current one.
    fn peek(&mut self, id: &ObjectId) -> Result<Option<Value>> {
        let Object::Loop(state) = self.get(id) else { return Ok(None) };
        if let Some(item) = state.ahead.front() {
            return Ok(Some(item.clone()));
        }
        let next = self.next_of_source(id)?;
        if let Object::Loop(state) = self.get_mut(id) {
            state.ahead.extend(next.clone());
        }
        Ok(next)
    }

    fn loop_length(&mut self, id: &ObjectId) -> Result<usize> {
        let Object::Loop(state) = self.get(id) else { return Ok(0) };
        if let Some(length) = state.length {
            return Ok(length);
        }
        let mut paid = Paid::default();
        while let Some(item) = self.next_of_source(id)? {
            self.budget.pay(&mut paid, ITEM_BYTES)?;
            if let Object::Loop(state) = self.get_mut(id) {
                state.ahead.push_back(item);
            }
        }
        let Object::Loop(state) = self.get_mut(id) else { return Ok(0) };
        state.ahead_paid = paid;
        let length = state.index0 + 1 + state.ahead.len();
        state.length = Some(length);
        Ok(length)
    }

    /// An attribute of `loop`.
    pub(super) fn loop_attribute(&mut self, id: &ObjectId, name: &str) -> Result<Option<Value>> {
        let Object::Loop(state) = self.get(id) else { return Ok(None) };
        let (index0, depth0) = (state.index0, state.depth0);
        let number = |value: usize| Ok(Some(Value::Int(value as i128)));
        match name {
            "index" => number(index0 + 1),
            "index0" => number(index0),
            "first" => Ok(Some(Value::Bool(index0 == 0))),
            "depth" => number(depth0 + 1),
            "depth0" => number(depth0),
            "length" => number(self.loop_length(id)?),
            "revindex" => number(self.loop_length(id)?.saturating_sub(index0)),
            "revindex0" => number(self.loop_length(id)?.saturating_sub(index0 + 1)),
            "last" => Ok(Some(Value::Bool(self.peek(id)?.is_none()))),
            "previtem" => {
                let previous = state.previous.clone().filter(|_| index0 > 0);
                Ok(Some(previous.map_or_else(|| self.missing(Missing::Other("there is no previous item")), Ok)?))
            }
            "nextitem" => {
                let next = self.peek(id)?;
                Ok(Some(next.map_or_else(|| self.missing(Missing::Other("there is no next item")), Ok)?))
            }
            _ => Ok(None),
        }
    }

    /// `loop.cycle` and `loop.changed`.
    pub(super) fn loop_method(&mut self, id: &ObjectId, name: &str, arguments: Arguments) -> Result<Value> {
        let Object::Loop(state) = self.get(id) else { fail!("a loop is expected") };
        let (index0, before) = (state.index0, state.changed.clone());
        arguments.without_names(name)?;
        if name == "cycle" {
            let Some(count) = std::num::NonZero::new(arguments.positional.len()) else { fail!("loop.cycle needs at least one value") };
            return Ok(arguments.positional[index0 % count].clone());
        }
        let now = self.tuple(arguments.positional)?;
        let changed = match before {
            Some(before) => !self.equal(&before, &now)?,
            None => true,
        };
        if let Object::Loop(state) = self.get_mut(id) {
            state.changed = Some(now);
        }
        Ok(Value::Bool(changed))
    }

    /// All items of an iterable value. Iterators are read to their end.
    pub(super) fn items(&mut self, value: &Value) -> Result<Vec<Value>> {
        match value {
            Value::Undefined(_) => Ok(Vec::new()),
            Value::List(list) | Value::Tuple(list) => {
                let mut items = self.room(list.items.len())?;
                items.extend_from_slice(&list.items);
                Ok(items)
            }
            Value::Str(text) | Value::Safe(text) => {
                let mut items = self.room(text.chars().count())?;
                for character in text.chars() {
                    items.push(self.text(character.encode_utf8(&mut [0; 4]))?);
                }
                Ok(items)
            }
            Value::Dict(dict) | Value::View(View::Keys, dict) => {
                let mut items = self.room(dict.len())?;
                items.extend(dict.entries().iter().map(|(key, _)| key.clone()));
                Ok(items)
            }
            Value::View(View::Values, dict) => {
                let mut items = self.room(dict.len())?;
                items.extend(dict.entries().iter().map(|(_, value)| value.clone()));
                Ok(items)
            }
            Value::View(View::Items, dict) => {
                let mut items = self.room(dict.len())?;
                for (key, value) in dict.entries() {
                    let mut pair = self.room(2)?;
                    pair.extend([key.clone(), value.clone()]);
                    items.push(self.tuple(pair)?);
                }
                Ok(items)
            }
            Value::Range(range) => {
                let mut items = self.room(range.len())?;
                items.extend((0..range.len()).filter_map(|index| range.get(index)));
                Ok(items)
            }
            Value::Object(id) => match self.get_mut(id) {
                Object::Iterator(items, paid) => {
                    let (items, _paid) = (std::mem::take(items), std::mem::take(paid));
                    self.budget.allocate_many(items.len(), ITEM_BYTES)?;
                    Ok(items.into())
                }
                _ => fail!("{} cannot be iterated over", self.type_of(value)),
            },
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) | Value::Function(_) | Value::Method(_) => {
                fail!("a value of type '{}' cannot be iterated over", self.type_of(value))
            }
        }
    }
}
