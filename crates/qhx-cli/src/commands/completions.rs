//! `qhx completions`: what a shell needs to complete the command line.

use crate::{Cli, failure::Failure, output};
use clap::{Args, CommandFactory};
use clap_complete::{Shell, generate};

/// Print a script that completes qhx's commands and flags in a shell
#[derive(Args)]
#[command(after_help = "Examples:\n  qhx completions bash > ~/.local/share/bash-completion/completions/qhx\n  \
                        qhx completions zsh > \"${fpath[1]}/_qhx\"\n  \
                        qhx completions fish > ~/.config/fish/completions/qhx.fish\n  \
                        qhx completions powershell >> $PROFILE")]
pub(crate) struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let mut script = Vec::new();
        generate(self.shell, &mut Cli::command(), "qhx", &mut script);
        output::print_as_is(&String::from_utf8_lossy(&script))
    }
}
