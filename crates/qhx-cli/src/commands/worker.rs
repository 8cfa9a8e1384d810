//! `qhx worker`: the process that a GPU's driver runs in. qhx starts it itself; not among the commands that help lists.

use crate::failure::Failure;
use clap::Args;
use qhx_runtime::{isolate::Worker as Process, registry};
use std::{env, io};

/// Serve a GPU to another qhx process over stdin and stdout
///
/// `qhx run --isolate` and the other commands that run models start it; it ends with them.
#[derive(Args)]
#[command(after_help = "Example:\n  qhx worker")]
pub(crate) struct Worker {}

impl Worker {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        registry::work(io::stdin(), io::stdout()).map_err(|e| Failure::work(format!("the connection to the other process failed: {e}")))
    }
}

/// The command that starts it: this program again.
pub(crate) fn command() -> Result<Process, Failure> {
    let program =
        env::current_exe().map_err(|e| Failure::work(format!("cannot find this program, to start a process for the GPU: {e}")))?;
    Ok(Process { program, arguments: vec!["worker".into()] })
}
