//! What templates compute with: Python's values, as far as templates can see them.
//!
//! All values but objects are immutable and hold no object, only its number: so nothing can contain itself, and lists and dicts know how deep they are.

use super::budget::{ENTRY_BYTES, ITEM_BYTES, Kept, MAX_VALUE_DEPTH, OBJECT_BYTES, Paid};
use super::error::{Failure, Result, fail};
use super::functions::Function;
use super::interpreter::Interpreter;
use super::object::ObjectId;
use super::text::Text;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(super) enum Value {
    /// What does not exist, with the words for it.
    Undefined(Rc<Kept<Missing>>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Text),
    /// A text that was marked as safe HTML. Adding to it escapes what is added.
    Safe(Text),
    List(Rc<List>),
    Tuple(Rc<List>),
    Dict(Rc<Dict>),
    /// What `keys`, `values` and `items` of a dict give.
    View(View, Rc<Dict>),
    Range(Range),
    /// What can change: it lives with the interpreter.
    Object(ObjectId),
    Function(Function),
    /// A method and the value it belongs to.
    Method(Rc<Kept<(Value, Text)>>),
}

/// Why something is undefined.
#[derive(Debug)]
pub(super) enum Missing {
    Name(Arc<str>),
    Attribute {
        of: &'static str,
        name: Text,
    },
    Item {
        of: &'static str,
    },
    /// Python has it, and the sandbox does not give it out.
    Unsafe {
        of: &'static str,
        name: Text,
    },
    Other(&'static str),
}

/// The items of a list or tuple.
#[derive(Debug)]
pub(super) struct List {
    pub(super) items: Vec<Value>,
    depth: u16,
    /// Whether it is what `groupby` gives, whose two items have names.
    pub(super) is_group: bool,
    _paid: Paid,
}

/// Entries in the order in which their keys came.
#[derive(Debug, Default)]
pub(super) struct Dict {
    entries: Vec<(Value, Value)>,
    places: HashMap<Key, usize>,
    depth: u16,
    pub(super) paid: Paid,
}

/// A value as a key: values that are equal in Python have equal keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Undefined,
    None,
    Int(i128),
    /// The bits of a number that is not whole.
    Float(u64),
    Str(Text),
    Tuple(Vec<Key>),
    Object(ObjectId),
    Range(Range),
    Function(Function),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Keys,
    Values,
    Items,
}

/// Python's `range`. Its step is not zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Range {
    pub(super) start: i64,
    pub(super) stop: i64,
    pub(super) step: i64,
}

impl Range {
    pub(super) fn len(&self) -> usize {
        let (start, stop, step) = (i128::from(self.start), i128::from(self.stop), i128::from(self.step));
        let distance = if step > 0 { stop - start } else { start - stop };
        if distance > 0 { ((distance - 1) / step.abs() + 1) as usize } else { 0 }
    }

    pub(super) fn get(&self, index: usize) -> Option<Value> {
        let offset = i128::from(self.step) * index as i128;
        (index < self.len()).then(|| Value::Int(i128::from(self.start) + offset))
    }
}

impl Dict {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }

    pub(super) fn get(&self, key: &Key) -> Option<&Value> {
        self.places.get(key).map(|place| &self.entries[*place].1)
    }

    /// Sets an entry; a key that is already there keeps its place. Says whether it was not there.
    pub(super) fn insert(&mut self, key: Value, by: Key, value: Value) -> bool {
        self.depth = self.depth.max(key.depth()).max(value.depth());
        if let Some(&place) = self.places.get(&by) {
            self.entries[place].1 = value;
            return false;
        }
        self.places.insert(by, self.entries.len());
        self.entries.push((key, value));
        true
    }
}

