//! Takes a reply apart as it comes.

use super::{CallFormat, Marks, Reasoning, ReplyFormat, ToolCall, Tools};

/// A part of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyPart {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the content.
    Content(String),
    /// A whole tool call.
    Call(ToolCall),
}

/// Takes the text of a reply piece by piece and gives its parts. Joined together, they do not depend on how the text was cut into pieces.
///
/// Blank lines around reasoning and tool calls belong to neither. A text between the marks of a tool call that is not one is content: nothing is lost.
///
/// ```
/// use qhx_text::reply::{Marks, Reasoning, ReplyFormat, ReplyParser, ReplyPart};
/// let reasoning = Some(Marks { open: "<think>".into(), close: "</think>".into() });
/// let mut parser = ReplyParser::new(&ReplyFormat { reasoning, calls: None }, None, Reasoning::NotBegun);
/// assert_eq!(parser.push("<think>\nHm.\n</th"), [ReplyPart::Reasoning("Hm.".into())]);
/// assert_eq!(parser.push("ink>\n\nYes."), [ReplyPart::Content("Yes.".into())]);
/// ```
#[derive(Clone, Debug)]
pub struct ReplyParser {
    reasoning: Option<Marks>,
    calls: Option<(Marks, CallFormat, Tools)>,
    state: State,
    /// Text of the present state that is not given out yet.
    held: String,
    /// Whether blanks at this place are dropped: nothing but blanks has come since the last mark.
    at_start: bool,
    called: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing has come but blanks: reasoning may begin.
    Beginning,
    Reasoning,
    Content,
    Call,
}

impl ReplyParser {
    /// For a reply in this format, with tool calls where there are tools, whose reasoning is as far as the prompt left it.
    pub fn new(format: &ReplyFormat, tools: Option<&Tools>, reasoning: Reasoning) -> Self {
        let calls = tools.filter(|tools| !tools.is_empty()).zip(format.calls.clone());
        let state = match reasoning {
            Reasoning::Begun => State::Reasoning,
            Reasoning::NotBegun => State::Beginning,
            Reasoning::Over => State::Content,
        };
        Self {
            reasoning: format.reasoning.clone(),
            calls: calls.map(|(tools, (marks, call))| (marks, call, tools.clone())),
            state,
            held: String::new(),
            at_start: state == State::Reasoning,
            called: false,
        }
    }

    /// Whether the latest text was reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    /// Takes more text.
    pub fn push(&mut self, text: &str) -> Vec<ReplyPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// Ends the reply.
    pub fn finish(&mut self) -> Vec<ReplyPart> {
        let mut parts = Vec::new();
        let mut rest = std::mem::take(&mut self.held);
        match self.state {
            State::Reasoning => give(&mut parts, rest.trim_end_matches('\n'), ReplyPart::Reasoning),
            State::Call => {
                // It was cut off: what there is of it is shown as it is.
                rest.insert_str(0, self.calls.as_ref().map_or("", |(marks, ..)| &marks.open));
                give(&mut parts, &rest, ReplyPart::Content);
            }
            // Blanks behind a call are nobody's.
            _ if self.called => give(&mut parts, rest.trim_end(), ReplyPart::Content),
            _ => give(&mut parts, &rest, ReplyPart::Content),
        }
        parts
    }

    /// Goes as far as the next mark; whether there may be more to do.
    fn advance(&mut self, parts: &mut Vec<ReplyPart>) -> bool {
        if self.at_start {
            let blanks = self.held.len() - self.held.trim_start().len();
            self.held.drain(..blanks);
            if self.held.is_empty() {
                return false;
            }
            // Blanks may come between two marks.
            self.at_start = false;
        }
        match self.state {
            State::Beginning => self.begin(),
            State::Reasoning => self.reason(parts),
            State::Content => self.tell(parts),
            State::Call => self.call(parts),
        }
    }

    fn begin(&mut self) -> bool {
        let Some(marks) = &self.reasoning else { return false };
        let text = self.held.trim_start();
        if let Some(rest) = text.strip_prefix(marks.open.as_str()) {
            (self.held, self.state, self.at_start) = (rest.to_owned(), State::Reasoning, true);
            return true;
        }
        if marks.open.starts_with(text) {
            return false;
        }
        self.state = State::Content;
        true
    }

    fn reason(&mut self, parts: &mut Vec<ReplyPart>) -> bool {
        let Some(marks) = &self.reasoning else { return false };
        if let Some((before, rest)) = self.held.split_once(&marks.close) {
            give(parts, before.trim_end_matches('\n'), ReplyPart::Reasoning);
            (self.held, self.state, self.at_start) = (rest.to_owned(), State::Content, true);
            return true;
        }
        // Line ends before the mark are not part of it, and more may come.
        let certain = self.held[..self.held.len() - begun(&self.held, &marks.close)].trim_end_matches('\n').len();
        let certain: String = self.held.drain(..certain).collect();
        give(parts, &certain, ReplyPart::Reasoning);
        false
    }

    fn tell(&mut self, parts: &mut Vec<ReplyPart>) -> bool {
        let Some((marks, ..)) = &self.calls else {
            give(parts, &std::mem::take(&mut self.held), ReplyPart::Content);
            return false;
        };
        if let Some((before, rest)) = self.held.split_once(&marks.open) {
            give(parts, before.trim_end(), ReplyPart::Content);
            (self.held, self.state) = (rest.to_owned(), State::Call);
            return true;
        }
        let certain = self.held[..self.held.len() - begun(&self.held, &marks.open)].trim_end().len();
        let certain: String = self.held.drain(..certain).collect();
        give(parts, &certain, ReplyPart::Content);
        false
    }

