//! What differs from call to call, as shaders read it: see `common.glsl`.

/// A segment of a call.
pub(crate) struct SegmentEntry {
    pub(crate) first_row: usize,
    pub(crate) valid_rows: usize,
    /// Committed rows.
    pub(crate) before: usize,
    pub(crate) epoch: usize,
    pub(crate) partial: bool,
    /// Addresses of pages.
    pub(crate) pages: Vec<u64>,
    /// Of each recurrent slot: the address of what is committed (0: nothing), of what the call makes of it, and of the record (0: none).
    pub(crate) recurrent: Vec<[u64; 3]>,
}

const HEADER: usize = 4;
const SEGMENT: usize = 8;

/// The words of a call of `rows` rows.
pub(crate) fn words(rows: usize, segments: &[SegmentEntry]) -> Vec<u32> {
    let table = HEADER + rows;
    let mut words = vec![0; table + SEGMENT * segments.len()];
    words[..3].copy_from_slice(&[segments.len() as u32, HEADER as u32, table as u32]);
    words[HEADER..table].fill(u32::MAX);
    for (number, segment) in segments.iter().enumerate() {
        words[HEADER + segment.first_row..][..segment.valid_rows].fill(number as u32);
        let pages = push(&mut words, segment.pages.iter().copied());
        let recurrent = push(&mut words, segment.recurrent.iter().flatten().copied());
        let entry = [segment.first_row, segment.valid_rows, segment.before, segment.epoch, segment.partial as usize, pages, recurrent];
        for (word, number) in words[table + number * SEGMENT..].iter_mut().zip(entry) {
            *word = number as u32;
        }
    }
    words
}

/// Adds addresses; returns where they begin.
fn push(words: &mut Vec<u32>, addresses: impl Iterator<Item = u64>) -> usize {
    let first = words.len();
    words.extend(addresses.flat_map(|address| [address as u32, (address >> 32) as u32]));
    first
}
