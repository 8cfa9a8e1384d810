//! Methods of texts.

use crate::jinja::arguments::{Arguments, count, integer, optional_integer, optional_text, text};
use crate::jinja::error::{Result, fail};
use crate::jinja::interpreter::Interpreter;
use crate::jinja::print::is_python_space;
use crate::jinja::value::{Dict, Value};

#[rustfmt::skip]
pub(super) const METHODS: &[&str] = &[
    "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "format", "format_map", "index", "isalnum", "isalpha",
    "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip",
    "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill",
];

impl Interpreter<'_> {
    pub(in crate::jinja) fn string_method(&mut self, this: &str, name: &str, arguments: Arguments) -> Result<Value> {
        self.budget.work(this.len())?;
        match name {
            "upper" | "lower" | "casefold" | "title" | "capitalize" | "swapcase" => {
                arguments.none(name)?;
                self.in_case(this, name)
            }
            "strip" | "lstrip" | "rstrip" => {
                let [characters] = arguments.bind(name, ["chars"], 0)?;
                let characters = optional_text(name, characters.as_ref())?;
                self.stripped(this, characters.as_deref(), name != "rstrip", name != "lstrip")
            }
            "split" | "rsplit" => {
                let [separator, most] = arguments.bind(name, ["sep", "maxsplit"], 0)?;
                let separator = optional_text(name, separator.as_ref())?;
                let most = optional_integer(name, most.as_ref())?.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
                self.split(this, separator.as_deref(), most, name == "rsplit")
            }
            "splitlines" => {
                let [keep] = arguments.bind(name, ["keepends"], 0)?;
                let keep = keep.is_some_and(|keep| self.truth(&keep));
                let mut parts = Vec::new();
                for line in lines(this, keep) {
                    let line = self.text(line)?;
                    self.push(&mut parts, line)?;
                }
                self.list(parts)
            }
            "startswith" | "endswith" => self.starts_or_ends(this, name, arguments),
            "replace" => {
                let [old, new, most] = arguments.bind(name, ["old", "new", "count"], 2)?;
                let most = optional_integer(name, most.as_ref())?.unwrap_or(-1);
                let (old, new) = (text(name, old.as_ref())?, text(name, new.as_ref())?);
                self.replaced(this, &old, &new, most)
            }
            "join" => {
                let [items] = arguments.bind(name, ["iterable"], 1)?;
                let items = self.items(&items.unwrap_or(Value::None))?;
                let mut joined = String::new();
                for (place, item) in items.iter().enumerate() {
                    let item = text(name, Some(item))?;
                    self.append(&mut joined, if place > 0 { this } else { "" })?;
                    self.append(&mut joined, &item)?;
                }
                self.made(joined)
            }
            "find" | "rfind" | "index" | "rindex" | "count" => self.found(this, name, arguments),
            "format" => {
                let formatted = self.brace_format(this, &arguments)?;
                self.made(formatted)
            }
            "format_map" => {
                let [mapping] = arguments.bind(name, ["mapping"], 1)?;
                let Some(Value::Dict(mapping)) = mapping else { fail!("format_map expects a dict") };
                let formatted = self.brace_format(this, &named_by(&mapping)?)?;
                self.made(formatted)
            }
            "zfill" | "center" | "ljust" | "rjust" => self.padded(this, name, arguments),
            "partition" | "rpartition" => {
                let [separator] = arguments.bind(name, ["sep"], 1)?;
                let separator = text(name, separator.as_ref())?;
                if separator.is_empty() {
                    fail!("{name}: the separator is empty");
                }
                let parts = if name == "partition" { this.split_once(&*separator) } else { this.rsplit_once(&*separator) };
                let parts = match parts {
                    Some((before, after)) => [before, &*separator, after],
                    None if name == "partition" => [this, "", ""],
                    None => ["", "", this],
                };
                let mut items = self.room(3)?;
                for part in parts {
                    items.push(self.text(part)?);
                }
                self.tuple(items)
            }
            "removeprefix" | "removesuffix" => {
                let [part] = arguments.bind(name, ["part"], 1)?;
                let part = text(name, part.as_ref())?;
                let rest = if name == "removeprefix" { this.strip_prefix(&*part) } else { this.strip_suffix(&*part) };
                self.text(rest.unwrap_or(this))
            }
            "expandtabs" => self.tabs_expanded(this, arguments),
            _ => {
                arguments.none(name)?;
                Ok(Value::Bool(is_all(this, name)))
            }
        }
    }

    pub(in crate::jinja) fn in_case(&mut self, this: &str, case: &str) -> Result<Value> {
        // A character's other case takes at most three times its bytes.
        self.budget.allocate(this.len().saturating_mul(3))?;
        self.budget.work(this.len().saturating_mul(5))?;
        let text = match case {
            "upper" => this.to_uppercase(),
            "lower" => this.to_lowercase(),
            "casefold" => this.to_lowercase().replace('ß', "ss"),
            "capitalize" => {
                let mut characters = this.chars();
                let first: String = characters.next().into_iter().flat_map(char::to_uppercase).collect();
                first + &characters.as_str().to_lowercase()
            }
            "swapcase" => {
                let swap = |c: char| if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect::<String>() };
                this.chars().map(swap).collect()
            }
            _ => {
                let mut inside = false;
                let mut title = String::with_capacity(this.len());
                for character in this.chars() {
                    if std::mem::replace(&mut inside, character.is_lowercase() || character.is_uppercase()) {
                        title.extend(character.to_lowercase());
                    } else {
                        title.extend(character.to_uppercase());
                    }
                }
                title
            }
        };
        self.made(text)
    }

    pub(in crate::jinja) fn stripped(&mut self, this: &str, characters: Option<&str>, left: bool, right: bool) -> Result<Value> {
        // Each character is looked for among those to strip.
        self.budget.work(this.len().saturating_mul(characters.map_or(1, str::len)))?;
        let strip = |c: char| characters.map_or_else(|| is_python_space(c), |characters| characters.contains(c));
        let rest = if left { this.trim_start_matches(strip) } else { this };
        let rest = if right { rest.trim_end_matches(strip) } else { rest };
        self.text(rest)
    }

    fn split(&mut self, this: &str, separator: Option<&str>, most: usize, from_right: bool) -> Result<Value> {
        let mut parts = Vec::new();
        let mut add = |interpreter: &mut Self, part: &str| -> Result<()> {
            let part = interpreter.text(part)?;
            interpreter.push(&mut parts, part)
        };
        match separator {
            Some("") => fail!("split: the separator is empty"),
            Some(separator) if from_right => {
                this.rsplitn(most.saturating_add(1), separator).try_for_each(|part| add(self, part))?;
            }
            Some(separator) => this.splitn(most.saturating_add(1), separator).try_for_each(|part| add(self, part))?,
            None => words(this, most, from_right).try_for_each(|part| add(self, part))?,
        }
        if from_right {
            parts.reverse();
        }
        self.list(parts)
    }

    fn starts_or_ends(&mut self, this: &str, name: &str, arguments: Arguments) -> Result<Value> {
        let [part, start, stop] = arguments.bind(name, ["part", "start", "stop"], 1)?;
        let (_, range) = bounds(this, start.as_ref(), stop.as_ref(), name)?;
        let part = part.unwrap_or(Value::None);
        let single = [part.clone()];
        let parts = match &part {
            Value::Tuple(parts) => &parts.items[..],
            _ => &single[..],
        };
        for part in parts {
            self.budget.steps(1)?;
            let part = text(name, Some(part))?;
            let Some(range) = range else { continue };
            if if name == "startswith" { range.starts_with(&*part) } else { range.ends_with(&*part) } {
                return Ok(Value::Bool(true));
            }
        }
        Ok(Value::Bool(false))
    }

    pub(in crate::jinja) fn replaced(&mut self, this: &str, old: &str, new: &str, most: i128) -> Result<Value> {
        self.budget.work(this.len())?;
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let mut result = String::new();
        let mut rest = 0;
        for (at, found) in this.match_indices(old).take(most) {
            self.append(&mut result, &this[rest..at])?;
            self.append(&mut result, new)?;
            rest = at + found.len();
        }
        self.append(&mut result, &this[rest..])?;
        self.made(result)
    }

    fn found(&mut self, this: &str, name: &str, arguments: Arguments) -> Result<Value> {
        let [part, start, stop] = arguments.bind(name, ["sub", "start", "stop"], 1)?;
        let part = text(name, part.as_ref())?;
        self.budget.work(this.len() + part.len())?;
        let (first, range) = bounds(this, start.as_ref(), stop.as_ref(), name)?;
        let Some(range) = range else {
            if name.ends_with("index") {
                fail!("{name}: the text is not found");
            }
            return Ok(Value::Int(if name == "count" { 0 } else { -1 }));
        };
        if name == "count" {
            return Ok(Value::Int(range.matches(&*part).count() as i128));
        }
        let at = if name.starts_with('r') { range.rfind(&*part) } else { range.find(&*part) };
        match at {
            Some(at) => Ok(Value::Int((first + range[..at].chars().count()) as i128)),
            None if name.ends_with("index") => fail!("{name}: the text is not found"),
            None => Ok(Value::Int(-1)),
        }
    }

    fn padded(&mut self, this: &str, name: &str, arguments: Arguments) -> Result<Value> {
        let [width, fill] = arguments.bind(name, ["width", "fillchar"], 1)?;
        let fill = optional_text(name, fill.as_ref())?;
        let mut fills = fill.as_deref().unwrap_or(" ").chars();
        let (Some(fill), None) = (fills.next(), fills.next()) else { fail!("{name} fills with one character") };
        let width = count(integer(name, &width.unwrap_or(Value::None))?);
        let missing = width.saturating_sub(this.chars().count());
        let left = match name {
            "ljust" => 0,
            // Where it cannot be even, Python puts the odd one left if the width is odd.
            "center" => missing / 2 + (missing & width & 1),
            _ => missing,
        };
        let mut padded = String::new();
        let mut rest = this;
        if name == "zfill" {
            let signed = usize::from(this.starts_with(['+', '-']));
            self.append(&mut padded, &this[..signed])?;
            rest = &this[signed..];
        }
        self.append_repeated(&mut padded, if name == "zfill" { '0' } else { fill }, left)?;
        self.append(&mut padded, rest)?;
        self.append_repeated(&mut padded, fill, missing - left)?;
        self.made(padded)
    }

    fn tabs_expanded(&mut self, this: &str, arguments: Arguments) -> Result<Value> {
        let [size] = arguments.bind("expandtabs", ["tabsize"], 0)?;
        let size = count(optional_integer("expandtabs", size.as_ref())?.unwrap_or(8));
        let (mut expanded, mut column) = (String::new(), 0usize);
        for character in this.chars() {
            match character {
                '\t' => {
                    let blanks = if size == 0 { 0 } else { size - column % size };
                    self.append_repeated(&mut expanded, ' ', blanks)?;
                    column = column.saturating_add(blanks);
                }
                _ => {
                    self.append(&mut expanded, character.encode_utf8(&mut [0; 4]))?;
                    column = if matches!(character, '\n' | '\r') { 0 } else { column.saturating_add(1) };
                }
            }
        }
        self.made(expanded)
    }
}

