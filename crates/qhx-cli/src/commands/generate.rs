//! `qhx generate`: one answer for scripts.

use crate::{
    answer::{check_complete, stream_answer, tell_cost},
    failure::Failure,
    flags::{DecodingFlags, ExecutionFlags, MAX_TOKENS, count_or_none},
    input::InputFlags,
    interrupt::Interrupt,
    load::{load_model, open_for},
    media::MediaFlags,
    output,
    windows::Windows,
};
use clap::Args;
use qhx_runtime::{
    Generation, Piece, generate,
    tensors::{self, Tensor},
    timing::milliseconds,
};
use std::{path::PathBuf, time::Instant};

/// Generate from ids, a text or a conversation: the scriptable form
#[derive(Args)]
#[command(after_help = "Example:\n  qhx generate smol --prompt \"Once upon a time\" --max-new 10\n  \
                        qhx generate smol --ids 504,3575,282 --max-new 24 --ignore-eos --json\n  \
                        qhx generate qwen-vl --image a.jpg --image b.png --user \"What has changed?\"\n  \
                        qhx generate gemma --audio talk.mp3 --split --user \"Transcribe.\"")]
pub(crate) struct Generate {
    /// The bundle
    bundle: PathBuf,
    #[command(flatten)]
    input: InputFlags,
    #[command(flatten)]
    media: MediaFlags,
    /// The most tokens to write
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count_or_none(MAX_TOKENS), help_heading = "Decoding")]
    max_new: usize,
    #[command(flatten)]
    decoding: DecodingFlags,
    #[command(flatten)]
    execution: ExecutionFlags,
    /// Write the logits from which each token was chosen: `step_logits` f32 [generated, vocabulary]
    #[arg(long, value_name = "F.safetensors")]
    logits: Option<PathBuf>,
    /// Print one JSON object instead of the text
    #[arg(long)]
    json: bool,
}

impl Generate {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let mut load_options = self.execution.load_options()?;
        let mut options = self.decoding.generate_options(self.max_new)?;
        options.keep_logits = self.logits.is_some();
        self.logits.as_deref().map_or(Ok(()), output::check_place)?;
        let mut input = self.input.read()?;

        let started = Instant::now();
        let bundle = open_for(&self.bundle, load_options.device, interrupt)?;
        let open_time = started.elapsed();
        let windows = Windows::open(&mut input, &self.media, &bundle)?;
        load_options.media = windows.media(&input);
        let read_time = started.elapsed() - open_time;
        let model = load_model(&bundle, &load_options)?;
        let load_time = started.elapsed() - read_time;
        let mut session = model.session()?;
        let mut generation = match &windows {
            Windows::Several(_) => windows.answer(&mut input, &mut session, &options, interrupt, !self.json)?,
            Windows::None => {
                let prompt = input.prompt(&model)?;
                let mut answer =
                    |on_piece: &mut dyn FnMut(Piece<'_>)| generate(&mut session, &prompt, &options, interrupt.cancel(), on_piece);
                if self.json { answer(&mut |_| {})? } else { stream_answer(&model, interrupt, answer)? }
            }
        };
        generation.timing.load_ms = milliseconds(load_time);
        generation.timing.add_encode_time(read_time);
        if let Some(path) = &self.logits {
            tensors::write(path, &[step_logits(&mut generation, model.vocabulary().logits)])?;
        }
        match self.json {
            true => output::print_json(&generation)?,
            false => tell_cost(&generation, Some(load_time)),
        }
        check_complete(&generation)
    }
}

fn step_logits(generation: &mut Generation, vocabulary: usize) -> Tensor {
    let values = std::mem::take(&mut generation.step_logits);
    Tensor { name: "step_logits".into(), shape: vec![values.len() / vocabulary.max(1), vocabulary], values }
}
