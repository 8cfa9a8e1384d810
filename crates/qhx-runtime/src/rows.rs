//! The rows of a session: what was put in, in order. An id each; some ids are placeholders for the soft rows of a medium.
//!
//! Everything that a call's inputs are made from follows from here, so a session that forgets its state computes it again exactly.

use crate::{Encoded, Medium};
use qhx_bundle::Digest;
use qhx_media::MediaKind;
use std::{
    ops::Range,
    sync::{Arc, OnceLock},
};

/// What was put in.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows {
    ids: Vec<u32>,
    /// By rising first row, apart from each other.
    media: Vec<MediumSpan>,
}

/// A medium among the rows.
#[derive(Clone, Debug)]
pub(crate) struct MediumSpan {
    /// Its first row.
    pub(crate) first: usize,
    /// How many rows of it there are: all, unless a rollback cut it.
    pub(crate) rows: usize,
    /// What the position of a row at its start is, less the row's number.
    shift: isize,
    content: Arc<Content>,
}

/// What a medium is known by, and its soft rows once its tower has made them.
#[derive(Debug)]
struct Content {
    kind: MediaKind,
    digest: Digest,
    grid: Option<[usize; 2]>,
    encoded: OnceLock<Arc<Encoded>>,
}

impl MediumSpan {
    /// All of a medium from row `first` on.
    pub(crate) fn new(first: usize, encoded: Arc<Encoded>) -> Self {
        let (kind, digest, grid, rows) = (encoded.kind(), encoded.digest(), encoded.grid(), encoded.rows());
        Self { first, rows, shift: 0, content: Arc::new(Content { kind, digest, grid, encoded: encoded.into() }) }
    }

    /// The same of one that its tower has yet to encode: into so many soft rows.
    pub(crate) fn awaited(first: usize, medium: &Medium, rows: usize) -> Self {
        let (kind, digest, grid) = (medium.kind(), medium.digest(), medium.grid());
        Self { first, rows, shift: 0, content: Arc::new(Content { kind, digest, grid, encoded: OnceLock::new() }) }
    }

    /// The soft rows of an awaited medium are there, in all rows that have it.
    pub(crate) fn arrive(&self, encoded: Arc<Encoded>) {
        let _ = self.content.encoded.set(encoded);
    }

    /// Its soft rows, unless they are awaited.
    pub(crate) fn encoded(&self) -> Option<&Arc<Encoded>> {
        self.content.encoded.get()
    }

    pub(crate) fn end(&self) -> usize {
        self.first + self.rows
    }

    /// The shift of the rows after it. An image takes as many positions as the longer side of its grid, however many rows it has.
    fn shift_after(&self) -> isize {
        match self.content.grid {
            Some([rows, columns]) => self.shift + rows.max(columns) as isize - self.rows as isize,
            None => self.shift,
        }
    }

    /// Time, height and width position of one of its rows.
    fn position(&self, row: usize) -> [isize; 3] {
        let start = self.first as isize + self.shift;
        let at = row - self.first;
        match self.content.grid {
            Some([_, columns]) => [start, start + (at / columns) as isize, start + (at % columns) as isize],
            None => [start + at as isize; 3],
        }
    }

    fn is_same_medium(&self, other: &Self) -> bool {
        let known_by = |span: &Self| (span.first, span.content.kind, span.content.digest);
        known_by(self) == known_by(other)
    }
}

