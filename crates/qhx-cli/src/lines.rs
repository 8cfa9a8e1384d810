//! Lines from a person at a terminal, with editing, or from a pipe.

use crate::failure::Failure;
use rustyline::{DefaultEditor, error::ReadlineError};
use std::io::{self, BufRead, IsTerminal, Read};

/// The longest line that is read from a pipe.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// Where lines come from.
pub(crate) enum Lines {
    Terminal(Box<DefaultEditor>),
    Pipe,
}

/// What comes next.
pub(crate) enum Line {
    Text(String),
    /// Ctrl-C while nothing was running.
    Interrupted,
    /// Ctrl-D, or the end of the pipe.
    End,
}

impl Lines {
    pub(crate) fn of_stdin() -> Result<Self, Failure> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Pipe);
        }
        let editor = DefaultEditor::new().map_err(|error| Failure::work(format!("cannot use the terminal: {error}")))?;
        Ok(Self::Terminal(Box::new(editor)))
    }

    /// Whether a person types.
    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    pub(crate) fn next(&mut self) -> Result<Line, Failure> {
        match self {
            Self::Pipe => next_of(&mut io::stdin().lock()),
            Self::Terminal(editor) => match editor.readline("› ") {
                Ok(line) => {
                    // Only the history of this conversation; without it only the arrow keys lose their use.
                    let _ = editor.add_history_entry(&line);
                    Ok(Line::Text(line))
                }
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(error) => Err(Failure::work(format!("cannot read from the terminal: {error}"))),
            },
        }
    }
}

fn next_of(input: &mut dyn BufRead) -> Result<Line, Failure> {
    let mut bytes = Vec::new();
    let mut limited = input.take(MAX_LINE_BYTES);
    let read = limited.read_until(b'\n', &mut bytes).map_err(|error| Failure::work(format!("cannot read stdin: {error}")))?;
    if read == 0 {
        return Ok(Line::End);
    }
    if bytes.len() as u64 == MAX_LINE_BYTES {
        return Err(Failure::work(format!("stdin has a line of more than {MAX_LINE_BYTES} bytes")));
    }
    String::from_utf8(bytes).map(Line::Text).map_err(|error| {
        let line = String::from_utf8_lossy(error.as_bytes()).into_owned();
        Failure::work(format!("stdin is not valid UTF-8 text: {:?}", line.chars().take(80).collect::<String>()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_pipe() {
        let mut input: &[u8] = b"one\ntwo";
        let mut texts = Vec::new();
        while let Line::Text(text) = next_of(&mut input).unwrap() {
            texts.push(text);
        }
        assert_eq!(texts, ["one\n", "two"]);
        assert!(next_of(&mut &b"caf\xe9\n"[..]).is_err());
    }
}
