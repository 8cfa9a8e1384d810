//! From what a request asks for to an answer that is being made: the same for all protocols.

use crate::{
    access::Caller,
    app::{App, random},
    error::ApiError,
    fetch::MediaAccess,
    models::InUse,
};
use qhx::{
    Cancel, GenerateOptions, Generation, LogitBias, LogitProcessor, Model, OccurrencePenalty, Reply, ReplyEvent, ReplyRequest, Structure,
    TokenLogProbs, messages,
    runtime::{Error as RunError, Medium},
    text::{
        Chat,
        reply::{ReplyPart, ToolCall},
    },
};
use serde_json::{Map, Value};
use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

/// Whether a structure can be followed: an answer that follows one ends where it is complete.
pub(crate) fn check_structure(structure: &Structure, ignore_eos: bool) -> Result<(), ApiError> {
    match ignore_eos && !structure.is_free() {
        true => Err(ApiError::field("ignore_eos", "does not go with an answer that has a form")),
        false => Ok(()),
    }
}

/// The most answers to one request.
pub(crate) const MAX_CHOICES: usize = 64;
/// The most tokens of which the probabilities are told at each place.
pub(crate) const MAX_TOP: usize = 20;

/// How tokens are chosen and when an answer ends. What is absent is as the model's makers suggest, else greedy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sampling {
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<usize>,
    pub(crate) min_p: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) presence_penalty: f32,
    pub(crate) frequency_penalty: f32,
    pub(crate) seed: Option<u64>,
    pub(crate) logit_bias: Vec<(u32, f32)>,
    pub(crate) stop: Vec<String>,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) log_probs: Option<usize>,
    pub(crate) ignore_eos: bool,
    pub(crate) structure: Structure,
}

impl Sampling {
    /// A seed for requests that bring none, so that all answers of a request are drawn from one.
    pub(crate) fn with_seed(mut self) -> Self {
        self.seed.get_or_insert_with(random);
        self
    }

    /// The options of answer `number` of a request.
    pub(crate) fn options(&self, model: &Model, number: usize) -> GenerateOptions {
        let mut sampler = model.suggested_sampling().unwrap_or_default();
        sampler.temperature = self.temperature.unwrap_or(sampler.temperature);
        sampler.top_p = self.top_p.unwrap_or(sampler.top_p);
        sampler.top_k = self.top_k.unwrap_or(sampler.top_k);
        sampler.min_p = self.min_p.unwrap_or(sampler.min_p);
        sampler.repetition_penalty = self.repetition_penalty.unwrap_or(sampler.repetition_penalty);
        sampler.seed = self.seed.unwrap_or_default().wrapping_add(number as u64);
        GenerateOptions {
            max_new: self.max_tokens.unwrap_or(usize::MAX).min(model.context()),
            ignore_eos: self.ignore_eos,
            stop: self.stop.clone(),
            sampler,
            log_probs: self.log_probs,
            structure: self.structure.clone(),
            ..GenerateOptions::default()
        }
    }

    pub(crate) fn processors(&self) -> Vec<Box<dyn LogitProcessor>> {
        let mut processors: Vec<Box<dyn LogitProcessor>> = Vec::new();
        if !self.logit_bias.is_empty() {
            processors.push(Box::new(LogitBias(self.logit_bias.clone())));
        }
        if self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 {
            processors.push(Box::new(OccurrencePenalty::new(self.presence_penalty, self.frequency_penalty)));
        }
        processors
    }
}

/// Ids and what is added to their logits, from the form of the OpenAI API.
pub(crate) fn logit_bias(bias: &Map<String, Value>, model: &Model) -> Result<Vec<(u32, f32)>, ApiError> {
    let vocabulary = model.runtime().vocabulary().logits;
    let entry = |(id, bias): (&String, &Value)| {
        let id = id.parse().ok().filter(|id: &u32| (*id as usize) < vocabulary);
        let id = id.ok_or_else(|| ApiError::field("logit_bias", format!("names ids of tokens, 0 to {}", vocabulary - 1)))?;
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        Ok((id, bias.ok_or_else(|| ApiError::field("logit_bias", "has values from -100 to 100"))? as f32))
    };
    bias.iter().map(entry).collect()
}

/// A conversation to be answered.
pub(crate) struct ChatJob {
    /// In the form of the OpenAI API.
    pub(crate) messages: Vec<Value>,
    pub(crate) tools: Option<Value>,
    /// Variables of the template.
    pub(crate) template_options: Map<String, Value>,
    pub(crate) sampling: Sampling,
    /// How many answers.
    pub(crate) choices: usize,
}

