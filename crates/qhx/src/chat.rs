//! Conversations.

use crate::{
    Error, Model, Stream,
    messages::{self, FileAccess},
    settings::generation_settings,
    turn::{Said, Turn},
};
use qhx_runtime::{
    Cancel, Conversation, Error as RunError, GenerateOptions, Generation, Medium, Prompt,
    engine::Request,
    save_session,
    text::{self, ChatError, Message},
};
use std::path::Path;

/// A conversation with a model. What the model has computed is kept, so that each turn costs only what is new; conversations that run at the same time share the
/// work, and none depends on the others.
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
    said: Said,
    /// What goes with the next message.
    attached: Vec<Medium>,
    options: GenerateOptions,
    cancel: Cancel,
}

impl Model {
    /// A conversation that has not begun. A model without a chat template refuses when it is asked something: see [`Model::complete`].
    pub fn chat(&self) -> Chat {
        Chat::new(self.clone())
    }

    /// A conversation that was saved with [`Chat::save`], bit for bit where it was left.
    pub fn restore_chat(&self, path: impl AsRef<Path>) -> Result<Chat, Error> {
        Chat::restore(self.clone(), path.as_ref())
    }
}

impl Chat {
    pub(crate) fn new(model: Model) -> Self {
        let said = Said { chat: text::Chat::new(Vec::new()), computed: None };
        Self { model, said, attached: Vec::new(), options: GenerateOptions::default(), cancel: Cancel::new() }
    }

    pub(crate) fn restore(model: Model, path: &Path) -> Result<Self, Error> {
        let (chat, session) = Conversation::restore(model.runtime(), path)?.into_parts();
        let media: Vec<Medium> = chat.messages.iter().flat_map(|message| message.media.iter().cloned()).collect();
        let computed = Prompt::from_ids_with_media(model.runtime(), session.ids().to_vec(), &media).ok();
        model.engine()?.keep(session);
        Ok(Self { said: Said { chat, computed }, ..Self::new(model) })
    }

    /// Sets the system message. An empty one leaves out the system turn, also where the model's template has one of its own.
    pub fn system(mut self, text: &str) -> Self {
        let chat = &mut self.said.chat;
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
        self.said.chat.messages.push(message);
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
        messages::open_media(&mut chat, self.model.bundle(), &FileAccess::All)?;
        self.said.chat = chat;
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
    /// let answer = model.chat().ask_with("What is the capital of Japan?", |piece| print!("{piece}"))?;
    /// println!(" ({} tokens)", answer.ids.len());
    /// # Ok(()) }
    /// ```
    pub fn ask_with(&mut self, text: &str, mut on_piece: impl FnMut(&str)) -> Result<Generation, Error> {
        let mut stream = self.stream(text)?;
        for piece in &mut stream {
            on_piece(&piece?);
        }
        stream.answer()
    }

    /// Says something and gives the answer as an iterator of pieces.
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
        let message = Message::with_media("user", self.attached.clone(), text);
        let mut chat = self.said.chat.clone();
        chat.messages.push(message.clone());
        let prompt = Prompt::chat(self.model.runtime(), &chat)?;
        self.begin(prompt, Some(message))
    }

    /// Answers the conversation as it is: its last message is one that was added with [`Chat::user`] or [`Chat::openai`].
    pub fn answer(&mut self) -> Result<Generation, Error> {
        if self.said.chat.messages.is_empty() {
            return Err(RunError::Chat(ChatError::NoMessages).into());
        }
        let prompt = Prompt::chat(self.model.runtime(), &self.said.chat)?;
        self.begin(prompt, None)?.answer()
    }

    fn begin(&mut self, prompt: Prompt, message: Option<Message>) -> Result<Stream<'_>, Error> {
        let engine = self.model.engine()?;
        let mut request = Request::new(prompt.clone()).with_options(self.options.clone());
        request.cancel = self.cancel.clone();
        let answer = engine.submit(request)?;
        let turn = Turn {
            said: &mut self.said,
            attached: &mut self.attached,
            prompt,
            message,
            cancel: self.cancel.clone(),
            context: self.model.context(),
        };
        Ok(Stream::new(answer, engine, Some(turn)))
    }

    /// The messages so far, oldest first.
    pub fn messages(&self) -> &[Message] {
        &self.said.chat.messages
    }

    /// Writes the conversation, with all that the model has computed for it, to a file; whole or not at all. [`Model::restore_chat`] goes on with it.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let session = match &self.said.computed {
            Some(prompt) => self.model.engine()?.session(prompt, &Cancel::new())?,
            None => self.model.runtime().session()?,
        };
        Ok(save_session(&session, Some(&self.said.chat), path.as_ref())?)
    }
}
