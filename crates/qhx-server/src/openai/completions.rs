//! `/v1/completions`: texts to be continued, or to be scored.

use super::{
    chat::{Frame, fingerprint, finish_reason},
    requests::{CompletionRequest, at_least_one, check_top},
    types::{CompletionChoice, CompletionLogProbs, CompletionResponse, Prompts, Usage},
};
use crate::{
    access::Caller,
    app::App,
    body::{Json, large_json},
    error::{ApiError, Protocol},
    generate::{self, Sampling, blocking_until},
    models::InUse,
    stream::{self, Gone, Kind, Sink},
};
use axum::{Extension, extract::State, response::Response};
use qhx::{
    Cancel, Generation, Model,
    engine::{Answer, AnswerPiece, Engine, Request},
    runtime::{Error as RunError, Prompt},
};
use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

/// The most prompts in a request.
const MAX_PROMPTS: usize = 1024;

pub(crate) async fn answer(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Json(mut request): Json<CompletionRequest>,
) -> Result<Response, ApiError> {
    let in_use = app.models.get(request.model.as_deref())?;
    let streamed = request.streamed()?;
    let texts = prepare(&app, &in_use, caller, |model| Job::new(request, model)).await?;
    let frame = Frame::new(&app, "cmpl-", in_use);
    if let Some(options) = streamed {
        return Ok(stream::respond(Kind::Events, move |sink| write(app, frame, texts, options.include_usage, sink)));
    }
    let mut texts = texts;
    let mut choices: Vec<CompletionChoice> = texts.iter_mut().map(Text::begin).collect();
    let mut usage = Usage::default();
    let mut texts = Texts { texts, next: 0, app, in_use: frame.in_use.clone() };
    while let Some(told) = texts.next().await {
        match told? {
            Told::Piece(index, piece) => add(&mut choices[index], frame.model(), &piece),
            Told::End(index, end) => {
                count(&mut usage, &end, texts.texts[index].is_first);
                choices[index].finish_reason = Some(finish_reason(&end, false));
            }
        }
    }
    let mut response = response(&frame, choices);
    response.usage = Some(Some(usage));
    large_json(|| response).await
}

/// Begins on a thread for that. Where the client goes away meanwhile, reading and scoring stop.
async fn prepare(
    app: &App,
    in_use: &InUse,
    caller: Caller,
    job: impl FnOnce(&Model) -> Result<Job, ApiError> + Send + 'static,
) -> Result<Vec<Text>, ApiError> {
    let (model, log_prompts) = (in_use.model.clone(), app.options.log_prompts);
    let work = move |cancel: Cancel| {
        let job = job(&model)?;
        if log_prompts {
            tracing::info!(prompts = ?job.prompts, "asked");
        }
        job.begin(&model, caller, &cancel)
    };
    blocking_until(app, work).await
}

/// Begins to continue one text.
pub(crate) async fn begin(app: &Arc<App>, in_use: &InUse, caller: Caller, prompt: String, sampling: Sampling) -> Result<Texts, ApiError> {
    let job = Job { prompts: Prompts::Text(prompt), sampling, choices: 1, echo: false, generate: true };
    let texts = prepare(app, in_use, caller, |_| Ok(job)).await?;
    Ok(Texts { texts, next: 0, app: app.clone(), in_use: in_use.clone() })
}

fn response(frame: &Frame, choices: Vec<CompletionChoice>) -> CompletionResponse {
    CompletionResponse {
        id: frame.id.clone(),
        object: "text_completion",
        created: frame.created,
        model: frame.in_use.entry.name.clone(),
        system_fingerprint: fingerprint(frame.model()),
        choices,
        usage: None,
    }
}

fn count(usage: &mut Usage, end: &Generation, is_first: bool) {
    if is_first {
        usage.add_prompt(end);
    }
    usage.add(end, 0);
}

fn add(choice: &mut CompletionChoice, model: &Model, piece: &AnswerPiece) {
    choice.text.push_str(&piece.text);
    if let (Some(log_probs), Some(token)) = (&mut choice.logprobs, &piece.log_probs) {
        log_probs.push(model, token);
    }
}