impl Value {
    /// The text, if it is one.
    pub(super) fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(text) | Self::Safe(text) => Some(text),
            _ => None,
        }
    }

    /// The whole number, if it is one; true and false are 1 and 0.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Bool(value) => Some(i128::from(*value)),
            Self::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// The items of a list or tuple.
    pub(super) fn as_items(&self) -> Option<&[Value]> {
        match self {
            Self::List(list) | Self::Tuple(list) => Some(&list.items),
            _ => None,
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    /// How many lists and dicts lie in each other here, this one included.
    fn depth(&self) -> u16 {
        match self {
            Self::List(list) | Self::Tuple(list) => list.depth,
            Self::Dict(dict) | Self::View(_, dict) => dict.depth + 1,
            Self::Method(method) => method.0.depth() + 1,
            _ => 0,
        }
    }

    /// What Python calls its type.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "None",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) | Self::Safe(_) => "str",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::View(View::Keys, _) => "dict_keys",
            Self::View(View::Values, _) => "dict_values",
            Self::View(View::Items, _) => "dict_items",
            Self::Range(_) => "range",
            Self::Object(_) => "object",
            Self::Function(_) => "function",
            Self::Method(_) => "method",
        }
    }

    /// A JSON value as a template sees it. Nothing is charged: it is the caller's.
    pub(crate) fn from_json(json: &serde_json::Value) -> Result<Self> {
        Ok(match json {
            serde_json::Value::Null => Self::None,
            serde_json::Value::Bool(value) => Self::Bool(*value),
            serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => Self::Int(value.into()),
                (None, Some(value)) => Self::Int(value.into()),
                (None, None) => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            serde_json::Value::String(text) => Self::Str(text.as_str().into()),
            serde_json::Value::Array(items) => {
                list(items.iter().map(Self::from_json).collect::<Result<_>>()?, false, Paid::default(), Self::List)?
            }
            serde_json::Value::Object(entries) => {
                let mut dict = Dict::default();
                for (name, value) in entries {
                    let name: Text = name.as_str().into();
                    dict.insert(Self::Str(name.clone()), Key::Str(name), Self::from_json(value)?);
                }
                checked(Self::Dict(Rc::new(dict)))?
            }
        })
    }
}

impl Missing {
    /// The words that an error says it with.
    pub(super) fn words(&self) -> String {
        match self {
            Self::Name(name) => format!("'{name}' is undefined"),
            Self::Attribute { of, name } => format!("'{of} object' has no attribute '{name}'"),
            Self::Item { of } => format!("the {of} has no such item"),
            Self::Unsafe { of, name } => format!("the attribute '{name}' of '{of}' objects is not available to templates"),
            Self::Other(words) => (*words).to_owned(),
        }
    }
}

fn checked(value: Value) -> Result<Value> {
    if value.depth() > MAX_VALUE_DEPTH {
        return Err(Failure::Limit(format!("{MAX_VALUE_DEPTH} levels of nested lists and dicts")));
    }
    Ok(value)
}

fn list(items: Vec<Value>, is_group: bool, paid: Paid, kind: impl Fn(Rc<List>) -> Value) -> Result<Value> {
    let depth = items.iter().map(Value::depth).max().unwrap_or(0) + 1;
    checked(kind(Rc::new(List { items, depth, is_group, _paid: paid })))
}

