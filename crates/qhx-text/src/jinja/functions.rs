//! Calls: functions that every template has, macros, methods.

use super::arguments::{Arguments, integer, text};
use super::ast::{CALLER, KWARGS, Symbol, VARARGS};
use super::budget::{ITEM_BYTES, Paid};
use super::error::{Failure, Result, fail};
use super::interpreter::Interpreter;
use super::object::{Closure, Frame, Object, ObjectId};
use super::text::Text;
use super::value::{Dict, Missing, Range, Value};
use crate::clock;
use std::collections::BTreeMap;

/// What `range` is bounded by in Jinja's sandbox.
const MAX_RANGE: usize = 100_000;

/// Functions that every template has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Function {
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    RaiseException,
    StrftimeNow,
    Lipsum,
}

impl Function {
    const ALL: [(&str, Self); 8] = [
        ("range", Self::Range),
        ("dict", Self::Dict),
        ("namespace", Self::Namespace),
        ("cycler", Self::Cycler),
        ("joiner", Self::Joiner),
        ("raise_exception", Self::RaiseException),
        ("strftime_now", Self::StrftimeNow),
        ("lipsum", Self::Lipsum),
    ];

    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, function)| *function)
    }

    pub(super) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, function)| *function == self).map_or("", |(name, _)| name)
    }
}

impl<'t> Interpreter<'t> {
    pub(super) fn call(&mut self, callee: &Value, arguments: Arguments) -> Result<Value> {
        match callee {
            Value::Undefined(missing) => fail!("{}, so it cannot be called", missing.words()),
            Value::Function(function) => self.call_function(*function, arguments),
            Value::Method(method) => self.method(&method.0, &method.1, arguments),
            Value::Object(id) => match self.get(id) {
                Object::Macro(closure) => {
                    let closure = closure.clone();
                    self.call_macro(&closure, arguments)
                }
                Object::Loop(_) => self.call_loop(id, arguments),
                Object::Joiner { .. } => self.call_joiner(id, arguments),
                _ => fail!("a value of type '{}' cannot be called", self.type_of(callee)),
            },
            _ => fail!("a value of type '{}' cannot be called", self.type_of(callee)),
        }
    }

    fn call_function(&mut self, function: Function, arguments: Arguments) -> Result<Value> {
        let name = function.name();
        match function {
            Function::Range => range(arguments),
            Function::Dict => {
                let dict = self.new_dict(name, arguments)?;
                self.dict(dict)
            }
            Function::Namespace => {
                let dict = self.new_dict(name, arguments)?;
                if let Some(key) = dict.entries().iter().filter_map(|(key, _)| key.as_str()).find(|key| key.starts_with('_')) {
                    fail!("a namespace cannot have the attribute '{key}': names with an underscore in front are not allowed");
                }
                self.object(Object::Namespace(dict))
            }
            Function::Cycler => {
                arguments.without_names(name)?;
                if arguments.positional.is_empty() {
                    fail!("cycler needs at least one value");
                }
                let mut paid = Paid::default();
                self.budget.pay(&mut paid, arguments.positional.capacity().saturating_mul(ITEM_BYTES))?;
                self.object(Object::Cycler { items: arguments.positional, next: 0, _paid: paid })
            }
            Function::Joiner => {
                let [separator] = arguments.bind(name, ["sep"], 0)?;
                let separator = separator.unwrap_or(Value::Str(", ".into()));
                self.object(Object::Joiner { separator, used: false })
            }
            Function::RaiseException => {
                let [message] = arguments.bind(name, ["message"], 1)?;
                Err(Failure::Raised(self.string_of(&message.unwrap_or(Value::None))?))
            }
            Function::StrftimeNow => {
                let [format] = arguments.bind(name, ["format"], 1)?;
                let format = text(name, format.as_ref())?;
                // No code stands for more than ten characters.
                self.budget.allocate(format.len().saturating_mul(10))?;
                self.budget.work(format.len().saturating_mul(10))?;
                self.made(clock::format(self.now, &format))
            }
            Function::Lipsum => fail!("the function 'lipsum' is not supported"),
        }
    }

    /// Python's `dict(…)`: another dict or a list of pairs, and entries by name.
    fn new_dict(&mut self, callee: &str, arguments: Arguments) -> Result<Dict> {
        let mut dict = Dict::default();
        if arguments.positional.len() > 1 {
            fail!("{callee} takes at most one value without a name");
        }
        match arguments.positional.first() {
            None => {}
            Some(Value::Dict(other)) => {
                for (key, value) in other.entries() {
                    self.insert(&mut dict, key.clone(), value.clone())?;
                }
            }
            Some(pairs) => {
                for pair in self.items(pairs)? {
                    let mut pair = self.items(&pair)?.into_iter();
                    let (Some(key), Some(value), None) = (pair.next(), pair.next(), pair.next()) else {
                        fail!("{callee} expects a dict or pairs of a key and a value");
                    };
                    self.insert(&mut dict, key, value)?;
                }
            }
        }
        for (name, value) in arguments.named {
            self.insert(&mut dict, Value::Str(name), value)?;
        }
        Ok(dict)
    }

