//! A compiled template.
//!
//! What is a chain in the source (`a + b + c`, `a.b.c`, `x | f | g`, `elif`) is a list here, so that only blocks and brackets nest.

use std::collections::HashMap;
use std::sync::Arc;

/// A variable's name, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Symbol(pub(super) u32);

/// Names that the language itself binds.
pub(super) const LOOP: Symbol = Symbol(0);
pub(super) const CALLER: Symbol = Symbol(1);
pub(super) const VARARGS: Symbol = Symbol(2);
pub(super) const KWARGS: Symbol = Symbol(3);

/// The names of all variables of a template.
#[derive(Debug)]
pub(super) struct Symbols {
    names: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, Symbol>,
}

impl Symbols {
    pub(super) fn new() -> Self {
        let mut symbols = Self { names: Vec::new(), numbers: HashMap::new() };
        for name in ["loop", "caller", "varargs", "kwargs"] {
            symbols.number(&name.into());
        }
        symbols
    }

    pub(super) fn number(&mut self, name: &Arc<str>) -> Symbol {
        let next = Symbol(self.names.len() as u32);
        let number = *self.numbers.entry(name.clone()).or_insert(next);
        if number == next {
            self.names.push(name.clone());
        }
        number
    }

    pub(super) fn find(&self, name: &str) -> Option<Symbol> {
        self.numbers.get(name).copied()
    }

    pub(super) fn name(&self, symbol: Symbol) -> &Arc<str> {
        &self.names[symbol.0 as usize]
    }
}

pub(super) type Body = Vec<Statement>;

#[derive(Debug)]
pub(super) enum Statement {
    Text(Arc<str>),
    Print(Expression),
    If {
        branches: Vec<(Expression, Body)>,
        otherwise: Body,
    },
    For(Box<For>),
    Set {
        target: Target,
        value: Expression,
    },
    SetBlock {
        target: Target,
        filters: Vec<Step>,
        body: Body,
    },
    Macro(Symbol, Box<Macro>),
    /// `call`: the expression that calls, and what `caller` renders.
    Call {
        call: Expression,
        caller: Box<Macro>,
    },
    Filter {
        filters: Vec<Step>,
        body: Body,
    },
    With {
        variables: Vec<(Target, Expression)>,
        body: Body,
    },
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) iterable: Expression,
    pub(super) condition: Option<Expression>,
    pub(super) recursive: bool,
    pub(super) body: Body,
    pub(super) otherwise: Body,
}

/// A macro's parameters with their defaults.
pub(super) type Parameters = Vec<(Symbol, Option<Expression>)>;

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: Arc<str>,
    pub(super) parameters: Parameters,
    pub(super) body: Body,
    /// Which of the names that are bound only where the body mentions them it does mention.
    pub(super) uses_caller: bool,
    pub(super) uses_kwargs: bool,
    pub(super) uses_varargs: bool,
}

/// What can be assigned to.
#[derive(Debug)]
pub(super) enum Target {
    Name(Symbol),
    Attribute { namespace: Symbol, attribute: Arc<str> },
    Tuple(Vec<Target>),
}

#[derive(Debug)]
pub(super) struct Expression {
    /// The byte of the source it begins at.
    pub(super) at: u32,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    Literal(Literal),
    Name(Symbol),
    List(Vec<Expression>),
    Tuple(Vec<Expression>),
    Dict(Vec<(Expression, Expression)>),
    /// Left to right.
    Arithmetic {
        first: Box<Expression>,
        rest: Vec<(Operator, Expression)>,
    },
    /// `~`
    Concat(Vec<Expression>),
    Compare {
        first: Box<Expression>,
        rest: Vec<(Comparison, Expression)>,
    },
    /// `not not x` is not negated.
    Not {
        negated: bool,
        value: Box<Expression>,
    },
    And(Vec<Expression>),
    Or(Vec<Expression>),
    /// Each sign, the innermost last: whether it is a minus.
    Signs {
        minus: Vec<bool>,
        value: Box<Expression>,
    },
    /// The value of the first branch whose condition (the second) holds.
    Conditional {
        branches: Vec<(Expression, Expression)>,
        otherwise: Option<Box<Expression>>,
    },
    Postfix {
        value: Box<Expression>,
        steps: Vec<Step>,
    },
}

#[derive(Clone, Debug)]
pub(super) enum Literal {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
    Power,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
}

/// What can stand behind a value.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) at: u32,
    pub(super) kind: StepKind,
}

#[derive(Debug)]
pub(super) enum StepKind {
    Attribute(Arc<str>),
    Item(Expression),
    Slice(Box<[Option<Expression>; 3]>),
    Call(ArgumentList),
    Filter(Arc<str>, ArgumentList),
    Test { name: Arc<str>, arguments: ArgumentList, negated: bool },
}

#[derive(Debug, Default)]
pub(super) struct ArgumentList {
    pub(super) positional: Vec<Expression>,
    pub(super) named: Vec<(Arc<str>, Expression)>,
    /// `*list`
    pub(super) spread: Option<Box<Expression>>,
    /// `**dict`
    pub(super) spread_named: Option<Box<Expression>>,
}
