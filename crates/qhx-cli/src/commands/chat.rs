//! `qhx chat`: a conversation, turn by turn, at a terminal or from a script.

use crate::{
    answer::{stream_answer, tell_cost},
    failure::Failure,
    flags::{DecodingFlags, ExecutionFlags, MAX_TOKENS, count_or_none},
    input::{conversation, needs_template},
    interrupt::Interrupt,
    lines::{Line, Lines},
    load::load_model,
    open::open_model,
    output,
    settings::Settings,
    units::show_number,
};
use clap::Args;
use qhx::messages::open_medium;
use qhx_bundle::Bundle;
use qhx_runtime::{Conversation, Error, FinishReason, Generation, MediaKind, Medium, Model, Piece, text::Message};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The commands: how they are written, and what they do.
const COMMANDS: [(&str, &str); 10] = [
    ("/image FILE", "attach an image to the next message; without FILE, show what is attached"),
    ("/audio FILE", "attach a sound to the next message; an empty line sends it without text"),
    ("/detach", "remove what is attached"),
    ("/system TEXT", "set the system message; without TEXT, leave out the system turn where the template allows it"),
    ("/set NAME VALUE", "change a setting, as in /set temperature 0.7; without NAME, show the settings"),
    ("/save FILE", "save the conversation and the model's state"),
    ("/load FILE", "continue a saved conversation, bit for bit where it was left"),
    ("/reset", "forget the conversation"),
    ("/exit", "leave (so does Ctrl-D)"),
    ("/help", "show this text"),
];

const ABOUT_INPUT: &str = "\
A pasted text is one message, also if it has several lines. A line that ends in \\ is continued on the next;
\"\"\" begins and ends a message of several lines. A message that begins with / is written with a space before it.
Ctrl-C stops the answer, twice leaves.";

/// Chat with a model
///
/// At a terminal and in a script, each line is a message; a pasted text is one message, and so is what stands between lines of \"\"\". The model keeps its state from
/// turn to turn.
#[derive(Args)]
#[command(
    after_help = "Examples:\n  qhx chat smol --system \"Answer in one sentence.\"\n  printf 'Hello\\nAnd then?\\n' | qhx chat smol --json\n\n\
                  In the conversation, /help lists the commands: /image and /audio attach files to the next message,\n\
                  /save and /load keep conversations, /set changes sampling, /reset starts over."
)]
pub(crate) struct Chat {
    /// A bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache); without it, the built-in demo model
    model: Option<PathBuf>,
    /// System message; "" leaves out the system turn where the template allows it
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// Drop the oldest turns when the context is full, and say so each time
    #[arg(long)]
    context_shift: bool,
    /// Neither read nor write the history of entered lines in the user's cache
    #[arg(long)]
    no_history: bool,
    /// The most tokens to generate for one answer
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = count_or_none(MAX_TOKENS), help_heading = "Decoding")]
    max_new: usize,
    #[command(flatten)]
    decoding: DecodingFlags,
    #[command(flatten)]
    execution: ExecutionFlags,
    /// At the end, print one JSON object with the whole conversation, instead of the answers as they come
    #[arg(long)]
    json: bool,
}

impl Chat {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let load_options = self.execution.load_options()?;
        let mut settings = Settings { options: self.decoding.generate_options(self.max_new)?, context_shift: self.context_shift };
        let bundle = open_model(self.model.as_deref(), load_options.device, interrupt)?.bundle;
        needs_template(&bundle)?;
        let model = load_model(&bundle, &load_options)?;
        settings.options.draft = self.decoding.draft.source(&model, &load_options, interrupt)?;
        let conversation = Conversation::new(&model, conversation(self.system.as_deref()))?;
        let mut talk = Talk { bundle, model, conversation, attached: Vec::new(), settings, turns: self.json.then(Vec::new), interrupt };
        // An editor would write its prompt to stdout.
        let mut lines = if self.json { Lines::of_pipe() } else { Lines::of_stdin(!self.no_history)? };
        talk.until_left(&mut lines)?;
        talk.turns.as_ref().map_or(Ok(()), |turns| output::print_json(&talk.report(turns)))
    }
}

struct Talk<'a> {
    bundle: Bundle,
    model: Model,
    conversation: Conversation,
    /// What goes with the next message.
    attached: Vec<Medium>,
    settings: Settings,
    /// The turns so far, where they are printed as JSON at the end.
    turns: Option<Vec<Turn>>,
    interrupt: &'a Interrupt,
}

