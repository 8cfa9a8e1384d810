//! A long sound in windows: one answer for each, their texts joined.

use crate::{
    failure::Failure,
    input::Input,
    interrupt::Interrupt,
    media::MediaFlags,
    output::{self, Stream},
};
use qhx_bundle::Bundle;
use qhx_runtime::{FinishReason, GenerateOptions, Generation, Medium, Session, generate};

/// The windows of a sound that is longer than the model takes at once.
pub(crate) enum Windows {
    /// There is one answer to make.
    None,
    Several(Vec<Medium>),
}

impl Windows {
    /// Opens the media of `input`. Windows there are only where `--split` asks for them and one is not enough.
    pub(crate) fn open(input: &mut Input, flags: &MediaFlags, bundle: &Bundle) -> Result<Self, Failure> {
        match flags.windows(bundle)? {
            None => input.attach(flags, bundle).map(|()| Self::None),
            Some(windows) => {
                input.attach(&MediaFlags::default(), bundle)?;
                if windows.len() > 1 {
                    return Ok(Self::Several(windows));
                }
                input.set_media(windows);
                Ok(Self::None)
            }
        }
    }

    /// What is going to be encoded.
    pub(crate) fn media(&self, input: &Input) -> Vec<Medium> {
        match self {
            Self::None => input.media(),
            Self::Several(windows) => windows.clone(),
        }
    }

    /// One answer after the other, printed as they come if `shown`, put together into one.
    pub(crate) fn answer(
        &self,
        input: &mut Input,
        session: &mut Session,
        options: &GenerateOptions,
        interrupt: &Interrupt,
        shown: bool,
    ) -> Result<Generation, Failure> {
        let Self::Several(windows) = self else { return Err(Failure::work("there are no windows to answer")) };
        let model = session.model().clone();
        let mut stream = Stream::new();
        let mut whole: Option<Generation> = None;
        for (number, window) in windows.iter().enumerate() {
            output::dim_note(&format!("window {} of {}", number + 1, windows.len()));
            input.set_media(vec![window.clone()]);
            let answer = generate(session, &input.prompt(&model)?, options, interrupt.cancel(), &mut |_| {})?;
            let between = if whole.as_ref().is_none_or(|whole| whole.text.is_empty()) { "" } else { " " };
            if shown && !stream.push(&[between, answer.text.trim()].concat()) {
                break;
            }
            let finished = answer.finish_reason;
            match &mut whole {
                Some(whole) => join(whole, answer),
                None => whole = Some(Generation { text: answer.text.trim().to_owned(), ..answer }),
            }
            if finished == FinishReason::Cancelled {
                break;
            }
        }
        if shown {
            stream.finish()?;
        }
        whole.ok_or_else(|| Failure::work("the sound has no windows"))
    }
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
