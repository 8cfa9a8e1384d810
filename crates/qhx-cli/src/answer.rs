//! One answer: made, streamed to stdout as it comes, and its cost told on stderr.

use crate::{
    failure::Failure,
    interrupt::Interrupt,
    output::{self, Stream, show_seconds},
};
use qhx_runtime::{Error, FinishReason, Generation, Model, Piece, timing::Timing};
use std::time::Duration;

/// Streams the answer that `work` makes with `model`: its text (for a model without tokenizer: the ids). A closed stdout stops it.
pub(crate) fn stream_answer(
    model: &Model,
    interrupt: &Interrupt,
    work: impl FnOnce(&mut dyn FnMut(Piece<'_>)) -> Result<Generation, Error>,
) -> Result<Generation, Failure> {
    let has_text = model.tokenizer().is_some();
    let mut stream = Stream::new();
    let mut first = true;
    let generation = work(&mut |piece: Piece<'_>| {
        let printed = match piece.id {
            Some(id) if !has_text => stream.push(&format!("{}{id}", if first { "" } else { "," })),
            _ => stream.push(piece.text),
        };
        first = false;
        if !printed {
            interrupt.stop();
        }
    });
    stream.finish()?;
    Ok(generation?)
}

/// What a person should know after an answer: why it is shorter than expected, and what it cost.
pub(crate) fn tell_cost(generation: &Generation, load_time: Option<Duration>) {
    if let Some(note) = &generation.note {
        output::note(&format!("note: {note}"));
    } else if generation.finish_reason == FinishReason::Length {
        output::dim_note("note: cut off at the most tokens to write (--max-new)");
    }
    output::dim_note(&timing_line(&generation.timing, load_time, generation.media > 0));
}

/// An answer that was stopped is no success.
pub(crate) fn check_complete(generation: &Generation) -> Result<(), Failure> {
    match generation.finish_reason {
        FinishReason::Cancelled => Err(Failure::work("cancelled: the answer is not complete")),
        FinishReason::Length | FinishReason::Stop => Ok(()),
    }
}

/// `12.3 tok/s · 34 tokens · 0.21 s first token · 1.20 s load`; with media also what encoding them and reading the prompt took.
fn timing_line(timing: &Timing, load_time: Option<Duration>, has_media: bool) -> String {
    let mut parts = Vec::new();
    if timing.decode_tokens_per_second > 0.0 {
        parts.push(format!("{:.1} tok/s", timing.decode_tokens_per_second));
    }
    parts.push(match timing.generated_tokens {
        1 => "1 token".to_owned(),
        tokens => format!("{tokens} tokens"),
    });
    if has_media {
        parts.push(format!("{} encode", show_seconds(timing.encode_ms / 1e3)));
        parts.push(format!("{} prefill", show_seconds(timing.prefill_ms / 1e3)));
    }
    if timing.generated_tokens > 0 {
        parts.push(format!("{} first token", show_seconds(timing.ttft_ms / 1e3)));
    }
    parts.extend(load_time.map(|time| format!("{} load", show_seconds(time.as_secs_f64()))));
    parts.join(" · ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timing_line() {
        let timing = Timing { decode_tokens_per_second: 12.345, generated_tokens: 34, ttft_ms: 214.0, ..Timing::default() };
        let load = Some(Duration::from_millis(1200));
        assert_eq!(timing_line(&timing, load, false), "12.3 tok/s · 34 tokens · 0.21 s first token · 1.20 s load");
        assert_eq!(timing_line(&Timing::default(), None, false), "0 tokens");
        let seen = Timing { encode_ms: 130.0, prefill_ms: 80.0, ..timing };
        assert_eq!(
            timing_line(&seen, load, true),
            "12.3 tok/s · 34 tokens · 0.13 s encode · 80 ms prefill · 0.21 s first token · 1.20 s load"
        );
    }
}
