//! Paths inside a bundle. A [`BundlePath`] cannot leave its folder, whatever the file that it was read from says.

#[cfg(feature = "schema")]
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf, str::FromStr};

/// Longest path, in bytes.
const MAX_PATH: usize = 1024;
/// Longest name of one file or folder, in bytes: what common file systems allow.
const MAX_NAME: usize = 255;

/// A relative path with `/` between plain names: no `..`, no drive, no backslash, no control character. Valid by construction, also when
/// it comes out of a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct BundlePath(String);

impl BundlePath {
    /// Checks `text`; the error says what is wrong with it.
    pub fn new(text: impl Into<String>) -> Result<Self, PathError> {
        let text = text.into();
        match fault(&text) {
            None => Ok(Self(text)),
            Some(reason) => Err(PathError { path: shown(&text), reason }),
        }
    }

    /// As it stands in the manifest.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path in the file system's own form, still relative.
    pub fn to_relative(&self) -> PathBuf {
        self.0.split('/').collect()
    }
}

/// Why a text is not a path inside a bundle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the path `{path}` {reason}; paths in a bundle are relative, like `weights/a.safetensors`")]
pub struct PathError {
    path: String,
    reason: &'static str,
}

fn fault(text: &str) -> Option<&'static str> {
    if text.is_empty() {
        return Some("is empty");
    }
    if text.len() > MAX_PATH {
        return Some("is longer than 1024 bytes");
    }
    if text.starts_with('/') {
        return Some("is absolute");
    }
    if text.contains(|c: char| c == '\\' || c == ':' || c.is_control()) {
        return Some("has a backslash, a colon or a control character");
    }
    text.split('/').find_map(|name| match name {
        "" => Some("has an empty name between slashes"),
        "." | ".." => Some("may lead out of the bundle: `.` and `..` are not allowed"),
        name if name.len() > MAX_NAME => Some("has a name longer than 255 bytes"),
        _ => None,
    })
}

/// A hostile path may be megabytes long or move the cursor: an error shows its start, escaped.
fn shown(text: &str) -> String {
    let mut short: String = text.chars().take(120).flat_map(char::escape_debug).collect();
    if text.chars().nth(120).is_some() {
        short.push('…');
    }
    short
}

impl FromStr for BundlePath {
    type Err = PathError;
    fn from_str(text: &str) -> Result<Self, PathError> {
        Self::new(text)
    }
}

impl fmt::Display for BundlePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for BundlePath {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        Self::new(String::deserialize(d)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(feature = "schema")]
impl JsonSchema for BundlePath {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "BundlePath".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "A path relative to the bundle's folder: plain names with `/` between them, no `.` or `..`, no backslash or colon.",
            "pattern": "^(?!\\.{1,2}(/|$))[^/\\\\:\\x00-\\x1f]+(/(?!\\.{1,2}(/|$))[^/\\\\:\\x00-\\x1f]+)*$",
            "maxLength": MAX_PATH,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_paths_pass() {
        for text in ["a", "qhx.json", "weights/00001-of-00002.safetensors", "a/b/c d/…", "..a/b..", ".hidden"] {
            assert_eq!(BundlePath::new(text).unwrap().as_str(), text);
        }
        let path: BundlePath = "a/b".parse().unwrap();
        assert_eq!((path.to_relative(), path.to_string()), (PathBuf::from("a").join("b"), "a/b".to_owned()));
        // As long as may be.
        assert!(BundlePath::new("a".repeat(MAX_NAME)).is_ok());
        assert!(BundlePath::new("a/".repeat(MAX_PATH / 2 - 1) + "bc").is_ok());
        assert!(BundlePath::new("a/".repeat(MAX_PATH / 2) + "b").is_err());
    }

    #[test]
    fn paths_that_could_leave_are_refused() {
        let cases = [
            ("", "is empty"),
            ("../../etc/passwd", "may lead out"),
            ("weights/../../x", "may lead out"),
            ("a/..", "may lead out"),
            ("./a", "may lead out"),
            ("/etc/passwd", "is absolute"),
            ("C:/windows", "colon"),
            ("..\\..\\x", "backslash"),
            ("a\0b", "control character"),
            ("a//b", "empty name"),
            ("a/", "empty name"),
        ];
        for (text, reason) in cases {
            let error = BundlePath::new(text).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains(&shown(text)), "{text:?}: {error}");
            assert!(text.parse::<BundlePath>().is_err());
            assert!(serde_json::from_value::<BundlePath>(text.into()).is_err());
        }
        assert_eq!(shown("..\\..\\x\0"), "..\\\\..\\\\x\\0");
        assert!(BundlePath::new("a".repeat(256)).unwrap_err().to_string().contains("longer than 255"));
        let long = BundlePath::new("a/".repeat(1_000_000)).unwrap_err().to_string();
        assert!(long.contains("longer than 1024") && long.len() < 400, "{long}");
    }
}
