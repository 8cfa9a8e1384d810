//! Texts that a person names by their files.

use crate::failure::Failure;
use qhx::json;
use qhx_bundle::files::read_given;
use serde_json::Value;
use std::path::Path;

/// The longest text that is read from a file or from stdin: far more than any model's context holds.
pub(crate) const MAX_INPUT_BYTES: u64 = 16 << 20;

/// A whole text file; `-` is stdin.
pub(crate) fn read_text(path: &Path) -> Result<String, Failure> {
    let bytes = read_given(path, MAX_INPUT_BYTES)?;
    String::from_utf8(bytes).map_err(|error| {
        let place = if path.as_os_str() == "-" { "stdin".into() } else { path.display().to_string() };
        let at = error.utf8_error().valid_up_to();
        Failure::work(format!("{place} is not valid UTF-8 text: byte {at} begins no character"))
    })
}

/// A file of JSON.
pub(crate) fn read_json(path: &Path) -> Result<Value, Failure> {
    json::read(&read_text(path)?).map_err(|error| Failure::work(format!("{} is not valid JSON: {error}", path.display())))
}
