//! `qhx serve`: the HTTP server.

#[cfg(unix)]
use crate::supervise;
use crate::{
    environment,
    failure::Failure,
    flags::{ExecutionFlags, count, count_or_none},
    heap,
    interrupt::Interrupt,
    log, output,
    texts::read_text,
};
use clap::Args;
use qhx_runtime::LoadOptions;
use qhx_server::{Server, ServerError, ServerOptions};
use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    path::PathBuf,
    time::Duration,
};

/// The most answers at once.
const MAX_PARALLEL: u64 = 256;
/// The most of anything that waits.
const MAX_WAITING: u64 = 1 << 20;

/// Serve models over HTTP
///
/// Speaks the APIs of OpenAI, Anthropic and ollama, and has a page for browsers. Listens on this machine only; another address needs an API key. Models are loaded when they are first
/// asked for, the first one at once. SIGTERM or Ctrl-C finishes running answers and ends the server. With --isolate, a server that crashes is started again at the same address.
#[derive(Args)]
#[command(after_help = "Examples:\n  qhx serve smol\n  qhx serve smol ./Qwen3-0.6B --port 9000 --api-key \"$KEY\" --host 0.0.0.0")]
pub(crate) struct Serve {
    /// Bundles, Hugging Face folders or GGUF files [default: the built-in demo model]
    #[arg(value_name = "MODEL")]
    models: Vec<PathBuf>,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0: any free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// A key that requests must bring; may be repeated. Visible to other users of this machine: prefer --api-key-file
    #[arg(long, value_name = "KEY", help_heading = "Access")]
    api_key: Vec<String>,
    /// A file with one key on each line
    #[arg(long, value_name = "FILE", help_heading = "Access")]
    api_key_file: Option<PathBuf>,
    /// Listen on other addresses than this machine's own without a key: anybody who can reach it can use it
    #[arg(long, help_heading = "Access")]
    insecure: bool,
    /// Let requests with different keys share cached prefixes: response times then reveal what others have asked
    #[arg(long, help_heading = "Access")]
    share_prefixes: bool,
    /// A folder of which messages may name image and sound files [default: media come with the messages]
    #[arg(long, value_name = "FOLDER", help_heading = "Access")]
    media: Option<PathBuf>,
    /// A host that images and sounds may be fetched from, HOST or HOST:PORT; may be repeated [default: nothing is fetched]
    #[arg(long, value_name = "HOST", help_heading = "Access")]
    fetch_from: Vec<String>,
    /// Log the text of prompts
    #[arg(long, help_heading = "Access")]
    log_prompts: bool,
    /// How many answers are made at once, for each model
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = count(MAX_PARALLEL), help_heading = "Limits")]
    parallel: usize,
    /// How many requests may wait, for each model; further ones are answered with 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count(MAX_WAITING), help_heading = "Limits")]
    queue: usize,
    /// How many connections may be open
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = count(MAX_WAITING), help_heading = "Limits")]
    connections: usize,
    /// The largest request, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 32, value_parser = count(1 << 12), help_heading = "Limits")]
    max_body: usize,
    /// Memory for all loaded models together, in MiB: beyond it, the least recently used idle one is unloaded
    #[arg(long, value_name = "MIB", value_parser = count(1 << 30), help_heading = "Limits")]
    memory: Option<usize>,
    /// Memory for the computed state of prompts, per model, in MiB: requests that begin in the same way start from there [default: a sixteenth of the free memory, at most 2048]
    #[arg(long, value_name = "MIB", value_parser = count_or_none(1 << 30), help_heading = "Limits")]
    prefix_cache: Option<usize>,
    /// Unload a model that nobody has used for so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = count(1 << 30), help_heading = "Limits")]
    keep_alive: Option<usize>,
    /// Seconds that running answers may take to finish when the server is stopped
    #[arg(long, value_name = "SECONDS", default_value_t = 30, help_heading = "Limits")]
    drain: u64,
    #[command(flatten)]
    execution: ExecutionFlags,
    /// Serve on the socket of the process that started this one
    #[cfg(unix)]
    #[arg(long, hide = true)]
    supervised: bool,
}

/// Rows whose logits are computed at once where a prompt is scored.
const SCORED_ROWS: usize = 32;

impl Serve {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let keys = self.keys()?;
        if !self.host.is_loopback() && keys.is_empty() && !self.insecure {
            let message = format!("{} can be reached from other machines, and no API key is set", self.host);
            return Err(Failure::usage(message).hint("set one with --api-key-file or --api-key, or say --insecure"));
        }
        let mut options = ServerOptions::default();
        options.models = if self.models.is_empty() { vec!["builtin".into()] } else { self.models.clone() };
        options.load = LoadOptions { sessions: self.parallel, wanted: SCORED_ROWS, ..self.execution.load_options()? };
        options.engine.queue = self.queue;
        if let Some(mebibytes) = self.prefix_cache {
            options.engine.prefix_bytes = Some((mebibytes as u64) << 20);
        }
        options.places = environment::places();
        options.give_back = heap::give_back;
        options.keys = keys;
        options.share_prefixes = self.share_prefixes;
        options.media_folder = self.media.clone();
        options.media_hosts = self.fetch_from.clone();
        options.log_prompts = self.log_prompts;
        options.connections = self.connections;
        options.body_bytes = self.max_body << 20;
        options.memory_budget = self.memory.map(|mebibytes| (mebibytes as u64) << 20);
        options.keep_alive = self.keep_alive.map(|seconds| Duration::from_secs(seconds as u64));
        options.drain = Duration::from_secs(self.drain);
        #[cfg(unix)]
        let listener = match (self.supervised, options.load.gpu.isolate.is_some()) {
            (true, _) => supervise::inherited_socket(interrupt)?,
            (false, true) => return supervise::supervise(&self.listen()?, options.drain, interrupt),
            (false, false) => self.listen()?,
        };
        #[cfg(not(unix))]
        let listener = self.listen()?;
        log::to_stderr();
        heap::keep_little();
        let server = Server::on(listener, options).map_err(explain)?;
        let address = server.address();
        server.run(interrupt.cancel().clone(), || output::note(&format!("listening on http://{address}"))).map_err(explain)?;
        Ok(())
    }

    fn listen(&self) -> Result<TcpListener, Failure> {
        let address = SocketAddr::new(self.host, self.port);
        TcpListener::bind(address).map_err(|source| explain(ServerError::Listen { address: address.to_string(), source }))
    }

    fn keys(&self) -> Result<Vec<String>, Failure> {
        let mut keys = self.api_key.clone();
        if let Some(file) = &self.api_key_file {
            let text = read_text(file)?;
            keys.extend(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned));
            if keys.is_empty() {
                return Err(Failure::usage(format!("{} has no key in it", file.display())));
            }
        }
        match keys.iter().any(String::is_empty) {
            true => Err(Failure::usage("an API key is empty")),
            false => Ok(keys),
        }
    }
}

fn explain(error: ServerError) -> Failure {
    match error {
        ServerError::Listen { .. } => Failure::from(error).hint("choose another port with --port; 0 takes any that is free"),
        error => error.into(),
    }
}
