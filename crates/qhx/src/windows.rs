//! A sound longer than a model takes at once: windows that it takes, one answer for each, their texts joined.

use crate::Error;
use qhx_runtime::{Cancel, FinishReason, GenerateOptions, Generation, Medium, Prompt, Session, generate};
use std::{ops::ControlFlow, path::Path};

/// What is told while windows are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WindowEvent<'a> {
    /// A window is about to be answered.
    Begins {
        /// Counted from 1.
        number: usize,
        /// How many there are.
        of: usize,
    },
    /// What its answer adds to the text so far.
    Text(&'a str),
}

/// Reads a sound from a file and cuts it, where it is quiet, into windows that the bundle's model takes. A short one is its only window.
pub fn open(path: &Path, bundle: &qhx_bundle::Bundle) -> Result<Vec<Medium>, Error> {
    Ok(Medium::open_split(path, &bundle.manifest().model.name, &bundle.manifest().media)?)
}

/// Answers one window after the other, each with the prompt that `prompt` makes for it, and joins the answers into one. `on_event` may break off; what was
/// answered until then is the result.
pub fn answer(
    session: &mut Session,
    windows: &[Medium],
    mut prompt: impl FnMut(&Medium) -> Result<Prompt, Error>,
    options: &GenerateOptions,
    cancel: &Cancel,
    on_event: &mut dyn FnMut(WindowEvent<'_>) -> ControlFlow<()>,
) -> Result<Generation, Error> {
    let mut whole: Option<Generation> = None;
    for (number, window) in windows.iter().enumerate() {
        if on_event(WindowEvent::Begins { number: number + 1, of: windows.len() }).is_break() {
            break;
        }
        let answer = generate(session, &prompt(window)?, options, cancel, &mut |_| {})?;
        let between = if whole.as_ref().is_none_or(|whole| whole.text.is_empty()) { "" } else { " " };
        let shown = on_event(WindowEvent::Text(&[between, answer.text.trim()].concat()));
        let finished = answer.finish_reason;
        match &mut whole {
            Some(whole) => join(whole, answer),
            None => whole = Some(Generation { text: answer.text.trim().to_owned(), ..answer }),
        }
        if shown.is_break() || finished == FinishReason::Cancelled {
            break;
        }
    }
    whole.ok_or(Error::Cancelled)
}

/// Puts the answer to the next window behind those before it. It ends as it ended, unless an earlier one was cut short.
fn join(whole: &mut Generation, next: Generation) {
    let text = next.text.trim();
    if !whole.text.is_empty() && !text.is_empty() {
        whole.text.push(' ');
    }
    whole.text.push_str(text);
    whole.prompt_ids.extend(next.prompt_ids);
    whole.ids.extend(next.ids);
    whole.step_logits.extend(next.step_logits);
    whole.media += next.media;
    whole.note = next.note.or(whole.note.take());
    if next.finish_reason == FinishReason::Cancelled || whole.finish_reason == FinishReason::Stop {
        whole.finish_reason = next.finish_reason;
    }
    for (stage, more) in whole.stages.iter_mut().zip(next.stages) {
        stage.runs += more.runs;
    }
    whole.timing.add(&next.timing);
}
