//! `qhx man`: the help texts as man pages, for packages. Not among the commands that help lists.

use crate::{Cli, failure::Failure};
use clap::{Args, CommandFactory};
use std::{fs, path::PathBuf};

/// Write man pages: qhx.1 and one page for each command
#[derive(Args)]
#[command(after_help = "Example:\n  qhx man --out target/man && man target/man/qhx-run.1")]
pub(crate) struct Man {
    /// Folder to write to; made if it does not exist
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl Man {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let cannot = |error| Failure::work(format!("cannot write man pages to {}: {error}", self.out.display()));
        fs::create_dir_all(&self.out).map_err(cannot)?;
        clap_mangen::generate_to(Cli::command().disable_help_subcommand(true), &self.out).map_err(cannot)
    }
}
