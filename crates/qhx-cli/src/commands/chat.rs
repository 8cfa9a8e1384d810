//! `qhx chat`: a conversation, turn by turn, at a terminal or from a script.

use crate::{
    answer::{stream_answer, tell_cost},
    failure::Failure,
    flags::{DecodingFlags, ExecutionFlags, MAX_TOKENS, count_or_none},
    input::{conversation, needs_template},
    interrupt::Interrupt,
    lines::{Line, Lines},
    load::load_model,
    media,
    model_ref::open_model,
    output,
};
use clap::Args;
use qhx_bundle::Bundle;
use qhx_runtime::{Conversation, FinishReason, GenerateOptions, MediaKind, Medium, Model, text::Message};
use std::path::{Path, PathBuf};

const HELP: &str = "\
/image FILE   attach an image to the next message; without FILE show what is attached
/audio FILE   attach a sound to the next message; an empty line sends it without text
/detach       attach nothing
/reset        forget the conversation
/system TEXT  set the system message; without TEXT leave the system turn out where the template allows
/exit         leave (so does Ctrl-D)
/help         this text
Ctrl-C stops the answer, twice leaves. A message that begins with / can be given a space before it.";

/// Converse with a model
///
/// At a terminal each line is a message; so is each line of a script's input. The model keeps what it has read from turn to turn.
#[derive(Args)]
#[command(after_help = "Example:\n  qhx chat smol --system \"You answer in one sentence.\"\n\nIn the conversation:\n  \
                  /image photo.jpg and /audio clip.wav go with the next message; /help lists what else there is")]
pub(crate) struct Chat {
    /// A bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache); without it the built-in demo model
    model: Option<PathBuf>,
    /// A system message; "" leaves the system turn out where the template allows
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// The most tokens to write in one answer
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = count_or_none(MAX_TOKENS), help_heading = "Decoding")]
    max_new: usize,
    #[command(flatten)]
    decoding: DecodingFlags,
    #[command(flatten)]
    execution: ExecutionFlags,
}

impl Chat {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let load_options = self.execution.load_options()?;
        let options = self.decoding.generate_options(self.max_new)?;
        let bundle = open_model(self.model.as_deref(), load_options.device, interrupt)?;
        needs_template(&bundle)?;
        let model = load_model(&bundle, &load_options)?;
        let conversation = Conversation::new(&model, conversation(self.system.as_deref()))?;
        Talk { bundle, model, conversation, attached: Vec::new(), options, interrupt }.until_left()
    }
}

struct Talk<'a> {
    bundle: Bundle,
    model: Model,
    conversation: Conversation,
    /// What goes with the next message.
    attached: Vec<Medium>,
    options: GenerateOptions,
    interrupt: &'a Interrupt,
}

impl Talk<'_> {
    fn until_left(&mut self) -> Result<(), Failure> {
        let mut lines = Lines::of_stdin()?;
        if lines.is_terminal() {
            output::dim_note(&format!("{} on {}; /help for help", self.model.name(), self.model.device().name));
        }
        // A Ctrl-C that stopped an answer counts: the next one leaves.
        let mut once_more_leaves = false;
        loop {
            match lines.next()? {
                Line::End => {
                    if !self.attached.is_empty() {
                        output::note(&format!("not sent: {}", self.show_attached()));
                    }
                    return Ok(());
                }
                Line::Interrupted if once_more_leaves => return Ok(()),
                Line::Interrupted => {
                    output::dim_note("Ctrl-C once more, or Ctrl-D, leaves");
                    once_more_leaves = true;
                }
                Line::Text(line) => match line.strip_prefix('/') {
                    Some(command) => {
                        once_more_leaves = false;
                        match self.obey(command) {
                            Ok(Stay::No) => return Ok(()),
                            Ok(Stay::Yes) => {}
                            Err(failure) if lines.is_terminal() => _ = failure.report(),
                            Err(failure) => return Err(failure),
                        }
                    }
                    None if line.trim().is_empty() && !self.attached.iter().any(|medium| medium.kind() == MediaKind::Audio) => {}
                    None => match self.say(line.trim()) {
                        Ok(finished) => once_more_leaves = finished == FinishReason::Cancelled,
                        // A person can do something about it; a script cannot.
                        Err(failure) if lines.is_terminal() && !failure.is_quiet() => _ = failure.report(),
                        Err(failure) => return Err(failure),
                    },
                },
            }
        }
    }

    fn say(&mut self, text: &str) -> Result<FinishReason, Failure> {
        self.interrupt.clear();
        let Self { model, conversation, attached, options, interrupt, .. } = self;
        // A message that could not be sent gives its media back.
        let message = Message::with_media("user", attached.clone(), text);
        let generation = stream_answer(model, interrupt, |on_piece| conversation.say(message, options, interrupt.cancel(), on_piece))?;
        if generation.finish_reason != FinishReason::Cancelled || !generation.ids.is_empty() {
            attached.clear();
        }
        tell_cost(&generation, None);
        Ok(generation.finish_reason)
    }

    /// Attaches a file to the next message, or shows what is attached.
    fn attach(&mut self, kind: MediaKind, file: &str) -> Result<(), Failure> {
        if !file.is_empty() || self.attached.is_empty() {
            let file = file.strip_prefix('"').and_then(|file| file.strip_suffix('"')).unwrap_or(file);
            let model = &self.bundle.manifest().model.name;
            if self.model.placeholder(kind).is_none() || file.is_empty() {
                let takes = self.model.takes();
                let problem = if file.is_empty() { "nothing is attached" } else { "it cannot be attached" };
                output::note(&format!("{problem}: `{model}` takes {takes}"));
                return Ok(());
            }
            self.attached.push(media::open(kind, Path::new(file), &self.bundle)?);
        }
        output::dim_note(&format!("attached to the next message: {}", self.show_attached()));
        Ok(())
    }

    /// `photo.jpg (image, 256 tokens), clip.wav (sound, 75 tokens)`
    fn show_attached(&self) -> String {
        let show = |medium: &Medium| {
            let tokens = self.model.soft_rows(medium).unwrap_or_default();
            format!("{} ({}, {tokens} tokens)", medium.name(), medium.kind())
        };
        self.attached.iter().map(show).collect::<Vec<_>>().join(", ")
    }

    fn obey(&mut self, command: &str) -> Result<Stay, Failure> {
        let (name, argument) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (name, argument.trim()) {
            ("exit" | "quit", _) => return Ok(Stay::No),
            ("help", _) => output::note(HELP),
            ("image", file) => self.attach(MediaKind::Image, file)?,
            ("audio", file) => self.attach(MediaKind::Audio, file)?,
            ("detach", _) => {
                self.attached.clear();
                output::dim_note("nothing is attached");
            }
            ("reset", _) => {
                self.attached.clear();
                self.conversation.chat_mut().messages.retain(|message| message.role() == "system");
                output::dim_note("the conversation is forgotten");
            }
            ("system", text) => {
                let chat = self.conversation.chat_mut();
                let turns = chat.messages.drain(..).filter(|message| message.role() != "system").collect::<Vec<_>>();
                let begun = conversation(Some(text));
                chat.without_system = begun.without_system;
                chat.messages = begun.messages;
                chat.messages.extend(turns);
                output::dim_note(if text.is_empty() { "without a system turn from now on" } else { "the system message is set" });
            }
            (name, _) => output::note(&format!("there is no /{name}; /help lists what there is")),
        }
        Ok(Stay::Yes)
    }
}

#[derive(PartialEq, Eq)]
enum Stay {
    Yes,
    No,
}
