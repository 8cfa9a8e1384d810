//! A long sound in windows, as `--split` asks for it.

use crate::{
    failure::Failure,
    input::Input,
    interrupt::Interrupt,
    media::MediaFlags,
    output::{self, Stream},
};
use qhx::windows::{self, WindowEvent};
use qhx_bundle::Bundle;
use qhx_runtime::{GenerateOptions, Generation, Medium, Session};
use std::ops::ControlFlow;

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
}

/// One answer after the other, printed as they come if `shown`, put together into one.
pub(crate) fn answer(
    windows: &[Medium],
    input: &mut Input,
    session: &mut Session,
    options: &GenerateOptions,
    interrupt: &Interrupt,
    shown: bool,
) -> Result<Generation, Failure> {
    let model = session.model().clone();
    let mut stream = Stream::new();
    let prompt = |window: &Medium| {
        input.set_media(vec![window.clone()]);
        Ok(input.prompt(&model)?)
    };
    let whole = windows::answer(session, windows, prompt, options, interrupt.cancel(), &mut |event| match event {
        WindowEvent::Begins { number, of } => {
            output::dim_note(&format!("window {number} of {of}"));
            ControlFlow::Continue(())
        }
        WindowEvent::Text(text) if shown && !stream.push(text) => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    });
    if shown {
        stream.finish()?;
    }
    Ok(whole?)
}