    fn call(&mut self, parts: &mut Vec<ReplyPart>) -> bool {
        let Some((marks, format, tools)) = &self.calls else { return false };
        let Some((inside, rest)) = self.held.split_once(&marks.close) else { return false };
        match tools.parse(format, inside) {
            Some(call) => {
                parts.push(ReplyPart::Call(call));
                (self.at_start, self.called) = (true, true);
            }
            None => give(parts, &[&marks.open, inside, &marks.close].concat(), ReplyPart::Content),
        }
        (self.held, self.state) = (rest.to_owned(), State::Content);
        true
    }
}

/// Gives text out; where the part before is of the same kind, as more of that.
fn give(parts: &mut Vec<ReplyPart>, text: &str, part: impl Fn(String) -> ReplyPart) {
    if text.is_empty() {
        return;
    }
    let part = part(text.to_owned());
    match (parts.last_mut(), &part) {
        (Some(ReplyPart::Reasoning(before)), ReplyPart::Reasoning(more)) | (Some(ReplyPart::Content(before)), ReplyPart::Content(more)) => {
            before.push_str(more);
        }
        _ => parts.push(part),
    }
}

/// Bytes at the end of a text that may be the beginning of a mark.
fn begun(text: &str, mark: &str) -> usize {
    (1..mark.len()).rev().find(|&length| mark.is_char_boundary(length) && text.ends_with(&mark[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_ir::random::uniform;
    use serde_json::json;

    fn format(reasoning: bool, calls: bool) -> ReplyFormat {
        let marks = |open: &str, close: &str| Marks { open: open.to_owned(), close: close.to_owned() };
        ReplyFormat {
            reasoning: reasoning.then(|| marks("<think>", "</think>")),
            calls: calls.then(|| (marks("<tool_call>", "</tool_call>"), CallFormat::Json { arguments: "arguments".to_owned() })),
        }
    }

    fn tools() -> Tools {
        Tools::from_json(&json!([{ "type": "function", "function": { "name": "f" } }])).unwrap()
    }

    /// All reasoning, all content, and all calls, with the place among the content at which each stands.
    fn joined(parts: &[ReplyPart]) -> (String, String, Vec<(usize, ToolCall)>) {
        let mut all = (String::new(), String::new(), Vec::new());
        for part in parts {
            match part {
                ReplyPart::Reasoning(text) => all.0.push_str(text),
                ReplyPart::Content(text) => all.1.push_str(text),
                ReplyPart::Call(call) => all.2.push((all.1.len(), call.clone())),
            }
        }
        all
    }

    fn parsed<'a>(
        format: &ReplyFormat,
        in_reasoning: bool,
        pieces: impl IntoIterator<Item = &'a str>,
    ) -> (String, String, Vec<(usize, ToolCall)>) {
        let reasoning = match &format.reasoning {
            Some(_) if in_reasoning => Reasoning::Begun,
            Some(_) => Reasoning::NotBegun,
            None => Reasoning::Over,
        };
        let mut parser = ReplyParser::new(format, Some(&tools()), reasoning);
        let mut parts: Vec<ReplyPart> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
        parts.extend(parser.finish());
        joined(&parts)
    }

    #[test]
    fn parts_of_a_reply() {
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        let text = format!("<think>\nHm,\n\nwell.\n</think>\n\nLet me see.\n{call}\n{call}<|x|>");
        let (reasoning, content, calls) = parsed(&format(true, true), false, [text.as_str()]);
        assert_eq!((reasoning.as_str(), content.as_str()), ("Hm,\n\nwell.", "Let me see.<|x|>"));
        assert_eq!(calls.iter().map(|(at, call)| (*at, call.arguments.as_str())).collect::<Vec<_>>(), [(11, "{\"a\":1}"); 2]);
    }

    #[test]
    fn plain_text_stays_as_it_is() {
        for text in ["", " ", "\n a <think> b </think>\n\n", "a <tool_cal", "a < b\n", "<tool_call>{}</tool_call> "] {
            assert_eq!(parsed(&format(false, false), false, [text]).1, text);
            if !text.trim_start().starts_with("<think>") {
                assert_eq!(parsed(&format(true, true), false, [text]).1, text, "{text:?}");
            }
        }
        // What was cut off is there.
        assert_eq!(parsed(&format(true, true), true, ["\nHm"]).0, "Hm");
        assert_eq!(parsed(&format(true, true), true, ["Hm</think>a<tool_call>{\"na"]).1, "a<tool_call>{\"na");
    }

    #[test]
    fn parts_do_not_depend_on_the_pieces() {
        let words = [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "\n",
            "\n\n",
            " ",
            "a",
            "ünï",
            "<",
            "</",
            "{\"name\": \"f\", \"arguments\": {}}",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"<\"}}\n</tool_call>",
            "<thi",
            "nk>",
            "{",
        ];
        let mut calls = 0;
        for case in 0..3000u64 {
            let draw = |at: u64| uniform(case, at);
            let text: String = (0..1 + case % 12).map(|at| words[(draw(at) * words.len() as f64) as usize]).collect();
            let (format, in_reasoning) = (format(draw(100) < 0.7, draw(101) < 0.8), draw(102) < 0.5);
            let whole = parsed(&format, in_reasoning, [text.as_str()]);
            calls += whole.2.len();
            let characters: Vec<String> = text.chars().map(String::from).collect();
            assert_eq!(parsed(&format, in_reasoning, characters.iter().map(String::as_str)), whole, "{text:?} by characters");
            let at = (0..=text.len()).filter(|at| text.is_char_boundary(*at));
            for at in at {
                assert_eq!(parsed(&format, in_reasoning, [&text[..at], &text[at..]]), whole, "{text:?} cut at {at}");
            }
        }
        assert!(calls > 50, "only {calls} calls were among the cases");
    }
}