impl Rows {
    /// Empty, with room for `capacity` ids.
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self { ids: Vec::with_capacity(capacity), media: Vec::new() }
    }

    pub(crate) fn ids(&self) -> &[u32] {
        &self.ids
    }

    pub(crate) fn media(&self) -> &[MediumSpan] {
        &self.media
    }

    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// The same rows with room for `capacity` ids.
    pub(crate) fn copy_with_capacity(&self, capacity: usize) -> Self {
        let mut copy = Self::with_capacity(capacity.max(self.len()));
        copy.ids.extend_from_slice(&self.ids);
        copy.media.clone_from(&self.media);
        copy
    }

    /// Adds ids, and the media whose rows lie among them. A medium that begins before the new ids completes the one that was cut there.
    pub(crate) fn extend(&mut self, ids: &[u32], media: &[MediumSpan]) {
        self.ids.extend_from_slice(ids);
        for medium in media {
            match self.media.last_mut() {
                Some(last) if last.first == medium.first => *last = MediumSpan { shift: last.shift, ..medium.clone() },
                last => {
                    let shift = last.map_or(0, |last| last.shift_after());
                    self.media.push(MediumSpan { shift, ..medium.clone() });
                }
            }
        }
    }

    /// Forgets the rows from `len` on. A medium may be cut.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
        self.media.retain(|medium| medium.first < len);
        if let Some(last) = self.media.last_mut() {
            last.rows = last.rows.min(len - last.first);
        }
    }

    /// How many leading rows equal those of a prompt: the same ids, the same media at the same places.
    pub(crate) fn common_prefix(&self, ids: &[u32], media: &[MediumSpan]) -> usize {
        let mut common = self.ids.iter().zip(ids).take_while(|(a, b)| a == b).count();
        let mut pairs = self.media.iter().zip(media);
        match pairs.find(|(a, b)| !a.is_same_medium(b) || a.rows != b.rows) {
            Some((a, b)) if a.is_same_medium(b) => common = common.min(a.end().min(b.end())),
            Some((a, b)) => common = common.min(a.first.min(b.first)),
            None => {
                // A medium against placeholders that stand for nothing.
                let shorter = self.media.len().min(media.len());
                let more = self.media[shorter..].iter().chain(&media[shorter..]).map(|medium| medium.first).min();
                common = common.min(more.unwrap_or(usize::MAX));
            }
        }
        common
    }

    /// The parts of media that lie in `span`: the medium, and which of its rows.
    pub(crate) fn media_in(&self, span: Range<usize>) -> impl Iterator<Item = (&MediumSpan, Range<usize>)> {
        let from = self.media.partition_point(|medium| medium.end() <= span.start);
        let here = self.media[from..].iter().take_while(move |medium| medium.first < span.end);
        here.map(move |medium| (medium, span.start.max(medium.first) - medium.first..span.end.min(medium.end()) - medium.first))
    }

    /// The first row behind `done` that cannot be computed yet, because the soft rows of its medium are awaited; the number of rows where all can.
    pub(crate) fn ready(&self, done: usize) -> usize {
        let mut awaited = self.media.iter().filter(|medium| medium.end() > done && medium.encoded().is_none());
        awaited.next().map_or(self.len(), |medium| medium.first.max(done))
    }

    /// Gives the time, height and width positions of the rows in `span`, in order.
    pub(crate) fn positions(&self, span: Range<usize>) -> impl Iterator<Item = [isize; 3]> {
        let mut next = self.media.partition_point(|medium| medium.end() <= span.start);
        span.map(move |row| {
            while self.media.get(next).is_some_and(|medium| medium.end() <= row) {
                next += 1;
            }
            match self.media.get(next) {
                Some(medium) if medium.first <= row => medium.position(row),
                _ => {
                    let shift = next.checked_sub(1).map_or(0, |last| self.media[last].shift_after());
                    [row as isize + shift; 3]
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_bundle::Digest;
    use qhx_media::MediaKind;

    fn image(number: u8, rows: usize, columns: usize) -> Arc<Encoded> {
        Arc::new(Encoded::new(
            MediaKind::Image,
            Digest::of(&[number]),
            rows * columns,
            Some([rows, columns]),
            vec![0.0; rows * columns],
            vec![],
        ))
    }

    fn sound(number: u8, rows: usize) -> Arc<Encoded> {
        Arc::new(Encoded::new(MediaKind::Audio, Digest::of(&[number]), rows, None, vec![0.0; rows], vec![]))
    }

    /// Two rows of text, an image of 2 x 3, a row, an image of 4 x 1, three rows.
    fn rows() -> (Vec<u32>, Vec<MediumSpan>) {
        let ids = vec![1, 2, 9, 9, 9, 9, 9, 9, 3, 9, 9, 9, 9, 4, 5, 6];
        (ids, vec![MediumSpan::new(2, image(1, 2, 3)), MediumSpan::new(9, image(2, 4, 1))])
    }

    fn whole() -> Rows {
        let mut all = Rows::default();
        let (ids, media) = rows();
        all.extend(&ids, &media);
        all
    }

    #[test]
    fn images_take_the_positions_of_their_longer_side() {
        let all = whole();
        let text = |n| [n; 3];
        let mut expected = vec![text(0), text(1)];
        expected.extend([[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]);
        expected.push(text(5));
        expected.extend([[6, 6, 6], [6, 7, 6], [6, 8, 6], [6, 9, 6]]);
        expected.extend([text(10), text(11), text(12)]);
        assert_eq!(all.positions(0..16).collect::<Vec<_>>(), expected);
        for first in 0..16 {
            for end in first..=16 {
                assert_eq!(all.positions(first..end).collect::<Vec<_>>(), expected[first..end], "{first}..{end}");
            }
        }
        let mut heard = Rows::default();
        heard.extend(&[1, 8, 8, 8, 2], &[MediumSpan::new(1, sound(1, 3))]);
        assert_eq!(heard.positions(0..5).collect::<Vec<_>>(), [0, 1, 2, 3, 4].map(text));
    }

    #[test]
    fn a_cut_medium_is_made_whole_again() {
        let (ids, media) = rows();
        let expected: Vec<_> = whole().positions(0..16).collect();
        for cut in 0..16 {
            let mut all = whole();
            all.truncate(cut);
            assert_eq!(all.positions(0..cut).collect::<Vec<_>>(), expected[..cut]);
            assert_eq!(all.common_prefix(&ids, &media), cut);
            let more: Vec<_> = media.iter().filter(|medium| medium.end() > cut).cloned().collect();
            all.extend(&ids[cut..], &more);
            assert_eq!(all.positions(0..16).collect::<Vec<_>>(), expected, "cut at {cut}");
            assert_eq!(all.media().len(), 2);
            let parts: Vec<_> = all.media_in(4..11).map(|(medium, part)| (medium.first, part)).collect();
            assert_eq!(parts, [(2, 2..6), (9, 0..2)]);
        }
    }

    #[test]
    fn rows_of_an_awaited_medium_are_not_ready() {
        let all = whole();
        let mut awaiting = Rows::default();
        let (ids, media) = rows();
        let awaited = |span: &MediumSpan| {
            let Content { kind, digest, grid, .. } = *span.content;
            MediumSpan { content: Arc::new(Content { kind, digest, grid, encoded: OnceLock::new() }), ..span.clone() }
        };
        let late: Vec<MediumSpan> = media.iter().map(awaited).collect();
        awaiting.extend(&ids, &late);
        assert_eq!(awaiting.common_prefix(&ids, &media), 16, "they are known by their content");
        assert_eq!(awaiting.positions(0..16).collect::<Vec<_>>(), all.positions(0..16).collect::<Vec<_>>());
        assert_eq!([0, 1, 2, 4, 8, 9, 12, 13].map(|done| awaiting.ready(done)), [2, 2, 2, 4, 9, 9, 12, 16]);
        late[0].arrive(image(1, 2, 3));
        assert_eq!([0, 2, 10].map(|done| awaiting.ready(done)), [9, 9, 10]);
        late[1].arrive(image(2, 4, 1));
        assert_eq!([0, 10].map(|done| awaiting.ready(done)), [16, 16]);
    }

    #[test]
    fn media_are_compared_by_content() {
        let (ids, media) = rows();
        let all = whole();
        assert_eq!(all.common_prefix(&ids, &media), 16);
        let other = vec![media[0].clone(), MediumSpan::new(9, image(3, 4, 1))];
        assert_eq!(all.common_prefix(&ids, &other), 9, "another second image");
        assert_eq!(all.common_prefix(&ids, &[MediumSpan::new(2, image(7, 2, 3)), media[1].clone()]), 2, "another first image");
        assert_eq!(all.common_prefix(&ids, &media[..1]), 9, "placeholders for nothing");
        assert_eq!(all.common_prefix(&ids, &[]), 2);
        assert_eq!(all.common_prefix(&ids[..5], &[]), 2);
        assert_eq!(all.common_prefix(&[1, 7], &[]), 1);
        let moved = vec![MediumSpan::new(3, image(1, 2, 3)), media[1].clone()];
        assert_eq!(all.common_prefix(&ids, &moved), 2, "the same image elsewhere");
    }
}
