//! Blocks.

use super::{Mentioned, Parser};
use crate::jinja::ast::{Body, For, Kind, Macro, Parameters, Statement, Step, StepKind, Target};
use crate::jinja::error::{Result, fail};
use crate::jinja::lexer::Token;
use std::sync::Arc;

/// Tags of Jinja that chat templates cannot use, here or elsewhere.
const UNSUPPORTED: [&str; 9] = ["autoescape", "block", "debug", "do", "extends", "from", "import", "include", "trans"];

impl Parser {
    /// Statements up to a tag with one of these names, which is next to be read; without names, up to the end of the template.
    pub(super) fn body(&mut self, ends: &[&str]) -> Result<Body> {
        let mut body = Vec::new();
        loop {
            match self.token().clone() {
                Token::Text(text) => {
                    self.next += 1;
                    body.push(Statement::Text(text));
                }
                Token::PrintStart => {
                    self.next += 1;
                    body.push(Statement::Print(self.tuple()?));
                    self.expect_token(&Token::PrintEnd, "`}}`")?;
                }
                Token::BlockStart => {
                    self.next += 1;
                    if self.is_any_name(ends) {
                        return Ok(body);
                    }
                    self.nested(|parser| parser.statement(&mut body))?;
                    self.expect_token(&Token::BlockEnd, "`%}`")?;
                }
                Token::End if ends.is_empty() => return Ok(body),
                _ => return self.unexpected(&format!("`{{% {} %}}`", ends.join(" %}` or `{% "))),
            }
        }
    }

    /// The body of a block whose tag has been read up to its end. The closing tag's name is read too.
    fn block(&mut self, end: &str) -> Result<Body> {
        let body = self.block_until(&[end])?;
        self.next += 1;
        Ok(body)
    }

    fn block_until(&mut self, ends: &[&str]) -> Result<Body> {
        self.skip(":");
        self.expect_token(&Token::BlockEnd, "`%}`")?;
        self.body(ends)
    }

    /// A block's statement, from the name of its tag up to the end of its last tag.
    fn statement(&mut self, body: &mut Body) -> Result<()> {
        let Token::Name(name) = self.token().clone() else { return self.unexpected("the name of a tag") };
        let start = self.next;
        self.next += 1;
        let statement = match &*name {
            "if" => self.branches()?,
            "for" => self.for_loop()?,
            "set" => self.set()?,
            "macro" => {
                let name = self.expect_name()?;
                let parameters = self.parameters()?;
                Statement::Macro(self.symbols.number(&name), Box::new(self.function(name, parameters, "endmacro")?))
            }
            "call" => self.call()?,
            // Marks what the assistant wrote, for training; it is called like the body of a macro.
            "generation" => {
                let body = self.function_body(|parser| parser.block("endgeneration"))?;
                Statement::With { variables: Vec::new(), body }
            }
            "filter" => {
                let at = self.place();
                let first = Step { at, kind: self.filter()? };
                let mut filters = vec![first];
                filters.extend(self.more_filters()?);
                Statement::Filter { filters, body: self.block("endfilter")? }
            }
            "with" => {
                let mut variables = Vec::new();
                while !matches!(self.token(), Token::BlockEnd) && !self.is(":") {
                    if !variables.is_empty() {
                        self.expect(",")?;
                    }
                    let target = self.target(false)?;
                    self.expect("=")?;
                    variables.push((target, self.expression()?));
                }
                Statement::With { variables, body: self.block("endwith")? }
            }
            "print" => {
                while !matches!(self.token(), Token::BlockEnd) {
                    body.push(Statement::Print(self.expression()?));
                    if !self.skip(",") {
                        break;
                    }
                }
                return Ok(());
            }
            "break" | "continue" if !self.can_break => fail!("`{name}` stands outside of a loop"),
            "break" => Statement::Break,
            "continue" => Statement::Continue,
            _ => {
                self.next = start;
                if UNSUPPORTED.contains(&&*name) {
                    fail!("the tag `{name}` is not supported in chat templates");
                }
                fail!("unknown tag `{name}`")
            }
        };
        body.push(statement);
        Ok(())
    }

    fn branches(&mut self) -> Result<Statement> {
        let mut branches = Vec::new();
        loop {
            let condition = self.tuple_without_if()?;
            let body = self.block_until(&["elif", "else", "endif"])?;
            branches.push((condition, body));
            if self.skip_name("elif") {
                continue;
            }
            let otherwise = if self.skip_name("else") { self.block_until(&["endif"])? } else { Vec::new() };
            self.next += 1;
            return Ok(Statement::If { branches, otherwise });
        }
    }

