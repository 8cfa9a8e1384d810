//! The model that is part of `qhx` itself: small, and enough to answer on a machine that has nothing else.

use crate::failure::Failure;
use qhx_bundle::{Bundle, BundlePath};
use qhx_ir::Bytes;
use std::{path::Path, sync::Arc};

/// The name under which commands that need a BUNDLE find it.
pub(crate) const NAME: &str = "builtin";

/// What the model knows, and what to do for a real one: told whenever it is used.
pub(crate) const NOTE: &str = "using the built-in demo model, which knows capitals and regions of countries, small sums and short stories. \
    For a real model: qhx run MODEL \"PROMPT\", where MODEL is a bundle, a Hugging Face folder or a GGUF file";

/// Bytes at an address that weights may have.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

macro_rules! files {
    ($($name:literal)*) => {
        [$(($name, {
            static FILE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!("../builtin/", $name)));
            &FILE.0
        })),*]
    };
}

/// The files of the bundle in `builtin/`, which `cargo xtask builtin` makes from `demo/qwen3_5`.
static FILES: [(&str, &[u8]); 7] = files! {
    "qhx.json" "programs/text.json" "weights/00001-of-00001.safetensors" "tokenizer.json" "chat_template.jinja" "parity.json" "parity.html"
};

/// Whether a path is its name, and not something that exists.
pub(crate) fn is_meant(path: &Path) -> bool {
    path.as_os_str() == NAME && !path.exists()
}

/// Opens it.
pub(crate) fn open() -> Result<Bundle, Failure> {
    let file = |(name, bytes): &(&str, &'static [u8])| Some((BundlePath::new(*name).ok()?, Bytes::new(Arc::new(*bytes))));
    Ok(Bundle::from_memory(FILES.iter().filter_map(file))?)
}
