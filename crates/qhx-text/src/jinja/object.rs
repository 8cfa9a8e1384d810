//! What can change while a template renders: namespaces, loops and the like.
//!
//! They live in one list of the interpreter's; values refer to them by number. So a namespace that contains itself is no circle of owners, and
//! everything is freed at the end, each object for itself.

use super::ast::{For, Macro, Symbol};
use super::budget::OBJECT_BYTES;
use super::error::Result;
use super::interpreter::Interpreter;
use super::value::{Dict, List, Range, Value};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

/// An object's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ObjectId(pub(super) u32);

pub(super) enum Object<'t> {
    Namespace(Dict),
    Macro(Closure<'t>),
    Loop(Loop<'t>),
    /// Python's iterators, which can be read once.
    Iterator(VecDeque<Value>),
    Cycler {
        items: Vec<Value>,
        next: usize,
    },
    Joiner {
        separator: Value,
        used: bool,
    },
}

/// A macro and where it was defined.
#[derive(Clone)]
pub(super) struct Closure<'t> {
    pub(super) definition: &'t Macro,
    pub(super) frame: Rc<Frame>,
}

/// What `loop` is in the body of a `for`.
pub(super) struct Loop<'t> {
    pub(super) definition: &'t For,
    /// Where the loop stands.
    pub(super) frame: Rc<Frame>,
    pub(super) source: Source,
    /// Items that were looked at before their turn.
    pub(super) ahead: VecDeque<Value>,
    pub(super) index0: usize,
    pub(super) length: Option<usize>,
    pub(super) previous: Option<Value>,
    pub(super) current: Option<Value>,
    pub(super) changed: Option<Value>,
    pub(super) depth0: usize,
}

/// Where the items of a loop come from.
pub(super) enum Source {
    List { list: Rc<List>, next: usize },
    Range { range: Range, next: usize },
    Iterator(ObjectId),
    Items(VecDeque<Value>),
}

/// Variables, and where to look for others.
pub(super) struct Frame {
    variables: RefCell<Vec<(Symbol, Value)>>,
    parent: Option<Rc<Frame>>,
}

impl Frame {
    pub(super) fn new(variables: Vec<(Symbol, Value)>, parent: Option<Rc<Frame>>) -> Rc<Self> {
        Rc::new(Self { variables: RefCell::new(variables), parent })
    }

    pub(super) fn inside(parent: &Rc<Self>) -> Rc<Self> {
        Self::new(Vec::new(), Some(parent.clone()))
    }
}

impl<'t> Interpreter<'t> {
    pub(super) fn object(&mut self, object: Object<'t>) -> Result<Value> {
        self.budget.allocate(OBJECT_BYTES + size_of::<Object>())?;
        self.objects.push(object);
        Ok(Value::Object(ObjectId(self.objects.len() as u32 - 1)))
    }

    pub(super) fn iterator(&mut self, items: Vec<Value>) -> Result<Value> {
        self.object(Object::Iterator(items.into()))
    }

    pub(super) fn get(&self, id: ObjectId) -> &Object<'t> {
        &self.objects[id.0 as usize]
    }

    pub(super) fn get_mut(&mut self, id: ObjectId) -> &mut Object<'t> {
        &mut self.objects[id.0 as usize]
    }

    pub(super) fn variable(&mut self, frame: &Rc<Frame>, name: Symbol) -> Result<Option<Value>> {
        let mut frame = Some(frame);
        while let Some(here) = frame {
            let variables = here.variables.borrow();
            self.budget.steps(1 + variables.len() / 16)?;
            if let Some((_, value)) = variables.iter().find(|(symbol, _)| *symbol == name) {
                return Ok(Some(value.clone()));
            }
            frame = here.parent.as_ref();
        }
        Ok(None)
    }

    pub(super) fn set_variable(&mut self, frame: &Frame, name: Symbol, value: Value) -> Result<()> {
        let mut variables = frame.variables.borrow_mut();
        self.budget.steps(1 + variables.len() / 16)?;
        match variables.iter_mut().find(|(symbol, _)| *symbol == name) {
            Some((_, variable)) => *variable = value,
            None => {
                self.budget.allocate(size_of::<(Symbol, Value)>())?;
                variables.push((name, value));
            }
        }
        Ok(())
    }
}
