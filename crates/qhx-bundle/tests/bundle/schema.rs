//! The JSON Schema in `docs/` is the one of the types. After a change, `QHX_BLESS=1 cargo test -p qhx-bundle schema` writes it anew.

use qhx_bundle::Manifest;
use std::{env, fs, path::PathBuf};

#[test]
fn the_published_schema_is_current() {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/manifest.schema.json");
    let text = serde_json::to_string_pretty(&schemars::schema_for!(Manifest)).unwrap() + "\n";
    if env::var_os("QHX_BLESS").is_some() {
        fs::write(&file, &text).unwrap();
    }
    let published = fs::read_to_string(&file).unwrap_or_default();
    assert!(published == text, "docs/manifest.schema.json is stale: run `QHX_BLESS=1 cargo test -p qhx-bundle schema`");
}
