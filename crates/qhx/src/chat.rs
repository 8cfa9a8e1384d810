//! Conversations.

use crate::{Error, Model, Stream, messages, settings::generation_settings};
use qhx_runtime::{
    Cancel, Conversation, GenerateOptions, Generation, Medium, Piece,
    text::{self, Message},
};
use std::path::Path;

/// A conversation with a model. It keeps what the model has computed, so that each turn costs only what is new.
///
/// ```
/// # fn main() -> Result<(), qhx::Error> {
/// let model = qhx::Model::open("builtin")?;
/// let mut chat = model.chat().max_tokens(32);
/// let portugal = chat.ask("What is the capital of Portugal?")?;
/// let italy = chat.ask("What is the capital of Italy?")?;
/// assert!(portugal.text.contains("Lisbon") && italy.text.contains("Rome"));
/// assert_eq!(chat.messages().len(), 4);
/// # Ok(()) }
/// ```
///
/// An error leaves the conversation as it was before the question; an answer that was stopped stays as far as it came.
#[must_use]
pub struct Chat {
    model: Model,
    /// What the conversation begins with, until it does.
    beginning: text::Chat,
    /// Taken while a stream runs.
    conversation: Option<Conversation>,
    /// What goes with the next message.
    attached: Vec<Medium>,
    options: GenerateOptions,
    cancel: Cancel,
}

impl Chat {
    pub(crate) fn new(model: Model) -> Self {
        let beginning = text::Chat::new(Vec::new());
        Self { model, beginning, conversation: None, attached: Vec::new(), options: GenerateOptions::default(), cancel: Cancel::new() }
    }

    pub(crate) fn restore(model: Model, path: &Path) -> Result<Self, Error> {
        let conversation = Conversation::restore(model.runtime(), path)?;
        Ok(Self { conversation: Some(conversation), ..Self::new(model) })
    }

    /// Sets the system message. An empty one leaves out the system turn, also where the model's template has one of its own.
    pub fn system(mut self, text: &str) -> Self {
        let chat = self.text_mut();
        chat.messages.retain(|message| message.role() != "system");
        chat.without_system = text.is_empty();
        if !text.is_empty() {
            chat.messages.insert(0, Message::new("system", text));
        }
        self
    }

    /// Adds a message of the user without asking for an answer, to tell of a conversation that took place elsewhere.
    pub fn user(self, text: &str) -> Self {
        self.message(Message::new("user", text))
    }

    /// Adds an answer that the model is to believe to have given.
    pub fn assistant(self, text: &str) -> Self {
        self.message(Message::new("assistant", text))
    }

    /// Adds any message.
    pub fn message(mut self, message: Message) -> Self {
        self.text_mut().messages.push(message);
        self
    }

    /// Begins with messages in the form of the OpenAI API: a list, or an object with `messages`, `tools` and `chat_template_kwargs`. Images and sounds are
    /// opened from the paths that the messages name.
    ///
    /// ```
    /// # fn main() -> Result<(), qhx::Error> {
    /// let model = qhx::Model::open("builtin")?;
    /// let messages = r#"[{"role": "user", "content": "What is the capital of Spain?"}]"#;
    /// assert!(model.chat().openai(messages)?.answer()?.text.contains("Madrid"));
    /// # Ok(()) }
    /// ```
    pub fn openai(mut self, json: &str) -> Result<Self, Error> {
        let mut chat = messages::parse(json)?;
        messages::open_media(&mut chat, self.model.bundle())?;
        *self.text_mut() = chat;
        Ok(self)
    }

    generation_settings!();

    /// Attaches an image or a sound to the next message, before its text: see [`Model::image`] and [`Model::sound`].
    pub fn attach(&mut self, medium: Medium) -> &mut Self {
        self.attached.push(medium);
        self
    }

    /// Attaches an image file to the next message.
    pub fn image(&mut self, path: impl AsRef<Path>) -> Result<&mut Self, Error> {
        let image = self.model.image(path)?;
        Ok(self.attach(image))
    }

