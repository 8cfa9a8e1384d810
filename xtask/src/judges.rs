//! The server before judges from outside: official clients, schemas validated by another library, a fuzzer of its description.

use crate::{Failure, cargo, root, run, target};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// What is installed, pinned.
const PACKAGES: [&str; 7] = [
    "openai==3.49.0",
    "anthropic==2.8.0",
    "ollama==0.6.3",
    "schemathesis==4.32.5",
    "jsonschema==4.26.0",
    "smg==1.13.0",
    "playwright==1.65.0",
];
const NPM_PACKAGES: [&str; 3] = ["openai@7.53.0", "ai@7.0.169", "@ai-sdk/openai-compatible@3.0.90"];
/// What its description promises: no failure, no status, type or body that is not described.
const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance";

/// A Python with the judges.
pub(crate) fn python() -> Result<PathBuf, Failure> {
    let folder = target().join("assets/judges-1");
    let python = folder.join("bin/python");
    let installed =
        Command::new(&python).args(["-c", "import openai, anthropic, ollama, schemathesis, jsonschema, smg, playwright"]).output();
    if !installed.is_ok_and(|output| output.status.success()) {
        eprintln!("installing the judges of the server …");
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES))?;
    }
    Ok(python)
}

/// Lets all of them judge.
pub(crate) fn judge(python: &Path) -> Result<(), Failure> {
    run(cargo().args(["build", "--workspace", "--profile", "test-opt", "--bin", "qhx"]))?;
    let server = Server::start()?;
    let scripts = root().join("tests/judges");
    run(Command::new(python).arg(scripts.join("clients.py")).arg(&server.address))?;
    run(Command::new("node").arg(node_script(&scripts.join("clients.mjs"))?).arg(&server.address))?;
    run(Command::new(python).arg(scripts.join("schemas.py")).args([&server.address, "200"]))?;
    let mut fuzzer = Command::new(python.with_file_name("schemathesis"));
    fuzzer.args([
        "run",
        &format!("{}/openapi.json", server.address),
        "--checks",
        CHECKS,
        "--max-examples",
        "15",
        "--seed",
        "1",
        "--workers",
        "2",
    ]);
    run(fuzzer.arg("--no-color"))?;
    match chromium() {
        Some(browser) => run(Command::new(python).arg(scripts.join("page.py")).arg(&server.address).arg(browser))?,
        None => eprintln!("not run: the page in a browser, because there is no Chromium"),
    }
    run(Command::new(python).arg(scripts.join("fleet.py")).arg(target().join("test-opt/qhx")))
}

/// A script beside the packages that it uses.
fn node_script(script: &Path) -> Result<PathBuf, Failure> {
    let folder = target().join("assets/judges-npm-1");
    let io = |e: std::io::Error| format!("{}: {e}", folder.display());
    fs::create_dir_all(&folder).map_err(io)?;
    if !folder.join("node_modules/ai").exists() {
        run(Command::new("npm").args(["install", "--silent", "--no-save", "--prefix"]).arg(&folder).args(NPM_PACKAGES))?;
    }
    let copy = folder.join("clients.mjs");
    fs::copy(script, &copy).map_err(io)?;
    Ok(copy)
}

/// The browser, where there is one.
fn chromium() -> Option<PathBuf> {
    ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].into_iter().map(PathBuf::from).find(|path| path.exists())
}

/// A server that ends with this.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start() -> Result<Self, Failure> {
        let mut command = Command::new(target().join("test-opt/qhx"));
        command.args(["serve", "--port", "0", "--context", "1024"]).stdin(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().map_err(|e| format!("cannot start {command:?}: {e}"))?;
        let stderr = process.stderr.take().ok_or("the server has no stderr")?;
        let mut lines = BufReader::new(stderr).lines();
        let address = lines.by_ref().map_while(Result::ok).find_map(|line| Some(line.split_once("listening on ")?.1.trim().to_owned()));
        // Whatever it logs from now on is read, so that it never waits.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        match address {
            Some(address) => Ok(Self { process, address }),
            None => {
                let _ = process.kill();
                Err("the server does not listen".into())
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
