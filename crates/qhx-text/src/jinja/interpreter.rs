//! Running a template's statements.

use super::ast::{Body, CALLER, Expression, Kind, Macro, Statement, Step, StepKind, Symbol, Symbols, Target};
use super::budget::{Budget, ENTRY_BYTES, Limits, MAX_OUTPUT_BYTES, Paid};
use super::error::{Failure, Result, fail};
use super::object::{Closure, Frame, Object, Objects};
use super::value::{Key, Value};
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// One render of a template.
pub(super) struct Interpreter<'t> {
    pub(super) budget: Budget<'t>,
    pub(super) objects: Objects<'t>,
    pub(super) symbols: &'t Symbols,
    /// The byte of the source that is being evaluated.
    pub(super) at: usize,
    /// The moment that `strftime_now` tells, in seconds since 1970.
    pub(super) now: i64,
    /// What has been written in the innermost block whose text becomes a value, or else for good.
    output: Output,
}

/// Text that has been written, and what was paid for it.
#[derive(Default)]
pub(super) struct Output {
    pub(super) text: String,
    paid: Paid,
}

/// How a body ended.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Flow {
    Next,
    Break,
    Continue,
}

impl<'t> Interpreter<'t> {
    pub(super) fn new(symbols: &'t Symbols, limits: Limits, now: i64, cancel: &'t AtomicBool) -> Self {
        Self { budget: Budget::new(limits, cancel), objects: Objects::default(), symbols, at: 0, now, output: Output::default() }
    }

    /// Renders a whole template.
    pub(super) fn render(&mut self, body: &'t Body, frame: &Rc<Frame>) -> Result<String> {
        self.run(body, frame)?;
        Ok(std::mem::take(&mut self.output).text)
    }

    pub(super) fn run(&mut self, body: &'t Body, frame: &Rc<Frame>) -> Result<Flow> {
        self.budget.enter()?;
        for statement in body {
            self.budget.steps(1)?;
            let flow = self.scoped(|this| this.statement(statement, frame))?;
            if flow != Flow::Next {
                self.budget.leave();
                return Ok(flow);
            }
        }
        self.budget.leave();
        Ok(Flow::Next)
    }

    /// What `work` gives, which was paid for as what it is. What `work` needs for a while is given back.
    pub(super) fn scoped<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let scratch = self.budget.scratch();
        let result = work(self)?;
        self.budget.give_back(scratch);
        Ok(result)
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

    /// Writes text to the output.
    fn write(&mut self, text: &str) -> Result<()> {
        self.budget.pay(&mut self.output.paid, text.len())?;
        self.budget.copy(text.len())?;
        if text.len() > MAX_OUTPUT_BYTES.saturating_sub(self.output.text.len()) {
            return Err(Failure::Limit(format!("{} MiB of text", MAX_OUTPUT_BYTES >> 20)));
        }
        self.output.text.push_str(text);
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
    pub(super) fn capture<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<(Output, T)> {
        let outer = std::mem::take(&mut self.output);
        let result = work(self)?;
        Ok((std::mem::replace(&mut self.output, outer), result))
    }

    /// What a body inside this frame writes, unless a `break` or `continue` leaves it.
    fn captured(&mut self, body: &'t Body, frame: &Rc<Frame>) -> Result<ControlFlow<Flow, Value>> {
        let inner = self.inner_frame(frame)?;
        let (output, flow) = self.capture(|this| this.run(body, &inner))?;
        Ok(if flow == Flow::Next { ControlFlow::Continue(self.made(output.text)?) } else { ControlFlow::Break(flow) })
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
        arguments.named.push((self.symbols.name(CALLER).into(), caller));
        self.at = *at as usize;
        let value = self.call(&callee, arguments)?;
        self.write_value(&value)
    }

    pub(super) fn assign(&mut self, target: &Target, value: Value, frame: &Rc<Frame>) -> Result<()> {
        match target {
            Target::Name(name) => self.set_variable(frame, *name, value),
            Target::Attribute { namespace, attribute } => self.assign_attribute(*namespace, attribute, value, frame),
            Target::Tuple(targets) => self.scoped(|this| {
                let items = this.items(&value)?;
                if items.len() != targets.len() {
                    fail!("{} values cannot be unpacked into {} variables", items.len(), targets.len());
                }
                targets.iter().zip(items).try_for_each(|(target, item)| this.assign(target, item, frame))
            }),
        }
    }

    fn assign_attribute(&mut self, namespace: Symbol, attribute: &Arc<str>, value: Value, frame: &Rc<Frame>) -> Result<()> {
        let holder = self.variable(frame, namespace)?;
        if attribute.starts_with('_') {
            fail!("a namespace cannot have the attribute '{attribute}': names with an underscore in front are not allowed");
        }
        match holder {
            Some(Value::Object(id)) if matches!(self.get(&id), Object::Namespace(_)) => {
                if let Object::Namespace(entries) = self.objects.get_mut(&id)
                    && entries.insert(Value::Str(attribute.into()), Key::Str(attribute.into()), value)
                {
                    self.budget.pay(&mut entries.paid, ENTRY_BYTES)?;
                }
                Ok(())
            }
            _ => fail!("'{}' is not a namespace, so its attribute '{attribute}' cannot be set", self.symbols.name(namespace)),
        }
    }
}
