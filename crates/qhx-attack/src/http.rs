//! As much of HTTP as an attack needs: requests that are well formed, and answers that must be.

use serde_json::Value;

/// An answer of a server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Its status.
    pub(crate) status: u16,
    /// Its body, without the marks of chunks.
    pub(crate) body: Vec<u8>,
}

/// A request whose connection ends with its answer. `headers` are lines, each with its end.
pub(crate) fn request(method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head =
        format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
    [head.as_bytes(), body].concat()
}

/// A request with JSON.
pub(crate) fn post(path: &str, body: &Value) -> Vec<u8> {
    request("POST", path, "Content-Type: application/json\r\n", body.to_string().as_bytes())
}

/// The answers that a connection has brought. An error if one of them is malformed or cut off, unless they may be: then it is left out.
pub(crate) fn answers(mut bytes: &[u8], may_be_cut: bool) -> Result<Vec<Answer>, String> {
    let mut answers = Vec::new();
    while !bytes.is_empty() {
        match first(bytes) {
            Ok((answer, rest)) => {
                answers.extend(answer);
                bytes = rest;
            }
            Err(_) if may_be_cut => break,
            Err(problem) => return Err(problem),
        }
    }
    Ok(answers)
}

/// The first answer, unless it only says that there will be one, and what follows it.
fn first(bytes: &[u8]) -> Result<(Option<Answer>, &[u8]), String> {
    let (head, rest) = split(bytes, b"\r\n\r\n").ok_or("an answer ends within its headers")?;
    let head = str::from_utf8(head).map_err(|_| "the headers of an answer are not UTF-8")?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.")?.get(2..5)?.parse().ok());
    let status: u16 = status.ok_or_else(|| format!("an answer begins with {:?}", head.lines().next()))?;
    let header = |wanted: &str| {
        let mut headers = lines.clone().filter_map(|line| line.split_once(':'));
        headers.find(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, value)| value.trim())
    };
    let (body, rest) = match (status, header("transfer-encoding"), header("content-length")) {
        (100..200, ..) => return Ok((None, rest)),
        (204 | 304, ..) => (Vec::new(), rest),
        (_, Some("chunked"), _) => unchunked(rest).ok_or("an answer ends within its chunks")?,
        (_, _, Some(length)) => {
            let length = length.parse().map_err(|_| format!("an answer has the length {length}"))?;
            let (body, rest) = rest.split_at_checked(length).ok_or("an answer ends within its body")?;
            (body.to_vec(), rest)
        }
        // Up to the end of the connection, as HTTP/1.0 has it.
        _ => (rest.to_vec(), &[][..]),
    };
    Ok((Some(Answer { status, body }), rest))
}

/// The body of chunks, and what follows them; none if they do not end.
fn unchunked(mut bytes: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut body = Vec::new();
    loop {
        let (size, rest) = split(bytes, b"\r\n")?;
        let size = usize::from_str_radix(str::from_utf8(size).ok()?, 16).ok()?;
        let (chunk, rest) = rest.split_at_checked(size)?;
        let rest = rest.strip_prefix(b"\r\n")?;
        if size == 0 {
            return Some((body, rest));
        }
        body.extend_from_slice(chunk);
        bytes = rest;
    }
}

fn split<'b>(bytes: &'b [u8], at: &[u8]) -> Option<(&'b [u8], &'b [u8])> {
    let place = bytes.windows(at.len()).position(|window| window == at)?;
    Some((&bytes[..place], &bytes[place + at.len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_answers_are_read() {
        let two = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n\
                    HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}";
        let expected = [(200, &b"abcd"[..]), (404, b"{}")].map(|(status, body)| Answer { status, body: body.to_vec() });
        assert_eq!(answers(two, false).unwrap(), expected);
        assert_eq!(answers(&two[..two.len() - 1], true).unwrap(), expected[..1]);
        assert_eq!(answers(b"", false).unwrap(), []);
    }

    #[test]
    fn half_answers_are_noticed() {
        let head = "HTTP/1.1 200 OK\r\n";
        for (half, expected) in [
            (head.to_owned(), "within its headers"),
            (format!("{head}Content-Length: 3\r\n\r\nab"), "within its body"),
            (format!("{head}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"), "within its chunks"),
            (format!("{head}Transfer-Encoding: chunked\r\n\r\n0\r\n"), "within its chunks"),
            ("SSH-2.0\r\n\r\n".to_owned(), "begins with"),
        ] {
            let problem = answers(half.as_bytes(), false).unwrap_err();
            assert!(problem.contains(expected), "{half:?}: {problem}");
        }
    }
}
