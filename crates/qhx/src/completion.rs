//! Texts to be continued.

use crate::{Error, Model, Stream, settings::generation_settings};
use qhx_runtime::{Cancel, GenerateOptions, Generation, Medium, Piece, Prompt, generate};

/// A text to be continued, without a chat template.
///
/// ```
/// # fn main() -> Result<(), qhx::Error> {
/// let model = qhx::Model::open("builtin")?;
/// let story = model.completion("Once").max_tokens(20).temperature(0.8).seed(7);
/// for piece in story.stream() {
///     print!("{}", piece?);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use]
pub struct Completion {
    model: Model,
    text: String,
    media: Vec<Medium>,
    options: GenerateOptions,
    cancel: Cancel,
}

impl Completion {
    pub(crate) fn new(model: Model, text: String) -> Self {
        Self { model, text, media: Vec::new(), options: GenerateOptions::default(), cancel: Cancel::new() }
    }

    generation_settings!();

    /// Puts an image or a sound before the text.
    pub fn attach(mut self, medium: Medium) -> Self {
        self.media.push(medium);
        self
    }

    /// Waits for the whole answer.
    pub fn answer(self) -> Result<Generation, Error> {
        self.answer_with(|_| {})
    }

    /// Gets the answer piece by piece, on this thread.
    pub fn answer_with(self, mut on_piece: impl FnMut(Piece<'_>)) -> Result<Generation, Error> {
        self.run(&mut on_piece)
    }

    /// Gives the answer as an iterator of pieces, which come from a thread of their own.
    pub fn stream(self) -> Stream<'static> {
        Stream::start(None, self.cancel.clone(), move |on_piece| (None, self.run(on_piece)))
    }

    fn run(&self, on_piece: &mut dyn FnMut(Piece<'_>)) -> Result<Generation, Error> {
        let model = self.model.runtime();
        let prompt = Prompt::completion_with_media(model, &self.text, &self.media)?;
        Ok(generate(&mut model.session()?, &prompt, &self.options, &self.cancel, on_piece)?)
    }
}