async fn write(app: Arc<App>, frame: Frame, mut texts: Vec<Text>, with_usage: bool, sink: Sink) -> Result<(), Gone> {
    let chunk = |choice| {
        let mut chunk = response(&frame, vec![choice]);
        chunk.usage = with_usage.then_some(None);
        chunk
    };
    // Offsets of tokens go on from chunk to chunk.
    let mut told: Vec<CompletionChoice> = Vec::with_capacity(texts.len());
    for text in &mut texts {
        let beginning = text.begin();
        told.push(beginning.behind());
        if !beginning.text.is_empty() || beginning.logprobs.as_ref().is_some_and(|log_probs| !log_probs.tokens.is_empty()) {
            sink.send_large(chunk(beginning)).await?;
        }
    }
    let mut usage = Usage::default();
    let mut texts = Texts { texts, next: 0, app, in_use: frame.in_use.clone() };
    while let Some(next) = sink.wait_for(texts.next()).await? {
        match next {
            Ok(Told::Piece(index, piece)) => {
                let choice = &mut told[index];
                let before = choice.logprobs.as_ref().map_or(0, |log_probs| log_probs.tokens.len());
                add(choice, frame.model(), &piece);
                let logprobs = choice.logprobs.as_ref().map(|log_probs| log_probs.behind(before));
                let text = std::mem::take(&mut choice.text);
                if !text.is_empty() || logprobs.as_ref().is_some_and(|log_probs| !log_probs.tokens.is_empty()) {
                    sink.send(&chunk(CompletionChoice { index, text, logprobs, finish_reason: None })).await?;
                }
            }
            Ok(Told::End(index, end)) => {
                count(&mut usage, &end, texts.texts[index].is_first);
                let finish_reason = Some(finish_reason(&end, false));
                sink.send(&chunk(CompletionChoice { index, text: String::new(), logprobs: None, finish_reason })).await?;
            }
            Err(error) => return sink.send(&error.body(Protocol::OpenAi)).await,
        }
    }
    if with_usage {
        let mut last = response(&frame, Vec::new());
        last.usage = Some(Some(usage));
        sink.send(&last).await?;
    }
    sink.done().await
}

impl CompletionChoice {
    /// What tokens that follow it are added to.
    fn behind(&self) -> Self {
        let logprobs = self.logprobs.as_ref().map(|log_probs| log_probs.behind(log_probs.tokens.len().saturating_sub(1)));
        Self { index: self.index, text: String::new(), logprobs, finish_reason: None }
    }
}

impl CompletionLogProbs {
    /// Those from a place on.
    fn behind(&self, place: usize) -> Self {
        Self {
            tokens: self.tokens[place..].to_vec(),
            token_logprobs: self.token_logprobs[place..].to_vec(),
            top_logprobs: self.top_logprobs[place..].to_vec(),
            text_offset: self.text_offset[place..].to_vec(),
        }
    }
}

/// What a request asks for.
struct Job {
    prompts: Prompts,
    sampling: Sampling,
    choices: usize,
    echo: bool,
    /// Tokens to choose; none where the prompt is only scored.
    generate: bool,
}

/// Where OpenAI's own server stops when nobody says otherwise.
const DEFAULT_TOKENS: usize = 16;

