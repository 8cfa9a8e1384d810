//! Any text as a bundle's manifest. What is accepted must come back the same after writing, but for the last digit of decimal numbers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use qhx_bundle::Manifest;

fuzz_target!(|text: &str| {
    if let Ok(manifest) = Manifest::from_json(text) {
        let written = manifest.to_json().expect("a checked manifest can be written");
        let read = Manifest::from_json(&written).expect("and read again");
        // JSON numbers of 17 digits may lose their last bit; only these two fields, which inform, have any.
        let without_decimals = |mut manifest: Manifest| {
            manifest.generation = None;
            manifest.chat.template_arguments.clear();
            manifest
        };
        assert_eq!(without_decimals(read), without_decimals(manifest));
    }
});
