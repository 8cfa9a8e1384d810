//! The integers of block-quantised weights and how a row of them is packed.
//!
//! Numbers are packed in blocks of 32; every block takes a fixed number of consecutive bytes, so a range of blocks is a range of bytes in every packing.
//!
//! | quants | 32 numbers | byte `j` holds |
//! |---|---|---|
//! | int8 | 32 bytes | number `j` |
//! | int6 | 24 bytes | `j < 16`: the low four bits of numbers `j` (low half) and `j + 16` (high half), as in int4; `j ≥ 16`: with `i = j − 16`, the top two bits of numbers `i`, `i + 8`, `i + 16` and `i + 24`, from the lowest pair of bits up |
//! | int4 | 16 bytes | number `j` (low half) and number `j + 16` (high half) |
//!
//! Both packings are made for vectors. One load and two masks give 32 int4 numbers in order. The top bits of an int6 block are eight bytes, which a vector
//! repeats: its halves shifted by different amounts then have the pairs of bits of 16 neighbours where the low bits need them.

/// The integer type of a block's quants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Quants {
    /// Signed bytes.
    I8,
    /// Six bits, unsigned: 0 to 63.
    I6,
    /// Four bits, unsigned: 0 to 15.
    I4,
}

impl Quants {
    /// Bits of a number.
    pub fn bits(self) -> u32 {
        match self {
            Self::I8 => 8,
            Self::I6 => 6,
            Self::I4 => 4,
        }
    }

    /// Bytes of a row of `columns` numbers in blocks of `block`, without padding at its end. `None` on overflow.
    pub fn row_bytes(self, columns: usize, block: usize) -> Option<usize> {
        Some(match self {
            Self::I8 => columns.checked_next_multiple_of(block)?,
            Self::I6 => columns.div_ceil(32).checked_mul(24)?,
            Self::I4 => columns.div_ceil(32).checked_mul(16)?,
        })
    }

    /// The stored integer that stands for 0 where an encoding has no minima: a value is `(stored − zero) · scale`.
    pub fn zero(self) -> i32 {
        match self {
            Self::I8 => 0,
            Self::I6 => 32,
            Self::I4 => 8,
        }
    }

    /// The stored integer at `column` of a packed row.
    pub fn get(self, row: &[u8], column: usize) -> i32 {
        let (block, i) = (column / 32, column % 32);
        match self {
            Self::I8 => row[column] as i8 as i32,
            Self::I6 => {
                let block = &row[block * 24..][..24];
                half(block[i % 16], i) | (((block[16 + i % 8] >> top_shift(i)) & 3) as i32) << 4
            }
            Self::I4 => half(row[block * 16 + i % 16], i),
        }
    }

    /// Stores an integer of this type's range at `column` of a packed row. int6 and int4 expect zeros there.
    pub fn put(self, row: &mut [u8], column: usize, stored: i32) {
        let (block, i) = (column / 32, column % 32);
        let low = ((stored & 15) as u8) << if i < 16 { 0 } else { 4 };
        match self {
            Self::I8 => row[column] = stored as i8 as u8,
            Self::I6 => {
                row[block * 24 + i % 16] |= low;
                row[block * 24 + 16 + i % 8] |= ((stored >> 4 & 3) as u8) << top_shift(i);
            }
            Self::I4 => row[block * 16 + i % 16] |= low,
        }
    }
}

/// The half of a byte that number `i` of a block has.
fn half(byte: u8, i: usize) -> i32 {
    (if i < 16 { byte & 15 } else { byte >> 4 }) as i32
}

/// Where in its byte the top bits of number `i` of an int6 block begin.
fn top_shift(i: usize) -> usize {
    i / 8 * 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packings_are_as_documented() {
        let mut four = [0; 32];
        Quants::I4.put(&mut four, 32, 15);
        Quants::I4.put(&mut four, 48, 2);
        assert_eq!((four[16], Quants::I4.get(&four, 32), Quants::I4.get(&four, 48)), (0x2f, 15, 2));
        let mut six = [0; 48];
        for (column, stored) in [(32, 0b01_0001), (40, 0b10_0000), (48, 0b11_0010), (56, 0b01_0000)] {
            Quants::I6.put(&mut six, column, stored);
        }
        assert_eq!((six[24], six[40]), (0x21, 0b01_11_10_01));
    }

    #[test]
    fn what_is_put_comes_back() {
        for (quants, low, high) in [(Quants::I8, -128, 127), (Quants::I6, 0, 63), (Quants::I4, 0, 15)] {
            let columns = 100;
            let mut row = vec![0; quants.row_bytes(columns, 32).unwrap()];
            let stored = |column: usize| low + (column as i32 * 37 + 11) % (high - low + 1);
            (0..columns).for_each(|column| quants.put(&mut row, column, stored(column)));
            (0..columns).for_each(|column| assert_eq!(quants.get(&row, column), stored(column), "{quants:?} {column}"));
        }
    }
}
