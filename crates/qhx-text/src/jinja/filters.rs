//! Filters: `x | upper`, `x | map(attribute="name")`.

mod number;
mod select;
mod sequence;
mod text;

use super::arguments::Arguments;
use super::error::{Result, fail};
use super::interpreter::Interpreter;
use super::value::Value;

/// Filters of Jinja that no published chat template uses, or that must not be had.
const UNSUPPORTED: [&str; 7] = ["filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "forceescape"];

/// Whether there is a filter of this name.
pub(super) fn exists(name: &str) -> bool {
    [text::NAMES, sequence::NAMES, select::NAMES, number::NAMES].iter().any(|names| names.contains(&name))
}

impl Interpreter<'_> {
    pub(super) fn filter(&mut self, name: &str, value: Value, arguments: Arguments) -> Result<Value> {
        // A filter may call others: `map('map', …)`.
        self.budget.enter()?;
        self.budget.steps(6)?;
        let result = self.scoped(|this| {
            if text::NAMES.contains(&name) {
                this.text_filter(name, value, arguments)
            } else if sequence::NAMES.contains(&name) {
                this.sequence_filter(name, value, arguments)
            } else if select::NAMES.contains(&name) {
                this.select_filter(name, &value, arguments)
            } else if number::NAMES.contains(&name) {
                this.number_filter(name, &value, arguments)
            } else if UNSUPPORTED.contains(&name) {
                fail!("the filter '{name}' is not supported")
            } else {
                fail!("there is no filter '{name}'")
            }
        });
        self.budget.leave();
        result
    }
}
