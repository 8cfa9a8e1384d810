//! SHA-256 checksums as a manifest states them.

#[cfg(feature = "schema")]
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::{
    fmt,
    io::{self, Read},
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
};

/// A SHA-256 checksum; its text form is 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The sum and length of all that `reader` gives, in bounded memory. Ends early with [`io::ErrorKind::Interrupted`] once `cancel` is set.
    pub fn of_reader(mut reader: impl Read, cancel: Option<&AtomicBool>) -> io::Result<(Self, u64)> {
        let mut buffer = vec![0; 1 << 20];
        let (mut sum, mut length) = (Sha256::new(), 0);
        loop {
            if cancel.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            match reader.read(&mut buffer) {
                Ok(0) => return Ok((Self(sum.finalize().into()), length)),
                Ok(n) => {
                    sum.update(&buffer[..n]);
                    length += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// The 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = &'static str;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "a SHA-256 checksum has 64 lower-case hexadecimal digits";
        let digit = |c: u8| match c {
            b'0'..=b'9' => Ok(c - b'0'),
            b'a'..=b'f' => Ok(c - b'a' + 10),
            _ => Err(EXPECTED),
        };
        let digits: &[u8; 64] = text.as_bytes().try_into().map_err(|_| EXPECTED)?;
        let mut sum = [0; 32];
        for (byte, pair) in sum.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Ok(Self(sum))
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(feature = "schema")]
impl JsonSchema for Digest {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Digest".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "description": "A SHA-256 checksum in lower-case hexadecimal.", "pattern": "^[0-9a-f]{64}$" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn known_sum_and_text_form() {
        assert_eq!(Digest::of(b"abc").to_string(), ABC);
        assert_eq!(format!("{:?}", Digest::of(b"abc")), format!("Digest({ABC})"));
        assert_eq!(Digest::of(b"abc").as_bytes()[..2], [0xba, 0x78]);
        assert_eq!(ABC.parse::<Digest>().unwrap(), Digest::of(b"abc"));
        assert_eq!(Digest::of_reader(&b"abc"[..], None).unwrap(), (Digest::of(b"abc"), 3));
        for bad in ["", "ba78", &ABC.to_uppercase(), &ABC.replace('f', "g"), &format!("{ABC}0")] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }

    /// Gives `abc` after an error.
    struct Late(Option<io::ErrorKind>, &'static [u8]);

    impl Read for Late {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.take().map_or(Ok(()), |kind| Err(kind.into())).and_then(|()| self.1.read(buffer))
        }
    }

    #[test]
    fn interruptions_are_gone_over_and_errors_are_told() {
        assert_eq!(Digest::of_reader(Late(Some(io::ErrorKind::Interrupted), b"abc"), None).unwrap(), (Digest::of(b"abc"), 3));
        assert_eq!(Digest::of_reader(Late(Some(io::ErrorKind::NotFound), b"abc"), None).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn hashing_can_be_stopped() {
        let stop = AtomicBool::new(true);
        assert_eq!(Digest::of_reader(io::repeat(0), Some(&stop)).unwrap_err().kind(), io::ErrorKind::Interrupted);
    }
}
