//! `qhx run`: one answer for a person.

use crate::{
    answer::{check_complete, stream_answer, tell_cost},
    failure::Failure,
    flags::{DecodingFlags, ExecutionFlags, MAX_TOKENS, count_or_none},
    input::{Input, not_empty, read_text},
    interrupt::Interrupt,
    load::load_model,
    media::MediaFlags,
    model_ref::{kind_of, open_model},
    windows::Windows,
};
use clap::Args;
use qhx_runtime::{Piece, generate};
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Instant,
};

/// Answer one prompt, streamed
///
/// MODEL is a bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache); without it the built-in demo model answers. A model with a chat
/// template answers; one without continues the text.
#[derive(Args)]
#[command(override_usage = "qhx run [OPTIONS] [MODEL] <PROMPT>")]
#[command(
    after_help = "Example:\n  qhx run \"Why is the sky blue?\"\n  qhx run smol \"Why is the sky blue?\"\n  git diff | qhx run smol -\n  \
                        qhx run qwen-vl --image photo.jpg \"Describe this image.\"\n  \
                        qhx run gemma --audio clip.wav \"Transcribe.\"\n  \
                        qhx run gemma --audio lecture.mp3 --split \"Transcribe.\""
)]
pub(crate) struct Run {
    /// The model and the prompt; one alone is the prompt (with --audio the prompt may be absent), and a prompt of - is read from stdin
    #[arg(value_name = "MODEL PROMPT", num_args = 0..=2, allow_hyphen_values = false)]
    positionals: Vec<OsString>,
    /// A system message; "" leaves the system turn out where the template allows
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    #[command(flatten)]
    media: MediaFlags,
    /// The most tokens to write
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = count_or_none(MAX_TOKENS), help_heading = "Decoding")]
    max_new: usize,
    #[command(flatten)]
    decoding: DecodingFlags,
    #[command(flatten)]
    execution: ExecutionFlags,
}

impl Run {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let mut load_options = self.execution.load_options()?;
        let options = self.decoding.generate_options(self.max_new)?;
        let (path, prompt) = self.model_and_prompt()?;

        let bundle = open_model(path.as_deref(), load_options.device, interrupt)?;
        let mut input = Input::of_text(&bundle, prompt, self.system.as_deref())?;
        let started = Instant::now();
        let windows = Windows::open(&mut input, &self.media, &bundle)?;
        load_options.media = windows.media(&input);
        let read_time = started.elapsed();
        let model = load_model(&bundle, &load_options)?;
        let load_time = started.elapsed() - read_time;
        let mut session = model.session()?;
        let mut generation = match &windows {
            Windows::Several(_) => windows.answer(&mut input, &mut session, &options, interrupt, true)?,
            Windows::None => {
                let prompt = input.prompt(&model)?;
                let answer = |on_piece: &mut dyn FnMut(Piece<'_>)| generate(&mut session, &prompt, &options, interrupt.cancel(), on_piece);
                stream_answer(&model, interrupt, answer)?
            }
        };
        generation.timing.add_encode_time(read_time);
        tell_cost(&generation, Some(load_time));
        check_complete(&generation)
    }

    /// The model, where one is given, and the prompt.
    fn model_and_prompt(&self) -> Result<(Option<PathBuf>, String), Failure> {
        match &self.positionals[..] {
            [model, prompt] => Ok((Some(model.into()), read_prompt(prompt)?)),
            // The sound is the message.
            [model] if self.media.has_sound() && kind_of(Path::new(model)).is_some() => Ok((Some(model.into()), String::new())),
            [only] if kind_of(Path::new(only)).is_some() => {
                let hint = format!("qhx run {} \"PROMPT\"", Path::new(only).display());
                Err(Failure::usage(format!("the prompt is missing: {} is a model", Path::new(only).display())).hint(hint))
            }
            [prompt] => Ok((None, read_prompt(prompt)?)),
            _ => Err(Failure::usage("the prompt is missing").hint("qhx run MODEL \"PROMPT\"")),
        }
    }
}

fn read_prompt(prompt: &OsString) -> Result<String, Failure> {
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

fn text_of(prompt: &OsString) -> Result<&str, Failure> {
    let wrong = || Failure::usage(format!("the prompt is not valid UTF-8: {prompt:?}"));
    prompt.to_str().ok_or_else(|| wrong().hint("texts must be UTF-8; only paths may hold other bytes"))
}