impl ChatJob {
    /// The conversation, with its media open, and how it is answered.
    pub(crate) fn chat(self, model: &Model, access: &MediaAccess, cancel: &Cancel) -> Result<(Chat, Sampling), ApiError> {
        let Self { mut messages, tools, template_options, sampling, .. } = self;
        crate::messages::check(&messages, model.runtime().template().ok().map(|chat| &*chat.template))?;
        access.fetcher.inline(&mut messages, cancel)?;
        // Moved, not copied: a request may be large.
        let fields = [
            ("messages", Value::Array(messages)),
            ("tools", tools.unwrap_or_default()),
            ("chat_template_kwargs", Value::Object(template_options)),
        ];
        let json = Value::Object(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect());
        let mut chat = messages::from_json(json).map_err(qhx::Error::from)?;
        let mut rows = 0;
        let fits = |medium: &Medium| {
            let (context, limit) = (model.context(), model.runtime().context_limit());
            rows += model.runtime().soft_rows(medium)?;
            match (cancel.is_cancelled(), rows > context) {
                (true, _) => Err(RunError::Cancelled),
                (_, true) => Err(RunError::PromptTooLong { prompt: rows, context, limit }),
                _ => Ok(()),
            }
        };
        messages::open_media_while(&mut chat, model.bundle(), &access.files, fits).map_err(qhx::Error::from)?;
        Ok((chat, sampling))
    }
}

/// Makes something of a request, which may be large.
pub(crate) async fn prepared<T: Send + 'static>(
    app: &App,
    in_use: &InUse,
    prepare: impl FnOnce(&Model) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let model = in_use.model.clone();
    blocking(app, move || prepare(&model)).await
}

/// How many tokens the prompt of a conversation has.
pub(crate) async fn count(app: &App, in_use: &InUse, job: ChatJob) -> Result<usize, ApiError> {
    let (model, access) = (in_use.model.clone(), app.media_access());
    blocking_until(app, move |cancel| {
        let (chat, sampling) = job.chat(&model, &access, &cancel)?;
        let mut request = ReplyRequest::new(chat);
        (request.options, request.cancel) = (sampling.options(&model, 0), cancel);
        Ok(model.count_tokens(request)?)
    })
    .await
}

/// Stops the work of a request whose client has gone before it was under way.
pub(crate) struct CancelOnDrop(pub(crate) Vec<Cancel>);

impl CancelOnDrop {
    /// From now on the answers themselves stop when they are dropped.
    pub(crate) fn disarm(&mut self) {
        self.0.clear();
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.iter().for_each(Cancel::cancel);
    }
}

/// Begins to answer a conversation. Templates and media take their time, on threads for that.
pub(crate) async fn reply(app: &Arc<App>, in_use: &InUse, caller: Caller, job: ChatJob) -> Result<Replies, ApiError> {
    if app.options.log_prompts {
        let messages = serde_json::to_string(&job.messages).unwrap_or_default();
        tracing::info!(messages, "asked");
    }
    let (model, access) = (in_use.model.clone(), app.media_access());
    let cancels: Vec<Cancel> = (0..job.choices).map(|_| Cancel::new()).collect();
    let mut guard = CancelOnDrop(cancels.clone());
    let prepare = move || {
        let (chat, sampling) = job.chat(&model, &access, &cancels[0])?;
        let sampling = sampling.with_seed();
        let mut replies = Vec::with_capacity(cancels.len());
        let chats = std::iter::repeat_n(chat, cancels.len());
        for (number, (cancel, chat)) in cancels.into_iter().zip(chats).enumerate() {
            let mut request = ReplyRequest::new(chat);
            (request.options, request.processors) = (sampling.options(&model, number), sampling.processors());
            (request.cancel, request.scope) = (cancel, caller.scope);
            replies.push(Some(model.reply(request)?));
        }
        Ok::<_, ApiError>(replies)
    };
    let replies = blocking(app, prepare).await?;
    guard.disarm();
    Ok(Replies { replies, next: 0, peeked: None, app: app.clone(), in_use: in_use.clone() })
}

/// Does work that takes time on a thread for that; not too many at once. It goes on, and keeps its place, where the client goes away.
pub(crate) async fn blocking<T: Send + 'static>(
    app: &App,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let failed = || ApiError::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, "the request could not be prepared: this is a bug");
    let place = app.preparing.clone().acquire_owned().await.map_err(|_| failed())?;
    let work = move || {
        let _place = place;
        work()
    };
    tokio::task::spawn_blocking(work).await.map_err(|_| failed())?
}

