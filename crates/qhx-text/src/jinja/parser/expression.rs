//! Expressions.

use super::Parser;
use crate::jinja::ast::{Comparison, Expression, Kind, Literal, Operator, Step, StepKind};
use crate::jinja::error::{Result, fail};
use crate::jinja::lexer::Token;
use std::sync::Arc;

/// Operators between two values, from the loosest to the tightest.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Level {
    Or,
    And,
    Not,
    Compare,
    Sum,
    Concat,
    Product,
    Power,
    /// Tighter than all operators.
    Single,
}

enum Between {
    Or,
    And,
    Compare(Comparison),
    Concat,
    Arithmetic(Operator),
}

impl Parser {
    /// One expression, or several with commas between them: a tuple.
    pub(super) fn tuple(&mut self) -> Result<Expression> {
        self.tuple_of(Parser::expression)
    }

    /// The same without inline `if`.
    pub(super) fn tuple_without_if(&mut self) -> Result<Expression> {
        self.tuple_of(|parser| parser.binary(Level::Or))
    }

    fn tuple_of(&mut self, item: impl Fn(&mut Self) -> Result<Expression>) -> Result<Expression> {
        let at = self.place();
        let first = item(self)?;
        if !self.is(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip(",") {
            if matches!(self.token(), Token::PrintEnd | Token::BlockEnd) || self.is(")") {
                break;
            }
            items.push(item(self)?);
        }
        Ok(Expression { at, kind: Kind::Tuple(items) })
    }

    /// An expression, inline `if` included.
    pub(super) fn expression(&mut self) -> Result<Expression> {
        let at = self.place();
        let mut value = self.binary(Level::Or)?;
        let mut branches = Vec::new();
        while self.skip_name("if") {
            let condition = self.binary(Level::Or)?;
            branches.push((value, condition));
            if !self.skip_name("else") {
                if self.is_name("if") {
                    fail!("an inline `if` without `else` in front of another `if` is not supported");
                }
                return Ok(Expression { at, kind: Kind::Conditional { branches, otherwise: None } });
            }
            value = self.binary(Level::Or)?;
        }
        if branches.is_empty() {
            return Ok(value);
        }
        Ok(Expression { at, kind: Kind::Conditional { branches, otherwise: Some(Box::new(value)) } })
    }

    /// Values with operators of at least this level between them.
    fn binary(&mut self, level: Level) -> Result<Expression> {
        let at = self.place();
        let mut left = if level <= Level::Not && self.is_name("not") { self.not()? } else { self.unary()? };
        // Whether `left` is a comparison that more can be chained to; one in brackets cannot.
        let mut comparing = false;
        while let Some((operator, of_level, length)) = self.between().filter(|(_, of_level, _)| *of_level >= level) {
            self.next += length;
            let right = self.binary(of_level.tighter())?;
            left = match operator {
                Between::Or => push(left, right, at, Kind::Or, |kind| if let Kind::Or(values) = kind { Some(values) } else { None }),
                Between::And => push(left, right, at, Kind::And, |kind| if let Kind::And(values) = kind { Some(values) } else { None }),
                Between::Concat => {
                    push(left, right, at, Kind::Concat, |kind| if let Kind::Concat(values) = kind { Some(values) } else { None })
                }
                Between::Compare(comparison) => {
                    if matches!(comparison, Comparison::In | Comparison::NotIn) {
                        self.note_literal(Some(&left));
                    }
                    match left.kind {
                        Kind::Compare { first, mut rest } if comparing => {
                            rest.push((comparison, right));
                            Expression { at, kind: Kind::Compare { first, rest } }
                        }
                        _ => Expression { at, kind: Kind::Compare { first: Box::new(left), rest: vec![(comparison, right)] } },
                    }
                }
                Between::Arithmetic(operator) => match left.kind {
                    Kind::Arithmetic { first, mut rest } => {
                        rest.push((operator, right));
                        Expression { at, kind: Kind::Arithmetic { first, rest } }
                    }
                    _ => Expression { at, kind: Kind::Arithmetic { first: Box::new(left), rest: vec![(operator, right)] } },
                },
            };
            comparing = of_level == Level::Compare;
        }
        Ok(left)
    }

    /// The operator here, its level, and how many tokens it takes.
    fn between(&self) -> Option<(Between, Level, usize)> {
        let arithmetic = |operator, level| Some((Between::Arithmetic(operator), level, 1));
        let compare = |comparison, length| Some((Between::Compare(comparison), Level::Compare, length));
        match self.token() {
            Token::Name(name) => match &**name {
                "or" => Some((Between::Or, Level::Or, 1)),
                "and" => Some((Between::And, Level::And, 1)),
                "in" => compare(Comparison::In, 1),
                "not" if matches!(self.following(), Token::Name(next) if **next == *"in") => compare(Comparison::NotIn, 2),
                _ => None,
            },
            Token::Operator(operator) => match *operator {
                "==" => compare(Comparison::Equal, 1),
                "!=" => compare(Comparison::NotEqual, 1),
                "<" => compare(Comparison::Less, 1),
                "<=" => compare(Comparison::LessOrEqual, 1),
                ">" => compare(Comparison::Greater, 1),
                ">=" => compare(Comparison::GreaterOrEqual, 1),
                "+" => arithmetic(Operator::Add, Level::Sum),
                "-" => arithmetic(Operator::Subtract, Level::Sum),
                "~" => Some((Between::Concat, Level::Concat, 1)),
                "*" => arithmetic(Operator::Multiply, Level::Product),
                "/" => arithmetic(Operator::Divide, Level::Product),
                "//" => arithmetic(Operator::FloorDivide, Level::Product),
                "%" => arithmetic(Operator::Remainder, Level::Product),
                "**" => arithmetic(Operator::Power, Level::Power),
                _ => None,
            },
            _ => None,
        }
    }

    fn not(&mut self) -> Result<Expression> {
        let at = self.place();
        let mut negated = false;
        while self.skip_name("not") {
            negated = !negated;
        }
        let value = Box::new(self.binary(Level::Compare)?);
        Ok(Expression { at, kind: Kind::Not { negated, value } })
    }

    /// A value with its signs, and what stands behind it. Signs bind tighter than `**` and filters.
    fn unary(&mut self) -> Result<Expression> {
        let at = self.place();
        let mut minus = Vec::new();
        while self.is("-") || self.is("+") {
            minus.push(self.is("-"));
            self.next += 1;
        }
        let mut value = self.primary()?;
        let mut steps = self.postfix()?;
        if !minus.is_empty() {
            self.note_fields(&steps);
            let signed = Box::new(with_steps(value, steps));
            value = Expression { at, kind: Kind::Signs { minus, value: signed } };
            steps = Vec::new();
        }
        loop {
            let at = self.place();
            let kind = if self.skip("|") {
                self.filter()?
            } else if self.skip_name("is") {
                self.test()?
            } else if self.is("(") {
                StepKind::Call(self.arguments()?)
            } else {
                self.note_fields(&steps);
                return Ok(with_steps(value, steps));
            };
            steps.push(Step { at, kind });
        }
    }

    pub(super) fn primary(&mut self) -> Result<Expression> {
        let at = self.place();
        let kind = match self.token().clone() {
            Token::Name(name) => {
                self.next += 1;
                match &*name {
                    "true" | "True" => Kind::Literal(Literal::Bool(true)),
                    "false" | "False" => Kind::Literal(Literal::Bool(false)),
                    "none" | "None" => Kind::Literal(Literal::None),
                    _ => Kind::Name(self.mention(&name)),
                }
            }
            Token::Str(text) => {
                self.next += 1;
                Kind::Literal(Literal::Str(self.more_strings(text)))
            }
            Token::Int(value) => {
                self.next += 1;
                Kind::Literal(Literal::Int(value))
            }
            Token::Float(value) => {
                self.next += 1;
                Kind::Literal(Literal::Float(value))
            }
            Token::Operator("(") => return self.nested(Self::parentheses),
            Token::Operator("[") => Kind::List(self.nested(Self::list)?),
            Token::Operator("{") => Kind::Dict(self.nested(Self::dict)?),
            _ => return self.unexpected("an expression"),
        };
        Ok(Expression { at, kind })
    }

    /// Strings behind each other are one.
    fn more_strings(&mut self, first: Arc<str>) -> Arc<str> {
        if !matches!(self.token(), Token::Str(_)) {
            return first;
        }
        let mut all = first.to_string();
        while let Token::Str(text) = self.token() {
            all.push_str(text);
            self.next += 1;
        }
        all.into()
    }

    fn parentheses(&mut self) -> Result<Expression> {
        let at = self.place();
        self.expect("(")?;
        if self.skip(")") {
            return Ok(Expression { at, kind: Kind::Tuple(Vec::new()) });
        }
        let inside = self.tuple()?;
        self.expect(")")?;
        Ok(inside)
    }

    fn list(&mut self) -> Result<Vec<Expression>> {
        self.expect("[")?;
        let mut items = Vec::new();
        while !self.is("]") {
            items.push(self.expression()?);
            if !self.skip(",") {
                break;
            }
        }
        self.expect("]")?;
        Ok(items)
    }

    fn dict(&mut self) -> Result<Vec<(Expression, Expression)>> {
        self.expect("{")?;
        let mut entries = Vec::new();
        while !self.is("}") {
            let key = self.expression()?;
            self.expect(":")?;
            entries.push((key, self.expression()?));
            if !self.skip(",") {
                break;
            }
        }
        self.expect("}")?;
        Ok(entries)
    }
}

impl Level {
    fn tighter(self) -> Self {
        match self {
            Self::Or => Self::And,
            Self::And => Self::Not,
            Self::Not => Self::Compare,
            Self::Compare => Self::Sum,
            Self::Sum => Self::Concat,
            Self::Concat => Self::Product,
            Self::Product => Self::Power,
            Self::Power | Self::Single => Self::Single,
        }
    }
}

pub(super) fn with_steps(value: Expression, steps: Vec<Step>) -> Expression {
    if steps.is_empty() {
        return value;
    }
    Expression { at: value.at, kind: Kind::Postfix { value: Box::new(value), steps } }
}

/// Puts `right` behind `left`, which becomes a list of values if it is not yet the wanted one.
fn push(
    mut left: Expression,
    right: Expression,
    at: u32,
    make: impl Fn(Vec<Expression>) -> Kind,
    values: impl Fn(&mut Kind) -> Option<&mut Vec<Expression>>,
) -> Expression {
    if let Some(values) = values(&mut left.kind) {
        values.push(right);
        return left;
    }
    Expression { at, kind: make(vec![left, right]) }
}
