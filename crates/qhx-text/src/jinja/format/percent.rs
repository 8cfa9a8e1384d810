//! `"%s %05.2f" % (…)`

use super::{Form, number};
use crate::jinja::error::{Result, fail};
use crate::jinja::interpreter::Interpreter;
use crate::jinja::operators::as_float;
use crate::jinja::value::{Key, Value};

impl Interpreter<'_> {
    pub(in crate::jinja) fn percent_format(&mut self, format: &str, values: &Value) -> Result<String> {
        let single = [values.clone()];
        let (values, mapping) = match values {
            Value::Tuple(tuple) => (&tuple.items[..], None),
            Value::Dict(dict) => (&single[..], Some(dict)),
            _ => (&single[..], None),
        };
        let mut values = values.iter();
        let mut by_name = false;
        let mut text = String::new();
        let mut rest = format;
        while let Some(at) = rest.find('%') {
            self.append(&mut text, &rest[..at])?;
            rest = &rest[at + 1..];
            let mut named = None;
            if let Some(behind) = rest.strip_prefix('(') {
                let Some((name, behind)) = behind.split_once(')') else { fail!("format: a '(' is not closed") };
                let Some(mapping) = mapping else { fail!("format: '%({name})' needs a dict") };
                let Some(value) = mapping.get(&Key::Str(name.into())) else { fail!("format: there is no value for '%({name})'") };
                (named, by_name, rest) = (Some(value), true, behind);
            }
            let mut next = || values.next().ok_or(());
            let (form, behind) = self.percent_form(rest, &mut next)?;
            rest = behind;
            if form.kind == Some('%') {
                self.append(&mut text, "%")?;
                continue;
            }
            let Some(value) = named.or_else(|| next().ok()) else { fail!("format: there are fewer values than fields") };
            self.append_percent(&mut text, value, form)?;
        }
        if values.len() > 0 && mapping.is_none() && !by_name {
            fail!("format: there are more values than fields");
        }
        self.append(&mut text, rest)?;
        Ok(text)
    }

    /// Reads `[flags][width][.precision]type`.
    fn percent_form<'s, 'v>(
        &mut self,
        text: &'s str,
        next: &mut impl FnMut() -> std::result::Result<&'v Value, ()>,
    ) -> Result<(Form, &'s str)> {
        let mut form = Form::default();
        let mut rest = text;
        let mut starred = |rest: &mut &'s str| -> Result<usize> {
            if let Some(behind) = rest.strip_prefix('*') {
                *rest = behind;
                let Some(width) = next().ok().and_then(Value::as_int) else { fail!("format: '*' needs a whole number") };
                let Ok(width) = usize::try_from(width) else { fail!("format: negative widths are not supported") };
                return Ok(width);
            }
            let (width, behind) = number(rest);
            *rest = behind;
            Ok(width)
        };
        while let Some(flag) = rest.chars().next().filter(|c| matches!(c, '-' | '+' | ' ' | '0' | '#')) {
            match flag {
                '-' => form.align = Some('<'),
                '+' => form.sign = '+',
                ' ' if form.sign == '-' => form.sign = ' ',
                '0' if form.align.is_none() => form.align = Some('='),
                '#' => form.alternate = true,
                _ => {}
            }
            rest = &rest[1..];
        }
        form.width = starred(&mut rest)?;
        if let Some(behind) = rest.strip_prefix('.') {
            rest = behind;
            form.precision = Some(starred(&mut rest)?);
        }
        rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
        form.kind = rest.chars().next();
        match form.kind {
            Some(kind) => Ok((form, &rest[kind.len_utf8()..])),
            None => fail!("format: a '%' at the end of the text"),
        }
    }

    fn append_percent(&mut self, text: &mut String, value: &Value, form: Form) -> Result<()> {
        // Zeros fill numbers only.
        let zeros = form.align == Some('=');
        let plain = Form { align: form.align.filter(|_| !zeros).or(Some('>')), ..form.clone() };
        match form.kind {
            Some('s' | 'r') => {
                let mut string = String::new();
                if form.kind == Some('r') {
                    self.represent(value, &mut string)?
                } else {
                    self.print(value, &mut string)?
                }
                self.append_string(text, &string, &plain)
            }
            Some('c') => match (value.as_str(), value.as_int().and_then(|code| char::from_u32(u32::try_from(code).ok()?))) {
                (Some(string), _) if string.chars().count() == 1 => self.append_string(text, string, &plain),
                (_, Some(character)) => self.append_string(text, character.encode_utf8(&mut [0; 4]), &plain),
                _ => fail!("format: '%c' needs a character"),
            },
            Some('d' | 'i' | 'u' | 'x' | 'X' | 'o') => {
                let number = match value {
                    Value::Float(number) if matches!(form.kind, Some('d' | 'i' | 'u')) && number.is_finite() => {
                        Some(number.trunc() as i128)
                    }
                    _ => value.as_int(),
                };
                let Some(number) = number else {
                    fail!("format: '%d' and its like need a number, not a value of type '{}'", self.type_of(value))
                };
                self.append_percent_integer(text, number, form, zeros)
            }
            Some('e' | 'E' | 'f' | 'F' | 'g' | 'G') => {
                let Some(number) = as_float(value) else {
                    fail!("format: '%f' and its like need a number, not a value of type '{}'", self.type_of(value))
                };
                let fill = if zeros { '0' } else { ' ' };
                self.append_float(text, number, &Form { fill, ..form })
            }
            Some(kind) => fail!("format: '%{kind}' is not supported"),
            None => Ok(()),
        }
    }

    fn append_percent_integer(&mut self, text: &mut String, number: i128, form: Form, zeros: bool) -> Result<()> {
        let kind = if matches!(form.kind, Some('i' | 'u')) { Some('d') } else { form.kind };
        let fill = if zeros { '0' } else { ' ' };
        let Some(digits) = form.precision else {
            return self.append_integer(text, number, &Form { fill, kind, ..form });
        };
        // A precision is the least number of digits.
        let magnitude = i128::try_from(number.unsigned_abs()).unwrap_or(i128::MAX);
        let mut body = String::new();
        self.append_integer(&mut body, magnitude, &Form { fill: '0', align: Some('='), width: digits, kind, ..Form::default() })?;
        let sign = super::sign(number < 0, form.sign);
        self.append_filled(text, sign, &body, &Form { fill, ..form }, '>')
    }
}
