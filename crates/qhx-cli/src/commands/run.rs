//! `qhx run`: one answer for a person.

use crate::{
    answer::Request,
    connect::Question,
    environment::places,
    failure::Failure,
    flags::{DecodingFlags, ExecutionFlags, MAX_TOKENS, TimelineFlag, count_or_none},
    hints::advice,
    input::{Input, not_empty},
    interrupt::Interrupt,
    media::MediaFlags,
    names::looks_like_model,
    texts::{read_json, read_text},
};
use clap::Args;
use qhx::{Error, Source};
use qhx_runtime::LoadOptions;
use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

/// What a server decides for itself, or does not offer.
const NOT_WITH_A_SERVER: [&str; 15] = [
    "device",
    "threads",
    "pin",
    "gpu_memory",
    "isolate",
    "remeasure",
    "placement",
    "chunk",
    "context",
    "overcommit",
    "trace",
    "split",
    "grammar",
    "repetition_window",
    "draft",
];

/// Answer one prompt
///
/// MODEL is a bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache); without it, the built-in demo model answers. A model with a chat
/// template answers the prompt, one without continues the text.
#[derive(Args)]
#[command(override_usage = "qhx run [OPTIONS] [MODEL] <PROMPT>\n       qhx run [OPTIONS] [MODEL] -- <PROMPT>")]
#[command(
    after_help = "Examples:\n  qhx run \"Why is the sky blue?\"\n  qhx run smol \"Why is the sky blue?\"\n  git diff | qhx run smol -\n  \
                        qhx run qwen-vl --image photo.jpg \"Describe this image.\"\n  \
                        qhx run gemma --audio clip.wav \"Transcribe.\"\n  \
                        qhx run gemma --audio lecture.mp3 --split \"Transcribe.\"\n  \
                        qhx run --json \"Why is the sky blue?\"\n\n\
                        A single argument is the prompt, unless it looks like a model that does not exist, which is an error.\n\
                        What follows -- is the prompt in any case, and so is the text of --prompt."
)]
pub(crate) struct Run {
    /// The model and the prompt; one alone is the prompt (with --audio the prompt may be absent), and a prompt of - is read from stdin
    #[arg(value_name = "MODEL PROMPT", num_args = 0..=2, allow_hyphen_values = false)]
    positionals: Vec<OsString>,
    /// The prompt, whatever it looks like
    #[arg(last = true, value_name = "PROMPT", num_args = 1..=2)]
    last: Vec<OsString>,
    /// The prompt, whatever it looks like
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "last")]
    prompt: Option<OsString>,
    /// System message; "" leaves out the system turn where the template allows it
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    #[command(flatten)]
    media: MediaFlags,
    /// The most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = count_or_none(MAX_TOKENS), help_heading = "Decoding")]
    max_new: usize,
    #[command(flatten)]
    decoding: DecodingFlags,
    /// Functions that the model may call, as a JSON list in the form of the OpenAI API; with --json, `tool_calls` has the calls
    #[arg(long, value_name = "FILE.json", help_heading = "Decoding")]
    tools: Option<PathBuf>,
    #[command(flatten)]
    execution: ExecutionFlags,
    #[command(flatten)]
    timeline: TimelineFlag,
    /// Ask a server that has the model loaded, such as `qhx serve`; MODEL is then its name there. Its key, if any, is read from QHX_API_KEY
    #[arg(long, value_name = "URL", help_heading = "Execution", conflicts_with_all = NOT_WITH_A_SERVER)]
    connect: Option<String>,
    /// Print one JSON object instead of the text, as `qhx generate --json` does
    #[arg(long)]
    json: bool,
}

