//! `qhx forge --compare`: several precisions of a checkpoint side by side.

use crate::{
    failure::Failure,
    interrupt::Interrupt,
    output,
    progress::GateBar,
    table::{Align, Table},
    units::show_bytes,
};
use qhx::{
    Error,
    compare::{CompareOptions, Compared, compare, write_page},
    eval::read_text,
};
use qhx_bundle::BundleError;
use qhx_forge::{Calibration, Material, Precision};
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
    process,
};

/// The page's name.
const PAGE: &str = "compare.html";

/// What is compared, and where it goes.
pub(super) struct Comparison<'a> {
    pub(super) source: &'a Path,
    pub(super) precisions: &'a [Precision],
    pub(super) text: Option<&'a Path>,
    /// How weights that become integers are rounded.
    pub(super) calibration: Option<Calibration>,
    /// The folder of the bundles and the page; absent: only the page is kept, here.
    pub(super) out: Option<&'a Path>,
    pub(super) replace: bool,
    pub(super) json: bool,
}

/// What is printed with `--json`.
#[derive(Serialize)]
struct Report<'a> {
    page: &'a Path,
    precisions: &'a [Compared],
}

impl Comparison<'_> {
    pub(super) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let text = self.text.map(read_text).transpose()?;
        let page = self.out.map_or_else(|| PathBuf::from(PAGE), |out| out.join(PAGE));
        let material = Material::open(self.source)?;
        let temporary = self.out.is_none().then(Temporary::new).transpose()?;
        let folder = temporary.as_ref().map_or_else(|| self.out.unwrap_or(Path::new(".")), |temporary| &temporary.0);
        if self.out.is_none() {
            output::check_place(&page)?;
        }
        let bar = GateBar::new();
        let compared = compare(
            &material,
            CompareOptions {
                precisions: self.precisions,
                text: text.as_deref(),
                folder,
                calibration: self.calibration.clone(),
                replace: self.replace,
                threads: None,
                cancel: interrupt.cancel().clone(),
                progress: &mut |what, done, all| bar.update(what, done, all),
            },
        );
        drop(bar);
        let compared = compared.map_err(|error| match error {
            error if error.is_cancelled() => Failure::work("cancelled"),
            Error::Bundle(BundleError::Exists(_)) => Failure::from(error).hint("--force replaces bundles that are there already"),
            error => error.into(),
        })?;
        let name = self.source.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy());
        write_page(&page, &name, &compared)?;
        if self.json {
            return output::print_json(&Report { page: &page, precisions: &compared });
        }
        let told = compared.iter().map(|row| format!("{}\n", row.gate.result));
        output::print(&format!("{}\n{}\npage: {}\n", table(&compared), told.collect::<String>(), page.display()))
    }
}

fn table(compared: &[Compared]) -> String {
    let number = Align::Right;
    let mut table = Table::new([
        ("precision", Align::Left),
        ("size", number),
        ("bits", number),
        ("mean KL", number),
        ("99 % KL", number),
        ("flips", number),
        ("perplexity", number),
        ("prefill tok/s", number),
        ("decode tok/s", number),
        ("gate", Align::Left),
    ]);
    for row in compared {
        table.row([
            row.precision.clone(),
            show_bytes(row.bytes),
            format!("{:.2}", row.bits_per_weight),
            format!("{:.5}", row.against.kl_mean),
            format!("{:.5}", row.against.kl_p99),
            format!("{:.2} %", 100.0 * row.against.flips),
            format!("{:.3}", row.perplexity),
            format!("{:.0}", row.prefill_tokens_per_second),
            format!("{:.1}", row.decode_tokens_per_second),
            if row.gate.passed { "passed" } else { "failed" }.into(),
        ]);
    }
    table.render()
}

/// A folder that is gone when nobody needs it any more.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Result<Self, Failure> {
        let folder = std::env::temp_dir().join(format!("qhx-compare-{}", process::id()));
        fs::create_dir(&folder).map_err(|error| {
            Failure::work(format!("cannot create {}: {error}", folder.display())).hint("--out DIR makes the bundles in a folder of yours")
        })?;
        Ok(Self(folder))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // What cannot be removed is in the system's folder for that.
        let _ = fs::remove_dir_all(&self.0);
    }
}
