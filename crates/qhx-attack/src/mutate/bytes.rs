//! Changes that know nothing of the file's format.

use super::NASTY_INTEGERS;
use crate::random::Random;

/// What parsers of text care about.
const TOKENS: [&[u8]; 16] = [
    b"{",
    b"}",
    b"[",
    b"]",
    b"\"",
    b",",
    b":",
    b"-1",
    b"1e999",
    b"18446744073709551615",
    b"null",
    b"\\u0000",
    b"\x1b[2J",
    b"../",
    b"\xff\xfe",
    b"\0",
];

/// Makes one to four changes within the first `within` bytes; `other` is a file to splice from.
pub(crate) fn mutate_bytes(bytes: &mut Vec<u8>, within: usize, other: &[u8], random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        let end = within.min(bytes.len());
        if end == 0 {
            bytes.extend(random.pick(&TOKENS).iter());
            continue;
        }
        let at = random.below(end);
        let span = at..(at + random.length(end)).min(end);
        match random.below(11) {
            0 | 1 => bytes[at] ^= 1 << random.below(8),
            2 => bytes[at] = random.next() as u8,
            3 => drop(bytes.splice(at..at, random.pick(&TOKENS).iter().copied())),
            4 => drop(bytes.drain(span)),
            5 => bytes.extend_from_within(span),
            6 => {
                let copy = bytes[span].to_vec();
                drop(bytes.splice(at..at, copy));
            }
            7 => bytes.truncate(at),
            8 => {
                let from = random.below(other.len());
                let piece = &other[from..(from + random.length(other.len().max(1))).min(other.len())];
                drop(bytes.splice(at..at, piece.iter().copied()));
            }
            9 => bytes[span].fill(*random.pick(&[0, 0xff, b' ', b'9'])),
            _ => overwrite_number(bytes, at, random),
        }
    }
}

/// Puts a nasty number where a length, a count or an offset may be, in either byte order.
fn overwrite_number(bytes: &mut [u8], at: usize, random: &mut Random) {
    let width = *random.pick(&[1, 2, 4, 8]);
    let at = if random.one_in(2) { at / width * width } else { at };
    let number = *random.pick(&NASTY_INTEGERS);
    let little = number.to_le_bytes();
    let mut number = little[..width].to_vec();
    if random.one_in(2) {
        number.reverse();
    }
    let end = (at + width).min(bytes.len());
    bytes[at..end].copy_from_slice(&number[..end - at]);
}
