//! Rotary embedding: `y = x · cos + partner(x) · sin`, over the whole width of a head.

use super::{Feed, Lowering, Turn};
use crate::graph::TensorId;
use qhx_ir::{DeviceError, Name};

impl Lowering<'_> {
    pub(super) fn rope(&mut self, x: &Name, positions: &Name, rotary: &Name) -> Result<TensorId, DeviceError> {
        let x = self.value(x)?;
        let dims = self.builder.dims(x);
        let (rows, dim) = (dims[0], dims[2]);
        let turn = Turn { rotary: rotary.clone(), positions: positions.clone(), dim };
        let cosine = self.feed(Feed::Cosine(turn.clone()), &[rows, 1, dim]);
        let sine = self.feed(Feed::Sine(turn), &[rows, 1, dim]);
        let partner = self.partner(x, rotary, dim);
        let still = self.builder.multiply("still", x, cosine);
        let turned = self.builder.multiply("turned", partner, sine);
        Ok(self.builder.add("rope", still, turned))
    }

    /// Every value replaced by its partner: the halves of each block are swapped. Values that are not rotated stay where they are; their sine is 0.
    fn partner(&mut self, x: TensorId, rotary: &Name, dim: usize) -> TensorId {
        let mut pieces = Vec::new();
        let mut end = 0;
        for &(start, length) in &self.program.rotaries[rotary].blocks {
            let half = length / 2;
            pieces.extend([(end, start - end), (start + half, half), (start, half)]);
            end = start + length;
        }
        pieces.push((end, dim - end));
        let pieces: Vec<TensorId> = pieces
            .into_iter()
            .filter(|&(_, length)| length > 0)
            .map(|(start, length)| self.builder.slice("piece", x, 2, start, length))
            .collect();
        self.builder.concat("partner", &pieces, 2)
    }
}
