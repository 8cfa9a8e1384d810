//! Messages from a person at a terminal, with editing and a history, or from a pipe, line by line.

use crate::{environment::places, failure::Failure, output, texts::MAX_INPUT_BYTES};
use rustyline::{Config, DefaultEditor, error::ReadlineError};
use std::{
    fs,
    io::{self, BufRead, IsTerminal, Read},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
};

/// How many messages the history keeps, and how long they may be.
const HISTORY_ENTRIES: usize = 1000;
const HISTORY_ENTRY_BYTES: usize = 16 << 10;

const PROMPT: &str = "› ";
/// Stands before the further lines of a message.
const MORE: &str = "… ";
/// Begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";

/// Asks a terminal to mark where a paste begins and ends, and not to. The editor does so only while it reads; pastes come at other times too.
const MARK_PASTES: &str = "\x1b[?2004h";
const LEAVE_PASTES: &str = "\x1b[?2004l";
/// Whether the terminal marks pastes now.
static MARKED: AtomicBool = AtomicBool::new(false);

/// Where lines come from.
pub(crate) enum Lines {
    Terminal { editor: Box<DefaultEditor>, history: Option<PathBuf> },
    Pipe,
}

/// What comes next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    Text {
        text: String,
        /// Whether it was written between quotes: then it is never a command.
        quoted: bool,
    },
    /// Ctrl-C while nothing was running.
    Interrupted,
    /// Ctrl-D, or the end of the pipe.
    End,
}

impl Lines {
    pub(crate) fn of_pipe() -> Self {
        Self::Pipe
    }

    /// Lines of stdin. At a terminal they are edited, with what was entered before in the user's cache if `keep_history`.
    pub(crate) fn of_stdin(keep_history: bool) -> Result<Self, Failure> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Pipe);
        }
        let cannot = |error: ReadlineError| Failure::work(format!("cannot use the terminal: {error}"));
        let config = Config::builder().bracketed_paste(true).max_history_size(HISTORY_ENTRIES).map_err(cannot)?.build();
        let mut editor = Box::new(DefaultEditor::with_config(config).map_err(cannot)?);
        let history = keep_history.then(history_file).flatten();
        // The first time there is none yet.
        history.iter().for_each(|file| _ = editor.load_history(file));
        Ok(Self::Terminal { editor, history })
    }

    /// Whether a person types.
    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
    }

    /// The next message: a line, a paste, lines that end in `\` with the one after them, or what stands between `"""` and `"""`.
    pub(crate) fn next(&mut self) -> Result<Line, Failure> {
        let message = message(&mut |prompt| self.line(prompt));
        if self.is_terminal() && io::stdout().is_terminal() {
            MARKED.store(true, Ordering::Relaxed);
            output::command_terminal(MARK_PASTES)?;
        }
        let message = message?;
        if let (Self::Terminal { editor, history }, Line::Text { text, .. }) = (self, &message)
            && text.len() <= HISTORY_ENTRY_BYTES
        {
            // Without a history only the arrow keys lose some of their use.
            let is_new = editor.add_history_entry(text).unwrap_or(false);
            history.iter().filter(|_| is_new).for_each(|file| _ = editor.append_history(file));
        }
        Ok(message)
    }

    /// One line, or one paste of several.
    fn line(&mut self, prompt: &str) -> Result<Raw, Failure> {
        match self {
            Self::Pipe => line_of(&mut io::stdin().lock()),
            Self::Terminal { editor, .. } => loop {
                match editor.readline(prompt) {
                    Ok(line) => return Ok(Raw::Line(line)),
                    Err(ReadlineError::Interrupted) => return Ok(Raw::Interrupted),
                    Err(ReadlineError::Eof) => return Ok(Raw::End),
                    Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
                        output::note("the line was dropped: it holds bytes that are not UTF-8; enter it again");
                    }
                    Err(error) => return Err(Failure::work(format!("cannot read from the terminal: {error}"))),
                }
            },
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        leave_terminal();
    }
}

/// Leaves the terminal as it was found, also where the process ends without coming back here.
pub(crate) fn leave_terminal() {
    if MARKED.swap(false, Ordering::Relaxed) {
        // A terminal that is gone needs nothing.
        let _ = output::command_terminal(LEAVE_PASTES);
    }
}

/// One line as it is read.
enum Raw {
    Line(String),
    Interrupted,
    End,
}

