//! Replies to whole conversations, in parts: reasoning, content, tool calls.

use crate::{Error, Model, tools};
use qhx_runtime::{
    Cancel, Error as RunError, GenerateOptions, Generation, LogitProcessor, Prompt, TokenLogProbs, ToolChoice,
    engine::{Answer, Engine, Request},
    text::{
        Chat, ChatError,
        reply::{ReplyFormat, ReplyParser, ReplyPart, Tools},
    },
};
use std::{
    collections::VecDeque,
    task::{Context, Poll},
};

/// A conversation to be answered, without a [`Chat`](crate::Chat) that remembers it: what a server has. What the engine has computed for a conversation that begins alike is used all
/// the same.
///
/// ```
/// # fn main() -> Result<(), qhx::Error> {
/// use qhx::{Model, ReplyEvent, ReplyRequest, messages, text::reply::ReplyPart};
/// let model = Model::open("builtin")?;
/// let chat = messages::parse(r#"[{"role": "user", "content": "What is the capital of Portugal?"}]"#)?;
/// let mut content = String::new();
/// for event in model.reply(ReplyRequest::new(chat))? {
///     if let ReplyEvent::Part(ReplyPart::Content(text)) = event? {
///         content += &text;
///     }
/// }
/// assert_eq!(content, "The capital of Portugal is Lisbon.");
/// # Ok(()) }
/// ```
#[non_exhaustive]
pub struct ReplyRequest {
    /// What was said, and the tools that may be called. A model whose template knows no tools is told of them in its system message.
    pub chat: Chat,
    /// How the answer is to be made.
    pub options: GenerateOptions,
    /// In front of the sampler, in order.
    pub processors: Vec<Box<dyn LogitProcessor>>,
    /// Set from any thread to stop.
    pub cancel: Cancel,
    /// Only requests of the same scope share what was computed.
    pub scope: u64,
}

impl ReplyRequest {
    /// A conversation, answered as by default.
    pub fn new(chat: Chat) -> Self {
        Self { chat, options: GenerateOptions::default(), processors: Vec::new(), cancel: Cancel::new(), scope: 0 }
    }
}

/// What comes of a reply.
#[derive(Clone, Debug, PartialEq)]
pub enum ReplyEvent {
    /// A part, or more of it.
    Part(ReplyPart),
    /// How probable the next token of the content was, where [`GenerateOptions::log_probs`] asks for it.
    Token(TokenLogProbs),
}

/// A reply that is being made: an iterator of its events. Dropped before its end, it is cancelled.
pub struct Reply {
    answer: Option<Answer>,
    parser: ReplyParser,
    ready: VecDeque<ReplyEvent>,
    prompt_tokens: usize,
    reasoning_tokens: usize,
    generation: Option<Generation>,
    /// Lives as long as somebody waits for its answer.
    _engine: Engine,
}

/// A request, ready for the engine.
struct Prepared {
    prompt: Prompt,
    parser: ReplyParser,
    options: GenerateOptions,
    processors: Vec<Box<dyn LogitProcessor>>,
}

impl Model {
    /// Answers a conversation.
    pub fn reply(&self, request: ReplyRequest) -> Result<Reply, Error> {
        let (scope, cancel) = (request.scope, request.cancel.clone());
        let Prepared { prompt, parser, options, processors } = self.prepare(request)?;
        let prompt_tokens = prompt.ids().len();
        let mut asked = Request::new(prompt).with_options(options);
        (asked.processors, asked.cancel, asked.scope) = (processors, cancel, scope);
        let engine = self.engine()?;
        let answer = Some(engine.submit(asked)?);
        Ok(Reply { answer, parser, ready: VecDeque::new(), prompt_tokens, reasoning_tokens: 0, generation: None, _engine: engine })
    }

    /// How many tokens the prompt of a conversation has, tools and media included.
    pub fn count_tokens(&self, request: ReplyRequest) -> Result<usize, Error> {
        Ok(self.prepare(request)?.prompt.ids().len())
    }

    fn prepare(&self, request: ReplyRequest) -> Result<Prepared, Error> {
        let ReplyRequest { mut chat, mut options, processors, cancel, .. } = request;
        if chat.messages.is_empty() {
            return Err(RunError::Chat(ChatError::NoMessages).into());
        }
        let mut format = self.reply_format().clone();
        let given = match options.structure.tool_choice {
            ToolChoice::None => {
                chat.tools = None;
                None
            }
            _ => chat.tools.as_ref().map(Tools::from_json).transpose()?,
        };
        if given.is_some() && format.calls.is_none() {
            tools::write_out(&mut chat);
            format.calls = Some(ReplyFormat::by_prompt());
        }
        // Some of them only, where the request says so.
        options.structure.tools = options.structure.tools.or_else(|| given.clone());
        let prompt = Prompt::chat_until(self.runtime(), &chat, &cancel)?;
        let reasoning = format.reasoning_at(&self.runtime().end_of_prompt(prompt.ids()));
        let parser = ReplyParser::new(&format, given.as_ref(), reasoning);
        options.shown_special.extend(self.runtime().special_marks());
        Ok(Prepared { prompt, parser, options, processors })
    }
}

impl Reply {
    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Tokens of the prompt that are computed so far.
    pub fn prompt_tokens_done(&self) -> usize {
        self.answer.as_ref().map_or(self.prompt_tokens, Answer::prompt_rows)
    }

    /// Tokens of reasoning so far.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// All that is known of the answer, once it has ended.
    pub fn generation(&self) -> Option<&Generation> {
        self.generation.as_ref()
    }

    /// The same, to keep.
    pub fn into_generation(self) -> Option<Generation> {
        self.generation
    }

    /// For an executor: the next event, or `None` at the end; wakes the task when there is one.
    pub fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<ReplyEvent, Error>>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            let Some(answer) = &mut self.answer else { return Poll::Ready(None) };
            match answer.poll_piece(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(piece) => {
                    if let Err(error) = self.take(piece) {
                        return Poll::Ready(Some(Err(error)));
                    }
                }
            }
        }
    }

    /// Takes a piece of the answer, or its end.
    fn take(&mut self, piece: Option<Result<qhx_runtime::engine::AnswerPiece, RunError>>) -> Result<(), Error> {
        match piece {
            Some(Ok(piece)) => {
                let was_reasoning = self.parser.is_reasoning();
                let parts = self.parser.push(&piece.text);
                self.ready.extend(parts.into_iter().map(ReplyEvent::Part));
                match was_reasoning && piece.id.is_some() {
                    true => self.reasoning_tokens += 1,
                    false => self.ready.extend(piece.log_probs.map(ReplyEvent::Token)),
                }
            }
            Some(Err(error)) => {
                self.answer = None;
                return Err(error.into());
            }
            None => {
                if let Some(answer) = self.answer.take() {
                    self.generation = Some(answer.finish()?);
                }
                self.ready.extend(self.parser.finish().into_iter().map(ReplyEvent::Part));
            }
        }
        Ok(())
    }
}

impl Iterator for Reply {
    type Item = Result<ReplyEvent, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(Ok(event));
            }
            let piece = self.answer.as_mut()?.next_piece();
            if let Err(error) = self.take(piece) {
                return Some(Err(error));
            }
        }
    }
}
