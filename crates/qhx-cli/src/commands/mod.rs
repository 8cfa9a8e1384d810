//! The commands, one file each: flags, work, output.

mod batch;
mod bench;
mod chat;
mod compare;
mod completions;
mod devices;
mod diff;
mod doctor;
mod eval;
mod forge;
mod generate;
mod inspect;
mod licenses;
mod man;
mod placement_plan;
mod plan;
mod run;
mod serve;
mod synth;
mod synthetic;
mod trace;
mod verify;
pub(crate) mod worker;

use crate::{failure::Failure, interrupt::Interrupt};
use clap::Subcommand;

#[derive(Subcommand)]
pub(crate) enum Command {
    Run(run::Run),
    Chat(chat::Chat),
    Generate(generate::Generate),
    Batch(batch::Batch),
    Serve(serve::Serve),
    Forge(forge::Forge),
    Synth(synth::Synth),
    Verify(verify::Verify),
    Trace(trace::Trace),
    Diff(diff::Diff),
    Bench(bench::Bench),
    Eval(eval::Eval),
    Inspect(inspect::Inspect),
    Devices(devices::Devices),
    Doctor(doctor::Doctor),
    Completions(completions::Completions),
    Licenses(licenses::Licenses),
    #[command(hide = true)]
    Man(man::Man),
    #[command(hide = true)]
    Worker(worker::Worker),
}

impl Command {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        match self {
            Self::Run(command) => command.run(interrupt),
            Self::Chat(command) => command.run(interrupt),
            Self::Generate(command) => command.run(interrupt),
            Self::Batch(command) => command.run(interrupt),
            Self::Serve(command) => command.run(interrupt),
            Self::Forge(command) => command.run(interrupt),
            Self::Synth(command) => command.run(interrupt),
            Self::Verify(command) => command.run(interrupt),
            Self::Trace(command) => command.run(interrupt),
            Self::Diff(command) => command.run(),
            Self::Bench(command) => command.run(interrupt),
            Self::Eval(command) => command.run(interrupt),
            Self::Inspect(command) => command.run(interrupt),
            Self::Devices(command) => command.run(),
            Self::Doctor(command) => command.run(interrupt),
            Self::Completions(command) => command.run(),
            Self::Licenses(command) => command.run(),
            Self::Man(command) => command.run(),
            Self::Worker(command) => command.run(),
        }
    }
}
