//! Ending a stream of text at the first stop string.

/// Watches streamed text for stop strings. Text that may still become one is held back; the stop string itself and what follows are dropped.
///
/// The outcome does not depend on how the text is cut into pieces: the stop string that is complete first ends the text, and of several
/// complete at the same character the longest does.
///
/// ```
/// use qhx_text::StopStrings;
/// let mut stops = StopStrings::new(["\nUser:"])?;
/// assert_eq!(stops.push("Hello\nU").text, "Hello");
/// let last = stops.push("ser: and more");
/// assert_eq!((last.text.as_str(), last.by), ("", Some(0)));
/// # Ok::<(), qhx_text::StopStringsError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<Stop>,
    /// Text that was pushed and not yet given back: as much as the longest beginning of a stop string that it ends with.
    held: String,
    by: Option<usize>,
}

/// What [`StopStrings::push`] gives back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stopped {
    /// Text that certainly belongs to the answer.
    pub text: String,
    /// The stop string that ended it, by its place in the list; once set it stays.
    pub by: Option<usize>,
}

/// A stop string was empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stop string number {number} is empty; an empty string would stop every answer before it begins")]
pub struct StopStringsError {
    /// Which one, counted from 1.
    pub number: usize,
}

/// One stop string with how much of it the text ends with at this moment (Knuth, Morris and Pratt).
#[derive(Clone, Debug)]
struct Stop {
    text: String,
    /// For each length of a matched beginning: the longest shorter beginning that it also ends with.
    shorter: Vec<usize>,
    matched: usize,
}

impl StopStrings {
    /// Makes a matcher; with no stop strings it passes everything on.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Result<Self, StopStringsError> {
        let stops = stops.into_iter().enumerate().map(|(index, text)| {
            let text = text.into();
            if text.is_empty() { Err(StopStringsError { number: index + 1 }) } else { Ok(Stop::new(text)) }
        });
        Ok(Self { stops: stops.collect::<Result<_, _>>()?, held: String::new(), by: None })
    }

    /// Takes the next piece of text and gives back what is certain.
    pub fn push(&mut self, piece: &str) -> Stopped {
        for character in piece.chars() {
            if self.by.is_some() {
                break;
            }
            self.held.push(character);
            let mut bytes = [0; 4];
            for &byte in character.encode_utf8(&mut bytes).as_bytes() {
                self.stops.iter_mut().for_each(|stop| stop.advance(byte));
            }
            let complete = self.stops.iter().enumerate().filter(|(_, stop)| stop.matched == stop.text.len());
            if let Some((index, stop)) = complete.max_by_key(|(index, stop)| (stop.text.len(), std::cmp::Reverse(*index))) {
                let text = self.held[..self.held.len() - stop.text.len()].to_owned();
                self.held.clear();
                self.by = Some(index);
                return Stopped { text, by: self.by };
            }
        }
        let hold = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let text = self.held.drain(..self.held.len() - hold.min(self.held.len())).collect();
        Stopped { text, by: self.by }
    }

    /// Ends the stream: gives back what was held and makes the matcher new again.
    pub fn flush(&mut self) -> String {
        self.by = None;
        self.stops.iter_mut().for_each(|stop| stop.matched = 0);
        std::mem::take(&mut self.held)
    }
}

