//! How probable a text is to a model, token by token.

use crate::{Cancel, Error, Model, TokenLogProbs};

impl Model {
    /// How probable each of some ids is behind those before it, with the `top` most probable at its place: of all but the first. Nothing that was computed before is used, and
    /// nothing is kept. Rows are read [`crate::LoadOptions::wanted`] at a time, in turns with other work on the model.
    pub fn score(&self, ids: &[u32], top: usize, cancel: &Cancel) -> Result<Vec<TokenLogProbs>, Error> {
        self.check_prompt(ids)?;
        let rows = ids.len() - 1;
        let mut scores = Vec::with_capacity(rows);
        if rows > 0 {
            let mut show = |row: usize, logits: &[f32]| scores.push(TokenLogProbs::of(logits, ids[row + 1], top));
            self.session()?.append_showing(&ids[..rows], rows, cancel, &mut show)?;
        }
        Ok(scores)
    }
}
