//! `qhx trace`: the output of every stage for a prompt, as a file.

use crate::{
    failure::Failure,
    flags::ExecutionFlags,
    input::InputFlags,
    interrupt::Interrupt,
    load::load_model,
    media::MediaFlags,
    open::open_model,
    output,
    table::{Align, Table},
};
use clap::{Args, ValueEnum};
use qhx_runtime::{
    DeviceChoice, LoadOptions,
    tensors::{self, Tensor},
    trace::trace_prompt,
};
use serde_json::json;
use std::path::PathBuf;

/// Write the output of every stage and the logits to a safetensors file
///
/// `qhx diff` compares two such files.
#[derive(Args)]
#[command(after_help = "Example:\n  qhx trace smol --ids 504,3575,282 --out cpu.safetensors --device cpu")]
pub(crate) struct Trace {
    /// A bundle, a Hugging Face folder or a GGUF file (forged once into the user's cache)
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    #[command(flatten)]
    input: InputFlags,
    #[command(flatten)]
    media: MediaFlags,
    /// File to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Rows whose logits are written
    #[arg(long, value_enum, default_value_t = Rows::All)]
    logits: Rows,
    #[command(flatten)]
    execution: ExecutionFlags,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Rows {
    All,
    Last,
}

impl Trace {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let mut options: LoadOptions = self.execution.load_options()?;
        if self.media.split {
            return Err(Failure::usage("--split does not go with trace").hint("trace one window: cut the sound into windows first"));
        }
        if self.logits == Rows::All {
            options.wanted = options.chunk;
        }
        let mut input = self.input.read()?;
        output::check_place(&self.out)?;
        // On any device the bundle itself, not its arch folder, whose graphs show few stages.
        let bundle = open_model(Some(&self.model), DeviceChoice::Auto, interrupt)?.bundle;
        input.attach(&self.media, &bundle)?;
        options.media = input.media();
        let model = load_model(&bundle, &options)?;
        if bundle.manifest().plan.is_some() {
            output::note(
                "note: the prepared graphs of an arch folder show only the stages at their ends; trace the bundle itself to see all",
            );
        }
        let prompt = input.prompt(&model)?;
        let traced = trace_prompt(&mut model.session()?, &prompt, interrupt.cancel())?;
        tensors::write(&self.out, &traced)?;
        if self.json {
            let listed: Vec<_> = traced.iter().map(|Tensor { name, shape, .. }| json!({ "name": name, "shape": shape })).collect();
            return output::print_json(&json!({ "out": self.out, "prompt_ids": prompt.ids(), "tensors": listed }));
        }
        let mut table = Table::new([("name", Align::Left), ("shape", Align::Left)]);
        traced.iter().for_each(|Tensor { name, shape, .. }| table.row([name.clone(), format!("{shape:?}")]));
        output::print(&table.render())
    }
}
