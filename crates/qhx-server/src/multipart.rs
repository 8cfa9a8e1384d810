//! Forms as browsers and clients send them (RFC 7578), read from a body that is already there as a whole.

use memchr::memmem;

/// How long the headers of a field may be.
const MOST_HEADER_BYTES: usize = 16 << 10;

/// One field of a form.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Field<'a> {
    pub(crate) name: String,
    pub(crate) value: &'a [u8],
}

/// The fields of a form, one after another. The first error ends them.
pub(crate) struct Fields<'a> {
    /// What stands before and between fields.
    delimiter: memmem::Finder<'static>,
    /// What is not read yet, behind a delimiter; `None` behind the last one.
    rest: Option<&'a [u8]>,
}

impl<'a> Fields<'a> {
    /// Reads what stands before the first field. `kind` is the header `Content-Type` of the request.
    pub(crate) fn new(kind: &str, body: &'a [u8]) -> Result<Self, String> {
        let boundary = match kind.split_once(';') {
            Some((form, parameters)) if form.trim().eq_ignore_ascii_case("multipart/form-data") => parameter(parameters, "boundary"),
            _ => return Err(format!("expected the content type `multipart/form-data; boundary=…`, found `{kind}`")),
        };
        let boundary = boundary.filter(|boundary| !boundary.is_empty()).ok_or_else(|| format!("`{kind}` names no boundary"))?;
        // The first boundary may stand at the very beginning, without the line before it.
        let opening = format!("--{boundary}");
        let delimiter = memmem::Finder::new(format!("\r\n{opening}").as_bytes()).into_owned();
        let start = match body.starts_with(opening.as_bytes()) {
            true => Some(opening.len()),
            false => delimiter.find(body).map(|at| at + delimiter.needle().len()),
        };
        let start = start.ok_or_else(|| format!("the boundary `{boundary}` does not occur in the body"))?;
        Ok(Self { delimiter, rest: Some(&body[start..]) })
    }

