//! Attacks on the fields of a GGUF file that say how long, how many, of what type and where.

use super::NASTY_INTEGERS;
use crate::random::Random;

/// Overwrites one to three fields of the header with other numbers. A file that cannot be walked stays as it is.
pub(crate) fn attack_fields(file: &mut [u8], random: &mut Random) {
    let fields = Walk { file, at: 0, fields: Vec::new() }.header();
    if fields.is_empty() {
        return;
    }
    for _ in 0..1 + random.below(3) {
        let (at, width) = *random.pick(&fields);
        let old = file[at..at + width].iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte));
        let new = match random.below(6) {
            0 => old.wrapping_add(1),
            1 => old.wrapping_sub(1),
            2 => old.wrapping_mul(2),
            3 => random.below(64) as u64,
            _ => *random.pick(&NASTY_INTEGERS),
        };
        file[at..at + width].copy_from_slice(&new.to_le_bytes()[..width]);
    }
}

/// Goes through a header and notes where its numbers stand.
struct Walk<'a> {
    file: &'a [u8],
    at: usize,
    fields: Vec<(usize, usize)>,
}

impl Walk<'_> {
    fn header(mut self) -> Vec<(usize, usize)> {
        // What was noted before the end of a damaged file still counts.
        let _ = self.all();
        self.fields
    }

    fn all(&mut self) -> Option<()> {
        self.at = 4;
        self.number(4)?;
        let tensors = self.number(8)?;
        let keys = self.number(8)?;
        for _ in 0..keys {
            self.text()?;
            let kind = self.number(4)?;
            self.value(kind)?;
        }
        for _ in 0..tensors {
            self.text()?;
            let dimensions = self.number(4)?;
            for _ in 0..dimensions {
                self.number(8)?;
            }
            self.number(4)?;
            self.number(8)?;
        }
        Some(())
    }

    fn value(&mut self, kind: u64) -> Option<()> {
        match kind {
            8 => self.text(),
            9 => {
                let kind = self.number(4)?;
                let count = self.number(8)?;
                (0..count).try_for_each(|_| self.value(kind))
            }
            0 | 1 | 7 => self.number(1).map(drop),
            2 | 3 => self.number(2).map(drop),
            4..=6 => self.number(4).map(drop),
            10..=12 => self.number(8).map(drop),
            _ => None,
        }
    }

    fn text(&mut self) -> Option<()> {
        let length = usize::try_from(self.number(8)?).ok()?;
        self.at = self.at.checked_add(length)?;
        Some(())
    }

    fn number(&mut self, width: usize) -> Option<u64> {
        let bytes = self.file.get(self.at..self.at.checked_add(width)?)?;
        self.fields.push((self.at, width));
        self.at += width;
        Some(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }
}
