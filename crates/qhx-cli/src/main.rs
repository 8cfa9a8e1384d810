//! `qhx`.

fn main() -> std::process::ExitCode {
    qhx_cli::qhx()
}