    fn call_macro(&mut self, closure: &Closure<'t>, arguments: Arguments) -> Result<Value> {
        let Closure { definition, frame } = closure;
        let name = &definition.name;
        let inner = self.inner_frame(frame)?;
        let Arguments { positional, mut named } = arguments;
        let parameters = &definition.parameters;
        let mut positional = positional.into_iter();
        let mut missing = Vec::new();
        let mut explicit_caller = false;
        for (symbol, default) in parameters {
            explicit_caller |= *symbol == CALLER;
            self.budget.steps(1 + named.len() / 4)?;
            let by_name = |named: &mut Vec<(Text, Value)>| {
                let place = named.iter().position(|(given, _)| **given == **self.symbols.name(*symbol))?;
                Some(named.remove(place).1)
            };
            match positional.next().or_else(|| by_name(&mut named)) {
                Some(value) => self.set_variable(&inner, *symbol, value)?,
                None => missing.push((*symbol, default)),
            }
        }
        if definition.uses_caller && !explicit_caller {
            let place = named.iter().position(|(given, _)| **given == **self.symbols.name(CALLER));
            let caller = place.map(|place| named.remove(place).1);
            let caller = match caller {
                Some(caller) => caller,
                None => self.missing(Missing::Other("no caller is defined: the macro is not used with `call`"))?,
            };
            self.set_variable(&inner, CALLER, caller)?;
        }
        if definition.uses_kwargs {
            let dict = self.new_dict(name, Arguments { positional: Vec::new(), named })?;
            let dict = self.dict(dict)?;
            self.set_variable(&inner, KWARGS, dict)?;
        } else if let Some((unknown, _)) = named.first() {
            fail!("the macro '{name}' has no argument '{unknown}'");
        }
        if definition.uses_varargs {
            let rest = self.tuple(positional.collect())?;
            self.set_variable(&inner, VARARGS, rest)?;
        } else if positional.len() > 0 {
            fail!("the macro '{name}' takes at most {} arguments", parameters.len());
        }
        self.budget.enter()?;
        for (symbol, default) in missing {
            let value = match default {
                Some(default) => self.evaluate(default, &inner)?,
                None => self.missing(Missing::Name(self.symbols.name(symbol).clone()))?,
            };
            self.set_variable(&inner, symbol, value)?;
        }
        let (output, _) = self.capture(|this| this.run(&definition.body, &inner))?;
        self.budget.leave();
        self.made(output.text)
    }

    fn call_joiner(&mut self, id: &ObjectId, arguments: Arguments) -> Result<Value> {
        arguments.none("joiner")?;
        match self.get_mut(id) {
            Object::Joiner { separator, used: true } => Ok(separator.clone()),
            Object::Joiner { used, .. } => {
                *used = true;
                Ok(Value::Str("".into()))
            }
            _ => Ok(Value::None),
        }
    }

    /// `next` and `reset` of a cycler.
    pub(super) fn cycler_method(&mut self, id: &ObjectId, name: &str, arguments: Arguments) -> Result<Value> {
        arguments.none(name)?;
        let Object::Cycler { items, next, .. } = self.get_mut(id) else { fail!("a cycler is expected") };
        if name == "reset" {
            *next = 0;
            return Ok(Value::None);
        }
        let current = items.get(*next).cloned().unwrap_or(Value::None);
        *next = if *next + 1 < items.len() { *next + 1 } else { 0 };
        Ok(current)
    }

    /// A frame with the variables that a render is given.
    pub(super) fn root_frame(&self, variables: Vec<(&str, Value)>) -> std::rc::Rc<Frame> {
        let known = variables.into_iter().filter_map(|(name, value)| Some((self.symbols.find(name)?, value)));
        // Later ones count.
        let by_symbol: BTreeMap<Symbol, Value> = known.collect();
        Frame::new(by_symbol.into_iter().collect(), Paid::default(), None)
    }
}

fn range(arguments: Arguments) -> Result<Value> {
    arguments.without_names("range")?;
    let numbers = arguments.positional.iter().map(|value| integer("range", value)).collect::<Result<Vec<_>>>()?;
    let (start, stop, step) = match numbers[..] {
        [stop] => (0, stop, 1),
        [start, stop] => (start, stop, 1),
        [start, stop, step] => (start, stop, step),
        _ => fail!("range takes one to three numbers, {} are given", numbers.len()),
    };
    if step == 0 {
        fail!("the step of a range cannot be zero");
    }
    let (Ok(start), Ok(stop), Ok(step)) = (start.try_into(), stop.try_into(), step.try_into()) else {
        fail!("the numbers of the range are too large");
    };
    let range = Range { start, stop, step };
    if range.len() > MAX_RANGE {
        fail!("the range has {} numbers, at most {MAX_RANGE} are allowed", range.len());
    }
    Ok(Value::Range(range))
}