impl Stop {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut shorter = vec![0; bytes.len() + 1];
        let mut length = 0;
        for at in 1..bytes.len() {
            while length > 0 && bytes[at] != bytes[length] {
                length = shorter[length];
            }
            length += usize::from(bytes[at] == bytes[length]);
            shorter[at + 1] = length;
        }
        Self { text, shorter, matched: 0 }
    }

    fn advance(&mut self, byte: u8) {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes.get(self.matched) != Some(&byte) {
            self.matched = self.shorter[self.matched];
        }
        self.matched += usize::from(bytes[self.matched] == byte);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_ir::random::uniform;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher = StopStrings::new(stops.iter().copied()).unwrap();
        let mut text = String::new();
        let mut by = None;
        for piece in pieces {
            let stopped = matcher.push(piece);
            text += &stopped.text;
            by = stopped.by;
        }
        (text + &matcher.flush(), by)
    }

    #[test]
    fn a_stop_string_is_trimmed_wherever_it_is_cut() {
        for pieces in [&["ab", "STOP", "c"][..], &["abST", "OPc"], &["a", "b", "S", "T", "O", "P", "c"], &["abSTOPc"]] {
            assert_eq!(run(&["STOP"], pieces), ("ab".into(), Some(0)));
        }
        assert_eq!(run(&["STOP"], &["abSTO", "abSTO"]), ("abSTOabSTO".into(), None));
        assert_eq!(run(&["STOP"], &["STSTOP"]), ("ST".into(), Some(0)));
        assert_eq!(run(&["STOP"], &["STOP"]), (String::new(), Some(0)));
        assert_eq!(run(&[], &["a", "b"]), ("ab".into(), None));
    }

    #[test]
    fn text_is_held_only_while_it_may_become_a_stop_string() {
        let mut matcher = StopStrings::new(["\n\nQ", "🎉🎉"]).unwrap();
        let mut push = |piece| matcher.push(piece).text;
        assert_eq!(push("a"), "a");
        assert_eq!(push("\n"), "");
        assert_eq!(push("\n"), "");
        assert_eq!(push("\n"), "\n");
        assert_eq!(push("b🎉"), "\n\nb");
        assert_eq!(push("c"), "🎉c");
        // Characters that share first bytes with a stop string are never cut in half.
        assert_eq!(push("🎈"), "🎈");
    }

    #[test]
    fn the_first_complete_one_wins_then_the_longest() {
        assert_eq!(run(&["abcd", "bc"], &["xabcd"]), ("xa".into(), Some(1)));
        assert_eq!(run(&["d", "abcd", "cd"], &["xabcd"]), ("x".into(), Some(1)));
        assert_eq!(run(&["aa", "aa"], &["aa"]), (String::new(), Some(0)));
    }

    #[test]
    fn empty_stop_strings_are_refused() {
        assert_eq!(StopStrings::new(["a", ""]).unwrap_err(), StopStringsError { number: 2 });
    }

    #[test]
    fn random_texts_agree_with_a_plain_search() {
        let letters = ["a", "b", "é", "🎉"];
        let text_of = |seed, length: u64| (0..length).map(|n| letters[(uniform(seed, n) * 4.0) as usize]).collect::<String>();
        let mut stopped = 0;
        for seed in 0..3000 {
            let text = text_of(seed, 24);
            let stops: Vec<String> = (0..1 + seed % 3).map(|n| text_of(seed * 7 + n + 1, 1 + n + seed % 4)).collect();
            // By definition: the earliest end of any stop string, the longest of those.
            let ends = (0..=text.len()).filter(|&end| text.is_char_boundary(end));
            let expected = ends
                .filter_map(|end| {
                    let complete = stops.iter().enumerate().filter(|(_, stop)| text[..end].ends_with(stop.as_str()));
                    let (index, stop) = complete.max_by_key(|(index, stop)| (stop.len(), std::cmp::Reverse(*index)))?;
                    Some((text[..end - stop.len()].to_owned(), Some(index)))
                })
                .next()
                .unwrap_or((text.clone(), None));
            let mut pieces = vec![String::new()];
            for (n, character) in text.chars().enumerate() {
                if uniform(seed, 1000 + n as u64) < 0.4 {
                    pieces.push(String::new());
                }
                pieces.last_mut().unwrap().push(character);
            }
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            assert_eq!(run(&stops, &pieces), expected, "{stops:?} in {pieces:?}");
            stopped += usize::from(expected.1.is_some());
        }
        assert!((500..2900).contains(&stopped), "{stopped}");
    }
}
