//! The pen's methods for programs that draft.

use super::{Pen, Value};
use qhx_ir::{DType, Dim, Generator, OpKind};

impl Pen<'_> {
    /// The ids behind the rows.
    pub fn next_ids(&self) -> Value {
        self.input("next_ids", DType::I32, vec![Dim::T], Generator::NextIds)
    }

    /// The positions of the ids behind the rows.
    pub fn next_positions(&self) -> Value {
        self.input("positions", DType::I32, vec![Dim::Fixed(1), Dim::T], Generator::PositionsNext)
    }

    /// The keys and values of the rows in a slot of the text program.
    pub fn text_keys_and_values(&self, slot: &str, kv_heads: usize, head_dim: usize) -> (Value, Value) {
        let shape = || vec![Dim::T, Dim::Fixed(kv_heads), Dim::Fixed(head_dim)];
        let keys = self.input(&format!("{slot}.keys"), DType::F32, shape(), Generator::TextKeys(slot.into()));
        (keys, self.input(&format!("{slot}.values"), DType::F32, shape(), Generator::TextValues(slot.into())))
    }

    /// What a stage of the text program made of the rows.
    pub fn hidden_rows(&self, width: usize) -> Value {
        self.input("hidden_rows", DType::F32, vec![Dim::T, Dim::Fixed(width)], Generator::HiddenRows)
    }

    /// This program's own rows put in place of rows of `x`.
    pub fn chained_rows(&self, x: &Value) -> Value {
        let rows = self.input("chained_rows", DType::F32, vec![Dim::R, Dim::Fixed(x.width())], Generator::ChainedRows);
        let at = self.input("chained_rows_at", DType::I32, vec![Dim::R], Generator::ChainedRowsAt);
        self.op("chained_rows_put", x.shape.clone(), OpKind::ScatterRows { x: x.name.clone(), rows: rows.name, at: at.name })
    }
}