    /// Attaches a sound file to the next message.
    pub fn sound(&mut self, path: impl AsRef<Path>) -> Result<&mut Self, Error> {
        let sound = self.model.sound(path)?;
        Ok(self.attach(sound))
    }

    /// Says something and waits for the answer.
    pub fn ask(&mut self, text: &str) -> Result<Generation, Error> {
        self.ask_with(text, |_| {})
    }

    /// Says something and gets the answer piece by piece, on this thread.
    ///
    /// ```
    /// # fn main() -> Result<(), qhx::Error> {
    /// let model = qhx::Model::open("builtin")?;
    /// let answer = model.chat().ask_with("What is the capital of Japan?", |piece| print!("{}", piece.text))?;
    /// println!(" ({} tokens)", answer.ids.len());
    /// # Ok(()) }
    /// ```
    pub fn ask_with(&mut self, text: &str, mut on_piece: impl FnMut(Piece<'_>)) -> Result<Generation, Error> {
        let message = self.message_of(text);
        self.begin()?;
        let (options, cancel) = (self.options.clone(), self.cancel.clone());
        let answer = self.conversation_mut()?.say(message, &options, &cancel, &mut on_piece)?;
        self.attached.clear();
        Ok(answer)
    }

    /// Says something and gives the answer as an iterator of pieces, which come from a thread of their own.
    ///
    /// ```
    /// # fn main() -> Result<(), qhx::Error> {
    /// let model = qhx::Model::open("builtin")?;
    /// for piece in model.chat().stream("What is the capital of Italy?")? {
    ///     print!("{}", piece?);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn stream(&mut self, text: &str) -> Result<Stream<'_>, Error> {
        let message = self.message_of(text);
        self.begin()?;
        let mut conversation = self.conversation.take().ok_or(Error::Cancelled)?;
        self.attached.clear();
        let (options, cancel) = (self.options.clone(), self.cancel.clone());
        Ok(Stream::start(&mut self.conversation, self.cancel.clone(), move |on_piece| {
            let answer = conversation.say(message, &options, &cancel, on_piece);
            (conversation, answer.map_err(Error::from))
        }))
    }

    /// Answers the conversation as it is: its last message is one that was added with [`Chat::user`] or [`Chat::openai`].
    pub fn answer(&mut self) -> Result<Generation, Error> {
        self.begin()?;
        let (options, cancel) = (self.options.clone(), self.cancel.clone());
        let conversation = self.conversation_mut()?;
        let last = conversation.chat_mut().messages.pop().ok_or(qhx_runtime::Error::Chat(text::ChatError::NoMessages))?;
        let answered = conversation.say(last.clone(), &options, &cancel, &mut |_| {});
        if answered.is_err() {
            conversation.chat_mut().messages.push(last);
        }
        Ok(answered?)
    }

    /// The messages so far, oldest first.
    pub fn messages(&self) -> &[Message] {
        self.conversation.as_ref().map_or(&self.beginning.messages, |conversation| &conversation.chat().messages)
    }

    /// Writes the conversation, with all that the model has computed for it, to a file; whole or not at all. [`Model::restore_chat`] goes on with it.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        match &self.conversation {
            Some(conversation) => Ok(conversation.save(path.as_ref())?),
            None => Ok(Conversation::new(self.model.runtime(), self.beginning.clone())?.save(path.as_ref())?),
        }
    }

    /// The message that is to be said, with what is attached.
    fn message_of(&self, text: &str) -> Message {
        Message::with_media("user", self.attached.clone(), text)
    }

    /// The messages, to change.
    fn text_mut(&mut self) -> &mut text::Chat {
        match &mut self.conversation {
            Some(conversation) => conversation.chat_mut(),
            None => &mut self.beginning,
        }
    }

    fn begin(&mut self) -> Result<(), Error> {
        if self.conversation.is_none() {
            self.conversation = Some(Conversation::new(self.model.runtime(), self.beginning.clone())?);
        }
        Ok(())
    }

    fn conversation_mut(&mut self) -> Result<&mut Conversation, Error> {
        self.conversation.as_mut().ok_or(Error::Cancelled)
    }
}