    fn for_loop(&mut self) -> Result<Statement> {
        self.loops += 1;
        let target = self.target(false)?;
        if !self.skip_name("in") {
            return self.unexpected("`in`");
        }
        let iterable = self.tuple_without_if()?;
        let condition = if self.skip_name("if") { Some(self.expression()?) } else { None };
        let recursive = self.skip_name("recursive");
        let outside = std::mem::replace(&mut self.can_break, true);
        let body = self.block_until(&["endfor", "else"])?;
        self.can_break = outside;
        let otherwise = if self.skip_name("else") { self.block_until(&["endfor"])? } else { Vec::new() };
        self.next += 1;
        self.loops -= 1;
        Ok(Statement::For(Box::new(For { target, iterable, condition, recursive, body, otherwise })))
    }

    fn set(&mut self) -> Result<Statement> {
        let target = self.target(true)?;
        if self.skip("=") {
            return Ok(Statement::Set { target, value: self.tuple()? });
        }
        let filters = self.more_filters()?;
        Ok(Statement::SetBlock { target, filters, body: self.block("endset")? })
    }

    fn more_filters(&mut self) -> Result<Vec<Step>> {
        let mut filters = Vec::new();
        while self.is("|") {
            let at = self.place();
            self.next += 1;
            filters.push(Step { at, kind: self.filter()? });
        }
        Ok(filters)
    }

    fn call(&mut self) -> Result<Statement> {
        let parameters = if self.is("(") { self.parameters()? } else { Vec::new() };
        let call = self.expression()?;
        let is_call =
            matches!(&call.kind, Kind::Postfix { steps, .. } if matches!(steps.last(), Some(Step { kind: StepKind::Call(_), .. })));
        if !is_call {
            fail!("the tag `call` expects a call, such as `name()`");
        }
        let caller = self.function("caller".into(), parameters, "endcall")?;
        Ok(Statement::Call { call, caller: Box::new(caller) })
    }

    fn function(&mut self, name: Arc<str>, parameters: Parameters, end: &str) -> Result<Macro> {
        self.macros.push(Mentioned::default());
        let body = self.function_body(|parser| parser.block(end))?;
        let Mentioned { caller, kwargs, varargs } = self.macros.pop().unwrap_or_default();
        Ok(Macro { name, parameters, body, uses_caller: caller, uses_kwargs: kwargs, uses_varargs: varargs })
    }

    /// A body that no `break` can leave.
    fn function_body(&mut self, parse: impl FnOnce(&mut Self) -> Result<Body>) -> Result<Body> {
        let outside = std::mem::replace(&mut self.can_break, false);
        let body = parse(self)?;
        self.can_break = outside;
        Ok(body)
    }

    fn parameters(&mut self) -> Result<Parameters> {
        self.expect("(")?;
        let mut parameters = Parameters::new();
        let mut with_default = false;
        while !self.is(")") {
            let Target::Name(name) = self.single_target(false)? else { return self.unexpected("the name of a parameter") };
            let default = if self.skip("=") { Some(self.expression()?) } else { None };
            if with_default && default.is_none() {
                fail!("a parameter without a default stands behind one with a default");
            }
            with_default = default.is_some();
            parameters.push((name, default));
            if !self.skip(",") {
                break;
            }
        }
        self.expect(")")?;
        Ok(parameters)
    }

    /// What is assigned to: one target, or several with commas between them.
    fn target(&mut self, with_attributes: bool) -> Result<Target> {
        let first = self.single_target(with_attributes)?;
        if !self.is(",") {
            return Ok(first);
        }
        let mut targets = vec![first];
        while self.skip(",") {
            if self.is(")") || matches!(self.token(), Token::BlockEnd) {
                break;
            }
            targets.push(self.single_target(with_attributes)?);
        }
        Ok(Target::Tuple(targets))
    }

    fn single_target(&mut self, with_attributes: bool) -> Result<Target> {
        if self.is("(") {
            return self.nested(|parser| {
                parser.expect("(")?;
                let target = parser.target(with_attributes)?;
                parser.expect(")")?;
                Ok(target)
            });
        }
        let name = self.expect_name()?;
        if with_attributes && self.skip(".") {
            let namespace = self.mention(&name);
            return Ok(Target::Attribute { namespace, attribute: self.expect_name()? });
        }
        match &*name {
            "true" | "True" | "false" | "False" | "none" | "None" => fail!("`{name}` cannot be assigned to"),
            "loop" if self.loops > 0 => fail!("`loop` cannot be assigned to inside a loop"),
            _ => Ok(Target::Name(self.symbols.number(&name))),
        }
    }
}
