//! Running a template's statements.

use super::ast::{Body, CALLER, Expression, Kind, Macro, Statement, Step, StepKind, Symbol, Symbols, Target};
use super::budget::{Budget, ENTRY_BYTES, Limits, MAX_OUTPUT_BYTES, OBJECT_BYTES};
use super::error::{Failure, Result, fail};
use super::object::{Closure, Frame, Object};
use super::value::{Key, Value};
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;

/// One render of a template.
pub(super) struct Interpreter<'t> {
    pub(super) budget: Budget,
    pub(super) objects: Vec<Object<'t>>,
    pub(super) symbols: &'t Symbols,
    /// The byte of the source that is being evaluated.
    pub(super) at: usize,
    /// The moment that `strftime_now` tells, in seconds since 1970.
    pub(super) now: i64,
    /// What has been written in the innermost block whose text becomes a value, or else for good.
    output: String,
}

/// How a body ended.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Flow {
    Next,
    Break,
    Continue,
}

impl<'t> Interpreter<'t> {
    pub(super) fn new(symbols: &'t Symbols, limits: Limits, now: i64) -> Self {
        Self { budget: Budget::new(limits), objects: Vec::new(), symbols, at: 0, now, output: String::new() }
    }

    /// Renders a whole template.
    pub(super) fn render(&mut self, body: &'t Body, frame: &Rc<Frame>) -> Result<String> {
        self.run(body, frame)?;
        Ok(std::mem::take(&mut self.output))
    }

    pub(super) fn run(&mut self, body: &'t Body, frame: &Rc<Frame>) -> Result<Flow> {
        self.budget.enter()?;
        for statement in body {
            self.budget.steps(1)?;
            let flow = self.statement(statement, frame)?;
            if flow != Flow::Next {
                self.budget.leave();
                return Ok(flow);
            }
        }
        self.budget.leave();
        Ok(Flow::Next)
    }