    fn read(&mut self) -> Result<Option<Field<'a>>, String> {
        let Some(rest) = self.rest.take().filter(|rest| !rest.starts_with(b"--")) else { return Ok(None) };
        let line = memmem::find(rest, b"\r\n").filter(|end| rest[..*end].iter().all(|byte| b" \t".contains(byte)));
        let rest = &rest[line.ok_or("a boundary is not at the end of its line")?..];
        // A field without headers has an empty line at once: its line break is the one of the boundary.
        let end = memmem::find(&rest[..rest.len().min(MOST_HEADER_BYTES)], b"\r\n\r\n");
        let end = end.ok_or_else(|| format!("a field has no end of its headers within {MOST_HEADER_BYTES} bytes"))?;
        let headers = String::from_utf8_lossy(&rest[..end]);
        let disposition = headers.lines().filter_map(|line| line.split_once(':')).find_map(|(name, value)| {
            let is_it = name.trim().eq_ignore_ascii_case("content-disposition");
            is_it.then(|| value.split_once(';').map_or("", |(_, parameters)| parameters))
        });
        let name = disposition.and_then(|parameters| parameter(parameters, "name"));
        let name = name.ok_or("a field has no `Content-Disposition: form-data; name=\"…\"`")?.to_owned();
        let value = &rest[end + 4..];
        let end = self.delimiter.find(value).ok_or_else(|| format!("the body ends inside the field `{name}`"))?;
        self.rest = Some(&value[end + self.delimiter.needle().len()..]);
        Ok(Some(Field { name, value: &value[..end] }))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, String>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

/// The fields of a form: their names, and how long their values are.
#[doc(hidden)]
pub fn form_fields(kind: &str, body: &[u8]) -> Result<Vec<(String, usize)>, String> {
    Fields::new(kind, body)?.map(|field| field.map(|field| (field.name, field.value.len()))).collect()
}

/// The value of one of the parameters of a header: `a=b; c="d e"`.
///
/// Browsers write quotes inside of a value as `%22`, others as `\"`: a value ends at the first quote with nothing but a semicolon behind it.
fn parameter<'a>(mut parameters: &'a str, wanted: &str) -> Option<&'a str> {
    loop {
        let (name, rest) = parameters.split_once('=')?;
        let (value, rest) = match rest.trim_start().strip_prefix('"') {
            Some(quoted) => {
                let closes = |(at, _): &(usize, _)| matches!(quoted[at + 1..].trim_start().bytes().next(), None | Some(b';'));
                let (end, _) = quoted.match_indices('"').find(closes)?;
                (&quoted[..end], quoted[end + 1..].trim_start().strip_prefix(';'))
            }
            None => match rest.split_once(';') {
                Some((value, rest)) => (value.trim(), Some(rest)),
                None => (rest.trim(), None),
            },
        };
        // Parameters without a value are passed over with the name behind them.
        if name.rsplit(';').next().is_some_and(|name| name.trim().eq_ignore_ascii_case(wanted)) {
            return Some(value);
        }
        parameters = rest?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: &str = "multipart/form-data; boundary=edge";

    fn read(kind: &str, body: &str) -> Result<Vec<(String, String)>, String> {
        let pair = |field: Field<'_>| (field.name, String::from_utf8_lossy(field.value).into_owned());
        Fields::new(kind, body.as_bytes())?.map(|field| field.map(pair)).collect()
    }

    fn pairs(of: &[(&str, &str)]) -> Result<Vec<(String, String)>, String> {
        Ok(of.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn reads_what_clients_send() {
        // curl
        let body = "--edge\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--edge\r\nContent-Disposition: form-data; name=\"file\"; \
                    filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n\r\n--edg\r\n-\r\n\r\n--edge--\r\n";
        assert_eq!(read(KIND, body), pairs(&[("model", "m"), ("file", "\r\n--edg\r\n-\r\n")]));
        // Names without quotes, in another order, with other headers before and other letters; a preamble and an epilogue.
        let body = "to be passed over\r\n--edge \t\r\ncontent-length: 1\r\nCONTENT-DISPOSITION: form-data;filename=\"a \\\"b\\\"; c.wav\" ; NAME=file\r\n\r\nx\r\n--edge--\r\nmore\r\n--edge";
        assert_eq!(read("Multipart/Form-Data; charset=utf-8; Boundary=\"edge\"", body), pairs(&[("file", "x")]));
        let body =
            "--edge\r\nContent-Disposition: form-data; name=\"file\"; filename*=UTF-8''%e2%82%ac; filename=\"C:\\a\\\"\r\n\r\n\r\n--edge--";
        assert_eq!(read(KIND, body), pairs(&[("file", "")]));
        assert_eq!(read(KIND, "--edge--\r\n"), pairs(&[]));
    }

    #[test]
    fn says_what_is_wrong() {
        let named = "--edge\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm";
        let long = format!("--edge\r\nX: {}\r\n\r\nm\r\n--edge--", "x".repeat(MOST_HEADER_BYTES));
        for (kind, body, expected) in [
            ("application/json", "{}", "expected the content type"),
            ("multipart/form-data", "", "expected the content type"),
            ("multipart/form-data; charset=utf-8", "", "names no boundary"),
            ("multipart/form-data; boundary=\"\"", "", "names no boundary"),
            (KIND, "", "does not occur"),
            (KIND, "--edgy--", "does not occur"),
            (KIND, "--edge", "end of its line"),
            (KIND, "--edgewise\r\n", "end of its line"),
            (KIND, "--edge\r\n", "no end of its headers"),
            (KIND, &long, "no end of its headers"),
            (KIND, "--edge\r\n\r\nm\r\n--edge--", "has no `Content-Disposition"),
            (KIND, "--edge\r\nContent-Disposition: form-data; name=\"model\r\n\r\nm\r\n--edge--", "has no `Content-Disposition"),
            (KIND, named, "ends inside the field `model`"),
        ] {
            let error = read(kind, body).unwrap_err();
            assert!(error.contains(expected), "{kind} {body:?}: {error}");
        }
    }
}