/// Making values: each is paid for before it is made.
impl Interpreter<'_> {
    /// A text.
    pub(super) fn text(&mut self, text: &str) -> Result<Value> {
        self.budget.allocate(text.len())?;
        self.made(text.to_owned())
    }

    /// A text that was paid for when it was put together.
    pub(super) fn made(&mut self, text: String) -> Result<Value> {
        Ok(Value::Str(self.kept(text)?))
    }

    /// The same as a text that is safe HTML.
    pub(super) fn safe(&mut self, text: String) -> Result<Value> {
        Ok(Value::Safe(self.kept(text)?))
    }

    fn kept(&mut self, text: String) -> Result<Text> {
        let bytes = text.len() + OBJECT_BYTES;
        Ok(Text::Made(self.budget.keep(text.into_boxed_str(), bytes)?))
    }

    /// What is undefined.
    pub(super) fn missing(&mut self, missing: Missing) -> Result<Value> {
        Ok(Value::Undefined(self.budget.keep(missing, OBJECT_BYTES)?))
    }

    /// Puts a piece behind a text that is being made.
    pub(super) fn append(&mut self, text: &mut String, piece: &str) -> Result<()> {
        self.budget.allocate(piece.len())?;
        text.push_str(piece);
        Ok(())
    }

    /// Puts so many of a character behind a text that is being made.
    pub(super) fn append_repeated(&mut self, text: &mut String, character: char, count: usize) -> Result<()> {
        self.budget.allocate_many(count, character.len_utf8())?;
        text.extend(std::iter::repeat_n(character, count));
        Ok(())
    }

    /// Room for so many items.
    pub(super) fn room(&mut self, count: usize) -> Result<Vec<Value>> {
        self.budget.allocate_many(count, ITEM_BYTES)?;
        Ok(Vec::with_capacity(count))
    }

    /// Puts an item behind others for which no room was made.
    pub(super) fn push(&mut self, items: &mut Vec<Value>, item: Value) -> Result<()> {
        self.budget.allocate(ITEM_BYTES)?;
        items.push(item);
        Ok(())
    }

    /// A list of items that were paid for when they were put together.
    pub(super) fn list(&mut self, items: Vec<Value>) -> Result<Value> {
        let paid = self.paid_for(&items)?;
        list(items, false, paid, Value::List)
    }

    /// The same as a tuple.
    pub(super) fn tuple(&mut self, items: Vec<Value>) -> Result<Value> {
        let paid = self.paid_for(&items)?;
        list(items, false, paid, Value::Tuple)
    }

    fn paid_for(&mut self, items: &Vec<Value>) -> Result<Paid> {
        let mut paid = Paid::default();
        self.budget.pay(&mut paid, OBJECT_BYTES + items.capacity().saturating_mul(ITEM_BYTES))?;
        self.budget.steps(items.len())?;
        Ok(paid)
    }

    /// The two items that `groupby` gives for a group.
    pub(super) fn group(&mut self, key: Value, items: Value) -> Result<Value> {
        let items = vec![key, items];
        let paid = self.paid_for(&items)?;
        list(items, true, paid, Value::Tuple)
    }

    /// Sets an entry of a dict that is being made.
    pub(super) fn insert(&mut self, dict: &mut Dict, key: Value, value: Value) -> Result<()> {
        let by = self.key(&key)?;
        if dict.insert(key, by, value) {
            self.budget.pay(&mut dict.paid, ENTRY_BYTES)?;
        }
        Ok(())
    }

    pub(super) fn dict(&mut self, mut dict: Dict) -> Result<Value> {
        self.budget.pay(&mut dict.paid, OBJECT_BYTES)?;
        checked(Value::Dict(Rc::new(dict)))
    }

    /// A value as a key, if it can be one.
    pub(super) fn key(&mut self, value: &Value) -> Result<Key> {
        Ok(match value {
            Value::Undefined(_) => Key::Undefined,
            Value::None => Key::None,
            Value::Bool(value) => Key::Int(i128::from(*value)),
            Value::Int(value) => Key::Int(*value),
            // Whole numbers beyond 2^126 are not in the range where any of them is equal to an integer of ours by accident.
            Value::Float(value) if value.fract() == 0.0 && value.abs() < 8e37 => Key::Int(*value as i128),
            Value::Float(value) => Key::Float(value.to_bits()),
            Value::Str(text) | Value::Safe(text) => {
                self.budget.work(text.len())?;
                Key::Str(text.clone())
            }
            Value::Tuple(tuple) => {
                self.budget.allocate_many(tuple.items.len(), size_of::<Key>())?;
                let mut keys = Vec::with_capacity(tuple.items.len());
                for item in &tuple.items {
                    self.budget.steps(2)?;
                    keys.push(self.key(item)?);
                }
                Key::Tuple(keys)
            }
            Value::Object(object) => Key::Object(object.clone()),
            Value::Range(range) => Key::Range(*range),
            Value::Function(function) => Key::Function(*function),
            Value::List(_) | Value::Dict(_) | Value::View(..) | Value::Method(_) => {
                fail!("a value of type '{}' cannot be a key", value.type_name())
            }
        })
    }
}
