//! Any text as a bundle's manifest. What is accepted must come back the same after writing.
#![no_main]

use libfuzzer_sys::fuzz_target;
use qhx_bundle::Manifest;

fuzz_target!(|text: &str| {
    if let Ok(manifest) = Manifest::from_json(text) {
        let written = manifest.to_json().expect("a checked manifest can be written");
        let read = Manifest::from_json(&written).expect("and read again");
        assert_eq!(read, manifest);
    }
});
