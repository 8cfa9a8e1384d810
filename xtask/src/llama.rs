//! The stock llama.cpp, to compare with: prebuilt libraries for every kind of x86-64 CPU, of which it picks the best by itself, and its own tools, compiled against them.
//!
//! Both come from npm: `node-llama-cpp` holds the source as a git bundle, `@node-llama-cpp/linux-x64` the libraries. They stay in the target folder.

use crate::{Failure, assets, run};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Both packages have it; their llama.cpp is v0.5.0.
const VERSION: &str = "3.22.1";
const LIBRARIES: [&str; 4] = ["libllama-common.so", "libllama.v0.5.0.so", "libggml.v0.5.0.so", "libggml-base.so"];

/// The tool whose source is in `tools/NAME`, beside the libraries. Needs npm, git, tar and a C++ compiler the first time.
pub(crate) fn tool(name: &str) -> Result<PathBuf, Failure> {
    let (source, libraries) = fetched()?;
    let tools = source.join("tools").join(name);
    let files = fs::read_dir(&tools).map_err(|e| format!("{}: {e}", tools.display()))?;
    let files = files.filter_map(Result::ok).map(|file| file.path()).filter(|path| path.extension().is_some_and(|end| end == "cpp"));
    compiled(&source, &libraries, name, files.collect())
}

/// The example program of one source file, `examples/NAME/NAME.cpp`.
pub(crate) fn example(name: &str) -> Result<PathBuf, Failure> {
    let (source, libraries) = fetched()?;
    let file = source.join("examples").join(name).join(format!("{name}.cpp"));
    compiled(&source, &libraries, name, vec![file])
}

/// A program of ours that uses its libraries, from one source file: compiled anew where that is newer.
pub(crate) fn program(file: &Path) -> Result<PathBuf, Failure> {
    let (source, libraries) = fetched()?;
    let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let changed = |path: &Path| fs::metadata(path).and_then(|facts| facts.modified());
    let old = libraries.join(&name);
    if changed(file).is_ok_and(|ours| changed(&old).is_ok_and(|theirs| theirs < ours)) {
        fs::remove_file(&old).map_err(|e| format!("{}: {e}", old.display()))?;
    }
    compiled(&source, &libraries, &name, vec![file.to_owned()])
}

/// Chat templates of published models, which its own tests hold.
pub(crate) fn templates() -> Result<PathBuf, Failure> {
    Ok(fetched()?.0.join("models/templates"))
}

/// The source and the libraries.
fn fetched() -> Result<(PathBuf, PathBuf), Failure> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err("llama.cpp's prebuilt libraries are fetched for Linux on x86-64 only".into());
    }
    let folder = assets::place(&format!("node-llama-cpp-{VERSION}"));
    if !folder.exists() {
        eprintln!("fetching llama.cpp (47 MB) …");
        fetch(&folder)?;
    }
    Ok((folder.join("source"), folder.join("libraries/package/bins/linux-x64")))
}

/// A program that is compiled where it is not there yet.
fn compiled(source: &Path, libraries: &Path, name: &str, files: Vec<PathBuf>) -> Result<PathBuf, Failure> {
    let tool = libraries.join(name);
    if !tool.exists() {
        eprintln!("compiling llama.cpp's {name} …");
        let mut compiler = Command::new("c++");
        compiler.args(["-O1", "-std=c++17", "-Wl,-rpath,$ORIGIN", "-o"]).arg(libraries.join(format!("{name}.partial")));
        for headers in ["include", "ggml/include", "common", "vendor"] {
            compiler.arg("-I").arg(source.join(headers));
        }
        compiler.args(files).arg("-L").arg(libraries).args(LIBRARIES.map(|library| format!("-l:{library}")));
        run(&mut compiler)?;
        fs::rename(libraries.join(format!("{name}.partial")), &tool).map_err(|e| format!("{}: {e}", tool.display()))?;
    }
    Ok(tool)
}

/// Fetches and unpacks both packages; the folder appears only when it is complete.
fn fetch(folder: &Path) -> Result<(), Failure> {
    let download = folder.with_extension("download");
    let io = |e: std::io::Error| format!("{}: {e}", download.display());
    let _ = fs::remove_dir_all(&download);
    for (part, package) in [("main", "node-llama-cpp"), ("libraries", "@node-llama-cpp/linux-x64")] {
        let place = download.join(part);
        fs::create_dir_all(&place).map_err(io)?;
        run(Command::new("npm").args(["pack", "--silent", &format!("{package}@{VERSION}")]).current_dir(&place))?;
        let archive = fs::read_dir(&place).map_err(io)?.next().ok_or_else(|| format!("npm fetched nothing for {package}"))?.map_err(io)?;
        run(Command::new("tar").arg("-xzf").arg(archive.path()).arg("-C").arg(&place))?;
    }
    let bundle = download.join("main/package/llama/gitRelease.bundle");
    run(Command::new("git")
        .args(["-c", "advice.detachedHead=false", "-c", "init.defaultBranch=main", "clone", "--quiet"])
        .arg(bundle)
        .arg(download.join("source")))?;
    fs::remove_dir_all(download.join("main")).map_err(io)?;
    fs::rename(&download, folder).map_err(io)
}