/// Puts lines together to a message.
fn message(next: &mut dyn FnMut(&str) -> Result<Raw, Failure>) -> Result<Line, Failure> {
    let mut text = match next(PROMPT)? {
        Raw::Line(line) => line,
        Raw::Interrupted => return Ok(Line::Interrupted),
        Raw::End => return Ok(Line::End),
    };
    // A paste is a message as it is.
    let is_paste = text.contains('\n');
    let quoted = match text.trim_start().strip_prefix(QUOTES) {
        Some(rest) if !is_paste => {
            text = rest.to_owned();
            true
        }
        _ => false,
    };
    loop {
        let ended = if quoted { text.trim_end().strip_suffix(QUOTES) } else { None };
        if let Some(inside) = ended {
            return Ok(Line::Text { text: inside.to_owned(), quoted });
        }
        if !quoted {
            match text.strip_suffix('\\').filter(|_| !is_paste) {
                Some(line) => text = line.to_owned(),
                None => return Ok(Line::Text { text, quoted }),
            }
        }
        match next(MORE)? {
            Raw::Line(line) => text = text + "\n" + &line,
            Raw::Interrupted => return Ok(Line::Interrupted),
            Raw::End => return Ok(Line::Text { text, quoted }),
        }
        if text.len() as u64 > MAX_INPUT_BYTES {
            return Err(too_long());
        }
    }
}

/// The next line of a pipe, without its end. Bytes that are no text are replaced.
fn line_of(input: &mut dyn BufRead) -> Result<Raw, Failure> {
    let mut bytes = Vec::new();
    let read = input
        .take(MAX_INPUT_BYTES + 1)
        .read_until(b'\n', &mut bytes)
        .map_err(|error| Failure::work(format!("cannot read stdin: {error}")))?;
    if read == 0 {
        return Ok(Raw::End);
    }
    if bytes.len() as u64 > MAX_INPUT_BYTES {
        return Err(too_long());
    }
    let line = String::from_utf8(bytes).unwrap_or_else(|error| {
        output::note("note: stdin has bytes that are not UTF-8; they are replaced by \u{fffd}");
        String::from_utf8_lossy(error.as_bytes()).into_owned()
    });
    let line = line.strip_suffix('\n').map_or(&line[..], |line| line.strip_suffix('\r').unwrap_or(line));
    Ok(Raw::Line(line.to_owned()))
}

fn too_long() -> Failure {
    Failure::work(format!("a message may have {MAX_INPUT_BYTES} bytes, stdin has a longer one"))
}

/// Where the history is kept, for its owner's eyes: the editor makes the file unreadable for others.
fn history_file() -> Option<PathBuf> {
    let cache = places().cache?;
    fs::create_dir_all(&cache).ok()?;
    Some(cache.join("chat_history"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(mut input: &[u8]) -> Vec<Line> {
        let mut all = Vec::new();
        loop {
            match message(&mut |_| line_of(&mut input)).unwrap() {
                Line::End => return all,
                line => all.push(line),
            }
        }
    }

    fn plain(text: &str) -> Line {
        Line::Text { text: text.into(), quoted: false }
    }

    fn quoted(text: &str) -> Line {
        Line::Text { text: text.into(), quoted: true }
    }

    #[test]
    fn lines_of_a_pipe() {
        assert_eq!(messages(b"one\r\n\ntwo"), [plain("one"), plain(""), plain("two")]);
        assert_eq!(messages(b"caf\xe9\nnext\n"), [plain("caf\u{fffd}"), plain("next")]);
    }

    #[test]
    fn messages_of_several_lines() {
        assert_eq!(messages(b"a \\\nb\\\nc\nd\n"), [plain("a \nb\nc"), plain("d")]);
        assert_eq!(messages(b"\"\"\"\n/a\n\nb\\\n\"\"\"\nc\n"), [quoted("\n/a\n\nb\\\n"), plain("c")]);
        assert_eq!(messages(b"\"\"\"one\"\"\"\n\"\"\"two\nthree\"\"\" \n"), [quoted("one"), quoted("two\nthree")]);
        // What is not finished ends with the input.
        assert_eq!(messages(b"\"\"\"a\nb\n"), [quoted("a\nb")]);
        assert_eq!(messages(b"a\\\n"), [plain("a")]);
    }

    #[test]
    fn a_paste_is_taken_as_it_is() {
        let mut lines = vec!["\"\"\"doc\"\"\"\ncode \\", "never"].into_iter();
        let found = message(&mut |_| Ok(Raw::Line(lines.next().unwrap().to_owned()))).unwrap();
        assert_eq!(found, plain("\"\"\"doc\"\"\"\ncode \\"));
    }
}
