//! As much of Markdown as the documents use.

use std::collections::BTreeSet;

/// A document of the repository.
pub(crate) struct Document {
    /// From the repository's root.
    pub(crate) path: String,
    /// Its text.
    pub(crate) text: String,
    code: Vec<Code>,
}

/// A span or a block of code in a document.
pub(crate) struct Code {
    document: String,
    line: usize,
    /// Without the marks around it.
    pub(crate) text: String,
    /// Whether it is a block.
    pub(crate) is_block: bool,
}

impl Code {
    /// Where it is, for people.
    pub(crate) fn place(&self) -> String {
        format!("{}:{}", self.document, self.line)
    }

    /// Its lines; those that a backslash continues are one.
    pub(crate) fn lines(&self) -> impl Iterator<Item = String> {
        let joined = self.text.replace("\\\n", " ");
        // A span may be wrapped; a block has a command on each line.
        let lines: Vec<String> = if self.is_block { joined.lines().map(str::to_owned).collect() } else { vec![joined] };
        lines.into_iter()
    }
}

impl Document {
    pub(crate) fn new(path: &str, text: String) -> Self {
        let code = code_of(path, &text);
        Self { path: path.to_owned(), text, code }
    }

    /// All its code.
    pub(crate) fn code(&self) -> impl Iterator<Item = &Code> {
        self.code.iter()
    }

    /// The targets of its links and images, with their lines.
    pub(crate) fn links(&self) -> Vec<(usize, String)> {
        let mut links = Vec::new();
        for (number, line) in self.text.lines().enumerate() {
            let targets = line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
            let sources = line.split("src=\"").skip(1).filter_map(|rest| rest.split_once('"')).map(|(target, _)| target);
            links.extend(targets.chain(sources).map(|target| (number + 1, target.to_owned())));
        }
        links
    }

    /// The anchors of its headings, as they are made on GitHub.
    pub(crate) fn anchors(&self) -> BTreeSet<String> {
        let headings = self.text.lines().filter(|line| line.starts_with('#'));
        let anchor = |heading: &str| {
            let kept = heading.trim_start_matches('#').trim().to_lowercase();
            kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).map(|c| if c == ' ' { '-' } else { c }).collect()
        };
        headings.map(anchor).collect()
    }
}

/// Fenced blocks, indented blocks, and spans between backticks.
fn code_of(path: &str, text: &str) -> Vec<Code> {
    let mut code = Vec::new();
    let mut add = |line: usize, text: String, is_block: bool| {
        code.push(Code { document: path.to_owned(), line, text, is_block });
    };
    let mut block: Option<(usize, String, bool)> = None;
    let mut paragraph = (1, String::new());
    let mut after_blank = true;
    for (number, line) in text.lines().enumerate().map(|(number, line)| (number + 1, line)) {
        let is_fence = line.trim_start().starts_with("```");
        match &mut block {
            Some((_, inside, true)) if !is_fence => *inside += &format!("{line}\n"),
            Some((_, inside, false)) if line.starts_with("    ") || line.is_empty() => *inside += &format!("{line}\n"),
            _ => {
                let ended = block.take();
                let closes = is_fence && ended.as_ref().is_some_and(|(_, _, is_fenced)| *is_fenced);
                if let Some((start, inside, _)) = ended {
                    add(start, inside, true);
                }
                if is_fence && !closes {
                    block = Some((number + 1, String::new(), true));
                } else if after_blank && line.starts_with("    ") {
                    block = Some((number, format!("{line}\n"), false));
                } else if !is_fence {
                    if line.is_empty() {
                        spans(&paragraph.1, paragraph.0, &mut add);
                        paragraph = (number + 1, String::new());
                    } else {
                        paragraph.1 += &format!("{line}\n");
                    }
                }
            }
        }
        if block.is_some() {
            spans(&paragraph.1, paragraph.0, &mut add);
            paragraph = (number + 1, String::new());
        }
        after_blank = line.is_empty();
    }
    if let Some((start, inside, _)) = block {
        add(start, inside, true);
    }
    spans(&paragraph.1, paragraph.0, &mut add);
    code
}

fn spans(paragraph: &str, first_line: usize, add: &mut dyn FnMut(usize, String, bool)) {
    let mut line = first_line;
    for (place, piece) in paragraph.split('`').enumerate() {
        if place % 2 == 1 && !piece.is_empty() {
            add(line, piece.to_owned(), false);
        }
        line += piece.matches('\n').count();
    }
}
