//! Text from elsewhere (names in files, file names, what a model wrote) as a terminal may see it: shown, never obeyed.
//!
//! Everything that is printed for people goes through here at the very end, in `output` and `progress`; the program's own colours are added after.

use std::borrow::Cow;

/// The text with every character escaped (`\u{1b}`) that moves a cursor, sets a colour or turns the direction of writing. Line breaks and tabs stay.
pub(crate) fn shown(text: &str) -> Cow<'_, str> {
    escaped(text, |c| commands(c) && !matches!(c, '\n' | '\t'))
}

/// The same in one line: line breaks and tabs are escaped too.
pub(crate) fn shown_in_line(text: &str) -> Cow<'_, str> {
    escaped(text, commands)
}

/// C0, DEL, C1, and the overrides and isolates of bidirectional text.
fn commands(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escaped(text: &str, commands: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&commands) {
        return text.into();
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if commands(c) { safe.extend(c.escape_unicode()) } else { safe.push(c) }
    }
    safe.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_not_commanded() {
        assert_eq!(shown("a\x1b[2Jb\n\tc\u{9b}d\r\x7f"), "a\\u{1b}[2Jb\n\tc\\u{9b}d\\u{d}\\u{7f}");
        assert_eq!(shown("\u{202e}gnp.exe\u{2066}\u{2069}"), "\\u{202e}gnp.exe\\u{2066}\\u{2069}");
        assert_eq!(shown_in_line("a\nb\tc"), "a\\u{a}b\\u{9}c");
        for text in ["plain", "Grüße, שלום, 你好 👋🏽", ""] {
            assert!(matches!(shown(text), Cow::Borrowed(same) if same == text));
        }
    }
}