/// A message and its answer.
#[derive(Serialize)]
struct Turn {
    user: String,
    #[serde(flatten)]
    answer: Generation,
}

impl Talk<'_> {
    fn until_left(&mut self, lines: &mut Lines) -> Result<(), Failure> {
        if lines.is_terminal() {
            output::dim_note(&format!("{} on {}; /help for help", self.model.name(), self.model.device().name));
        }
        // A Ctrl-C that stopped an answer counts: the next one leaves.
        let mut once_more_leaves = false;
        loop {
            let (text, quoted) = match lines.next()? {
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
                    continue;
                }
                Line::Text { text, quoted } => (text, quoted),
            };
            let done = match command_of(&text).filter(|_| !quoted) {
                Some((name, argument)) => {
                    once_more_leaves = false;
                    self.obey(name, argument)
                }
                None if text.trim().is_empty() && !self.attached.iter().any(|medium| medium.kind() == MediaKind::Audio) => Ok(Stay::Yes),
                None => self.say(text.trim()).map(|finished| {
                    once_more_leaves = finished == FinishReason::Cancelled;
                    Stay::Yes
                }),
            };
            match done {
                Ok(Stay::Yes) => {}
                Ok(Stay::No) => return Ok(()),
                // A person can do something about it; a script cannot.
                Err(failure) if lines.is_terminal() && !failure.is_quiet() => _ = failure.report(),
                Err(failure) => return Err(failure),
            }
        }
    }

    fn say(&mut self, text: &str) -> Result<FinishReason, Failure> {
        self.interrupt.clear();
        // A message that could not be sent gives its media back.
        let message = Message::with_media("user", self.attached.clone(), text);
        if self.settings.context_shift {
            self.make_room(&message)?;
        }
        let Self { model, conversation, interrupt, .. } = self;
        let options = &self.settings.options;
        let mut too_long = false;
        let mut say = |on_piece: &mut dyn FnMut(Piece<'_>)| {
            let said = conversation.say(message.clone(), options, interrupt.cancel(), on_piece);
            too_long = matches!(said, Err(Error::PromptTooLong { .. }));
            said
        };
        let answered = match self.turns {
            Some(_) => say(&mut |_| {}).map_err(Failure::from),
            None => stream_answer(model, interrupt, &mut say),
        };
        let generation = answered.map_err(|failure| if too_long { failure.hint(self.advice_on_length()) } else { failure })?;
        if generation.finish_reason != FinishReason::Cancelled || !generation.ids.is_empty() {
            self.attached.clear();
        }
        tell_cost(&generation, None);
        let session = self.conversation.session();
        if session.len() >= session.context() {
            output::note(match self.settings.context_shift {
                true => "the next message drops the oldest turns",
                false => "to go on: /reset forgets the conversation, /set context-shift on drops its oldest turns",
            });
        }
        let finished = generation.finish_reason;
        self.turns.iter_mut().for_each(|turns| turns.push(Turn { user: text.to_owned(), answer: generation.clone() }));
        Ok(finished)
    }

    /// Drops the oldest turns until the message fits, with room for an answer. If it does not fit even alone, nothing is dropped.
    fn make_room(&mut self, message: &Message) -> Result<(), Failure> {
        let context = self.conversation.session().context();
        let room = self.settings.options.max_new.min(context / 4);
        let before = self.conversation.chat().clone();
        let mut dropped = 0;
        let mut tokens = self.conversation.tokens_with(message)?;
        while tokens + room > context && self.conversation.drop_oldest_turn() {
            dropped += 1;
            tokens = self.conversation.tokens_with(message)?;
        }
        if tokens > context {
            *self.conversation.chat_mut() = before;
        } else if dropped > 0 {
            let left = show_number(self.turns_so_far(), "turn");
            output::note(&format!("context shift: dropped the oldest {}, {left} left", show_number(dropped, "turn")));
        }
        Ok(())
    }

    /// What to do when the conversation is longer than the context.
    fn advice_on_length(&self) -> &'static str {
        match (self.turns_so_far(), self.settings.context_shift) {
            (0, _) | (_, true) => "send a shorter message, or start with a longer --context",
            _ => {
                "/reset forgets the conversation, /set context-shift on (or --context-shift) drops its oldest turns; or start with a longer --context"
            }
        }
    }

    fn turns_so_far(&self) -> usize {
        self.conversation.chat().messages.iter().filter(|message| message.role() == "user").count()
    }

    /// Attaches a file to the next message, or shows what is attached.
    fn attach(&mut self, kind: MediaKind, file: &str) -> Result<(), Failure> {
        if !file.is_empty() || self.attached.is_empty() {
            let model = &self.bundle.manifest().model.name;
            if self.model.placeholder(kind).is_none() || file.is_empty() {
                let takes = self.model.takes();
                let problem = if file.is_empty() { "nothing is attached" } else { "it cannot be attached" };
                output::note(&format!("{problem}: `{model}` takes {takes}"));
                return Ok(());
            }
            self.attached.push(open_medium(kind, unquoted(file), &self.bundle)?);
        }
        output::dim_note(&format!("attached to the next message: {}", self.show_attached()));
        Ok(())
    }

    /// `photo.jpg (image, 256 tokens), clip.wav (sound, 75 tokens)`
    fn show_attached(&self) -> String {
        let show = |medium: &Medium| {
            let tokens = self.model.soft_rows(medium).unwrap_or_default();
            format!("{} ({}, {})", medium.name(), medium.kind(), show_number(tokens, "token"))
        };
        self.attached.iter().map(show).collect::<Vec<_>>().join(", ")
    }

    fn obey(&mut self, name: &str, argument: &str) -> Result<Stay, Failure> {
        match (name, argument) {
            ("exit" | "quit", _) => return Ok(Stay::No),
            ("help", _) => output::note(&help()),
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
            ("set", "") => output::note(self.settings.show().trim_end()),
            ("set", setting) => {
                let (name, value) = setting.split_once(char::is_whitespace).unwrap_or((setting, ""));
                self.settings.set(name, value.trim())?;
                output::dim_note(&format!("{name} is {}", value.trim()));
            }
            ("save" | "load", "") => output::note(&format!("give a file: /{name} FILE")),
            ("save", file) => {
                self.conversation.save(unquoted(file))?;
                output::dim_note(&format!("saved {} to {file}", show_number(self.turns_so_far(), "turn")));
            }
            ("load", file) => {
                self.conversation = Conversation::restore(&self.model, unquoted(file))?;
                self.attached.clear();
                output::dim_note(&format!("loaded {} from {file}", show_number(self.turns_so_far(), "turn")));
            }
            (name, _) => output::note(&format!("there is no /{name}; /help lists the commands")),
        }
        Ok(Stay::Yes)
    }

    /// What `--json` prints.
    fn report(&self, turns: &[Turn]) -> Value {
        let messages: Vec<_> = self.conversation.chat().messages.iter().map(|message| message.fields()).collect();
        json!({ "model": self.model.name(), "turns": turns, "messages": messages })
    }
}

