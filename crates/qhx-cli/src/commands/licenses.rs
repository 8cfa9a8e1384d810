//! `qhx licenses`: the notices of the crates in this binary. `cargo xtask licenses` collects them from the crates.

use crate::{failure::Failure, output};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// The crates of all systems that the binary is built for.
const LICENSES: &str = include_str!("../../licenses.json");

/// Print the licences of qhx and of everything in this binary
#[derive(Args)]
#[command(after_help = "Examples:\n  qhx licenses | less\n  qhx licenses --json > licenses.json")]
pub(crate) struct Licenses {
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Deserialize, Serialize)]
struct Notices {
    crates: Vec<Crate>,
    /// Each text once; crates name them by number, from 0.
    texts: Vec<String>,
}

#[derive(Deserialize, Serialize)]
struct Crate {
    name: String,
    version: String,
    /// The expression of SPDX that the crate gives.
    license: String,
    /// Whom a text names that is otherwise the same for many.
    copyright: Vec<String>,
    texts: Vec<usize>,
}

impl Licenses {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let notices: Notices =
            serde_json::from_str(LICENSES).map_err(|error| Failure::work(format!("the notices in this binary cannot be read: {error}")))?;
        match self.json {
            true => output::print_json(&notices),
            false => output::print(&text(&notices)),
        }
    }
}

fn text(notices: &Notices) -> String {
    let mut page = format!(
        "qhx {} is licensed under {}. It contains these crates; the source of each is at https://crates.io/crates/NAME.\n\n",
        env!("CARGO_PKG_VERSION"),
        env!("CARGO_PKG_LICENSE")
    );
    for of in &notices.crates {
        let numbers: Vec<String> = of.texts.iter().map(|text| (text + 1).to_string()).collect();
        let _ = writeln!(page, "{} {}: {} (text {})", of.name, of.version, of.license, numbers.join(", "));
    }
    for (number, text) in notices.texts.iter().enumerate() {
        let _ = writeln!(page, "\n──── Text {}\n", number + 1);
        for of in notices.crates.iter().filter(|of| of.texts.contains(&number)) {
            let _ = writeln!(page, "{} {}{}", of.name, of.version, of.copyright.iter().map(|line| format!("; {line}")).collect::<String>());
        }
        let _ = writeln!(page, "\n{text}");
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crate_has_a_text() {
        let notices: Notices = serde_json::from_str(LICENSES).unwrap();
        for of in &notices.crates {
            assert!(!of.texts.is_empty() && of.texts.iter().all(|text| *text < notices.texts.len()), "{}", of.name);
        }
        let page = text(&notices);
        assert!(page.contains("\nserde 1.") && page.contains("; Copyright (c) ") && page.contains("Mozilla Public License"), "{page}");
    }
}
