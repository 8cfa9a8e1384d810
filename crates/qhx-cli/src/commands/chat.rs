//! `qhx chat`: a conversation, turn by turn, at a terminal or from a script.

use crate::{
    answer::{stream_answer, tell_cost},
    failure::Failure,
    flags::{DecodingFlags, ExecutionFlags},
    input::{conversation, needs_template},
    interrupt::Interrupt,
    lines::{Line, Lines},
    load::load_model,
    model_ref::open_model,
    output,
};
use clap::Args;
use qhx_runtime::{Conversation, FinishReason, GenerateOptions, Model, text::Message};
use std::path::PathBuf;

const HELP: &str = "\
/reset        forget the conversation
/system TEXT  set the system message; without TEXT leave the system turn out where the template allows
/exit         leave (so does Ctrl-D)
/help         this text
Ctrl-C stops the answer, twice leaves. A message that begins with / can be given a space before it.";

/// Converse with a model
///
/// At a terminal each line is a message; so is each line of a script's input. The model keeps what it has read from turn to turn.
#[derive(Args)]
#[command(
    after_help = "Example:\n  qhx chat smol --system \"You answer in one sentence.\"\n\nIn the conversation:\n  /help lists what else there is"
)]
pub(crate) struct Chat {
    /// A bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache)
    model: Option<PathBuf>,
    /// A system message; "" leaves the system turn out where the template allows
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// The most tokens to write in one answer
    #[arg(long, value_name = "N", default_value_t = 2048, help_heading = "Decoding")]
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
        let path = self.model.as_ref().ok_or_else(|| {
            Failure::usage("no model is given, and this build of qhx carries no demo model")
                .hint("qhx chat MODEL, where MODEL is a bundle, a Hugging Face folder or a GGUF file")
        })?;
        let bundle = open_model(path, interrupt)?;
        needs_template(&bundle)?;
        let model = load_model(&bundle, &load_options)?;
        let conversation = Conversation::new(&model, conversation(self.system.as_deref()))?;
        Talk { model, conversation, options, interrupt }.until_left()
    }
}

struct Talk<'a> {
    model: Model,
    conversation: Conversation,
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
                Line::End => return Ok(()),
                Line::Interrupted if once_more_leaves => return Ok(()),
                Line::Interrupted => {
                    output::dim_note("Ctrl-C once more, or Ctrl-D, leaves");
                    once_more_leaves = true;
                }
                Line::Text(line) => match line.strip_prefix('/') {
                    Some(command) => {
                        once_more_leaves = false;
                        if self.obey(command) == Stay::No {
                            return Ok(());
                        }
                    }
                    None if line.trim().is_empty() => {}
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
        let Self { model, conversation, options, interrupt } = self;
        let message = Message::new("user", text);
        let generation = stream_answer(model, interrupt, |on_piece| conversation.say(message, options, interrupt.cancel(), on_piece))?;
        tell_cost(&generation, None);
        Ok(generation.finish_reason)
    }

    fn obey(&mut self, command: &str) -> Stay {
        let (name, argument) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (name, argument.trim()) {
            ("exit" | "quit", _) => return Stay::No,
            ("help", _) => output::note(HELP),
            ("reset", _) => {
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
            ("image", _) => output::note("this model has no eyes: it takes text only"),
            ("audio", _) => output::note("this model has no ears: it takes text only"),
            (name, _) => output::note(&format!("there is no /{name}; /help lists what there is")),
        }
        Stay::Yes
    }
}

#[derive(PartialEq, Eq)]
enum Stay {
    Yes,
    No,
}
