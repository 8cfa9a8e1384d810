//! The rows that a tower makes and a text program reads, by their names in programs.

use qhx_ir::{Checked, Dim, Generator};

/// The output of a tower that takes the place of placeholders.
pub(crate) const SOFT_ROWS: &str = "soft_rows";

/// The output of a tower that is added after a text layer, by its number.
pub(crate) fn deepstack_name(number: usize) -> String {
    format!("deepstack.{number}")
}

/// The width of the soft rows that a text program takes; none where it takes text only.
pub(crate) fn soft_row_width(program: &Checked) -> Option<usize> {
    let soft = program.inputs.iter().find(|input| input.generator == Generator::SoftRows)?;
    match soft.shape[..] {
        [Dim::R, Dim::Fixed(width)] => Some(width),
        _ => None,
    }
}

/// How many deepstack inputs it takes.
pub(crate) fn deepstack_count(program: &Checked) -> usize {
    let number = |generator: &Generator| match generator {
        Generator::DeepstackRows(number) => number + 1,
        _ => 0,
    };
    program.inputs.iter().map(|input| number(&input.generator)).max().unwrap_or(0)
}
