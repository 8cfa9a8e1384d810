//! What can change while a template renders: namespaces, loops and the like.
//!
//! They live in one list of the interpreter's; values refer to them by number. So a namespace that contains itself is no circle of owners, and
//! nothing is freed from within another. An object that no value refers to any more makes place for the next one.

use super::ast::{For, Macro, Symbol};
use super::budget::{ITEM_BYTES, OBJECT_BYTES, Paid};
use super::error::Result;
use super::interpreter::Interpreter;
use super::value::{Dict, List, Range, Value};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::rc::Rc;

/// An object's number.
#[derive(Clone, Debug)]
pub(super) struct ObjectId(Rc<Number>);

#[derive(Debug)]
struct Number {
    number: usize,
    unused: Rc<RefCell<Vec<usize>>>,
}

impl Drop for Number {
    fn drop(&mut self) {
        self.unused.borrow_mut().push(self.number);
    }
}

impl PartialEq for ObjectId {
    fn eq(&self, other: &Self) -> bool {
        self.0.number == other.0.number
    }
}

impl Eq for ObjectId {}

impl Hash for ObjectId {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.0.number.hash(hasher);
    }
}

/// All objects of a render.
#[derive(Default)]
pub(super) struct Objects<'t> {
    places: Vec<(Object<'t>, Paid)>,
    /// Numbers that no value refers to any more; their objects are still there.
    unused: Rc<RefCell<Vec<usize>>>,
    /// Numbers of places without an object.
    vacant: Vec<usize>,
}

impl<'t> Objects<'t> {
    pub(super) fn get_mut(&mut self, id: &ObjectId) -> &mut Object<'t> {
        &mut self.places[id.0.number].0
    }

    /// Frees what no value refers to any more, and what that alone referred to.
    pub(super) fn reclaim(&mut self) {
        loop {
            let unused = self.unused.borrow_mut().pop();
            let Some(number) = unused else { return };
            self.places[number] = (Object::Gone, Paid::default());
            self.vacant.push(number);
        }
    }
}

pub(super) enum Object<'t> {
    Namespace(Dict),
    Macro(Closure<'t>),
    Loop(Loop<'t>),
    /// Python's iterators, which can be read once.
    Iterator(VecDeque<Value>, Paid),
    Cycler {
        items: Vec<Value>,
        next: usize,
        _paid: Paid,
    },
    Joiner {
        separator: Value,
        used: bool,
    },
    /// Nothing: the place is vacant.
    Gone,
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
    pub(super) ahead_paid: Paid,
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
    variables: RefCell<(Vec<(Symbol, Value)>, Paid)>,
    parent: Option<Rc<Frame>>,
}

impl Frame {
    pub(super) fn new(variables: Vec<(Symbol, Value)>, paid: Paid, parent: Option<Rc<Frame>>) -> Rc<Self> {
        Rc::new(Self { variables: RefCell::new((variables, paid)), parent })
    }
}

impl<'t> Interpreter<'t> {
    pub(super) fn object(&mut self, object: Object<'t>) -> Result<Value> {
        self.new_object(object).map(Value::Object)
    }

    pub(super) fn new_object(&mut self, object: Object<'t>) -> Result<ObjectId> {
        let mut paid = Paid::default();
        self.budget.pay(&mut paid, OBJECT_BYTES + size_of::<Object>())?;
        let objects = &mut self.objects;
        objects.reclaim();
        let number = objects.vacant.pop().unwrap_or_else(|| {
            objects.places.push((Object::Gone, Paid::default()));
            objects.places.len() - 1
        });
        objects.places[number] = (object, paid);
        Ok(ObjectId(Rc::new(Number { number, unused: objects.unused.clone() })))
    }

    pub(super) fn iterator(&mut self, items: Vec<Value>) -> Result<Value> {
        let mut paid = Paid::default();
        self.budget.pay(&mut paid, items.capacity().saturating_mul(ITEM_BYTES))?;
        self.object(Object::Iterator(items.into(), paid))
    }

    pub(super) fn get(&self, id: &ObjectId) -> &Object<'t> {
        &self.objects.places[id.0.number].0
    }

    pub(super) fn get_mut(&mut self, id: &ObjectId) -> &mut Object<'t> {
        self.objects.get_mut(id)
    }

    pub(super) fn inner_frame(&mut self, frame: &Rc<Frame>) -> Result<Rc<Frame>> {
        let mut paid = Paid::default();
        self.budget.pay(&mut paid, OBJECT_BYTES)?;
        self.budget.steps(2)?;
        Ok(Frame::new(Vec::new(), paid, Some(frame.clone())))
    }

    pub(super) fn variable(&mut self, frame: &Rc<Frame>, name: Symbol) -> Result<Option<Value>> {
        let mut frame = Some(frame);
        while let Some(here) = frame {
            let variables = here.variables.borrow();
            let variables = &variables.0;
            self.budget.steps(1 + variables.len() / 16)?;
            if let Some((_, value)) = variables.iter().find(|(symbol, _)| *symbol == name) {
                return Ok(Some(value.clone()));
            }
            frame = here.parent.as_ref();
        }
        Ok(None)
    }

    pub(super) fn set_variable(&mut self, frame: &Frame, name: Symbol, value: Value) -> Result<()> {
        let (variables, paid) = &mut *frame.variables.borrow_mut();
        self.budget.steps(1 + variables.len() / 16)?;
        match variables.iter_mut().find(|(symbol, _)| *symbol == name) {
            Some((_, variable)) => *variable = value,
            None => {
                self.budget.pay(paid, size_of::<(Symbol, Value)>())?;
                variables.push((name, value));
            }
        }
        Ok(())
    }
}
