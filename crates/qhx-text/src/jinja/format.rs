//! Values in a wanted width, precision and form: what `%` and `str.format` have in common.

mod brace;
mod percent;

use super::budget::FLOAT_STEPS;
use super::error::{Result, fail};
use super::interpreter::Interpreter;
use super::operators::as_float;
use super::print::float;
use super::value::Value;

/// Longest precision of a number. No number has more digits that are not zeros.
const MAX_PRECISION: usize = 1_200;

/// How a value is wanted.
#[derive(Clone, Debug)]
struct Form {
    fill: char,
    /// `<`, `>`, `^` or `=` (fills between sign and digits), if said.
    align: Option<char>,
    /// `-`, `+` or a blank.
    sign: char,
    alternate: bool,
    width: usize,
    /// What stands between thousands.
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Default for Form {
    fn default() -> Self {
        Self { fill: ' ', align: None, sign: '-', alternate: false, width: 0, grouping: None, precision: None, kind: None }
    }
}

impl Form {
    /// Reads `[[fill]align][sign][#][0][width][,][.precision][type]`.
    fn parse(specification: &str) -> Result<Self> {
        let mut form = Self::default();
        let mut rest = specification;
        let is_align = |c: char| matches!(c, '<' | '>' | '^' | '=');
        let mut characters = rest.chars();
        match (characters.next(), characters.next()) {
            (Some(fill), Some(align)) if is_align(align) => {
                (form.fill, form.align) = (fill, Some(align));
                rest = characters.as_str();
            }
            (Some(align), _) if is_align(align) => {
                form.align = Some(align);
                rest = &rest[1..];
            }
            _ => {}
        }
        if let Some(sign) = rest.chars().next().filter(|c| matches!(c, '+' | '-' | ' ')) {
            form.sign = sign;
            rest = &rest[1..];
        }
        if let Some(left) = rest.strip_prefix('#') {
            form.alternate = true;
            rest = left;
        }
        if let Some(left) = rest.strip_prefix('0') {
            if form.align.is_none() {
                (form.fill, form.align) = ('0', Some('='));
            }
            rest = left;
        }
        (form.width, rest) = number(rest);
        if let Some(grouping) = rest.chars().next().filter(|c| matches!(c, ',' | '_')) {
            form.grouping = Some(grouping);
            rest = &rest[1..];
        }
        if let Some(left) = rest.strip_prefix('.') {
            let (precision, behind) = number(left);
            if behind.len() == left.len() {
                fail!("format: digits are missing behind the point");
            }
            form.precision = Some(precision);
            rest = behind;
        }
        let mut characters = rest.chars();
        form.kind = characters.next();
        if characters.next().is_some() {
            fail!("format: {specification:?} is not a format");
        }
        Ok(form)
    }
}

/// The number at the beginning of a text, 0 if there is none, and what follows.
fn number(text: &str) -> (usize, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (if end == 0 { 0 } else { text[..end].parse().unwrap_or(usize::MAX) }, &text[end..])
}

impl Interpreter<'_> {
    /// Appends a value in a form, as Python's `format` does.
    fn append_formatted(&mut self, text: &mut String, value: &Value, form: &Form) -> Result<()> {
        match value {
            Value::Str(string) | Value::Safe(string) => {
                if !matches!(form.kind, None | Some('s')) || form.align == Some('=') && form.fill != '0' || form.sign != '-' {
                    fail!("format: this format does not work on texts");
                }
                let form = Form { align: form.align.filter(|align| *align != '=').or(Some('<')), ..form.clone() };
                self.append_string(text, string, &form)
            }
            Value::Float(number) => self.append_float(text, *number, form),
            Value::Int(_) | Value::Bool(_) => match form.kind {
                Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%') => self.append_float(text, as_float(value).unwrap_or(0.0), form),
                _ => self.append_integer(text, value.as_int().unwrap_or(0), form),
            },
            _ => fail!("format: a value of type '{}' takes no format", self.type_of(value)),
        }
    }

    /// Appends a text, cut to the precision and filled up to the width.
    fn append_string(&mut self, text: &mut String, string: &str, form: &Form) -> Result<()> {
        self.budget.work(string.len())?;
        let end = form.precision.and_then(|precision| string.char_indices().nth(precision)).map_or(string.len(), |(at, _)| at);
        self.append_filled(text, "", &string[..end], form, '<')
    }