    fn statement(&mut self, statement: &'t Statement, frame: &Rc<Frame>) -> Result<Flow> {
        match statement {
            Statement::Text(text) => self.write(text)?,
            Statement::Print(expression) => {
                let value = self.evaluate(expression, frame)?;
                self.write_value(&value)?;
            }
            Statement::If { branches, otherwise } => {
                for (condition, body) in branches {
                    let condition = self.evaluate(condition, frame)?;
                    if self.truth(&condition) {
                        return self.run(body, frame);
                    }
                }
                return self.run(otherwise, frame);
            }
            Statement::For(definition) => return self.for_loop(definition, frame),
            Statement::Set { target, value } => {
                let value = self.evaluate(value, frame)?;
                self.assign(target, value, frame)?;
            }
            Statement::SetBlock { target, filters, body } => {
                let text = match self.captured(body, frame)? {
                    ControlFlow::Continue(text) => text,
                    ControlFlow::Break(flow) => return Ok(flow),
                };
                let value = self.filtered(text, filters, frame)?;
                self.assign(target, value, frame)?;
            }
            Statement::Macro(name, definition) => {
                let value = self.closure(definition, frame)?;
                self.set_variable(frame, *name, value)?;
            }
            Statement::Call { call, caller } => self.call_block(call, caller, frame)?,
            Statement::Filter { filters, body } => {
                let text = match self.captured(body, frame)? {
                    ControlFlow::Continue(text) => text,
                    ControlFlow::Break(flow) => return Ok(flow),
                };
                let value = self.filtered(text, filters, frame)?;
                self.write_value(&value)?;
            }
            Statement::With { variables, body } => {
                let inner = self.inner_frame(frame)?;
                for (target, value) in variables {
                    let value = self.evaluate(value, frame)?;
                    self.assign(target, value, &inner)?;
                }
                return self.run(body, &inner);
            }
            Statement::Break => return Ok(Flow::Break),
            Statement::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    pub(super) fn inner_frame(&mut self, frame: &Rc<Frame>) -> Result<Rc<Frame>> {
        self.budget.allocate(OBJECT_BYTES)?;
        Ok(Frame::inside(frame))
    }

    /// Writes text to the output.
    fn write(&mut self, text: &str) -> Result<()> {
        self.budget.allocate(text.len())?;
        if text.len() > MAX_OUTPUT_BYTES.saturating_sub(self.output.len()) {
            return Err(Failure::Limit(format!("{} MiB of text", MAX_OUTPUT_BYTES >> 20)));
        }
        self.output.push_str(text);
        Ok(())
    }

    pub(super) fn write_value(&mut self, value: &Value) -> Result<()> {
        match value.as_str() {
            Some(text) => self.write(text),
            None => {
                let text = self.string_of(value)?;
                self.write(&text)
            }
        }
    }

    /// What `work` writes, as a text of its own.
    pub(super) fn capture<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<(String, T)> {
        let outer = std::mem::take(&mut self.output);
        let result = work(self)?;
        Ok((std::mem::replace(&mut self.output, outer), result))
    }

    /// What a body inside this frame writes, unless a `break` or `continue` leaves it.
    fn captured(&mut self, body: &'t Body, frame: &Rc<Frame>) -> Result<ControlFlow<Flow, Value>> {
        let inner = self.inner_frame(frame)?;
        let (text, flow) = self.capture(|this| this.run(body, &inner))?;
        Ok(if flow == Flow::Next { ControlFlow::Continue(self.text(&text)?) } else { ControlFlow::Break(flow) })
    }

    fn filtered(&mut self, mut value: Value, filters: &'t [Step], frame: &Rc<Frame>) -> Result<Value> {
        for filter in filters {
            value = self.step(value, filter, frame)?;
        }
        Ok(value)
    }

    pub(super) fn closure(&mut self, definition: &'t Macro, frame: &Rc<Frame>) -> Result<Value> {
        self.object(Object::Macro(Closure { definition, frame: frame.clone() }))
    }

    fn call_block(&mut self, call: &'t Expression, caller: &'t Macro, frame: &Rc<Frame>) -> Result<()> {
        let Kind::Postfix { value, steps } = &call.kind else { fail!("a call is expected") };
        let Some((Step { at, kind: StepKind::Call(arguments) }, before)) = steps.split_last() else { fail!("a call is expected") };
        let mut callee = self.evaluate(value, frame)?;
        for step in before {
            callee = self.step(callee, step, frame)?;
        }
        let mut arguments = self.arguments(arguments, frame)?;
        let caller = self.closure(caller, frame)?;
        arguments.named.push((self.symbols.name(CALLER).clone(), caller));
        self.at = *at as usize;
        let value = self.call(&callee, arguments)?;
        self.write_value(&value)
    }

    pub(super) fn assign(&mut self, target: &Target, value: Value, frame: &Rc<Frame>) -> Result<()> {
        match target {
            Target::Name(name) => self.set_variable(frame, *name, value),
            Target::Attribute { namespace, attribute } => self.assign_attribute(*namespace, attribute, value, frame),
            Target::Tuple(targets) => {
                let items = self.items(&value)?;
                if items.len() != targets.len() {
                    fail!("{} values cannot be unpacked into {} variables", items.len(), targets.len());
                }
                targets.iter().zip(items).try_for_each(|(target, item)| self.assign(target, item, frame))
            }
        }
    }

    fn assign_attribute(&mut self, namespace: Symbol, attribute: &Arc<str>, value: Value, frame: &Rc<Frame>) -> Result<()> {
        let holder = self.variable(frame, namespace)?;
        if attribute.starts_with('_') {
            fail!("a namespace cannot have the attribute '{attribute}': names with an underscore in front are not allowed");
        }
        match holder {
            Some(Value::Object(id)) if matches!(self.get(id), Object::Namespace(_)) => {
                self.budget.allocate(ENTRY_BYTES)?;
                if let Object::Namespace(entries) = self.get_mut(id) {
                    entries.insert(Value::Str(attribute.clone()), Key::Str(attribute.clone()), value);
                }
                Ok(())
            }
            _ => fail!("'{}' is not a namespace, so its attribute '{attribute}' cannot be set", self.symbols.name(namespace)),
        }
    }
}
