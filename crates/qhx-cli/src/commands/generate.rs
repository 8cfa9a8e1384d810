//! `qhx generate`: one answer for scripts.

use crate::{
    answer::Request,
    failure::Failure,
    flags::{DecodingFlags, ExecutionFlags, MAX_TOKENS, TimelineFlag, count_or_none},
    input::InputFlags,
    interrupt::Interrupt,
    media::MediaFlags,
    output,
    sessions::SessionFlags,
    texts::read_json,
};
use clap::Args;
use qhx_runtime::{
    Generation, LoadOptions,
    tensors::{self, Tensor},
};
use std::path::PathBuf;

/// Generate from token ids, text or a conversation; for scripts
#[derive(Args)]
#[command(after_help = "Examples:\n  qhx generate smol --prompt \"Once upon a time\" --max-new 10\n  \
                        qhx generate smol --ids 504,3575,282 --max-new 24 --ignore-eos --json\n  \
                        qhx generate qwen-vl --image a.jpg --image b.png --user \"What has changed?\"\n  \
                        qhx generate gemma --audio talk.mp3 --split --user \"Transcribe.\"\n  \
                        qhx generate smol --user \"My name is Ada.\" --save-session ada.qhx\n  \
                        qhx generate smol --load-session ada.qhx --user \"What is my name?\"")]
pub(crate) struct Generate {
    /// A bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache)
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    #[command(flatten)]
    input: InputFlags,
    #[command(flatten)]
    media: MediaFlags,
    /// The most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count_or_none(MAX_TOKENS), help_heading = "Decoding")]
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
    #[command(flatten)]
    sessions: SessionFlags,
    /// Write the logits that each token was chosen from: `step_logits`, f32 [generated, vocabulary]
    #[arg(long, value_name = "F.safetensors")]
    logits: Option<PathBuf>,
    /// Print one JSON object instead of the text
    #[arg(long)]
    json: bool,
}

impl Generate {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let mut options = self.decoding.generate_options(self.max_new)?;
        options.keep_logits = self.logits.is_some();
        self.logits.as_deref().map_or(Ok(()), output::check_place)?;
        self.sessions.check(self.media.split)?;
        let load = LoadOptions { timeline: self.timeline.begin(), ..self.execution.load_options()? };
        let input = self.input.read()?;
        let tools = self.tools.as_deref().map(read_json).transpose()?;
        let request = Request {
            model: Some(&self.model),
            load: load.clone(),
            options,
            draft: &self.decoding.draft,
            media: &self.media,
            sessions: Some(&self.sessions),
            tools,
            json: self.json,
        };
        let mut answered = request.answer(|_| Ok(input), interrupt)?;
        self.timeline.write(load.timeline.as_ref())?;
        if let Some(path) = &self.logits {
            tensors::write(path, &[step_logits(&mut answered.generation, answered.model.vocabulary().logits)])?;
        }
        answered.finish()
    }
}

fn step_logits(generation: &mut Generation, vocabulary: usize) -> Tensor {
    let values = std::mem::take(&mut generation.step_logits);
    Tensor { name: "step_logits".into(), shape: vec![values.len() / vocabulary.max(1), vocabulary], values }
}