impl Run {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        if let Some(server) = &self.connect {
            return self.ask(server, interrupt);
        }
        let load = LoadOptions { timeline: self.timeline.begin(), ..self.execution.load_options()? };
        let options = self.decoding.generate_options(self.max_new)?;
        let (model, prompt) = self.model_and_prompt()?;
        let tools = self.tools.as_deref().map(read_json).transpose()?;
        let request = Request {
            model: model.map(Path::new),
            load: load.clone(),
            options,
            draft: &self.decoding.draft,
            media: &self.media,
            sessions: None,
            tools,
            json: self.json,
        };
        let answered = request.answer(|bundle| Input::of_text(bundle, prompt, self.system.as_deref()), interrupt)?;
        self.timeline.write(load.timeline.as_ref())?;
        answered.finish()
    }

    /// Asks a server.
    fn ask(&self, server: &str, interrupt: &Interrupt) -> Result<(), Failure> {
        let forced = self.prompt.as_ref().map(std::slice::from_ref).unwrap_or(&self.last);
        let (model, prompt) = match (&self.positionals[..], forced) {
            ([], [prompt]) => (None, text_of(prompt)?.to_owned()),
            ([model], [prompt]) | ([], [model, prompt]) => (Some(text_of(model)?), text_of(prompt)?.to_owned()),
            ([prompt], []) => (None, read_prompt(prompt)?),
            ([model, prompt], []) => (Some(text_of(model)?), read_prompt(prompt)?),
            ([], []) if self.media.has_sound() => (None, String::new()),
            _ => {
                return Err(
                    Failure::usage("there must be one prompt").hint("qhx run --connect URL \"PROMPT\"; quote a prompt that has spaces")
                );
            }
        };
        let mut fields = self.decoding.request_fields(self.max_new)?;
        if let Some(tools) = &self.tools {
            fields["tools"] = read_json(tools)?;
        }
        let (system, media, json) = (self.system.as_deref(), &self.media.files[..], self.json);
        Question { server, model, system, prompt: &prompt, media, fields, json }.ask(interrupt)
    }

    /// The model, where one is given, and the prompt.
    fn model_and_prompt(&self) -> Result<(Option<&OsStr>, String), Failure> {
        let forced = self.prompt.as_ref().map(std::slice::from_ref).unwrap_or(&self.last);
        match (&self.positionals[..], forced) {
            ([], [prompt]) => Ok((None, not_empty(text_of(prompt)?.to_owned(), "PROMPT")?)),
            ([model], [prompt]) | ([], [model, prompt]) => Ok((Some(model), not_empty(text_of(prompt)?.to_owned(), "PROMPT")?)),
            ([model, prompt], []) => Ok((Some(model), read_prompt(prompt)?)),
            ([only], []) => self.prompt_alone(only),
            ([], []) => Err(Failure::usage("the prompt is missing").hint("qhx run MODEL \"PROMPT\"")),
            _ => Err(Failure::usage("there is more than one prompt").hint("qhx run MODEL \"PROMPT\"; quote a prompt that has spaces")),
        }
    }

    /// A single argument: a prompt for the built-in model, unless it is a model or was meant as one.
    fn prompt_alone<'a>(&self, only: &'a OsStr) -> Result<(Option<&'a OsStr>, String), Failure> {
        let (path, places) = (Path::new(only), places());
        match Source::find(path, &places) {
            // The sound is the message.
            Ok(_) if self.media.has_sound() => Ok((Some(only), String::new())),
            Ok(_) => Err(Failure::usage(format!("the prompt is missing: {} is a model", path.display()))
                .hint(format!("qhx run {} \"PROMPT\"", path.display()))),
            Err(Error::NotFound(missing)) if path.exists() || only.to_str().is_some_and(|word| looks_like_model(word, &places)) => {
                let problem = match path.exists() {
                    true => format!("{} is not a model: it is {}; and there is no prompt", path.display(), missing.found),
                    false => format!("{} looks like a model that does not exist; and there is no prompt", path.display()),
                };
                let hint = format!("{}; if it is meant as the prompt: qhx run -- {:?}", advice(&missing), path.display().to_string());
                Err(Failure::usage(problem).hint(hint))
            }
            Err(_) => Ok((None, read_prompt(only)?)),
        }
    }
}

fn read_prompt(prompt: &OsStr) -> Result<String, Failure> {
    let text = match text_of(prompt)? {
        "-" => {
            let mut text = read_text(Path::new("-"))?;
            // The line's end belongs to the shell, not to the prompt.
            text.truncate(text.strip_suffix('\n').map_or(&text[..], |t| t.strip_suffix('\r').unwrap_or(t)).len());
            text
        }
        text => text.to_owned(),
    };
    not_empty(text, "PROMPT")
}

fn text_of(prompt: &OsStr) -> Result<&str, Failure> {
    let wrong = || Failure::usage(format!("the prompt is not valid UTF-8: {prompt:?}"));
    prompt.to_str().ok_or_else(|| wrong().hint("text must be UTF-8; only paths may hold other bytes"))
}