/// The same for work that can be stopped: it is where the client goes away.
pub(crate) async fn blocking_until<T: Send + 'static>(
    app: &App,
    work: impl FnOnce(Cancel) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let cancel = Cancel::new();
    let _guard = CancelOnDrop(vec![cancel.clone()]);
    blocking(app, move || work(cancel)).await
}

/// Answers to one request that are being made.
pub(crate) struct Replies {
    replies: Vec<Option<Reply>>,
    /// Who is looked at first: all get their turn.
    next: usize,
    /// What was waited for and not taken.
    peeked: Option<Option<Result<Told, ApiError>>>,
    app: Arc<App>,
    in_use: InUse,
}

impl Drop for Replies {
    /// What has not ended is given up: the client has gone.
    fn drop(&mut self) {
        let left = self.replies.iter().flatten().count();
        self.app.metrics.aborted(&self.in_use.entry.name, left);
        // What the prompts and media took is not known: it is gone soon.
        self.app.bodies.free(1);
    }
}

/// What happens to one of them.
pub(crate) enum Told {
    Event(usize, ReplyEvent),
    End(usize, Box<End>),
}

/// How an answer ended.
pub(crate) struct End {
    pub(crate) generation: Generation,
    pub(crate) reasoning_tokens: usize,
}

impl Replies {
    /// Tokens of the prompt.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.replies.iter().flatten().next().map_or(0, Reply::prompt_tokens)
    }

    /// Tokens of the prompt that are computed so far, for the first answer.
    pub(crate) fn prompt_tokens_done(&self) -> usize {
        self.replies.iter().flatten().next().map_or(0, Reply::prompt_tokens_done)
    }

    pub(crate) fn len(&self) -> usize {
        self.replies.len()
    }

    /// Waits until there is something to tell.
    pub(crate) async fn has_more(&mut self) {
        if self.peeked.is_none() {
            let told = poll_fn(|context| self.poll(context)).await;
            self.peeked = Some(told);
        }
    }

    /// What happens next; none at the end of all.
    pub(crate) async fn next(&mut self) -> Option<Result<Told, ApiError>> {
        match self.peeked.take() {
            Some(told) => told,
            None => poll_fn(|context| self.poll(context)).await,
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Told, ApiError>>> {
        let (first, count) = (self.next, self.replies.len());
        for place in (0..count).map(|offset| (first + offset) % count) {
            let Some(reply) = &mut self.replies[place] else { continue };
            let told = match reply.poll_event(context) {
                Poll::Pending => continue,
                Poll::Ready(Some(Ok(event))) => Told::Event(place, event),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error.into()))),
                Poll::Ready(None) => {
                    let end = self.replies[place].take().and_then(|reply| {
                        let reasoning_tokens = reply.reasoning_tokens();
                        Some(End { generation: reply.into_generation()?, reasoning_tokens })
                    });
                    match end {
                        Some(end) => {
                            self.app.metrics.finished(&self.in_use.entry.name, &end.generation);
                            Told::End(place, Box::new(end))
                        }
                        None => return Poll::Ready(Some(Err(qhx::runtime::Error::EngineStopped.into()))),
                    }
                }
            };
            self.next = place + 1;
            return Poll::Ready(Some(Ok(told)));
        }
        match self.replies.iter().any(Option::is_some) {
            true => Poll::Pending,
            false => Poll::Ready(None),
        }
    }

    /// Waits for all of them.
    pub(crate) async fn collect(mut self) -> Result<Vec<Collected>, ApiError> {
        let mut collected: Vec<Collected> = self.replies.iter().map(|_| Collected::default()).collect();
        while let Some(told) = self.next().await {
            match told? {
                Told::Event(place, event) => collected[place].add(event),
                Told::End(place, end) => collected[place].end = Some(*end),
            }
        }
        Ok(collected)
    }
}

/// A whole answer.
#[derive(Default)]
pub(crate) struct Collected {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) calls: Vec<ToolCall>,
    pub(crate) tokens: Vec<TokenLogProbs>,
    pub(crate) end: Option<End>,
}

impl Collected {
    fn add(&mut self, event: ReplyEvent) {
        match event {
            ReplyEvent::Part(ReplyPart::Reasoning(text)) => self.reasoning.push_str(&text),
            ReplyEvent::Part(ReplyPart::Content(text)) => self.content.push_str(&text),
            ReplyEvent::Part(ReplyPart::Call(call)) => self.calls.push(call),
            ReplyEvent::Token(token) => self.tokens.push(token),
        }
    }
}
