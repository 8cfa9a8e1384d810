//! Numbers and strings as they are written in templates.

use super::error::{Failure, Result, fail};
use super::lexer::Token;

/// The number at the beginning of `text` and its length. Behind a point, as in `x.0.1`, it has no fraction.
pub(super) fn number(text: &str, behind_point: bool) -> Result<(Token, usize)> {
    let whole = digits(text, 10);
    if !behind_point {
        let mut end = whole;
        if let Some(fraction) = text[end..].strip_prefix('.') {
            let length = digits(fraction, 10);
            end += if length > 0 { 1 + length } else { 0 };
        }
        if let Some(exponent) = text[end..].strip_prefix(['e', 'E']) {
            let unsigned = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            let length = digits(unsigned, 10);
            end += if length > 0 { 1 + exponent.len() - unsigned.len() + length } else { 0 };
        }
        if end > whole {
            let value = text[..end].replace('_', "").parse().map_err(|_| Failure::problem("the number cannot be read"))?;
            return Ok((Token::Float(value), end));
        }
    }
    for (prefix, radix) in [("0b", 2), ("0o", 8), ("0x", 16)] {
        let Some(inside) = text.get(..2).filter(|start| start.eq_ignore_ascii_case(prefix)).map(|_| &text[2..]) else { continue };
        let length = digits(inside.strip_prefix('_').unwrap_or(inside), radix);
        if length > 0 {
            let length = length + usize::from(inside.starts_with('_'));
            return Ok((integer(&inside[..length], radix)?, 2 + length));
        }
    }
    // A zero may only be followed by zeros.
    let whole = if text.starts_with('0') { text[..whole].find(|c| !matches!(c, '0' | '_')).unwrap_or(whole) } else { whole };
    Ok((integer(&text[..whole], 10)?, whole))
}

fn integer(digits: &str, radix: u32) -> Result<Token> {
    match i128::from_str_radix(&digits.replace('_', ""), radix) {
        Ok(value) => Ok(Token::Int(value)),
        Err(_) => Err(Failure::problem("the number is too large")),
    }
}

/// The length of a run of digits, single underscores between them included.
fn digits(text: &str, radix: u32) -> usize {
    let is_digit = |at: usize| text.as_bytes().get(at).is_some_and(|byte| char::from(*byte).is_digit(radix));
    let mut end = 0;
    loop {
        if is_digit(end) {
            end += 1;
        } else if end > 0 && text.as_bytes().get(end) == Some(&b'_') && is_digit(end + 1) {
            end += 2;
        } else {
            return end;
        }
    }
}

/// The string at the beginning of `text`, which begins with a quote, and the length it is written in.
pub(super) fn string(text: &str) -> Result<(Token, usize)> {
    let mut characters = text.char_indices();
    let Some((_, quote)) = characters.next() else { fail!("a string is expected") };
    let mut value = String::new();
    while let Some((at, character)) = characters.next() {
        match character {
            _ if character == quote => return Ok((Token::Str(value.into()), at + 1)),
            '\\' => match characters.next() {
                Some((at, escaped)) => {
                    let length = unescape(escaped, &text[at + escaped.len_utf8()..], &mut value)?;
                    characters.by_ref().take(length).for_each(|_| {});
                }
                None => break,
            },
            _ => value.push(character),
        }
    }
    Err(Failure::problem("the string is not closed"))
}

/// Writes what a backslash with `escaped` behind it stands for, and says how many characters of `rest` belong to it, all of one byte.
fn unescape(escaped: char, rest: &str, value: &mut String) -> Result<usize> {
    let plain = match escaped {
        '\n' => return Ok(0),
        '\\' | '\'' | '"' => escaped,
        'a' => '\u{7}',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'v' => '\u{b}',
        '0'..='7' => {
            let length = rest.bytes().take(2).take_while(|byte| matches!(byte, b'0'..=b'7')).count();
            let code = rest[..length].bytes().fold(u32::from(escaped) - u32::from('0'), |code, byte| code * 8 + u32::from(byte - b'0'));
            value.extend(char::from_u32(code));
            return Ok(length);
        }
        'x' | 'u' | 'U' => {
            let length = match escaped {
                'x' => 2,
                'u' => 4,
                _ => 8,
            };
            let digits = rest.get(..length).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
            let Some(code) = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()) else {
                fail!("`\\{escaped}` must be followed by {length} hexadecimal digits");
            };
            let Some(character) = char::from_u32(code) else { fail!("`\\{escaped}{}` is not a character", &rest[..length]) };
            value.push(character);
            return Ok(length);
        }
        'N' => fail!("names of characters (`\\N{{…}}`) are not supported"),
        _ => {
            // An escape that Python does not know stays; of one outside ASCII, Python leaves the code.
            value.push('\\');
            match u32::from(escaped) {
                0..0x80 => value.push(escaped),
                code @ 0x80..0x100 => value.push_str(&format!("x{code:02x}")),
                code @ 0x100..0x1_0000 => value.push_str(&format!("u{code:04x}")),
                code => value.push_str(&format!("U{code:08x}")),
            }
            return Ok(0);
        }
    };
    value.push(plain);
    Ok(0)
}