impl Job {
    fn new(mut request: CompletionRequest, model: &Model) -> Result<Self, ApiError> {
        let choices = request.choices()?;
        if request.best_of.is_some_and(|best_of| best_of != choices) {
            return Err(ApiError::field("best_of", "can only be what `n` is: all answers are given"));
        }
        if request.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::field("suffix", "is not supported: models continue a text"));
        }
        check_top("logprobs", request.logprobs)?;
        // With `echo` nothing may be asked for but the prompt's own probabilities.
        let echo = request.echo.unwrap_or(false);
        let generate = request.max_tokens != Some(0) || !echo;
        let max_tokens = if generate { at_least_one("max_tokens", request.max_tokens)? } else { None };
        let mut sampling = request.sampling(model)?;
        (sampling.max_tokens, sampling.log_probs) = (Some(max_tokens.unwrap_or(DEFAULT_TOKENS)), request.logprobs);
        generate::check_structure(&sampling.structure, sampling.ignore_eos)?;
        Ok(Self { prompts: request.prompt, sampling, choices, echo, generate })
    }

    /// Reads the prompts, scores them where that is asked for, and begins to continue them.
    fn begin(self, model: &Model, caller: Caller, cancel: &Cancel) -> Result<Vec<Text>, ApiError> {
        let read = |text: &String| match cancel.is_cancelled() {
            true => Err(RunError::Cancelled),
            false => Prompt::completion(model.runtime(), text),
        };
        let count = self.prompts.count();
        if !(1..=MAX_PROMPTS).contains(&count) {
            return Err(ApiError::field("prompt", format!("has {count} prompts, expected 1 to {MAX_PROMPTS}")));
        }
        let prompts: Vec<Prompt> = match &self.prompts {
            Prompts::Text(text) => vec![read(text)?],
            Prompts::Texts(texts) => texts.iter().map(read).collect::<Result<_, _>>()?,
            Prompts::Ids(ids) => vec![Prompt::from_ids(ids.clone())],
            Prompts::ManyIds(prompts) => prompts.iter().cloned().map(Prompt::from_ids).collect(),
        };
        let sampling = self.sampling.clone().with_seed();
        let engine = model.engine()?;
        let mut texts = Vec::with_capacity(prompts.len() * self.choices);
        for prompt in prompts {
            let logprobs = self.sampling.log_probs.map(|_| CompletionLogProbs::default());
            let mut beginning = CompletionChoice { index: 0, text: String::new(), logprobs, finish_reason: None };
            if self.echo {
                self.echo(&mut beginning, model, &prompt, cancel)?;
            }
            for number in 0..self.choices {
                let answer = match self.generate {
                    true => {
                        let mut request = Request::new(prompt.clone()).with_options(sampling.options(model, number));
                        (request.processors, request.scope) = (sampling.processors(), caller.scope);
                        Making::Answer(engine.submit(request)?)
                    }
                    false => Making::Nothing(Box::new(Generation::empty(&prompt))),
                };
                let beginning = CompletionChoice { index: texts.len(), ..beginning.clone() };
                texts.push(Text { is_first: number == 0, beginning: Some(beginning), making: Some(answer), _engine: engine.clone() });
            }
        }
        Ok(texts)
    }

    /// Gives the prompt back.
    fn echo(&self, beginning: &mut CompletionChoice, model: &Model, prompt: &Prompt, cancel: &Cancel) -> Result<(), ApiError> {
        beginning.text = match &self.prompts {
            Prompts::Text(text) => text.clone(),
            _ => {
                let tokenizer = model.runtime().tokenizer().ok_or(RunError::NoTokenizer { what: "`echo`" })?;
                tokenizer.decode(prompt.ids(), true).map_err(RunError::from)?
            }
        };
        if let (Some(top), Some(log_probs)) = (self.sampling.log_probs, &mut beginning.logprobs) {
            let scores = model.runtime().score(prompt.ids(), top, cancel)?;
            log_probs.first(model, prompt.ids().first().copied().unwrap_or_default());
            scores.iter().for_each(|score| log_probs.push(model, score));
        }
        Ok(())
    }
}

/// A text that is being continued.
struct Text {
    /// Whether it is the first answer to its prompt.
    is_first: bool,
    /// What is told before the answer.
    beginning: Option<CompletionChoice>,
    making: Option<Making>,
    /// Lives as long as somebody waits for its answer.
    _engine: Engine,
}

enum Making {
    Answer(Answer),
    /// The prompt is all that was asked for.
    Nothing(Box<Generation>),
}

impl Text {
    fn begin(&mut self) -> CompletionChoice {
        self.beginning.take().unwrap_or_default()
    }
}

/// Texts that are being continued.
pub(crate) struct Texts {
    texts: Vec<Text>,
    /// Who is looked at first: all get their turn.
    next: usize,
    app: Arc<App>,
    in_use: InUse,
}

impl Drop for Texts {
    /// What has not ended is given up: the client has gone.
    fn drop(&mut self) {
        let left = self.texts.iter().filter(|text| text.making.is_some()).count();
        self.app.metrics.aborted(&self.in_use.entry.name, left);
        self.app.bodies.free(1);
    }
}

pub(crate) enum Told {
    Piece(usize, AnswerPiece),
    End(usize, Box<Generation>),
}

impl Texts {
    pub(crate) async fn next(&mut self) -> Option<Result<Told, ApiError>> {
        poll_fn(|context| self.poll(context)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Told, ApiError>>> {
        let (first, count) = (self.next, self.texts.len());
        for place in (0..count).map(|offset| (first + offset) % count) {
            let text = &mut self.texts[place];
            let told = match &mut text.making {
                None => continue,
                Some(Making::Nothing(_)) => None,
                Some(Making::Answer(answer)) => match answer.poll_piece(context) {
                    Poll::Pending => continue,
                    Poll::Ready(Some(Ok(piece))) => Some(Told::Piece(place, piece)),
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error.into()))),
                    Poll::Ready(None) => None,
                },
            };
            self.next = place + 1;
            let told = match told {
                Some(told) => Ok(told),
                None => match text.making.take() {
                    Some(Making::Answer(answer)) => answer.finish().map(|end| Told::End(place, Box::new(end))).map_err(ApiError::from),
                    Some(Making::Nothing(end)) => Ok(Told::End(place, end)),
                    None => continue,
                },
            };
            if let Ok(Told::End(_, end)) = &told {
                self.app.metrics.finished(&self.in_use.entry.name, end);
            }
            return Poll::Ready(Some(told));
        }
        match self.texts.iter().any(|text| text.making.is_some()) {
            true => Poll::Pending,
            false => Poll::Ready(None),
        }
    }
}