/// The name and the argument of a command. A text of several lines is one only if it begins as a known one.
fn command_of(text: &str) -> Option<(&str, &str)> {
    let (name, argument) = text.strip_prefix('/')?.split_once(char::is_whitespace).unwrap_or((&text[1..], ""));
    let is_known = || COMMANDS.iter().any(|(command, _)| command.split(' ').next().is_some_and(|known| known[1..] == *name));
    (!text.contains('\n') || is_known()).then_some((name, argument.trim()))
}

fn help() -> String {
    let width = COMMANDS.iter().map(|(command, _)| command.len()).max().unwrap_or(0);
    let commands: String = COMMANDS.iter().map(|(command, does)| format!("{command:width$}  {does}\n")).collect();
    commands + ABOUT_INPUT
}

/// A file name as it is, or between quotes.
fn unquoted(file: &str) -> &Path {
    Path::new(file.strip_prefix('"').and_then(|file| file.strip_suffix('"')).unwrap_or(file))
}

#[derive(PartialEq, Eq)]
enum Stay {
    Yes,
    No,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_from_messages() {
        assert_eq!(command_of("/set temperature 0.7 "), Some(("set", "temperature 0.7")));
        assert_eq!(command_of("/system be\nbrief"), Some(("system", "be\nbrief")));
        assert_eq!(command_of("/frobnicate"), Some(("frobnicate", "")));
        assert_eq!(command_of("/usr/bin/ls\n/bin/ls"), None);
        assert_eq!([command_of(" /help"), command_of("hello"), command_of("")], [None; 3]);
    }
}
