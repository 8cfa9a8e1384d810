//! The model that is part of the library itself: small, and enough to answer on a machine that has nothing else.

use crate::Error;
use qhx_bundle::Bundle;
use std::path::Path;

/// The reference under which it is found.
pub const NAME: &str = "builtin";

/// Whether a reference is its name, and not something that exists.
pub fn is_meant(reference: &Path) -> bool {
    cfg!(feature = "builtin") && reference.as_os_str() == NAME && !reference.exists()
}

/// Opens it.
#[cfg(feature = "builtin")]
pub fn open() -> Result<Bundle, Error> {
    use qhx_bundle::BundlePath;
    let file =
        |(name, bytes): &(&str, &'static [u8])| Some((BundlePath::new(*name).ok()?, qhx_ir::Bytes::new(std::sync::Arc::new(*bytes))));
    Ok(Bundle::from_memory(FILES.iter().filter_map(file))?)
}

/// Says that this build has none.
#[cfg(not(feature = "builtin"))]
pub fn open() -> Result<Bundle, Error> {
    Err(Error::NoBuiltin)
}

/// Bytes at an address that weights may have.
#[cfg(feature = "builtin")]
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

#[cfg(feature = "builtin")]
macro_rules! files {
    ($($name:literal)*) => {
        [$(($name, {
            static FILE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!("../builtin/", $name)));
            &FILE.0
        })),*]
    };
}

/// The files of the bundle in `builtin/`, which `cargo xtask builtin` makes from `demo/qwen3_5`.
#[cfg(feature = "builtin")]
static FILES: [(&str, &[u8]); 8] = files! {
    "qhx.json" "programs/mtp.json" "programs/text.json" "weights/00001-of-00001.safetensors" "tokenizer.json" "chat_template.jinja" "parity.json" "parity.html"
};