fn named_by(mapping: &Dict) -> Result<Arguments> {
    let mut arguments = Arguments::default();
    for (key, value) in mapping.entries() {
        if let Value::Str(name) = key {
            arguments.named.push((name.clone(), value.clone()));
        }
    }
    Ok(arguments)
}

/// The part of a text between two places, and how many characters stand before it. Nothing if it begins behind the end.
fn bounds<'s>(this: &'s str, start: Option<&Value>, stop: Option<&Value>, callee: &str) -> Result<(usize, Option<&'s str>)> {
    let (start, stop) = (optional_integer(callee, start)?, optional_integer(callee, stop)?);
    if start.is_none() && stop.is_none() {
        return Ok((0, Some(this)));
    }
    let length = this.chars().count() as i128;
    let bound = |bound: i128| if bound < 0 { bound.saturating_add(length).max(0) } else { bound };
    let (start, stop) = (start.map_or(0, bound), stop.map_or(length, bound).min(length));
    if start > stop {
        return Ok((0, None));
    }
    let byte = |place: i128| this.char_indices().nth(place as usize).map_or(this.len(), |(at, _)| at);
    Ok((start as usize, Some(&this[byte(start)..byte(stop)])))
}

/// Parts between white space, at most `most` cuts; what remains then keeps the white space on its far side. From the right, the parts come last
/// first.
fn words(text: &str, most: usize, from_right: bool) -> impl Iterator<Item = &str> {
    let mut rest = text;
    let mut cuts = 0;
    std::iter::from_fn(move || {
        rest = if from_right { rest.trim_end_matches(is_python_space) } else { rest.trim_start_matches(is_python_space) };
        if rest.is_empty() {
            return None;
        }
        let cut = if from_right { rest.rfind(is_python_space) } else { rest.find(is_python_space) };
        let word;
        match cut.filter(|_| cuts < most) {
            Some(cut) if from_right => {
                let space = rest[cut..].chars().next().map_or(0, char::len_utf8);
                (rest, word) = (&rest[..cut], &rest[cut + space..]);
            }
            Some(cut) => (word, rest) = rest.split_at(cut),
            None => (word, rest) = (rest, ""),
        }
        cuts += 1;
        Some(word)
    })
}

