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

const HEADER: usize = 16;
/// Where the header lists tables of tiles.
const TILES: usize = 4;
/// Rows of a tile: attention takes so many rows of a segment at once. There is a table for each size.
pub(crate) const TILE_ROWS: [usize; 6] = [1, 2, 4, 8, 16, 32];
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
    for (number, size) in TILE_ROWS.into_iter().enumerate() {
        let first = words.len();
        for (segment, entry) in segments.iter().enumerate() {
            let mut start = 0;
            while start < entry.valid_rows {
                let count = size.min(entry.valid_rows - start).min(next_span(entry.before + start) - entry.before - start);
                words.extend([segment, entry.first_row + start, count].map(|n| n as u32));
                start += count;
            }
        }
        (words[TILES + 2 * number], words[TILES + 2 * number + 1]) = (first as u32, ((words.len() - first) / 3) as u32);
    }
    words
}

/// Keys that are split among workgroups by blocks. Rows that see more split them by two blocks, from twice as many on by four: see `blocks_of_split` in `attend_tiles.comp`.
const SPAN: usize = 4096;

/// The first row behind one, by their places in a session, that splits its keys in another way: no tile has both.
fn next_span(row: usize) -> usize {
    (row + 1).max(SPAN).next_power_of_two()
}

/// The most tiles of a size in a call of so many rows and segments.
pub(crate) fn most_tiles(size: usize, rows: usize, segments: usize) -> usize {
    let spans = 2 + (rows / SPAN).checked_ilog2().unwrap_or(0) as usize;
    rows.min(rows / size + spans * segments)
}

/// Adds addresses; returns where they begin.
fn push(words: &mut Vec<u32>, addresses: impl Iterator<Item = u64>) -> usize {
    let first = words.len();
    words.extend(addresses.flat_map(|address| [address as u32, (address >> 32) as u32]));
    first
}
