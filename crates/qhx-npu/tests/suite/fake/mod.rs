//! Libraries that pretend to be QNN, made by the C compiler.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// What a pretended library says of itself.
pub(crate) struct Fake {
    /// QNN's interface, `2, 40`.
    pub(crate) core: (u32, u32),
    /// 6 is the Hexagon processor.
    pub(crate) backend: u32,
    pub(crate) build: &'static str,
    pub(crate) providers: u32,
}

impl Default for Fake {
    fn default() -> Self {
        Self { core: (2, 40), backend: 6, build: "v2.51.0.1", providers: 1 }
    }
}

impl Fake {
    /// Builds it as `libQnnHtp.so` in a folder. Whoever asks for its interface sees it print to standard output.
    pub(crate) fn build(&self, folder: &Path) -> PathBuf {
        let Self { core: (major, minor), backend, build, providers } = self;
        let source = format!(
            r#"
            #include <stdio.h>
            typedef unsigned long long (*function)(void);
            static unsigned long long build_id(const char **id) {{ *id = "{build}"; return 0; }}
            static unsigned long long fails(void) {{ return 1000; }}
            static struct {{
                unsigned backend; const char *name; unsigned version[6]; function table[80];
            }} interface = {{ {backend}, "FAKE", {{ {major}, {minor}, 0, 5, 0, 0 }}, {{ 0 }} }};
            static const void *list[1] = {{ &interface }};
            unsigned long long QnnInterface_getProviders(const void ***providers, unsigned *count) {{
                printf("printed by the library\n");
                fputs("and put by it\n", stdout);
                for (int slot = 0; slot < 80; slot++) interface.table[slot] = fails;
                interface.table[4] = (function)build_id;
                *providers = list;
                *count = {providers};
                return 0;
            }}
            "#
        );
        let file = folder.join("libQnnHtp.so");
        compile(&source, &file);
        file
    }
}

/// Builds a shared library.
pub(crate) fn compile(source: &str, library: &Path) {
    let file = library.with_extension("c");
    fs::write(&file, source).unwrap();
    let done = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([library, &file]).output().expect("a C compiler, as `cc`");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}