/// Lines as Python sees them: more characters end a line than in Rust.
pub(in crate::jinja) fn lines(text: &str, keep_ends: bool) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let ends = ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
        let end = rest.find(ends).unwrap_or(rest.len());
        let length = if rest[end..].starts_with("\r\n") { 2 } else { rest[end..].chars().next().map_or(0, char::len_utf8) };
        let line = &rest[..if keep_ends { end + length } else { end }];
        rest = &rest[end + length..];
        Some(line)
    })
}

/// `isalpha` and its like.
fn is_all(this: &str, name: &str) -> bool {
    let cased = |c: char| c.is_lowercase() || c.is_uppercase();
    match name {
        "isascii" => this.is_ascii(),
        "islower" => this.chars().any(char::is_lowercase) && !this.chars().any(char::is_uppercase),
        "isupper" => this.chars().any(char::is_uppercase) && !this.chars().any(char::is_lowercase),
        "istitle" => {
            let before = std::iter::once(' ').chain(this.chars());
            this.chars().any(cased) && before.zip(this.chars()).all(|(before, c)| !cased(c) || c.is_lowercase() == cased(before))
        }
        _ => {
            let is = |c: char| match name {
                "isalpha" => c.is_alphabetic(),
                "isalnum" => c.is_alphanumeric(),
                "isspace" => is_python_space(c),
                "isdecimal" | "isdigit" if c.is_ascii() => c.is_ascii_digit(),
                "isdecimal" => c.is_numeric() && !superscript(c) && !fraction(c),
                "isdigit" => c.is_numeric() && !fraction(c),
                _ => c.is_numeric(),
            };
            !this.is_empty() && this.chars().all(is)
        }
    }
}

fn superscript(c: char) -> bool {
    matches!(c, '\u{b2}' | '\u{b3}' | '\u{b9}' | '\u{2070}'..='\u{2089}' | '\u{2460}'..='\u{249b}')
}

fn fraction(c: char) -> bool {
    matches!(c, '\u{bc}'..='\u{be}' | '\u{2150}'..='\u{218b}')
}
