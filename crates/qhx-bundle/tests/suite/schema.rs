//! What `docs/` says about the manifest is true: the example is a manifest, and the JSON Schema is the one of the types. After a change, `QHX_BLESS=1 cargo test -p qhx-bundle schema` writes it anew.

use qhx_bundle::Manifest;
use std::{fs, path::PathBuf};

#[cfg(feature = "schema")]
#[test]
fn the_published_schema_is_current() {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/manifest.schema.json");
    let text = serde_json::to_string_pretty(&schemars::schema_for!(Manifest)).unwrap() + "\n";
    if std::env::var_os("QHX_BLESS").is_some() {
        fs::write(&file, &text).unwrap();
    }
    let published = fs::read_to_string(&file).unwrap_or_default();
    assert!(published == text, "docs/manifest.schema.json is stale: run `QHX_BLESS=1 cargo test -p qhx-bundle schema`");
}

#[test]
fn the_documented_example_is_a_manifest() {
    let text = fs::read_to_string(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/bundle.md")).unwrap();
    let example = text.split("```json\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let manifest = Manifest::from_json(example).unwrap();
    assert_eq!(manifest.named_files().count(), manifest.files.len());
}
