//! Running a template that nobody vouches for.
//!
//! The template language itself bounds steps and calls. What is bounded here is what single steps can do: rendering has a thread of its own
//! with room for deeply nested values, the output has a limit, and so has the time.

use super::chat::ChatError;
use super::jinja::{Raised, TEMPLATE};
use minijinja::{Environment, ErrorKind, Value};
use std::io::{self, Write};
use std::sync::mpsc;
use std::time::Duration;

/// Longest prompt that a template may write.
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Enough for values nested as deep as the allowed steps can build them. Only touched pages cost memory.
const STACK_BYTES: usize = 64 << 20;
/// Published templates take milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Renders the environment's template with these variables, in at most `steps` of its own instructions.
pub(super) fn render(mut environment: Environment<'static>, variables: Value, steps: u64) -> Result<String, ChatError> {
    environment.set_fuel(Some(steps));
    let (sender, receiver) = mpsc::sync_channel(1);
    let work = move || {
        let mut output = Bounded::default();
        let rendered =
            environment.get_template(TEMPLATE).and_then(|template| template.render_captured_to(variables, &mut output).map(drop));
        // Dropping the environment may take the deep stack too, so the answer goes out from here; nobody may be waiting any more.
        let _ = sender.send(match rendered {
            Ok(()) => String::from_utf8(output.bytes).map_err(|_| ChatError::Render { problem: "its output is not UTF-8".to_owned() }),
            Err(_) if output.full => {
                Err(ChatError::Render { problem: format!("the prompt would have more than {MAX_OUTPUT_BYTES} bytes") })
            }
            Err(error) => Err(explain(&error, steps)),
        });
    };
    let thread = std::thread::Builder::new().name("chat template".to_owned()).stack_size(STACK_BYTES).spawn(work);
    thread.map_err(|error| ChatError::Render { problem: format!("no thread to run it in: {error}") })?;
    match receiver.recv_timeout(PATIENCE) {
        Ok(rendered) => rendered,
        Err(mpsc::RecvTimeoutError::Timeout) => Err(ChatError::Endless { limit: format!("{} seconds", PATIENCE.as_secs()) }),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(ChatError::Render { problem: "the template engine failed on it".to_owned() }),
    }
}

fn explain(error: &minijinja::Error, steps: u64) -> ChatError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            return ChatError::Refused { message: message.clone() };
        }
        if current.downcast_ref::<minijinja::Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return ChatError::Endless { limit: format!("{steps} steps") };
        }
        cause = current.source();
    }
    ChatError::Render { problem: error.to_string() }
}

#[derive(Default)]
struct Bounded {
    bytes: Vec<u8>,
    full: bool,
}

impl Write for Bounded {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        if piece.len() > MAX_OUTPUT_BYTES - self.bytes.len() {
            self.full = true;
            return Err(io::Error::other("the output is full"));
        }
        self.bytes.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
