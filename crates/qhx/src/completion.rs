//! Texts to be continued.

use crate::{Error, Model, Stream, settings::generation_settings};
use qhx_runtime::{Cancel, GenerateOptions, Generation, LogitProcessor, Medium, Prompt, engine::Request};

/// A text to be continued, without a chat template.
///
/// ```
/// # fn main() -> Result<(), qhx::Error> {
/// let model = qhx::Model::open("builtin")?;
/// let story = model.completion("Once").max_tokens(20).temperature(0.8).seed(7);
/// for piece in story.stream()? {
///     print!("{}", piece?);
/// }
/// # Ok(()) }
/// ```
///
/// Completions that run at the same time share the work, and none depends on the others.
#[must_use]
pub struct Completion {
    model: Model,
    text: String,
    media: Vec<Medium>,
    options: GenerateOptions,
    processors: Vec<Box<dyn LogitProcessor>>,
    cancel: Cancel,
}

impl Model {
    /// Continues a text, without a chat template: the most probable tokens, at most 256 of them.
    ///
    /// ```
    /// # fn main() -> Result<(), qhx::Error> {
    /// let model = qhx::Model::open("builtin")?;
    /// println!("{}", model.complete("Once")?.text);
    /// # Ok(()) }
    /// ```
    pub fn complete(&self, text: impl Into<String>) -> Result<Generation, Error> {
        self.completion(text).answer()
    }

    /// The same with a say in how tokens are chosen and when to stop, and with streaming.
    pub fn completion(&self, text: impl Into<String>) -> Completion {
        Completion::new(self.clone(), text.into())
    }
}

impl Completion {
    pub(crate) fn new(model: Model, text: String) -> Self {
        let options = GenerateOptions::default();
        Self { model, text, media: Vec::new(), options, processors: Vec::new(), cancel: Cancel::new() }
    }

    generation_settings!();

    /// Puts an image or a sound before the text.
    pub fn attach(mut self, medium: Medium) -> Self {
        self.media.push(medium);
        self
    }

    /// Changes or forbids tokens before one is chosen: a grammar, a bias, a rule of your own. Several act in the order in which they are given.
    pub fn processor(mut self, processor: impl LogitProcessor + 'static) -> Self {
        self.processors.push(Box::new(processor));
        self
    }

    /// Waits for the whole answer.
    pub fn answer(self) -> Result<Generation, Error> {
        self.stream()?.answer()
    }

    /// Begins, and gives the answer as an iterator of pieces.
    pub fn stream(self) -> Result<Stream<'static>, Error> {
        let engine = self.model.engine()?;
        let mut request = Request::new(Prompt::completion_with_media(self.model.runtime(), &self.text, &self.media)?);
        (request.options, request.processors, request.cancel) = (self.options, self.processors, self.cancel);
        Ok(Stream::new(engine.submit(request)?, engine, None))
    }
}
