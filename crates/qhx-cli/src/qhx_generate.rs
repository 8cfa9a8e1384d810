//! `qhx_generate MANIFEST libQnnHtp.so libQnnSystem.so ARTIFACTS_ROOT MAX_NEW "PROMPT" [MEDIA]`.

fn main() -> std::process::ExitCode {
    qhx_cli::qhx_generate()
}