    fn append_integer(&mut self, text: &mut String, number: i128, form: &Form) -> Result<()> {
        let magnitude = number.unsigned_abs();
        let (prefix, digits) = match form.kind {
            None | Some('d' | 'n') => ("", magnitude.to_string()),
            Some('x') => ("0x", format!("{magnitude:x}")),
            Some('X') => ("0X", format!("{magnitude:X}")),
            Some('o') => ("0o", format!("{magnitude:o}")),
            Some('b') => ("0b", format!("{magnitude:b}")),
            Some('c') => match u32::try_from(number).ok().and_then(char::from_u32) {
                Some(character) => return self.append_string(text, character.encode_utf8(&mut [0; 4]), form),
                None => fail!("format: {number} is not a character"),
            },
            Some(kind) => fail!("format: '{kind}' does not work on whole numbers"),
        };
        if form.precision.is_some() {
            fail!("format: a precision does not work on whole numbers");
        }
        let sign = sign(number < 0, form.sign);
        let prefix = if form.alternate { prefix } else { "" };
        let digits = grouped(digits, form.grouping, if prefix.is_empty() { 3 } else { 4 });
        self.append_filled(text, &format!("{sign}{prefix}"), &digits, form, '>')
    }

    fn append_float(&mut self, text: &mut String, number: f64, form: &Form) -> Result<()> {
        self.budget.steps(FLOAT_STEPS)?;
        let precision = form.precision;
        if precision.is_some_and(|precision| precision > MAX_PRECISION) {
            fail!("format: the precision is larger than {MAX_PRECISION}");
        }
        let magnitude = number.abs();
        let digits = match form.kind {
            _ if !number.is_finite() => float(magnitude),
            None if precision.is_none() => float(magnitude),
            None => general(magnitude, precision.unwrap_or(6), false, true),
            Some('f' | 'F') => format!("{magnitude:.*}", precision.unwrap_or(6)),
            Some('e' | 'E') => scientific(magnitude, precision.unwrap_or(6)),
            Some('g' | 'G' | 'n') => general(magnitude, precision.unwrap_or(6), form.alternate, false),
            Some('%') => format!("{:.*}%", precision.unwrap_or(6), magnitude * 100.0),
            Some(kind) => fail!("format: '{kind}' does not work on numbers with a fraction"),
        };
        let digits = if matches!(form.kind, Some('E' | 'F' | 'G')) { digits.to_uppercase() } else { digits };
        let sign = sign(number.is_sign_negative() && !number.is_nan(), form.sign);
        let digits = grouped(digits, form.grouping, 3);
        self.append_filled(text, sign, &digits, form, '>')
    }

    /// Appends sign and digits, or a text, filled up to the width.
    fn append_filled(&mut self, text: &mut String, sign: &str, digits: &str, form: &Form, align: char) -> Result<()> {
        let missing = form.width.saturating_sub(sign.chars().count() + digits.chars().count());
        let (before, inside) = match form.align.unwrap_or(align) {
            '<' => (0, 0),
            '^' => (missing / 2, 0),
            '=' => (0, missing),
            _ => (missing, 0),
        };
        self.append_repeated(text, form.fill, before)?;
        self.append(text, sign)?;
        self.append_repeated(text, form.fill, inside)?;
        self.append(text, digits)?;
        self.append_repeated(text, form.fill, missing - before - inside)
    }
}

fn sign(negative: bool, wanted: char) -> &'static str {
    match (negative, wanted) {
        (true, _) => "-",
        (false, '+') => "+",
        (false, ' ') => " ",
        _ => "",
    }
}

/// The digits before the point in groups.
fn grouped(digits: String, grouping: Option<char>, size: usize) -> String {
    let Some(separator) = grouping else { return digits };
    let whole = digits.find(|c: char| !c.is_ascii_hexdigit() || c == 'e').unwrap_or(digits.len());
    let mut result = String::new();
    for (place, character) in digits[..whole].chars().enumerate() {
        if place > 0 && (whole - place) % size == 0 {
            result.push(separator);
        }
        result.push(character);
    }
    result + &digits[whole..]
}

/// With an exponent of at least two digits.
fn scientific(number: f64, precision: usize) -> String {
    let text = format!("{number:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// So many significant digits, with an exponent where the number is very large or small.
fn general(number: f64, precision: usize, keep_zeros: bool, with_point: bool) -> String {
    let precision = precision.max(1);
    let text = scientific(number, precision - 1);
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i64 = exponent.parse().unwrap_or(0);
    let trimmed = |digits: &str| match digits.contains('.') && !keep_zeros {
        true => digits.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => digits.to_owned(),
    };
    let limit = precision as i64 - i64::from(with_point);
    if exponent < -4 || exponent >= limit.max(1) {
        return format!("{}e{}{:02}", trimmed(digits), if exponent < 0 { '-' } else { '+' }, exponent.abs());
    }
    let plain = trimmed(&format!("{number:.*}", usize::try_from(precision as i64 - 1 - exponent).unwrap_or(0)));
    if with_point && !plain.contains('.') { plain + ".0" } else { plain }
}
