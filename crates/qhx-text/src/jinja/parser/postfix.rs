//! What stands behind a value: attributes, subscripts, calls, filters and tests.

use super::Parser;
use super::expression::with_steps;
use crate::jinja::ast::{ArgumentList, Expression, Kind, Literal, Step, StepKind};
use crate::jinja::error::{Failure, Result, fail};
use crate::jinja::lexer::Token;
use std::sync::Arc;

/// Filters whose first argument is the name of an attribute.
const BY_ATTRIBUTE: [&str; 4] = ["attr", "groupby", "rejectattr", "selectattr"];

fn literal(expression: &Expression) -> Option<&Arc<str>> {
    match &expression.kind {
        Kind::Literal(Literal::Str(text)) => Some(text),
        _ => None,
    }
}

impl Parser {
    /// Attributes, subscripts and calls behind a value.
    pub(super) fn postfix(&mut self) -> Result<Vec<Step>> {
        let mut steps = Vec::new();
        loop {
            let at = self.place();
            let kind = if self.skip(".") {
                match self.token().clone() {
                    Token::Name(name) => {
                        self.next += 1;
                        StepKind::Attribute(name)
                    }
                    Token::Int(index) => {
                        let literal = Expression { at: self.place(), kind: Kind::Literal(Literal::Int(index)) };
                        self.next += 1;
                        StepKind::Item(literal)
                    }
                    _ => return self.unexpected("a name or a number behind the point"),
                }
            } else if self.is("[") {
                self.nested(Self::subscript)?
            } else if self.is("(") {
                StepKind::Call(self.arguments()?)
            } else {
                return Ok(steps);
            };
            steps.push(Step { at, kind });
        }
    }

    /// Notes which fields the steps behind a value look for.
    pub(super) fn note_fields(&mut self, steps: &[Step]) {
        for (place, step) in steps.iter().enumerate() {
            let called = matches!(steps.get(place + 1), Some(Step { kind: StepKind::Call(_), .. }));
            match &step.kind {
                StepKind::Attribute(name) if !called => self.fields.extend([name.clone()]),
                StepKind::Attribute(name) if **name == *"get" => {
                    if let Some(Step { kind: StepKind::Call(arguments), .. }) = steps.get(place + 1) {
                        self.note_literal(arguments.positional.first());
                    }
                }
                StepKind::Item(item) => self.note_literal(Some(item)),
                StepKind::Filter(name, arguments) => {
                    let first = arguments.positional.first().filter(|_| BY_ATTRIBUTE.contains(&&**name));
                    let named = arguments.named.iter().find(|(name, _)| **name == *"attribute").map(|(_, value)| value);
                    for path in [first, named].into_iter().flatten().filter_map(literal) {
                        self.fields.extend(path.split(['.', ',']).map(Arc::from));
                    }
                }
                _ => {}
            }
        }
    }

    pub(super) fn note_literal(&mut self, field: Option<&Expression>) {
        self.fields.extend(field.and_then(literal).cloned());
    }

    fn subscript(&mut self) -> Result<StepKind> {
        let at = self.place();
        self.expect("[")?;
        let mut items = Vec::new();
        if !self.is(":") {
            items.push(self.expression()?);
        }
        if self.skip(":") {
            let start = items.pop();
            let stop = if self.is(":") || self.is("]") { None } else { Some(self.expression()?) };
            let step = if self.skip(":") && !self.is("]") { Some(self.expression()?) } else { None };
            self.expect("]")?;
            return Ok(StepKind::Slice(Box::new([start, stop, step])));
        }
        while self.skip(",") {
            items.push(self.expression()?);
        }
        self.expect("]")?;
        match items.pop() {
            Some(item) if items.is_empty() => Ok(StepKind::Item(item)),
            Some(last) => {
                items.push(last);
                Ok(StepKind::Item(Expression { at, kind: Kind::Tuple(items) }))
            }
            None => Err(Failure::problem("a subscript is expected between `[` and `]`")),
        }
    }

    pub(super) fn arguments(&mut self) -> Result<ArgumentList> {
        self.nested(|parser| {
            parser.expect("(")?;
            let mut arguments = ArgumentList::default();
            while !parser.is(")") {
                parser.argument(&mut arguments)?;
                if !parser.skip(",") {
                    break;
                }
            }
            parser.expect(")")?;
            Ok(arguments)
        })
    }

    fn argument(&mut self, arguments: &mut ArgumentList) -> Result<()> {
        let misplaced = || Err(Failure::problem("this argument cannot stand behind the ones before it"));
        if self.skip("*") {
            if arguments.spread.is_some() || arguments.spread_named.is_some() {
                return misplaced();
            }
            arguments.spread = Some(Box::new(self.expression()?));
        } else if self.skip("**") {
            if arguments.spread_named.is_some() {
                return misplaced();
            }
            arguments.spread_named = Some(Box::new(self.expression()?));
        } else if let (Token::Name(name), Token::Operator("=")) = (self.token().clone(), self.following()) {
            if arguments.spread_named.is_some() {
                return misplaced();
            }
            self.next += 2;
            arguments.named.push((name, self.expression()?));
        } else {
            if arguments.spread.is_some() || arguments.spread_named.is_some() || !arguments.named.is_empty() {
                return misplaced();
            }
            arguments.positional.push(self.expression()?);
        }
        Ok(())
    }

    /// A filter behind its `|`.
    pub(super) fn filter(&mut self) -> Result<StepKind> {
        let name = self.dotted_name()?;
        let arguments = if self.is("(") { self.arguments()? } else { ArgumentList::default() };
        Ok(StepKind::Filter(name, arguments))
    }

    /// A test behind its `is`. An argument may stand there without brackets.
    pub(super) fn test(&mut self) -> Result<StepKind> {
        let negated = self.skip_name("not");
        let name = self.dotted_name()?;
        let mut arguments = ArgumentList::default();
        if self.is("(") {
            arguments = self.arguments()?;
        } else if self.is_name("is") {
            fail!("tests cannot be chained with `is`");
        } else if matches!(self.token(), Token::Name(_) | Token::Str(_) | Token::Int(_) | Token::Float(_) | Token::Operator("[" | "{"))
            && !self.is_any_name(&["else", "or", "and"])
        {
            let value = self.primary()?;
            let steps = self.postfix()?;
            self.note_fields(&steps);
            arguments.positional.push(with_steps(value, steps));
        }
        Ok(StepKind::Test { name, arguments, negated })
    }

    fn dotted_name(&mut self) -> Result<Arc<str>> {
        let first = self.expect_name()?;
        if !self.is(".") {
            return Ok(first);
        }
        let mut name = first.to_string();
        while self.skip(".") {
            name.push('.');
            name.push_str(&self.expect_name()?);
        }
        Ok(name.into())
    }
}
